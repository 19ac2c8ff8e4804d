"""Programs whose folds of pairs can be tile kernels, and what such a kernel computes, in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

N, M, LONG = 185, 250, 1034


def distances(x, y):
    return jnp.sum((x[:, None] - y[None]) ** 2, -1)


def product(x, y, v):
    return jnp.sum(jnp.exp(-0.5 * distances(x, y)) * v, 1)


def of_one_array(x, v):
    return jnp.sum(jnp.exp(-distances(x, x)) * v, 1) + 0.1 * v


def by_columns(x, y, v):
    return jnp.sum(jnp.exp(-0.5 * distances(x, y)) * v[:, None], 0)


def of_numbers(x, y, v):
    return jnp.sum(jnp.exp(-0.5 * (x[:, None] - y[None]) ** 2) * v, 1)


def batched(x, y, v):
    return jnp.sum(jnp.exp(-((x[:, :, None] - y[:, None]) ** 2)) * v[:, None], 2)


def scaled(x, y, v, scales, height):
    return height * jnp.sum(jnp.exp(-height * jnp.sum((x[:, None] - y[None]) ** 2 * scales, -1)) * v, 1)


def matern(x, y, v):
    r = jnp.sqrt(3 * distances(x, y) + 1e-12)
    return jnp.sum((1 + r) * jnp.exp(-r) * v, 1)


def farthest_and_nearest(x, y):
    return jnp.max(distances(x, y), 1), jnp.min(distances(x, y), 0)


def nearby(x, y):
    return jnp.sum(distances(x, y) < 4.0, 1)


def earlier(x):
    place = jnp.arange(x.shape[0])
    return jnp.sum(jnp.where(place[:, None] >= place[None], jnp.exp(-distances(x, x)), 0.0), 1)


def logsumexp(x, y):
    return jax.scipy.special.logsumexp(-distances(x, y), axis=1)


def nearest(x, y):
    return jnp.argmin(distances(x, y), 1)


def farthest(x, y):
    return jnp.argmax(distances(x, y), 0)


def least_of_two(x, y):
    """Ties at places that are not the first, and rows in which nothing is a number."""
    d = jnp.round(distances(x, y)) + jnp.where(x[:, None, 0] > 2.0, jnp.nan, 0.0)
    return jnp.argmin(d, 1)


def three_nearest(x, y):
    return lax.top_k(-distances(x, y), 3)


def three_allowed(x, y):
    """Selected in columns; elements that are masked, those that are no numbers, and ties."""
    d = jnp.round(distances(x, y)) - jnp.where(x[:, None, 0] > 1.5, jnp.inf, 0.0)
    return lax.top_k(jnp.where(distances(x, y) > 20.0, jnp.nan, d).T, 3)


def running_logsumexp(x, y):
    def combine(one, other):
        (m, s), (n, t) = one, other
        top = jnp.maximum(m, n)
        return top, s * jnp.exp(m - top) + t * jnp.exp(n - top)

    d = -distances(x, y)
    top, total = lax.reduce((d, jnp.exp(0.0 * d)), (np.asarray(-1e30, d.dtype), np.asarray(0, d.dtype)), combine, (1,))
    return top + jnp.log(total)


def streamed_logsumexp(x, y):
    """With rows in which nothing is finite."""
    d = jnp.where(x[:, None, 0] > 1.5, -jnp.inf, 0.0) - distances(x, y)
    top = jnp.max(d, 1)
    return top + jnp.log(jnp.sum(jnp.exp(d - jnp.where(jnp.isfinite(top), top, 0.0)[:, None]), 1))


def soft_neighbours(x, y, v):
    """A softmax, and the mean that it weighs, of exponents that differ much."""
    d = -30 * distances(x, y)
    weights = jnp.exp(d - jnp.max(d, 1, keepdims=True))
    return jnp.sum(weights * v, 1) / jnp.sum(weights, 1)


def weighted_mean(x, y, v):
    weights = jnp.exp(-distances(x, y))
    return jnp.sum(weights * v, 1) / jnp.sum(weights, 1)


def products(x, y):
    return jnp.prod(1 - 0.001 * jnp.exp(-distances(x, y)), 1)


def of_products(x, y):
    products = x @ y.T
    return jnp.sum(jnp.exp(-products) * jnp.sqrt(1 + products**2), 1)


def integers(a, b):
    return jnp.max(jnp.where(a[:, None] > b[None], a[:, None] * b[None] - b[None], a[:, None] - b[None] * b[None]), 1)


Shapes = tuple[tuple[int, ...], ...]
PROGRAMS: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "product": (product, ((N, 3), (M, 3), (M,))),
    "of_one_array": (of_one_array, ((N, 3), (N,))),
    "by_columns": (by_columns, ((N, 2), (M, 2), (N,))),
    "of_numbers": (of_numbers, ((N,), (M,), (M,))),
    "batched": (batched, ((2, N), (2, M), (2, M))),
    "scaled": (scaled, ((N, 3), (M, 3), (M,), (3,), ())),
    "matern": (matern, ((N, 3), (M, 3), (M,))),
    "farthest_and_nearest": (farthest_and_nearest, ((N, 3), (M, 3))),
    "nearby": (nearby, ((N, 3), (M, 3))),
    "earlier": (earlier, ((N, 3),)),
    "logsumexp": (logsumexp, ((N, 3), (M, 3))),
    "streamed_logsumexp": (streamed_logsumexp, ((N, 3), (M, 3))),
    "soft_neighbours": (soft_neighbours, ((N, 3), (M, 3), (M,))),
    "weighted_mean": (weighted_mean, ((N, 3), (M, 3), (M,))),
    "of_products": (of_products, ((N, 5), (M, 5))),
    "ten_dimensions": (product, ((N, 10), (M, 10), (M,))),
    "integers": (integers, ((N,), (LONG,))),
    "products": (products, ((N, 3), (M, 3))),
    "nearest": (nearest, ((N, 3), (LONG, 3))),
    "farthest": (farthest, ((LONG, 3), (N, 3))),
    "least_of_two": (least_of_two, ((N, 3), (LONG, 3))),
    "three_nearest": (three_nearest, ((N, 3), (LONG, 3))),
    "three_allowed": (three_allowed, ((LONG, 3), (N, 3))),
    "running_logsumexp": (running_logsumexp, ((N, 3), (LONG, 3))),
}


def dtype_of(name: str) -> Any:
    return jnp.int32 if name == "integers" else jnp.float32


def folded_pairs(spec, over, pair, fold, block, approximate, *arrays, streams=False):
    """The result that a tile kernel should give, all pairs at once; reads that the kernel could not make are refused."""
    *reads, result = spec.replace("->", ",").split(",")
    axes = result + over
    sizes = {index: size for read, array in zip(reads, arrays, strict=True) for index, size in zip(read, array.shape, strict=True)}
    assert block[0] <= sizes[result[-1]]
    assert block[1] <= sizes[over]

    def tiles(array, read):
        written_out = [k for k, index in enumerate(read) if index not in axes]
        if written_out:
            k = written_out[0]
            return tuple(tiles(jnp.take(array, p, k), read[:k] + read[k + 1 :]) for p in range(array.shape[k]))
        along = [index for index in read if index in axes[-2:]]
        assert along in ([], list(read[-1:])), f"{read} is not contiguous along rows or columns"
        return jnp.einsum(f"{read}->{''.join(i for i in axes if i in read)}", array)[
            tuple(slice(None) if i in read else None for i in axes)
        ]

    nothing, dtypes, combine = fold[:3]
    takes_in, finish = fold[3:] or (combine, lambda state: state)
    shape, place = [sizes[i] for i in axes], jnp.arange(sizes[over], dtype=jnp.int32)
    none = jax.tree.map(lambda number, dtype: jnp.full(shape, number, dtype), nothing, dtypes)
    elements, top = pair(place, *(tiles(array, read) for array, read in zip(arrays, reads))), ()
    if streams:
        element, less = elements
        top = (jnp.max(jnp.broadcast_to(element, shape), -1),)
        elements = less(jnp.where(jnp.isfinite(top[0]), top[0], 0)[..., None])
    state = takes_in(none, elements)
    while (width := jax.tree.leaves(state)[0].shape[-1]) > 1:
        left, right = (
            jax.tree.map(lambda a, own=own: a[..., own], state) for own in (slice(width // 2), slice(width // 2, width // 2 * 2))
        )
        rest = jax.tree.map(lambda a: a[..., width // 2 * 2 :], state)
        state = jax.tree.map(lambda *parts: jnp.concatenate(parts, -1), combine(left, right), rest)
    results = finish(jax.tree.map(lambda a: a[..., 0], state))
    if not isinstance(results, tuple):
        return results
    return top + tuple(jnp.stack(numbers, -1) if isinstance(numbers, tuple) else numbers for numbers in results)
