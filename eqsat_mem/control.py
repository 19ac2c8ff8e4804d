"""Bodies of ``scan``, ``while`` and ``cond``: programs of their own, planned under the limit less what is live around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from eqsat_mem.ir import Block, Call, Program, itemsize
from eqsat_mem.memory import argument_bytes

Planner = Callable[[ClosedJaxpr, int], tuple[Callable[..., Any] | None, int]]
"""Plans a jaxpr under a limit in bytes: the function (None: it stays as it is), and the bytes it holds besides its arguments."""

SMALL_BYTES = 2**20
"""Bodies whose every value is smaller than this are left as they are."""


def plan_bodies(program: Program, limit: int, planner: Planner) -> Program:
    """The program with every large body of its control flow planned."""
    new: dict[Call, Call] = {}
    for call in dict.fromkeys(_calls(program)):
        changed = _planned(call, limit - argument_bytes(program), planner)
        if changed is not None:
            new[call] = changed
    return program.replace_calls(new) if new else program


def _calls(program: Program) -> Iterator[Call]:
    for t in program.reachable():
        term = program.terms[t]
        if isinstance(term, Block) and term.call.prim.name in BODIES:
            yield term.call


def _planned(call: Call, room: int, planner: Planner) -> Call | None:
    """A call with planned bodies; ``room`` is what they may hold besides the program's arguments."""
    params, scratch, changed = dict(call.params), 0, False
    for key in BODIES[call.prim.name]:
        bodies = params[key] if isinstance(params[key], tuple) else (params[key],)
        done = []
        for body in bodies:
            if largest_value(body) < SMALL_BYTES:
                done.append(body)
                continue
            function, held = planner(body, max(room, 0) + _bytes(body.in_avals))
            done.append(body if function is None else _traced(function, body))
            scratch, changed = max(scratch, held), changed or function is not None
        params[key] = tuple(done) if isinstance(params[key], tuple) else done[0]
    return replace(call, params=params, scratch_bytes=scratch) if changed or scratch else None


def _traced(function: Callable[..., Any], body: ClosedJaxpr) -> ClosedJaxpr:
    return jax.make_jaxpr(lambda *args: list(function(*args)))(*map(_struct, body.in_avals))


BODIES = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
"""The parameters of each control-flow primitive that hold its bodies."""


def largest_value(jaxpr: ClosedJaxpr) -> int:
    """Bytes of the largest value that any equation makes, inner jaxprs included."""
    return max(_result_bytes(jaxpr.jaxpr), default=0)


def _result_bytes(jaxpr: Any) -> Iterator[int]:
    for eqn in jaxpr.eqns:
        yield from (_bytes([v.aval]) for v in eqn.outvars)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from _result_bytes(getattr(value, "jaxpr", value))


def _bytes(avals: Any) -> int:
    return sum(math.prod(getattr(a, "shape", ())) * itemsize(a.dtype) for a in avals if hasattr(a, "dtype"))


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
