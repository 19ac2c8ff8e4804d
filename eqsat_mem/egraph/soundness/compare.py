"""What the soundness of a rule claims of two values, and whether they keep to it."""

from __future__ import annotations

import numpy as np

KINDS = ("normal", "positive", "negative", "zeros", "whole", "offset", "special")
"""Kinds of values. What holds over the reals is not asked of infinities and nan (special)."""
STRICT_KINDS = KINDS[:5]
"""Values of which nothing overflows that is a number over the reals."""


def first_difference(claim: str, left: np.ndarray, right: np.ndarray, scale: np.ndarray, finite: np.ndarray) -> tuple[str, int] | None:
    """What is wrong between two sides, and in which sample; None if they agree as far as ``claim`` says.

    Bits are compared for ``bitwise``. What holds over the reals may differ by the root of the precision times the largest number
    that either side met on its way (``scale``, per sample); ``finite`` tells in which samples neither met an infinity.
    """
    for sample, kind in enumerate(KINDS):
        a, b = left[sample], right[sample]
        if claim == "bitwise":
            bad = ~_same_bits(a, b)
        elif claim == "fact":
            bad = ~((a == b) | (_nan(a) & _nan(b)) | _close(a, b, scale[sample]))
        elif kind == "special" or (kind not in STRICT_KINDS and not finite[sample]):
            continue
        else:
            unusual = ~np.isfinite(a) if claim in ("guarded", "approx") else ~np.isfinite(a) & ~np.isfinite(b)
            bad = ~(unusual | _close(a, b, scale[sample] * (1e4 if claim == "approx" else 1)))
        if bad.any():
            place = tuple(int(k) for k in np.argwhere(bad)[0])
            return f"{a[place]!r} on the left, {b[place]!r} on the right ({kind} values, {a.dtype})", sample
    return None


def _close(a: np.ndarray, b: np.ndarray, scale: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "fc":
        return np.asarray(a == b)
    with np.errstate(all="ignore"):
        return np.abs(a - b) <= np.sqrt(np.finfo(a.dtype).eps) * scale


def _same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind != "f":
        return np.asarray(a == b)
    return ((a == b) & (np.signbit(a) == np.signbit(b))) | (_nan(a) & _nan(b))


def _nan(a: np.ndarray) -> np.ndarray:
    return np.isnan(a) if a.dtype.kind in "fc" else np.zeros(a.shape, bool)
