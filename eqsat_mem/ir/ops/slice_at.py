"""Slices at computed positions, which emitted programs carry with them as source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from eqsat_mem.ir.ops.blocks import BlockOp, Group, Params, Shapes


def sliced_at(x: Any, positions: Any, axis: int, stride: int) -> Any:
    """``x`` at ``positions`` along an axis: positions inside of it, each of them ``stride`` behind the one before."""
    part = lax.dynamic_slice_in_dim(x, positions[0], (len(positions) - 1) * stride + 1, axis, allow_negative_indices=False)
    return part if stride == 1 else lax.slice_in_dim(part, 0, None, stride, axis)


def shifted_to(x: Any, positions: Any, axis: int, before: int, after: int) -> Any:
    """``x`` at consecutive ``positions`` along an axis, of which those outside stand for the nearest inside.

    They begin at most ``before`` elements ahead of the first, and end at most ``after`` elements behind the last.
    """
    extent, count = x.shape[axis], len(positions)
    length = min(extent, count)
    start = jnp.clip(positions[0], 0, extent - length)
    part = lax.dynamic_slice_in_dim(x, start, length, axis, allow_negative_indices=False)
    first, last = (lax.index_in_dim(part, k, axis) for k in (0, -1))
    wide = lax.concatenate([jnp.repeat(first, before, axis), part, jnp.repeat(last, after, axis)], axis)
    return lax.dynamic_slice_in_dim(wide, positions[0] - start + before, count, axis, allow_negative_indices=False)


def _primitive(name: str, function: Callable[..., Any], options: Sequence[str]) -> Primitive:
    """Return a primitive that takes positions along the axis ``axis``, made of JAX's own."""
    made = Primitive(name)
    made.def_impl(jax.jit(function, static_argnames=tuple(options)))

    @made.def_abstract_eval
    def shape(x: Any, positions: Any, *, axis: int, **params: Any) -> Any:
        return jax.core.ShapedArray((*x.shape[:axis], positions.shape[0], *x.shape[axis + 1 :]), x.dtype)

    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))
    return made


slice_at_p = _primitive("slice_at", sliced_at, ("axis", "stride"))
shift_to_p = _primitive("shift_to", shifted_to, ("axis", "before", "after"))


def _pointwise(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return a group for the positions, and one for each axis that is read whole."""
    axis = params["axis"]
    others = [(("in", 0, a), ("out", 0, a)) for a in range(len(ins[0])) if a != axis]
    return [(("in", 1, 0), ("out", 0, axis)), *others]


def _sliced_text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    return f"sliced_at({args[0]}, {args[1]}, {params['axis']}, {params['stride']})"


def _shifted_text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    return f"shifted_to({args[0]}, {args[1]}, {params['axis']}, {params['before']}, {params['after']})"


SLICES = [
    BlockOp("slice_at", _pointwise, text=_sliced_text, helpers=(sliced_at,), moves=True, linear=slice(1)),
    BlockOp("shift_to", _pointwise, text=_shifted_text, helpers=(shifted_to,), moves=True, linear=slice(1)),
]
