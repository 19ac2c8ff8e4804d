"""The values that loops read position by position along unrolled indices.

Such values are decomposed outside of the loops into one array per position, a column, which the loops then slice, so that no iteration
reads with a stride.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Map, Program, children
from eqsat_mem.ir.loop_tree import Loop, Seq, made
from eqsat_mem.schedule.fusion import Fused
from eqsat_mem.schedule.kernel import moves


@dataclass(frozen=True)
class Reads:
    """The arrays that a part of a program reads.

    Attributes:
        apart: the arrays read position by position along unrolled indices.
        whole: the arrays read in any other way; some may be in both.
        moved: those from which operations that only move elements read position by position, each with its term under the names of there.
    """

    apart: frozenset[int]
    whole: frozenset[int]
    moved: frozenset[tuple[int, int]] = frozenset()

    def without(self, own: Collection[int]) -> Reads:
        """Return the reads except those of the terms ``own``."""
        return Reads(self.apart.difference(own), self.whole.difference(own), frozenset(read for read in self.moved if read[0] not in own))

    def inside(self, loop: Loop, program: Program) -> Reads:
        """Return the reads of the body of a loop: what is moved has columns if the loop slices it, else it is read where it lies."""
        sliced = frozenset(t for t, read in self.moved if program.free[read] >> loop.index & 1)
        return Reads(self.apart | sliced, self.whole.union(t for t, _ in self.moved) - sliced)


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
                self._of_body(step, kernels) if isinstance(step, Loop) else self.read_by_loops(step, kernels).without(made(step))
                for step in steps
            )
            known = self._reads_by_loops[seq] = _merged(every)
        return known

    def reads(self, seq: Seq, kernels: Kernels) -> Reads:
        """Return the arrays that a region reads from outside of itself."""
        known = self._reads.get(seq)
        if known is None:
            parts = (step for step in seq.steps if not isinstance(step, int))
            inside = (self._of_body(part, kernels) if isinstance(part, Loop) else self.reads(part, kernels) for part in parts)
            known = self._reads[seq] = _merged([self._read_by_kernels(kernels(seq)), *inside]).without(made(seq))
        return known

    def _of_body(self, loop: Loop, kernels: Kernels) -> Reads:
        return self.reads(loop.body, kernels).inside(loop, self.ex.program)

    def _read_by_kernels(self, fused: Fused) -> Reads:
        program = self.ex.program
        apart, whole, moved = set[int](), set[int](), set[tuple[int, int]]()
        for members in fused.members:
            written_out, own = 0, frozenset(members)
            for t in reversed(members):  # users first
                written_out |= self.ex.unrolls.get(t, 0)
                for c in children(program.terms[t]):
                    if c in own:
                        continue
                    source, by_element = program.source_of(c), program.free[c] & written_out
                    if by_element and moves(program.terms[t]):
                        moved.add((source, c))
                    else:
                        (apart if by_element else whole).add(source)
        return Reads(frozenset(apart), frozenset(whole), frozenset(moved))

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
    kinds = ((r.apart for r in parts), (r.whole for r in parts), (r.moved for r in parts))
    return Reads(*(frozenset().union(*kind) for kind in kinds))
