"""The values that loops read position by position along unrolled indices.

Such values are decomposed outside of the loops into one array per position, a column, which the loops then slice, so that no iteration
reads with a stride.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Map, children
from eqsat_mem.ir.loop_tree import Loop, Seq, made
from eqsat_mem.schedule.fusion import Fused


@dataclass(frozen=True)
class Reads:
    """The arrays that a part of a program reads.

    Attributes:
        apart: the arrays read position by position along unrolled indices.
        whole: the arrays read in any other way; some may be in both.
    """

    apart: frozenset[int]
    whole: frozenset[int]

    def without(self, own: Iterable[int]) -> Reads:
        """Return the reads except those of the terms ``own``."""
        return Reads(self.apart.difference(own), self.whole.difference(own))


NOTHING = Reads(frozenset(), frozenset())

Kernels = Callable[[Seq], Fused]
"""A function that returns the kernels of a region."""


@dataclass(eq=False)
class Columns:
    """The arrays that the regions of one program read position by position.

    The kernels of regions are given with each question: who answers it keeps these tables, and tables that led back to it would be garbage
    that only a collection frees.
    """

    ex: Extraction
    _reads: dict[Seq, Reads] = field(default_factory=dict)
    _reads_by_loops: dict[Seq, Reads] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._unrolled = any(self.ex.unrolls.values())

    def read_by_loops(self, seq: Seq, kernels: Kernels) -> Reads:
        """Return the arrays that the loops of a region and of its nested sequences read from outside of the loop or the sequence."""
        known = self._reads_by_loops.get(seq)
        if known is None and not self._unrolled:
            return NOTHING
        if known is None:
            steps = (step for step in seq.steps if not isinstance(step, int))
            every = (
                self.reads(step.body, kernels) if isinstance(step, Loop) else self.read_by_loops(step, kernels).without(made(step))
                for step in steps
            )
            known = self._reads_by_loops[seq] = _merged(every)
        return known

    def reads(self, seq: Seq, kernels: Kernels) -> Reads:
        """Return the arrays that a region reads from outside of itself."""
        known = self._reads.get(seq)
        if known is None:
            inside = (step.body if isinstance(step, Loop) else step for step in seq.steps if not isinstance(step, int))
            every = _merged([self._read_by_kernels(kernels(seq)), *(self.reads(part, kernels) for part in inside)])
            known = self._reads[seq] = every.without(made(seq))
        return known

    def _read_by_kernels(self, fused: Fused) -> Reads:
        program = self.ex.program
        apart, whole = set[int](), set[int]()
        for members in fused.members:
            written_out, own = 0, frozenset(members)
            for t in reversed(members):  # users first
                written_out |= self.ex.unrolls.get(t, 0)
                for c in children(program.terms[t]):
                    if c not in own:
                        (apart if program.free[c] & written_out else whole).add(program.source_of(c))
        return Reads(frozenset(apart), frozenset(whole))

    def beside(self, seq: Seq, kernels: Kernels) -> Iterator[tuple[int, int, int]]:
        """Yield the values of a region that are held in addition to their columns.

        If nothing else reads a value, only its columns remain: XLA computes the columns of an elementwise value directly, and any other
        value is dead once its columns are computed.

        Yields:
            The value, and the positions of the first and the last kernel at which both are held.
        """
        fused, read = kernels(seq), self.read_by_loops(seq, kernels)
        for position, step in enumerate(fused.kept if read.apart else ()):
            for t in read.apart.intersection(made(step)):
                operands = (own for kernel, own in zip(fused.kept, fused.operands, strict=True) if isinstance(kernel, int))
                if t in read.whole or t in seq.outs or any(t in own for own in operands):
                    yield t, position, fused.last_use[t]
                elif not isinstance(step, int) or not isinstance(self.ex.program.terms[step], Map):
                    yield t, position, position


def _merged(reads: Iterable[Reads]) -> Reads:
    """Return the union of several reads."""
    parts = list(reads)
    return Reads(frozenset().union(*(r.apart for r in parts)), frozenset().union(*(r.whole for r in parts)))
