"""Comparison of the results of two functions, for tests of planned programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

LARGEST_TOLERANCE = 0.1
WRONG_INTEGERS = 1e-3
"""The fraction of integers that may differ: the order of nearly equal values depends on rounding."""


@dataclass(frozen=True)
class Comparison:
    """The worst difference between the results of two functions.

    Attributes:
        error: the largest absolute difference within one result, divided by the largest absolute value in it; 1 if integers, shapes,
            dtypes or the positions of infinities and NaNs differ.
        tolerance: the largest ``error`` that counts as agreement.
        where: the path of the result with that difference.
        why: the difference in words.
    """

    error: float
    tolerance: float
    where: str
    why: str

    @property
    def same(self) -> bool:
        return self.error <= self.tolerance

    def __str__(self) -> str:
        verdict = "agrees" if self.same else "DIFFERS"
        return f"{verdict}: {self.why} at {self.where}: error {self.error:.2g}, tolerance {self.tolerance:.2g}"


def same_values(
    fun: Callable[..., Any],
    other: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    tolerance: float | None = None,
) -> Comparison:
    """Run both functions on the same arguments and compare all their results.

    Args:
        fun: the reference.
        other: the function to compare with it.
        args: positional arguments of both.
        kwargs: keyword arguments of both.
        tolerance: the largest relative error allowed in each result (see :class:`Comparison`); by default 1000 machine epsilons
            of its dtype, and at most ``LARGEST_TOLERANCE``.

    Returns:
        The comparison of the result that differs most, relative to its tolerance.

    Raises:
        ValueError: if the results have different pytree structures.

    >>> same_values(np.sin, lambda x: np.sin(x) + 1e-3, [np.arange(3.0)]).same
    False
    """
    expected, actual = fun(*args, **(kwargs or {})), other(*args, **(kwargs or {}))
    paths = jax.tree_util.tree_flatten_with_path(expected)[0]
    tree: Any = jax.tree.structure(expected)
    other_tree: Any = jax.tree.structure(actual)
    if not tree == other_tree:  # a PyTreeDef declares only ==
        raise ValueError(f"the functions return different pytrees: {tree} and {other_tree}.")
    found = [
        _compare(_plain(x), _plain(y), f"result{jax.tree_util.keystr(path)}", tolerance)
        for (path, x), y in zip(paths, jax.tree.leaves(actual), strict=True)
    ]
    return max(found, key=lambda c: c.error / c.tolerance, default=Comparison(0.0, 1.0, "result", "nothing is returned"))


def _plain(value: Any) -> np.ndarray[Any, Any]:
    dtype = getattr(value, "dtype", None)
    is_key = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def _compare(expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any], where: str, tolerance: float | None) -> Comparison:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        types = f"{expected.dtype}{list(expected.shape)} and {actual.dtype}{list(actual.shape)}"
        return Comparison(1.0, LARGEST_TOLERANCE, where, f"{types} are not one type")
    if not jax.numpy.issubdtype(expected.dtype, np.inexact):
        wrong = float(np.mean(expected != actual)) if expected.size else 0.0
        return Comparison(0.0 if wrong <= WRONG_INTEGERS else 1.0, LARGEST_TOLERANCE, where, f"{wrong:.2%} of integers differ")
    bound = min(1000 * float(jax.numpy.finfo(expected.dtype).eps), LARGEST_TOLERANCE) if tolerance is None else tolerance
    wide = np.complex128 if np.issubdtype(expected.dtype, np.complexfloating) else np.float64
    expected, actual = expected.astype(wide), actual.astype(wide)
    finite = np.isfinite(expected)
    if not np.array_equal(expected[~finite], actual[~finite], equal_nan=True) or not np.all(np.isfinite(actual[finite])):
        return Comparison(1.0, bound, where, "infinities and NaNs stand elsewhere")
    scale = float(np.max(np.abs(expected[finite]), initial=0.0))
    worst = float(np.max(np.abs(expected[finite] - actual[finite]), initial=0.0))
    return Comparison(worst / scale if scale else worst, bound, where, f"largest difference {worst:.2g} where values reach {scale:.2g}")
