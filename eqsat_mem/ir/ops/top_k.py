"""Functions that combine selections, chunk by chunk or element by element; emitted programs contain their source."""

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


def running_top_k(k: int) -> tuple[Any, ...]:
    """``lax.top_k`` of float32 numbers as a fold of pairs of a number and its place.

    Returns:
        The state before all elements: ``k`` keys and ``k`` places, from the first to the last; the dtypes of both; a function that combines
        two states; one that takes one more element into a state, later than all in it; and one that makes numbers and places of a state.
        Keys are integers in the order of numbers, in which what is not a number is larger than all others.
    """

    def ordered(bits: Any) -> Any:
        return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def takes_in(state: Any, element: Any) -> Any:
        keys, places = state
        key, place = jnp.maximum(ordered(lax.bitcast_convert_type(element[0], jnp.int32)), 1 - 2**31), element[1]
        return inserted(keys, places, key, place, [key > other for other in keys])

    def combine(one: Any, other: Any) -> Any:
        (keys, places), more = one, zip(*other)
        for key, place in more:
            before = [(key > k) | ((key == k) & (place < p)) for k, p in zip(keys, places)]
            keys, places = inserted(keys, places, key, place, before)
        return keys, places

    def inserted(keys: Any, places: Any, key: Any, place: Any, before: Any) -> Any:
        """Those of ``keys`` and one more, which stands before them from the first at which ``before`` is true."""
        new: list[Any] = [(jnp.where(before[0], key, keys[0]), jnp.where(before[0], place, places[0]))]
        for s in range(1, k):
            own = (jnp.where(before[s], number, known[s]) for number, known in ((key, keys), (place, places)))
            new.append(tuple(jnp.where(before[s - 1], known[s - 1], here) for known, here in zip((keys, places), own)))
        return tuple(number for number, _ in new), tuple(number for _, number in new)

    def finish(state: Any) -> Any:
        return tuple(lax.bitcast_convert_type(ordered(key), jnp.float32) for key in state[0]), state[1]

    nothing = (-(2**31),) * k, (2**31 - 1,) * k
    return nothing, ((jnp.int32,) * k,) * 2, combine, takes_in, finish
