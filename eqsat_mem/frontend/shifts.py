"""Shifted copies as takes: ``x[1:] - x[:-1]`` is made in chunks of rows as everything else is.

A slice binds the axis that it cuts, as a padding and a concatenation do, so that what is computed of them stays whole along it. Where
nothing fits otherwise, they are read at positions: a slice at those from its start on, a padding and a concatenation at positions that
tell of each element which part it comes from. A part is read outside of it, too, where its elements are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import reduce

import jax
import numpy as np

from eqsat_mem.ir import Axis, Block, Iota, Literal, Map, Program, Take, mask_of
from eqsat_mem.passes import EVERY, SHIFTS, Pass

MOST_PARTS = 4
"""A concatenation of more parts stays one: each element would be read from all of them."""
PLACES, TRUTH = np.dtype(np.int32), np.dtype(bool)


def with_shifts(program: Program, passes: Collection[Pass] = EVERY) -> Program | None:
    """The program with takes in place of slices, paddings and concatenations, ``None`` where there are none."""
    return _Shifting(program).run() if SHIFTS in passes else None


class _Clash(Exception):
    """A value would be read at positions along an index that it has already: names of two axes are exchanged."""


@dataclass
class _Shifting:
    """One rewriting: of each take that stands for a slice, along one axis, where it starts and its stride."""

    old: Program
    cuts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def run(self) -> Program | None:
        ways: dict[str, Callable[[Program, Block], int | None]] = {
            "slice": self._slice,
            "split": self._piece,
            "concatenate": self._concatenation,
            "pad": self._padding,
        }
        changed = False

        def read(new: Program, t: int, ids: Mapping[int, int]) -> int | None:
            nonlocal changed
            term = self.old.on(t, ids)
            if not isinstance(term, Block) or term.call.prim.name not in ways or jax.dtypes.issubdtype(term.dtype, jax.dtypes.extended):
                return None
            try:
                found = ways[term.call.prim.name](new, term)
            except _Clash:
                return None
            changed |= found is not None
            return found

        new, _ = self.old.rewritten(read)
        if not changed:
            return None
        new.passes |= {SHIFTS.name}
        return new

    def _slice(self, new: Program, term: Block) -> int | None:
        """The elements from a start in even steps, along each axis that is cut."""
        call, params = term.call, term.call.params
        (before,), (after,) = call.in_axes, call.out_axes
        cut = [d for d, (b, a) in enumerate(zip(before, after, strict=True)) if b != a]
        if not all(len(before[d]) == 1 and len(after[d]) <= 1 and new.extent(mask_of(after[d])) for d in cut):
            return None
        found = term.args[0]
        for d in cut:
            start, stride = params["start_indices"][d], 1 if params["strides"] is None else params["strides"][d]
            found = self._part(new, found, before[d], after[d], start, stride)
        return found

    def _piece(self, new: Program, term: Block) -> int | None:
        """The elements of one piece of an axis that is split."""
        call, d = term.call, term.call.params["axis"]
        before, after = call.in_axes[0][d], call.out_axes[term.out][d]
        if len(before) != 1 or len(after) > 1 or not new.extent(mask_of(after)):
            return None
        return self._part(new, term.args[0], before, after, sum(call.params["sizes"][: term.out]), 1)

    def _part(self, new: Program, t: int, before: Axis, after: Axis, start: int, stride: int) -> int:
        """A part of a value, whose axis is called otherwise."""
        place = new.add(Iota(PLACES, after[0])) if after else _number(new, 0)
        taken = _cut(new, t, before[0], place, start, stride)
        if taken != t:
            self.cuts[taken] = start, stride
        return taken

    def _concatenation(self, new: Program, term: Block) -> int | None:
        """The part that each position belongs to, read at what is left of the position."""
        call, d = term.call, term.call.params["dimension"]
        axes, after = [axes[d] for axes in call.in_axes], call.out_axes[0][d]
        extents = [new.extent(mask_of(axis)) for axis in axes]
        if len(term.args) > MOST_PARTS or len(after) != 1 or 0 in extents or any(len(axis) > 1 for axis in axes):
            return None
        place, starts = new.add(Iota(PLACES, after[0])), np.cumsum([0, *extents[:-1]]).tolist()
        first, *others = (self._read(new, part, axis, _moved(new, place, -s)) for part, axis, s in zip(term.args, axes, starts))

        def joined(found: int, later: tuple[int, int]) -> int:
            beyond = new.add(Map(TRUTH, "ge", (place, _number(new, later[0]))))
            return new.add(Map(term.dtype, "select_n", (beyond, found, later[1])))

        return reduce(joined, zip(starts[1:], others), first)

    def _padding(self, new: Program, term: Block) -> int | None:
        """The operand at positions less what is before it, and the value beside it; what is less than nothing cuts the operand."""
        call, (found, value) = term.call, term.args
        for before, after, (low, high, between) in zip(call.in_axes[0], call.out_axes[0], call.params["padding_config"], strict=True):
            if (low, high, between) == (0, 0, 0):
                continue
            extent = new.extent(mask_of(before))
            if between or len(after) != 1 or len(before) > 1 or not extent or not new.extent(mask_of(after)):
                return None
            place = new.add(Iota(PLACES, after[0]))
            ends = [(op, n) for op, n, beside in (("ge", low, low), ("lt", low + extent, high)) if beside > 0]
            inside = [new.add(Map(TRUTH, op, (place, _number(new, n)))) for op, n in ends]
            found = self._read(new, found, before, _moved(new, place, -low))
            if inside:
                both = inside[0] if len(inside) == 1 else new.add(Map(TRUTH, "and", tuple(inside)))
                found = new.add(Map(term.dtype, "select_n", (both, value, found)))
        return found

    def _read(self, new: Program, part: int, axis: Axis, place: int) -> int:
        """A part at a place, where it has that place: anywhere else it may be anything, so that what is cut of is read there, too."""
        if not axis or not new.free[part] >> axis[0] & 1:
            return part
        term = new.terms[part]
        if isinstance(term, Take) and part in self.cuts:
            if new.free[term.positions] >> axis[0] & 1:
                return _cut(new, term.arg, term.index, place, *self.cuts[part])
            if not new.free[term.arg] & new.free[place] & ~mask_of(axis):
                return new.add(Take(term.dtype, term.index, term.positions, self._read(new, term.arg, axis, place)))
        return _taken(new, axis[0], place, part)


def _taken(program: Program, index: int, place: int, t: int) -> int:
    if program.free[t] & program.free[place] & ~(1 << index):
        raise _Clash
    return program.add(Take(program.terms[t].dtype, index, place, t))


def _cut(program: Program, t: int, index: int, place: int, start: int, stride: int) -> int:
    """A value at ``start`` and ``stride`` times a place."""
    if not program.free[t] >> index & 1:
        return t
    strided = place if stride == 1 else program.add(Map(PLACES, "mul", (place, _number(program, stride))))
    return _taken(program, index, _moved(program, strided, start), t)


def _moved(program: Program, place: int, by: int) -> int:
    """A place so much further on."""
    return program.add(Map(PLACES, "add", (place, _number(program, by)))) if by else place


def _number(program: Program, n: int) -> int:
    return program.add(Literal.of(n, PLACES))
