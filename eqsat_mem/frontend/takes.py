"""Gathers and slices of computed values as takes, which rules know how to pass down to operands.

``k[idx]`` needs all of ``k``: it reads rows at positions that nobody knows before. Where ``k`` is elementwise, a fold or a contraction,
its rows are the same of rows of its operands, and so are slices, ``k[1:]``. What is read of arguments and of other values that are in
memory stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import primitives

from eqsat_mem.ir import Block, Dot, Fold, Iota, Literal, Map, Program, Rename, Take, Term, mask_of

COMPUTED = Map | Fold | Dot | Rename | Iota | Take
"""Terms whose rows may be computed from rows of others."""


def with_takes(program: Program) -> Program | None:
    """The program with takes in place of what reads whole rows along one index of computed values, ``None`` where nothing does."""
    changed = False

    def taken(new: Program, t: int, ids: Mapping[int, int]) -> int | None:
        nonlocal changed
        term = program.on(t, ids)
        found = _taken(new, term) if isinstance(term, Block) else None
        changed |= found is not None
        return found

    new, _ = program.rewritten(taken)
    return new if changed else None


def _taken(program: Program, term: Block) -> int | None:
    read = _READS.get(term.call.prim)
    return read(program, term) if read is not None and isinstance(program.terms[term.args[0]], COMPUTED) else None


def _of_slice(program: Program, term: Block) -> int | None:
    """The elements from a start in even steps, along each axis that is cut."""
    call, params = term.call, term.call.params
    (before,), (after,) = call.in_axes, call.out_axes
    cut = [d for d, (b, a) in enumerate(zip(before, after, strict=True)) if b != a]
    if not all(len(before[d]) == 1 and len(after[d]) <= 1 and program.extent(mask_of(after[d])) for d in cut):
        return None
    counts = np.dtype(np.int32)
    rows: int | None = term.args[0]
    for d in cut:
        place = program.add(Literal.of(params["start_indices"][d], counts))
        for i in after[d]:
            stride = program.add(Literal.of(1 if params["strides"] is None else params["strides"][d], counts))
            along = program.add(Map(counts, "mul", (program.add(Iota(counts, i)), stride)))
            place = program.add(Map(counts, "add", (along, place)))
        rows = _take(program, rows, before[d][0], place) if rows is not None else None
    return rows if cut else None


def _take(program: Program, operand: int, index: int, positions: int) -> int | None:
    """Rows at positions; none where an index of the positions is another of what is read."""
    if not program.free[operand] >> index & 1:
        return operand
    clash = program.free[operand] & program.free[positions]
    return None if clash else program.add(Take(program.terms[operand].dtype, index, positions, operand))


def _of_gather(program: Program, term: Block) -> int | None:
    """Whole slices at computed positions along one axis, or along several whose positions have axes of their own (``x[ix_(p, q)]``)."""
    call, starts = term.call, term.args[1]
    params: dict[str, Any] = call.params
    numbers = params["dimension_numbers"]
    before, (*batch, _), after = call.in_axes[0], call.in_axes[1], call.out_axes[0]
    shape = program.shape(before)
    taken = [d for d in numbers.start_index_map if params["slice_sizes"][d] < shape[d]]
    if not taken or any(params["slice_sizes"][d] != 1 or len(before[d]) != 1 for d in taken) or numbers.operand_batching_dims:
        return None
    fills = params["mode"] is lax.GatherScatterMode.FILL_OR_DROP
    if fills and (set(numbers.start_index_map) != set(taken) or params["fill_value"] is None):
        return None
    kept = [a for d, a in enumerate(before) if d not in numbers.collapsed_slice_dims]
    windows = [after[k] for k in sorted(numbers.offset_dims)]
    named = all(a == w or a in (before[d] for d in taken) for a, w in zip(kept, windows, strict=True))
    placed = batch == [a for k, a in enumerate(after) if k not in numbers.offset_dims]
    if not named or not placed:
        return None
    rows: int | None = term.args[0]
    within: list[int] = []
    for d in taken:
        column = _column(program, starts, list(numbers.start_index_map).index(d), len(numbers.start_index_map))
        if column is None or rows is None:
            return None
        positions = _wide(program, column)
        rows = _take(program, rows, before[d][0], positions)
        within += _within(program, positions, shape[d]) if fills else []
    if not fills or rows is None:
        return rows
    boolean = np.dtype(bool)
    inside = reduce(lambda one, other: program.add(Map(boolean, "and", (one, other))), within)
    fill = program.add(Literal.of(params["fill_value"], term.dtype))
    return program.add(Map(term.dtype, "select_n", (inside, fill, rows)))


def _within(program: Program, positions: int, extent: int) -> list[int]:
    """The comparisons that all hold where positions are inside."""
    boolean, counts = np.dtype(bool), program.terms[positions].dtype
    ends = (program.add(Literal.of(n, counts)) for n in (0, extent))
    return [program.add(Map(boolean, name, (positions, end))) for name, end in zip(("ge", "lt"), ends)]


def _wide(program: Program, positions: int) -> int:
    """The positions in a dtype that reaches the end of any index."""
    if program.terms[positions].dtype.itemsize >= 4:
        return positions
    counts = np.dtype(np.int32)
    return program.add(Map(counts, "convert_element_type", (positions,), (("new_dtype", counts),)))


def _column(program: Program, starts: int, column: int, count: int) -> int | None:
    """The value in one column of the positions."""
    if count == 1:
        return starts
    term: Term = program.terms[starts]
    if not isinstance(term, Block) or term.call.prim is not primitives.concatenate_p or len(term.args) != count:
        return None
    return term.args[column] if term.call.params["dimension"] == len(term.call.in_axes[0]) - 1 else None


_READS: dict[Any, Callable[[Program, Block], int | None]] = {primitives.slice_p: _of_slice, primitives.gather_p: _of_gather}
