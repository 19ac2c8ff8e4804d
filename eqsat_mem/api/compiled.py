"""``jax.jit`` of functions that bind plans while they are traced: plans are compiled with options of their own."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax import jit
from jax._src import source_info_util, traceback_util
from jax._src.config import trace_context  # all settings that what is traced may depend on; it has no public form
from jax._src.core import EvalTrace, trace_ctx, trace_state_clean  # whether JAX traces anything now; they have no public form
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from eqsat_mem.api.primitive import planned_p
from eqsat_mem.backends.choose import backend_in_use
from eqsat_mem.reports.plan import Plan

MOST_SIGNATURES = 1024
Kind = frozenset[tuple[str, Any]] | None
"""The compiler options of a function of plans; None for one of programs as written."""
traceback_util.register_exclusion(str(Path(__file__).parent.parent))  # hides our frames from users, as JAX hides its own
for _name in ("compiled", "planning", "planning_jit"):  # and from where JAX says that something was traced
    source_info_util.register_exclusion(str(Path(__file__).with_name(f"{_name}.py")))


class NotOurs(Exception):
    """A function of one kind was called with arguments for which the program is of another. It never leaves this package."""


class JitByPlan:
    """``jax.jit`` functions of one function, which share what it is traced to: ``plain``, and those that calls go to.

    A plan is compiled with the compiler options for plans. A program that stays as written is compiled as JAX compiles it, so that its bits
    stay the same too. Each kind has a function of its own, which raises :class:`NotOurs` before it compiles for arguments of the other: so
    the function that was called last can be called first, at the speed of ``jax.jit``. Within another trace there is only ``plain``: what
    is compiled then is not ours.
    """

    def __init__(self, fun: Callable[..., Any], jit_options: dict[str, Any], tunes: bool = False) -> None:
        self.plain: Any = jit(fun, **jit_options)
        self._fun = fun
        self._jit_options = jit_options
        self._tunes = tunes
        self._positions, self._names = static_arguments(fun, jit_options)
        self._compiler_options: dict[str, Any] | None = None
        self._chosen: dict[Hashable, Any] = {}
        self._made: dict[Kind, Any] = {}
        self._direct: dict[Any, Any] = {}
        self._running = threading.local()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.called(args, kwargs)[0]

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The results, and the function that the next call may try first; None where there is none."""
        if is_evaluated() and self._options():
            return self._inlined(args, kwargs), None
        function = self.chosen(args, kwargs)
        if not self._tunes:
            return function(*args, **kwargs), function
        direct = self._direct.setdefault(function, partial(self._with_values, function))
        return direct(*args, **kwargs), direct

    def _with_values(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """The results of one of the functions, whose plans may be run on these arguments to be tuned, should they have to be made."""
        self._running.values = args, kwargs
        try:
            return function(*args, **kwargs)
        finally:
            self._running.values = None

    def chosen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The one to call with these arguments; plans for them where that is not known."""
        if not is_outermost() or not (self._options() or self._tunes):
            return self.plain
        try:
            key = signature(args, kwargs, self._positions, self._names)
            known = self._chosen.get(key)
        except Exception:  # arguments that JAX does not take, such as static ones that cannot be hashed or compared: it tells
            return self.plain
        if known is None:
            if len(self._chosen) >= MOST_SIGNATURES:
                self._chosen.clear()
            known = self._chosen[key] = self._of(self._kind(self.plans(args, kwargs)))
        return known

    def of_all_arguments(self) -> Any:
        """One that is not kept, and that takes the arguments that are not used too: of its trace the module is written to a file."""
        return jit(self._fun, **self._jit_options, keep_unused=True)

    def plans(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Plan]:
        """The plans that the function binds for these arguments; they may be run on them to be tuned."""
        known = _leaves(args, kwargs, self._positions, self._names)[0] if self._tunes else ()
        return plans_in(self.plain.trace(*args, **kwargs).jaxpr, known)

    def clear_cache(self) -> None:
        self._chosen.clear()
        self._direct.clear()
        for function in (self.plain, *self._made.values()):
            function.clear_cache()

    def cache_size(self) -> int:
        """The number of compiled programs that are kept."""
        return sum(int(function._cache_size()) for function in (self.plain, *self._made.values()))

    def _options(self) -> dict[str, Any]:
        """The compiler options for plans on this machine, asked for once; those of the user's come first."""
        if self._compiler_options is None:
            self._compiler_options = {} if self._jit_options.get("compiler_options") else dict(backend_in_use().compiler_options)
        return self._compiler_options

    def _kind(self, plans: Sequence[Plan]) -> Kind:
        """The compiler options on which the plans of a function agree, if it has any; none where the user has options."""
        planned = [frozenset(plan.compiler_options.items()) for plan in plans if not plan.unchanged]
        return frozenset.intersection(*planned) if planned and self._options() else frozenset() if planned else None

    def _of(self, kind: Kind) -> Any:
        """The function that plans with these compiler options, or programs as written, are called by."""
        if kind not in self._made:
            options = {"compiler_options": dict(kind)} if kind else {}
            self._made[kind] = jit(self._own(kind), **{**self._jit_options, **options})
        return self._made[kind]

    def _own(self, kind: Kind) -> Callable[..., Any]:
        """A function for ``jax.jit`` to trace, which runs what ``plain`` is traced to if that is of this kind."""

        @functools.wraps(self._fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            if trace_state_clean():  # jax_debug_nans runs it without jax.jit, as jax_disable_jit does
                return self._fun(*args, **kwargs)
            traced = self.plain.trace(*args, **kwargs)
            values = getattr(self._running, "values", None)
            known = () if values is None else _leaves(values[0], values[1], self._positions, self._names)[0]
            if self._kind(plans_in(traced.jaxpr, known)) != kind:
                raise NotOurs
            inputs = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, Tracer)]  # all that is not static
            return self._evaluated(traced, inputs, args, kwargs)

        return call

    def _inlined(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results under transformations that are evaluated as they go: each planned part is compiled on its own, with its options."""
        inputs = _leaves(args, kwargs, self._positions, self._names)[0]
        return self._evaluated(self.plain.trace(*args, **kwargs), inputs, args, kwargs)

    def _evaluated(self, traced: Any, inputs: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of what was traced, without a call around it; what closes over values of other traces has more inputs than these."""
        if len(traced.jaxpr.in_avals) != len(inputs):
            return self.plain(*args, **kwargs)
        return jax.tree.unflatten(traced.out_tree, jaxpr_as_fun(traced.jaxpr)(*inputs))


def signature(args: tuple[Any, ...], kwargs: dict[str, Any], positions: Collection[int], names: Collection[str]) -> Hashable:
    """Everything on which compilation depends: settings, shapes and dtypes of the arguments, and the values of static ones."""
    leaves, tree, static = _leaves(args, kwargs, positions, names)
    return (tree, trace_context(), *map(_kind, leaves), *((name, type(value), value) for name, value in static))


def _leaves(
    args: tuple[Any, ...], kwargs: dict[str, Any], positions: Collection[int], names: Collection[str]
) -> tuple[list[Any], Any, list[tuple[Any, Any]]]:
    """The arrays among arguments, with their structure, and the static arguments with their positions and names."""
    fixed = {k: arg for k, arg in enumerate(args) if k in positions or k - len(args) in positions}
    named = {name: arg for name, arg in kwargs.items() if name in names}
    rest = [None if k in fixed else arg for k, arg in enumerate(args)], {name: arg for name, arg in kwargs.items() if name not in named}
    leaves, tree = jax.tree.flatten(rest)
    return leaves, tree, [*fixed.items(), *sorted(named.items())]


def _kind(leaf: Any) -> Hashable:
    """The type of an array, or that of a number."""
    aval = getattr(leaf, "aval", None)
    if aval is not None:
        return aval
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return (leaf.shape, leaf.dtype)
    return (type(leaf),)


def is_outermost() -> bool:
    """Whether a function that is called now is compiled on its own, in no other trace; only then may its arguments be donated."""
    config: Any = jax.config
    return trace_state_clean() and not config.jax_disable_jit


def is_evaluated() -> bool:
    """Whether derivatives or batches are computed now as Python goes, and nothing around it is traced to be compiled."""
    trace: Any = trace_ctx.trace
    if trace_state_clean() or trace is None:
        return False
    while (parent := getattr(trace, "parent_trace", None)) is not None:
        trace = parent
    return isinstance(trace, EvalTrace)


def donated_leaves(fun: Callable[..., Any], options: dict[str, Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[bool]:
    """Whether each leaf of the arguments is donated, as JAX reads ``donate_argnums`` and ``donate_argnames``."""
    given = {f"static_{name}": options.get(f"donate_{name}") for name in ("argnums", "argnames")}
    positions, names = static_arguments(fun, given)
    of_args = [k in positions for k, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    of_kwargs = jax.tree.map(lambda _: False, kwargs) | {name: jax.tree.map(lambda _: True, kwargs[name]) for name in names & kwargs.keys()}
    return [*of_args, *jax.tree.leaves(of_kwargs)]


def static_arguments(fun: Callable[..., Any], options: dict[str, Any]) -> tuple[frozenset[int], frozenset[str]]:
    """Positions and names of static arguments. Where one of both is given, JAX takes the other from the signature, and so does this."""
    positions, names = options.get("static_argnums"), options.get("static_argnames")
    if positions is not None:
        positions = frozenset([positions] if hasattr(positions, "__index__") else positions)
    if names is not None:
        names = frozenset([names] if isinstance(names, str) else names)
    parameters: list[str] = []
    if (positions is None) != (names is None):
        with suppress(TypeError, ValueError):  # built-in functions have no signature
            parameters = [p.name for p in inspect.signature(fun).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    if positions is None:
        positions = frozenset(k for k, name in enumerate(parameters) if name in (names or ()))
    if names is None:
        names = frozenset(name for k, name in enumerate(parameters) if k in positions or k - len(parameters) in positions)
    return positions, names


def plans_in(closed: Any, arguments: Sequence[Any] = ()) -> list[Plan]:
    """The plans that a function bound while it was traced; they may be run on these arguments of its to be tuned."""
    jaxpr = closed.jaxpr
    known = {id(var): value for var, value in zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments])}
    bound = (eqn for eqn in jaxpr.eqns if eqn.primitive is planned_p)
    return [eqn.params["function"].plan([known.get(id(var)) for var in eqn.invars]) for eqn in bound]
