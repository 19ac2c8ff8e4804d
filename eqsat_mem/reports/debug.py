"""``EQSAT_MEM_DEBUG=1..5``: the steps of planning on stderr; each level adds to those below it.

1. plans: when planning of a function or of a loop's body begins and ends, and the seconds of each stage.
2. decisions: the e-graph's size as it grows and why it stopped; what each extracted program's best schedule holds and takes; what XLA
   holds for it.
3. programs: the terms of the program as loaded and of each extraction, and how often each rule matched.
4. trees: the loop trees that the search keeps, round by round.
5. everything: every loop tree that it tries, and the source that is emitted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from eqsat_mem.errors import OptionError
from eqsat_mem.events import (
    Began,
    Compiled,
    Ended,
    Event,
    Extracted,
    Kept,
    Loaded,
    Saturated,
    Scheduled,
    Settled,
    StageEnded,
    Tried,
)
from eqsat_mem.reports.outline import outline
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.units import format_bytes, time_text

VARIABLE = "EQSAT_MEM_DEBUG"
HIGHEST = 5


def debug_level() -> int | None:
    """Return the level set by ``EQSAT_MEM_DEBUG``; None if it is unset or empty.

    Raises:
        OptionError: if its value is not a whole number from 0 to 5.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if text not in map(str, range(HIGHEST + 1)):
        raise OptionError(f"{VARIABLE} must be a whole number from 0 (nothing) to {HIGHEST} (everything), not {text!r}.")
    return int(text)


class Debug:
    """A listener that writes lines about the events of its level and of lower ones; those of inner plans are indented."""

    def __init__(self, level: int, stream: TextIO | None = None) -> None:
        self.level = level
        self.stream = stream or sys.stderr
        self.depth = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Ended):
            self.depth -= 1
        for kind, level, say in LINES:
            if level <= self.level and isinstance(event, kind):
                self.stream.writelines(f"eqsat_mem: {'  ' * self.depth}{line}\n" for line in say(event))
        if isinstance(event, Began):
            self.depth += 1


def _ended(event: Ended) -> Iterable[str]:
    plan = event.plan
    if plan is None:
        yield f"no plan of {event.name}"
        return
    verdict = "left as written" if plan.unchanged else outline(plan.schedule)
    yield f"planned {event.name}: {format_bytes(plan.peak_bytes)} instead of {format_bytes(plan.original_peak_bytes)}, {verdict}"


def _saturated(event: Saturated) -> Iterable[str]:
    view = event.view
    nodes = sum(map(len, view.nodes))
    yield f"e-graph: {len(view.nodes)} classes, {nodes} nodes, {view.rows} rows, stopped: {view.stopped}"


def _schedule(s: Schedule) -> str:
    return f"{format_bytes(s.peak_bytes)}, {time_text(s.seconds)}, {outline(s)}"


def _terms(title: str, program: Any) -> list[str]:
    return [title, *(f"  {line}" for line in str(program).splitlines())]


def _extracted(event: Extracted) -> list[str]:
    price = "as written" if event.price is None else f"at {event.price:g} s per byte"
    return _terms(f"program {price}", event.extraction.program)


def _source(event: Ended) -> list[str]:
    return [] if event.plan is None else ["emitted source", *(f"  {line}" for line in event.plan.source.splitlines())]


LINES: tuple[tuple[type[Event], int, Callable[[Any], Iterable[str]]], ...] = (
    (Began, 1, lambda e: [f"planning {e.name} within {format_bytes(e.limit_bytes)}"]),
    (StageEnded, 1, lambda e: [f"{e.stage}: {time_text(e.seconds)}"]),
    (Ended, 1, _ended),
    (Settled, 2, lambda e: [f"{e.ruleset} rests at {e.rows} rows"]),
    (Saturated, 2, _saturated),
    (Scheduled, 2, lambda e: [f"best schedule of a program: {_schedule(e.schedule)} (limit {format_bytes(e.limit_bytes)})"]),
    (Compiled, 2, lambda e: [f"XLA holds {format_bytes(e.held_bytes)}, predicted {format_bytes(e.predicted_bytes)}"]),
    (Loaded, 3, lambda e: _terms("program as loaded", e.program)),
    (Saturated, 3, lambda e: [f"matches: {', '.join(f'{name} {n}' for name, n in e.view.matches.items()) or 'none'}"]),
    (Extracted, 3, _extracted),
    (Kept, 4, lambda e: [f"kept {k}: {_schedule(s)}" for k, s in enumerate(e.schedules, 1)]),
    (Tried, 5, lambda e: [f"tried {_schedule(e.schedule)}"]),
    (Ended, 5, _source),
)
"""Kinds of events, the lowest level at which each is reported, and the lines about it."""
