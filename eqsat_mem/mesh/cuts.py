"""Operations that cut an axis, or put one together: slices, paddings, concatenations, and updates at known positions, in one form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import primitives

from eqsat_mem.ir import Axis, Block, Call, Literal, Program, mask_of

MOST_PIECES = 16
"""A value of more pieces stays as it is: each element would be chosen from all of them."""


@dataclass(frozen=True)
class Cut:
    """The pieces that an operation puts together along one axis of its result.

    Attributes:
        axis: the axis of the result; the operand's axis where the result has none.
        index: the index of the result along it; -1 where a single row is left.
        extent: the number of elements of the result.
        along: the index of each operand along the axis; -1 where it has none.
        reads: for each piece the first element and the one after the last, the operand, and where in it they begin and in which steps.
    """

    axis: int
    index: int
    extent: int
    along: tuple[int, ...]
    reads: tuple[tuple[int, int, int, int, int], ...]


def cuts(program: Program, term: Block) -> list[Cut]:
    """The axes along which an operation puts together what it has read; none for other operations."""
    way = WAYS.get(term.call.prim.name)
    if way is None or jax.dtypes.issubdtype(term.dtype, jax.dtypes.extended):
        return []
    return [cut for cut in way(program, term) if cut.extent]


def index_of(axis: Axis) -> int:
    """The index along an axis, -1 where it has a single element."""
    return axis[0] if axis else -1


def _are_single(*axes: Axis) -> bool:
    return all(len(axis) <= 1 for axis in axes)


def _sliced(program: Program, term: Block) -> Iterator[Cut]:
    (before,), (after,), params = term.call.in_axes, term.call.out_axes, term.call.params
    for a, (b, c) in enumerate(zip(before, after, strict=True)):
        if b != c and b and _are_single(b, c):
            start, step = params["start_indices"][a], 1 if params["strides"] is None else params["strides"][a]
            extent = program.extent(mask_of(c))
            yield Cut(a, index_of(c), extent, (b[0],), ((0, extent, 0, start, step if c else 0),))


def _split(program: Program, term: Block) -> Iterator[Cut]:
    a, sizes = term.call.params["axis"], term.call.params["sizes"]
    b, c = term.call.in_axes[0][a], term.call.out_axes[term.out][a]
    if b and _are_single(b, c):
        extent = program.extent(mask_of(c))
        yield Cut(a, index_of(c), extent, (b[0],), ((0, extent, 0, sum(sizes[: term.out]), 1 if c else 0),))


def _padded(program: Program, term: Block) -> Iterator[Cut]:
    (before, _), (after,) = term.call.in_axes, term.call.out_axes
    for a, config in enumerate(term.call.params["padding_config"]):
        low, high, between = map(int, config)
        b, c = before[a], after[a]
        if (low, high, between) != (0, 0, 0) and not between and c and _are_single(b, c):
            n, m = program.extent(mask_of(b)), program.extent(mask_of(c))
            first, last = max(low, 0), min(low + n, m)
            reads = (0, first, 1, 0, 0), (first, last, 0, -low, 1) if b else (first, last, 0, 0, 0), (last, m, 1, 0, 0)
            yield Cut(a, c[0], m, (index_of(b), -1), tuple(read for read in reads if read[0] < read[1]))


def _concatenated(program: Program, term: Block) -> Iterator[Cut]:
    a, (after,) = term.call.params["dimension"], term.call.out_axes
    begin, reads = 0, []
    for k, axes in enumerate(term.call.in_axes):
        extent = program.extent(mask_of(axes[a]))
        reads += [(begin, begin + extent, k, *((-begin, 1) if axes[a] else (0, 0)))] if extent else []
        begin += extent
    if len(after[a]) == 1 and len(reads) <= MOST_PIECES and _are_single(*(axes[a] for axes in term.call.in_axes)):
        yield Cut(a, after[a][0], begin, tuple(index_of(axes[a]) for axes in term.call.in_axes), tuple(reads))


def _updated(program: Program, term: Block) -> Iterator[Cut]:
    (before, *_), (after,), u = term.call.in_axes, term.call.out_axes, written_operand(term)
    kept = program.free[term.args[0]]
    for a, (start, axis) in enumerate(window_of(program, term) or ()):
        b, c = before[a], after[a]
        n, m = program.extent(mask_of(b)), program.extent(mask_of(axis))
        if m != n and b and c and _are_single(b, c, axis):
            own = axis[0] if axis and program.free[term.args[u]] >> axis[0] & 1 else -1
            reads = (0, start, 0, 0, 1), (start, start + m, u, *((-start, 1) if own >= 0 else (0, 0))), (start + m, n, 0, 0, 1)
            along = (b[0] if kept >> b[0] & 1 else -1, *(-1 for _ in range(u - 1)), own)
            yield Cut(a, c[0], n, along, tuple(read for read in reads if read[0] < read[1]))


def written_operand(term: Block) -> int:
    """The operand that an update writes."""
    return 1 if term.call.prim.name == "dynamic_update_slice" else 2


def window_of(program: Program, term: Block) -> list[tuple[int, Axis]] | None:
    """The place where an update begins along each axis, and its own axis there, if it is written as it is and the place is known."""
    call, (before, *_), u = term.call, term.call.in_axes, written_operand(term)
    inserted: tuple[int, ...] = ()
    if u == 1:
        places = dict(enumerate(_number(program, a) for a in term.args[2:]))
    else:
        numbers = call.params["dimension_numbers"]
        inserted, order = tuple(numbers.inserted_window_dims), tuple(numbers.scatter_dims_to_operand_dims)
        places = dict(zip(order, _numbers(program, term.args[1], len(order))))
        if numbers.operand_batching_dims or len(numbers.update_window_dims) != len(call.in_axes[u]) or len(places) != len(order):
            return None
    rest, found = iter(call.in_axes[u]), list[tuple[int, Axis]]()
    for a, b in enumerate(before):
        start, axis = places.get(a, 0), () if a in inserted else next(rest)
        if start is None or start < 0 or start + program.extent(mask_of(axis)) > program.extent(mask_of(b)):
            return None
        found.append((start, axis))
    return found


def as_slice(program: Program, term: Block) -> Block:
    """A gather of one window at known positions as the slice that it is; other operations as they are."""
    call = term.call
    numbers: Any = call.params.get("dimension_numbers")
    if call.prim.name != "gather" or numbers.collapsed_slice_dims or numbers.operand_batching_dims or len(call.in_axes[1]) != 1:
        return term
    known, sizes = _numbers(program, term.args[1], len(numbers.start_index_map)), call.params["slice_sizes"]
    places = dict(zip(numbers.start_index_map, known))
    starts = [places.get(a, 0) for a in range(len(sizes))]
    extents = [program.extent(mask_of(axis)) for axis in call.in_axes[0]]
    if len(known) != len(places) or any(s is None or not 0 <= s <= n - size for s, n, size in zip(starts, extents, sizes)):
        return term
    limits = tuple((start or 0) + size for start, size in zip(starts, sizes))
    params = {"start_indices": tuple(starts), "limit_indices": limits, "strides": None}
    pairs = zip(call.in_axes[0], call.out_axes[0], strict=True)
    pointwise = mask_of(before[0] for before, after in pairs if before == after and len(before) == 1)
    new = Call(primitives.slice_p, params, call.in_axes[:1], call.out_axes, call.out_dtypes, pointwise)
    return Block(term.dtype, new, term.args[:1], term.out)


def _numbers(program: Program, t: int, count: int) -> list[int | None]:
    """The numbers that a vector is made of, as far as they are known."""
    term = program.terms[t]
    if isinstance(term, Block) and term.call.prim.name == "concatenate":
        return [_number(program, a) for a in term.args]
    return [_number(program, t)] * count


def _number(program: Program, t: int) -> int | None:
    term = program.terms[t]
    return int(term.value) if isinstance(term, Literal) else None


_Way = Callable[[Program, Block], Iterator[Cut]]
WAYS: dict[str, _Way] = {
    "slice": _sliced,
    "split": _split,
    "pad": _padded,
    "concatenate": _concatenated,
    "dynamic_update_slice": _updated,
    "scatter": _updated,
    "scatter-add": _updated,
}
UPDATES = frozenset(name for name, way in WAYS.items() if way is _updated)
