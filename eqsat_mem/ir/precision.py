"""How precisely contractions are computed: as their author asked, and in full where rules make one of something else.

XLA rounds the operands of float32 contractions to 10 bits on GPUs, and to 7 on TPUs, unless it is told otherwise; sums of products that are
written elementwise it computes in float32 everywhere. On CPUs both are the same, so whether operands are rounded is asked of the backend.
"""

from __future__ import annotations

from typing import Any

from jax import lax

FULL = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
ROUNDED = ("float32", "complex64")
"""The dtypes whose contractions may have their operands rounded."""


def is_graded(precision: Any) -> bool:
    """Whether a contraction's precision is one of ``lax.Precision``, of which one is stricter than another, or not given."""
    return all(grade is None or isinstance(grade, lax.Precision) for grade in _grades(precision))


def stricter(one: Any, other: Any) -> Any:
    """The stricter of two graded precisions."""
    return max(one, other, key=_strictness)


def rounds(dtype: Any, precision: Any) -> bool:
    """Whether a device that rounds operands does so for a contraction of this dtype and precision."""
    return str(dtype) in ROUNDED and is_graded(precision) and _strictness(precision) < _strictness(FULL)


def of_rules(dtype: Any, rounds_operands: bool) -> Any:
    """The precision of a contraction that rules make of elementwise products and sums, which are never rounded.

    ``rounds_operands`` says whether the device rounds operands unless it is told otherwise.
    """
    return FULL if rounds_operands and rounds(dtype, None) else None


def _grades(precision: Any) -> tuple[Any, ...]:
    return precision if isinstance(precision, tuple) else (precision,)


def _strictness(precision: Any) -> int:
    """The rank of the stricter operand's."""
    return max((lax.Precision.DEFAULT if grade is None else grade).value for grade in _grades(precision))
