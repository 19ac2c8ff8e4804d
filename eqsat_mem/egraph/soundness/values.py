"""Values on which rules are judged: ordinary ones, and the corners of each dtype."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

KINDS = ("whole", "normal", "positive", "negative", "zeros", "equal", "offset", "wide", "special", "ends")
"""Kinds of values, the simplest first: a wrong rule is shown with the first kind on which it is wrong.

Of floats: small whole numbers, normal ones, those above and below zero, with zeros among them, equal along some axes, far from zero, of all
magnitudes, with infinities and nan, and at the ends of the range. Integers and booleans have kinds of the same names with corners of
their own, see :func:`values`. Further kinds are "spread", some elements far above others, and "masked", with minus infinity among those.
"""
FEW_KINDS = ("whole", "positive", "equal", "wide")
"""The kinds for long indices, along which it is the number of elements that counts."""


@cache
def kind(dtype: Any) -> str:
    """ "b", "i", "u", "f" or "c": bfloat16 is a float, whatever numpy says."""
    if jnp.issubdtype(dtype, jnp.floating):
        return "f"
    return str(np.dtype(dtype).kind)


def samples(shape: Sequence[int], dtype: Any, kinds: Sequence[str], rng: np.random.Generator) -> np.ndarray:
    """An array of each kind, the first axis counts them."""
    with np.errstate(all="ignore"):
        return np.stack([values(tuple(shape), np.dtype(dtype), which, rng) for which in kinds])


def values(shape: tuple[int, ...], dtype: np.dtype[Any], which: str, rng: np.random.Generator) -> np.ndarray:
    """Random values of a kind."""
    if which == "equal":  # along some axes, half of the time along all
        some = tuple(1 if rng.random() < 0.75 else n for n in shape) if rng.random() < 0.5 else (1,) * len(shape)
        return np.broadcast_to(values(some, dtype, rng.choice(["normal", "whole"]), rng), shape)
    match kind(dtype):
        case "b":
            return _booleans(shape, which, rng)
        case "i" | "u":
            return _integers(shape, dtype, which, rng).astype(dtype)
        case "c":
            parts = [
                _floats(shape, np.dtype(np.float32), which if which not in ("special", "ends", "wide") else "normal", rng) for _ in "ri"
            ]
            return np.asarray(parts[0] + 1j * parts[1], dtype)
    return np.asarray(_floats(shape, dtype, which, rng), dtype)


NUDGES = {0x9E3779B97F4A7C15: 1, 0xC2B2AE3D27D4EB4F: 2, 0xD6E8FEB86659FD93: 3, 0xA0761D6478BD642F: 5}
"""Odd numbers, by which bits of numbers are multiplied to tell which are moved up and which down, and by how many last bits."""


def nudged(array: np.ndarray, by: int) -> np.ndarray:
    """An array with last bits of its numbers changed; equal ones stay equal, and negations of each other too."""
    if kind(array.dtype) not in "fc":
        return array
    step = NUDGES[by] * float(jnp.finfo(array.dtype).eps)
    with np.errstate(all="ignore"):
        size = np.abs(array.astype(np.complex128 if kind(array.dtype) == "c" else np.float64))
        up = (size.view(np.uint64) * np.uint64(by)) >> np.uint64(63)
        return np.asarray(array * np.where(up, 1 + step, 1 - step)).astype(array.dtype)


def _floats(shape: tuple[int, ...], dtype: np.dtype[Any], which: str, rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal(shape)
    info = jnp.finfo(dtype)
    match which:
        case "whole":
            return rng.integers(-2, 3, shape).astype(float)
        case "positive":
            return np.abs(x) + 0.1
        case "negative":
            return -np.abs(x) - 0.1
        case "zeros":
            return np.asarray(x * rng.integers(0, 2, shape))
        case "offset":
            return np.asarray(x + 1e4)
        case "spread" | "masked":
            far = x * rng.choice([1.0, 30.0, 1000.0], shape)
            return np.where(rng.random(shape) < 0.3, -np.inf, far) if which == "masked" else far
        case "wide":
            return np.asarray(np.sign(x) * 2.0 ** rng.uniform(0.9 * info.minexp, 0.9 * info.maxexp, shape))
        case "special":
            return np.where(rng.random(shape) < 0.4, rng.choice([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0], shape), x)
        case "ends":
            most, least, step = float(info.max), float(info.tiny), float(info.eps)
            ends = [most, most / 2, least, 1.5 * least, float(info.smallest_subnormal), 1 + step, 1 - step / 2, 2 / step, 1.0, 0.0, np.inf]
            return np.asarray(rng.choice([-1.0, 1.0], shape) * rng.choice(ends, shape))
    return x


def _integers(shape: tuple[int, ...], dtype: np.dtype[Any], which: str, rng: np.random.Generator) -> np.ndarray:
    info, signed = np.iinfo(dtype), np.dtype(dtype).kind == "i"
    least, most = int(info.min), int(info.max)
    match which:
        case "whole":
            return rng.integers(-2 if signed else 0, 3, shape)
        case "positive":
            return rng.integers(1, 10, shape)
        case "negative":
            return rng.integers(-9, 0, shape) if signed else rng.integers(most - 8, most, shape, np.uint64, endpoint=True)
        case "zeros":
            return rng.integers(-9 if signed else 0, 10, shape) * rng.integers(0, 2, shape)
        case "offset":  # two of them add up to more than there is
            return rng.integers(most // 2 + 1, most // 2 + 20, shape, np.uint64)
        case "wide":
            return rng.integers(least, most, shape, dtype, endpoint=True)
        case "special":
            corners = [least, least + 1, most, most - 1, 0, 1, info.bits - 1, info.bits, info.bits + 1, 1 << info.bits // 2]
            return np.asarray(rng.choice(np.array(corners, np.object_), shape), np.object_)
        case "ends":
            return np.full(shape, rng.choice(np.array([least, most], np.object_)), np.object_)
    return rng.integers(-9 if signed else 0, 10, shape)


def _booleans(shape: tuple[int, ...], which: str, rng: np.random.Generator) -> np.ndarray:
    match which:
        case "positive":
            return np.ones(shape, bool)
        case "negative":
            return np.zeros(shape, bool)
        case "zeros" | "special" | "ends":
            return rng.random(shape) < {"zeros": 0.2, "special": 0.8, "ends": 0.02}[which]
    return rng.integers(0, 2, shape).astype(bool)
