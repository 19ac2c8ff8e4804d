"""Elements of sorted values found by counting: a median of all distances, and no distances side by side.

A sort holds every element twice. Where only elements at a few positions are read of it, as medians and quantiles read them, each is
found from its highest bit down: a bit is one if, with it, no more elements are smaller than the position says. A count is a fold,
which is done in chunks of whatever the elements are computed from. There is one count for each bit, so this is for what does not
fit otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from eqsat_mem.frontend.inline import lines_of
from eqsat_mem.ir import Block, Program, Term, children
from eqsat_mem.ir.interpreter import evaluate_term, from_axes, to_axes
from eqsat_mem.ir.ops import bind_call
from eqsat_mem.passes import EVERY, RANKS, Pass
from eqsat_mem.transforms.retraced import retraced

Array = Any

LEAST = 2**14
"""Fewer elements are sorted."""
MOST_READ = 16
"""Where more elements are read of a sorted row, it is sorted."""


def with_ranks(program: Program, passes: Collection[Pass] = EVERY) -> Program | None:
    """The program with counts in place of sorts of which few elements are read, ``None`` where there are none."""
    if RANKS not in passes or program.effects:
        return None
    sorts = _sorts(program)
    if not sorts:
        return None
    new = retraced(program, lambda args, consts: _outputs(replace(program, consts=list(consts)), sorts, args), passes)
    new.passes |= {RANKS.name}
    return new


@dataclass(frozen=True)
class _Sort:
    """A sort of one operand of which only ``reads`` need elements, along axis ``dimension``."""

    term: int
    operand: int
    dimension: int
    reads: tuple[int, ...]


def _sorts(program: Program) -> list[_Sort]:
    """The sorts that can be counts: all that reads them reads a few elements, at positions that depend on no sorted value."""
    found: list[_Sort] = []
    after: set[int] = set()
    returned = set(program.roots())
    for t in program.reachable():
        term = program.terms[t]
        if isinstance(term, Block) and term.call.prim is primitives.sort_p:
            after.add(t)
            reads = tuple(program.readers(t))
            if t not in returned and _is_ordered(program, term) and _read_count(program, t, reads) <= MOST_READ:
                found.append(_Sort(t, term.args[0], term.call.params["dimension"], reads))
        elif after.intersection(children(term)):
            after.add(t)
    return [s for s in found if not any(after.intersection(program.terms[r].args[1:]) for r in s.reads)]  # type: ignore[attr-defined]


def _is_ordered(program: Program, sort: Block) -> bool:
    """Whether a sort is of one long operand whose bits give the order: a sign first, and numbers of other bits than what is none.

    Of floats of eight bits some have no sign, and some no other zero below zero than a NaN.
    """
    shape = program.shape(sort.call.in_axes[0])
    kind = "" if jax.dtypes.issubdtype(sort.dtype, jax.dtypes.extended) else _kind(sort.dtype)
    return (
        len(sort.args) == 1
        and kind in ("f", "i", "u")
        and (1 if kind != "f" else 2) <= sort.dtype.itemsize <= 8
        and LEAST <= shape[sort.call.params["dimension"]] < 2**31
    )


def _kind(dtype: Any) -> str:
    return "f" if jnp.issubdtype(dtype, np.floating) else np.dtype(dtype).kind


def _read_count(program: Program, sort: int, reads: Sequence[int]) -> float:
    """The elements that are read of each sorted row; infinitely many where one of ``reads`` reads more than rows at positions."""
    return sum(_count(program, sort, program.terms[r]) for r in reads)


def _count(program: Program, sort: int, read: Term) -> float:
    made = program.terms[sort]
    assert isinstance(made, Block)
    if not isinstance(read, Block) or read.call.prim not in _READS or read.args[0] != sort or sort in read.args[1:]:
        return np.inf
    shape, cut = _READS[read.call.prim](program, read)
    whole = read.call.in_axes[0] == made.call.out_axes[0] and cut == (made.call.params["dimension"],)
    return math.prod(shape) if whole else np.inf


Positions = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of the positions that are read, and the axes that are cut."""


def _of_slice(program: Program, term: Block) -> Positions:
    shape, cut = program.shape(term.call.in_axes[0]), program.shape(term.call.out_axes[0])
    changed = tuple(d for d, (n, m) in enumerate(zip(shape, cut, strict=True)) if n != m)
    return tuple(cut[d] for d in changed), changed


def _of_gather(program: Program, term: Block) -> Positions:
    params = term.call.params
    numbers, shape = params["dimension_numbers"], program.shape(term.call.in_axes[0])
    cut = tuple(d for d, (n, m) in enumerate(zip(shape, params["slice_sizes"], strict=True)) if n != m)
    clips = params["mode"] in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    plain = (
        clips and numbers.start_index_map == cut and not numbers.operand_batching_dims and [params["slice_sizes"][d] for d in cut] == [1]
    )
    return program.shape(term.call.in_axes[1])[:-1], cut if plain else ()


_READS: dict[Any, Callable[[Program, Block], Positions]] = {
    primitives.slice_p: _of_slice,
    primitives.dynamic_slice_p: _of_slice,
    primitives.gather_p: _of_gather,
}


def _outputs(program: Program, sorts: Sequence[_Sort], args: Sequence[Array]) -> list[Array]:
    """The results of the program, with what is read of sorts found by counting."""
    of = {r: s for s in sorts for r in s.reads}
    values: dict[int, Array] = {}
    results: dict[Any, list[Array]] = {}
    for t in _order(program, of):
        with lines_of(program.source.get(t)):
            if t not in of:
                values[t] = evaluate_term(program, t, args, values, results)
            elif t not in values:
                values |= _found(program, of[t], values)
    return [to_axes(program, values[o.term], program.free[o.term], o.axes) for o in program.outputs]


def _order(program: Program, of: dict[int, _Sort]) -> Iterator[int]:
    """Operands before what reads them, and the positions of all reads of a sort before the first."""

    def operands(t: int) -> list[int]:
        if t not in of:
            return list(children(program.terms[t]))
        return [of[t].operand, *(p for r in of[t].reads for p in children(program.terms[r])[1:])]

    seen: set[int] = set()
    stack = [(t, False) for t in reversed(program.roots())]
    while stack:
        t, ready = stack.pop()
        if ready:
            yield t
        elif t not in seen:
            seen.add(t)
            stack += [(t, True), *((c, False) for c in reversed(operands(t)))]


def _found(program: Program, sort: _Sort, values: dict[int, Array]) -> dict[int, Array]:
    """The elements that each read takes of a sort, which are found together."""

    def laid_out(t: int, axes: Any) -> Array:
        return to_axes(program, values[t], program.free[t], axes)

    made = program.terms[sort.term]
    assert isinstance(made, Block)
    rows = laid_out(sort.operand, made.call.in_axes[0])
    reads: list[Block] = [program.terms[r] for r in sort.reads]  # type: ignore[misc]
    at = [[laid_out(a, axes) for a, axes in zip(term.args[1:], term.call.in_axes[1:])] for term in reads]
    positions = [_positions(term, sort.dimension, operands, rows.shape) for term, operands in zip(reads, at)]
    elements = of_ranks(rows, jnp.concatenate([p.reshape(-1) for p in positions]), sort.dimension)
    found, start = {}, 0
    for r, term, operands, p in zip(sort.reads, reads, at, positions):
        own = lax.slice_in_dim(elements, start, start + p.size, axis=sort.dimension)
        start += p.size
        if term.call.prim is primitives.gather_p:
            places = lax.reshape(lax.iota(operands[0].dtype, p.size), operands[0].shape)
            own = bind_call(term.call, [own, places])[0]
        found[r] = from_axes(program, own, term.call.out_axes[term.out])
    return found


def _positions(read: Block, d: int, operands: Sequence[Array], shape: Sequence[int]) -> Array:
    """The positions along axis ``d`` that a read has, those outside being the nearest inside."""
    params = read.call.params
    if read.call.prim is primitives.gather_p:
        return _clipped(operands[0], shape[d] - 1)
    if read.call.prim is primitives.slice_p:
        stride = 1 if params["strides"] is None else params["strides"][d]
        return jnp.arange(params["start_indices"][d], params["limit_indices"][d], stride, dtype=np.int32)
    size = params["slice_sizes"][d]
    return _clipped(operands[d], shape[d] - size) + lax.iota(np.int32, size)


def _clipped(positions: Array, last: int) -> Array:
    """Positions of any integer dtype from the first to the last; wide ones are compared before they are narrowed."""
    wide = positions if positions.dtype.itemsize > 4 or positions.dtype == np.uint32 else positions.astype(np.int32)
    return jnp.clip(wide, 0, last).astype(np.int32)


def of_ranks(x: Array, ranks: Array, axis: int) -> Array:
    """``sort(x, axis)`` at these positions: bit by bit, the largest key that has no more keys below it than the rank says."""
    keys, number = _keys(jnp.moveaxis(x, axis, -1))
    wanted = jnp.expand_dims(ranks, range(1, keys.ndim))

    def step(known: Array, bit: Array) -> tuple[Array, None]:
        tried = known | bit
        below = jnp.stack([jnp.sum(keys < key[..., None], axis=-1, dtype=np.int32) for key in tried])
        return jnp.where(below <= wanted, tried, known), None

    width = keys.dtype.itemsize * 8
    places = lax.rev(lax.shift_left(jnp.ones((width,), keys.dtype), lax.iota(keys.dtype, width)), (0,))
    found, _ = lax.scan(step, jnp.zeros((ranks.size, *keys.shape[:-1]), keys.dtype), places)
    return jnp.moveaxis(number(found), 0, axis)


def _keys(x: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Numbers without a sign in the order in which ``x`` is sorted, and the elements that they stand for.

    Zeros are one key, and so is all that is not a number, the last.
    """
    width = x.dtype.itemsize * 8
    unsigned = np.dtype(f"uint{width}")
    if _kind(x.dtype) == "u":
        return x, lambda keys: keys
    top = np.asarray(1 << (width - 1), unsigned)
    bits = lax.bitcast_convert_type(x, unsigned)
    if _kind(x.dtype) == "i":
        return bits ^ top, lambda keys: lax.bitcast_convert_type(keys ^ top, x.dtype)
    keys = jnp.where(bits >= top, ~bits, bits | top)
    keys = jnp.where(bits == top, top, jnp.where(x != x, np.asarray(2**width - 1, unsigned), keys))
    return keys, lambda keys: lax.bitcast_convert_type(jnp.where(keys >= top, keys ^ top, ~keys), x.dtype)
