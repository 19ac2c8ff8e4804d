"""Blocks that contain a program of their own: loops, branches, and all others with a jaxpr among their parameters."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import Literal

from eqsat_mem.ir import itemsize
from eqsat_mem.ir.jaxprs import inner_jaxprs
from eqsat_mem.ir.ops.blocks import BlockOp, Params


def held_inside(params: Params) -> int:
    """Return the most bytes that the body of a loop or branch holds at once of the results of loops inside it.

    Results of the body itself do not count.
    """
    return max(map(_held, inner_jaxprs(params)), default=0)


def _held(jaxpr: Any) -> int:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    last = {v: k for k, eqn in enumerate(inner.eqns) for v in eqn.invars if not isinstance(v, Literal)}
    last |= dict.fromkeys((v for v in inner.outvars if not isinstance(v, Literal)), -1)
    live: dict[Any, int] = {}
    most = 0
    for k, eqn in enumerate(inner.eqns):
        if eqn.primitive.name in LOOPS:
            read_later = (v for v in eqn.outvars if last.get(v, -1) > k and hasattr(v.aval, "dtype"))
            live |= {v: math.prod(v.aval.shape) * itemsize(v.aval.dtype) for v in read_later}
        most = max(most, sum(live.values()) + held_inside(eqn.params))
        live = {v: size for v, size in live.items() if last[v] > k}
    return most


CONTROL = [BlockOp(name, monoid="add") for name in ("scan", "while", "cond")]
"""The axes along which a loop or choice is pointwise, and those over which its results are sums, are those of its body
(:mod:`eqsat_mem.ir.axis_roles`)."""

LOOPS = frozenset(row.name for row in CONTROL)

OPAQUE = BlockOp("opaque")
"""The row of a primitive that is not in the table: every axis is bound."""
