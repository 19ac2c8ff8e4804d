"""Blocks that hold a program of their own: loops, branches, and whatever else carries a jaxpr."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import Literal

from eqsat_mem.ir import itemsize
from eqsat_mem.ir.jaxprs import inner_jaxprs
from eqsat_mem.ir.ops.blocks import BlockOp, Params, Shapes, elements, nothing, unchanged

UNKNOWN_TRIPS = 10
"""Assumed iterations of a loop whose number is known only when it runs."""


def body_weight(jaxpr: Any) -> float:
    """The cost of one run of a jaxpr in additions."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(map(_equation_weight, inner.eqns), 0.0)


def _equation_weight(eqn: Any) -> float:
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.invars]
    size = float(sum(math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape")))
    if eqn.primitive.name == "dot_general":
        contracted = eqn.params["dimension_numbers"][0][0]
        return 2.0 * size * math.prod(shapes[0][int(a)] for a in contracted)
    trips = eqn.params.get("length", 1)
    return size + trips * sum(map(body_weight, inner_jaxprs(eqn.params)), 0.0)


def held_inside(params: Params) -> int:
    """Bytes that the bodies of a loop or branch hold at once of what loops inside them stack or carry, results of the bodies aside."""
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


def _times(trips: float) -> Any:
    def weight(ins: Shapes, outs: Shapes, params: Params) -> float:
        return elements(ins, outs, params) + params.get("length", trips) * sum(map(body_weight, inner_jaxprs(params)), 0.0)

    return weight


CONTROL = [
    BlockOp("scan", nothing, unchanged, _times(1)),
    BlockOp("while", nothing, unchanged, _times(UNKNOWN_TRIPS)),
    BlockOp("cond", nothing, unchanged, _times(1)),
]

LOOPS = frozenset(row.name for row in CONTROL)

OPAQUE = BlockOp("opaque", nothing, unchanged, _times(1))
"""What holds for a primitive without a row: every axis is bound, and its cost is what it reads, writes and contains."""
