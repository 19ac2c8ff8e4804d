"""Slices that are read and written at computed positions of an axis that is dealt out, as rows (:mod:`eqsat_mem.mesh.rows`).

A slice needs its axis whole; of rows each device reads and writes its own. A slice begins at the nearest position at which all of it is
there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jax import lax
from jax.extend.core import primitives

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.egraph.take_lowering import as_gather
from eqsat_mem.ir import Axes, Axis, Block, Call, Iota, Literal, Map, Program, Take, axes_mask, mask_of
from eqsat_mem.ir.mesh import Names
from eqsat_mem.mesh.local import PLACES

READ, WRITTEN = "dynamic_slice", "dynamic_update_slice"


def rows_of_slices(ex: Extraction, divided: Mapping[int, Names]) -> Extraction:
    """A program in which such slices are rows that are read or written; the same where there are none."""
    made: dict[int, int] = {}

    def rewritten(new: Program, t: int, ids: Mapping[int, int]) -> int | None:
        term = ex.program.on(t, ids)
        a = _cut_axis(new, term.call) if isinstance(term, Block) else None
        if a is None or not isinstance(term, Block):
            return None
        whole = (term.call.in_axes if term.call.prim.name == READ else term.call.out_axes)[0]
        if whole[a][0] not in divided:
            return None
        block = (_read if term.call.prim.name == READ else _written)(new, term, a, made)
        u = new.add(block, ex.program.source.get(t))
        made[u] = block.call.pointwise & new.free[u]
        return u

    new, ids = ex.program.rewritten(rewritten)
    return ex.onto(new, ids, made) if made else ex


def _cut_axis(program: Program, call: Call) -> int | None:
    """The axis of which a slice has a part, where it has all of the others and no index twice."""
    if call.prim.name not in (READ, WRITTEN):
        return None
    before, after = call.in_axes[0], call.out_axes[0]
    part, whole = (after, before) if call.prim.name == READ else (call.in_axes[1], after)
    cut = [
        a for a, (own, every) in enumerate(zip(part, whole, strict=True)) if program.extent(mask_of(own)) != program.extent(mask_of(every))
    ]
    rest = [[axis for a, axis in enumerate(axes) if a not in cut] for axes in (before, part, whole)]
    if len(cut) != 1 or rest[0] != rest[1] or rest[0] != rest[2]:
        return None
    (a,) = cut
    names = [i for axis in rest[0] for i in axis]
    ends = {*before[a], *part[a], *whole[a]}
    is_one = max(len(before[a]), len(part[a])) <= 1 == len(whole[a])
    return a if is_one and len(set(names)) == len(names) and ends.isdisjoint(names) and set(part[a]).isdisjoint(whole[a]) else None


def _read(new: Program, term: Block, a: int, made: dict[int, int]) -> Block:
    (index,), along = term.call.in_axes[0][a], term.call.out_axes[0][a]
    return as_gather(new, Take(term.dtype, index, _positions(new, term.args[1 + a], index, along, made), term.args[0]))


def _written(new: Program, term: Block, a: int, made: dict[int, int]) -> Block:
    """The scatter of rows that a slice overwrites."""
    before, part, after = term.call.in_axes[0], term.call.in_axes[1], term.call.out_axes[0]
    places = _positions(new, term.args[2 + a], after[a][0], part[a], made)
    rest = tuple(axis for d, axis in enumerate(part) if d != a)
    rows: Axes = tuple((i,) for i in part[a])
    windows = tuple(range(len(rows), len(rows) + len(rest)))
    params = {
        "dimension_numbers": lax.ScatterDimensionNumbers(windows, (a,), (a,)),
        "indices_are_sorted": False,
        "unique_indices": True,
        "mode": lax.GatherScatterMode.CLIP,
        "update_jaxpr": None,
        "update_consts": (),
    }
    pointwise = mask_of(axis[0] for axis in rest if len(axis) == 1)
    call = Call(primitives.scatter_p, params, (before, (*rows, ()), (*rows, *rest)), (after,), (term.dtype,), pointwise)
    return Block(term.dtype, call, (term.args[0], places, term.args[1]), 0)


def _positions(new: Program, start: int, index: int, along: Axis, made: dict[int, int]) -> int:
    """The positions of a slice that begins at a computed one; a single one is that itself, which rows take to the nearest."""
    dtype = new.terms[start].dtype
    if np.dtype(dtype).itemsize < PLACES.itemsize:
        dtype = PLACES
        start = new.add(Map(dtype, "convert_element_type", (start,), (("new_dtype", dtype),)))
    if not along:
        return start
    last = new.add(Literal.of(new.indices[index].extent - new.extent(axes_mask((along,))), dtype))
    nearest = new.add(Map(dtype, "min", (new.add(Map(dtype, "max", (start, new.add(Literal.of(0, dtype))))), last)))
    places = new.add(Map(dtype, "add", (nearest, new.add(Iota(dtype, along[0])))))
    made[places] = new.free[places]
    return places
