"""A traced function with its plan, and the functions that JAX's transformations derive from it.

Every function derived from another (derivatives, batched forms, forms with fewer outputs) is a :class:`Function` again, made once
and planned under the same limit when it is lowered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.dtypes import float0
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractMesh

from eqsat_mem import pipeline
from eqsat_mem.api import kept_plans, saved_plans
from eqsat_mem.api.processes import job
from eqsat_mem.api.saved_plans import GivenPlan
from eqsat_mem.api.varying import plain_aval, without_varying_types
from eqsat_mem.backends.choose import backend_for
from eqsat_mem.errors import DeviceError
from eqsat_mem.frontend.effects import refuse_collectives, without_resultless_effects
from eqsat_mem.garbage import without_collections
from eqsat_mem.ir.jaxprs import holds_64_bits
from eqsat_mem.ir.mesh import Placement, Spec
from eqsat_mem.options import Options, resolve_device
from eqsat_mem.reports.measured import Tuning
from eqsat_mem.reports.plan import Plan
from eqsat_mem.reports.progress import watched
from eqsat_mem.request import request_of

Mask = tuple[bool, ...]
Dims = tuple[int | None, ...]
Specs = Sequence[Spec | None]


class Function:
    """A traced function with its options, and the plan made from them on first use.

    Compared by identity: the same object in two equations is the same function, with one plan. Safe to use from several threads:
    one of them plans, the others wait.
    """

    def __init__(
        self,
        name: str,
        jaxpr: ClosedJaxpr,
        options: Options,
        arg_names: Sequence[str],
        settings: Settings | None = None,
        donated: Sequence[int] = (),
        placement: Placement | None = None,
        given: GivenPlan | None = None,
    ) -> None:
        self.name = name
        self.jaxpr = jaxpr
        self.options = options
        self.arg_names = tuple(arg_names)
        self.settings = settings or Settings(jaxpr)
        self.donated = tuple(donated)
        self.placement = placement
        self.given = given
        self._plan: Plan | None = None
        self._derived: dict[Hashable, Any] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<planned {self.name}({', '.join(self.arg_names)})>"

    def plan(self, arguments: Sequence[Any] = ()) -> Plan:
        """The plan; made at the first call. Where plans are run to tune it, they take these arguments, flat; None for one not known.

        Raises:
            MemoryLimitError: if no plan fits the limit.
            NotImplementedError: if a collective inside reduces over an axis from outside.
        """
        refuse_collectives(self.jaxpr)
        with self._lock:
            if self._plan is None:
                with self.settings.active(), _nowhere(), watched(self.name), without_collections():
                    self._plan = self._made(arguments)
            return self._plan

    def _made(self, arguments: Sequence[Any]) -> Plan:
        """The plan that was given, or one that is kept, or else a new one, which is kept from now on."""
        backend = backend_for(resolve_device(self.options))
        request = request_of(self.jaxpr, self.options, self.arg_names, self.name, backend, self.donated, self.placement)

        def again(plan: Plan) -> Plan:
            return self._planned(known=plan.tuning)

        if self.given is not None:
            return saved_plans.checked(self.given, request, again)
        entry = kept_plans.entry(request)
        kept = None if entry is None else entry.load(request, again)
        if kept is not None:
            return kept
        made = self._planned(arguments)
        if entry is not None:
            entry.store(made)
        return made

    def _planned(self, arguments: Sequence[Any] = (), known: Tuning | None = None) -> Plan:
        """A new plan; where several processes run it, they plan for one profile, and compare the plans.

        It is tuned with these arguments, or to what is ``known`` from tuning it before.
        """
        with self.settings.active(), _nowhere():
            given = self.jaxpr, self.options, self.arg_names, self.name
            make = partial(pipeline.plan, *given, donated=self.donated, placement=self.placement)
            if self.options.tune is not None:
                from eqsat_mem.tuning import Tuner

                make = partial(make, tuner=Tuner(self.options.tune, arguments, known))
            together = job(self.name, self.placement)
            if together is None:
                made = make()
            else:
                assert self.placement is not None, "several processes have a mesh"
                backend = together.backend(self.jaxpr, self.options, self.placement)
                with together.finishing():
                    made = make(backend=backend)
                together.compare_programs(made.source)
        return made if made.record is None else replace(made, record=replace(made.record, settings=self.settings.active))

    def evaluate(self, *args: Any, platforms: Collection[str] = ()) -> list[Any]:
        """The planned program on flat arguments; JAX can trace it. ``platforms`` are those that it is lowered for."""
        plan = self.plan()
        if plan.record is None or tuple(platforms) != (plan.record.backend.exported_for,):
            refuse_elsewhere(plan)
        with self.settings.active():
            return list(plan.function(*args))

    def derive(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of ``make``, which is called once for each key."""
        with self._lock:
            if key not in self._derived:
                with self.settings.active():
                    self._derived[key] = make()
            return self._derived[key]

    def trace(
        self,
        suffix: str,
        fun: Callable[..., Any],
        avals: Sequence[Any],
        arg_names: Sequence[str],
        arguments: Callable[[Specs, Specs], Specs],
        results: Callable[[Specs, Specs], Specs],
    ) -> Function:
        """Another function of flat arguments, to be planned under the options of this one.

        On a mesh its arguments and results lie as these functions say, given how those of this one do.
        """
        own = self.placement
        placed = None if own is None else own.of(arguments(own.arguments, own.results), results(own.arguments, own.results))
        jaxpr = jax.make_jaxpr(fun)(*map(plain_aval, avals))
        return Function(f"{self.name}_{suffix}", jaxpr, self.options, arg_names, self.settings, placement=placed)


@contextmanager
def _nowhere() -> Iterator[None]:
    """A context in no trace, and on no mesh: a plan is compiled on its own to be measured."""
    with jax.core.eval_context(), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        yield


def refuse_elsewhere(plan: Plan) -> None:
    """Raise ``DeviceError`` if a plan was made for a device that is not the one in use."""
    if not plan.is_here:
        raise DeviceError(
            f"this plan of {plan.name} is for {plan.device}, and the device in use is {jax.local_devices()[0].device_kind}: run it there, "
            "or leave out device= (and unset EQSAT_MEM_DEVICE) to plan for this one. plan.source is the program for that device."
        )


class Settings:
    """The JAX settings under which a function was traced; its plan is made and lowered under the same.

    A function that computes in 64 bits inside was traced with them, though they may be off around it.
    """

    def __init__(self, jaxpr: ClosedJaxpr) -> None:
        config: Any = jax.config
        self.x64: bool = config.jax_enable_x64 or holds_64_bits(jaxpr.jaxpr)
        self.matmul_precision: str | None = config.jax_default_matmul_precision

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
        mapped = jax.vmap(jaxpr_as_fun(function.jaxpr), in_axes=dims, axis_size=size, axis_name=axis_name)

        def arguments(ins: Specs, outs: Specs) -> Specs:
            return [_with_whole_axis(spec, dim) for spec, dim in zip(ins, dims, strict=True)]

        return function.trace(
            "vmap", mapped, avals, function.arg_names, arguments, lambda ins, outs: [_with_whole_axis(spec, 0) for spec in outs]
        )

    return function.derive(("batched", dims, size, axis_name), make)


def tangent(function: Function, active: Mask) -> Function:
    """``jvp`` as a function of all arguments, then of the tangents of the active ones; only floating-point outputs have tangents."""

    def make() -> Function:
        pure = without_resultless_effects(function.jaxpr)

        def push(*flat: Any) -> tuple[Any, ...]:
            primals, tangents = flat[: len(active)], flat[len(active) :]
            _, out = jax.jvp(_of_active(pure, active, primals), pick(primals, active), tuple(tangents))
            return pick(out, differentiable(pure.out_avals))

        names = [f"d_{name}" for name in pick(function.arg_names, active)]
        avals = [*pure.in_avals, *pick(pure.in_avals, active)]
        return function.trace(
            "jvp",
            push,
            avals,
            [*function.arg_names, *names],
            lambda ins, outs: [*ins, *pick(ins, active)],
            lambda ins, outs: pick(outs, differentiable(pure.out_avals)),
        )

    return function.derive(("tangent", active), make)


def cotangent(function: Function, active: Mask, live: Mask) -> Function:
    """``vjp`` as a function of all arguments, then of the cotangents of the live outputs; gives those of the active arguments."""

    def make() -> Function:
        pure = without_resultless_effects(function.jaxpr)

        def pull(*flat: Any) -> list[Any]:
            primals, given = flat[: len(active)], iter(flat[len(active) :])
            _, transposed = jax.vjp(_of_active(pure, active, primals), *pick(primals, active))
            return list(transposed([next(given) if is_live else _zero(aval) for aval, is_live in zip(pure.out_avals, live, strict=True)]))

        names = [f"ct_{k}" for k, is_live in enumerate(live) if is_live]
        avals = [*pure.in_avals, *pick(pure.out_avals, live)]
        return function.trace(
            "vjp",
            pull,
            avals,
            [*function.arg_names, *names],
            lambda ins, outs: [*ins, *pick(outs, live)],
            lambda ins, outs: pick(ins, active),
        )

    return function.derive(("cotangent", active, live), make)


def transposed(function: Function, linear: Mask, live: Mask) -> Function:
    """The transpose of a function that is linear in some arguments: of the others, then of the cotangents of the live outputs."""

    def make() -> Function:
        avals, out_avals = function.jaxpr.in_avals, function.jaxpr.out_avals
        known = tuple(not is_linear for is_linear in linear)

        def pull(*flat: Any) -> list[Any]:
            rest, given = flat[: sum(known)], iter(flat[sum(known) :])
            closed = _of_active(function.jaxpr, linear, spread(rest, known))
            cotangents = [next(given) if is_live else _zero(aval) for aval, is_live in zip(out_avals, live, strict=True)]
            return list(jax.linear_transpose(closed, *pick(avals, linear))(cotangents))

        names = [f"ct_{k}" for k, is_live in enumerate(live) if is_live]
        inputs = [*pick(avals, known), *pick(out_avals, live)]
        return function.trace(
            "transpose",
            pull,
            inputs,
            [*pick(function.arg_names, known), *names],
            lambda ins, outs: [*pick(ins, known), *pick(outs, live)],
            lambda ins, outs: pick(ins, linear),
        )

    return function.derive(("transposed", linear, live), make)


def pruned(function: Function, used: Mask) -> tuple[Function, list[bool]]:
    """The function that computes only the used outputs, and which arguments that needs."""

    def make() -> tuple[Function, list[bool]]:
        jaxpr, used_inputs = pe.dce_jaxpr(function.jaxpr.jaxpr, list(used))
        names = pick(function.arg_names, used_inputs)
        closed, own = ClosedJaxpr(jaxpr, function.jaxpr.consts), function.placement
        placed = None if own is None else own.of(pick(own.arguments, used_inputs), pick(own.results, used))
        return Function(function.name, closed, function.options, names, function.settings, placement=placed), used_inputs

    return function.derive(("pruned", used), make)


def differentiable(avals: Sequence[Any]) -> Mask:
    """Mark the values that have tangents: those of floating-point or complex dtype."""
    return tuple(jax.numpy.issubdtype(aval.dtype, np.inexact) for aval in avals)


def _of_active(jaxpr: ClosedJaxpr, active: Mask, primals: Sequence[Any]) -> Callable[..., list[Any]]:
    """The function of the active arguments alone, the others fixed to ``primals``."""

    def of_active(*values: Any) -> list[Any]:
        given = iter(values)
        return jaxpr_as_fun(jaxpr)(*(next(given) if is_active else x for x, is_active in zip(primals, active, strict=True)))

    return of_active


def pick(values: Sequence[Any], mask: Sequence[bool]) -> tuple[Any, ...]:
    """The values at which the mask is true."""
    return tuple(value for value, wanted in zip(values, mask, strict=True) if wanted)


def spread(values: Sequence[Any], mask: Sequence[bool]) -> tuple[Any, ...]:
    """The inverse of :func:`pick`, with None elsewhere."""
    given = iter(values)
    return tuple(next(given) if wanted else None for wanted in mask)


def _zero(aval: Any) -> Any:
    """A zero cotangent for an output."""
    return jax.numpy.zeros(aval.shape, aval.dtype) if differentiable([aval])[0] else np.zeros(aval.shape, float0)


def _with_whole_axis(spec: Spec | None, dim: int | None) -> Spec | None:
    """The spec of an array with one more axis, which every device has whole."""
    return spec if spec is None or dim is None else (*spec[:dim], (), *spec[dim:])


def _with_axis(aval: Any, dim: int | None, size: int) -> Any:
    return aval if dim is None else aval.update(shape=(*aval.shape[:dim], size, *aval.shape[dim:]), sharding=None)
