"""Images in tiles that overlap: a network of convolutions runs strip by strip, each with as much beside it as its windows reach.

A convolution binds the axes that its windows lie in, so that one of several needs all of what it reads. Where nothing fits otherwise, the
rows of an image are cut into tiles, which are a batch from then on: its values have an index of tiles, of which loops may run in chunks,
and one of the rows of a tile. How many rows a value needs on either side of a tile follows from its readers, back from results
(:mod:`eqsat_mem.transforms.tile_needs`): windows reach further than what reads them. Rows that lie outside of the image are the padding of
what reads windows. Sums over rows, as the gradients of kernels are, are sums over tiles; what is read otherwise is put together first.

Small values (those of low resolution) are put together, too, and what reads them begins anew, so that what lies beside a tile stays little.
Source of the name: J. Ragan-Kelley et al., Halide, 2013.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jax.extend.core import primitives

from eqsat_mem.frontend.axis_unification import index_order
from eqsat_mem.ir import (
    Axes,
    Axis,
    Block,
    Call,
    Dot,
    Fold,
    Input,
    Iota,
    Literal,
    Map,
    Output,
    Program,
    Rename,
    Take,
    Term,
    axes_mask,
    axes_with_indices,
    bits,
    call_with_indices,
    children,
    folded,
    mask_of,
    with_children,
    with_indices,
)
from eqsat_mem.ir.ops import MONOIDS, Place, Window, block_op
from eqsat_mem.passes import EVERY, TILES, Pass
from eqsat_mem.transforms.tile_families import axes_of, families
from eqsat_mem.transforms.tile_needs import NONE, Needs, Sides, UnfitError, Way

PLACES, TRUTH = np.dtype(np.int32), np.dtype(bool)
OVERLAPS, SHARES = (2.0, 0.5), (1 / 16, 1 / 64)
"""The rows of a tile for each that lies beside it, in the forms of a program, and the share of all that they are at least: with fewer it
holds less, and computes more again."""
LARGEST = 2 / 3
"""The share of all rows that a tile has at most, with those beside it."""


def with_tiles(program: Program, passes: Collection[Pass] = EVERY) -> Iterator[Program]:
    """Yield the program in tiles that overlap, larger ones first; none where no value is made in tiles, or all reach too far."""
    if TILES not in passes:
        return
    for family in families(program):
        try:
            needs = Needs(program, family)
            found = [_Tiling(needs, length).run() for length in _lengths(needs)]
        except UnfitError:
            continue
        if found:
            yield from found
            return


def _lengths(needs: Needs) -> list[int]:
    """The rows of a tile: more and fewer for each that lies beside it, such that tiles are the whole where they can be."""
    if not needs.sides:
        return []
    family = needs.family
    rows, unit = needs.program.indices[family.base].extent, family.unit
    beside = max((math.ceil(sum(sides) / family.rates[needs.index(t)]) for t, sides in needs.sides.items()))
    found = []
    for overlap, share in zip(OVERLAPS, SHARES):
        wanted = max(int(overlap * beside), int(share * rows), 1)
        even = [n for n in range(unit, rows, unit) if rows % n == 0 and wanted / 2 <= n <= 2 * wanted]
        length = min(even, key=lambda n: abs(n - wanted), default=-(-wanted // unit) * unit)
        if length + beside <= LARGEST * rows and length not in found:
            found.append(length)
    return found


@dataclass
class _Tiling:
    """One rewriting into tiles of ``length`` elements of the family's base.

    ``ids`` are the numbers of whole values, ``tiles`` those of what is made in tiles; ``rows`` are the indices of rows of a tile, and
    ``order`` tells where new indices come among all.
    """

    needs: Needs
    length: int
    new: Program = field(init=False)
    tile: int = field(init=False)
    ids: dict[int, int] = field(default_factory=dict)
    tiles: dict[int, int] = field(default_factory=dict)
    rows: dict[tuple[int, Sides], int] = field(default_factory=dict)
    calls: dict[tuple[int, Sides], Call] = field(default_factory=dict)
    order: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.old, self.family = self.needs.program, self.needs.family
        self.new = self.old.empty_like()
        count = max(math.ceil(self.old.indices[i].extent / (self.length * rate)) for i, rate in self.family.rates.items())
        self.tile = self._made("tile", count, (-1, 0))

    def run(self) -> Program:
        """The program in tiles.

        Raises:
            UnfitError: where an operation has windows of other positions than the family says.
        """
        for t in self.old.reachable():
            self._emit(t)
        self.new.outputs = [self._result(output) for output in self.old.outputs]
        self.new.effects = [self.ids[t] for t in self.old.effects]
        self.new.passes |= {TILES.name}
        return _in_order(self.new, self._order())

    def _order(self) -> list[int]:
        """The indices of the new program in order: results and arguments, which are whole, are as they lie in memory; then as it was."""
        given: list[tuple[int, list[int]]] = [(self.new.nbytes(o.term), [i for axis in o.axes for i in axis]) for o in self.new.outputs]
        for t, term in enumerate(self.new.terms):
            if isinstance(term, Input):
                given.append((self.new.nbytes(t), [i for axis in term.axes for i in axis]))
        known = sorted(range(len(self.new.indices)), key=self._place)
        return index_order(known, given, [(1, known)])

    def _place(self, i: int) -> tuple[int, int]:
        """The place of an index of the new program in the end."""
        return self.order.get(i, (i, 0))

    def _made(self, name: str, extent: int, place: tuple[int, int]) -> int:
        made = self.new.new_index(name, extent)
        self.order[made] = place
        return made

    def _emit(self, t: int) -> None:
        """Add a term of the old program to the new one: in tiles, as a sum over tiles, or as it is on operands that are put together."""
        term = self.old.terms[t]
        if t in self.needs.sides:
            self.tiles[t] = self._in_tiles(t, term)
            if t in self.needs.together:
                self.ids[t] = self._put_together(t, self.tiles[t])
        elif self.needs.reads_tiles(t) and not self.needs.cut(t) and (isinstance(term, Fold | Dot) or self.needs.way(t) is not None):
            self.ids[t] = self._in_tiles(t, term)
        else:
            operands = tuple(self._whole(c) for c in children(term))
            self.ids[t] = self.new.add(with_children(term, operands), self.old.source.get(t))

    def _in_tiles(self, t: int, term: Term) -> int:
        if isinstance(term, Block):
            way = self.needs.way(t)
            assert way is not None, "an operation on tiles"
            return self._row_by_row(t, term, way) if way.window is None else self._along_windows(t, term, way, way.window)
        over = folded(term) & self.family.mask
        operands = [self._operand(c, self.needs.of_operand(t, k)) for k, c in enumerate(children(term))]
        to: dict[int, Axis] = {i: (self.tile, self._row(i, NONE)) for i in bits(over)}
        for i, (k, c) in itertools.product(bits(over), enumerate(children(term))):
            if self.old.free[c] >> i & 1:  # of both factors: what lies outside may be no number
                operands[k] = self._filled(operands[k], i, NONE, self._identity(_monoid(term), operands[k]))
        if isinstance(term, Rename):
            to = {i: (self._row(i, self.needs.sides[t]),) for pair in term.pairs for i in pair if i in self.family.rates}
        return self.new.add(with_indices(with_children(term, tuple(operands)), to), self.old.source.get(t))

    def _operand(self, c: int, sides: Sides) -> int:
        return self._read(c, sides) if self.needs.cut(c) else self.ids[c]

    def _identity(self, monoid: str, like: int) -> int:
        """The identity of a monoid in the dtype of a value."""
        dtype = self.new.terms[like].dtype
        return self.new.add(Literal.of(MONOIDS[monoid].identity(dtype), dtype))

    # rows of a tile

    def _per_tile(self, i: int) -> int:
        """The elements of an index in a tile."""
        return int(self.length * self.family.rates[i])

    @property
    def _count(self) -> int:
        return self.new.indices[self.tile].extent

    def _row(self, i: int, sides: Sides) -> int:
        """The index of the rows of a tile that an index has become, with those beside it."""
        if (i, sides) not in self.rows:
            self.rows[i, sides] = self._made(self.old.indices[i].name, self._per_tile(i) + sum(sides), (i, len(self.order)))
        return self.rows[i, sides]

    def _number(self, n: int) -> int:
        return self.new.add(Literal.of(n, PLACES))

    def _positions(self, i: int, sides: Sides) -> int:
        """The position along an index of each row of a tile."""
        add = self.new.add
        start = add(Map(PLACES, "mul", (add(Iota(PLACES, self.tile)), self._number(self._per_tile(i)))))
        row = add(Iota(PLACES, self._row(i, sides)))
        row = add(Map(PLACES, "sub", (row, self._number(sides[0])))) if sides[0] else row
        return add(Map(PLACES, "add", (start, row)))

    def _read(self, c: int, sides: Sides) -> int:
        """A value in tiles with so many rows beside them, which may be anything where they lie outside."""
        i, term, add = self.needs.index(c), self.old.terms[c], self.new.add
        if isinstance(term, Iota):
            return add(Map(term.dtype, "convert_element_type", (self._positions(i, sides),), (("new_dtype", np.dtype(term.dtype)),)))
        if not self.needs.is_tiled(c):
            return add(Take(term.dtype, i, self._positions(i, sides), self.ids[c]))
        have = self.needs.sides[c]
        if have == sides:
            return self.tiles[c]
        row, first = add(Iota(PLACES, self._row(i, sides))), have[0] - sides[0]
        place = add(Map(PLACES, "add", (row, self._number(first)))) if first else row
        return add(Take(term.dtype, self._row(i, have), place, self.tiles[c]))

    def _filled(self, t: int, i: int, sides: Sides, fill: int, rows: int | None = None) -> int:
        """A value whose rows outside of the whole, or after so many ``rows``, are ``fill``."""
        add, extent = self.new.add, self.old.indices[i].extent if rows is None else rows
        ends = [("ge", 0)] if sides[0] else []
        if sides[1] or self._per_tile(i) * self._count > extent:
            ends.append(("lt", extent))
        if not ends:
            return t
        inside = [add(Map(TRUTH, name, (self._positions(i, sides), self._number(n)))) for name, n in ends]
        both = inside[0] if len(inside) == 1 else add(Map(TRUTH, "and", tuple(inside)))
        return add(Map(self.new.terms[t].dtype, "select_n", (both, fill, t)))

    # what is put together

    def _whole(self, c: int) -> int:
        """A value as one array of all rows."""
        if c not in self.ids:
            self.ids[c] = self._put_together(c, self._read(c, NONE))
        return self.ids[c]

    def _put_together(self, c: int, tiles: int) -> int:
        i = self.needs.index(c)
        return self._sliced(tiles, (self.tile, self._row(i, NONE)), (i,), 0, self.old.indices[i].extent)

    def _sliced(self, t: int, before: Axis, after: Axis, start: int, stop: int) -> int:
        """Elements of a value along an axis, which is called otherwise."""
        rest = sorted((j for j in bits(self.new.free[t]) if j not in before), key=self._place)
        outer = sum(self._place(j) < self._place(before[-1]) for j in rest)
        axes: list[Axes] = [(*((j,) for j in rest[:outer]), axis, *((j,) for j in rest[outer:])) for axis in (before, after)]
        starts = tuple(start if axis == before else 0 for axis in axes[0])
        stops = tuple(stop if axis == before else self.new.extent(mask_of(axis)) for axis in axes[0])
        params = {"start_indices": starts, "limit_indices": stops, "strides": None}
        dtype = self.new.terms[t].dtype
        return self.new.add(Block(dtype, Call(primitives.slice_p, params, (axes[0],), (axes[1],), (dtype,), mask_of(rest)), (t,), 0))

    def _result(self, output: Output) -> Output:
        """A result: of tiles that are all rows and no more the rows of all tiles."""
        t = output.term
        if not self.needs.is_tiled(t):
            return replace(output, term=self.ids[t])
        i = self.needs.index(t)
        if self._per_tile(i) * self._count != self.old.indices[i].extent:
            return replace(output, term=self._whole(t))
        axes = axes_with_indices(output.axes, {i: (self.tile, self._row(i, NONE))})
        return replace(output, term=self._read(t, NONE), axes=axes)

    # operations that bind axes

    def _row_by_row(self, t: int, term: Block, way: Way) -> int:
        """An operation that has no windows along rows on tiles."""
        sides = self.needs.sides[t]
        to: dict[int, Axis] = {i: (self._row(i, sides),) for axes in term.call.out_axes for i in bits(self.family.mask & axes_mask(axes))}
        call = self.calls.setdefault((id(term.call), sides), call_with_indices(self._with_tiles(term.call, way.places), to))
        return self.new.add(Block(term.dtype, call, tuple(self._operand(c, sides) for c in term.args), term.out), self.old.source.get(t))

    def _along_windows(self, t: int, term: Block, way: Way, window: Window) -> int:
        """An operation that has windows along rows on tiles: they are a batch, or what is summed, and their padding is what is beside."""
        row = block_op(term.call.prim.name).windows
        assert row is not None, "an operation with windows"
        (read, by), (side, k, a) = axes_of(term, window), window.other
        inner = self.old.extent(mask_of(read[1:]))
        period = self._per_tile(read[0]) * inner * window.gap
        if period != self._per_tile(by[0]) * self.old.extent(mask_of(by[1:])) * window.step:
            raise UnfitError
        (low, high), reach = self.needs.dilated(t), self.needs.reach(t)
        own = self.needs.sides.get(t, NONE)
        operands = [self._operand(c, self.needs.of_operand(t, n)) for n, c in enumerate(term.args)]
        fill = operands[1] if row.monoid is None else self._identity(row.monoid, operands[0])
        operands[0] = self._filled(operands[0], read[0], reach, fill, self._read_rows(read, by, window) if side == "in" else None)
        if side == "in":
            operands[1] = self._filled(operands[1], by[0], NONE, fill)
        extent = (self._per_tile(read[0]) + sum(reach)) * inner
        before = low - reach[0] * inner * window.gap
        after = low + period + high - before - ((extent - 1) * window.gap + 1)
        axis: Axis = (self._row(read[0], reach), *read[1:])
        if not row.cuts and min(before, after) < 0:
            cut = [max(-(n // window.gap), 0) for n in (before, after)]
            shorter = self._made(self.old.indices[read[0]].name, extent - sum(cut), (read[0], len(self.order)))
            operands[0] = self._sliced(operands[0], axis, (shorter,), cut[0], extent - cut[1])
            axis, before, after, extent = (shorter,), before + cut[0] * window.gap, after + cut[1] * window.gap, extent - sum(cut)
        places = {("in", 0, window.operand): axis, (side, k, a): (self._row(by[0], own), *by[1:])}
        if way.aligned:
            second = term.call.in_axes[1][a]
            places["in", 1, a] = (self._row(second[0], own), *second[1:])
        params = row.padded(term.call.params, window.number, before, after, extent)
        call = replace(_with_axes(self._with_tiles(term.call, way.places), places), params=params)
        return self.new.add(Block(term.dtype, call, tuple(operands), 0), self.old.source.get(t))

    def _read_rows(self, read: Axis, by: Axis, window: Window) -> int:
        """The rows that all windows together read: others may be no numbers, which times nothing are none either.

        Raises:
            UnfitError: where the last of these rows is read in part.
        """
        extent, inner = self.old.indices[read[0]].extent, self.old.extent(mask_of(read[1:]))
        last = (self.old.extent(mask_of(by)) - 1) * window.step - window.before + window.span - 1
        places = last // window.gap + 1
        if places < extent * inner and places % inner:
            raise UnfitError
        return min(extent, places // inner)

    def _with_tiles(self, call: Call, places: Mapping[Place, int]) -> Call:
        """A call on arrays of which some axes have the tiles, after so many of their indices."""
        arrays = {"in": call.in_axes, "out": call.out_axes}

        def longer(place: Place) -> Axis:
            (side, k, a), before = place, places[place]
            axis = arrays[side][k][a]
            return (*axis[:before], self.tile, *axis[before:])

        call = _with_axes(call, {place: longer(place) for place in places})
        if any(side == "out" for side, _, _ in places):
            return replace(call, pointwise=call.pointwise | 1 << self.tile)
        return replace(call, folds=call.folds | 1 << self.tile)


def _monoid(term: Term) -> str:
    """The monoid by which a sum over rows folds."""
    return term.monoid if isinstance(term, Fold) else "add"


def _with_axes(call: Call, places: Mapping[Place, Axis]) -> Call:
    """A call on arrays with other axes at some places."""

    def arrays(side: str, before: tuple[Axes, ...]) -> tuple[Axes, ...]:
        return tuple(tuple(places.get((side, k, a), axis) for a, axis in enumerate(axes)) for k, axes in enumerate(before))

    return replace(call, in_axes=arrays("in", call.in_axes), out_axes=arrays("out", call.out_axes))


def _in_order(program: Program, order: Sequence[int]) -> Program:
    """The same program with its indices in another order."""
    to: dict[int, Axis] = {i: (k,) for k, i in enumerate(order)}
    into, calls = program.empty_like(), dict[int, Call]()
    into.indices = [program.indices[i] for i in order]

    def renumbered(_: Program, t: int, ids: Mapping[int, int]) -> Term:
        term = with_indices(program.on(t, ids), to)
        if isinstance(term, Block):
            call = calls.setdefault(id(term.call), call_with_indices(term.call, to))
            term = Block(term.dtype, call, term.args, term.out)
        return term

    new, _ = program.rewritten(renumbered, into=into)
    new.outputs = [replace(o, axes=axes_with_indices(o.axes, to)) for o in new.outputs]
    return new
