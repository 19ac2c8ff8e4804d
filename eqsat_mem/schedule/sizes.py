"""Extents of indices around a region, and the bytes of values at them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

from eqsat_mem.ir import bits
from eqsat_mem.ir.loop_tree import Chunks, Loop, Seq


class Extents(tuple[int, ...]):
    """The extents of all indices at some place of a tree: hashed once, and the same object wherever the same chunks are around.

    Figures of regions are looked up by it, far more often than there are different ones.
    """

    _changed: dict[tuple[int, int], Extents]
    _every: dict[tuple[int, ...], Extents]
    """All that were made of one, by their numbers."""

    def __new__(cls, extents: Iterable[int]) -> Self:
        new = super().__new__(cls, extents)
        new._changed, new._every = {}, {tuple(new): new}
        return new

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__

    def with_extent(self, index: int, extent: int) -> Extents:
        """These extents but for one."""
        known = self._changed.get((index, extent))
        if known is None:
            new = (*self[:index], extent, *self[index + 1 :])
            if new not in self._every:
                self._every[new] = made = Extents(new)
                made._every = self._every
            known = self._changed[index, extent] = self._every[new]
        return known


def extent_of(extents: Sequence[int], mask: int) -> int:
    """The product of the extents of a set of indices."""
    out = 1
    for i in bits(mask):
        out *= extents[i]
    return out


def extents_inside(extents: Extents, loop: Loop, chunks: Chunks) -> Extents:
    """The extents inside a loop's body."""
    return extents.with_extent(loop.index, min(chunks[loop], extents[loop.index]))


def region_of(step: Loop | Seq, extents: Extents, chunks: Chunks) -> tuple[Seq, Extents]:
    """The region inside of a step, and the extents in it."""
    return (step, extents) if isinstance(step, Seq) else (step.body, extents_inside(extents, step, chunks))


class Sizes(dict[int, int]):
    """Bytes of values, by term, at the same extents: each is computed when it is asked for, which is often."""

    def __init__(self, extents: Sequence[int], layouts: Sequence[Sequence[int]], widths: Sequence[int]) -> None:
        super().__init__()
        self._extents, self._layouts, self._widths = extents, layouts, widths

    def __missing__(self, t: int) -> int:
        out = self._widths[t]
        for i in self._layouts[t]:
            out *= self._extents[i]
        self[t] = out
        return out
