"""The schedules that a search looked at, and the reasons for which it did not choose them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from eqsat_mem.egraph.saturate import rule_of
from eqsat_mem.events import Event, Extracted, Kept, Nesting, Scheduled, Searched, Stepped
from eqsat_mem.reports.outline import outline
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.units import format_bytes, times_as_long

MOST_RIVALS = 8
"""The number of runners-up that are listed."""
CLOSE = 1.001
"""The factor up to which two predicted times count as one."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A schedule that was found and not chosen.

    Attributes:
        program: where its program comes from: as written, or extracted at some price of memory.
        loops: its loop tree in one line.
        peak_bytes: its predicted peak.
        seconds: its predicted time.
        why: why it lost.
    """

    program: str
    loops: str
    peak_bytes: int
    seconds: float
    why: str


class SearchRecord:
    """A listener that keeps what the outermost search looks at; of the searches of bodies inside only the rules."""

    def __init__(self) -> None:
        self.searched: list[Searched] = []
        self.extracted: dict[str, list[float | None]] = {}
        self.kept: list[Schedule] = []
        self.best: list[Schedule] = []
        self.first_step: dict[str, int] = {}
        self.matches: Counter[str] = Counter()
        self._nesting, self._step = Nesting(), 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self._match(event)
        if self._nesting.is_inside(event):
            return
        match event:
            case Searched():
                self.searched.append(event)
            case Extracted():
                self.extracted.setdefault(str(event.extraction.program), []).append(event.price)
            case Kept():
                self.kept += event.schedules
            case Scheduled():
                self.best.append(event.schedule)

    def _match(self, event: Stepped) -> None:
        if not event.matches:
            return
        self._step += 1
        for name, count in event.matches.items():
            self.first_step.setdefault(rule_of(name), self._step)
            self.matches[rule_of(name)] += count

    def rules_fired(self) -> list[str]:
        """The rules that matched and the passes that changed a program, in the order in which they first did, by name within a step."""
        return sorted(self.first_step, key=lambda name: (self.first_step[name], name))

    def origin(self, s: Schedule) -> str:
        """The origin of a schedule's program."""
        prices = self.extracted.get(str(s.ex.program), [])
        if None in prices:
            return "as written"
        return "extracted at " + ", ".join(f"{price:g}" for price in prices) + " s per byte" if prices else "with values computed again"


def rivals(seen: SearchRecord, plan: Schedule, limit: int) -> list[Rival]:
    """The runners-up of a search: the best schedule of each program, then what was kept on the way, the closest first."""
    every: dict[tuple[str, str], Schedule] = {}
    for s in [plan, *seen.best, *seen.kept]:
        every.setdefault((str(s.ex.program), outline(s)), s)
    others = [s for s in every.values() if s is not plan and (s.peak_bytes, s.seconds) != (plan.peak_bytes, plan.seconds)]
    first = [s for s in others if any(s is best for best in seen.best)]
    rest = [s for s in others if not any(s is best for best in seen.best)]

    def closeness(s: Schedule) -> tuple[bool, float]:
        return not s.fits(limit), s.seconds if s.fits(limit) else s.peak_bytes

    chosen = (sorted(first, key=closeness) + sorted(rest, key=closeness))[:MOST_RIVALS]
    return [
        Rival(program=seen.origin(s), loops=outline(s), peak_bytes=s.peak_bytes, seconds=s.seconds, why=_why(s, plan, limit))
        for s in sorted(chosen, key=closeness)
    ]


def _why(s: Schedule, plan: Schedule, limit: int) -> str:
    if not s.fits(limit):
        return f"{format_bytes(s.peak_bytes - limit)} over the limit"
    if s.seconds * CLOSE < plan.seconds:
        return "predicted to be faster: the plan was chosen by what was measured, or by what XLA holds"
    if s.seconds > plan.seconds * CLOSE:
        return times_as_long(s.seconds / plan.seconds)
    if len(s.chunks) > len(plan.chunks):
        return "as fast, with more loops"
    if s.peak_bytes > plan.peak_bytes:
        return "as fast, but fills more of the limit"
    return "as fast; the plan came first among equals"
