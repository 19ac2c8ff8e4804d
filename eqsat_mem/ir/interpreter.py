"""The reference meaning of a program: one term at a time, every value whole, axes in ascending index order.

Slow and obvious on purpose: it judges whatever is emitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from eqsat_mem.ir import (
    Axes,
    Block,
    Const,
    Dot,
    DotPlus,
    Fold,
    Input,
    Iota,
    Literal,
    Map,
    Program,
    Rename,
    Take,
    Term,
    axes_mask,
    bits,
    children,
)
from eqsat_mem.ir.ops import MONOIDS, bind_call, map_row

Array = Any


class Machine:
    """The functions that compute elementwise operations, folds and contractions: here the primitives that JAX has for them."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def leaf(self, value: Array) -> Array:
        """The value of a term without operands."""
        return value

    def map(self, term: Map, operands: Sequence[Array]) -> Array:
        """An elementwise operation on arrays of one shape."""
        return map_row(term).bind(*operands, **dict(term.params))

    def fold(self, term: Fold, operand: Array, axes: Sequence[int]) -> Array:
        """A monoid folded over some axes."""
        return MONOIDS[term.monoid].reduce(operand, axes)

    def dot(self, term: Dot, lhs: Array, rhs: Array, contract: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]) -> Array:
        """A contraction, with axes as in ``lax.dot_general``: those of the batch come first, those of ``lhs`` next."""
        return lax.dot_general(lhs, rhs, ((contract[0], contract[1]), (batch[0], batch[1])), term.precision, term.dtype)


JAX = Machine()


def evaluate(program: Program, args: Sequence[Array], machine: Machine = JAX) -> list[Array]:
    """The outputs of ``program`` for arguments of the shapes of ``program.inputs``; effects happen in their order."""
    values: dict[int, Array] = {}
    results: dict[Any, list[Array]] = {}
    for t in _order(program):
        values[t] = evaluate_term(program, t, args, values, results, machine)
    return [to_axes(program, values[o.term], program.free[o.term], o.axes) for o in program.outputs]


def evaluate_term(
    program: Program, t: int, args: Sequence[Array], values: Mapping[int, Array], results: dict[Any, list[Array]], machine: Machine = JAX
) -> Array:
    """The value of one term, whose operands are in ``values``; results of calls are kept in ``results``."""
    term = program.terms[t]
    if children(term):
        return _operation(program, term, program.free[t], values, results, machine)
    if isinstance(term, Block):
        return _block(program, term, values, results)
    return machine.leaf(_leaf(program, term, args))


def _order(program: Program) -> list[int]:
    """The order of evaluation: the terms that each effect needs, effect by effect, then all others, operands before their users."""
    seen: dict[int, None] = {}
    for effect in program.effects:
        needed, stack = set(), [effect]
        while stack:
            t = stack.pop()
            if t not in seen and t not in needed:
                needed.add(t)
                stack.extend(children(program.terms[t]))
        seen.update(dict.fromkeys(sorted(needed)))
    return list(dict.fromkeys([*seen, *program.reachable()]))


def _leaf(program: Program, term: Term, args: Sequence[Array]) -> Array:
    match term:
        case Input():
            return from_axes(program, args[term.slot], term.axes)
        case Const():
            return from_axes(program, program.consts[term.slot], term.axes)
        case Literal():
            return jnp.asarray(term.value, term.dtype)
        case Iota():
            return lax.iota(term.dtype, program.indices[term.index].extent)
    raise TypeError(f"not a term without operands: {term!r}")


def _operation(
    program: Program, term: Term, free: int, values: Mapping[int, Array], results: dict[Any, list[Array]], machine: Machine = JAX
) -> Array:
    def along(a: int, mask: int) -> Array:
        return expand(program, values[a], program.free[a], mask)

    match term:
        case Map():
            return machine.map(term, [along(a, free) for a in term.args])
        case Fold():
            mask = program.free[term.arg] | term.over
            axes = [k for k, i in enumerate(bits(mask)) if term.over >> i & 1]
            return machine.fold(term, along(term.arg, mask), axes)
        case Dot():
            return _dot(program, term, along, machine)
        case DotPlus():
            return _dot_plus(program, term, free, along, machine)
        case Take():
            return _take(program, term, free, values[term.arg], along(term.positions, free))
        case Rename():
            to = dict(term.pairs)
            return from_axes(program, values[term.arg], tuple((to.get(i, i),) for i in bits(program.free[term.arg])))
        case Block():
            return _block(program, term, values, results)
    raise TypeError(f"not a term with operands: {term!r}")


def _block(program: Program, term: Block, values: Mapping[int, Array], results: dict[Any, list[Array]]) -> Array:
    """One result of a call, which runs once for all of them."""
    call, made = term.call, (term.call, term.args)
    if made not in results:
        operands = [to_axes(program, values[a], program.free[a], axes) for a, axes in zip(term.args, call.in_axes)]
        results[made] = bind_call(call, operands)
    return from_axes(program, results[made][term.out], call.out_axes[term.out])


def _dot(program: Program, term: Dot, along: Any, machine: Machine) -> Array:
    """A contraction: shared free indices are batch axes; an index of ``over`` that one side lacks is broadcast there."""
    lhs, rhs = program.free[term.lhs] | term.over, program.free[term.rhs] | term.over
    shared = lhs & rhs & ~term.over
    where = [{i: k for k, i in enumerate(bits(mask))} for mask in (lhs, rhs)]
    contract = [[side[i] for i in bits(term.over)] for side in where]
    batch = [[side[i] for i in bits(shared)] for side in where]
    out = machine.dot(term, along(term.lhs, lhs), along(term.rhs, rhs), contract, batch)
    axes = [*bits(shared), *bits(lhs & ~shared & ~term.over), *bits(rhs & ~shared & ~term.over)]
    return from_axes(program, out, tuple((i,) for i in axes))


def _take(program: Program, term: Take, free: int, array: Array, positions: Array) -> Array:
    """The elements at ``positions`` along one index, which are laid out along the indices ``free`` of the result."""
    xp = _library(array)
    places = []
    for i in bits(program.free[term.arg]):
        extent = program.indices[i].extent
        if i == term.index:
            places.append(xp.clip(positions.astype(np.int64 if xp is np else positions.dtype), 0, extent - 1))
        else:
            places.append(expand(program, np.arange(extent), 1 << i, free))
    return array[tuple(places)]


def _dot_plus(program: Program, term: DotPlus, free: int, along: Any, machine: Machine) -> Array:
    """A contraction, to which the sums of two more operands over the same indices are added, first that of the left."""
    product = Dot(term.dtype, term.over, term.lhs, term.rhs)
    total = expand(program, _dot(program, product, along, machine), program.free_of(product), free)
    for added in (term.left, term.right):
        fold = Fold(term.dtype, "add", term.over, added)
        mask = program.free[added] | term.over
        summed = machine.fold(fold, along(added, mask), [k for k, i in enumerate(bits(mask)) if term.over >> i & 1])
        total = machine.map(Map(term.dtype, "add", ()), [total, expand(program, summed, program.free_of(fold), free)])
    return total


# --- layouts ----------------------------------------------------------------------------------------


def from_axes(program: Program, array: Array, axes: Axes) -> Array:
    """An array laid out along ``axes``, as one with its indices in ascending order."""
    order = [i for axis in axes for i in axis]
    xp = _library(array)
    split = xp.reshape(array, [program.indices[i].extent for i in order])
    return xp.transpose(split, sorted(range(len(order)), key=order.__getitem__))


def expand(program: Program, array: Array, have: int, want: int) -> Array:
    """An array over the indices ``have``, broadcast to those of ``want``."""
    shape = [program.indices[i].extent for i in bits(want)]
    if isinstance(array, np.ndarray):
        return np.broadcast_to(array.reshape([n if have >> i & 1 else 1 for i, n in zip(bits(want), shape)]), shape)
    keep = [k for k, i in enumerate(bits(want)) if have >> i & 1]
    return lax.broadcast_in_dim(array, shape, keep)


def to_axes(program: Program, array: Array, have: int, axes: Axes) -> Array:
    """An array over the indices ``have`` in ascending order, laid out along ``axes``."""
    whole = expand(program, array, have, axes_mask(axes))
    ascending = list(bits(axes_mask(axes)))
    order = [ascending.index(i) for axis in axes for i in axis]
    xp = _library(array)
    return xp.reshape(xp.transpose(whole, order), program.shape(axes))


def _library(array: Array) -> Any:
    """Arrays of numpy are moved by numpy, which compiles nothing."""
    return np if isinstance(array, np.ndarray) else jnp
