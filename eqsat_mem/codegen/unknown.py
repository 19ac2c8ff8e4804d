"""Numbers that XLA does not know, as helpers of emitted source."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax


def unknown_positions(count: int) -> tuple[Any, ...]:
    """Return the numbers from 0 to ``count - 1`` as numbers that XLA does not know: kernels that differ by them alone are compiled once."""
    return lax.fori_loop(0, 2, lambda _, turned: (*turned[1:], turned[0]), tuple(np.int32((k - 2) % count) for k in range(count)))


def zero_after(x: Any) -> Any:
    """Return a zero that XLA does not know before it has ``x``: what begins as an array of it takes no memory earlier."""
    first = lax.bitcast_convert_type(x[(0,) * x.ndim], f"uint{8 * x.dtype.itemsize}")
    return lax.population_count(first) >> 7
