"""The reference meaning of a program: one term at a time, every value whole, axes in ascending index order.

Slow and obvious on purpose: it judges whatever is emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .ir import Axes, Block, Call, Const, Dot, Fold, Input, Iota, Literal, Map, Program, Rename, axes_mask, bits
from .ops import MAPS, MONOIDS, bind_call

Array = Any


def evaluate(program: Program, args: Sequence[Array]) -> list[Array]:
    """The outputs of ``program`` for arguments of the shapes of ``program.inputs``; effects happen in their order."""
    values: dict[int, Array] = {}
    results: dict[Call, list[Array]] = {}
    for t in program.effects + program.reachable():
        _value(program, t, args, values, results)
    return [to_axes(program, values[o.term], program.free[o.term], o.axes) for o in program.outputs]


def _value(program: Program, t: int, args: Sequence[Array], values: dict[int, Array], results: dict[Call, list[Array]]) -> Array:
    """The value of a term, computed after those of its operands, which may need to run first for the sake of an effect."""
    if t in values:
        return values[t]
    term = program.terms[t]

    def value(a: int) -> Array:
        return _value(program, a, args, values, results)

    def along(a: int, mask: int) -> Array:
        return expand(program, value(a), program.free[a], mask)

    match term:
        case Input():
            out = from_axes(program, args[term.slot], term.axes)
        case Const():
            out = from_axes(program, program.consts[term.slot], term.axes)
        case Literal():
            out = jnp.asarray(term.value, term.dtype)
        case Iota():
            out = lax.iota(term.dtype, program.indices[term.index].extent)
        case Map():
            out = MAPS[term.op].bind(*(along(a, program.free[t]) for a in term.args), **dict(term.params))
        case Fold():
            mask = program.free[term.arg] | term.over
            axes = [k for k, i in enumerate(bits(mask)) if term.over >> i & 1]
            out = MONOIDS[term.monoid].reduce(along(term.arg, mask), axes)
        case Dot():
            out = _dot(program, term, along)
        case Rename():
            to = dict(term.pairs)
            out = from_axes(program, value(term.arg), tuple((to.get(i, i),) for i in bits(program.free[term.arg])))
        case Block():
            if term.call not in results:
                operands = [to_axes(program, value(a), program.free[a], axes) for a, axes in zip(term.args, term.call.in_axes)]
                results[term.call] = bind_call(term.call, operands)
            out = from_axes(program, results[term.call][term.out], term.call.out_axes[term.out])
        case _:
            raise TypeError(f"not a term: {term!r}")
    values[t] = out
    return out


def _dot(program: Program, term: Dot, along: Any) -> Array:
    """A contraction: shared free indices are batch axes; an index of ``over`` that one side lacks is broadcast there."""
    lhs, rhs = program.free[term.lhs] | term.over, program.free[term.rhs] | term.over
    shared = lhs & rhs & ~term.over
    where = [{i: k for k, i in enumerate(bits(mask))} for mask in (lhs, rhs)]
    contract = tuple(tuple(side[i] for i in bits(term.over)) for side in where)
    batch = tuple(tuple(side[i] for i in bits(shared)) for side in where)
    out = lax.dot_general(along(term.lhs, lhs), along(term.rhs, rhs), (contract, batch), term.precision, term.dtype)
    axes = [*bits(shared), *bits(lhs & ~shared & ~term.over), *bits(rhs & ~shared & ~term.over)]
    return from_axes(program, out, tuple((i,) for i in axes))


# --- layouts ----------------------------------------------------------------------------------------


def from_axes(program: Program, array: Array, axes: Axes) -> Array:
    """An array laid out along ``axes``, as one with its indices in ascending order."""
    order = [i for axis in axes for i in axis]
    split = jnp.reshape(array, [program.indices[i].extent for i in order])
    return jnp.transpose(split, sorted(range(len(order)), key=order.__getitem__))


def expand(program: Program, array: Array, have: int, want: int) -> Array:
    """An array over the indices ``have``, broadcast to those of ``want``."""
    shape = [program.indices[i].extent for i in bits(want)]
    keep = [k for k, i in enumerate(bits(want)) if have >> i & 1]
    return lax.broadcast_in_dim(array, shape, keep)


def to_axes(program: Program, array: Array, have: int, axes: Axes) -> Array:
    """An array over the indices ``have`` in ascending order, laid out along ``axes``."""
    whole = expand(program, array, have, axes_mask(axes))
    ascending = list(bits(axes_mask(axes)))
    order = [ascending.index(i) for axis in axes for i in axis]
    return jnp.reshape(jnp.transpose(whole, order), program.shape(axes))
