"""The claim about two values that the soundness of a rule makes, and the comparison of values by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from eqsat_mem.egraph.soundness.values import kind

CLAIMS = ("bitwise", "reassociate", "real", "guarded", "approx")
"""From strong to weak. A rule that builds on what another makes equal is held to the weaker claim of the two."""
FACT = "fact"
"""The claim about a fact that a rule states bit for bit: equal numbers, whatever the sign of a zero."""
STRICT_KINDS = frozenset({"whole", "normal", "positive", "negative", "zeros", "equal"})
"""Values of which nothing overflows that is a number over the reals, float16 aside."""
AMPLIFIED = 8.0
"""Rounding may move a side at most so many times as far as a change of last bits of the arguments does."""
HALF = 16
"""The exponent of the range of float16."""
CORNERS = frozenset({"wide", "special", "ends"})
"""Values at the ends of the range: floats are held to them where all bits are claimed, integers by every claim but the guarded ones."""


def first_difference(
    claim: str,
    left: np.ndarray,
    right: np.ndarray,
    scale: np.ndarray,
    finite: np.ndarray,
    kinds: Sequence[str],
    whole: bool = True,
    slack: np.ndarray | float = 0.0,
) -> tuple[str, int] | None:
    """The first difference between two sides, and the sample in which it is; None if they agree as far as ``claim`` says.

    Bits are compared for ``bitwise``. What holds over the reals may differ by the root of the precision times the largest number that
    either side met on its way (``scale``, per sample); ``finite`` tells in which samples neither met an infinity. Integers have no
    precision: any claim but the guarded ones holds where they wrap around, too. Where folds are over nothing (not ``whole``) their results
    need not be numbers. ``slack`` is how far each element may be off besides, where the sides themselves hang on last bits of arguments.
    """
    bad = _differs(claim, left, right, scale) & ~_within(left, right, slack)
    asked = np.array([_asks(claim, left.dtype, which, bool(f)) for which, f in zip(kinds, finite)])
    if claim in ("guarded", "approx") or (not whole and claim in CLAIMS[1:]):
        bad &= _is_number(left)
    bad &= asked.reshape(-1, *(1,) * (left.ndim - 1))
    if not bad.any():
        return None
    sample, *place = (int(k) for k in np.argwhere(bad)[0])
    a, b = left[(sample, *place)], right[(sample, *place)]
    return f"{a!r} on the left, {b!r} on the right ({kinds[sample]} values, {left.dtype})", sample


def _asks(claim: str, dtype: Any, which: str, finite: bool) -> bool:
    """Whether a claim is one about a kind of values."""
    if claim in ("bitwise", FACT) or (which in STRICT_KINDS and (finite or not _overflows(dtype))):
        return True
    if kind(dtype) in "biu":
        return claim not in ("guarded", "approx")
    return which not in CORNERS and finite


def _overflows(dtype: Any) -> bool:
    """Whether sums and exponentials of ordinary numbers may have no place in the range of a dtype: float16 ends at 65,504."""
    return kind(dtype) == "f" and jnp.finfo(dtype).maxexp <= HALF


def _differs(claim: str, a: np.ndarray, b: np.ndarray, scale: np.ndarray) -> np.ndarray:
    same = a == b
    if kind(a.dtype) not in "fc":
        return np.asarray(~same)
    nan = np.isnan(a) & np.isnan(b)
    if claim == "bitwise":
        sign = np.signbit(a) == np.signbit(b) if kind(a.dtype) == "f" else np.True_
        return np.asarray(~(same & sign | nan))
    agree = same | nan
    if claim != FACT:
        agree |= ~_is_number(a) & ~_is_number(b) | close(a, b, scale, 1e4 if claim == "approx" else 1.0)
    return np.asarray(~agree)


def _within(a: np.ndarray, b: np.ndarray, slack: np.ndarray | float) -> np.ndarray:
    with np.errstate(all="ignore"):
        apart = np.abs(a.astype(_wide(a.dtype)) - b.astype(_wide(b.dtype)))
        return np.asarray((apart < AMPLIFIED * np.asarray(slack)) | np.isinf(slack))


def change(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The distance of two values of one side: infinite, where only one of them is a number."""
    with np.errstate(all="ignore"):
        apart = np.abs(a.astype(_wide(a.dtype)) - b.astype(_wide(b.dtype)))
    return np.asarray(np.where(_is_number(a) & _is_number(b), apart, np.where(_is_number(a) | _is_number(b), np.inf, 0.0)))


def _is_number(a: np.ndarray) -> np.ndarray:
    return np.isfinite(a) if kind(a.dtype) in "fc" else np.ones(a.shape, bool)


def close(a: np.ndarray, b: np.ndarray, scale: np.ndarray, times: float = 1.0) -> np.ndarray:
    """Whether numbers are near each other: by the root of their precision, ``times`` that, and a scale for each sample."""
    with np.errstate(all="ignore"):
        apart = np.abs(a.astype(_wide(a.dtype)) - b.astype(_wide(b.dtype)))
        return np.asarray(apart <= times * np.sqrt(float(jnp.finfo(a.dtype).eps)) * scale.reshape(-1, *(1,) * (a.ndim - 1)))


def _wide(dtype: Any) -> Any:
    return np.complex128 if kind(dtype) == "c" else np.float64
