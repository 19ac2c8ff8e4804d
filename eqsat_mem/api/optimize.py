"""``optimize``: a JAX function in, a function of the same meaning that stays under a memory limit out."""

from __future__ import annotations

import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import jax
import numpy as np
from jax._src.core import trace_state_clean  # as in compiled.py
from jax._src.traceback_util import api_boundary  # errors are told without our frames, as JAX tells them without its own
from jax.core import ShapedArray, Tracer
from jax.sharding import AbstractMesh, Mesh

from eqsat_mem.api.arguments import argument_names, hoist_constants, is_valueless, with_valueless
from eqsat_mem.api.compiled import MOST_SIGNATURES, JitByPlan, NotOurs, donated_leaves, is_outermost, static_arguments
from eqsat_mem.api.function import Function
from eqsat_mem.api.keywords import with_hints
from eqsat_mem.api.meshes import ANYWHERE, Lying, Shardings, explicit_mesh, placed_shapes, placement, spread_prefix, without_types
from eqsat_mem.api.primitive import bind_placed
from eqsat_mem.api.saved_plans import GivenPlan, given_plan
from eqsat_mem.api.varying import plain_aval, vary_alike, without_varying_types
from eqsat_mem.backends.choose import backend_for
from eqsat_mem.egraph.rule_checks import own_constructors
from eqsat_mem.error_table import pointing
from eqsat_mem.frontend.effects import REFERENCES, refuse_collectives, refuse_references
from eqsat_mem.ir.ops import Monoid, Operation
from eqsat_mem.options import DEVICE_VARIABLE, LIMIT_VARIABLE, Accuracy, Options, resolve_device, resolve_limit
from eqsat_mem.reports.plan import Plan
from eqsat_mem.request import refuse_tuning_elsewhere

ENVIRONMENT: Any = getattr(os.environ, "_data", os.environ)
"""``os.environ`` as Python holds it, which is read in every call: its own way takes longer than all else that a call needs of ours."""


@api_boundary
@pointing
@with_hints
def optimize(
    fun: Callable[..., Any] | None = None,
    *,
    memory_limit: float | str | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    accuracy: Accuracy = "all",
    rules: str | Iterable[str] = (),
    only_rules: str | Iterable[str] | None = None,
    without_rules: str | Iterable[str] = (),
    operations: Operation | Monoid | Iterable[Operation | Monoid] = (),
    tensor_size_threshold: int | str | None = None,
    tensor_split_size: int | str | None = None,
    max_rows: int = 50_000,
    max_iterations: int = 30,
    max_seconds: float = 60.0,
    max_planning_seconds: float | None = None,
    tune: float | None = None,
    verify: bool = True,
    device: str | None = None,
    tiles: bool = True,
    plan: Plan | str | PathLike[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
) -> Any:
    """A function that computes what ``fun`` does within a memory limit. Used like ``jax.jit``, also as a decorator.

    The program is planned on the first call for each combination of shapes, dtypes and static arguments. Under ``jax.grad``,
    derivatives are planned under the same limit, and recompute what they need from the arguments. Called inside a larger
    ``jax.jit``, the limit is that of this part.

    Args:
        fun: a function that ``jax.jit`` can trace.
        memory_limit: bytes (a number, or text such as ``"1GiB"``) that the program may hold at its peak: arguments, outputs and
            temporaries; on a mesh that each device may hold. None is ``EQSAT_MEM_LIMIT``, or else the capacity of the device.
        mesh: the devices that run the function together, or an ``AbstractMesh`` to plan only. None is the mesh that arguments lie on, else
            that of ``jax.set_mesh``, else one device.
        in_shardings: how arguments lie on the mesh: a ``PartitionSpec`` or ``NamedSharding``, or a pytree of them that is a prefix of the
            positional arguments. None is as they lie; those that lie nowhere are placed by the planner, where ``plan.in_shardings`` says.
        out_shardings: likewise for results. None is what costs least.
        accuracy: ``"bitwise"`` keeps every bit, ``"reassociate"`` may re-associate sums, ``"all"`` also applies algebra.
        rules: rule files besides those that come with the package.
        only_rules: names of rules, passes or rule files to keep to; a rule named there applies whatever its soundness.
        without_rules: names of rules, passes or rule files to leave out.
        operations: operations and folds of your own that the rule files name; a function may call others besides.
        tensor_size_threshold: only tensors of more bytes than this are split (default: the planner decides).
        tensor_split_size: bytes of a slice of a split tensor (default: the planner decides).
        max_rows: rows of the e-graph at which saturation stops.
        max_iterations: iterations after which saturation stops.
        max_seconds: seconds after which saturation stops; its plans then depend on how busy the machine was.
        max_planning_seconds: seconds after which planning takes the best plan found so far that fits, and the plan says so; a step of the
            e-graph or a compilation that has begun is finished. None is ``EQSAT_MEM_MAX_PLANNING_SECONDS``, or else five
            times what XLA is expected to take to compile the function, at least 60 s.
        tune: seconds for running the best few plans that fit, and the program as written where it does, of which the fastest is taken and
            kept: on the arguments of the first call or of ``plan``, or else on made-up ones (random numbers, zeros for integers). Programs
            with effects or on several devices are planned by prediction all the same. None is that for all.
        verify: compile the plan and compare what it holds with the limit.
        device: the device to plan for: a name that ``eqsat-mem devices`` lists (``"h100"``), or the file of a profile. None is
            ``EQSAT_MEM_DEVICE``, or else the device in use. A plan for a device that is not here can be looked at and exported; it does
            not run.
        tiles: use tile kernels where they are faster: sums, maxima and minima over pairs as one kernel in JAX's Mosaic GPU, which holds
            nothing besides operands and results. There are some for an H100 or H200 from JAX 0.11 on, and with ``accuracy="all"``.
        plan: a plan that was made before, or the file where ``plan.save`` put it, to be used instead of planning. The memory limit is
            that of the plan then, unless another is given. Derivatives of the function are planned as ever.
        static_argnums: as for ``jax.jit``.
        static_argnames: as for ``jax.jit``.
        donate_argnums: as for ``jax.jit``. An output in the memory of a donated argument counts once.
        donate_argnames: as for ``jax.jit``; likewise.

    Returns:
        An :class:`Optimized` function, or a decorator where ``fun`` is left out.

    Raises:
        OptionError: if an option has a wrong value; from a call, if ``plan`` is for another function or other arguments.
        MemoryLimitError: from a call, if no plan fits, or none was found in time.
        DeviceError: from a call, if the plan is for a device that is not the one in use.

    >>> import jax.numpy as jnp
    >>> @optimize(memory_limit="64MiB")
    ... def twice(x):
    ...     return 2 * x
    >>> float(twice(jnp.float32(3.0)))
    6.0
    """
    given = None if plan is None else given_plan(plan)
    if memory_limit is None and given is not None:
        memory_limit = given.plan.limit_bytes
    options = Options(
        memory_limit=memory_limit,  # type: ignore[arg-type]  # Options parses sizes and paths
        accuracy=accuracy,
        rules=rules,  # type: ignore[arg-type]
        only_rules=only_rules,  # type: ignore[arg-type]
        without_rules=without_rules,  # type: ignore[arg-type]
        operations=operations,  # type: ignore[arg-type]
        tensor_size_threshold=tensor_size_threshold,  # type: ignore[arg-type]
        tensor_split_size=tensor_split_size,  # type: ignore[arg-type]
        max_rows=max_rows,
        max_iterations=max_iterations,
        max_seconds=max_seconds,
        max_planning_seconds=max_planning_seconds,
        tune=tune,
        verify=verify,
        device=device,
        tiles=tiles,
    )
    refuse_tuning_elsewhere(options, backend_for(resolve_device(options)))  # tells now, also if there is no such device
    own_constructors(options.operations)  # tells now what is wrong with them
    jit_options = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
    }
    shardings = Shardings(mesh, in_shardings, out_shardings)
    if fun is None:
        return lambda fun: Optimized(fun, options, jit_options, shardings, given)
    return Optimized(fun, options, jit_options, shardings, given)


class Optimized:
    """A function with plans. Calls, ``lower``, ``trace`` and ``eval_shape`` are those of ``jax.jit``."""

    def __init__(
        self,
        fun: Callable[..., Any],
        options: Options,
        jit_options: dict[str, Any],
        shardings: Shardings = ANYWHERE,
        given: GivenPlan | None = None,
    ) -> None:
        if not callable(fun):
            raise TypeError(f"optimize expects a function, not {fun!r}; options are keywords, as in optimize(memory_limit=...).")
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._options = options
        self._jit_options = jit_options
        self._shardings = shardings
        self._given = given
        self._static = static_arguments(fun, jit_options)
        self._donates = any(jit_options.get(name) is not None for name in ("donate_argnums", "donate_argnames"))
        self._jitted: dict[tuple[int, str | None, Lying | None, bool], JitByPlan] = {}
        self._lock = threading.Lock()
        left = [name for name, given in ((DEVICE_VARIABLE, options.device), (LIMIT_VARIABLE, options.memory_limit)) if given is None]
        self._left_to_environment = [os.environ.encodekey(name) for name in left] if ENVIRONMENT is not os.environ else left
        self._last: tuple[Any, list[Any]] | None = None
        self._alternates = False
        JitByPlan(fun, jit_options)  # so that jax.jit checks its arguments now

    @api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        last = self._last
        if last is not None and trace_state_clean() and last[1] == self._variables():
            try:
                return last[0](*args, **kwargs)
            except NotOurs:
                pass
        return self._called(args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        """Pickled and copied without its plans: by its name if that is where Python finds it, else as what it was made of."""
        found = getattr(sys.modules.get(self.__module__), getattr(self, "__qualname__", ""), None)
        made_of = self._fun, self._options, self._jit_options, self._shardings, self._given
        return self.__qualname__ if found is self else (Optimized, made_of)

    def __repr__(self) -> str:
        limit = self._options.memory_limit
        return f"<optimized {getattr(self, '__name__', repr(self._fun))}, memory limit {'default' if limit is None else f'{limit} bytes'}>"

    @api_boundary
    @pointing
    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays, or ``jax.ShapeDtypeStruct``), which a call with the like of them uses. Runs nothing.

        Raises:
            MemoryLimitError: if no plan fits the limit.
        """
        with jax.disable_jit(False):
            return self._function_for(args, kwargs).plans(args, kwargs)[0]

    @api_boundary
    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(fun).trace``."""
        return self._function_for(args, kwargs).plain.trace(*args, **kwargs)

    @api_boundary
    @pointing
    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(fun).lower``: plans for these arguments, and has a method ``compile``."""
        function, lying = self._function_for(args, kwargs).chosen(args, kwargs), self._lying(args, kwargs)
        if lying is not None:
            args, kwargs = placed_shapes(lying, args, kwargs, *self._static)
        return function.lower(*args, **kwargs)

    @api_boundary
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(fun).eval_shape``."""
        return self._function_for(args, kwargs).plain.eval_shape(*args, **kwargs)

    def for_a_file(self, *args: Any, **kwargs: Any) -> Any:
        """The ``jax.jit`` function that is exported with the plan for these arguments: it takes all of them, and donates as a call does."""
        return self._function_for(args, kwargs).of_all_arguments()

    def clear_cache(self) -> None:
        """Forget all plans and compiled programs of this function."""
        with self._lock:
            jitted, self._jitted, self._last = self._jitted, {}, None
        for function in jitted.values():
            function.clear_cache()

    def _variables(self) -> list[Any]:
        """The values of the environment's variables that options leave to it."""
        return [ENVIRONMENT.get(name) for name in self._left_to_environment]

    @pointing
    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of a call, and the function for the next one to try first: that of this one, unless calls alternate between several.

        On several devices it depends on how the arguments lie, too.
        """
        variables = self._variables()
        results, function = self._function_for(args, kwargs).called(args, kwargs)
        if function is not None and is_outermost() and not self._shardings.given and jax.device_count() == 1:
            last = self._last
            self._alternates = self._alternates or (last is not None and last[0] != function and last[1] == variables)
            self._last = None if self._alternates else (function, variables)
        return results

    def _function_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JitByPlan:
        """The ``jax.jit`` function for the limit that holds now and for how these arguments lie; its caches are those of plans too."""
        device, lying = resolve_device(self._options), self._lying(args, kwargs)
        capacity = None if device is None else backend_for(device).capacity_bytes
        limit = resolve_limit(self._options, capacity, None if lying is None else lying.mesh)
        donates = self._donates and is_outermost()
        key = limit, device, lying, donates
        with self._lock:
            if key not in self._jitted:
                if len(self._jitted) >= MOST_SIGNATURES:
                    self._jitted.clear()
                options = replace(self._options, memory_limit=limit, device=device)
                donated = self._jit_options if donates else {}
                binding = _binding(self._fun, options, lying, self._shardings.results, donated, self._given)
                self._jitted[key] = JitByPlan(binding, self._jit_options, options.tune is not None)
            return self._jitted[key]

    def _lying(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lying | None:
        """The mesh and the shardings of the arguments of a call; None for one device."""
        if not self._shardings.given and jax.device_count() == 1:
            return None
        positions, names = self._static
        traced = tuple(arg for k, arg in enumerate(args) if k not in positions and k - len(args) not in positions)
        named = {name: arg for name, arg in kwargs.items() if name not in names}
        return self._shardings.lying(traced, named)


def _binding(
    fun: Callable[..., Any],
    options: Options,
    lying: Lying | None,
    out_shardings: Any,
    donated_by: dict[str, Any],
    given: GivenPlan | None,
) -> Callable[..., Any]:
    """A function for ``jax.jit`` to trace, once per signature: it traces ``fun`` and binds the primitive with its plan."""

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        config: Any = jax.config
        if config.jax_disable_jit:
            return fun(*args, **kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(isinstance(leaf, jax.Array | np.ndarray) and not isinstance(leaf, Tracer) for leaf in leaves):
            return fun(*args, **kwargs)  # jax_debug_nans runs it again, without jax.jit, to find the operation that makes a NaN
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tracer)]  # jax.jit has made a tracer of all that is not static
        _check_types(inputs)
        mesh = explicit_mesh(inputs)
        if mesh is not None:

            def over_inputs(run: Callable[..., Any]) -> Callable[..., Any]:
                def with_inputs(*values: Any) -> Any:
                    args, kwargs = jax.tree.unflatten(tree, _among(leaves, values))
                    return run(*args, **kwargs)

                return with_inputs

            def bound(outs: Any) -> Callable[..., Any]:
                return over_inputs(_binding(fun, options, lying, outs, donated_by, given))

            return without_types(over_inputs(fun), bound, inputs, mesh)
        without_static = [plain_aval(jax.typeof(leaf)) if isinstance(leaf, Tracer) else None for leaf in leaves]

        made: list[tuple[Any, list[Any]]] = []  # the structure of the results, and those without values: derivatives by integers

        @functools.wraps(fun)  # JAX's errors then name the user's function, its line and its parameters
        def flat(*values: Any, **named: Any) -> list[Any]:
            args, kwargs = jax.tree.unflatten(tree, _among(leaves, jax.tree.leaves((values, named))))
            results, structure = jax.tree.flatten(fun(*args, **kwargs))
            made.append((structure, [x if is_valueless(x) else None for x in results]))
            return [x for x in results if not is_valueless(x)]

        name = getattr(fun, "__name__", "")
        name = name if name.isidentifier() else "program"
        with without_varying_types():
            values, named = jax.tree.unflatten(tree, without_static)
            jaxpr = jax.make_jaxpr(flat)(*values, **named)
        refuse_references(jaxpr)
        refuse_collectives(jaxpr, jax.sharding.get_abstract_mesh().manual_axes)
        names = argument_names(fun, args, kwargs, inputs)
        jaxpr, captured = hoist_constants(jaxpr)
        names = [f"captured_{k}" for k in range(len(captured))] + names
        structure, without_values = made[-1]
        placed = None
        if lying is not None:
            wanted = spread_prefix(out_shardings, jax.tree.unflatten(structure, range(len(without_values))), "out_shardings")
            placed = placement(lying, jaxpr, names, captured, [spec for spec, x in zip(wanted, without_values, strict=True) if x is None])
        gone = donated_leaves(fun, donated_by, args, kwargs)
        of_inputs = [is_gone for leaf, is_gone in zip(leaves, gone, strict=True) if isinstance(leaf, Tracer)]
        donated = [len(captured) + k for k, is_gone in enumerate(of_inputs) if is_gone]
        function = Function(name, jaxpr, options, names, donated=donated, placement=placed, given=given)
        results = bind_placed(function, vary_alike([*captured, *inputs]))
        return jax.tree.unflatten(structure, with_valueless(results, without_values))

    return call


def _among(leaves: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Arguments with values in the place of those that JAX traces; the others are static."""
    given = iter(values)
    return [next(given) if isinstance(leaf, Tracer) else leaf for leaf in leaves]


def _check_types(inputs: Sequence[Any]) -> None:
    """Raise ``NotImplementedError`` for what a plan cannot be made for: references, and shapes that are not numbers."""
    for aval in map(jax.typeof, inputs):
        if not isinstance(aval, ShapedArray):
            raise NotImplementedError(REFERENCES)
        if not all(isinstance(extent, int) for extent in aval.shape):
            raise NotImplementedError(
                f"an optimised function is planned for shapes of numbers, not {aval.str_short()}: export it once for each shape."
            )
