"""The times by which a tuned plan was chosen, and how they print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eqsat_mem.units import count, time_text


@dataclass(frozen=True, kw_only=True)
class MeasuredPlan:
    """A program that was run to be compared with others.

    Attributes:
        program: ``as written``, or its loop tree in one line.
        seconds: the median of its times.
        runs: how many times it ran after the first.
        predicted_s: its predicted seconds.
        peak_bytes: the bytes that XLA reserves for it.
        position: its place among those that were considered, the one that predictions choose at 0.
    """

    program: str
    seconds: float
    runs: int
    predicted_s: float
    peak_bytes: int
    position: int


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The measurements of :func:`eqsat_mem.optimize` with ``tune``: which programs ran, and what came of it.

    Attributes:
        bound_s: the seconds that were given.
        plans: the programs that ran, the chosen one first, then as they were considered; empty where predictions chose.
        arguments: what they ran with.
        struck: whether the seconds were over before all that was considered had been measured.
        reason: why nothing was measured; else empty.
    """

    bound_s: float
    plans: Sequence[MeasuredPlan] = ()
    arguments: str = ""
    struck: bool = False
    reason: str = ""

    def __str__(self) -> str:
        if not self.plans:
            return f"nothing was measured: {self.reason}"
        times = [time_text(plan.seconds) for plan in self.plans]
        others = f", {', '.join(times[1:])}" if times[1:] else ""
        end = f"; the {time_text(self.bound_s)} for it were over then" if self.struck else ""
        return f"measured {count(len(times), 'plan')} on {self.arguments}: {times[0]} chosen{others}{end}"
