"""Arrays for the arguments of left sides: numbers of several kinds, and what is no ordinary number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from eqsat_mem.ir import Program


def values_of(program: Program, rng: np.random.Generator, kinds: Sequence[str]) -> list[np.ndarray]:
    """An array for each input, whose first axis counts the ``kinds`` of values."""
    return [np.stack([_values(b.shape, b.dtype, kind, rng) for kind in kinds]) for b in program.inputs]


def _values(shape: tuple[int, ...], dtype: Any, kind: str, rng: np.random.Generator) -> np.ndarray:
    if np.dtype(dtype).kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if jnp.issubdtype(dtype, jnp.integer):
        return rng.integers(-9, 10, shape).astype(dtype)
    x = rng.standard_normal(shape)
    match kind:
        case "positive":
            x = np.abs(x) + 0.1
        case "negative":
            x = -np.abs(x) - 0.1
        case "zeros":
            x = x * rng.integers(0, 2, shape)
        case "whole":
            x = rng.integers(-2, 3, shape).astype(float)
        case "offset":
            x = x + 1e4
        case "special":
            x = np.where(rng.random(shape) < 0.4, rng.choice([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0], shape), x)
    return np.asarray(x, dtype)
