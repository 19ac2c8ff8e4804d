"""Rows looked up in computed values, as values computed from the rows of what they are made of.

``k[idx]`` needs all of ``k``: it reads rows at positions that nobody knows before. Where ``k`` is elementwise, a fold or a contraction, its
rows are the same of rows of its operands, down to arguments and other values that are in memory. So are slices at positions that are known,
``k[1:]``. That is a program of its own, for where the whole of ``k`` does not fit: where it does, one row read is cheaper than one computed
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import primitives

from eqsat_mem.egraph.rule_files import RuleSet
from eqsat_mem.ir import (
    Axes,
    Axis,
    Block,
    Call,
    Dot,
    Fold,
    Iota,
    Literal,
    Map,
    Program,
    Rename,
    Term,
    bits,
    children,
    mask_of,
    with_children,
)
from eqsat_mem.passes import LOOKUPS

RULES = {"slice-pointwise": Map, "slice-fold": Fold, "slice-dot": Dot}
"""The rules that allow rows of a term to be computed from rows of its operands; without its rule, a term is computed whole."""


def looked_up(program: Program, rules: RuleSet) -> Program | None:
    """The program with lookups in computed values, and slices of them, taken apart as far as rules allow, ``None`` if nothing is."""
    if LOOKUPS not in rules.passes:
        return None
    sliced = (Rename, Iota, *(RULES[rule.name] for rule in rules.rules if rule.name in RULES))
    changed = False

    def rows(new: Program, t: int, ids: Mapping[int, int]) -> int | None:
        nonlocal changed
        taken = _taken_from(new, program.on(t, ids), sliced)
        found = None if taken is None else taken.value()
        changed |= found is not None
        return found

    new, _ = program.rewritten(rows)
    new.passes |= {LOOKUPS.name}
    return new if changed else None


@dataclass
class _Rows:
    """Some of what stands along ``index`` in ``operand``: a block of ``program``."""

    program: Program
    block: Block
    operand: int
    index: int
    sliced: tuple[type, ...]
    known: dict[tuple[int, int], int] = field(default_factory=dict, kw_only=True)

    @property
    def places(self) -> int:
        """The indices that stand for ``index`` afterwards."""
        raise NotImplementedError

    def position(self, term: Iota) -> int:
        """The positions that are read, in the dtype of an iota along the index."""
        raise NotImplementedError

    def read(self, t: int, index: int) -> int:
        """Rows of a value that is in memory."""
        raise NotImplementedError

    def value(self) -> int | None:
        """The rows, computed from rows of what the operand is made of; ``None`` if it is in memory, or if names of indices clash."""
        if not self.is_computed(self.operand) or not self.can(self.operand, self.index):
            return None
        return self.at(self.operand, self.index)

    def is_computed(self, t: int) -> bool:
        """Are rows of a value computed from rows of others? Those of other values are read where they are in memory."""
        return isinstance(self.program.terms[t], self.sliced)

    def can(self, t: int, index: int) -> bool:
        """Do the names of the places stand for nothing else on the way down?"""
        if self.program.free[t] & self.places:
            return False
        if not self.program.free[t] >> index & 1 or not self.is_computed(t):
            return True
        term = self.program.terms[t]
        return all(self.can(c, _below(term, index)) for c in children(term))

    def at(self, t: int, index: int) -> int:
        """A value where it is read along ``index``."""
        if not self.program.free[t] >> index & 1:
            return t
        if (t, index) not in self.known:
            self.known[t, index] = self.rows(t, index)
        return self.known[t, index]

    def rows(self, t: int, index: int) -> int:
        term = self.program.terms[t]
        if isinstance(term, Iota):
            return self.position(term)
        if not self.is_computed(t):
            return self.read(t, index)
        below = _below(term, index)
        rows = tuple(self.at(c, below) for c in children(term))
        if isinstance(term, Rename):
            return self.program.add(Rename(term.dtype, tuple((s, d) for s, d in term.pairs if s != below), rows[0]))
        return self.program.add(with_children(term, rows))

    def converted(self, t: int, dtype: Any) -> int:
        same = self.program.terms[t].dtype == dtype
        return t if same else self.program.add(Map(dtype, "convert_element_type", (t,), (("new_dtype", dtype),)))

    def called(self, t: int, params: dict[str, Any], axes: tuple[Axes, ...], rows: Axes, args: tuple[int, ...]) -> int:
        """The block's operation on another value."""
        dtype = self.program.terms[t].dtype
        pointwise = mask_of(a[0] for a in rows if len(a) == 1 and (a in axes[0] or len(axes) > 1))
        return self.program.add(Block(dtype, Call(self.block.call.prim, params, axes, (rows,), (dtype,), pointwise), args, 0))


@dataclass
class _Slice(_Rows):
    """Rows from ``start`` in steps of ``stride``, which stand along the axis ``after``: one index, or none for a single row."""

    start: int
    stride: int
    after: Axis

    @property
    def places(self) -> int:
        return mask_of(self.after)

    def position(self, term: Iota) -> int:
        counts = np.dtype(np.int32)
        place = self.program.add(Literal.of(self.start, counts))
        for i in self.after:
            step = self.program.add(Literal.of(self.stride, counts))
            along = self.program.add(Map(counts, "mul", (self.program.add(Iota(counts, i)), step)))
            place = self.program.add(Map(counts, "add", (along, place)))
        return self.converted(place, term.dtype)

    def read(self, t: int, index: int) -> int:
        before = list(bits(self.program.free[t]))
        axes = tuple((i,) for i in before)
        extent = {i: self.program.indices[i].extent for i in before}
        count = self.program.extent(self.places)
        starts = tuple(self.start if i == index else 0 for i in before)
        limits = tuple(self.start + (count - 1) * self.stride + 1 if i == index else extent[i] for i in before)
        strides = tuple(self.stride if i == index else 1 for i in before)
        params = {"start_indices": starts, "limit_indices": limits, "strides": strides}
        return self.called(t, params, (axes,), tuple(self.after if i == index else (i,) for i in before), (t,))


@dataclass
class _Lookup(_Rows):
    """Rows at computed ``positions``."""

    positions: int

    @property
    def places(self) -> int:
        return self.program.free[self.positions]

    def value(self) -> int | None:
        rows, params = super().value(), self.block.call.params
        if rows is None or params["mode"] is not lax.GatherScatterMode.FILL_OR_DROP:
            return rows
        dtype, boolean = self.block.dtype, np.dtype(bool)
        ends = ("ge", 0), ("lt", self.program.indices[self.index].extent)
        inside = tuple(self.program.add(Map(boolean, name, (self.wide(), self.number(n)))) for name, n in ends)
        within = self.program.add(Map(boolean, "and", inside))
        return self.program.add(Map(dtype, "select_n", (within, self.program.add(Literal.of(params["fill_value"], dtype)), rows)))

    def wide(self) -> int:
        """The positions in a dtype that reaches the end of the index."""
        dtype = self.program.terms[self.positions].dtype
        return self.positions if dtype.itemsize >= 4 else self.converted(self.positions, np.dtype(np.int32))

    def number(self, n: int) -> int:
        return self.program.add(Literal.of(n, self.program.terms[self.wide()].dtype))

    def position(self, term: Iota) -> int:
        """Clipped: what is read outside is the nearest inside, or is replaced."""
        last = self.number(self.program.indices[term.index].extent - 1)
        place = self.program.add(Map(self.program.terms[last].dtype, "clamp", (self.number(0), self.wide(), last)))
        return self.converted(place, term.dtype)

    def read(self, t: int, index: int) -> int:
        before = list(bits(self.program.free[t]))
        rest = [i for i in before if i != index]
        positions = (*self.block.call.in_axes[1][:-1], ())
        batch, axis = len(positions) - 1, before.index(index)
        numbers = lax.GatherDimensionNumbers(tuple(range(batch, batch + len(rest))), (axis,), (axis,))
        sizes = tuple(1 if i == index else self.program.indices[i].extent for i in before)
        mode = {"mode": lax.GatherScatterMode.CLIP, "fill_value": None}
        params = {**self.block.call.params, "dimension_numbers": numbers, "slice_sizes": sizes, **mode}
        axes = tuple((i,) for i in before), positions
        return self.called(t, params, axes, (*positions[:-1], *((i,) for i in rest)), (t, self.positions))


def _taken_from(program: Program, term: Term, sliced: tuple[type, ...]) -> _Rows | None:
    """How a block takes rows of its operand along one index; ``None`` for other terms."""
    if not isinstance(term, Block):
        return None
    if term.call.prim is primitives.slice_p:
        return _slice(program, term, sliced)
    return _lookup(program, term, sliced) if term.call.prim is primitives.gather_p else None


def _slice(program: Program, term: Block, sliced: tuple[type, ...]) -> _Slice | None:
    call, params = term.call, term.call.params
    (before,), (after,) = call.in_axes, call.out_axes
    cut = [d for d, (b, a) in enumerate(zip(before, after, strict=True)) if b != a]
    if len(cut) != 1 or len(before[cut[0]]) != 1 or len(after[cut[0]]) > 1 or program.extent(mask_of(after[cut[0]])) == 0:
        return None
    (d,) = cut
    stride = 1 if params["strides"] is None else params["strides"][d]
    return _Slice(program, term, term.args[0], before[d][0], sliced, params["start_indices"][d], stride, after[d])


def _lookup(program: Program, term: Block, sliced: tuple[type, ...]) -> _Lookup | None:
    """How a gather takes whole slices along one index of its operand."""
    call, (operand, starts) = term.call, term.args
    params: dict[str, Any] = call.params
    numbers = params["dimension_numbers"]
    before, (*batch, _), after = call.in_axes[0], call.in_axes[1], call.out_axes[0]
    shape = program.shape(before)
    taken = [d for d in numbers.start_index_map if params["slice_sizes"][d] < shape[d]]
    if len(taken) != 1 or params["slice_sizes"][taken[0]] != 1 or numbers.operand_batching_dims or len(before[taken[0]]) != 1:
        return None
    checked = params["mode"] is lax.GatherScatterMode.FILL_OR_DROP
    positions = _column(program, starts, list(numbers.start_index_map).index(taken[0]), len(numbers.start_index_map))
    if positions is None or (checked and (len(numbers.start_index_map) > 1 or params["fill_value"] is None)):
        return None
    kept = [a for d, a in enumerate(before) if d not in numbers.collapsed_slice_dims]
    windows = [after[k] for k in sorted(numbers.offset_dims)]
    named = all(a in (w, before[taken[0]]) for a, w in zip(kept, windows, strict=True))
    placed = batch == [a for k, a in enumerate(after) if k not in numbers.offset_dims]
    return _Lookup(program, term, operand, before[taken[0]][0], sliced, positions) if named and placed else None


def _column(program: Program, starts: int, column: int, count: int) -> int | None:
    """The value in one column of the positions."""
    if count == 1:
        return starts
    term = program.terms[starts]
    joined = isinstance(term, Block) and term.call.prim is primitives.concatenate_p and len(term.args) == count
    last = joined and term.call.params["dimension"] == len(term.call.in_axes[0]) - 1  # type: ignore[attr-defined]
    return term.args[column] if last else None  # type: ignore[attr-defined]


def _below(term: Term, index: int) -> int:
    """What the operands of a term call an index of its value."""
    return next((s for s, d in term.pairs if d == index), index) if isinstance(term, Rename) else index
