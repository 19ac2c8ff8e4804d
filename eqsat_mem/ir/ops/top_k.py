"""Functions that combine selections chunk by chunk; emitted programs contain their source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def merge_top_k(values: Any, places: Any, more: Any, more_places: Any, start: Any, axis: int) -> Any:
    """``lax.top_k`` along ``axis`` of the chunks so far and one more, which begins at ``start``: of equal elements the first come first."""
    k = more.shape[axis]
    places = lax.concatenate([places, more_places + jnp.asarray(start, more_places.dtype)], axis)
    values, chosen = lax.top_k(lax.concatenate([values, more], axis), k, axis=axis)
    return values, jnp.take_along_axis(places, chosen, axis)


def first_place(values: Sequence[Any], leads: Any, dtype: Any) -> Any:
    """The first of the arrays ``values`` in which each element is the largest; NaN counts as larger than all numbers."""
    best, place = values[0], jnp.zeros(values[0].shape, dtype)
    for k, value in enumerate(values[1:], 1):
        stays = leads(best, value) | (best != best)
        place = jnp.where(stays, place, jnp.asarray(k, dtype))
        best = jnp.where(stays, best, value)
    return place
