"""The record of planning by which a plan can be explained; the modules that explain it are imported when that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from eqsat_mem.events import listening
from eqsat_mem.ir import Program
from eqsat_mem.options import Options
from eqsat_mem.reports.plan import Plan
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.search import Schedule

if TYPE_CHECKING:
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
    loaded: Program
    names: Mapping[str, int]
    settings: Callable[[], AbstractContextManager[None]] = nullcontext
    _explained: list[Explanation] = field(default_factory=list, repr=False)

    def explain(self, plan: Plan) -> Explanation:
        """Explain ``plan``, which was made with this record: see :meth:`Plan.explain`."""
        from eqsat_mem.reports.explain import explained
        from eqsat_mem.reports.progress import on_terminal

        if not self._explained:
            with self.settings(), on_terminal(plan.name):
                self._explained.append(explained(plan, self))
        return self._explained[0]

    def timelines(self, plan: Plan) -> tuple[list[Point], list[Point]]:
        """Memory over the points of the program as written, and over those of ``plan``."""
        from eqsat_mem.reports.timeline import timeline

        return timeline(self.before), timeline(plan.schedule)

    def show(self, plan: Plan, path: str | PathLike[str] | None) -> Any:
        """A picture of both timelines: see :meth:`Plan.show`."""
        from eqsat_mem.reports.picture import draw

        return draw(plan.name, *self.timelines(plan), plan.limit_bytes, path)

    def search(self) -> tuple[SearchRecord, Schedule]:
        """Run the search once more: a record of the schedules that it saw on the way, and its best schedule."""
        from eqsat_mem.reports.runners_up import SearchRecord

        seen = SearchRecord()
        with self.settings(), listening(seen):
            best = self.again()
        return seen, best
