"""Values whose elements along one axis come piece by piece from other arrays: slices, paddings, concatenations and rolls in one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from eqsat_mem.ir.ops.blocks import BlockOp, Group, Params, Shapes

Piece = tuple[int, int, int, int, int]
"""``(operand, low, high, offset, step)``: elements ``low`` up to ``high`` of a result along an axis are those of an operand at
``step * k + offset``, or all the same where the operand has no such axis."""


def put_together(arrays: Any, pieces: Any, axis: int) -> Any:
    """The pieces of a value along an axis, each at even steps of one of the arrays, which are of one rank and broadcast."""
    others = jnp.broadcast_shapes(*((*x.shape[:axis], 1, *x.shape[axis + 1 :]) for x in arrays))
    parts = []
    for number, low, high, offset, step in pieces:
        x = arrays[number]
        if x.shape[axis] > 1:
            last = high - 1 if step else low
            x = lax.slice_in_dim(x, low * step + offset, last * step + offset + 1, max(step, 1), axis)
        parts.append(jnp.broadcast_to(x, (*others[:axis], high - low, *others[axis + 1 :])))
    return lax.concatenate(parts, axis)


def _bound(*arrays: Any, pieces: tuple[Piece, ...], axis: int, beyond: int) -> Any:
    return put_together(arrays, pieces, axis)


pieces_p = Primitive("pieces")
pieces_p.def_impl(jax.jit(_bound, static_argnames=("pieces", "axis", "beyond")))
mlir.register_lowering(pieces_p, mlir.lower_fun(_bound, multiple_results=False))


@pieces_p.def_abstract_eval
def _shape(*arrays: Any, pieces: tuple[Piece, ...], axis: int, beyond: int) -> Any:
    shape = list(jnp.broadcast_shapes(*((*x.shape[:axis], 1, *x.shape[axis + 1 :]) for x in arrays)))
    shape[axis] = max(high for _, _, high, _, _ in pieces)
    return jax.core.ShapedArray(tuple(shape), arrays[0].dtype)


def _pointwise(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return a group for each axis but that of the pieces, with the operands that have it."""
    axes = (a for a in range(len(outs[0])) if a != params["axis"])
    return [(*(("in", k, a) for k, shape in enumerate(ins) if shape[a] == outs[0][a]), ("out", 0, a)) for a in axes]


def _text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    return f"put_together([{', '.join(args)}], {list(params['pieces'])}, {params['axis']})"


PIECES = BlockOp("pieces", _pointwise, text=_text, helpers=(put_together,), moves=True)
"""``beyond`` of its parameters counts pieces at the end that may be anything: positions that only fill up the shares of devices."""
