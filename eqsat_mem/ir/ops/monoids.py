"""The monoids of folds, one row each: identity, combination, and JAX's reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class MonoidOp:
    """An associative and commutative operation with an identity.

    Attributes:
        name: its name.
        identity: ``identity(dtype)`` returns the identity as a numpy scalar.
        reduce_text: source of the reduction of operand ``{0}`` over axes ``{1}``, bitwise equal to the primitive.
        combine_text: source of the combination of two partial results ``{0}`` and ``{1}``.
        combine: combines two arrays.
        reduce: reduces an array over axes.
        repeat: ``repeat(x, n)`` returns the combination of ``n >= 1`` copies of ``x``: a fold over an index of extent ``n`` on which
            ``x`` does not depend.
        repeat_text: source of ``repeat`` for ``{0}`` and ``{1}``.
        idempotent: whether the combination of an element with itself is that element.
    """

    name: str
    identity: Callable[[Any], Any]
    reduce_text: str
    combine_text: str
    combine: Callable[[Any, Any], Any]
    reduce: Callable[[Any, Sequence[int]], Any]
    repeat: Callable[[Any, int], Any]
    repeat_text: str = "{0}"
    idempotent: bool = False


def _number(value: int) -> Callable[[Any], Any]:
    return lambda dtype: np.dtype(dtype).type(value)


def _all_bits(dtype: Any) -> Any:
    """Return the value whose bits are all set."""
    return np.invert(np.zeros((), dtype))[()]


def _lowest(dtype: Any) -> Any:
    """Return the least value of an ordered dtype."""
    if np.dtype(dtype) == bool:
        return np.False_
    return np.dtype(dtype).type(-np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min)


def _highest(dtype: Any) -> Any:
    """Return the greatest value of an ordered dtype."""
    if np.dtype(dtype) == bool:
        return np.True_
    return np.dtype(dtype).type(np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max)


def _times(x: Any, n: int) -> Any:
    return lax.mul(x, lax.full_like(x, n))


def _power(x: Any, n: int) -> Any:
    return lax.integer_pow(x, n)


def _same(x: Any, n: int) -> Any:
    return x


def _parity(x: Any, n: int) -> Any:
    return x if n % 2 else lax.full_like(x, 0)


def _row(name: str, identity: Callable[[Any], Any], primitive: str, combine_text: str, combine: Callable[[Any, Any], Any],
         repeat: Callable[[Any, int], Any]) -> MonoidOp:  # fmt: skip
    reduce = getattr(lax, primitive)
    return MonoidOp(name, identity, f"lax.{primitive}({{0}}, {{1}})", combine_text, combine,
                  lambda x, axes: reduce(x, tuple(axes)), repeat, _REPEATS.get(repeat, "{0}"), repeat is _same)  # fmt: skip


_REPEATS: dict[Callable[..., Any], str] = {
    _times: "{0} * {1}",
    _power: "lax.integer_pow({0}, {1})",
    _parity: "jnp.where({1} % 2 == 1, {0}, jnp.zeros_like({0}))",
}

_ROWS = [
    _row("add", _number(0), "reduce_sum", "{0} + {1}", lax.add, _times),
    _row("mul", _number(1), "reduce_prod", "{0} * {1}", lax.mul, _power),
    _row("max", _lowest, "reduce_max", "jnp.maximum({0}, {1})", lax.max, _same),
    _row("min", _highest, "reduce_min", "jnp.minimum({0}, {1})", lax.min, _same),
    _row("and", _all_bits, "reduce_and", "{0} & {1}", lax.bitwise_and, _same),
    _row("or", _number(0), "reduce_or", "{0} | {1}", lax.bitwise_or, _same),
    _row("xor", _number(0), "reduce_xor", "{0} ^ {1}", lax.bitwise_xor, _parity),
]

MONOIDS: dict[str, MonoidOp] = {row.name: row for row in _ROWS}

REDUCTIONS = {
    "reduce_sum": "add",
    "reduce_prod": "mul",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}
"""The monoid of each reduction primitive."""


def foldable(monoid: str, dtype: Any) -> bool:
    """Whether ``monoid`` has an identity among the values of ``dtype``: complex numbers have no least or greatest one."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return False
    return monoid not in ("max", "min") or not jax.dtypes.issubdtype(dtype, np.complexfloating)


def accumulator(monoid: str, dtype: Any) -> Any:
    """Return the dtype of partial results: float32 for sums of narrower floating-point numbers, else ``dtype``."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return np.dtype(np.float32) if narrow and monoid == "add" else dtype
