"""Matrices that subtract means: a mean stays where it is subtracted, so that plans are as exact as products with such a matrix."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import eqsat_mem
from tests.tiers import tiered


def gauss(x: Array) -> Array:
    return jnp.exp(-jnp.sum((x[:, None] - x) ** 2, -1))


def cauchy(y: Array) -> Array:
    return 1 / (1 + jnp.sum((y[:, None] - y) ** 2, -1))


def centring(n: int) -> Array:
    return jnp.eye(n) - jnp.ones((n, n)) / n


def centring_by_number(n: int) -> Array:
    return jnp.eye(n) - 1 / n


def centring_by_outer_product(n: int) -> Array:
    ones = jnp.ones((n, 1))
    return jnp.eye(n) - ones @ ones.T / n


def trace_of_four(h: Array, k: Array, m: Array) -> Array:
    return jnp.trace(k @ h @ m @ h)


def centred_twice_on_one_side(h: Array, k: Array, m: Array) -> Array:
    return jnp.trace(h @ k @ h @ m)


def centred_once_on_each_side(h: Array, k: Array, m: Array) -> Array:
    return jnp.sum((h @ k) * (h @ m).T)


def alignment(h: Array, k: Array, m: Array) -> Array:
    a, b = h @ k @ h, h @ m @ h
    return jnp.sum(a * b) / jnp.sqrt(jnp.sum(a * a) * jnp.sum(b * b))


def embedding(h: Array, k: Array, m: Array) -> Array:
    return h @ k @ h @ m[:, :3]


def errors(function, n, limit):
    rng = np.random.default_rng(n)
    args = [jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32) for shape in ((n, 5), (n, 2))]
    with jax.enable_x64(True):
        exact = [*map(np.asarray, jax.tree.leaves(jax.jit(function)(*(np.asarray(x, np.float64) for x in args))))]
    fast = eqsat_mem.optimize(function, memory_limit=limit)
    assert not fast.plan(*args).unchanged
    results = (map(np.asarray, jax.tree.leaves(f(*args))) for f in (fast, jax.jit(function)))
    return [max(np.max(np.abs(got - e)) / np.max(np.abs(e)) for got, e in zip(found, exact, strict=True)) for found in results]


FUNCTIONS = trace_of_four, centred_twice_on_one_side, centred_once_on_each_side, alignment, embedding
PAIRS = [*product(FUNCTIONS, (centring, centring_by_number, centring_by_outer_product))]


@pytest.mark.parametrize(("function", "matrix"), tiered(PAIRS, [PAIRS[0], PAIRS[5], PAIRS[7]]))
def test_plans_are_as_exact_as_products_with_a_matrix_that_centres(function, matrix):
    n = 501
    own, plain = errors(lambda x, y: function(matrix(n), gauss(x), cauchy(y)), n, 2 * n * n)
    assert own <= 3 * max(plain, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1_200_000, 2_400_000])
def test_gradients_in_both_sets_of_points_fit_half_of_one_matrix(limit):
    """Where nothing fits with small values left whole, all values are computed in chunks."""
    own, plain = errors(jax.grad(lambda x, y: trace_of_four(centring(1001), gauss(x), cauchy(y)), (0, 1)), 1001, limit)
    assert own <= 3 * plain
