"""Functions that accumulate online folds while their level changes.

They are sums of exponentials of terms minus a level (Milakov and Gimelshein, 2018), sums of squared differences from a mean (Chan,
Golub and LeVeque, 1983), and folds over the elements at an extreme. Emitted programs contain the source of these functions.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def proper(level: Any) -> Any:
    """The number that is subtracted for a level: zero where all elements so far are ``-inf``, so that their exponentials are zero."""
    return jnp.where(level == -jnp.inf, 0, level)


def rescaled(total: Any, level: Any, new_level: Any) -> Any:
    """A sum of terms with the factor ``exp(-level)``, with the factor ``exp(-new_level)`` instead.

    The new level is no lower, but where either is infinite: there the sum is zero, infinite or ``nan``, and stays so.
    """
    factor = jnp.exp(jnp.minimum(proper(level) - proper(new_level), 0))
    return total * factor.astype(total.dtype)


def without_elements(total: Any, level: Any) -> Any:
    """A sum as it is where the level is ``-inf``, so that ``-inf`` less the level is ``nan``."""
    return jnp.where(level == -jnp.inf, jnp.nan, total)


def at_level(total: Any, top: Any, level: Any) -> Any:
    """A sum of terms with the factor ``exp(-top)``, or without where that is not finite, with the factor ``exp(-level)`` instead."""
    return total * jnp.exp(jnp.where(jnp.isfinite(top), top, 0) - level)


def joined(squares: Any, total: Any, count: Any, more: Any, total_of_more: Any, count_of_more: Any) -> Any:
    """The sum of squared differences from the mean of all elements, from those of two parts (Chan, Golub and LeVeque, 1983).

    Of each part its own squares, its sum and the number of its elements; the first may have none.
    """
    gap = total_of_more / count_of_more - total / jnp.maximum(count, 1)
    weight = jnp.asarray(count, gap.dtype) * (count_of_more / (count + count_of_more))
    return squares + more + gap * (gap * weight)


def at_extreme(total: Any, extreme: Any, new_extreme: Any, none: Any) -> Any:
    """A sum over the elements that are an extreme: ``none`` if that is the extreme no longer."""
    return jnp.where((extreme == new_extreme) | (extreme != extreme), total, jnp.asarray(none, total.dtype))


def at_extreme_or_nan(places: Any, extreme: Any, new_extreme: Any, none: Any) -> Any:
    """The first place of an extreme, likewise; places of what is not a number are below zero, and stay."""
    return jnp.where(places < 0, places, at_extreme(places, extreme, new_extreme, none))


RESCALING = (proper, rescaled, without_elements, at_level, joined, at_extreme, at_extreme_or_nan)
