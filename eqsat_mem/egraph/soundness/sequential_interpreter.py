"""A machine for judging rules: element by element, in an order of its own, the same bits whatever the layout.

A library may sum in any order. So folds here combine every second element first, then the others, and contractions sum from the last
element to the first: what claims the same bits must not depend on an order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from eqsat_mem.ir import Dot, Fold, Map
from eqsat_mem.ir.interpreter import Machine
from eqsat_mem.ir.ops import MONOIDS, map_row

WIDTH = 1024
"""Elementwise operations run on multiples of so many elements, so that few shapes are compiled."""

Array = Any


class Sequential(Machine):
    """Elementwise operations by JAX on flat arrays; folds and contractions as chains of them."""

    def leaf(self, value: Array) -> Array:
        return np.asarray(value)

    def map(self, term: Map, operands: Sequence[Array]) -> Array:
        shape, size = np.shape(operands[0]), math.prod(np.shape(operands[0]))
        flat = [np.ones(-(-size // WIDTH) * WIDTH, np.asarray(a).dtype) for a in operands]
        for out, a in zip(flat, operands):
            out[:size] = np.ravel(a)
        return np.asarray(map_row(term).bind(*flat, **dict(term.params)))[:size].reshape(shape)

    def fold(self, term: Fold, operand: Array, axes: Sequence[int]) -> Array:
        rows = _last(np.asarray(operand), axes)
        n = rows.shape[-1]
        if n == 0:
            return np.full(rows.shape[:-1], MONOIDS[term.monoid].identity(rows.dtype))
        return self._chain(term.monoid, [rows[..., k] for k in (*range(0, n, 2), *range(1, n, 2))])

    def dot(self, term: Dot, lhs: Array, rhs: Array, contract: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]) -> Array:
        sides = [
            np.transpose(a, [*b, *(k for k in range(a.ndim) if k not in (*b, *c)), *c]) for a, b, c in zip((lhs, rhs), batch, contract)
        ]
        nb, nc = len(batch[0]), len(contract[0])
        left, right = (a.reshape(*a.shape[: a.ndim - nc], -1).astype(term.dtype) for a in sides)
        left = left.reshape(left.shape[:-1] + (1,) * (right.ndim - 1 - nb) + left.shape[-1:])
        right = right.reshape(right.shape[:nb] + (1,) * (left.ndim - right.ndim) + right.shape[nb:])
        product = self.map(Map(term.dtype, "mul", ()), np.broadcast_arrays(left, right))
        return self._chain("add", [product[..., k] for k in reversed(range(product.shape[-1]))])

    def combine(self, monoid: str, left: Array, right: Array) -> Array:
        """Two partial results of a fold as one."""
        return self.map(Map(np.asarray(left).dtype, monoid, ()), [left, right])

    def _chain(self, monoid: str, parts: Sequence[Array]) -> Array:
        out = parts[0]
        for part in parts[1:]:
            out = self.combine(monoid, out, part)
        return out


def _last(array: Array, axes: Sequence[int]) -> Array:
    """An array with some axes merged into one, the last."""
    kept = [k for k in range(array.ndim) if k not in axes]
    moved = np.transpose(array, [*kept, *axes])
    return moved.reshape(*moved.shape[: len(kept)], math.prod(moved.shape[len(kept) :]))
