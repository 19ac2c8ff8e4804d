"""The functions that a script gives to ``jax.jit`` under ``eqsat-mem run``: the calls that have a plan, and the function of the plans."""

from __future__ import annotations

import functools
import inspect
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import jax
from jax import jit as real_jit
from jax._src.core import trace_state_clean  # as in compiled.py
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from eqsat_mem.api.arguments import hoist_constants, is_valueless, with_valueless, without_valueless
from eqsat_mem.api.compiled import MOST_SIGNATURES, signature, static_arguments
from eqsat_mem.api.function import Function
from eqsat_mem.api.meshes import AnyMesh, Lying, given_to_jit, placement, sharding_of
from eqsat_mem.api.primitive import bind_placed
from eqsat_mem.api.run_report import Entry, Ledger, say
from eqsat_mem.api.subjects import identity, subject
from eqsat_mem.backends.choose import backend_for
from eqsat_mem.errors import EqsatMemError, PlanningError
from eqsat_mem.frontend.effects import uses_references
from eqsat_mem.ir.jaxprs import total_bytes
from eqsat_mem.options import Options, format_bytes, resolve_device, resolve_limit
from eqsat_mem.reports.plan import Plan

ROOM = 2
"""A program fits without a plan if so many times the bytes of all that it ever makes are within the limit."""
SMALL_BYTES = 16 << 10
"""A program that never makes more is not planned, whatever the limit: compilers take as much for themselves."""


@dataclass(frozen=True)
class ScriptRun:
    """One run of a script: its ledger, in which outcomes are noted, and whether a failure to plan is an error."""

    ledger: Ledger
    strict: bool
    local: threading.local = field(default_factory=threading.local)
    known: WeakKeyDictionary[Any, dict[str, Planning]] = field(default_factory=WeakKeyDictionary)

    def planning(self, fun: Callable[..., Any], options: dict[str, Any]) -> Planning | None:
        """Made once for each function and options, as JAX compiles once where ``jax.jit(f)`` is written in a loop.

        Functions may be equal without being one object: methods of the same instance, say. None for what cannot be referred to weakly,
        which JAX refuses when it is called.
        """
        try:
            reference = ref(fun)
        except TypeError:
            return None
        try:
            same = self.known.setdefault(fun, {})
        except TypeError:  # what cannot be a key JAX refuses when it is called
            same = {}
        key = repr(sorted(options.items()))
        if key not in same or same[key].reference() is None:
            same[key] = Planning(reference, options, self)
        return same[key]

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """A context in which :meth:`is_tracing` is true: this thread traces a part of a function that has been noted already."""
        before, self.local.inside = self.is_tracing(), True
        try:
            yield
        finally:
            self.local.inside = before

    def is_tracing(self) -> bool:
        return getattr(self.local, "inside", False)


class Planning:
    """A function that was given to ``jax.jit`` with some options: the calls for which there is a plan, and the function of the plans.

    It refers to the function weakly, so that it may be kept as long as the function lives.

    Attributes:
        reference: gives the function, or None.
    """

    def __init__(self, reference: Callable[[], Any], options: dict[str, Any], run: ScriptRun) -> None:
        self.reference = reference
        self._options = options
        self._script_run = run
        self._static = static_arguments(reference(), options)
        self._inner = {name: value for name, value in options.items() if name != "compiler_options"}  # which JAX refuses within others
        self._known: dict[Hashable, Any] = {}
        self._functions: WeakKeyDictionary[Jaxpr, dict[Lying | None, _Bound | None]] = WeakKeyDictionary()
        self._jitted: dict[Hashable, Any] = {}

    def function_for(self, original: Any, args: Any, kwargs: Any) -> Any:
        """The ``jax.jit`` function of the plans, for arguments that lie as these do, if this call has a plan, which is made where that is
        not known; else None."""
        try:
            key = signature(args, kwargs, *self._static)
            lying = self._lying(args, kwargs)
            known = self._known.get((key, lying))
        except Exception:  # arguments that JAX does not take, such as static ones that cannot be hashed or compared: it tells
            return None
        if known is None:
            with self._script_run.tracing(), self._noting_errors():
                traced = original.trace(*args, **kwargs)
            if len(self._known) >= MOST_SIGNATURES:
                self._known.clear()
            bound = self._function(traced, lying)
            known = self._known[key, lying] = bound is not None and self._lowered(bound, traced, lying, args, kwargs)
        return known or None

    def _lying(self, args: Any, kwargs: Any) -> Lying | None:
        """The mesh and the shardings of the arguments of a call; None for one device."""
        given = given_to_jit(self._options)
        if jax.device_count() == 1:
            return None
        positions, names = self._static
        traced = tuple(arg for k, arg in enumerate(args) if k not in positions and k - len(args) not in positions)
        named = {name: arg for name, arg in kwargs.items() if name not in names}
        if not given.given and not any(map(sharding_of, jax.tree.leaves((traced, named)))):
            return None
        return given.lying(traced, named)

    def _lowered(self, bound: _Bound, traced: Any, lying: Lying | None, args: Any, kwargs: Any) -> Any:
        """The function of the plans, if JAX can lower it for these arguments, which it then keeps; else False. The outcome is noted."""
        start = time.perf_counter()
        try:
            with jax.explain_cache_misses(False):
                function = self._function_of_plans(lying, bound.function.plan())
                function.lower(*args, **kwargs)
        except Exception as error:
            self._functions[traced.jaxpr.jaxpr][lying] = None
            known = {name: getattr(bound.entry, name) for name in ("function", "place", "arguments")}
            self._failed(error, {**known, "planning_s": time.perf_counter() - start})
            return False
        self._script_run.ledger.add(bound.entry)
        return function

    def clear(self) -> None:
        """Forget all plans and their compiled programs."""
        self._known.clear()
        self._functions.clear()
        for function in self._jitted.values():
            function.clear_cache()

    def cache_size(self) -> int:
        """The number of compiled plans that are kept."""
        return sum(int(function._cache_size()) for function in self._jitted.values())

    def _traced_by_jax(self, lying: Lying | None) -> Callable[..., Any]:
        """The function whose ``jax.jit`` function is that of the plans."""

        def call(*args: Any, **kwargs: Any) -> Any:
            fun = self.reference()
            if trace_state_clean():  # JAX looks for the operation that made a NaN
                return fun(*args, **kwargs)
            original = real_jit(fun, **self._inner)  # with the caches of any other made from this function
            with self._script_run.tracing():
                traced = original.trace(*args, **kwargs)
            bound = self._function(traced, lying)
            if bound is None:
                return original(*args, **kwargs)
            inputs = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, Tracer)]  # all that is not static
            results = bind_placed(bound.function, [*bound.captured, *inputs])
            return jax.tree.unflatten(traced.out_tree, with_valueless(results, traced.jaxpr.out_avals))

        functools.update_wrapper(call, self.reference(), updated=())
        with suppress(ValueError, TypeError):  # built-in functions have none
            vars(call)["__signature__"] = inspect.signature(call)
        vars(call).pop("__wrapped__")
        return call

    def _function_of_plans(self, lying: Lying | None, plan: Plan) -> Any:
        """The ``jax.jit`` function of plans like this one, compiled as it is, unless the user says how."""
        options = {} if self._options.get("compiler_options") else dict(plan.compiler_options)
        key = lying, frozenset(options.items())
        if key not in self._jitted:
            given = {**self._options, "compiler_options": options} if options else self._options
            self._jitted[key] = real_jit(self._traced_by_jax(lying), **given)
        return self._jitted[key]

    def _function(self, traced: Any, lying: Lying | None) -> _Bound | None:
        """The function whose plan is that of what was traced; None where it runs as written, of which a note is made once."""
        known = self._functions.setdefault(traced.jaxpr.jaxpr, {})
        if lying not in known:
            known[lying] = self._decide(traced, lying)
        return known[lying]

    def _decide(self, traced: Any, lying: Lying | None) -> _Bound | None:
        known: dict[str, Any] = {
            **subject(self.reference(), traced.jaxpr.jaxpr),
            "arguments": ", ".join(aval.str_short() for aval in traced.jaxpr.in_avals),
        }
        reason = _why_not(traced)
        if reason:
            self._script_run.ledger.add(Entry(**known, outcome="left alone", reason=reason))
            return None
        start = time.perf_counter()
        try:
            with jax.explain_cache_misses(False):
                function, captured = _hoisted(self.reference(), traced, lying)
                entry = _plan(function, known)
        except Exception as error:
            known["planning_s"] = time.perf_counter() - start
            reason = "" if isinstance(error, EqsatMemError) else _why_not_lowered(traced)
            if reason:
                self._script_run.ledger.add(Entry(**known, outcome="left alone", reason=reason))
            else:
                self._failed(error, known)
            return None
        if entry.outcome == "planned":
            return _Bound(function, captured, entry)
        self._script_run.ledger.add(entry)
        return None

    def _failed(self, error: Exception, known: dict[str, Any]) -> None:
        """Note the failure and warn of it once, or raise it."""
        expected = isinstance(error, EqsatMemError)
        reason = str(error) if expected else f"{type(error).__name__}: {error}"
        trace = "" if expected else "".join(traceback.format_exception(error))
        first = self._script_run.ledger.add(Entry(**known, outcome="failed", reason=reason, traceback=trace))
        if self._script_run.strict:
            raise error if expected else PlanningError(known["function"], reason) from error
        if first:
            say(f"warning: {known['function']} ({known['place']}) runs as written, for {reason}")

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Note what the function itself raises, which is then raised as if we were not there."""
        try:
            yield
        except Exception as error:
            reason = f"it raised {type(error).__name__} while JAX traced it"
            self._script_run.ledger.add(Entry(**identity(self.reference()), outcome="left alone", reason=reason))
            raise


@dataclass(frozen=True, eq=False)
class _Bound:
    """A function with a plan, the arrays that it takes before its arguments, and what the report will say of it."""

    function: Function
    captured: list[Any]
    entry: Entry


def _hoisted(fun: Any, traced: Any, lying: Lying | None) -> tuple[Function, list[Any]]:
    """The function with a plan to which ``fun`` was traced, and the arrays that it takes before its arguments."""
    jaxpr, captured = hoist_constants(without_valueless(traced.jaxpr))
    count = len(traced.jaxpr.in_avals)
    arguments = traced.jaxpr.jaxpr.debug_info.arg_names or ()
    names = [
        *(f"captured_{k}" for k in range(len(captured))),
        *(arguments if len(arguments) == count else (f"arg_{k}" for k in range(count))),
    ]
    donated = [len(captured) + k for k in traced.donate_argnums]
    name = getattr(fun, "__name__", "")
    options = options_for(jaxpr, None if lying is None else lying.mesh)
    placed = None if lying is None else placement(lying, jaxpr, names, captured, _left_by_jit(traced, lying))
    return Function(name if name.isidentifier() else "program", jaxpr, options, names, donated=donated, placement=placed), captured


def _left_by_jit(traced: Any, lying: Lying) -> list[PartitionSpec | None]:
    """The specs in which ``jax.jit`` leaves results with values, as compiled: a script may read them, and passes them to its next call."""
    results = traced.jaxpr.out_avals
    left = jax.tree.leaves(traced.lower().compile().output_shardings)
    left = left if len(left) == len(results) else [None] * len(results)
    left = [s for s, aval in zip(left, results, strict=True) if not is_valueless(aval)]
    shape = tuple(lying.mesh.shape.items())
    return [s.spec if isinstance(s, NamedSharding) and tuple(s.mesh.shape.items()) == shape else None for s in left]


def options_for(jaxpr: ClosedJaxpr, mesh: AnyMesh | None = None) -> Options:
    """The options under which a function of the script is planned: for all of them, those of the environment."""
    device = resolve_device(Options())
    return Options(memory_limit=resolve_limit(Options(), backend_for(device).capacity_bytes, mesh), device=device)


def _why_not(traced: Any) -> str:
    """The reason for which a traced function is not for us to plan; empty if it is."""
    avals = traced.jaxpr.in_avals
    if uses_references(traced.jaxpr):
        return "it uses references to arrays (jax.new_ref), which it may change"
    if not all(isinstance(aval, ShapedArray) for aval in avals):
        return "it takes values of types that are not arrays"
    if not all(isinstance(aval, ShapedArray) for aval in traced.jaxpr.out_avals):
        return "it returns values of types that are not arrays"
    try:
        described = traced.args_info
    except Exception as error:
        return f"a class of its arguments cannot hold descriptions of arrays: unflattening raised {type(error).__name__}"
    if len(avals) != len(jax.tree.leaves(described)):
        return "it uses a value of a function whose tracing has ended"
    if not all(isinstance(extent, int) for aval in avals for extent in aval.shape):
        return "its shapes are symbols: plans are for numbers"
    return ""


def _why_not_lowered(traced: Any) -> str:
    """The reason for which JAX does not compile a traced function; empty if it does."""
    try:
        traced.lower()
    except Exception as error:
        return f"JAX raised {type(error).__name__} when it was to be compiled"
    return ""


def _plan(function: Function, known: dict[str, Any]) -> Entry:
    limit = function.options.memory_limit
    assert limit is not None
    most = total_bytes(function.jaxpr)
    if ROOM * most <= limit:
        return Entry(**known, outcome="fitting", reason=f"all that it ever makes takes {format_bytes(most)}", limit_bytes=limit)
    if most <= SMALL_BYTES:
        reason = f"all that it ever makes takes {format_bytes(most)}, too little for a plan"
        return Entry(**known, outcome="left alone", reason=reason, limit_bytes=limit)
    plan = function.plan()
    is_here = plan.is_here
    return Entry(
        **known,
        outcome="fitting" if plan.unchanged else "planned" if is_here else "left alone",
        reason="it holds less than the limit as written" if plan.unchanged else "" if is_here else f"its plan is for {plan.device}",
        limit_bytes=limit,
        original_peak_bytes=plan.original_peak_bytes,
        peak_bytes=plan.held_bytes,
        planning_s=sum(plan.seconds.values()),
    )
