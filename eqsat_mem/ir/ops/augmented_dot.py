"""Sums joined to a contraction over the same index, which emitted programs carry with them as source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from eqsat_mem.ir.ops.blocks import BlockOp, Group, Params, Shapes, all_but

MOST_PARTS = 3
"""Parts of a contraction that are each followed by their sums; of fewer than eight elements there is one."""


def parts_of(extent: int) -> int:
    """The parts that a contraction over so many elements has, each of which is followed by its sums."""
    return max(min(extent // 8, MOST_PARTS), 1)


def longer(extent: int) -> int:
    """The elements that a contraction over ``extent`` elements has once sums are part of it: two more for each part."""
    return extent + 2 * parts_of(extent)


def append_sums(x: Any, s: Any, parts: int, first: bool) -> Any:
    """``x``, and behind each of the parts of its last axis the sum of that part of ``s`` and a one, or these two the other way round.

    A contraction of one such array with another, one of them made with ``first`` and the other without, adds the sums of both to that
    of the products, those of a part before the products of the next. Sums that cancel, as in a squared distance, do so before they grow.
    """
    n = x.shape[-1]
    joined = []
    for p in range(parts):
        part = slice(p * n // parts, (p + 1) * n // parts)
        total = jnp.sum(s[..., part], -1, keepdims=True)
        one = jnp.ones_like(total)
        joined += [x[..., part], total if first else one, one if first else total]
    return jnp.concatenate(joined, -1)


with_sums_p = Primitive("with_sums")
with_sums_p.def_impl(jax.jit(append_sums, static_argnames=("parts", "first")))


@with_sums_p.def_abstract_eval
def _abstract(x: Any, s: Any, *, parts: int, first: bool) -> Any:
    return jax.core.ShapedArray((*x.shape[:-1], x.shape[-1] + 2 * parts), x.dtype)


mlir.register_lowering(with_sums_p, mlir.lower_fun(append_sums, multiple_results=False))


def _pointwise(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    return all_but([len(ins[0]) - 1], len(ins[0]), operands=(0, 1))


def _text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    return f"append_sums({args[0]}, {args[1]}, {params['parts']}, {params['first']})"


SUMMING = [BlockOp("with_sums", _pointwise, text=_text, helpers=(append_sums,))]
