"""The record of planning by which a plan can be explained; the modules that explain it are imported when that is asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from eqsat_mem.ir import Program
from eqsat_mem.options import Options, check_seconds
from eqsat_mem.reports.plan import Plan
from eqsat_mem.reports.plan_files import Identity, identity
from eqsat_mem.reports.plan_text import headline
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.schedules import Schedule

if TYPE_CHECKING:
    from eqsat_mem.reports.explain import Searches
    from eqsat_mem.reports.explanation import Explanation
    from eqsat_mem.reports.runners_up import SearchRecord
    from eqsat_mem.reports.timeline import Point

Scheduler = Callable[..., Schedule]
"""The type of :func:`eqsat_mem.schedule.search.fastest`, or of the same with a memory."""


@dataclass(frozen=True, eq=False)
class Record:
    """The record of planning by which its plan can be explained.

    Attributes:
        before: the program as written, scheduled without loops.
        backend: the backend that the plan was made for.
        limit_bytes: the limit that the plan was searched for.
        again: the search, to be run with names of rules to leave out and a scheduler; it gives its best schedule.
        options: the options of the plan.
        jaxpr: the function as traced.
        arg_names: the names of its arguments.
        donated: the positions of the arguments whose memory results may take.
        loaded: the jaxpr as a program, before bodies of its loops were planned.
        names: the terms that variables of the emitted source hold: of the plan's program, or of ``loaded`` where nothing was changed.
        settings: the JAX settings under which the function was traced.
    """

    before: Schedule
    backend: Backend
    limit_bytes: int
    again: Callable[..., Schedule]
    options: Options
    jaxpr: Any
    arg_names: tuple[str, ...]
    donated: tuple[int, ...]
    loaded: Program
    names: Mapping[str, int]
    settings: Callable[[], AbstractContextManager[None]] = nullcontext
    _searches: list[Searches] = field(default_factory=list, repr=False)
    _explained: list[Explanation] = field(default_factory=list, repr=False)

    @property
    def identity(self) -> Identity:
        """The identity of the planned program, by which another process recognises it."""
        return identity(self.jaxpr, self.arg_names, self.donated)

    def explain(self, plan: Plan, max_seconds: float | None = None, now: Callable[[], float] = time.monotonic) -> Explanation:
        """Explain ``plan``, which was made with this record: see :meth:`Plan.explain`.

        Asked again after the time was too short, it goes on where it stopped. ``now`` is the clock, in seconds.
        """
        from eqsat_mem.deadline import Deadline
        from eqsat_mem.reports.explain import explained
        from eqsat_mem.reports.progress import on_stderr

        if max_seconds is not None:
            check_seconds(max_seconds, "max_seconds")
        if not self._explained:
            with self.settings(), on_stderr(plan.name):
                why = explained(plan, self, Deadline(math.inf if max_seconds is None else max_seconds, now))
            if why.unasked or not why.searches:
                return why
            self._explained.append(why)
        return self._explained[0]

    def timelines(self, plan: Plan) -> tuple[list[Point], list[Point]]:
        """Memory over the points of the program as written, and over those of ``plan``."""
        from eqsat_mem.reports.timeline import timeline

        return timeline(self.before), timeline(plan.schedule)

    def show(self, plan: Plan, path: str | PathLike[str] | None) -> Any:
        """A picture of both timelines: see :meth:`Plan.show`."""
        from eqsat_mem.reports.parts import parts_of
        from eqsat_mem.reports.picture import draw

        before, after = self.timelines(plan)
        timelines = [("as written", before, parts_of(self.before, before, as_written=True))]
        if not plan.unchanged:
            timelines.append(("as planned", after, parts_of(plan.schedule, after)))
        return draw(f"{plan.name} {headline(plan)}", timelines, plan.limit_bytes, path)

    def search(self) -> tuple[SearchRecord, Schedule]:
        """A record of the schedules that the search saw on the way, and its best one; the search is run once more if it was not yet."""
        with self.settings():
            first = self.searches()
        return first.seen, first.best

    @property
    def searched(self) -> bool:
        """Whether the search has been run once more, so that :meth:`search` takes no time."""
        return bool(self._searches)

    def searches(self) -> Searches:
        """The searches of explanations, the first of which is run where it was not yet."""
        from eqsat_mem.reports.explain import Searches

        if not self._searches:
            self._searches.append(Searches(self))
        return self._searches[0]
