"""Leaves of left sides into which rules do not look: the terms for facts that programs state of operations of their own."""

from __future__ import annotations

import numpy as np
from jax.extend.core import primitives

from eqsat_mem import ir
from eqsat_mem.egraph.soundness.builder import Builder
from eqsat_mem.ir import bits, mask_of
from eqsat_mem.ir.ops import Monoid, call_on

_TOTAL = Monoid("total", 0, lambda a, b: a + b)


def contraction(builder: Builder, free: int, narrow: str, wide: str) -> int:
    """A contraction of narrow numbers to wide ones."""
    one, two = builder.leaf(free, narrow), builder.leaf(free, narrow)
    return builder.program.add(ir.Dot(np.dtype(wide), free & -free, one, two))


def combination(builder: Builder, leaf: int, free: int, dtype: str) -> int:
    """A fold by a monoid of the user's along an index."""
    call = call_on(_TOTAL.operation, [(bits(free)[0],)], [free], np.dtype(dtype))
    return builder.program.add(ir.Block(np.dtype(dtype), call, (leaf,), 0))


def search(builder: Builder, free: int) -> int:
    """A search for the place of the largest element along an index."""
    axes, place = tuple((i,) for i in bits(free)), np.dtype("int32")
    params = {"axes": (0,), "index_dtype": place}
    call = ir.Call(primitives.argmax_p, params, (axes,), (axes[1:],), (place,), free & (free - 1))
    return builder.program.add(ir.Block(place, call, (builder.leaf(free, "float32"),), 0))


def selection(builder: Builder, leaf: int, free: int, dtype: str) -> int:
    """The largest element along an index, as an operation that picks elements."""
    rest = list(bits(free))
    axes = tuple((i,) for i in rest)
    params = {"k": 1, "axis": len(axes) - 1}
    kept, over = mask_of(rest[:-1]), 1 << rest[-1]
    call = ir.Call(primitives.top_k_p, params, (axes,), ((*axes[:-1], ()),) * 2, (np.dtype(dtype), np.dtype("int32")), kept, over)
    return builder.program.add(ir.Block(np.dtype(dtype), call, (leaf,), 0))
