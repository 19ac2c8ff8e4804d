"""Blocks of random numbers, which are pointwise in the axes of their keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eqsat_mem.ir.ops.blocks import BlockOp, Group, Params, Shapes, Text, all_but


def _keys(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return the groups of the keys' axes, which are the leading axes of the result."""
    return all_but([], min(len(ins[0]), len(outs[0])))


def _key_each(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return the groups of the keys' axes only: all further elements depend on their key and their position."""
    rank = len(ins[0])
    return [(("in", 0, a), ("in", 1, a), ("out", 0, a)) for a in range(rank) if ins[0][a] == ins[1][a] == outs[0][a]]


def _alike(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return a group for each axis; operands and results have one shape, except scalar operands, which are read by every element."""
    rank = len(outs[0])
    operands = [k for k, shape in enumerate(ins) if len(shape) == rank]
    return all_but([a for a in range(rank) if any(ins[k][a] != outs[0][a] for k in operands)], rank, operands, range(len(outs)))


def _one_key(function: str, *params: str) -> Text:
    """Return the text of a function of ``jax.random``, which takes one key; arrays of keys are left to the primitive."""

    def text(params_: Params, args: Sequence[str], ins: Shapes) -> str | None:
        if any(ins):
            return None
        return f"jax.random.{function}({', '.join([*args, *(str(params_[p]) for p in params)])})"

    return text


def _bits_text(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    return None if ins[0] else f"jax.random.bits({args[0]}, {tuple(params['shape'])}, jnp.uint{params['bit_width']})"


def _seed_text(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    if not _known(params["impl"]):
        return None
    function = f"lambda seed: jax.random.key(seed, impl={params['impl'].name!r})"
    for _ in ins[0]:
        function = f"jax.vmap({function})"
    return f"{function}({args[0]})" if ins[0] else f"jax.random.key({args[0]}, impl={params['impl'].name!r})"


def _wrap_text(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    return f"jax.random.wrap_key_data({args[0]}, impl={params['impl'].name!r})" if _known(params["impl"]) else None


def _known(impl: Any) -> bool:
    """Whether JAX can find a generator by its name."""
    return getattr(impl, "name", None) in ("threefry2x32", "rbg", "unsafe_rbg")


RANDOMS = [
    BlockOp("random_bits", _keys, text=_bits_text),
    BlockOp("random_split", _keys, text=_one_key("split", "shape")),
    BlockOp("random_seed", _keys, text=_seed_text),
    BlockOp("random_wrap", _keys, text=_wrap_text),
    BlockOp("random_unwrap", _keys, text=lambda p, a, s: f"jax.random.key_data({a[0]})"),
    BlockOp("random_clone", _alike, text=lambda p, a, s: f"jax.random.clone({a[0]})"),
    BlockOp("random_fold_in", _alike, text=_one_key("fold_in")),
    BlockOp("random_gamma", _key_each),
    BlockOp("threefry2x32", _alike),
]
