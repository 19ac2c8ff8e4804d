"""Images in tiles that overlap: a network of convolutions runs strip by strip, each with as much beside it as its windows reach.

A convolution binds the axes that its windows lie in, so that one of several needs all of what it reads. Where nothing fits otherwise, the
rows of an image are cut into tiles, which are a batch from then on: its values have an index of tiles, which loops may run in chunks of, and
one of the rows of a tile. How many rows a value needs on either side of a tile follows from its readers, back from results: those of a
windowed operation's operand are more by the reach of the windows. Rows that lie outside of the image are the padding of what reads
windows. Sums over rows, as the gradients of kernels are, are sums over tiles; what is read otherwise is put together first.

Small values (those of low resolution) are put together, too, and what reads them begins anew, so that what lies beside a tile stays little.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jax.extend.core import primitives

from eqsat_mem.ir import (
    Axes,
    Axis,
    Block,
    Call,
    Const,
    Dot,
    Fold,
    Input,
    Iota,
    Literal,
    Map,
    Program,
    Rename,
    Take,
    Term,
    axes_mask,
    bits,
    children,
    folded,
    mask_of,
    with_children,
)
from eqsat_mem.ir.ops import MONOIDS, Group, Window, block_op
from eqsat_mem.ir.terms import call_with_indices, with_indices
from eqsat_mem.passes import EVERY, TILES, Pass
from eqsat_mem.transforms.tile_families import Family, axes_of, families, shapes, windows

PLACES, TRUTH = np.dtype(np.int32), np.dtype(bool)
SMALL = 1 / 8
"""The share of the largest value that has an index which is cut, below which values are put together."""
OVERLAPS = (2.0, 0.5)
"""The rows of a tile for each that lies beside it, in the forms of a program: the fewer the less it holds, and the more is computed again."""

Sides = tuple[int, int]
"""How many elements a value has of a tile before its own, and after them."""


def with_tiles(program: Program, passes: Collection[Pass] = EVERY) -> Iterator[Program]:
    """Yield the program in tiles that overlap, larger ones first, then in such tiles along two axes; none where no value has windows."""
    if TILES not in passes:
        return
    for overlap in OVERLAPS:
        if (found := _tiled(program, overlap)) is not None:
            yield found[0]
    for overlap in OVERLAPS:
        if (found := _tiled(program, overlap)) is not None and (both := _tiled(*found[:1], overlap, found[1])) is not None:
            yield both[0]


def _tiled(program: Program, overlap: float, made: int = 0) -> tuple[Program, int] | None:
    """The program in tiles along the first family of indices that has none of those ``made`` before, and the indices that are made here;
    None where it cannot be cut, or tiles would not be much smaller than the whole."""
    for family in families(program):
        if family.mask & made:
            continue
        try:
            found = _Tiling(program, family).run(overlap)
        except _UnfitError:
            continue
        if found is not None:
            return found
    return None


class _UnfitError(Exception):
    """A program that cannot be cut into tiles along a family."""


@dataclass
class _Tiling:
    """One rewriting: the old program's values by what becomes of them, and the tiles of those that are in tiles."""

    old: Program
    family: Family
    new: Program = field(init=False)
    sides: dict[int, Sides] = field(default_factory=dict)
    together: set[int] = field(default_factory=set)
    ids: dict[int, int] = field(default_factory=dict)
    tiles: dict[int, int] = field(default_factory=dict)
    rows: dict[tuple[int, Sides], int] = field(default_factory=dict)
    calls: dict[tuple[int, Sides], Call] = field(default_factory=dict)
    order: dict[int, tuple[int, int]] = field(default_factory=dict)
    length: int = 0
    tile: int = 0

    def run(self, overlap: float) -> tuple[Program, int] | None:
        old, base = self.old, self.old.indices[self.family.base].extent
        self._classify()
        self._reach()
        beside = max((math.ceil(sum(sides) / self.family.rates[self._index(t)]) for t, sides in self.sides.items()), default=0)
        self.length = self._chosen(max(int(overlap * beside), 1), base)
        count = -(-base // self.length)
        if count < 2 or (self.length + beside) * 1.5 > base:
            return None
        self.new = old.empty_like()
        self.tile = self._made("t", count, (-1, 0))
        for t in old.reachable():
            self._emit(t)
        self.new.outputs = [replace(o, term=self._result(o.term), axes=self._result_axes(o.term, o.axes)) for o in old.outputs]
        self.new.effects = [self.ids[t] for t in old.effects]
        self.new.passes |= {TILES.name}
        order = sorted(range(len(self.new.indices)), key=self._place)
        to = {i: k for k, i in enumerate(order)}
        return _in_order(self.new, order), mask_of(to[i] for i in self.order)

    def _chosen(self, wanted: int, base: int) -> int:
        """The rows of a tile: about as many as wanted, such that tiles are the whole where they can be."""
        unit = self.family.unit
        even = [n * unit for n in range(1, base // unit + 1) if base % (n * unit) == 0 and wanted / 2 <= n * unit <= 2 * wanted]
        return min(even, key=lambda n: abs(n - wanted), default=-(-wanted // unit) * unit)

    def _place(self, i: int) -> tuple[int, int]:
        """Where an index of the new program comes in the end."""
        return self.order.get(i, (i, 0))

    def _made(self, name: str, extent: int, place: tuple[int, int]) -> int:
        made = self.new.new_index(name, extent)
        self.order[made] = place
        return made

    # what becomes of each value

    def _index(self, t: int) -> int:
        """The index of a value that is cut."""
        (found,) = bits(self.old.free[t] & self.family.mask)
        return found

    def _classify(self) -> None:
        """Find the values that are made in tiles, of which ``together`` are put together, too."""
        old, mask = self.old, self.family.mask
        small = SMALL * max(old.nbytes(t) for t in old.reachable() if old.free[t] & mask)
        for t in old.reachable():
            term, cut = old.terms[t], old.free[t] & mask
            if cut.bit_count() > 1:
                raise _UnfitError
            is_read = any(self._is_tiled(c) for c in children(term))
            if not cut or not (is_read or (isinstance(term, Block) and old.nbytes(t) > small)):
                continue
            if isinstance(term, Block) and self._way(term) is None:
                continue
            if isinstance(term, Take) and term.index in self.family.rates:
                continue
            self.sides[t] = (0, 0)
            if old.nbytes(t) <= small and not isinstance(term, Map | Rename):
                self.together.add(t)

    def _is_tiled(self, t: int) -> bool:
        """Whether readers read the tiles of a value."""
        return t in self.sides and t not in self.together

    def _way(self, term: Block) -> tuple[Window | None, Group] | None:
        """How an operation acts on tiles: along its windows, or row by row where it has none along an index that is cut; with the group of
        axes that the tiles are a part of. None where it needs what it reads together."""
        call, mask = term.call, self.family.mask
        if call.effects or call.inside is not None or call.bodies:
            return None
        ways = [w for w in windows(self.old, term) if all(axis and mask >> axis[0] & 1 for axis in axes_of(term, w))]
        cut = mask_of(i for axes in call.out_axes for i in bits(axes_mask(axes) & mask))
        if len(ways) > 1 or not (ways or (cut and not cut & ~call.pointwise)):
            return None
        window = ways[0] if ways else None
        has = {("in", k) for k, a in enumerate(term.args) if self.old.free[a] & mask}
        if window is not None and ("in", 1) in has and window.other[0] == "out" and not self._is_aligned(term):
            return None
        group = self._group(term, has | {("out", k) for k, axes in enumerate(call.out_axes) if axes_mask(axes) & mask})
        return None if group is None else (window, group)

    def _is_aligned(self, term: Block) -> bool:
        """Whether an operation reads its second operand at the places that its result has."""
        row = block_op(term.call.prim.name).windows
        return row is not None and row.aligned

    def _group(self, term: Block, has: Collection[tuple[str, int]]) -> Group | None:
        """The axes of all arrays that have tiles which these may be a part of: axes of one element, else of a batch."""
        row, call, mask = block_op(term.call.prim.name), term.call, self.family.mask
        ins, outs = shapes(self.old, term)
        arrays = {"in": call.in_axes, "out": call.out_axes}
        fitting = []
        for group in (*row.pointwise(ins, outs, call.params), *row.shared(ins, outs, call.params)):
            axes = {arrays[side][k][a] for side, k, a in group}
            if has <= {(side, k) for side, k, _ in group} and len(axes) == 1 and not axes_mask(tuple(axes)) & mask:
                fitting.append((len(next(iter(axes))), group))
        return min(fitting, key=lambda found: found[0])[1] if fitting else None

    def _reach(self) -> None:
        """Find how many rows each value needs on either side of a tile, from its readers."""
        for t in reversed(self.old.reachable()):
            term = self.old.terms[t]
            own = self.sides.get(t, (0, 0))
            way = self._way(term) if isinstance(term, Block) and self._reads_tiles(t, term) else None
            if way is not None and way[0] is not None and self._is_aligned(term):
                low, high = self._operand_sides(term, way[0], own)
                own = self.sides[t] = low * way[0].gap, high * way[0].gap
            for k, c in enumerate(children(term)):
                if not self._is_tiled(c):
                    continue
                needed = own if not folded(term) & self.family.mask else (0, 0)
                if way is not None and way[0] is not None:
                    reached = self._operand_sides(term, way[0], own)
                    needed = reached if k == 0 else own if self._is_aligned(term) else (0, 0)
                elif isinstance(term, Block) and way is None:
                    needed = (0, 0)
                self.sides[c] = max(self.sides[c][0], needed[0]), max(self.sides[c][1], needed[1])

    def _reads_tiles(self, t: int, term: Block) -> bool:
        return t in self.sides or (not self.old.free[t] & self.family.mask and any(self._is_tiled(c) for c in term.args))

    def _operand_sides(self, term: Term, window: Window, own: Sides) -> Sides:
        """The rows that windows reach on either side of a tile."""
        assert isinstance(term, Block)
        read, by = axes_of(term, window)
        low, high = window.reach(*(n * self.old.extent(mask_of(by[1:])) for n in (own if window.other[0] == "out" else (0, 0))))
        inner = self.old.extent(mask_of(read[1:]))
        first, last = low // window.gap, (high - 1) // window.gap + 1
        return max(-(-first // inner), 0), max(-(-last // inner), 0)

    # the new program

    def _emit(self, t: int) -> None:
        """Add a term of the old program to the new one: in tiles, or as it is on operands that are put together."""
        old, term = self.old, self.old.terms[t]
        if t in self.sides:
            self.tiles[t] = self._in_tiles(t, term, self.sides[t])
            if t in self.together:
                self.ids[t] = self._put_together(t)
        elif not any(self._is_tiled(c) for c in children(term)):
            self.ids[t] = self.new.add(with_children(term, tuple(self.ids[c] for c in children(term))), old.source.get(t))
        elif self._is_summed(term):
            self.ids[t] = self._in_tiles(t, term, (0, 0))
        else:
            operands = tuple(self._put_together(c) if self._is_tiled(c) else self.ids[c] for c in children(term))
            self.ids[t] = self.new.add(with_children(term, operands), old.source.get(t))

    def _is_summed(self, term: Term) -> bool:
        """Whether an operation without an index that is cut sums over all tiles."""
        return isinstance(term, Fold | Dot) or (isinstance(term, Block) and self._way(term) is not None)

    def _in_tiles(self, t: int, term: Term, sides: Sides) -> int:
        if isinstance(term, Block):
            return self._block(t, term, sides)
        over = folded(term) & self.family.mask
        needed = (0, 0) if over else sides
        operands = [self._operand(c, needed) for c in children(term)]
        if over:
            monoid = MONOIDS[term.monoid if isinstance(term, Fold) else "add"]
            k = next(k for k, c in enumerate(children(term)) if self.old.free[c] & over)
            fill = self._number(monoid.identity(self._dtype(operands[k])), operands[k])
            operands[k] = self._filled(operands[k], *bits(over), needed, fill)
        to = {i: (self.tile, self._row(i, (0, 0))) for i in bits(over)}
        if isinstance(term, Rename):
            to = {i: (self._row(i, sides),) for pair in term.pairs for i in pair if i in self.family.rates}
        return self.new.add(with_indices(with_children(term, tuple(operands)), to), self.old.source.get(t))

    def _operand(self, c: int, sides: Sides) -> int:
        return self._read(c, sides) if self.old.free[c] & self.family.mask else self.ids[c]

    def _dtype(self, t: int) -> np.dtype:
        return self.new.terms[t].dtype

    def _number(self, value: object, like: int) -> int:
        return self.new.add(Literal.of(value, self._dtype(like)))

    def _per_tile(self, i: int) -> int:
        """The elements of an index in a tile."""
        found = self.length * self.family.rates[i]
        assert found.denominator == 1, "tiles of whole rows"
        if int(found) * self.new.indices[self.tile].extent < self.old.indices[i].extent:
            raise _UnfitError
        return int(found)

    def _row(self, i: int, sides: Sides) -> int:
        """The index of the rows of a tile that an index has become, with those beside it."""
        if (i, sides) not in self.rows:
            extent = self._per_tile(i) + sum(sides)
            self.rows[i, sides] = self._made(self.old.indices[i].name, extent, (i, len(self.rows) + 1))
        return self.rows[i, sides]

    def _positions(self, i: int, sides: Sides) -> int:
        """The position along an index of each row of a tile."""
        add = self.new.add
        start = add(Map(PLACES, "mul", (add(Iota(PLACES, self.tile)), add(Literal.of(self._per_tile(i), PLACES)))))
        row = add(Iota(PLACES, self._row(i, sides)))
        row = add(Map(PLACES, "sub", (row, add(Literal.of(sides[0], PLACES))))) if sides[0] else row
        return add(Map(PLACES, "add", (start, row)))

    def _read(self, c: int, sides: Sides) -> int:
        """A value in tiles with so many rows beside them, which may be anything where they lie outside."""
        i, term = self._index(c), self.old.terms[c]
        if isinstance(term, Iota):
            place = self._positions(i, sides)
            return self.new.add(Map(term.dtype, "convert_element_type", (place,), (("new_dtype", np.dtype(term.dtype)),)))
        if not self._is_tiled(c):
            return self.new.add(Take(term.dtype, i, self._positions(i, sides), self.ids[c]))
        have = self.sides[c]
        if have == sides:
            return self.tiles[c]
        row, low = self.new.add(Iota(PLACES, self._row(i, sides))), have[0] - sides[0]
        place = self.new.add(Map(PLACES, "add", (row, self.new.add(Literal.of(low, PLACES))))) if low else row
        return self.new.add(Take(term.dtype, self._row(i, have), place, self.tiles[c]))

    def _sliced(self, t: int, before: Axis, after: Axis, start: int, stop: int) -> int:
        """Elements of a value along an axis, which is called otherwise."""
        rest = [j for j in bits(self.new.free[t]) if j not in before]
        outer, inner = ([j for j in rest if (self._place(j) < self._place(before[0])) is is_outer] for is_outer in (True, False))
        starts = tuple(start if j in before else 0 for j in (*outer, before[0], *inner))
        stops = tuple(stop if j in before else self.new.indices[j].extent for j in (*outer, before[0], *inner))
        params = {"start_indices": starts, "limit_indices": stops, "strides": None}
        dtype = self._dtype(t)

        def laid(axis: Axis) -> Axes:
            return (*((j,) for j in outer), axis, *((j,) for j in inner))

        call = Call(primitives.slice_p, params, (laid(before),), (laid(after),), (dtype,), mask_of(rest))
        return self.new.add(Block(dtype, call, (t,), 0))

    def _filled(self, t: int, i: int, sides: Sides, fill: int) -> int:
        """A value whose rows outside of the whole are ``fill``."""
        add, extent = self.new.add, self.old.indices[i].extent
        ends = [("ge", 0)] if sides[0] > 0 else []
        if sides[1] > 0 or self._per_tile(i) * self.new.indices[self.tile].extent > extent:
            ends.append(("lt", extent))
        if not ends:
            return t
        place = self._positions(i, sides)
        inside = [add(Map(TRUTH, name, (place, add(Literal.of(n, PLACES))))) for name, n in ends]
        both = inside[0] if len(inside) == 1 else add(Map(TRUTH, "and", tuple(inside)))
        return add(Map(self._dtype(t), "select_n", (both, fill, t)))

    def _put_together(self, c: int) -> int:
        """A value that is made in tiles as one array of all rows."""
        if c not in self.ids:
            i, tiles = self._index(c), self._read(c, (0, 0)) if c not in self.together else self.tiles[c]
            axis = (self.tile, self._row(i, (0, 0)))
            self.ids[c] = self._sliced(tiles, axis, (i,), 0, self.old.indices[i].extent)
        return self.ids[c]

    def _block(self, t: int, term: Block, sides: Sides) -> int:
        """An operation on tiles: the tiles are a batch, or what is summed; rows are padded by what lies beside them."""
        found = self._way(term)
        assert found is not None, "an operation on tiles"
        window, group = found
        call, operands = self._in_group(term.call, group), [self._operand(c, sides) if window is None else -1 for c in term.args]
        if window is None:
            to = {i: (self._row(i, sides),) for axes in call.out_axes for i in bits(self.family.mask & axes_mask(axes))}
            known = self.calls.setdefault((id(term.call), sides), call_with_indices(call, to))  # results of one operation stay that
            return self.new.add(Block(term.dtype, known, tuple(operands), term.out), self.old.source.get(t))
        read, by = axes_of(term, window)
        row, needed = block_op(term.call.prim.name).windows, self._operand_sides(term, window, sides)
        assert row is not None, "an operation with windows"
        inner, own = self.old.extent(mask_of(read[1:])), sides if window.other[0] == "out" else (0, 0)
        period = self._per_tile(read[0]) * inner * window.gap
        if period != self._per_tile(by[0]) * self.old.extent(mask_of(by[1:])) * window.step:
            raise _UnfitError
        operands = [self._operand(c, own if row.aligned else (0, 0)) for c in term.args]
        fill = operands[1] if row.monoid is None else self._number(MONOIDS[row.monoid].identity(self._dtype(operands[0])), operands[0])
        operands[0] = self._filled(self._operand(term.args[0], needed), read[0], needed, fill)
        if by[0] in bits(self.old.free[term.args[-1]]) and window.other[0] == "in":
            operands[1] = self._filled(operands[1], by[0], (0, 0), fill)
        low, high = window.reach(*(n * self.old.extent(mask_of(by[1:])) for n in own))
        before = low - needed[0] * inner * window.gap
        extent = (self._per_tile(read[0]) + sum(needed)) * inner
        after = low + period + high - before - ((extent - 1) * window.gap + 1)
        axis: Axis = (self._row(read[0], needed), *read[1:])
        cut = tuple(max(-(-(-n) // window.gap), 0) for n in (before, after))
        if any(cut) and row.padded is not block_op("slice").windows.padded:
            shorter = self._made(self.old.indices[read[0]].name, extent - sum(cut), (read[0], len(self.order)))
            operands[0] = self._sliced(operands[0], axis, (shorter,), cut[0], extent - cut[1])
            axis, before, after, extent = (shorter,), before + cut[0] * window.gap, after + cut[1] * window.gap, extent - sum(cut)
        call = replace(call, params=row.padded(call.params, window.number, before, after, extent))
        side, k, a = window.other
        places = {("in", 0, window.operand): axis, (side, k, a): (self._row(by[0], own), *by[1:])}
        if row.aligned:
            places["in", 1, a] = places[side, k, a]
        return self.new.add(Block(term.dtype, _with_axes(call, places), tuple(operands), 0), self.old.source.get(t))

    def _in_group(self, call: Call, group: Group) -> Call:
        """A call on arrays of which one axis has the tiles, outermost."""
        arrays = {"in": call.in_axes, "out": call.out_axes}
        places = {(side, k, a): (self.tile, *arrays[side][k][a]) for side, k, a in group}
        tile, is_result = 1 << self.tile, any(side == "out" for side, _, _ in group)
        masks = {"pointwise": call.pointwise | tile} if is_result else {"folds": call.folds | tile}
        return replace(_with_axes(call, places), **masks)

    def _is_even(self, t: int) -> bool:
        """Whether tiles are all rows of a value and no more."""
        i = self._index(t)
        return self._per_tile(i) * self.new.indices[self.tile].extent == self.old.indices[i].extent

    def _result(self, t: int) -> int:
        if not self._is_tiled(t):
            return self.ids[t]
        return self._read(t, (0, 0)) if self._is_even(t) else self._put_together(t)

    def _result_axes(self, t: int, axes: Axes) -> Axes:
        if not self._is_tiled(t) or not self._is_even(t):
            return axes
        i = self._index(t)
        return tuple(tuple(k for j in axis for k in ((self.tile, self._row(i, (0, 0))) if j == i else (j,))) for axis in axes)


def _with_axes(call: Call, places: Mapping[tuple[str, int, int], Axis]) -> Call:
    """A call on arrays with other axes at some places."""

    def arrays(side: str, before: tuple[Axes, ...]) -> tuple[Axes, ...]:
        return tuple(tuple(places.get((side, k, a), axis) for a, axis in enumerate(axes)) for k, axes in enumerate(before))

    return replace(call, in_axes=arrays("in", call.in_axes), out_axes=arrays("out", call.out_axes))


def _in_order(program: Program, order: Sequence[int]) -> Program:
    """The same program with its indices in another order."""
    to = {i: (k,) for k, i in enumerate(order)}
    into, calls = program.empty_like(), dict[int, Call]()
    into.indices = [program.indices[i] for i in order]

    def renumbered(_: Program, t: int, ids: Mapping[int, int]) -> Term:
        term = with_indices(program.on(t, ids), to)
        if isinstance(term, Block):
            call = calls.setdefault(id(term.call), call_with_indices(term.call, to))
            term = Block(term.dtype, call, term.args, term.out)
        return term

    new, _ = program.rewritten(renumbered, into=into)
    new.outputs = [replace(o, axes=tuple(tuple(to[i][0] for i in axis) for axis in o.axes)) for o in new.outputs]
    return new
