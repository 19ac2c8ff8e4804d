"""Folds by users' monoids taken apart: states of elements, their combination, which loops may do in chunks, and what becomes of the last.

Rules see such a fold as one operation. Loops see elementwise terms and a fold of states: folds of the table where each value of a state is
combined by itself, else one call of ``lax.reduce``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial, reduce
from operator import or_
from typing import Any

import jax
from jax import lax
from jax.extend.core import primitives

from eqsat_mem.egraph.lowering import Lower, Lowering, allow
from eqsat_mem.errors import OptionError
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block, Call, Fold, Input, Literal, Map, Program, Source, bits, describe, mask_of
from eqsat_mem.ir.ops import Monoid, named_axes, operation_of


def monoid_folds(program: Program) -> dict[int, Lower]:
    """The lowering of each fold by a monoid of the user's to folds of its parts.

    Lowering raises:
        OptionError: if a monoid is none, or is not made of elementwise operations.
    """
    monoids = {t: monoid for t in range(len(program.terms)) if (monoid := _monoid(program, t)) is not None}
    return {t: partial(_fold, monoid) for t, monoid in monoids.items()}


def _monoid(program: Program, t: int) -> Monoid | None:
    term = program.terms[t]
    operation = operation_of(term.call.params) if isinstance(term, Block) else None
    return operation.monoid if operation is not None else None


def _fold(monoid: Monoid, into: Lowering, t: int, ids: Mapping[int, int]) -> int:
    """The parts of one fold: they may be sliced where it may, and its states besides where it accumulates."""
    term, source = into.old.terms[t], into.old.source.get(t)
    assert isinstance(term, Block)
    args = [ids[c] for c in term.args]
    axes = named_axes(monoid.checked.operation, term.call)
    over = mask_of(i for axis in axes.values() for i in axis)
    sliced, chunked = into.before.splits.get(t, 0), into.before.accumulates.get(t, 0)
    states = _elementwise(into, monoid, "lift", args, sliced | chunked, source)
    totals = _combined(into.new, monoid, states, over, source)
    for total in totals:
        allow(into.after.splits, total, sliced & into.new.free[total])
        allow(into.after.accumulates, total, chunked)
    (result,) = _elementwise(into, monoid, "finish", totals, sliced, source)
    return result


def _elementwise(into: Lowering, monoid: Monoid, name: str, args: Sequence[int], sliced: int, source: Source | None) -> list[int]:
    """The terms of a function of scalars, on operands with indices."""
    part = _of_scalars(monoid, name, tuple(into.new.terms[a].dtype for a in args), _x64())
    ids: dict[int, int] = {}
    for t in part.reachable():
        term = part.terms[t]
        if isinstance(term, Input):
            ids[t] = args[term.slot]
            continue
        ids[t] = into.new.add(part.on(t, ids), source)
        allow(into.after.splits, ids[t], sliced & into.new.free[ids[t]])
    return [ids[o.term] for o in part.outputs]


def _combined(new: Program, monoid: Monoid, states: Sequence[int], over: int, source: Source | None) -> list[int]:
    """The states of all elements combined over an index set."""
    dtypes = tuple(new.terms[s].dtype for s in states)
    scalars = tuple(jax.ShapeDtypeStruct((), dtype) for dtype in dtypes)
    names = monoid.reductions(scalars)
    if all(names):
        return [new.add(Fold(dtype, str(name), over, s), source) for dtype, name, s in zip(dtypes, names, states)]
    kept = reduce(or_, (new.free[s] for s in states)) & ~over
    axes, results = (tuple((i,) for i in bits(mask)) for mask in (kept | over, kept))
    folded = tuple(k for k, axis in enumerate(axes) if axis not in results)
    params = _reduction(monoid, dtypes, folded, len(axes), _x64())
    n = len(states)
    call = Call(primitives.reduce_p, params, (axes,) * n + ((),) * n, (results,) * n, dtypes, kept, over)
    identity = [new.add(Literal.of(number, dtype)) for number, dtype in zip(monoid.start(scalars), dtypes)]
    return [new.add(Block(dtype, call, (*states, *identity), k), source) for k, dtype in enumerate(dtypes)]


def _x64() -> bool:
    config: Any = jax.config
    return bool(config.jax_enable_x64)


@cache
def _of_scalars(monoid: Monoid, name: str, dtypes: tuple[Any, ...], x64: bool) -> Program:
    """The operation of a monoid on single elements as a program; JAX traces it as its setting for 64 bits says."""

    def finish(*state: Any) -> tuple[Any, ...]:
        return (monoid.finished(state),)

    fun = monoid.lift_scalars if name == "lift" else finish
    part = load(jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct((), dtype) for dtype in dtypes)), [f"x{k}" for k in range(len(dtypes))])
    for t in part.reachable():
        if not isinstance(part.terms[t], Input | Map | Literal):
            raise OptionError(
                f"monoid {monoid.name!r}: {name} is made of more than elementwise operations; it is a function of single elements. "
                f"Term: {describe(part, t)}."
            )
    return part


@cache
def _reduction(monoid: Monoid, dtypes: tuple[Any, ...], axes: tuple[int, ...], rank: int, x64: bool) -> dict[str, Any]:
    """The parameters of ``lax.reduce`` of states of ``rank`` axes over some of them."""
    arrays = [jax.ShapeDtypeStruct((2,) * rank, dtype) for dtype in dtypes]

    def whole(*states: Any) -> Any:
        return lax.reduce(states, monoid.start(states), monoid.combine_scalars, axes)

    (params,) = (eqn.params for eqn in jax.make_jaxpr(whole)(*arrays).eqns if eqn.primitive is primitives.reduce_p)
    return dict(params)
