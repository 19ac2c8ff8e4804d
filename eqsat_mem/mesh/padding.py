"""Extents that devices do not divide: programs in which such indices have as many positions as divide, before they are dealt out.

Positions beyond the last repeat the last one: arguments are read there, positions count no further, so that every value has there what it
has at its last position. Nothing is computed that the program does not compute, and extremes stay what they are; what sums takes nothing
there. What is not computed along the index, results among it, has its own extent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from eqsat_mem.egraph.encode import pointwise
from eqsat_mem.egraph.extract import Extraction, picked_with
from eqsat_mem.egraph.online_folds import Rescaled
from eqsat_mem.egraph.take_lowering import as_block
from eqsat_mem.ir import (
    Axes,
    Block,
    Call,
    Dot,
    Fold,
    Iota,
    Literal,
    Map,
    Rename,
    Take,
    Term,
    axes_mask,
    bits,
    children,
    folded,
    is_leaf,
    mask_of,
    with_children,
)
from eqsat_mem.ir.mesh import Devices, Names, Spreading
from eqsat_mem.ir.ops import MONOIDS, block_op, picks
from eqsat_mem.mesh.local import PLACES
from eqsat_mem.mesh.pieces import axis_of, is_pieces, read_along


def padded(
    ex: Extraction, divided: Mapping[int, Names], way: Spreading, devices: Devices
) -> tuple[Extraction, Mapping[int, Names], Spreading]:
    """A program with all that is dealt out padded to what its devices divide; the same program where nothing has to be."""
    order = dict(way.order)
    uneven = {i: names for i, names in order.items() if ex.program.indices[i].extent % devices.count(names)}
    if not uneven:
        return ex, divided, way
    writer = _Padding(ex, uneven, devices)
    even = {i: names for i, names in divided.items() if ex.program.indices[i].extent % devices.count(names) == 0}
    dealt = even | {writer.wide[i]: names for i, names in uneven.items()}
    extents = tuple((wide, ex.program.indices[i].extent) for i, wide in writer.wide.items())
    return writer.run(), dealt, Spreading(tuple((writer.wide.get(i, i), names) for i, names in order.items()), extents)


class _Padding:
    """The padded program while it is written. A value has some of the indices padded (an index set of the program as it was)."""

    def __init__(self, ex: Extraction, uneven: Mapping[int, Names], devices: Devices) -> None:
        self.ex, self.old, self.new = ex, ex.program, ex.program.empty_like()
        self.uneven = mask_of(uneven)
        self.wide: dict[int, int] = {}
        for i, names in uneven.items():
            count, index = devices.count(names), self.old.indices[i]
            self.wide[i] = self.new.new_index(index.name, -(-index.extent // count) * count)
        self.splits: dict[int, int] = {}
        self.accumulates: dict[int, int] = {}
        self.unrolls: dict[int, int] = {}
        self.origin: dict[int, int] = {}
        self._values: dict[tuple[int, int], int] = {}
        self._calls: dict[tuple[int, int], Call] = {}
        self.ends_count = any(self._counts_ends(t) for t in self.old.reachable())

    def _counts_ends(self, t: int) -> bool:
        """Whether a fold takes in what stands beyond the last position: an extreme, to which the last element again adds nothing."""
        term = self.old.terms[t]
        if isinstance(term, Fold | Dot):
            return bool(term.over & self.uneven) and isinstance(term, Fold) and MONOIDS[term.monoid].idempotent
        return bool(folded(term) & self.uneven)

    def run(self) -> Extraction:
        self.new.take_roots(self.old, lambda t: self.value(t, 0))
        for t in range(len(self.new.terms)):
            for other in picked_with(self.new, t):
                for table in (self.splits, self.accumulates):
                    if t in table:
                        table.setdefault(other, table[t])
        rescales = ((self._values.get((t, self.natural(t))), known) for t, known in self.ex.rescales.items())
        found = {u: way for u, known in rescales if u is not None and (way := self.rescaled(u, known)) is not None}
        return Extraction(self.new, self.splits, self.accumulates, self.unrolls, found)

    # names

    def mask(self, mask: int, wide: int) -> int:
        return mask_of(self.wide[i] if wide >> i & 1 else i for i in bits(mask))

    def axes(self, axes: Axes, wide: int) -> Axes:
        return tuple(tuple(self.wide[i] if wide >> i & 1 else i for i in axis) for axis in axes)

    # values

    def natural(self, t: int) -> int:
        """The indices that a term has padded where it is made."""
        term = self.old.terms[t]
        if isinstance(term, Rename):
            to, indices = dict(term.pairs), self.new.indices
            both = ((i, to.get(i, i)) for i in bits(self.natural(term.arg)))
            alike = (j for i, j in both if j in self.wide and indices[self.wide[i]].extent == indices[self.wide[j]].extent)
            return mask_of(alike)
        return self.computed(t) & self.old.free[t]

    def computed(self, t: int) -> int:
        """The indices along which a term is computed padded, those that it folds among them."""
        term, free = self.old.terms[t], self.old.free
        if is_leaf(term) or (isinstance(term, Block) and term.call.inside is not None):
            return 0  # the body of a loop is traced for its extents, and what it sums is inside
        read = mask_of(i for c in children(term) for i in bits(free[c]))
        able = (self.ex.splits.get(t, 0) & free[t]) | (self.ex.accumulates.get(t, 0) & folded(term) & read & ~free[t])
        if isinstance(term, Block) and (picks(term.call) or block_op(term.call.prim.name).monoid is None):
            able &= ~folded(term)
        return able & self.uneven

    def value(self, t: int, wide: int) -> int:
        """The term of a value that has these indices padded."""
        key = t, wide
        if key not in self._values:
            self._values[key] = self._value(t, wide)
        return self._values[key]

    def _value(self, t: int, wide: int) -> int:
        term = self.old.terms[t]
        if isinstance(term, Iota) and wide:
            return self.convert(self.positions(term.index), term.dtype)
        if isinstance(term, Rename):
            own, back = self.natural(t), {j: i for i, j in term.pairs}
            before = mask_of(back.get(j, j) for j in bits(own))
            to = {i: j for i, j in term.pairs if self.old.free[term.arg] >> i & 1}
            pairs = tuple((self.wide[i] if before >> i & 1 else i, self.wide[j] if own >> j & 1 else j) for i, j in to.items())
            u = self.new.add(Rename(term.dtype, pairs, self.value(term.arg, before)), self.old.source.get(t))
        else:
            own = self.natural(t)
            u = self.built(t)
        for i in bits(own & ~wide):
            u = self.taken(u, self.wide[i], self.new.add(Iota(PLACES, i)))
        for i in bits(wide & ~own):
            u = self.taken(u, i, self.positions(i))
        return u

    def built(self, t: int) -> int:
        """A term on operands that have the indices padded along which it is computed."""
        term, wide = self.old.terms[t], self.computed(t)
        if isinstance(term, Block) and is_pieces(term):
            return self.put_together(t, term, wide)
        args = [self.value(c, wide & self.old.free[c]) for c in children(term)]
        over = wide & folded(term)
        if over:
            args = [self.masked(t, k, c, a, over & mine) for k, (c, a, mine) in enumerate(zip(children(term), args, self.read(term)))]
        u = self.new.add(self.operation(term, wide, tuple(args)), self.old.source.get(t))
        self.origin.setdefault(u, t)
        can = pointwise(self.new, u), -1, -1
        tables = (self.splits, self.ex.splits), (self.accumulates, self.ex.accumulates), (self.unrolls, self.ex.unrolls)
        for (table, facts), able in zip(tables, can, strict=True):
            if mask := self.mask(facts.get(t, 0), wide) & able:
                table[u] = mask
        return u

    def read(self, term: Term) -> list[int]:
        """The indices along which a term reads each of its operands, also one number for all positions."""
        if isinstance(term, Block):
            return [axes_mask(axes) for axes in term.call.in_axes]
        return [self.old.free[c] for c in children(term)]

    def put_together(self, t: int, term: Block, wide: int) -> int:
        """A value made of pieces: of values that are padded along the pieces as they are made, and ends with its last element again."""
        call, j, a = term.call, axis_of(term), term.call.params["axis"]
        own = []
        for k, c in enumerate(term.args):
            i = read_along(term, k)
            along = 1 << i if i >= 0 else 0
            own.append(wide & self.old.free[c] & ~(1 << j | along) | self.natural(c) & along)
        pieces, beyond = call.params["pieces"], 0
        if wide >> j & 1:
            k, _, high, offset, step = pieces[-1]
            pieces = (*pieces, (k, high, self.new.indices[self.wide[j]].extent, offset + step * (high - 1), 0))
            beyond = 0 if self.ends_count else 1
        key = id(call), wide
        if key not in self._calls:
            ins, rows = (
                tuple(self.axes(axes, mine) for axes, mine in zip(call.in_axes, own, strict=True)),
                self.axes(call.out_axes[0], wide),
            )
            pointwise = mask_of(axis[0] for d, axis in enumerate(rows) if d != a and len(axis) == 1)
            self._calls[key] = replace(
                call, params={"pieces": pieces, "axis": a, "beyond": beyond}, in_axes=ins, out_axes=(rows,), pointwise=pointwise
            )
        args = tuple(self.value(c, mine) for c, mine in zip(term.args, own, strict=True))
        u = self.new.add(Block(term.dtype, self._calls[key], args, 0), self.old.source.get(t))
        self.origin.setdefault(u, t)
        self.splits[u] = self.mask(self.ex.splits.get(t, 0), wide) & self.new.free[u]
        return u

    def operation(self, term: Term, wide: int, args: tuple[int, ...]) -> Term:
        match term:
            case Fold() | Dot():
                return with_children(replace(term, over=self.mask(term.over, wide)), args)
            case Block():
                return replace(term, call=self.call(term.call, wide), args=args)
        return with_children(term, args)

    def call(self, call: Call, wide: int) -> Call:
        key = id(call), wide
        if key not in self._calls:
            ins, outs = (tuple(self.axes(axes, wide) for axes in side) for side in (call.in_axes, call.out_axes))
            new = replace(call, in_axes=ins, out_axes=outs, pointwise=self.mask(call.pointwise, wide), folds=self.mask(call.folds, wide))
            self._calls[key] = new if wide else call
        return self._calls[key]

    def masked(self, t: int, k: int, c: int, a: int, over: int) -> int:
        """An operand of a fold, with what changes nothing at positions beyond the last."""
        term = self.old.terms[t]
        row = block_op(term.call.prim.name) if isinstance(term, Block) else None
        monoid = term.monoid if isinstance(term, Fold) else "add" if row is None else str(row.monoid)
        if MONOIDS[monoid].idempotent or (row is not None and row.writes_into and k < UPDATES):
            return a
        dtype, within = self.new.terms[a].dtype, None
        for i in bits(over):
            last = self.number(self.old.indices[i].extent, PLACES)
            here = self.sliced(Map(np.dtype(bool), "lt", (self.new.add(Iota(PLACES, self.wide[i])), last)))
            within = here if within is None else self.sliced(Map(np.dtype(bool), "and", (within, here)))
        if within is None:
            return a
        nothing = self.new.add(Literal.of(MONOIDS[monoid].identity(dtype), dtype))
        u = self.sliced(Map(dtype, "select_n", (within, nothing, a)))
        self.origin.setdefault(u, c)
        return u

    def positions(self, i: int) -> int:
        """The positions along a padded index, of which those beyond the last are the last."""
        last = self.number(self.old.indices[i].extent - 1, PLACES)
        return self.sliced(Map(PLACES, "min", (self.new.add(Iota(PLACES, self.wide[i])), last)))

    def taken(self, u: int, index: int, positions: int) -> int:
        """A value at other positions along an index."""
        block = as_block(self.new, Take(self.new.terms[u].dtype, index, positions, u))
        t = self.new.add(block)
        self.splits[t] = block.call.pointwise & self.new.free[t]
        return t

    def number(self, value: int, dtype: np.dtype[np.int32]) -> int:
        return self.new.add(Literal.of(value, dtype))

    def convert(self, u: int, dtype: object) -> int:
        if self.new.terms[u].dtype == dtype:
            return u
        return self.sliced(Map(dtype, "convert_element_type", (u,), (("new_dtype", dtype),)))

    def sliced(self, term: Term) -> int:
        t = self.new.add(term)
        self.splits.setdefault(t, self.new.free[t])
        return t

    def rescaled(self, u: int, known: Rescaled) -> Rescaled | None:
        """The dependence of a sum on its level, where the way from one to the other is as it was; padded means count other elements."""
        if known.mean_over & self.uneven:
            return None
        chain, inside = [u], known.chain | {known.shift}
        while self.origin.get(chain[-1]) != known.shift:
            below = [c for c in children(self.new.terms[chain[-1]]) if self.origin.get(c) in inside]
            if len(below) != 1:
                return None
            chain.append(below[0])
        shift = chain[-1]
        level = children(self.new.terms[shift])[children(self.old.terms[known.shift]).index(known.level)]
        return Rescaled(level, shift, frozenset(chain[:-1]), known.mean_over, known.extreme)


UPDATES = 2
"""The operand of a scatter that it writes; the first is what it writes into, the second the positions."""
