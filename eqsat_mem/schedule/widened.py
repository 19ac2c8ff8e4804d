"""Copies of widened arguments: XLA makes one ahead of the loops that do not change it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from eqsat_mem.ir import Program, bits, is_leaf
from eqsat_mem.ir.loop_tree import Loop, Seq
from eqsat_mem.schedule.fusion import Copy
from eqsat_mem.schedule.strided_reads import Kernels


@dataclass(eq=False)
class Widened:
    """The copies in the regions of one program, whose values have elements of these widths, in bytes; the kernels of regions are given with
    each question, as to :class:`eqsat_mem.schedule.strided_reads.Columns`."""

    program: Program
    widths: Sequence[int]
    _inside: dict[Seq, tuple[Copy, ...]] = field(default_factory=dict)

    def ahead(self, loop: Loop, along: int | None, extents: Sequence[int], kernels: Kernels) -> int:
        """Bytes of the copies that no turn of a loop changes, made ahead of it; without those that are made ahead of the loop around it, if
        there is one, ``along`` an index."""
        copies = self._in(loop.body, kernels)
        inside = {(s.term, s.over): s for s in copies if self.is_unchanged(s, loop.index)} if copies else {}
        return sum(self.nbytes(s, extents) for s in inside.values() if along is None or not self.is_unchanged(s, along))

    def is_unchanged(self, s: Copy, along: int) -> bool:
        """Whether a copy is of a widened argument, all of it whatever a loop along an index does."""
        return self._is_whole(s) and not s.over >> along & 1

    def nbytes(self, s: Copy, extents: Sequence[int]) -> int:
        """The bytes of a copy."""
        return max(self.widths[s.term], 4) * math.prod(extents[i] for i in bits(s.over))

    def _in(self, seq: Seq, kernels: Kernels) -> tuple[Copy, ...]:
        """The copies in a region and in those inside it."""
        known = self._inside.get(seq)
        if known is None:
            fused = kernels(seq)
            found = list(filter(self._is_whole, fused.copies))
            for _, step in fused.nested:
                found += self._in(step if isinstance(step, Seq) else step.body, kernels)
            known = self._inside[seq] = tuple(found)
        return known

    def _is_whole(self, s: Copy) -> bool:
        return s.over == self.program.free[s.term] and is_leaf(self.program.terms[s.term])
