"""Ordinary JAX programs that the benchmarks plan and run: nothing in them knows of memory.

Each has arguments, a limit that its largest tensor exceeds many times, and for some a version that a person cut into chunks by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.attention import attend, attend_in_chunks, gradient

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
    limit_mib: int, *shapes: tuple[int, ...], dtype: str = "float32", by_hand: Callable[..., Any] | None = None, rows: int = 0
) -> Callable[..., Any]:
    """Enter a function of arrays of these shapes, all of one dtype, into the list.

    Where ``rows`` is given, ``by_hand`` (or the function itself) is called on so many rows of the first argument at a time.
    """

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        described = tuple((shape, dtype) for shape in shapes)
        cut = in_chunks(by_hand or function, rows) if rows else by_hand
        BENCHMARKS.append(Benchmark(function.__name__, function, described, limit_mib * MIB, cut))
        return function

    return enter


def in_chunks(some: Callable[..., Any], size: int) -> Callable[..., Any]:
    """A loop as written by hand: ``some(rows of the first argument, *others)``, chunk after chunk, results on top of each other."""

    def whole(first: jax.Array, *others: jax.Array) -> Any:
        return lax.map(lambda row: jax.tree.map(lambda out: out[0], some(row[None], *others)), first, batch_size=size)

    return whole


def summed_over_chunks(some: Callable[..., Any], size: int) -> Callable[..., Any]:
    """The same where results are added up: ``some(*chunks of all arguments)``. Its derivative computes each chunk again."""

    def whole(*args: jax.Array) -> Any:
        chunks = [a.reshape(-1, size, *a.shape[1:]) for a in args]
        shapes = jax.eval_shape(some, *(chunk[0] for chunk in chunks))
        zeros = jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), shapes)
        return lax.scan(jax.checkpoint(lambda total, xs: (jax.tree.map(jnp.add, total, some(*xs)), None)), zeros, chunks)[0]

    return whole


# --- kernel matrix-vector products --------------------------------------------------------------------


def _expanded(x: jax.Array, y: jax.Array) -> jax.Array:
    """Squared distances as a person expands them: norms and one contraction."""
    return jnp.maximum(jnp.sum(x * x, 1)[:, None] + jnp.sum(y * y, 1) - 2 * x @ y.T, 0)


def _gauss(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.exp(-0.5 * _expanded(x, y)) @ v


def _matern52(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    r = jnp.sqrt(5.0 * _expanded(x, y) + 1e-12)
    return ((1 + r + r**2 / 3) * jnp.exp(-r)) @ v


@benchmark(16, (16_384, 3), (16_384, 3), (16_384,), by_hand=_gauss, rows=64)
def gauss_product(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """The squared exponential kernel in three dimensions."""
    return jnp.exp(-0.5 * jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


@benchmark(32, (10_007, 16), (8_009, 16), (8_009, 2), dtype="float64", by_hand=_matern52, rows=128)
def matern52_product(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """A Matern kernel in float64 with extents that are primes."""
    r = jnp.sqrt(5.0 * jnp.sum(jnp.square(x[:, None] - y[None]), -1) + 1e-12)
    return ((1 + r + r**2 / 3) * jnp.exp(-r)) @ v


@benchmark(16, (12_000, 5), (9_000, 5), (9_000, 4), rows=128)
def laplace_product(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """A kernel of sums of absolute differences, which no algebra takes apart."""
    return jnp.exp(-jnp.sum(jnp.abs(x[:, None] - y[None]), -1)) @ v


@benchmark(16, (8_192, 64), (8_192, 64), (8_192, 8), dtype="bfloat16", rows=256)
def polynomial_product(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """A polynomial kernel in bfloat16."""
    return (x @ y.T / 64 + 1) ** 3 @ v


# --- nearest neighbours -------------------------------------------------------------------------------


def _nearest(queries: jax.Array, points: jax.Array) -> tuple[jax.Array, jax.Array]:
    negative, places = lax.top_k(-_expanded(queries, points), 10)
    return jnp.sqrt(-negative), places


def _nearest_cosine(queries: jax.Array, points: jax.Array) -> tuple[jax.Array, jax.Array]:
    points = points / jnp.linalg.norm(points, axis=1, keepdims=True)
    return in_chunks(lambda q, p: lax.top_k(q / jnp.linalg.norm(q, axis=1, keepdims=True) @ p.T, 20), 48)(queries, points)


@benchmark(16, (2_048, 3), (50_000, 3), by_hand=_nearest, rows=32)
def nearest_euclidean(queries: jax.Array, points: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The ten nearest points of each query."""
    squared = jnp.sum((queries[:, None] - points[None]) ** 2, -1)
    negative, places = lax.top_k(-squared, 10)
    return jnp.sqrt(-negative), places


@benchmark(16, (1_024, 12), (20_000, 12), rows=64)
def nearest_manhattan(queries: jax.Array, points: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The five nearest points of each query by the sum of absolute differences."""
    negative, places = lax.top_k(-jnp.sum(jnp.abs(queries[:, None] - points[None]), -1), 5)
    return -negative, places


@benchmark(24, (2_048, 48), (30_000, 48), by_hand=_nearest_cosine)
def nearest_cosine(queries: jax.Array, points: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The twenty points of each query at the smallest angles."""
    queries = queries / jnp.linalg.norm(queries, axis=1, keepdims=True)
    points = points / jnp.linalg.norm(points, axis=1, keepdims=True)
    return lax.top_k(queries @ points.T, 20)


# --- sparse Gaussian processes ------------------------------------------------------------------------


NOISE = 0.1


def _kernel(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.exp(-0.5 * jnp.sum((a[:, None] - b[None]) ** 2, -1))


def _factor(z: jax.Array) -> jax.Array:
    return jnp.linalg.cholesky(_kernel(z, z) + 1e-5 * jnp.eye(z.shape[0], dtype=z.dtype))


def _statistics(factor: jax.Array, z: jax.Array, x: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The statistics of the points that the bound needs: a square matrix and a vector as long as there are inducing points."""
    a = jax.scipy.linalg.solve_triangular(factor, _kernel(z, x), lower=True) / NOISE
    return a @ a.T, a @ targets


def _bound_of(statistics: tuple[jax.Array, jax.Array], targets: jax.Array) -> jax.Array:
    square, vector = statistics
    b = jnp.linalg.cholesky(square + jnp.eye(square.shape[0], dtype=square.dtype))
    c = jax.scipy.linalg.solve_triangular(b, vector, lower=True) / NOISE
    fit = -0.5 * jnp.sum(targets**2) / NOISE**2 + 0.5 * jnp.sum(c**2)
    return fit - jnp.sum(jnp.log(jnp.diag(b))) - 0.5 * (targets.shape[0] / NOISE**2 - jnp.trace(square))


def _bound(x: jax.Array, targets: jax.Array, z: jax.Array) -> jax.Array:
    return _bound_of(_statistics(_factor(z), z, x, targets), targets)


def _bound_by_hand(x: jax.Array, targets: jax.Array, z: jax.Array) -> jax.Array:
    factor = _factor(z)
    return _bound_of(summed_over_chunks(lambda x, t: _statistics(factor, z, x, t), 500)(x, targets), targets)


@benchmark(32, (40_000, 4), (40_000,), (200, 4), dtype="float64", by_hand=_bound_by_hand)
def sparse_gp_bound(x: jax.Array, targets: jax.Array, z: jax.Array) -> jax.Array:
    """The variational bound of a sparse Gaussian process with 200 inducing points."""
    return _bound(x, targets, z)


@benchmark(32, (20_000, 4), (20_000,), (100, 4), dtype="float64", by_hand=jax.grad(_bound_by_hand, argnums=2))
def sparse_gp_gradient(x: jax.Array, targets: jax.Array, z: jax.Array) -> jax.Array:
    """Its gradient with respect to the inducing points."""
    return jax.grad(_bound, argnums=2)(x, targets, z)


# --- products, attention, losses ----------------------------------------------------------------------


@benchmark(8, (6_000, 50), (50, 6_000), (6_000, 40), (40, 6_000), (6_000,))
def low_rank_chain(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array, v: jax.Array) -> jax.Array:
    """A chain of thin matrices, multiplied from the wrong side."""
    return ((a @ b) @ (c @ d)) @ v


_attend_by_hand = partial(attend_in_chunks, rows=125)


@benchmark(32, *((4, 3_000, 64),) * 3, by_hand=_attend_by_hand)
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of four heads."""
    return attend(q, k, v)


@benchmark(48, *((4, 2_000, 64),) * 3, by_hand=gradient(_attend_by_hand))
def attention_gradient(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients of a loss of attention with respect to all three of its arguments."""
    return gradient(attend)(q, k, v)


def _losses(hidden: jax.Array, labels: jax.Array, table: jax.Array) -> jax.Array:
    picked = jnp.sum(hidden * table[labels], -1)
    return jax.nn.logsumexp(hidden @ table.T, -1) - picked


def _labels(hidden: jax.Array, table: jax.Array) -> jax.Array:
    return jnp.arange(hidden.shape[0]) * 7 % table.shape[0]


def _cross_entropy_by_hand(hidden: jax.Array, table: jax.Array) -> jax.Array:
    losses = summed_over_chunks(lambda h, labels: jnp.sum(_losses(h, labels, table)), 100)
    return losses(hidden, _labels(hidden, table)) / hidden.shape[0]


@benchmark(24, (4_000, 64), (32_000, 64), by_hand=_cross_entropy_by_hand)
def cross_entropy(hidden: jax.Array, table: jax.Array) -> jax.Array:
    """The mean loss of a softmax over a vocabulary, whose logits are never needed."""
    return jnp.mean(_losses(hidden, _labels(hidden, table), table))


# --- loops and extremes -------------------------------------------------------------------------------


def _solve(product: Callable[..., jax.Array], b: jax.Array) -> jax.Array:
    def step(state: Sequence[jax.Array], _: None) -> tuple[tuple[jax.Array, ...], None]:
        u, r, p = state
        kp = product(p) + 0.5 * p
        alpha = r @ r / (p @ kp)
        new = r - alpha * kp
        return (u + alpha * p, new, new + (new @ new) / (r @ r) * p), None

    return lax.scan(step, (jnp.zeros_like(b), b, b), None, length=8)[0][0]


def _solve_by_hand(x: jax.Array, b: jax.Array) -> jax.Array:
    return _solve(lambda p: in_chunks(_gauss, 120)(x, x, p), b)


@benchmark(8, (6_000, 3), (6_000,), by_hand=_solve_by_hand)
def conjugate_gradients(x: jax.Array, b: jax.Array) -> jax.Array:
    """Eight steps of conjugate gradients on a kernel matrix plus noise."""
    return _solve(lambda p: gauss_product(x, x, p), b)


def _extremes_by_hand(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    def of_rows(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        squared = _expanded(x, y)
        return jnp.max(squared, 1), jnp.min(squared, 1)

    largest, smallest = in_chunks(of_rows, 80)(x, y)
    return jnp.sqrt(jnp.max(largest)), jnp.sqrt(jnp.max(smallest))


@benchmark(8, (15_000, 6), (11_000, 6), by_hand=_extremes_by_hand)
def pairwise_extremes(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest distance of any pair, and the distance from one set to the other."""
    squared = jnp.sum((x[:, None] - y[None]) ** 2, -1)
    return jnp.sqrt(jnp.max(squared)), jnp.sqrt(jnp.max(jnp.min(squared, 1)))
