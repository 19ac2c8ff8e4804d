"""The search for the fastest schedule of several programs that compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from jax.extend.core import ClosedJaxpr

from eqsat_mem.deadline import Deadline
from eqsat_mem.equal_programs import Candidates
from eqsat_mem.options import Options
from eqsat_mem.ranking import ROUGHLY, better, order
from eqsat_mem.reports.record import Scheduler
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.search import Search
from eqsat_mem.transforms.plan_bodies import BodyPlan

WORTHWHILE = 1.15
"""Times that a plan has to take as long as a program without loops for values of that to be computed again."""

ROOMIER = 1.5
"""Times the limit that loops may hold whose values are computed again, where no loops fit."""

NEAR = 1.25
"""Times the smallest peak of loops that do not fit, up to which the programs of others are searched once more."""


class Planner(Protocol):
    """Plans the bodies of loops and branches."""

    def plan(self, options: Options, backend: Backend, deadline: Deadline, body: ClosedJaxpr, limit: int) -> BodyPlan:
        """The plan of a body for a backend, made until a deadline, under a limit in bytes."""

    def written(self, options: Options, backend: Backend, body: ClosedJaxpr, limit: int) -> BodyPlan:
        """The body as written, without a search."""


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The result of a search: the best schedule, and the program as written; and where the best computes values again, the best that fits
    without that, if there is one."""

    best: Schedule
    before: Schedule
    in_loops: Schedule | None = None

    def of(self, before: Schedule) -> SearchResult:
        """The same, found with loops over equal blocks, of a program as written; its time is that of these loops, priced alike."""
        return replace(self, before=replace(before, seconds=self.before.seconds))


Other = Callable[[int], SearchResult | None]
"""Another search, which may find nothing, where the smallest plan of one holds so many bytes, which are too many."""


def nothing(smallest: int) -> SearchResult | None:
    """No other search."""
    return None


@dataclass(eq=False)
class Once:
    """Another search that is asked once, and finds nothing from then on."""

    search: Other

    def __call__(self, smallest: int) -> SearchResult | None:
        asked, self.search = self.search, nothing
        return asked(smallest)


def best_of(
    searches: Sequence[Search], scheduler: Scheduler, known: Candidates, slowest: float = math.inf
) -> tuple[Schedule, Schedule | None]:
    """The best schedule of all, with values computed again where that fits and loops do not, or where it is faster than they are; and the
    best without those, if it fits, too. What takes more than ``slowest`` seconds is of no use."""
    limit, backend, deadline = searches[0].limit, searches[0].backend, searches[0].deadline
    peaks: list[int] = []

    def remembered(search: Search, rival: Schedule | None) -> Schedule:
        found = scheduler(search, rival)
        peaks.append(found.peak_bytes)
        return found

    best, closest = with_search(searches, remembered)
    if not best.fits(limit) and best.seconds < slowest:  # what is small and left whole may keep larger values whole
        near = [search.with_all_counted() for search, peak in zip(searches, peaks) if peak <= NEAR * min(peaks)]
        best = min(best, with_search(near, scheduler)[0], key=partial(order, limit=limit))
    if not best.fits(limit) and best.seconds < slowest:  # the least memory counts only where none fits; the closest is searched for it
        best = min(best, with_search([closest.with_limit(0, deadline)], scheduler)[0], key=lambda s: s.peak_bytes)
    in_loops, alone = best, [search.straight for search in searches]
    is_slow = not best.fits(limit) or best.seconds > WORTHWHILE * min(s.seconds for s in alone)
    roomier = []
    if is_slow and backend.tie is not None and not deadline.passed():
        roomier = [with_search([closest.with_limit(int(ROOMIER * limit), deadline)], scheduler)[0]]
    for s in [*roomier, *_different([best, *alone])] if backend.tie is not None else ():
        bound = min(slowest, best.seconds) if best.fits(limit) else slowest
        useful = limit if bound < math.inf else best.peak_bytes - 1
        if not s.fits(limit) and WORTHWHILE * s.seconds < bound and _least_bytes(s) <= useful:
            best = min(best, known.rematerialised(s, limit, bound, deadline), key=partial(order, limit=limit))
    return best, (in_loops if in_loops.fits(limit) and in_loops is not best else None)


def _different(schedules: Sequence[Schedule]) -> list[Schedule]:
    """Schedules by what they hold, less those without loops of a program of which another variant of the backend holds no more."""
    by_size, kept = sorted(schedules, key=lambda s: (s.peak_bytes, s.seconds)), dict[int, Schedule]()
    return [s for s in by_size if s.chunks or kept.setdefault(id(s.ex), s) is s]


def _least_bytes(s: Schedule) -> int:
    from eqsat_mem.schedule.remat import least_bytes

    return least_bytes(s)


def with_search(searches: Sequence[Search], scheduler: Scheduler) -> tuple[Schedule, Search]:
    """The best schedule of several programs that compute the same, each searched with the best of those before in sight, and its search."""
    deadline = searches[0].deadline.part(1 / 2)  # the other half is for values that are computed again
    first, *others = (search.with_limit(search.limit, deadline) for search in searches)
    best, of = scheduler(first, None), first
    quickest = best.seconds if best.fits(first.limit) else math.inf
    for search in others:
        if deadline.passed():
            break
        found = scheduler(search, best)
        quickest = min(quickest, found.seconds) if found.fits(search.limit) else quickest
        found = better(best, found, search.limit)
        if found.seconds <= quickest * (1 + ROUGHLY):  # one after the other, each a little slower, is not the way to a slow one
            best, of = found, (of if found is best else search)
    return of.simplified(best), of
