"""Programs whose folds of pairs can be tile kernels, and what such a kernel computes, in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

N, M = 185, 250


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


def of_products(x, y):
    products = x @ y.T
    return jnp.sum(jnp.exp(-products) * jnp.sqrt(1 + products**2), 1)


def integers(a, b):
    return jnp.max(a[:, None] * b[None] - b[None], 1)


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
    "of_products": (of_products, ((N, 5), (M, 5))),
    "ten_dimensions": (product, ((N, 10), (M, 10), (M,))),
    "integers": (integers, ((N,), (M,))),
}


def dtype_of(name: str) -> Any:
    return jnp.int32 if name == "integers" else jnp.float32


def folded_pairs(spec, over, pair, fold, block, approximate, *arrays):
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

    value = pair(*(tiles(array, read) for array, read in zip(arrays, reads)))
    _, _, reduce, dtype = fold
    return reduce(jnp.broadcast_to(value, [sizes[i] for i in axes]), axis=-1).astype(dtype)
