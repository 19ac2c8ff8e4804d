"""Takes of extracted programs as JAX has them: slices where positions count in even steps, gathers elsewhere.

Where shifted copies are read at positions (:mod:`eqsat_mem.frontend.shifts`), a slice keeps its positions: a chunk of them is a slice, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax import lax
from jax.extend.core import primitives

from eqsat_mem.egraph.lowering import Lower, Lowering
from eqsat_mem.ir import Axes, Block, Call, Const, Input, Iota, Literal, Map, Program, Rename, Take, bits, mask_of
from eqsat_mem.ir.ops import shift_to_p, slice_at_p
from eqsat_mem.passes import SHIFTS


def takes(program: Program) -> dict[int, Lower]:
    """The lowering of each take to a block."""
    return {t: _lower for t, term in enumerate(program.terms) if isinstance(term, Take)}


def _lower(into: Lowering, t: int, ids: Mapping[int, int]) -> int:
    term = into.old.on(t, ids)
    assert isinstance(term, Take)
    if into.new.free[term.positions] >> term.index & 1:  # chunks of positions along the index read it whole
        whole = into.beside(term.index)
        term = Take(term.dtype, whole, term.positions, into.new.add(Rename(term.dtype, ((term.index, whole),), term.arg)))
    block = as_block(into.new, term)
    taken = into.sliced(block, into.before.splits.get(t, 0) & block.call.pointwise)
    if t in into.old.source:
        into.new.source.setdefault(taken, into.old.source[t])
    return taken


def as_block(program: Program, term: Take) -> Block:
    """The slice or gather that computes a take, which stands in no program yet."""
    steps = _steps(program, term.positions)
    if steps is None:
        return as_gather(program, term)
    if _inside(program, term, steps):
        return _slice(program, term, steps)
    consecutive = steps.along is not None and steps.stride == 1 and SHIFTS.name in program.passes
    innermost = _laid_out(program, term.arg)[-1] == term.index
    if not consecutive or not innermost:
        return as_gather(program, term)
    after = steps.start + _count(program, steps) - program.indices[term.index].extent
    return _at_positions(program, term, shift_to_p, {"before": max(-steps.start, 0), "after": max(after, 0)})


@dataclass(frozen=True)
class _Steps:
    """The positions ``start + stride * i`` along the index ``along``; one position where that is None."""

    start: int
    stride: int = 0
    along: int | None = None


def _steps(program: Program, t: int) -> _Steps | None:
    """The positions that a value counts, if it does; the arithmetic that rules may have made of it included."""
    term = program.terms[t]
    if np.dtype(term.dtype).kind not in "iu" or np.dtype(term.dtype).itemsize < 4:  # narrower ones may wrap around on the way
        return None
    match term:
        case Literal():
            return _Steps(int(term.value))
        case Iota():
            return _Steps(0, 1, term.index)
        case Map(op="convert_element_type"):
            return _steps(program, term.args[0])
        case Map(op="add" | "sub" | "mul" as op):
            one, other = (_steps(program, a) for a in term.args)
            return None if one is None or other is None else _combined(op, one, other)
        case Map(op="clamp"):
            least, counted, most = (_steps(program, a) for a in term.args)
            return counted if counted is not None and _between(program, least, counted, most) else None
    return None


def _combined(op: str, one: _Steps, other: _Steps) -> _Steps | None:
    """The sum, difference or product of two counts, one of which is a number."""
    if op == "sub":
        op, other = "add", _Steps(-other.start, -other.stride, other.along)
    counted, number = (one, other) if other.along is None else (other, one)
    if number.along is not None:
        return None
    if op == "add":
        return _Steps(counted.start + number.start, counted.stride, counted.along)
    return _Steps(counted.start * number.start, counted.stride * number.start, counted.along)


def _between(program: Program, least: _Steps | None, counted: _Steps, most: _Steps | None) -> bool:
    """Whether all positions are at least and at most some numbers."""
    if least is None or most is None or least.along is not None or most.along is not None:
        return False
    ends = sorted((counted.start, counted.start + counted.stride * (_count(program, counted) - 1)))
    return least.start <= ends[0] and ends[1] <= most.start


def _count(program: Program, steps: _Steps) -> int:
    return 1 if steps.along is None else program.indices[steps.along].extent


def _inside(program: Program, term: Take, steps: _Steps) -> bool:
    """Whether the positions are those of a slice: ascending, and of the index that is read."""
    last = steps.start + steps.stride * (_count(program, steps) - 1)
    ascends = steps.along is None or steps.stride > 0
    return ascends and 0 <= steps.start <= last < program.indices[term.index].extent


def _slice(program: Program, term: Take, steps: _Steps) -> Block:
    before = _laid_out(program, term.arg)
    if steps.along is not None and SHIFTS.name in program.passes:
        return _at_positions(program, term, slice_at_p, {"stride": steps.stride})
    count = program.extent(program.free[term.positions])
    ends = [(0, program.indices[i].extent, 1) for i in before]
    ends[before.index(term.index)] = steps.start, steps.start + (count - 1) * steps.stride + 1, max(steps.stride, 1)
    names = ("start_indices", "limit_indices", "strides")
    after = () if steps.along is None else (steps.along,)
    whole: Axes = tuple((i,) for i in before)
    rows: Axes = tuple(after if i == term.index else (i,) for i in before)
    return _block(term, primitives.slice_p, dict(zip(names, zip(*ends, strict=True))), (whole,), rows, (term.arg,))


def _at_positions(program: Program, term: Take, prim: object, params: dict[str, object]) -> Block:
    """A slice whose positions are an operand, so that it is pointwise in their index, too."""
    before, (along,) = _laid_out(program, term.arg), bits(program.free[term.positions])
    axes: Sequence[Axes] = (tuple((i,) for i in before), ((along,),))
    rows: Axes = tuple((along if i == term.index else i,) for i in before)
    return _block(term, prim, {"axis": before.index(term.index), **params}, axes, rows, (term.arg, term.positions))


def as_gather(program: Program, term: Take) -> Block:
    """The gather that computes a take, which stands in no program yet."""
    before, batch = _laid_out(program, term.arg), list(bits(program.free[term.positions]))
    rest = [i for i in before if i != term.index]
    axis, outer = before.index(term.index), len(batch)
    numbers = lax.GatherDimensionNumbers(tuple(range(outer, outer + len(rest))), (axis,), (axis,))
    params = {
        "dimension_numbers": numbers,
        "slice_sizes": tuple(1 if i == term.index else program.indices[i].extent for i in before),
        "unique_indices": False,
        "indices_are_sorted": False,
        "mode": lax.GatherScatterMode.CLIP,
        "fill_value": None,
    }
    places: Axes = tuple((i,) for i in batch)
    axes = tuple((i,) for i in before), (*places, ())
    return _block(term, primitives.gather_p, params, axes, (*places, *((i,) for i in rest)), (term.arg, term.positions))


def _laid_out(program: Program, t: int) -> list[int]:
    """The indices of a value in the order in which an argument has them in memory, of other values in their own."""
    term = program.terms[t]
    if isinstance(term, Rename):
        to = dict(term.pairs)
        return [to.get(i, i) for i in _laid_out(program, term.arg)]
    if isinstance(term, Input | Const) and all(len(axis) == 1 for axis in term.axes) and len(set(term.axes)) == len(term.axes):
        return [axis[0] for axis in term.axes]
    return list(bits(program.free[t]))


def _block(term: Take, prim: object, params: dict[str, object], axes: Sequence[Axes], rows: Axes, args: tuple[int, ...]) -> Block:
    known = {a for each in axes for a in each}
    pointwise = mask_of(a[0] for a in rows if len(a) == 1 and a in known and a != (term.index,))
    return Block(term.dtype, Call(prim, params, tuple(axes), (rows,), (term.dtype,), pointwise), args, 0)
