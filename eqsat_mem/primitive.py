"""A planned function as a JAX primitive, so that grad, vmap, jit, scan and the rest see one operation.

Two primitives, both with a :class:`Function` as parameter:

- ``planned``: ``out = f(x)``.
- ``planned_linear``: ``d_out = df(x; t)``, linear in the tangents ``t``. Its transpose is the planned ``vjp`` of ``f``, which
  recomputes from ``x``, so that reverse mode keeps no residual but the arguments.

Every function derived from ``f`` (derivatives, batched forms, forms with fewer outputs) is a :class:`Function` again, made once
and planned under the limit of ``f`` when it is lowered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import numpy as np
from jax.dtypes import float0
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from eqsat_mem import pipeline
from eqsat_mem.config import Options
from eqsat_mem.effects import is_axis_name, refuse_collectives, without_resultless_effects
from eqsat_mem.manual import plain_aval, varying_as, without_varying_types
from eqsat_mem.report import Plan

Mask = tuple[bool, ...]
Dims = tuple[int | None, ...]


class Function:
    """A traced function with its options, and the plan made from them on first use.

    Compared by identity: the same object in two equations is the same function, with one plan. Safe to use from several threads:
    one of them plans, the others wait.
    """

    def __init__(
        self, name: str, jaxpr: ClosedJaxpr, options: Options, arg_names: Sequence[str], settings: Settings | None = None
    ) -> None:
        self.name = name
        self.jaxpr = jaxpr
        self.options = options
        self.arg_names = tuple(arg_names)
        self.settings = settings or Settings()
        self._plan: Plan | None = None
        self._derived: dict[Hashable, Any] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<planned {self.name}({', '.join(self.arg_names)})>"

    def plan(self) -> Plan:
        """The plan; made at the first call.

        Raises:
            MemoryLimitError: if no plan fits the limit.
            NotImplementedError: if a collective inside reduces over an axis from outside.
        """
        refuse_collectives(self.jaxpr)
        with self._lock:
            if self._plan is None:
                with self.settings.active(), jax.ensure_compile_time_eval():
                    self._plan = pipeline.plan(self.jaxpr, self.options, self.arg_names, self.name)
            return self._plan

    def evaluate(self, *args: Any) -> list[Any]:
        """The planned program on flat arguments; JAX can trace it."""
        plan = self.plan()
        with self.settings.active():
            return list(plan.function(*args))

    def derive(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, made once for each key."""
        with self._lock:
            if key not in self._derived:
                with self.settings.active():
                    self._derived[key] = make()
            return self._derived[key]

    def trace(self, suffix: str, fun: Callable[..., Any], avals: Sequence[Any], arg_names: Sequence[str]) -> Function:
        """Another function of flat arguments, to be planned under the options of this one."""
        return Function(f"{self.name}_{suffix}", jax.make_jaxpr(fun)(*map(plain_aval, avals)), self.options, arg_names, self.settings)


class Settings:
    """The JAX settings under which a function was traced; its plan is made and lowered under the same."""

    def __init__(self) -> None:
        self.x64 = bool(jax.config.jax_enable_x64)
        self.matmul_precision = jax.config.jax_default_matmul_precision

    @contextmanager
    def active(self) -> Iterator[None]:
        """These settings; strictness about promotion is for the user's source, not for emitted programs."""
        with ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.x64))
            stack.enter_context(jax.default_matmul_precision(self.matmul_precision))
            stack.enter_context(jax.numpy_dtype_promotion("standard"))
            stack.enter_context(jax.numpy_rank_promotion("allow"))
            stack.enter_context(without_varying_types())
            yield


# --- functions derived from a function ---------------------------------------------------------------


def batched(function: Function, dims: Dims, size: int, axis_name: Hashable) -> Function:
    """``vmap``: argument ``a`` is batched along ``dims[a]`` (None: not at all), every output along axis 0."""

    def make() -> Function:
        avals = [_with_axis(aval, dim, size) for aval, dim in zip(function.jaxpr.in_avals, dims, strict=True)]
        named = {} if axis_name is None else {"axis_name": axis_name}
        mapped = jax.vmap(jaxpr_as_fun(function.jaxpr), in_axes=dims, axis_size=size, **named)
        return function.trace("vmap", mapped, avals, function.arg_names)

    return function.derive(("batched", dims, size, axis_name), make)


def tangent(function: Function, active: Mask) -> Function:
    """``jvp`` as a function of all arguments, then of the tangents of the active ones; only floating-point outputs have tangents."""

    def make() -> Function:
        pure = without_resultless_effects(function.jaxpr)

        def push(*flat: Any) -> list[Any]:
            primals, tangents = flat[: len(active)], flat[len(active) :]
            _, out = jax.jvp(_of_active(pure, active, primals), _pick(primals, active), tuple(tangents))
            return _pick(out, differentiable(pure.out_avals))

        names = [f"d_{name}" for name in _pick(function.arg_names, active)]
        return function.trace("jvp", push, [*pure.in_avals, *_pick(pure.in_avals, active)], [*function.arg_names, *names])

    return function.derive(("tangent", active), make)


def cotangent(function: Function, active: Mask, live: Mask) -> Function:
    """``vjp`` as a function of all arguments, then of the cotangents of the live outputs; gives those of the active arguments."""

    def make() -> Function:
        pure = without_resultless_effects(function.jaxpr)

        def pull(*flat: Any) -> list[Any]:
            primals, given = flat[: len(active)], iter(flat[len(active) :])
            _, transposed = jax.vjp(_of_active(pure, active, primals), *_pick(primals, active))
            return list(transposed([next(given) if is_live else _zero(aval) for aval, is_live in zip(pure.out_avals, live, strict=True)]))

        names = [f"ct_{k}" for k, is_live in enumerate(live) if is_live]
        return function.trace("vjp", pull, [*pure.in_avals, *_pick(pure.out_avals, live)], [*function.arg_names, *names])

    return function.derive(("cotangent", active, live), make)


def transposed(function: Function, linear: Mask, live: Mask) -> Function:
    """The transpose of a function that is linear in some arguments: of the others, then of the cotangents of the live outputs."""

    def make() -> Function:
        avals, out_avals = function.jaxpr.in_avals, function.jaxpr.out_avals
        known = tuple(not is_linear for is_linear in linear)

        def pull(*flat: Any) -> list[Any]:
            rest, given = flat[: sum(known)], iter(flat[sum(known) :])
            closed = _of_active(function.jaxpr, linear, _spread(rest, known))
            cotangents = [next(given) if is_live else _zero(aval) for aval, is_live in zip(out_avals, live, strict=True)]
            return list(jax.linear_transpose(closed, *_pick(avals, linear))(cotangents))

        names = [f"ct_{k}" for k, is_live in enumerate(live) if is_live]
        return function.trace("transpose", pull, [*_pick(avals, known), *_pick(out_avals, live)], [*_pick(function.arg_names, known), *names])

    return function.derive(("transposed", linear, live), make)


def pruned(function: Function, used: Mask) -> tuple[Function, list[bool]]:
    """The function that computes only the used outputs, and which arguments that needs."""

    def make() -> tuple[Function, list[bool]]:
        jaxpr, used_inputs = pe.dce_jaxpr(function.jaxpr.jaxpr, list(used))
        names = _pick(function.arg_names, used_inputs)
        closed = ClosedJaxpr(jaxpr, function.jaxpr.consts)
        return Function(function.name, closed, function.options, names, function.settings), used_inputs

    return function.derive(("pruned", used), make)


def differentiable(avals: Sequence[Any]) -> Mask:
    """Which values have tangents: those of floating-point or complex dtype."""
    return tuple(jax.numpy.issubdtype(aval.dtype, np.inexact) for aval in avals)


def _of_active(jaxpr: ClosedJaxpr, active: Mask, primals: Sequence[Any]) -> Callable[..., list[Any]]:
    """The function of the active arguments alone, the others fixed to ``primals``."""

    def of_active(*values: Any) -> list[Any]:
        given = iter(values)
        return jaxpr_as_fun(jaxpr)(*(next(given) if is_active else x for x, is_active in zip(primals, active, strict=True)))

    return of_active


def _pick(values: Sequence[Any], mask: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(value for value, wanted in zip(values, mask, strict=True) if wanted)


def _spread(values: Sequence[Any], mask: Sequence[bool]) -> tuple[Any, ...]:
    """The inverse of :func:`_pick`, with None elsewhere."""
    given = iter(values)
    return tuple(next(given) if wanted else None for wanted in mask)


def _zero(aval: Any) -> Any:
    """A zero cotangent for an output."""
    return jax.numpy.zeros(aval.shape, aval.dtype) if differentiable([aval])[0] else np.zeros(aval.shape, float0)


def _with_axis(aval: Any, dim: int | None, size: int) -> Any:
    return aval if dim is None else aval.update(shape=(*aval.shape[:dim], size, *aval.shape[dim:]), sharding=None)


# --- the primitives ----------------------------------------------------------------------------------

planned_p = Primitive("planned")
planned_p.multiple_results = True

planned_linear_p = Primitive("planned_linear")
planned_linear_p.multiple_results = True


class Linear:
    """The parameter of ``planned_linear``: a function of ``primals`` arguments and then of tangents, and how to transpose it.

    ``transpose(linear, live)`` is the planned function of the primal arguments and of the cotangents of the live outputs that
    gives the cotangents of the tangents marked in ``linear``.
    """

    def __init__(self, function: Function, primals: int, transpose: Callable[[Mask, Mask], Function]) -> None:
        self.function = function
        self.primals = primals
        self.transpose = transpose

    def __repr__(self) -> str:
        return f"<linear {self.function!r}>"


def linearized(function: Function, active: Mask) -> Linear:
    """The derivative of a function at its arguments, as a linear function of the tangents of the active ones."""

    def transpose(linear: Mask, live: Mask) -> Function:
        wanted, has_tangent = iter(linear), differentiable(function.jaxpr.out_avals)
        reached = tuple(is_active and next(wanted) for is_active in active)
        given = iter(live)
        return cotangent(function, reached, tuple(is_float and next(given) for is_float in has_tangent))

    return function.derive(("linearized", active), lambda: Linear(tangent(function, active), len(active), transpose))


def batched_linear(linear: Linear, dims: Dims, size: int, axis_name: Hashable) -> Linear:
    """``vmap`` of a linear function whose tangents are all batched along axis 0."""

    def transpose(wanted: Mask, live: Mask) -> Function:
        ours = (*dims[: linear.primals], *(0 for is_live in live if is_live))
        return batched(linear.transpose(wanted, live), ours, size, axis_name)

    def make() -> Linear:
        return Linear(batched(linear.function, dims, size, axis_name), linear.primals, transpose)

    return linear.function.derive(("batched linear", linear, dims, size, axis_name), make)


def _abstract(*avals: Any, function: Function) -> tuple[list[Any], Any]:
    return [varying_as(avals, out) for out in function.jaxpr.out_avals], function.jaxpr.effects


def _abstract_linear(*avals: Any, linear: Linear) -> tuple[list[Any], Any]:
    return _abstract(*avals, function=linear.function)


def _run(*args: Any, function: Function) -> list[Any]:
    compiled = function.derive("compiled", lambda: jax.jit(function.evaluate))
    return compiled(*args)


def _run_linear(*args: Any, linear: Linear) -> list[Any]:
    return _run(*args, function=linear.function)


def _lower(ctx: mlir.LoweringRuleContext, *args: Any, function: Function) -> Sequence[Any]:
    plain = [plain_aval(aval) for aval in ctx.avals_in]
    return mlir.lower_fun(function.evaluate, multiple_results=True)(ctx.replace(avals_in=plain), *args)


def _lower_linear(ctx: mlir.LoweringRuleContext, *args: Any, linear: Linear) -> Sequence[Any]:
    return _lower(ctx, *args, function=linear.function)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, function: Function) -> tuple[list[Any], list[Any]]:
    out = planned_p.bind(*primals, function=function)
    active = _nonzero(tangents)
    has_tangent = differentiable(function.jaxpr.out_avals)
    if not any(active) or not any(has_tangent):
        return out, [_no_tangent(x) for x in out]
    computed = iter(planned_linear_p.bind(*primals, *_pick(tangents, active), linear=linearized(function, active)))
    return out, [next(computed) if is_float else _no_tangent(x) for x, is_float in zip(out, has_tangent, strict=True)]


def _jvp_linear(args: Sequence[Any], tangents: Sequence[Any], *, linear: Linear) -> tuple[list[Any], list[Any]]:
    out = planned_linear_p.bind(*args, linear=linear)
    active = _nonzero(tangents)
    if not any(active):
        return out, [_no_tangent(x) for x in out]
    if not any(active[: linear.primals]):  # at fixed primals a linear function is its own derivative
        directions = [ad.instantiate_zeros(t) for t in tangents[linear.primals :]]
        return out, planned_linear_p.bind(*args[: linear.primals], *directions, linear=linear)
    second = linearized(linear.function, active)
    return out, planned_linear_p.bind(*args, *_pick(tangents, active), linear=second)


def _no_tangent(value: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def _nonzero(tangents: Sequence[Any]) -> Mask:
    return tuple(not isinstance(t, ad.Zero) and t.dtype != float0 for t in tangents)


def _transpose(cotangents: Sequence[Any], *args: Any, function: Function) -> list[Any]:
    unknown = tuple(map(ad.is_undefined_primal, args))
    live = tuple(not isinstance(ct, ad.Zero) for ct in cotangents)
    known = [x for x, is_unknown in zip(args, unknown, strict=True) if not is_unknown]
    out = planned_p.bind(*known, *_pick(cotangents, live), function=transposed(function, unknown, live))
    return list(_spread(out, unknown))


def _transpose_linear(cotangents: Sequence[Any], *args: Any, linear: Linear) -> list[Any]:
    unknown = tuple(map(ad.is_undefined_primal, args))
    live = tuple(not isinstance(ct, ad.Zero) for ct in cotangents)
    primals = args[: linear.primals]
    function = linear.transpose(unknown[linear.primals :], live)
    out = planned_p.bind(*primals, *_pick(cotangents, live), function=function)
    return list(_spread(out, unknown))


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[int | None], *, function: Function) -> tuple[list[Any], list[int | None]]:
    if all(dim is None for dim in dims) and not _uses_axis(function, axis.name):
        out = planned_p.bind(*args, function=function)
        return out, [None] * len(out)
    out = planned_p.bind(*args, function=batched(function, tuple(dims), axis.size, axis.name))
    return out, [0] * len(out)


def _batch_linear(axis: Any, args: Sequence[Any], dims: Sequence[int | None], *, linear: Linear) -> tuple[list[Any], list[int | None]]:
    if all(dim is None for dim in dims) and not _uses_axis(linear.function, axis.name):
        out = planned_linear_p.bind(*args, linear=linear)
        return out, [None] * len(out)
    tangents = [batching.bdim_at_front(t, dim, axis.size) for t, dim in zip(args[linear.primals :], dims[linear.primals :], strict=True)]
    ours = (*dims[: linear.primals], *(0 for _ in tangents))
    new = batched_linear(linear, ours, axis.size, axis.name)
    out = planned_linear_p.bind(*args[: linear.primals], *tangents, linear=new)
    return out, [0] * len(out)


def _uses_axis(function: Function, name: Hashable) -> bool:
    """Whether a collective inside reduces over the named axis."""
    return any(is_axis_name(effect) and effect.name == name for effect in function.jaxpr.effects)


def _dce(used: list[bool], eqn: Any) -> tuple[list[bool], Any]:
    """Drop unused outputs, and the arguments that only they need."""
    function = eqn.params["function"]
    if all(used) or function.jaxpr.effects:
        return [True] * len(eqn.invars), eqn
    if not any(used):
        return [False] * len(eqn.invars), None
    smaller, used_inputs = pruned(function, tuple(used))
    new = eqn.replace(
        invars=list(_pick(eqn.invars, used_inputs)),
        outvars=list(_pick(eqn.outvars, used)),
        params={"function": smaller},
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
