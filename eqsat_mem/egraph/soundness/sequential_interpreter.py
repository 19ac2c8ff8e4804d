"""A machine for judging rules: element by element, in an order of its own, as IEEE 754 says and not as a device does it.

A library may sum in any order. So folds here combine every second element first, then the others, and where a contraction begins depends on
its shape: what claims the same bits must not depend on an order. Arithmetic is numpy's, with numbers below the normal ones, which compilers
may flush to zero; other functions are JAX's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from eqsat_mem.egraph.soundness.values import kind
from eqsat_mem.ir import Dot, Fold, Map
from eqsat_mem.ir.interpreter import Machine
from eqsat_mem.ir.ops import MONOIDS, map_row

WIDTH = 1024
"""Elementwise operations of JAX run on multiples of so many elements, so that few shapes are compiled."""

BLOCK = 64
"""Elements that are combined one after the other."""

Array = Any


class Sequential(Machine):
    """Elementwise operations on numpy arrays; folds and contractions as chains of them."""

    def leaf(self, value: Array) -> Array:
        return np.asarray(value)

    def map(self, term: Map, operands: Sequence[Array]) -> Array:
        if term.op == "convert_element_type":
            return self._converted(term, operands[0])
        plain = _PLAIN.get(term.op)
        if plain is not None and kind(np.asarray(operands[-1]).dtype) in plain[0] and (not term.params or term.op == "mul"):
            return plain[1](*operands)
        if term.op == "integer_pow" and dict(term.params)["y"] == 2:
            return _mul(operands[0], operands[0])
        return self._by_jax(term, operands)

    def _converted(self, term: Map, operand: Array) -> Array:
        source, target = kind(operand.dtype), kind(term.dtype)
        if source == "c" and target != "c":
            operand = operand.real
            source = "f"
        if target == "b":
            return np.asarray(operand != 0)
        return self._by_jax(term, [operand]) if source == "f" and target in "iu" else operand.astype(term.dtype)

    def _by_jax(self, term: Map, operands: Sequence[Array]) -> Array:
        shape, size = np.shape(operands[0]), math.prod(np.shape(operands[0]))
        if not size:
            return np.empty(shape, term.dtype)
        flat = [np.ones(-(-size // WIDTH) * WIDTH, np.asarray(a).dtype) for a in operands]
        for out, a in zip(flat, operands):
            out[:size] = np.ravel(a)
        return np.asarray(map_row(term).bind(*flat, **dict(term.params)))[:size].reshape(shape)

    def fold(self, term: Fold, operand: Array, axes: Sequence[int]) -> Array:
        rows = _last(np.asarray(operand), axes)
        n = rows.shape[-1]
        if n == 0:
            return np.full(rows.shape[:-1], MONOIDS[term.monoid].identity(rows.dtype))
        return _chain(term.monoid, rows[..., [*range(0, n, 2), *range(1, n, 2)]])

    def dot(self, term: Dot, lhs: Array, rhs: Array, contract: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]) -> Array:
        sides = [
            np.transpose(a, [*b, *(k for k in range(a.ndim) if k not in (*b, *c)), *c]) for a, b, c in zip((lhs, rhs), batch, contract)
        ]
        nb, nc = len(batch[0]), len(contract[0])
        left, right = (a.reshape(*a.shape[: a.ndim - nc], math.prod(a.shape[a.ndim - nc :])).astype(term.dtype) for a in sides)
        rows, columns = (math.prod(a.shape[nb:-1]) for a in (left, right))
        left = left.reshape(left.shape[:-1] + (1,) * (right.ndim - 1 - nb) + left.shape[-1:])
        right = right.reshape(right.shape[:nb] + (1,) * (left.ndim - right.ndim) + right.shape[nb:])
        wide = _accumulator(term.dtype)
        product = _mul(*np.broadcast_arrays(left.astype(wide), right.astype(wide)))
        n = product.shape[-1]
        if n == 0:
            return np.zeros(product.shape[:-1], term.dtype)
        first = (2 * rows + 3 * columns) % n
        return _chain("add", product[..., [*range(first, n), *range(first)][:: -1 if rows % 2 else 1]]).astype(term.dtype)

    def combine(self, monoid: str, left: Array, right: Array) -> Array:
        """Two partial results of a fold as one."""
        return self.map(Map(np.asarray(left).dtype, monoid, ()), [np.asarray(left), np.asarray(right)])


def _chain(monoid: str, rows: np.ndarray) -> np.ndarray:
    """Elements of the last axis combined one after the other; sums of narrow floats in float32, as libraries do."""
    if monoid in ("max", "min"):
        return _extreme(rows, monoid)
    ufunc = {"add": np.add, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[monoid]
    wide = rows.astype(_accumulator(rows.dtype))
    while wide.shape[-1] > 1:  # long rows by blocks, as libraries do: one after the other they would lose too many digits
        n = wide.shape[-1]
        block = n if n <= BLOCK else math.isqrt(n)
        pieces = [wide[..., k : k + block] for k in range(0, n, block)]
        wide = np.stack([ufunc.accumulate(piece, axis=-1, dtype=wide.dtype)[..., -1] for piece in pieces], -1)
    return np.asarray(wide[..., 0].astype(rows.dtype))


def _accumulator(dtype: Any) -> Any:
    return np.float32 if kind(dtype) == "f" and jnp.finfo(dtype).bits < 32 else dtype


def _extreme(rows: np.ndarray, monoid: str) -> np.ndarray:
    """The largest or least element, nan where there is one; zero is larger than its negation, as in XLA."""
    if kind(rows.dtype) == "b":
        return np.asarray(rows.any(-1) if monoid == "max" else rows.all(-1))
    found = np.asarray((np.max if monoid == "max" else np.min)(rows, -1))
    if kind(rows.dtype) == "f":
        negative = np.signbit(rows) | (rows != 0)
        sign = negative.all(-1) if monoid == "max" else (np.signbit(rows) & (rows == 0)).any(-1)
        found = np.where(found == 0, np.copysign(np.zeros_like(found), np.where(sign, -1.0, 1.0).astype(found.dtype)), found)
    return found


def _last(array: Array, axes: Sequence[int]) -> Array:
    """An array with some axes merged into one, the last."""
    kept = [k for k in range(array.ndim) if k not in axes]
    moved = np.transpose(array, [*kept, *axes])
    return moved.reshape(*moved.shape[: len(kept)], math.prod(moved.shape[len(kept) :]))


def _mul(a: Array, b: Array) -> Array:
    """A product; of complex numbers by its parts, so that it commutes to the last bit."""
    if kind(np.asarray(a).dtype) != "c":
        return np.multiply(a, b)
    out = np.empty(np.broadcast_shapes(np.shape(a), np.shape(b)), a.dtype)
    out.real = a.real * b.real - a.imag * b.imag
    out.imag = a.real * b.imag + b.real * a.imag
    return out


_PLAIN: dict[str, tuple[str, Callable[..., Array]]] = {
    "add": ("iufc", np.add),
    "sub": ("iufc", np.subtract),
    "mul": ("iufc", _mul),
    "square": ("iufc", lambda a: _mul(a, a)),
    "neg": ("iufc", np.negative),
    "div": ("fc", np.divide),
    "abs": ("if", np.abs),
    "sqrt": ("f", np.sqrt),
    "sign": ("f", lambda a: np.where((a == 0) | (a != a), a, np.copysign(np.ones_like(a), a))),
    "floor": ("f", np.floor),
    "ceil": ("f", np.ceil),
    "max": ("biuf", lambda a, b: _extreme(np.stack(np.broadcast_arrays(a, b), -1), "max")),
    "min": ("biuf", lambda a, b: _extreme(np.stack(np.broadcast_arrays(a, b), -1), "min")),
    "is_finite": ("f", np.isfinite),
    "eq": ("biufc", np.equal),
    "ne": ("biufc", np.not_equal),
    "lt": ("biuf", np.less),
    "le": ("biuf", np.less_equal),
    "gt": ("biuf", np.greater),
    "ge": ("biuf", np.greater_equal),
    "and": ("biu", np.bitwise_and),
    "or": ("biu", np.bitwise_or),
    "xor": ("biu", np.bitwise_xor),
    "not": ("biu", np.invert),
    "select_n": ("biufc", lambda which, *cases: np.where(which, cases[1], cases[0])),
}
"""Operations without parameters that numpy computes, and on which kinds of the last operand."""
