"""Ordinary JAX programs that the benchmarks plan and run: nothing in them knows of memory.

Each has arguments, a limit that its largest tensor exceeds many times, and for some a version that a person cut into chunks by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MIB = 2**20


@dataclass(frozen=True)
class Benchmark:
    """A program with its arguments.

    Attributes:
        name: the name of the function.
        function: the program.
        shapes: shape and dtype of each argument; all are drawn from a normal distribution.
        limit_bytes: what it may hold.
        by_hand: the same function, cut by a person, or None.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    limit_bytes: int
    by_hand: Callable[..., Any] | None = None

    @property
    def x64(self) -> bool:
        """Whether it needs 64-bit numbers."""
        return any(dtype == "float64" for _, dtype in self.shapes)

    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """The arguments without values."""
        return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in self.shapes]

    def arguments(self) -> list[jax.Array]:
        """The arguments; the same in every process."""
        rng = np.random.default_rng(0)
        return [jnp.asarray(rng.standard_normal(shape), jnp.dtype(dtype)) for shape, dtype in self.shapes]


BENCHMARKS: list[Benchmark] = []


def benchmark(
    limit_mib: int, *shapes: tuple[int, ...], dtype: str = "float32", by_hand: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Enter a function of arrays of these shapes, all of one dtype, into the list."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        described = tuple((shape, dtype) for shape in shapes)
        BENCHMARKS.append(Benchmark(function.__name__, function, described, limit_mib * MIB, by_hand))
        return function

    return enter


def in_chunks(one: Callable[..., Any], size: int) -> Callable[..., Any]:
    """What a person writes: ``one(chunk of the first argument, *others)``, chunk after chunk, results on top of each other."""

    def whole(first: jax.Array, *others: jax.Array) -> Any:
        return lax.map(lambda row: one(row[None], *others)[0], first, batch_size=size)

    return whole


# --- kernel matrix-vector products --------------------------------------------------------------------


def _gauss_rows(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    squared = jnp.sum(x * x, 1)[:, None] + jnp.sum(y * y, 1) - 2 * x @ y.T
    return jnp.exp(-0.5 * jnp.maximum(squared, 0)) @ v


@benchmark(16, (16_384, 3), (16_384, 3), (16_384,), by_hand=in_chunks(_gauss_rows, 128))
def gauss_product(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """The squared exponential kernel in three dimensions."""
    return jnp.exp(-0.5 * jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


@benchmark(32, (10_007, 16), (8_009, 16), (8_009, 2), dtype="float64")
def matern52_product(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """A Matern kernel in float64 with extents that are primes."""
    r = jnp.sqrt(5.0 * jnp.sum(jnp.square(x[:, None] - y[None]), -1) + 1e-12)
    return ((1 + r + r**2 / 3) * jnp.exp(-r)) @ v


@benchmark(16, (12_000, 5), (9_000, 5), (9_000, 4))
def laplace_product(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """A kernel of sums of absolute differences, which no algebra takes apart."""
    return jnp.exp(-jnp.sum(jnp.abs(x[:, None] - y[None]), -1)) @ v


@benchmark(16, (8_192, 64), (8_192, 64), (8_192, 8), dtype="bfloat16")
def polynomial_product(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """A polynomial kernel in bfloat16."""
    return (x @ y.T / 64 + 1) ** 3 @ v


# --- nearest neighbours -------------------------------------------------------------------------------


@benchmark(16, (2_048, 3), (50_000, 3))
def nearest_euclidean(queries: jax.Array, points: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The ten nearest points of each query."""
    squared = jnp.sum((queries[:, None] - points[None]) ** 2, -1)
    negative, places = lax.top_k(-squared, 10)
    return jnp.sqrt(-negative), places


@benchmark(16, (1_024, 12), (20_000, 12))
def nearest_manhattan(queries: jax.Array, points: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The five nearest points of each query by the sum of absolute differences."""
    negative, places = lax.top_k(-jnp.sum(jnp.abs(queries[:, None] - points[None]), -1), 5)
    return -negative, places


@benchmark(24, (2_048, 48), (30_000, 48))
def nearest_cosine(queries: jax.Array, points: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The twenty points of each query at the smallest angles."""
    queries = queries / jnp.linalg.norm(queries, axis=1, keepdims=True)
    points = points / jnp.linalg.norm(points, axis=1, keepdims=True)
    return lax.top_k(queries @ points.T, 20)


# --- sparse Gaussian processes ------------------------------------------------------------------------


def _bound(x: jax.Array, targets: jax.Array, z: jax.Array) -> jax.Array:
    noise, count = 0.1, z.shape[0]

    def kernel(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.exp(-0.5 * jnp.sum((a[:, None] - b[None]) ** 2, -1))

    factor = jnp.linalg.cholesky(kernel(z, z) + 1e-5 * jnp.eye(count, dtype=x.dtype))
    a = jax.scipy.linalg.solve_triangular(factor, kernel(z, x), lower=True) / noise
    b = jnp.linalg.cholesky(a @ a.T + jnp.eye(count, dtype=x.dtype))
    c = jax.scipy.linalg.solve_triangular(b, a @ targets, lower=True) / noise
    fit = -0.5 * jnp.sum(targets**2) / noise**2 + 0.5 * jnp.sum(c**2)
    return fit - jnp.sum(jnp.log(jnp.diag(b))) - 0.5 * (x.shape[0] / noise**2 - jnp.sum(a * a))


@benchmark(32, (40_000, 4), (40_000,), (200, 4), dtype="float64")
def sparse_gp_bound(x: jax.Array, targets: jax.Array, z: jax.Array) -> jax.Array:
    """The variational bound of a sparse Gaussian process with 200 inducing points."""
    return _bound(x, targets, z)


@benchmark(32, (20_000, 4), (20_000,), (100, 4), dtype="float64")
def sparse_gp_gradient(x: jax.Array, targets: jax.Array, z: jax.Array) -> jax.Array:
    """Its gradient with respect to the inducing points."""
    return jax.grad(_bound, argnums=2)(x, targets, z)


# --- products, attention, losses ----------------------------------------------------------------------


@benchmark(8, (6_000, 50), (50, 6_000), (6_000, 40), (40, 6_000), (6_000,))
def low_rank_chain(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array, v: jax.Array) -> jax.Array:
    """A chain of thin matrices, multiplied from the wrong side."""
    return ((a @ b) @ (c @ d)) @ v


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.einsum("hqc,hkc->hqk", q, k) / np.sqrt(q.shape[-1]), -1) @ v


@benchmark(32, *((4, 3_000, 64),) * 3)
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of four heads."""
    return _attend(q, k, v)


@benchmark(48, *((4, 2_000, 64),) * 3)
def attention_gradient(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients of a loss of attention with respect to all three of its arguments."""
    return jax.grad(lambda q, k, v: jnp.sum(_attend(q, k, v) ** 2), argnums=(0, 1, 2))(q, k, v)


@benchmark(24, (4_000, 64), (32_000, 64))
def cross_entropy(hidden: jax.Array, table: jax.Array) -> jax.Array:
    """The mean loss of a softmax over a vocabulary, whose logits are never needed."""
    logits = hidden @ table.T
    labels = jnp.arange(hidden.shape[0]) * 7 % table.shape[0]
    picked = jnp.sum(hidden * table[labels], -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


# --- loops and extremes -------------------------------------------------------------------------------


@benchmark(8, (6_000, 3), (6_000,))
def conjugate_gradients(x: jax.Array, b: jax.Array) -> jax.Array:
    """Eight steps of conjugate gradients on a kernel matrix plus noise."""

    def product(v: jax.Array) -> jax.Array:
        return jnp.exp(-0.5 * jnp.sum((x[:, None] - x[None]) ** 2, -1)) @ v + 0.5 * v

    def step(state: Sequence[jax.Array], _: None) -> tuple[tuple[jax.Array, ...], None]:
        u, r, p = state
        kp = product(p)
        alpha = r @ r / (p @ kp)
        new = r - alpha * kp
        return (u + alpha * p, new, new + (new @ new) / (r @ r) * p), None

    return lax.scan(step, (jnp.zeros_like(b), b, b), None, length=8)[0][0]


@benchmark(8, (15_000, 6), (11_000, 6))
def pairwise_extremes(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest distance of any pair, and the distance from one set to the other."""
    squared = jnp.sum((x[:, None] - y[None]) ** 2, -1)
    return jnp.sqrt(jnp.max(squared)), jnp.sqrt(jnp.max(jnp.min(squared, 1)))
