"""Jaxprs as data: the jaxprs inside an equation's parameters, sizes of values, and which equations may run twice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from eqsat_mem.ir.mesh import Devices, Spec, share_of
from eqsat_mem.ir.program import itemsize

IMPURE = frozenset({"rng_uniform", "empty", "create_token"})
"""Primitives that may return something else each time, though they declare no effect."""
CALLED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "composite": "jaxpr",
}
"""Primitives that are calls, and the parameter that holds their body."""


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter is a jaxpr, open or closed."""
    return isinstance(value, Jaxpr | ClosedJaxpr)


def inner_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation, as open jaxprs; also those in tuples and lists."""
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(part):
                yield getattr(part, "jaxpr", part)


def nested_jaxprs(jaxpr: Any) -> Iterator[Any]:
    """A jaxpr and all jaxprs inside its equations, outermost first."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn.params):
            yield from nested_jaxprs(inner)


def dtypes_in(jaxpr: Any) -> set[str]:
    """The names of the dtypes of all values of a jaxpr."""
    found: set[Any] = set()
    for inner in nested_jaxprs(jaxpr):
        for variables in (inner.invars, inner.constvars, *(own for eqn in inner.eqns for own in (eqn.invars, eqn.outvars))):
            found.update(getattr(var.aval, "dtype", "") for var in variables)
    return set(map(str, found))


def holds_64_bits(jaxpr: Any) -> bool:
    """Whether a value of a jaxpr has a dtype that JAX keeps only where ``jax_enable_x64`` is on."""
    return not dtypes_in(jaxpr).isdisjoint(("int64", "uint64", "float64", "complex128"))


def repeatable(jaxpr: Any) -> bool:
    """Whether running a function again gives the same results and does nothing else."""
    if jaxpr.effects or any(eqn.primitive.name in IMPURE for eqn in jaxpr.eqns):
        return False
    return all(repeatable(inner) for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn.params))


def aval_bytes(avals: Iterable[Any]) -> int:
    """Bytes of all values of these types."""
    return sum(math.prod(getattr(a, "shape", ())) * itemsize(a.dtype) for a in avals if hasattr(a, "dtype"))


def share_bytes(avals: Iterable[Any], specs: Iterable[Spec | None], devices: Devices) -> int:
    """Bytes that one of several devices has of arrays, without those of which nobody says how they lie."""
    known = ((aval, spec) for aval, spec in zip(avals, specs, strict=True) if spec is not None)
    return sum(math.prod(share_of(aval.shape, spec, devices)) * itemsize(aval.dtype) for aval, spec in known)


def _result_bytes(jaxpr: Any) -> Iterator[int]:
    for inner in nested_jaxprs(jaxpr):
        yield from (aval_bytes([v.aval]) for eqn in inner.eqns for v in eqn.outvars)


def largest_value(jaxpr: ClosedJaxpr) -> int:
    """Bytes of the largest value that any equation makes, inner jaxprs included."""
    return max(_result_bytes(jaxpr.jaxpr), default=0)


def contracts_in_steps(jaxpr: Any) -> bool:
    """Whether the steps of a scan inside contract."""
    bodies = (eqn.params["jaxpr"] for inner in nested_jaxprs(jaxpr) for eqn in inner.eqns if eqn.primitive.name == "scan")
    return any(eqn.primitive.name == "dot_general" for body in bodies for inner in nested_jaxprs(body.jaxpr) for eqn in inner.eqns)


def total_bytes(jaxpr: ClosedJaxpr) -> int:
    """Bytes of all values that the equations make, inner jaxprs included, and of the arguments."""
    return aval_bytes(jaxpr.in_avals) + sum(_result_bytes(jaxpr.jaxpr))


def consts_and_carries(params: Mapping[str, Any]) -> tuple[int, int]:
    """The number of operands of a scan that are the same in every step, and the number of carries that follow them.

    Since JAX 0.11, the parameters have a tree of operands in three parts instead of the two numbers.
    """
    if "num_consts" in params:
        return int(params["num_consts"]), int(params["num_carry"])
    consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())
    return consts, carry


def combination_of(params: Mapping[str, Any]) -> ClosedJaxpr:
    """The function with which a ``reduce`` or ``reduce_window`` combines two elements."""
    jaxpr = params["jaxpr"]
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, params.get("consts", ()))


def leaves_alone(combination: ClosedJaxpr, start: Sequence[Any]) -> bool:
    """Whether combined with ``start``, on either side, a few other values stay as they are: nothing else tells that it is an identity."""
    others = [np.array([7 * k + value for value in PROBES]).astype(v.dtype) for k, v in enumerate(start)]
    begin = [np.broadcast_to(value, len(PROBES)) for value in start]
    with jax.ensure_compile_time_eval():
        both = jax.jit(jax.vmap(jaxpr_as_fun(combination)))
        found = [both(*begin, *others), both(*others, *begin)]
    return all(np.array_equal(made, other) for side in found for made, other in zip(side, others, strict=True))


PROBES = (-30, -1, 0, 2, 50)


def stacked_by(prim: Any, params: Mapping[str, Any], out: int) -> list[Any]:
    """The equation in the body of a scan whose results it stacks as its own result ``out``, and those within it that compute them, the
    innermost last; none of carries and of other operations.
    """
    return [*_made_by(params["jaxpr"].jaxpr, out)] if prim.name == "scan" and out >= consts_and_carries(params)[1] else []


def _made_by(body: Any, out: int) -> Iterator[Any]:
    for eqn in body.eqns:
        if any(v is body.outvars[out] for v in eqn.outvars):
            yield eqn
            if eqn.primitive.name == "jit":
                yield from _made_by(eqn.params["jaxpr"].jaxpr, eqn.outvars.index(body.outvars[out]))
