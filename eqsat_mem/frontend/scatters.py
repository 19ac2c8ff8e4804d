"""Scatters in chunks of what they write: a matrix of counts, ratings or edges, made of lists, is made in chunks of rows.

A scatter binds the axes that it writes at positions, so that its result is whole along them. Where nothing fits otherwise, it is one that
is told which rows its first operand has, and goes through all updates for each chunk of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import jax
import numpy as np
from jax import lax

from eqsat_mem.ir import Axes, Block, Call, Iota, Program, Rename, axes_mask, bits, itemsize, mask_of
from eqsat_mem.ir.ops import scatters_at
from eqsat_mem.passes import EVERY, SCATTERS, Pass

PLACES = np.dtype(np.int32)


def with_scatters(program: Program, passes: Collection[Pass] = EVERY) -> Program | None:
    """The program with scatters told the rows that they write, ``None`` where there are none."""
    if SCATTERS not in passes:
        return None
    changed: list[int] = []

    def told(new: Program, t: int, ids: Mapping[int, int]) -> int | None:
        term = program.on(t, ids)
        if isinstance(term, Rename):
            return _renamed(new, term)
        found = _told(new, term) if isinstance(term, Block) and _is_plain(term) else None
        changed.extend([] if found is None else [t])
        return found

    new, _ = program.rewritten(told)
    if not changed:
        return None
    new.passes |= {SCATTERS.name}
    return new


def _is_plain(term: Block) -> bool:
    call = term.call
    by_function = call.prim.name == "scatter" and call.params.get("update_jaxpr") is not None  # x.at[i].apply(f)
    return call.prim.name in scatters_at and not call.effects and not by_function


def _told(new: Program, term: Block) -> int | None:
    """The scatter that is told its rows, along each axis that it writes at single positions."""
    call, (into, positions, updates) = term.call, term.args
    numbers = call.params["dimension_numbers"]
    before, (after,) = call.in_axes[0], call.out_axes
    used = axes_mask(call.in_axes[1]) | axes_mask(call.in_axes[2])
    written = [int(d) for d in numbers.scatter_dims_to_operand_dims]

    def is_row(d: int) -> bool:
        named = len(after[d]) == 1 and not used >> after[d][0] & 1 and [axis for axis in after if after[d][0] in axis] == [after[d]]
        others = new.free[into] & ~mask_of(before[d])
        is_read = new.free[into] & mask_of(before[d])
        is_free = not is_read or (len(before[d]) == 1 and not others >> after[d][0] & 1)
        return d in numbers.inserted_window_dims and named and is_free

    rows = [d for d in written if is_row(d)]
    if not rows or new.terms[positions].dtype == np.uint64 or jax.dtypes.issubdtype(term.dtype, jax.dtypes.extended):
        return None
    renamed = [(before[d][0], after[d][0]) for d in rows if new.free[into] & mask_of(before[d]) and before[d] != after[d]]
    if renamed:
        into = new.add(Rename(new.terms[into].dtype, tuple(renamed), into))
    places = [new.add(Iota(PLACES, after[d][0])) for d in rows]
    ends = None
    if call.params["mode"] is lax.GatherScatterMode.CLIP:
        windows = [d for d in range(len(before)) if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)]
        sizes = dict(zip(windows, (new.extent(mask_of(call.in_axes[2][k])) for k in sorted(numbers.update_window_dims))))
        ends = tuple(new.extent(mask_of(after[d])) - sizes.get(d, 1) for d in written)
    told = Call(
        scatters_at[call.prim.name],
        {"columns": tuple(map(written.index, rows)), "ends": ends, "dimension_numbers": numbers},
        (tuple(after[d] if d in rows else axis for d, axis in enumerate(before)), *call.in_axes[1:], *((after[d],) for d in rows)),
        call.out_axes,
        call.out_dtypes,
        call.pointwise | mask_of(after[d][0] for d in rows),
        call.folds,
        scratch_bytes=call.scratch_bytes + new.extent(axes_mask(call.in_axes[1])) * itemsize(new.terms[positions].dtype),
    )
    return new.add(Block(term.dtype, told, (into, positions, updates, *places), term.out))


def _renamed(new: Program, term: Rename) -> int | None:
    """A scatter that is told its rows, under other names: made anew, since chunks of rows are no chunks of columns (``a + a.T``)."""
    made, names = new.terms[term.arg], dict(term.pairs)
    if not isinstance(made, Block) or made.call.prim not in scatters_at.values():
        return None
    call, (into, *others) = made.call, made.args
    own = [axes[0][0] for axes in call.in_axes[3:]]
    if not set(names) <= set(own) or mask_of(names.values()) & axes_mask((*call.in_axes[1], *call.in_axes[2])):
        return None

    def named(axes: Axes) -> Axes:
        return tuple(tuple(names.get(i, i) for i in axis) for axis in axes)

    pairs = tuple((i, j) for i, j in term.pairs if new.free[into] >> i & 1)
    if pairs:
        into = new.add(Rename(new.terms[into].dtype, pairs, into))
    renamed = replace(
        call,
        in_axes=(named(call.in_axes[0]), *call.in_axes[1:3], *map(named, call.in_axes[3:])),
        out_axes=tuple(map(named, call.out_axes)),
        pointwise=mask_of(names.get(i, i) for i in bits(call.pointwise)),
    )
    places = [new.add(Iota(PLACES, names.get(i, i))) for i in own]
    return new.add(Block(made.dtype, renamed, (into, *others[:2], *places), made.out))
