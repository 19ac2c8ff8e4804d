"""``jax.jit`` that plans: scripts run by ``eqsat-mem run`` get it in the place of the real one.

A function made with it has two compiled forms. Called on its own it is planned, inside the real ``jax.jit``, once per signature. Called
while JAX traces something around it, it is the real thing, and part of what is planned there. Both share one trace.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import jax
from jax import jit as real_jit
from jax._src.core import trace_state_clean  # as in compiling.py
from jax._src.traceback_util import api_boundary, register_exclusion  # hides these frames from users, as JAX hides its own
from jax.core import ShapedArray, Tracer

from eqsat_mem.api.compiled import JitByPlan
from eqsat_mem.api.function import Function
from eqsat_mem.api.optimize import argument_names, hoist_constants
from eqsat_mem.api.primitive import bind
from eqsat_mem.api.run_report import Entry, Ledger, say
from eqsat_mem.backends.choose import backend_for
from eqsat_mem.errors import EqsatMemError, PlanningError
from eqsat_mem.ir.jaxprs import total_bytes
from eqsat_mem.options import Options, format_bytes, resolve_device, resolve_limit

register_exclusion(__file__)

ROOM = 2
"""A program fits without a plan if so many times the bytes of all that it ever makes are within the limit."""


def install(ledger: Ledger, strict: bool) -> None:
    """Put :func:`planning_jit` in the place of ``jax.jit``."""
    jax.jit = planning_jit(ScriptRun(ledger, strict))


@dataclass(frozen=True)
class ScriptRun:
    """One run of a script: its ledger, in which outcomes are noted, and whether a failure to plan is an error."""

    ledger: Ledger
    strict: bool
    local: threading.local = field(default_factory=threading.local)
    known: WeakKeyDictionary[Any, dict[str, Planning]] = field(default_factory=WeakKeyDictionary)

    def planning(self, fun: Callable[..., Any], options: dict[str, Any]) -> Planning:
        """Made once for each function and options, as JAX compiles once where ``jax.jit(f)`` is written in a loop.

        Functions may be equal without being one object: methods of the same instance, say.
        """
        try:
            same = self.known.setdefault(fun, {})
        except TypeError:  # what cannot be a key JAX refuses when it is called
            same = {}
        key = repr(sorted(options.items()))
        if key not in same or same[key].reference() is None:
            same[key] = Planning(ref(fun), _planning(ref(fun), options, self))
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


@dataclass(frozen=True)
class Planning:
    """A function for ``jax.jit`` to trace; it works as long as the function that it refers to is kept."""

    reference: Callable[[], Any]
    call: Callable[..., Any]


def planning_jit(run: ScriptRun) -> Callable[..., Any]:
    """A function that is called as ``jax.jit`` is, and makes :class:`Jitted` functions."""

    @api_boundary
    @functools.wraps(real_jit)
    def jit(*fun: Any, **options: Any) -> Any:
        if not fun:
            return functools.partial(jit, **options)
        original = real_jit(*fun, **options)  # JAX checks the arguments
        run.ledger.made()
        return Jitted(fun[0], original, options, run)

    jit.__module__ = "jax"  # where pickle finds it, and in processes that run without us the real one
    return jit


class Jitted:
    """A function made with ``jax.jit``, planned where it is called on its own. Its attributes are those of the real one."""

    def __init__(self, fun: Callable[..., Any], original: Any, options: dict[str, Any], run: ScriptRun) -> None:
        functools.update_wrapper(self, original, updated=())
        self.__wrapped__ = fun
        self._original = original
        self._options = options
        planning = run.planning(fun, options)
        self._kept = planning.reference()
        self._planned = JitByPlan(planning.call, options)
        self._script_run = run
        self._placed = _placement(options)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that isinstance says what it says of the real one
        return type(self._original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return repr(self._original)

    def __copy__(self) -> Any:
        return jax.jit(self.__wrapped__, **self._options)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()  # as for the real one, methods stay those of the same instance

    def __reduce__(self) -> Any:
        return functools.partial(jax.jit, **self._options), (self.__wrapped__,)

    @api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("__call__", args, kwargs)

    @api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("lower", args, kwargs)

    @api_boundary
    def trace(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("trace", args, kwargs)

    def clear_cache(self) -> None:
        self._planned.clear_cache()
        self._original.clear_cache()

    def _cache_size(self) -> int:
        return self._planned.cache_size() + int(self._original._cache_size())

    def _run(self, method: str, args: Any, kwargs: Any) -> Any:
        reason = self._why_alone(args, kwargs)
        if reason is None:
            planned = self._planned.chosen(args, kwargs)
            return getattr(planned, method)(*args, **kwargs)
        if reason:
            self._script_run.ledger.add(Entry(**_identity(self.__wrapped__), outcome="left alone", reason=reason))
        with self._script_run.tracing():
            return getattr(self._original, method)(*args, **kwargs)

    def _why_alone(self, args: Any, kwargs: Any) -> str | None:
        """None if this call is to be planned; empty if it is part of one of which a note has been made."""
        if not trace_state_clean():
            if self._script_run.is_tracing():
                return ""
            return "part of a grad, vmap, scan, eval_shape or the like outside of jax.jit: to plan that, put jax.jit around it"
        if self._placed:
            return f"made with {self._placed}: plans are for one device"
        return "its arguments are spread over several devices" if _spread(args, kwargs) else None


def _planning(reference: Callable[[], Any], options: dict[str, Any], run: ScriptRun) -> Callable[..., Any]:
    """A function for ``jax.jit`` to trace, once per signature: it plans what the function would be traced to.

    It refers to the function weakly, so that it may be kept as long as the function lives.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        fun = reference()
        original = real_jit(fun, **options)  # with the caches of any other made from this function
        if trace_state_clean():  # jit is disabled, or JAX looks for the operation that made a NaN
            return fun(*args, **kwargs)
        with run.tracing(), _noting_errors(fun, run.ledger):
            traced = original.trace(*args, **kwargs)
        inputs = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, Tracer)]  # all that is not static
        types = ", ".join(jax.typeof(x).str_short() for x in inputs)
        known = {**_identity(fun), "arguments": types}
        start = time.perf_counter()
        try:
            function, captured = _function(fun, args, kwargs, traced, inputs)
            entry = _plan(function, known)
            out = bind(function, *captured, *inputs) if entry.outcome == "planned" else None
            run.ledger.add(entry)
        except Exception as error:
            out = None
            _failed(error, {**known, "planning_s": time.perf_counter() - start}, run)
        return original(*args, **kwargs) if out is None else jax.tree.unflatten(traced.out_tree, out)

    functools.update_wrapper(call, reference(), updated=())
    with suppress(ValueError, TypeError):  # built-in functions have none
        vars(call)["__signature__"] = inspect.signature(call)
    vars(call).pop("__wrapped__")
    return call


@contextmanager
def _noting_errors(fun: Any, ledger: Ledger) -> Iterator[None]:
    """Note what the function itself raises, which is then raised as if we were not there."""
    try:
        yield
    except Exception as error:
        ledger.add(Entry(**_identity(fun), outcome="left alone", reason=f"it raised {type(error).__name__} while JAX traced it"))
        raise


def _function(fun: Any, args: Any, kwargs: Any, traced: Any, inputs: list[Any]) -> tuple[Function, list[Any]]:
    """The function with a plan to which ``fun`` was traced, and the arrays that it takes before its inputs."""
    jaxpr, captured = hoist_constants(traced.jaxpr)
    donated = [len(captured) + k for k in traced.donate_argnums]
    name = getattr(fun, "__name__", "")
    names = [f"captured_{k}" for k in range(len(captured))] + argument_names(fun, args, kwargs, inputs)
    device = resolve_device(Options())
    options = Options(memory_limit=resolve_limit(Options(), backend_for(device).capacity_bytes), device=device)
    return Function(name if name.isidentifier() else "program", jaxpr, options, names, donated=donated), captured


def _plan(function: Function, known: dict[str, Any]) -> Entry:
    limit = function.options.memory_limit
    assert limit is not None
    if not all(isinstance(aval, ShapedArray) for aval in function.jaxpr.in_avals):
        return Entry(**known, outcome="left alone", reason="it takes a reference to an array, which it may change")
    if not all(isinstance(extent, int) for aval in function.jaxpr.in_avals for extent in aval.shape):
        return Entry(**known, outcome="left alone", reason="its shapes are symbols: plans are for numbers")
    most = total_bytes(function.jaxpr)
    if ROOM * most <= limit:
        return Entry(**known, outcome="fitting", reason=f"all that it ever makes takes {format_bytes(most)}", limit_bytes=limit)
    plan = function.plan()
    is_here = plan.schedule.backend.is_here
    return Entry(
        **known,
        outcome="fitting" if plan.unchanged else "planned" if is_here else "left alone",
        reason="it holds less than the limit as written" if plan.unchanged else "" if is_here else f"its plan is for {plan.device}",
        limit_bytes=limit,
        original_peak_bytes=plan.original_peak_bytes,
        peak_bytes=plan.peak_bytes if plan.compiled_peak_bytes is None else plan.compiled_peak_bytes,
        planning_s=sum(plan.seconds.values()),
    )


def _failed(error: Exception, known: dict[str, Any], run: ScriptRun) -> None:
    """Note the failure and warn of it once, or raise it."""
    expected = isinstance(error, EqsatMemError)
    reason = str(error) if expected else f"{type(error).__name__}: {error}"
    trace = "" if expected else "".join(traceback.format_exception(error))
    first = run.ledger.add(Entry(**known, outcome="failed", reason=reason, traceback=trace))
    if run.strict:
        raise error if expected else PlanningError(known["function"], reason) from error
    if first:
        say(f"warning: {known['function']} ({known['place']}) runs as written, for {reason}")


def _placement(options: dict[str, Any]) -> str:
    """The first option that places a function on devices."""
    for name in ("device", "backend"):
        if options.get(name) is not None:
            return name
    for name in ("in_shardings", "out_shardings"):
        leaves = jax.tree.leaves(options.get(name))
        if any(type(leaf).__name__ != "UnspecifiedValue" for leaf in leaves):
            return name
    return ""


def _spread(args: Any, kwargs: Any) -> bool:
    """Whether an array among the arguments lies on more than one device."""
    if not _several_devices():
        return False
    return any(isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1 for leaf in jax.tree.leaves((args, kwargs)))


@functools.cache
def _several_devices() -> bool:
    return jax.device_count() > 1


def _identity(fun: Any) -> dict[str, Any]:
    """The name of a function, and its file and line."""
    while isinstance(fun, functools.partial) or hasattr(fun, "__wrapped__"):
        fun = fun.func if isinstance(fun, functools.partial) else fun.__wrapped__
    name = getattr(fun, "__qualname__", type(fun).__qualname__)
    code = getattr(fun, "__code__", None) or getattr(type(fun).__call__, "__code__", None)
    if code is None:
        return {"function": name, "place": getattr(fun, "__module__", None) or ""}
    return {"function": name.replace("<locals>.", ""), "place": f"{_short(Path(code.co_filename))}:{code.co_firstlineno}"}


def _short(file: Path) -> Path:
    """The path from the current directory, or from where its module was found."""
    above = [Path.cwd(), *map(Path, sys.path)]
    return min((file.relative_to(path) for path in above if file.is_relative_to(path)), key=lambda p: len(p.parts), default=file)
