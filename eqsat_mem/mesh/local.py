"""The program of one device while it is written: its indices, its terms with what may be done with them, its exchanges.

An index of the whole program that a mesh axis deals out becomes two: one that counts devices and one of the positions of a share, in
this order. A value in shares has the second only, a whole value has both. So what all devices hold is a matter of names: gathering adds
the index of devices, taking one's own share fixes it, and folds over the whole index fold both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import primitives

from eqsat_mem.egraph.encode import pointwise
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.egraph.online_folds import Rescaled
from eqsat_mem.ir import (
    Axes,
    Axis,
    Block,
    Buffer,
    Call,
    Const,
    Fold,
    Index,
    Input,
    Literal,
    Map,
    Program,
    Rename,
    Source,
    Term,
    bits,
    folded,
    mask_of,
)
from eqsat_mem.ir.mesh import Names, Placement, Shares, Spec, Sum, share_of, whole
from eqsat_mem.ir.ops import searched, slice_at_p
from eqsat_mem.ir.ops.collectives import (
    REDUCTIONS,
    Collective,
    all_reduce_p,
    exchange_p,
    gather_p,
    merging,
    neighbours_p,
    number_p,
    own_p,
    scatter_p,
)

PLACES = np.dtype(np.int32)
"""The dtype in which devices are numbered."""


class Local:
    """A program of one device: numbers of its indices, its terms, and facts about them.

    ``divided`` has the mesh axes of each index of the whole program that is dealt out.
    """

    def __init__(self, old: Program, placement: Placement, divided: Mapping[int, Names]) -> None:
        self.old, self.devices, self.divided = old, placement.devices, divided
        self.share: dict[int, int] = {}
        self.across: dict[int, int] = {}
        self.plain: dict[int, int] = {}
        indices: list[Index] = []
        for i, index in enumerate(old.indices):
            if i in divided:
                count = self.devices.count(divided[i])
                self.across[i] = len(indices)
                indices.append(Index(f"{'_'.join(divided[i])}_{index.name}", count))
                self.share[i] = len(indices)
                indices.append(Index(index.name, index.extent // count))
            else:
                self.plain[i] = len(indices)
                indices.append(index)
        self.program = Program(indices, [], list(old.consts), passes=old.passes, matched=old.matched)
        self.specs = tuple(whole(len(b.shape)) if s is None else s for b, s in zip(old.inputs, placement.arguments, strict=True))
        shapes = (share_of(b.shape, s, self.devices) for b, s in zip(old.inputs, self.specs, strict=True))
        self.program.inputs = [Buffer(b.name, shape, b.dtype) for b, shape in zip(old.inputs, shapes, strict=True)]
        self.splits: dict[int, int] = {}
        self.accumulates: dict[int, int] = {}
        self.unrolls: dict[int, int] = {}
        self.rescales: dict[int, Rescaled] = {}
        self._known: dict[Any, int] = {}
        self._pairs: dict[tuple[Any, Names], tuple[int, int]] = {}

    # indices

    def mask(self, mask: int, shares: int) -> int:
        """Local indices of an index set, of which those of ``shares`` are in shares."""
        return mask_of(k for i in bits(mask) for k in self.form(i, shares))

    def form(self, i: int, shares: int) -> Axis:
        """The local indices that stand for an index: its share alone, or with that of the devices, or itself."""
        if i not in self.divided:
            return (self.plain[i],)
        return (self.share[i],) if shares >> i & 1 else (self.across[i], self.share[i])

    def axes(self, axes: Axes, shares: int) -> Axes:
        """Axes of an array of the whole program as axes of a local one."""
        return tuple(tuple(k for i in axis for k in self.form(i, shares)) for axis in axes)

    def state(self, ex: Extraction, t: int, u: int, shares: int) -> None:
        """State of a local term what is stated of the one that it comes from, as far as its operation allows it."""
        made = self.program.terms[u]
        can = (pointwise(self.program, u), folded(made), searched(made.call) if isinstance(made, Block) else -1)
        for (table, facts), able in zip(((self.splits, ex.splits), (self.accumulates, ex.accumulates), (self.unrolls, ex.unrolls)), can):
            if mask := self.mask(facts.get(t, 0), shares) & able:
                table[u] = mask

    def share_extent(self, i: int) -> int:
        """The number of positions of an index that one device has."""
        return self.program.indices[self.form(i, -1)[0]].extent

    def dealing(self, indices: int) -> Names:
        """The mesh axes that deal out some indices."""
        return self.devices.ordered([name for i in bits(indices) for name in self.divided[i]])

    def pair(self, key: Any, extent: int, names: Names, word: str) -> tuple[int, int]:
        """Two more indices, of devices and of a share, for an array that arrives or leaves dealt out as no index of the program is."""
        if (key, names) not in self._pairs:
            count = self.devices.count(names)
            across = self.program.new_index(f"{'_'.join(names)}_{word}", count)
            self._pairs[key, names] = across, self.program.new_index(word, extent // count)
        return self._pairs[key, names]

    def joined_index(self, i: int) -> int:
        """One more index, of all positions of one that is dealt out."""
        if ("joined", i) not in self._known:
            self._known["joined", i] = self.program.new_index(f"all_{self.old.indices[i].name}", self.old.indices[i].extent)
        return self._known["joined", i]

    def shares(self, results: Sequence[Spec], padded: Mapping[int, int], sums: tuple[Sum, ...]) -> Shares:
        """The shares that the finished program has of its mesh; ``padded`` has the positions of indices of the whole program that are."""
        spread = {self.share[i]: names for i, names in self.divided.items()}
        across = {self.share[i]: self.across[i] for i in self.divided}
        for key, (device, share) in self._pairs.items():
            spread[share], across[share] = key[-1], device
        return Shares(self.devices, spread, across, self.specs, tuple(results), {self.share[i]: n for i, n in padded.items()}, sums)

    # terms

    def add(self, term: Term, source: Source | None = None) -> int:
        """A term that is sliced along every index that it has, as elementwise ones may be."""
        t = self.program.add(term, source)
        if not isinstance(self.program.terms[t], Input | Const | Literal | Rename):
            self.splits.setdefault(t, self.program.free[t])
        return t

    def number(self, value: float, dtype: Any) -> int:
        return self.program.add(Literal.of(np.dtype(dtype).type(value), dtype))

    def map(self, op: str, *args: int, dtype: Any = None) -> int:
        """An elementwise operation, of the dtype of its first operand unless another is given."""
        return self.add(Map(dtype or self.program.terms[args[0]].dtype, op, args))

    def convert(self, t: int, dtype: Any) -> int:
        if self.program.terms[t].dtype == dtype:
            return t
        return self.add(Map(dtype, "convert_element_type", (t,), (("new_dtype", dtype),)))

    def widened(self, t: int) -> int:
        """A value that is going to be summed, in float32 if it is narrower."""
        dtype = np.dtype(self.program.terms[t].dtype)
        return self.convert(t, np.dtype(np.float32)) if dtype.kind not in "biuc" and dtype.itemsize < 4 else t

    def layout(self, t: int) -> tuple[int, ...]:
        """The order in which an array has its indices where it is made."""
        program, term = self.program, self.program.terms[t]
        match term:
            case Input() | Const() if len(set(sum(term.axes, ()))) == len(sum(term.axes, ())):
                return sum(term.axes, ())
            case Block():
                return sum(term.call.out_axes[term.out], ())
            case Rename():
                to = dict(term.pairs)
                return tuple(to.get(i, i) for i in self.layout(term.arg))
        return tuple(bits(program.free[t]))

    def renamed(self, t: int, term: Rename, free: int, shares: int, source: Source | None = None) -> int:
        """A value with the indices ``free``, of which it has shares, under the names of a term that reads it."""
        to = dict(term.pairs)
        after = mask_of(to.get(i, i) for i in bits(free & shares))
        forms = ((self.form(i, shares), self.form(to.get(i, i), after)) for i in bits(free))
        return self.program.add(Rename(term.dtype, tuple(pair for both in forms for pair in zip(*both, strict=True)), t), source)

    def reshaped(self, t: int, have: Axes, wanted: Axes, source: Source | None = None) -> int:
        """An array under other indices, whose extents multiply to the same along each axis."""
        key = "reshape", t, have, wanted
        if key not in self._known:
            params = {"new_sizes": self.program.shape(wanted), "dimensions": None, "sharding": None}
            dtype = self.program.terms[t].dtype
            same = mask_of(a[0] for a, b in zip(have, wanted, strict=True) if a == b and len(a) == 1)
            call = Call(primitives.reshape_p, params, (have,), (wanted,), (dtype,), same)
            self._known[key] = self._block(call, (t,), source)
        return self._known[key]

    # exchanges

    def gathered(self, t: int, across: int, names: Names, source: Source | None = None) -> int:
        """The shares of all devices along an index that counts them, which stands first."""
        axes = tuple((i,) for i in self.layout(t))
        return self._exchange(gather_p, (t,), (axes,), ((across,), *axes), names, source)

    def owned(self, t: int, across: int, names: Names, source: Source | None = None) -> int:
        """A device's own share of a value that it has whole."""
        layout = self.layout(t)
        axes, kept = tuple((i,) for i in layout), tuple((i,) for i in layout if i != across)
        return self._exchange(own_p, (t,), (axes,), kept, names, source, axis=layout.index(across))

    def reduced(self, t: int, monoid: str, names: Names, source: Source | None = None) -> int:
        """The values of all devices combined, one of the monoids that a collective has."""
        axes = tuple((i,) for i in self.layout(t))
        return self._exchange(all_reduce_p, (t,), (axes,), axes, names, source, monoid=monoid)

    def combined(self, t: int, monoid: str, across: int, names: Names, source: Source | None = None) -> int:
        """The values of all devices combined by any monoid; ``across`` counts devices where the values have to be gathered."""
        dtype = np.dtype(self.program.terms[t].dtype)
        if monoid in REDUCTIONS and dtype.kind != "b":
            narrow = monoid == "add" and dtype.kind not in "iuc" and dtype.itemsize < 4
            wide = self.convert(t, np.dtype(np.float32)) if narrow else t
            return self.convert(self.reduced(wide, monoid, names, source), dtype)
        every = self.gathered(t, across, names, source)
        total = self.program.add(Fold(dtype, monoid, 1 << across, every), source)
        self.splits.setdefault(total, self.program.free[total])
        return total

    def scattered(self, t: int, across: int, names: Names, source: Source | None = None) -> int:
        """One's own share of the sum of the values of all devices, which have it whole."""
        kept = tuple((i,) for i in self.layout(t) if i != across)
        return self._exchange(scatter_p, (t,), (((across,), *kept),), kept, names, source)

    def exchanged(self, t: int, given: int, taken: int, names: Names, source: Source | None = None) -> int:
        """A value in shares along one index, in shares along another instead: ``given`` counts devices of what is handed out."""
        kept = tuple((i,) for i in self.layout(t) if i != given)
        return self._exchange(exchange_p, (t,), (((given,), *kept),), ((taken,), *kept), names, source)

    def with_neighbours(self, t: int, share: int, rows: tuple[int, int], names: Names, source: Source | None = None) -> tuple[int, int]:
        """Rows from one up to another, counted from where the share of each device begins, and the index along them."""
        (start, stop), layout = rows, self.layout(t)
        if (known := ("rows", t, share, start, stop)) not in self._known:
            self._known[known] = self.program.new_index(f"{self.program.indices[share].name}_beside", stop - start)
        index = self._known[known]
        axes, after = tuple((i,) for i in layout), tuple((index if i == share else i,) for i in layout)
        params = {"start": start, "stop": stop, "share": self.program.indices[share].extent, "axis": layout.index(share)}
        return self._exchange(neighbours_p, (t,), (axes,), after, names, source, **params), index

    def sliced_at(self, t: int, index: int, places: int, along: int, step: int) -> int:
        """A value at evenly stepped places along an index, which are those of another index."""
        layout = self.layout(t)
        axes, after = tuple((i,) for i in layout), tuple((along if i == index else i,) for i in layout)
        call = Call(
            slice_at_p, {"axis": layout.index(index), "stride": step}, (axes, ((along,),)), (after,), (self.program.terms[t].dtype,)
        )
        key = "slice_at", t, index, places, step
        if key not in self._known:
            kept = mask_of(i for i in layout if i != index) | 1 << along
            self._known[key] = self._block(replace(call, pointwise=kept), (t, places), None)
        return self._known[key]

    def row_of(self, t: int, index: int, k: int) -> int:
        """A single row of a value along an index."""
        if self.program.indices[index].extent == 1:
            return self.reshaped(t, tuple((i,) for i in self.layout(t)), tuple(() if i == index else (i,) for i in self.layout(t)))
        if (key := ("row", t, index, k)) not in self._known:
            layout = self.layout(t)
            ends = [(k, k + 1) if i == index else (0, self.program.indices[i].extent) for i in layout]
            params = {"start_indices": tuple(a for a, _ in ends), "limit_indices": tuple(b for _, b in ends), "strides": None}
            axes, after = tuple((i,) for i in layout), tuple(() if i == index else (i,) for i in layout)
            kept = mask_of(i for i in layout if i != index)
            call = Call(primitives.slice_p, params, (axes,), (after,), (self.program.terms[t].dtype,), kept)
            self._known[key] = self._block(call, (t,), None)
        return self._known[key]

    def taken(self, block: Block) -> int:
        """The elements that a gather reads, once for each place."""
        key = "taken", block.args, block.call.in_axes, block.call.out_axes, *block.call.params.items()
        if key not in self._known:
            self._known[key] = self._block(block.call, block.args, None)
        return self._known[key]

    def left(self, k: int, t: int, axes: Axes, a: int, names: Names) -> tuple[int, Axes]:
        """A result, one axis of which is dealt out otherwise than any index of the program is."""
        extent = self.program.extent(mask_of(axes[a]))
        across, share = self.pair(("result", k, a), extent, names, "left")
        dealt = (*axes[:a], (across, share), *axes[a + 1 :])
        t = self.owned(self.reshaped(t, axes, dealt), across, names)
        return t, (*axes[:a], (share,), *axes[a + 1 :])

    def device_number(self, names: Names) -> int:
        """The number of the device along some mesh axes."""
        return self._exchange(number_p, (), (), (), names, None)

    def merged(self, found: Sequence[int], call: Call, share: int, names: Names, source: Source | None = None) -> list[int]:
        """The largest elements and their places, from those that every device has found in its share."""
        key = "merge", tuple(found)
        if key not in self._known:
            axis = call.params["axis"] % len(call.in_axes[0])
            params = {"names": names, "devices": self.devices.count(names), "share": share, "axis": axis}
            free = self.program.free[found[0]]
            merge = Call(merging(params["devices"]), params, call.out_axes, call.out_axes, call.out_dtypes, call.pointwise & free)
            every = [self.program.add(Block(dtype, merge, tuple(found), k), source) for k, dtype in enumerate(call.out_dtypes)]
            self.splits.update({t: call.pointwise & self.program.free[t] for t in every})
            self._known[key] = every[0]
        first = self.program.terms[self._known[key]]
        assert isinstance(first, Block)
        return [self.program.add(Block(d, first.call, first.args, k)) for k, d in enumerate(first.call.out_dtypes)]

    def _exchange(
        self, prim: Collective, args: tuple[int, ...], ins: tuple[Axes, ...], out: Axes, names: Names, source: Source | None, **params: Any
    ) -> int:
        key = prim.name, args, ins, out, names, *params.items()
        if key not in self._known:
            params |= {"names": names, "devices": self.devices.count(names)}
            dtype = self.program.terms[args[0]].dtype if args else PLACES
            kept = mask_of(i for axis in out for i in axis) & mask_of(i for axes in ins for axis in axes for i in axis)
            self._known[key] = self._block(Call(prim, params, ins, (out,), (dtype,), kept), args, source)
        return self._known[key]

    def _block(self, call: Call, args: tuple[int, ...], source: Source | None) -> int:
        t = self.program.add(Block(call.out_dtypes[0], call, args, 0), source)
        self.splits[t] = call.pointwise & self.program.free[t]
        return t
