"""``jax.jit`` that plans: scripts run by ``eqsat-mem run`` get it in the place of the real one.

A function made with it that is called on its own is traced, and planned, once per signature. Where a plan is made, a second ``jax.jit``
function is called, that of the plan; otherwise the real one, as if we were not there. Called while JAX traces something around it, it is
the real one too, and part of what is planned there.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
from jax import jit as real_jit
from jax._src.core import trace_state_clean  # as in compiled.py
from jax._src.traceback_util import api_boundary
from jax.sharding import AxisType, NamedSharding

from eqsat_mem.api.meshes import explicit_mesh, given_to_jit
from eqsat_mem.api.planning import ScriptRun
from eqsat_mem.api.run_report import Entry, Ledger
from eqsat_mem.api.subjects import identity
from eqsat_mem.errors import OptionError
from eqsat_mem.ir.source import is_emitted


def install(ledger: Ledger, strict: bool) -> None:
    """Put :func:`planning_jit` in the place of ``jax.jit``."""
    jax.jit = planning_jit(ScriptRun(ledger, strict))


def planning_jit(run: ScriptRun) -> Callable[..., Any]:
    """A function that is called as ``jax.jit`` is, and makes :class:`Jitted` functions."""

    @api_boundary
    @functools.wraps(real_jit)
    def jit(*fun: Any, **options: Any) -> Any:
        if not fun:
            return functools.partial(jit, **options)
        original = real_jit(*fun, **options)  # JAX checks the arguments
        if is_emitted(fun[0]):
            return original
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
        self._planning = run.planning(fun, options)
        self._kept = None if self._planning is None else self._planning.reference()
        self._script_run = run
        self._placed = _placed_elsewhere(options)

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

    def __getstate__(self) -> Any:  # which object has too, so that it is not looked for in the real one
        return self._original.__getstate__()

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
        if self._planning is not None:
            self._planning.clear()
        self._original.clear_cache()

    def _cache_size(self) -> int:
        return int(self._original._cache_size()) + (0 if self._planning is None else self._planning.cache_size())

    def _run(self, method: str, args: Any, kwargs: Any) -> Any:
        config: Any = jax.config
        planning = None if config.jax_disable_jit else self._planning
        reason = "" if planning is None else self._why_alone(args, kwargs)
        function = planning.function_for(self._original, args, kwargs) if planning is not None and reason is None else None
        if function is not None:
            return getattr(function, method)(*args, **kwargs)
        if reason:
            self._script_run.ledger.add(Entry(**identity(self.__wrapped__), outcome="left alone", reason=reason))
        with self._script_run.tracing():
            return getattr(self._original, method)(*args, **kwargs)

    def _why_alone(self, args: Any, kwargs: Any) -> str | None:
        """None if this call is to be planned; empty if it is part of one of which a note has been made."""
        if not trace_state_clean():
            if self._script_run.is_tracing():
                return ""
            return "part of a grad, vmap, scan, eval_shape or the like outside of jax.jit: to plan that, put jax.jit around it"
        return self._placed or _lying_elsewhere(args, kwargs) or None


def _placed_elsewhere(options: dict[str, Any]) -> str:
    """The reason for which a function made with these options is not planned; empty if there is none."""
    for name in ("device", "backend"):
        if options.get(name) is not None:
            return f"made with {name}: plans are for the default device"
    try:
        given_to_jit(options)
    except OptionError as error:
        return f"made with shardings that plans do not know: {error}"
    return ""


def _lying_elsewhere(args: Any, kwargs: Any) -> str:
    """The reason for which a function is not planned for arrays that lie as these do; empty if there is none."""
    explicit = "its arguments lie on a mesh whose axes are of type Explicit: plans under run are for those of type Auto"
    if explicit_mesh(()) is not None:
        return explicit
    if not _several_devices():
        return ""
    for leaf in jax.tree.leaves((args, kwargs)):
        if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
            if not isinstance(leaf.sharding, NamedSharding):
                return f"its arguments lie on several devices as {type(leaf.sharding).__name__} says, not NamedSharding"
            if AxisType.Explicit in leaf.sharding.mesh.axis_types:
                return explicit
    return ""


@functools.cache
def _several_devices() -> bool:
    return jax.device_count() > 1
