"""Programs that are planned for a GPU that is not there: those of :mod:`benchmarks.programs`, and more of the kinds that planning for a
GPU must get right. Compiled by :mod:`benchmarks.gpu_peaks`, and none of them run there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.programs import BENCHMARKS, MIB, Benchmark

Shape = tuple[int, ...]
PROGRAMS: list[Benchmark] = list(BENCHMARKS)


def program(limit_mib: int, *shapes: Shape, dtype: str = "float32") -> Callable[..., Any]:
    """Enter a function of arrays of these shapes, all of one dtype, into the list."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        described = tuple((shape, dtype) for shape in shapes)
        PROGRAMS.append(Benchmark(function.__name__, function, described, limit_mib * MIB))
        return function

    return enter


def gauss(x: jax.Array, y: jax.Array) -> jax.Array:
    """The matrix of a squared exponential kernel."""
    return jnp.exp(-0.5 * jnp.sum(jnp.square(x[:, None] - y[None]), -1))


# --- kernels ------------------------------------------------------------------------------------------


@program(24, (9_000, 1), (9_000, 1), (9_000, 1), dtype="float64")
def double_product(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """A kernel product in float64, which XLA sums without its matrix."""
    return gauss(x, y) @ v


@program(24, (15_000, 40), (15_000, 40), (15_000, 1))
def wide_product(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """In forty dimensions, where distances are best expanded."""
    return gauss(x, y) @ v


@program(64, (120_000, 2), (120_000, 2), (120_000,))
def large_product(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """Of a matrix of 54 GiB."""
    return gauss(x, y) @ v


@program(16, (7_000, 4), (7_000, 1))
def nugget_product(x: jax.Array, v: jax.Array) -> jax.Array:
    """A kernel matrix with something added to its diagonal."""
    return (gauss(x, x) + 0.05 * jnp.eye(x.shape[0])) @ v


@program(48, (7_500, 6), (7_500,), (6,), ())
def hyperparameter_gradient(x: jax.Array, v: jax.Array, scales: jax.Array, variance: jax.Array) -> Any:
    """The derivative of a quadratic form by the parameters of its kernel."""

    def form(scales: jax.Array, variance: jax.Array) -> jax.Array:
        return v @ (variance * gauss(x / scales, x / scales) @ v)

    return jax.value_and_grad(form, argnums=(0, 1))(scales, variance)


@program(12, (90_000, 6), (1_200, 6))
def closest_centre(x: jax.Array, centres: jax.Array) -> jax.Array:
    """The step of k-means that assigns points."""
    return jnp.argmin(jnp.sum((x[:, None] - centres[None]) ** 2, -1), 1)


@program(20, (2_500, 10), (1_800, 10))
def largest_component(x: jax.Array, y: jax.Array) -> jax.Array:
    """The axis along which each pair differs most."""
    return jnp.argmax(jnp.abs(x[:, None] - y[None]), 2)


@program(8, (11_000, 4), (13_000, 4))
def set_distance(x: jax.Array, y: jax.Array) -> jax.Array:
    """The larger of the distances from one set to the other and back."""
    distance = jnp.sqrt(jnp.sum((x[:, None] - y[None]) ** 2, -1))
    return jnp.maximum(jnp.max(jnp.min(distance, 0)), jnp.max(jnp.min(distance, 1)))


# --- products -----------------------------------------------------------------------------------------


@program(60, (1_800, 1_800), (1_800, 1_800), (1_800,))
def products_of_a_vector(a: jax.Array, b: jax.Array, v: jax.Array) -> jax.Array:
    """Two matrices and a vector, from the wrong side."""
    return (a @ b) @ v


@program(6, (15_000, 3), (3, 15_000), (15_000, 3))
def thin_matrices(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """Three thin matrices, from the wrong side."""
    return (a @ b) @ c


@program(8, (2_800, 32), (2_800, 32), (2_800, 24), (24, 600), (50, 600), (50,))
def five_products(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array, e: jax.Array, v: jax.Array) -> jax.Array:
    """A longer chain, with transposed factors."""
    return (((a @ b.T) @ c) @ d) @ e.T @ v


@program(40, (2_600, 1_600), (1_600, 2_600))
def trace_of_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The trace of a product that is not needed."""
    return jnp.trace(a @ b)


@program(16, (11_000, 3), (11_000, 3), (11_000,))
def exponential_product(a: jax.Array, b: jax.Array, v: jax.Array) -> jax.Array:
    """Exponentials of inner products, from the other side."""
    return v @ jnp.exp(a @ b.T).T


@program(16, (50_000, 3), (900, 3))
def second_moments(a: jax.Array, b: jax.Array) -> jax.Array:
    """A matrix of features times itself."""
    features = jnp.exp(0.2 * a @ b.T)
    return features.T @ features


@program(8, (10_000,), (10_000,))
def weighted_positions(v: jax.Array, w: jax.Array) -> jax.Array:
    """Rows of equal numbers times a vector, which is no matrix at all."""
    return lax.broadcasted_iota(jnp.float32, (v.shape[0], v.shape[0]), 0) @ v + w


@program(8, (10_000,), (10_000,))
def column_sums(p: jax.Array, v: jax.Array) -> jax.Array:
    """Exponentials of differences, summed along columns."""
    return jnp.einsum("ij,i->j", jnp.exp(p[:, None] - v[None]), v)


@program(16, (11_000, 2), (11_000, 2), (11_000, 3))
def three_columns(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """A sum inside a function, times a matrix of few columns."""
    return jnp.exp(jnp.sum(0.3 * (x[:, None] - y[None]), -1)) @ v


# --- solves and networks ------------------------------------------------------------------------------


@program(140, (96, 96), (96, 90_001), (96, 90_001), (90_001, 1), dtype="float64")
def solved_mean(lower: jax.Array, b: jax.Array, mean: jax.Array, a: jax.Array) -> jax.Array:
    """The mean of a product with the solution of a triangular system."""
    return jnp.mean(jax.scipy.linalg.solve_triangular(lower, b - mean, lower=True) @ a)


@program(120, (8_000, 64), (64, 16_000), (16_000,), (16_000, 8))
def network_gradient(x: jax.Array, first: jax.Array, bias: jax.Array, second: jax.Array) -> Any:
    """The derivative of the mean output of a network with one wide layer."""

    def output(first: jax.Array, bias: jax.Array, second: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.relu(x @ first + bias) @ second)

    return jax.grad(output, argnums=(0, 1, 2))(first, bias, second)
