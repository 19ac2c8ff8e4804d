"""Blocks of random numbers: pointwise in the axes of their keys."""

from __future__ import annotations

import math

from .blocks import BlockOp, Group, Params, Shapes, all_but


def _keys(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Result axes begin with those of the keys."""
    return all_but([], min(len(ins[0]), len(outs[0])))


def _key_each(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Pointwise in the axes of the keys only: a key serves all further elements by their position."""
    rank = len(ins[0])
    return [(("in", 0, a), ("in", 1, a), ("out", 0, a)) for a in range(rank) if ins[0][a] == ins[1][a] == outs[0][a]]


def _alike(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Operands and results have one shape; a scalar operand goes with every element."""
    rank = len(outs[0])
    operands = [k for k, shape in enumerate(ins) if len(shape) == rank]
    return all_but([a for a in range(rank) if any(ins[k][a] != outs[0][a] for k in operands)], rank, operands, range(len(outs)))


def _bits_weight(ins: Shapes, outs: Shapes, params: Params) -> float:
    return 60.0 * sum(map(math.prod, outs))


RANDOMS = [
    BlockOp("random_bits", _keys, weight=_bits_weight),
    BlockOp("random_split", _keys, weight=_bits_weight),
    BlockOp("random_seed", _keys),
    BlockOp("random_wrap", _keys),
    BlockOp("random_unwrap", _keys),
    BlockOp("random_clone", _alike),
    BlockOp("random_fold_in", _alike, weight=_bits_weight),
    BlockOp("random_gamma", _key_each, weight=lambda i, o, p: 500.0 * math.prod(o[0])),
    BlockOp("threefry2x32", _alike, weight=_bits_weight),
]
