"""Kernel products and their gradients: plans against plain JAX, chunks by hand and KeOps. ``python -m benchmarks.kernels``"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import peers
from benchmarks.racing import Contest, Question, contests, main, table

CASES = {
    "tiny": [(300, 3)],
    "small": [(4_096, 3), (16_384, 3), (16_384, 32)],
    "full": [(4_096, 3), (8_192, 3), (16_384, 3), (32_768, 3), (16_384, 32), (16_384, 100)],
}
"""Points on each side, and dimensions."""
LARGEST_GRADIENT = 2**30
"""Elements of the joint tensor up to which the gradient is raced at the small scale: plain JAX takes half a minute for more."""
ROWS = 128
"""Rows of a chunk of the version by hand; the best of 64 to 1024 on a machine with 1 MiB of cache per core."""


def product(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """K(x, y) v for the squared exponential kernel."""
    return jnp.exp(-0.5 * jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


def gradient(x: jax.Array, y: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
    """The gradient of w' K(x, y) v with respect to x."""
    return jax.grad(lambda x: w @ product(x, y, v))(x)


def _rows(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    squared = jnp.sum(x * x, 1)[:, None] + jnp.sum(y * y, 1) - 2 * x @ y.T
    return jnp.exp(-0.5 * jnp.maximum(squared, 0)) @ v


def product_by_hand(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """The product as somebody writes it who knows that distances expand."""
    return lax.map(lambda row: _rows(row[None], y, v)[0], x, batch_size=ROWS)


def gradient_by_hand(x: jax.Array, y: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
    """The gradient of each chunk of rows, which no other chunk's rows change."""

    def one(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jax.grad(lambda x: row[1] * _rows(x[None], y, v)[0])(row[0])

    return lax.map(one, (x, w), batch_size=ROWS)


def make(scale: str) -> Iterator[Contest]:
    """A product and a gradient for each size."""
    for n, d in CASES[scale]:
        rng = np.random.default_rng(0)
        x, y, v, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((n, d), (n, d), n, n))
        x, y = x / np.sqrt(d, dtype=np.float32), y / np.sqrt(d, dtype=np.float32)
        size = {"n": n, "d": d}
        with_keops: dict[str, Any] = {}
        if peers.has("pykeops"):
            with_keops = {"KeOps": lambda x=x, y=y, v=v: lambda: peers.keops_product(x, y, v[:, None])[:, 0]}
        by_hand = {"by hand": product_by_hand}
        yield Contest(f"product, n = {n:,}, d = {d}", size | {"kind": "product"}, (x, y, v), "64MiB", product, by_hand, with_keops)
        if scale == "small" and n * n * d > LARGEST_GRADIENT:
            continue
        if peers.has("pykeops"):
            with_keops = {"KeOps": lambda x=x, y=y, v=v, w=w: peers.keops_gradient(x, y, v, w)}
        by_hand = {"by hand": gradient_by_hand}
        yield Contest(f"gradient, n = {n:,}, d = {d}", size | {"kind": "gradient"}, (x, y, v, w), "64MiB", gradient, by_hand, with_keops)


QUESTION = Question("kernels", "Kernel products and their gradients", contests(make, turns=5), table)

if __name__ == "__main__":
    main(QUESTION)
