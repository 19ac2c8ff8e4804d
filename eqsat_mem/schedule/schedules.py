"""A schedule: an extracted program as a loop tree with chunk sizes, and what it is predicted to hold and to take."""

from __future__ import annotations

from dataclasses import dataclass

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Block
from eqsat_mem.ir.loop_tree import Chunks, Seq
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.split import region

Split = tuple[int, int]
"""A step of the search: an index, and which of the ways to split a region along it."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """A loop tree with its chunk sizes, predicted peak in bytes and predicted seconds; ``splits`` made it from the straight program."""

    ex: Extraction
    backend: Backend
    seq: Seq
    chunks: Chunks
    peak_bytes: int
    seconds: float
    splits: tuple[Split, ...] = ()

    def fits(self, limit: float) -> bool:
        return self.peak_bytes <= limit

    @property
    def is_complete(self) -> bool:
        """Whether it has a plan of each body of the user's loops that needs one: there is none where nothing fits the room that is left."""
        terms = map(self.ex.program.terms.__getitem__, self.ex.program.reachable())
        return all(term.call.fit for term in terms if isinstance(term, Block))


def unscheduled(ex: Extraction, backend: Backend) -> Schedule:
    """A program as its author wrote it, to be emitted: nothing is predicted."""
    return Schedule(ex, backend.plain(), region(ex), {}, 0, 0.0)
