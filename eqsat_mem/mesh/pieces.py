"""Reads of an index at shifted positions in one form: pieces of a value along an axis that is dealt out.

Slices, paddings, concatenations, rolls, and updates at known positions say of each element along an axis from which operand and at which of
its positions it comes. Pieces of pieces are pieces, so that the slice of a padded array reads the array itself. Where devices have shares
of both axes, each then needs of its neighbours only the rows that its pieces begin or end with (:mod:`eqsat_mem.mesh.neighbours`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import primitives

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.egraph.take_lowering import as_gather
from eqsat_mem.ir import Axes, Axis, Block, Call, Literal, Map, Program, Rename, Take, Term, axes_mask, mask_of
from eqsat_mem.ir.mesh import Names
from eqsat_mem.ir.ops import Piece, pieces_p
from eqsat_mem.mesh.cuts import MOST_PIECES, UPDATES, WAYS, Cut, as_slice, cuts, index_of, window_of, written_operand
from eqsat_mem.mesh.several_axes import along_the_other, of_padded, one_after_the_other, padded_along_several

NEAR = 3 / 4
"""Two axes are dealt out alike if pieces of one make up such a part of the other, and have such a part of the positions of the first."""
PLACES = np.dtype(np.int32)

Read = tuple[int, int, int, int, int, int]
"""``(low, high, source, index, offset, step)``: elements of a value that are those of another along ``index``, -1 where it has none."""
Links = list[tuple[int, int]]


def linked_by_pieces(ex: Extraction) -> Links:
    """The indices that name nearly the same positions: of a value that is made of pieces, and of what these are read from."""
    if not any(isinstance(term, Block) and term.call.prim.name in {*WAYS, "gather"} for term in ex.program.terms):
        return []
    writer = Pieces(ex, {})
    ex.program.rewritten(writer.rewritten)
    return list(writer.near)


def with_pieces(ex: Extraction, divided: Mapping[int, Names]) -> Extraction:
    """A program whose values are pieces of others wherever both are dealt out alike along the axis; the same where there are none."""
    writer = Pieces(ex, divided)
    new, ids = ex.program.rewritten(writer.rewritten)
    if not writer.splits:
        return ex
    tables = (ex.splits, ex.accumulates, ex.unrolls)
    splits, accumulates, unrolls = ({ids[t]: m for t, m in table.items() if t in ids and t not in writer.made} for table in tables)
    rescales = {ids[t]: known.renumbered(ids) for t, known in ex.rescales.items() if t in ids}
    return Extraction(new, splits | writer.splits, accumulates, unrolls, rescales)


def is_pieces(term: Term) -> bool:
    """Whether a value is put together of pieces."""
    return isinstance(term, Block) and term.call.prim.name == "pieces"


def axis_of(term: Term) -> int:
    """The index along which a value is put together of pieces."""
    assert isinstance(term, Block)
    return term.call.out_axes[0][term.call.params["axis"]][0]


def read_along(term: Term, k: int) -> int:
    """The index along which pieces read an operand, -1 where it has none."""
    assert isinstance(term, Block)
    return index_of(term.call.in_axes[k][term.call.params["axis"]])


def pieces_of(term: Term) -> tuple[Piece, ...]:
    """The pieces that count: not those beyond the last position where nothing takes them in."""
    assert isinstance(term, Block)
    pieces: tuple[Piece, ...] = term.call.params["pieces"]
    return pieces[: len(pieces) - term.call.params["beyond"]]


class Pieces:
    """A program while it is written anew with pieces."""

    def __init__(self, ex: Extraction, divided: Mapping[int, Names]) -> None:
        self.old, self.divided = ex.program, divided
        self.splits: dict[int, int] = {}
        self._reads: dict[int, tuple[int, list[Read]]] = {}
        self._rows: dict[int, Read] = {}
        self.made: set[int] = set()
        self.near: dict[tuple[int, int], None] = {}
        self._calls: dict[Any, Call] = {}
        self._padded: dict[int, Block] = {}

    def rewritten(self, new: Program, t: int, ids: Mapping[int, int]) -> int | None:
        term = self.old.on(t, ids)
        if not isinstance(term, Block):
            return None
        term = as_slice(new, term)
        found = self._along_several(new, t, term)
        if found is None:
            found = self._along_one(new, t, term)
        if padded_along_several(new, term):
            found = new.add(term, self.old.source.get(t)) if found is None else found
            self._padded[found] = term
        return found

    def _along_several(self, new: Program, t: int, term: Block) -> int | None:
        """An operation that cuts several axes of which two are dealt out, or a slice of what was padded along several, one of which is."""
        padding = self._padded.get(term.args[0]) if term.call.prim.name == "slice" else None
        every = cuts(new, term) if term.call.prim.name in ("slice", "pad") else []
        args, layout, least = term.args, term.call.in_axes[0], 2
        if padding is not None:
            every, args, layout, least = of_padded(new, term, padding, every), padding.args, padding.call.in_axes[0], 1
        if len(every) < least:
            return None
        reads = [self.reads(new, cut, args) for cut in every]
        for cut, own in zip(every, reads, strict=True):
            self.near.update(dict.fromkeys(_near(new, cut, own)))
        if sum(map(self.is_dealt_out, every, reads)) < least:
            return None
        found = one_after_the_other(self, new, term, every, args, layout)
        if found is not None:
            self.made.add(t)
        return found

    def _along_one(self, new: Program, t: int, term: Block) -> int | None:
        every = cuts(new, term)
        if len(every) == 1 and _is_whole(new, every[0]):
            self.made.add(t)
            return _alone(self, new, term, every[0])
        for cut in every:
            reads = self.reads(new, cut, term.args)
            self.near.update(dict.fromkeys(_near(new, cut, reads)))
            if self.is_dealt_out(cut, reads):
                is_update = term.call.prim.name in UPDATES
                found = (_FORMS[term.call.prim.name] if len(every) > 1 or is_update else _alone)(self, new, term, cut)
                if found is not None:
                    self.made.add(t)
                if found is not None and cut.index < 0:
                    self._rows[found] = reads[0]
                return found
        if len(every) != 1 or term.call.prim.name == "scatter-add":
            return None
        kept, (cut,) = new.add(term, self.old.source.get(t)), every
        if cut.index < 0:
            self._rows[kept] = self.reads(new, cut, term.args)[0]
        else:
            self._reads[kept] = cut.index, self.reads(new, cut, term.args)
        return kept

    def is_dealt_out(self, cut: Cut, reads: Iterable[Read]) -> bool:
        """Whether all that devices have shares of along the axis of a cut is dealt out as its result is."""
        names = {self.divided.get(read[3]) for read in reads} - {None}
        return bool(names) and (cut.index < 0 or names == {self.divided.get(cut.index)})

    def reads(self, new: Program, cut: Cut, args: tuple[int, ...]) -> list[Read]:
        """The pieces of a cut, read from what its operands are made of."""
        found: list[Read] = []
        for low, high, k, offset, step in cut.reads:
            found += self._within(new, args[k], cut.along[k], low, high, offset, step)
        return list(_merged(found))

    def value(self, new: Program, term: Block, cut: Cut, args: tuple[int, ...], layout: Axes) -> int | None:
        """The pieces of operands along an axis; the others are those of ``layout``."""
        reads = self.reads(new, cut, args)
        sources = {(source, index) for _, _, source, index, _, _ in reads}
        (_, _, source, index, offset, step), *more = reads
        if cut.index < 0:
            return self._row(new, source, index, offset)
        if not more and (offset, step) == (0, 1) and index >= 0 and new.indices[index].extent == cut.extent:
            return source if index == cut.index else new.add(Rename(term.dtype, ((index, cut.index),), source))
        others = axes_mask((*layout[: cut.axis], *layout[cut.axis + 1 :]))
        alike = all(not new.free[s] & ~(others | (1 << i if i >= 0 else 0)) and (i < 0 or not others >> i & 1) for s, i in sources)
        if len(reads) > MOST_PIECES or not alike or others >> cut.index & 1:
            return None
        return self._block(new, term, cut, reads, layout)

    def _within(self, new: Program, t: int, axis: int, low: int, high: int, offset: int, step: int) -> Iterator[Read]:
        """Elements ``low`` to ``high`` as those of a value at ``step * k + offset``: of what that value is itself put together from."""
        if axis < 0 or not new.free[t] >> axis & 1:
            _, _, source, index, moved, _ = self._rows.get(t, (0, 0, t, -1, 0, 0))
            yield (low, high, source, index, moved - low, 1) if high - low == 1 and index >= 0 else (low, high, source, index, moved, 0)
            return
        known = self._reads.get(t)
        if known is None or known[0] != axis:
            yield low, high, t, axis, offset, step
            return
        for first, last, source, index, moved, steps in known[1]:
            if step == 0:
                begin, end = (low, high) if first <= offset < last else (low, low)
            else:
                begin, end = max(low, -(-(first - offset) // step)), min(high, -(-(last - offset) // step))
            if begin < end:
                yield begin, end, source, index, steps * offset + moved if index >= 0 else 0, steps * step

    def _block(self, new: Program, term: Block, cut: Cut, reads: list[Read], layout: Axes) -> int:
        sources = list(dict.fromkeys((source, index) for _, _, source, index, _, _ in reads))
        args = tuple(source for source, _ in sources)
        pieces: tuple[Piece, ...] = tuple((sources.index((s, i)), low, high, offset, step) for low, high, s, i, offset, step in reads)
        axes = tuple(
            tuple(
                ((index,) if index >= 0 else ()) if a == cut.axis else axis if not axes_mask((axis,)) & ~new.free[source] else ()
                for a, axis in enumerate(layout)
            )
            for source, index in sources
        )
        rows: Axes = tuple(  # with no axis that no operand has
            (cut.index,) if a == cut.axis else axis if any(own[a] for own in axes) else () for a, axis in enumerate(layout)
        )
        key = args, pieces, cut.axis, axes, rows
        if key not in self._calls:
            pointwise = mask_of(axis[0] for a, axis in enumerate(rows) if a != cut.axis and len(axis) == 1)
            self._calls[key] = Call(pieces_p, {"pieces": pieces, "axis": cut.axis, "beyond": 0}, axes, (rows,), (term.dtype,), pointwise)
        t = new.add(Block(term.dtype, self._calls[key], args, 0))
        self.splits[t] = (self._calls[key].pointwise | 1 << cut.index) & new.free[t]
        self._reads[t] = cut.index, reads
        return t

    def _row(self, new: Program, source: int, index: int, offset: int) -> int:
        """A single row of a value, read by the device that has it."""
        if index < 0:
            return source
        t = new.add(as_gather(new, Take(new.terms[source].dtype, index, new.add(Literal.of(offset, PLACES)), source)))
        block = new.terms[t]
        assert isinstance(block, Block)
        self.splits[t] = block.call.pointwise & new.free[t]
        return t

    def rest(self, new: Program, term: Block, params: Mapping[str, Any], axes: tuple[Axes, ...], rows: Axes, args: tuple[int, ...]) -> int:
        """The operation along the other axes that it cuts; it is pointwise in all that it has before and after."""
        read = [axis for one in axes for axis in one]
        pointwise = mask_of(
            a[0]
            for k, a in enumerate(rows)
            if len(a) == 1 and a in read and all(one[k] in (a, ()) for one in axes if len(one) == len(rows))
        )
        key = term.call.prim.name, args, axes, rows, str(params)
        if key not in self._calls:
            self._calls[key] = Call(term.call.prim, dict(params), axes, (rows,), (term.dtype,), pointwise)
        t = new.add(Block(term.dtype, self._calls[key], args, 0))
        self.splits[t] = pointwise & new.free[t]
        return t


def _is_whole(program: Program, cut: Cut) -> bool:
    """Whether all that is cut is one operand as it is: there is nothing of the others."""
    (_, _, k, offset, step), *more = cut.reads
    return not more and (offset, step) == (0, 1) and cut.along[k] >= 0 and program.indices[cut.along[k]].extent == cut.extent


def _near(program: Program, cut: Cut, reads: Iterable[Read]) -> Iterator[tuple[int, int]]:
    """The indices that pieces are read along which name nearly the same positions as that of the result."""
    covered = Counter[int]()
    read = Counter[int]()
    for low, high, _, index, _, step in reads:
        if index >= 0 and step:
            covered[index] += high - low
            read[index] += (high - low) * step
    for i, n in covered.items():
        if cut.index not in (-1, i) and n >= NEAR * cut.extent and read[i] >= NEAR * program.indices[i].extent:
            yield i, cut.index


def _merged(reads: list[Read]) -> Iterator[Read]:
    """Pieces one after the other, those that go on where the one before ends as one."""
    before: Read | None = None
    for read in reads:
        if before is not None and before[2:] == read[2:] and before[1] == read[0]:
            before = (before[0], *read[1:])
            continue
        if before is not None:
            yield before
        before = read
    if before is not None:
        yield before


# --- their forms --------------------------------------------------------------------------------------------


def _alone(writer: Pieces, new: Program, term: Block, cut: Cut) -> int | None:
    """An operation that cuts one axis only."""
    return writer.value(new, term, cut, term.args, term.call.out_axes[term.out])


def _slice_first(writer: Pieces, new: Program, term: Block, cut: Cut) -> int | None:
    """A slice along several axes: first pieces along one, then the slice along the others."""
    (before,), (after,), params = term.call.in_axes, term.call.out_axes, term.call.params
    found = writer.value(new, term, cut, term.args, before)
    if found is None:
        return None
    ends = {"start_indices": 0, "limit_indices": cut.extent} | ({} if params["strides"] is None else {"strides": 1})
    own = {name: _with(params[name], cut.axis, end) for name, end in ends.items()}
    return writer.rest(new, term, {**params, **own}, (_with(before, cut.axis, after[cut.axis]),), after, (found,))


def _pad_last(writer: Pieces, new: Program, term: Block, cut: Cut) -> int | None:
    """A padding along several axes: first that along the others, then pieces along one."""
    (before, number), (after,), params = term.call.in_axes, term.call.out_axes, term.call.params
    config = _with(params["padding_config"], cut.axis, (0, 0, 0))
    between = _with(after, cut.axis, before[cut.axis])
    inside = writer.rest(new, term, {**params, "padding_config": config}, (before, number), between, term.args)
    return writer.value(new, term, cut, (inside, term.args[1]), after)


def _updated_rows(writer: Pieces, new: Program, term: Block, cut: Cut) -> int | None:
    """An update of some rows: these, updated themselves where it is of part of them, are put together with the others."""
    window, (after,), u = window_of(new, term), term.call.out_axes, written_operand(term)
    table = _renamed(new, term.args[0], _with(term.call.in_axes[0], cut.axis, ()), after)
    if window is None:
        return None
    axes: Axes = tuple(axis for _, axis in window)
    (start, own), update = window[cut.axis], term.args[u]
    rest = [a for a, axis in enumerate(axes) if a != cut.axis and new.extent(mask_of(axis)) != new.extent(mask_of(after[a]))]
    if not rest:
        update = _renamed(new, update, _with(axes, cut.axis, ()), after)
    elif not own:
        return None
    else:
        layout, extent = _with(after, cut.axis, own), new.extent(mask_of(own))
        of_table = Cut(cut.axis, own[0], extent, cut.along[:1], ((0, extent, 0, start, 1),))
        rows = writer.value(new, term, of_table, (table,), layout)
        if rows is None:
            return None
        update = _rows_updated(writer, new, term, cut, (rows, update), rest, window)
        cut = replace(cut, along=_with(cut.along, u, own[0]))
    return writer.value(new, term, cut, _with(_with(term.args, 0, table), u, update), after)


def _rows_updated(
    writer: Pieces, new: Program, term: Block, cut: Cut, operands: tuple[int, int], rest: list[int], window: list[tuple[int, Axis]]
) -> int:
    """The rows of an update of part of them, ``rest`` being the axes along which it is part."""
    (after,), axes, (rows, update) = term.call.out_axes, tuple(axis for _, axis in window), operands
    layout = _with(after, cut.axis, axes[cut.axis])
    if len(rest) == 1:
        own = _renamed(new, update, _with(_with(axes, cut.axis, ()), rest[0], ()), after)
        if (found := along_the_other(writer, new, term, rest[0], (rows, own), layout)) is not None:
            return found
    places = tuple(new.add(Literal.of(0 if a == cut.axis else start, PLACES)) for a, (start, _) in enumerate(window))
    written = replace(term, call=replace(term.call, prim=primitives.dynamic_update_slice_p))
    return writer.rest(new, written, {}, (layout, axes, *((),) * len(places)), layout, (rows, update, *places))


def _added_rows(writer: Pieces, new: Program, term: Block, cut: Cut) -> int | None:
    """An addition to some rows: that of a value which adds nothing to the others."""
    window, (before, *_), (after,) = window_of(new, term), term.call.in_axes, term.call.out_axes
    kind, update = np.dtype(term.dtype).kind, term.args[2]
    if window is None or kind == "b" or any(b != c and not len(b) == len(c) == 1 for b, c in zip(before, after, strict=True)):
        return None
    nothing = new.add(Literal.of(np.dtype(term.dtype).type(0 if kind in "iu" else -0.0), term.dtype))
    axes: Axes = tuple(axis for _, axis in window)
    ends = [(start, new.extent(mask_of(c)) - start - new.extent(mask_of(axis)), 0) for (start, axis), c in zip(window, after, strict=True)]
    config = _with(ends, cut.axis, (0, 0, 0))
    rest = [a for a, own in enumerate(config) if any(own)]
    layout = _with(after, cut.axis, axes[cut.axis])
    own = _renamed(new, update, _with(axes, cut.axis, ()) if len(rest) != 1 else _with(_with(axes, cut.axis, ()), rest[0], ()), after)
    found = along_the_other(writer, new, term, rest[0], (nothing, own), layout) if len(rest) == 1 else None
    if found is not None:
        update = found
    elif rest:
        padding = replace(term, call=replace(term.call, prim=primitives.pad_p))
        update = writer.rest(new, padding, {"padding_config": config}, (axes, ()), layout, (update, nothing))
    else:
        update = own
    reads = tuple((low, high, 0 if k == 2 else 1, *((offset, step) if k == 2 else (0, 0))) for low, high, k, offset, step in cut.reads)
    padded = writer.value(new, term, replace(cut, along=(cut.along[2], -1), reads=reads), (update, nothing), after)
    if padded is None:
        return None
    t = new.add(Map(term.dtype, "add", (_renamed(new, term.args[0], before, after), padded)))
    writer.splits[t] = new.free[t]
    return t


def _renamed(new: Program, t: int, before: Axes, after: Axes) -> int:
    """A value whose axes are called as others are, where both are single indices."""
    pairs = tuple((b[0], c[0]) for b, c in zip(before, after, strict=True) if len(b) == len(c) == 1 and new.free[t] >> b[0] & 1)
    return new.add(Rename(new.terms[t].dtype, pairs, t))


def _with(items: Any, k: int, item: Any) -> Any:
    return (*items[:k], item, *items[k + 1 :])


_Form = Callable[[Pieces, Program, Block, Cut], int | None]
_FORMS: dict[str, _Form] = {
    "slice": _slice_first,
    "split": _alone,
    "pad": _pad_last,
    "concatenate": _alone,
    "dynamic_update_slice": _updated_rows,
    "scatter": _updated_rows,
    "scatter-add": _added_rows,
}
