"""Numbers that XLA does not know, as helpers of emitted source."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax


def unknown(*numbers: int) -> tuple[Any, ...]:
    """Return whole numbers as numbers that XLA does not know: kernels that differ by them alone are compiled once."""
    turned = (*numbers[-2:], *numbers[:-2]) if len(numbers) > 1 else numbers
    return lax.fori_loop(0, 2, lambda _, some: (*some[1:], some[0]), tuple(np.int32(k) for k in turned))


def zero_after(x: Any) -> Any:
    """Return a zero that XLA does not know before it has ``x``: what begins as an array of it takes no memory earlier.

    It is made as :class:`eqsat_mem.schedule.ties.BitTie` makes tokens of terms: the bits set in the first element, divided by 128.
    """
    first = lax.bitcast_convert_type(x[(0,) * x.ndim], f"uint{8 * x.dtype.itemsize}")
    return lax.population_count(first) >> 7
