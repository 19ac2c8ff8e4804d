"""The precision of contractions: as their author requested, and full where rules make one from other operations.

By default XLA rounds the operands of float32 contractions to 10 bits on GPUs and to 7 on TPUs, but computes sums of products that are
written elementwise in float32. CPUs compute both in float32, so the backend says whether operands are rounded.
"""

from __future__ import annotations

from typing import Any

from jax import lax

FULL = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
ROUNDED = ("float32", "complex64")
"""The dtypes whose contractions may have their operands rounded."""


def is_graded(precision: Any) -> bool:
    """Whether a contraction's precision consists of ``lax.Precision`` values, which are ordered by strictness, or is not given."""
    return all(grade is None or isinstance(grade, lax.Precision) for grade in _grades(precision))


def stricter(one: Any, other: Any) -> Any:
    """Return the stricter of two precisions that are graded (:func:`is_graded`)."""
    return max(one, other, key=_strictness)


def rounds(dtype: Any, precision: Any) -> bool:
    """Whether a device that rounds operands does so for a contraction of this dtype and precision."""
    return str(dtype) in ROUNDED and is_graded(precision) and _strictness(precision) < _strictness(FULL)


def of_rules(dtype: Any, rounds_operands: bool) -> Any:
    """Return the precision of a contraction that rules make from elementwise products and sums, whose operands are never rounded.

    Args:
        dtype: the dtype of the contraction.
        rounds_operands: whether the device rounds operands by default.

    Returns:
        :data:`FULL` if the default precision would round the operands, else None.
    """
    return FULL if rounds_operands and rounds(dtype, None) else None


def _grades(precision: Any) -> tuple[Any, ...]:
    return precision if isinstance(precision, tuple) else (precision,)


def _strictness(precision: Any) -> int:
    """Return the rank of the stricter operand's precision."""
    return max((lax.Precision.DEFAULT if grade is None else grade).value for grade in _grades(precision))
