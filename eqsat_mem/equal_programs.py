"""The programs that rules make equal to one, as extraction chooses them, with what their searches have found out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from eqsat_mem.deadline import Deadline
from eqsat_mem.egraph.extract import Extraction, as_written, extractions
from eqsat_mem.egraph.graph import View
from eqsat_mem.egraph.rule_files import RuleSet
from eqsat_mem.events import Extracted, Stepped, tell
from eqsat_mem.ir import Take
from eqsat_mem.ir.mesh import Placement
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.cost_model import term_seconds
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.timing import Known
from eqsat_mem.transforms.contraction_order import reordered
from eqsat_mem.transforms.plan_bodies import calls

if TYPE_CHECKING:  # what few programs need is imported where they do: a first plan would take a tenth longer
    from eqsat_mem.mesh.bodies import Bodies
    from eqsat_mem.mesh.choose import Spread
    from eqsat_mem.schedule.remat import Moved

MEMORY_PRICES = (0.0, 1e-10, 1e-8)
"""Seconds per byte of contractions, blocks and renamed values, for each of which a program is extracted: from fastest to smallest."""
ROWS_PRICE = 1e-6
"""A further price for programs with takes: no rows are taken of computed values where rules allow to compute the rows alone."""
MANY = 6
"""Programs with this many times the terms of a long one compute the same again and again: they are not searched."""
LONG = 200
"""Terms of a program that is long in this respect."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Programs that compute the same, whatever limit they are searched for: the one that was ``written`` is among them."""

    view: View
    written: Extraction
    every: Sequence[Extraction]
    moved: dict[tuple[int, Backend], Moved] = field(default_factory=dict)
    known: dict[tuple[int, Backend], Known] = field(default_factory=dict)
    groups: dict[tuple[Placement, Backend, int | None], tuple[list[list[Spread]], Iterator[list[Spread]]]] = field(default_factory=dict)

    def spread_on(self, placement: Placement, backend: Backend, loops: Bodies, deadline: Deadline) -> Iterator[list[Spread]]:
        """The programs of one device in groups, each made when it is asked for; kept for other limits where there are no bodies to plan."""
        program = self.written.program
        key = placement, backend, loops.limit if any(loops.are_large(call, program) for call in calls(program)) else None
        if key not in self.groups:
            from eqsat_mem.mesh.choose import spread

            every = [self.written, *(ex for ex in self.every if ex is not self.written)]
            self.groups[key] = [], spread(every, placement, backend, loops, deadline)
        made, further = self.groups[key]
        yield from made
        for group in further:
            made.append(group)
            yield group

    def of(self, ex: Extraction, backend: Backend) -> Known:
        """Figures that searches for other limits have computed of one of the programs."""
        key = id(ex), backend
        if key not in self.known:
            self.known[key] = Known.nothing(ex, backend)
        return self.known[key]

    def rematerialised(self, s: Schedule, limit: int, slowest: float, deadline: Deadline) -> Schedule:
        """A schedule with values rematerialised for as long as it takes no more than ``slowest`` seconds; moves of one without loops are
        kept, since no limit changes them."""
        from eqsat_mem.schedule.remat import Moved

        if s.chunks:
            return Moved(s).fitting(limit, slowest, deadline)
        if (key := (id(s.ex), s.backend)) not in self.moved:
            self.moved[key] = Moved(s)
        return self.moved[key].fitting(limit, slowest, deadline)


def extracted_of(view: View, rules: RuleSet, backend: Backend, deadline: Deadline) -> Candidates:
    """The programs of an e-graph that are worth a search: as written, and the cheapest at each price of memory."""
    seconds = partial(term_seconds, backend=backend)
    written = backend.as_emitted(as_written(view))
    has_takes = any(isinstance(term, Take) for term in view.program.terms)
    prices = (*MEMORY_PRICES, ROWS_PRICE) if has_takes else MEMORY_PRICES
    found = [written, *map(backend.as_emitted, extractions(view, seconds, prices, deadline))]
    for ex, price in zip(found, (None, *prices)):
        tell(Extracted(ex, price))
    most = MANY * max(len(written.program.reachable()), LONG)
    found = [ex for ex in found if ex is written or len(ex.program.reachable()) <= most]
    found += [new for ex in found if (new := reordered(ex, rules, seconds)) is not None]
    for ex in found:
        ex.program.matched = frozenset(view.matches)
    tell(Stepped("pass", Counter(name for ex in found for name in ex.program.passes)))
    return Candidates(view, written, list({str(ex.program): ex for ex in reversed(found)}.values())[::-1])  # one per program text
