"""Gathers and slices of computed values as takes, which rules know how to pass down to operands.

``k[idx]`` needs all of ``k``: it reads rows at positions that nobody knows before. Where ``k`` is elementwise, a fold or a contraction,
its rows are the same of rows of its operands, and so are slices, ``k[1:]``. What is read of arguments and of other values that are in
memory stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """The elements from a start in even steps, along one axis."""
    call, params = term.call, term.call.params
    (before,), (after,) = call.in_axes, call.out_axes
    cut = [d for d, (b, a) in enumerate(zip(before, after, strict=True)) if b != a]
    if len(cut) != 1 or len(before[cut[0]]) != 1 or len(after[cut[0]]) > 1 or program.extent(mask_of(after[cut[0]])) == 0:
        return None
    (d,) = cut
    counts = np.dtype(np.int32)
    place = program.add(Literal.of(params["start_indices"][d], counts))
    for i in after[d]:
        stride = program.add(Literal.of(1 if params["strides"] is None else params["strides"][d], counts))
        along = program.add(Map(counts, "mul", (program.add(Iota(counts, i)), stride)))
        place = program.add(Map(counts, "add", (along, place)))
    return _take(program, term, before[d][0], place)


def _take(program: Program, term: Block, index: int, positions: int) -> int | None:
    """Rows at positions; none where an index of the positions is another of what is read."""
    operand = term.args[0]
    if not program.free[operand] >> index & 1:
        return operand
    clash = program.free[operand] & program.free[positions]
    return None if clash else program.add(Take(term.dtype, index, positions, operand))


def _of_gather(program: Program, term: Block) -> int | None:
    """Whole slices at computed positions along one axis."""
    call, starts = term.call, term.args[1]
    params: dict[str, Any] = call.params
    numbers = params["dimension_numbers"]
    before, (*batch, _), after = call.in_axes[0], call.in_axes[1], call.out_axes[0]
    shape = program.shape(before)
    taken = [d for d in numbers.start_index_map if params["slice_sizes"][d] < shape[d]]
    if len(taken) != 1 or params["slice_sizes"][taken[0]] != 1 or numbers.operand_batching_dims or len(before[taken[0]]) != 1:
        return None
    fills = params["mode"] is lax.GatherScatterMode.FILL_OR_DROP
    positions = _column(program, starts, list(numbers.start_index_map).index(taken[0]), len(numbers.start_index_map))
    if positions is None or (fills and (len(numbers.start_index_map) > 1 or params["fill_value"] is None)):
        return None
    kept = [a for d, a in enumerate(before) if d not in numbers.collapsed_slice_dims]
    windows = [after[k] for k in sorted(numbers.offset_dims)]
    named = all(a in (w, before[taken[0]]) for a, w in zip(kept, windows, strict=True))
    placed = batch == [a for k, a in enumerate(after) if k not in numbers.offset_dims]
    if not named or not placed:
        return None
    positions = _wide(program, positions)
    rows = _take(program, term, before[taken[0]][0], positions)
    return _filled(program, term, rows, positions, shape[taken[0]]) if fills and rows is not None else rows


def _filled(program: Program, term: Block, rows: int, positions: int, extent: int) -> int:
    """Rows, and the value that stands for those at positions outside."""
    boolean, counts = np.dtype(bool), program.terms[positions].dtype
    ends = (program.add(Literal.of(n, counts)) for n in (0, extent))
    inside = [program.add(Map(boolean, name, (positions, end))) for name, end in zip(("ge", "lt"), ends)]
    within = program.add(Map(boolean, "and", tuple(inside)))
    fill = program.add(Literal.of(term.call.params["fill_value"], term.dtype))
    return program.add(Map(term.dtype, "select_n", (within, fill, rows)))


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
