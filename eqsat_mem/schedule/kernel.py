"""One kernel of a region, of which backends say how long it takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Block, Term
from eqsat_mem.ir.ops import block_op


class Kernel(NamedTuple):
    """One kernel of a region, as the time model sees it.

    Attributes:
        ex: the program with what rules allow.
        step: the term that the kernel keeps.
        members: the terms that it computes, ascending.
        operands: the kept values that it reads.
        extents: the extents of all indices where it runs.
        nbytes: bytes of its result.
        moved: bytes that it reads and writes.
        outside: whether it runs outside of all loops.
        emitted: whether it runs as emitted source, not as its author wrote it.
        unrolled: whether it computes a fold that is unrolled, element by element.
        stacked: whether the loop around it stacks its result.
    """

    ex: Extraction
    step: int
    members: Sequence[int]
    operands: Collection[int]
    extents: Sequence[int]
    nbytes: int
    moved: int
    outside: bool
    emitted: bool
    unrolled: bool
    stacked: bool

    @property
    def term(self) -> Term:
        return self.ex.program.terms[self.step]


def moves(term: Term | None) -> bool:
    """Whether an operation only moves elements."""
    return isinstance(term, Block) and block_op(term.call.prim.name).moves
