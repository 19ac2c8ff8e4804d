"""A planned function as a JAX primitive, so that grad, vmap, jit, scan and other transformations see one operation.

There are two primitives, both with a :class:`~eqsat_mem.api.function.Function` as parameter:

- ``planned``: ``out = f(x)``.
- ``planned_linear``: ``d_out = df(x; t)``, linear in the tangents ``t``. Its transpose is the planned ``vjp`` of ``f``, which
  recomputes from ``x``, so that the arguments are the only residuals that reverse mode keeps.

Both are planned when they are lowered, under the memory limit of ``f``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
from jax import jit
from jax.dtypes import float0
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from eqsat_mem.api.function import Dims, Function, Mask, batched, cotangent, differentiable, pick, pruned, spread, tangent, transposed
from eqsat_mem.api.varying import plain_aval, varying_as
from eqsat_mem.backends.xla import laid
from eqsat_mem.frontend.effects import is_axis_name

Batched = tuple[list[Any], list[int | None]]
"""The results, and the axis along which each is batched (None: not batched)."""

planned_p = Primitive("planned")
planned_p.multiple_results = True

planned_linear_p = Primitive("planned_linear")
planned_linear_p.multiple_results = True


def bind(function: Function, *args: Any) -> list[Any]:
    """Bind the primitive of a planned function and return its results.

    The equation has ``jaxpr`` as a parameter too, because JAX and our own frontend look for the bodies of calls there.
    """
    out: list[Any] = planned_p.bind(*args, function=function, jaxpr=function.jaxpr)
    return out


def bind_placed(function: Function, arguments: Sequence[Any]) -> list[Any]:
    """Bind the primitive of a planned function; on a mesh that is here, JAX is told where its arguments and results lie."""
    placed = function.placement
    if placed is None or placed.mesh is None or placed.around:
        return bind(function, *arguments)
    return laid(bind(function, *laid(arguments, placed, placed.arguments)), placed, placed.results)


def bind_linear(linear: Linear, *args: Any) -> list[Any]:
    """Bind the primitive of a planned linear function to its primal arguments and tangents, and return its results."""
    out: list[Any] = planned_linear_p.bind(*args, linear=linear, jaxpr=linear.function.jaxpr)
    return out


class Linear:
    """The parameter of ``planned_linear``: a function that is linear in some of its arguments, and its transpose.

    Args:
        function: a function of the primal arguments, followed by the tangents in which it is linear.
        primals: the number of primal arguments.
        transpose: ``transpose(linear, live)`` returns the planned function that maps the primal arguments and the cotangents
            of the live outputs to the cotangents of the tangents marked in ``linear``.
    """

    def __init__(self, function: Function, primals: int, transpose: Callable[[Mask, Mask], Function]) -> None:
        self.function = function
        self.primals = primals
        self.transpose = transpose

    def __repr__(self) -> str:
        return f"<linear {self.function!r}>"


def linearized(function: Function, active: Mask) -> Linear:
    """Return the derivative of a function at its arguments, as a linear function of the tangents of the active arguments."""

    def transpose(linear: Mask, live: Mask) -> Function:
        wanted, has_tangent = iter(linear), differentiable(function.jaxpr.out_avals)
        reached = tuple(is_active and next(wanted) for is_active in active)
        given = iter(live)
        return cotangent(function, reached, tuple(is_float and next(given) for is_float in has_tangent))

    return function.derive(("linearized", active), lambda: Linear(tangent(function, active), len(active), transpose))


def batched_linear(linear: Linear, dims: Dims, size: int, axis_name: Hashable) -> Linear:
    """Return ``vmap`` of a linear function whose tangents are all batched along axis 0.

    Args:
        linear: the function.
        dims: the batched axis of each primal argument (None: not batched), then 0 for each tangent.
        size: the extent of the batch axis.
        axis_name: the name of the batch axis in collectives.
    """

    def transpose(wanted: Mask, live: Mask) -> Function:
        ours = (*dims[: linear.primals], *(0 for is_live in live if is_live))
        return batched(linear.transpose(wanted, live), ours, size, axis_name)

    def make() -> Linear:
        return Linear(batched(linear.function, dims, size, axis_name), linear.primals, transpose)

    return linear.function.derive(("batched linear", linear, dims, size, axis_name), make)


def _abstract(*avals: Any, function: Function, jaxpr: ClosedJaxpr) -> tuple[list[Any], Any]:
    return [varying_as(avals, out) for out in jaxpr.out_avals], jaxpr.effects


def _abstract_linear(*avals: Any, linear: Linear, jaxpr: ClosedJaxpr) -> tuple[list[Any], Any]:
    return _abstract(*avals, function=linear.function, jaxpr=jaxpr)


def _run(*args: Any, function: Function, jaxpr: ClosedJaxpr) -> list[Any]:
    def make() -> Any:
        options = dict(function.plan().compiler_options)
        return jit(function.evaluate, compiler_options=options) if options else jit(function.evaluate)

    results: list[Any] = function.derive("compiled", make)(*args)
    return results


def _run_linear(*args: Any, linear: Linear, jaxpr: ClosedJaxpr) -> list[Any]:
    return _run(*args, function=linear.function, jaxpr=jaxpr)


def _lower(ctx: mlir.LoweringRuleContext, *args: Any, function: Function, jaxpr: ClosedJaxpr) -> Sequence[Any]:
    plain = ctx.replace(avals_in=[plain_aval(aval) for aval in ctx.avals_in])
    evaluate = partial(function.evaluate, platforms=ctx.module_context.platforms)
    out: Sequence[Any] = mlir.lower_fun(evaluate, multiple_results=True)(plain, *args)
    if plain.tokens_out is not None:
        ctx.set_tokens_out(plain.tokens_out)
    return out


def _lower_linear(ctx: mlir.LoweringRuleContext, *args: Any, linear: Linear, jaxpr: ClosedJaxpr) -> Sequence[Any]:
    return _lower(ctx, *args, function=linear.function, jaxpr=jaxpr)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, function: Function, jaxpr: ClosedJaxpr) -> tuple[list[Any], list[Any]]:
    out = bind(function, *primals)
    active = _nonzero(tangents)
    has_tangent = differentiable(function.jaxpr.out_avals)
    if not any(active) or not any(has_tangent):
        return out, [_no_tangent(x) for x in out]
    computed = iter(bind_linear(linearized(function, active), *primals, *pick(tangents, active)))
    return out, [next(computed) if is_float else _no_tangent(x) for x, is_float in zip(out, has_tangent, strict=True)]


def _jvp_linear(args: Sequence[Any], tangents: Sequence[Any], *, linear: Linear, jaxpr: ClosedJaxpr) -> tuple[list[Any], list[Any]]:
    out = bind_linear(linear, *args)
    active = _nonzero(tangents)
    if not any(active):
        return out, [_no_tangent(x) for x in out]
    if not any(active[: linear.primals]):  # at fixed primals a linear function is its own derivative
        directions = [ad.instantiate_zeros(t) for t in tangents[linear.primals :]]
        return out, bind_linear(linear, *args[: linear.primals], *directions)
    second = linearized(linear.function, active)
    return out, bind_linear(second, *args, *pick(tangents, active))


def _no_tangent(value: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def _nonzero(tangents: Sequence[Any]) -> Mask:
    return tuple(not isinstance(t, ad.Zero) and t.dtype != float0 for t in tangents)


def _transpose(cotangents: Sequence[Any], *args: Any, function: Function, jaxpr: ClosedJaxpr) -> list[Any]:
    unknown = tuple(map(ad.is_undefined_primal, args))
    live = tuple(not isinstance(ct, ad.Zero) for ct in cotangents)
    known = [x for x, is_unknown in zip(args, unknown, strict=True) if not is_unknown]
    out = bind(transposed(function, unknown, live), *known, *pick(cotangents, live))
    return list(spread(out, unknown))


def _transpose_linear(cotangents: Sequence[Any], *args: Any, linear: Linear, jaxpr: ClosedJaxpr) -> list[Any]:
    unknown = tuple(map(ad.is_undefined_primal, args))
    live = tuple(not isinstance(ct, ad.Zero) for ct in cotangents)
    primals = args[: linear.primals]
    function = linear.transpose(unknown[linear.primals :], live)
    out = bind(function, *primals, *pick(cotangents, live))
    return list(spread(out, unknown))


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[int | None], *, function: Function, jaxpr: ClosedJaxpr) -> Batched:
    if all(dim is None for dim in dims) and not _uses_axis(function, axis.name):
        out = bind(function, *args)
        return out, [None] * len(out)
    out = bind(batched(function, tuple(dims), axis.size, axis.name), *args)
    return out, [0] * len(out)


def _batch_linear(axis: Any, args: Sequence[Any], dims: Sequence[int | None], *, linear: Linear, jaxpr: ClosedJaxpr) -> Batched:
    if all(dim is None for dim in dims) and not _uses_axis(linear.function, axis.name):
        out = bind_linear(linear, *args)
        return out, [None] * len(out)
    tangents = [batching.bdim_at_front(t, dim, axis.size) for t, dim in zip(args[linear.primals :], dims[linear.primals :], strict=True)]
    ours = (*dims[: linear.primals], *(0 for _ in tangents))
    new = batched_linear(linear, ours, axis.size, axis.name)
    out = bind_linear(new, *args[: linear.primals], *tangents)
    return out, [0] * len(out)


def _uses_axis(function: Function, name: Hashable) -> bool:
    """Whether a collective inside reduces over the named axis."""
    return any(is_axis_name(effect) and effect.name == name for effect in function.jaxpr.effects)


def _dce(used: list[bool], *equation: Any) -> tuple[list[bool], Any]:
    """Drop unused outputs, and the arguments that only these outputs need.

    JAX 0.12 passes an argument before the equation, which says which references stay live; planned functions have no references.
    """
    eqn = equation[-1]
    function = eqn.params["function"]
    if all(used) or function.jaxpr.effects:
        return [True] * len(eqn.invars), eqn
    if not any(used):
        return [False] * len(eqn.invars), None
    smaller, used_inputs = pruned(function, tuple(used))
    new = eqn.replace(
        invars=list(pick(eqn.invars, used_inputs)),
        outvars=list(pick(eqn.outvars, used)),
        params={"function": smaller, "jaxpr": smaller.jaxpr},
    )
    return used_inputs, new


planned_p.def_impl(_run)
planned_p.def_effectful_abstract_eval(_abstract)
mlir.register_lowering(planned_p, _lower)
ad.primitive_jvps[planned_p] = _jvp
ad.primitive_transposes[planned_p] = _transpose
batching.fancy_primitive_batchers[planned_p] = _batch
pe.dce_rules[planned_p] = _dce

planned_linear_p.def_impl(_run_linear)
planned_linear_p.def_effectful_abstract_eval(_abstract_linear)
mlir.register_lowering(planned_linear_p, _lower_linear)
ad.primitive_jvps[planned_linear_p] = _jvp_linear
ad.primitive_transposes[planned_linear_p] = _transpose_linear
batching.fancy_primitive_batchers[planned_linear_p] = _batch_linear
