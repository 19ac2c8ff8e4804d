"""Random bits on a GPU: made where they are read, as predicted and as compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from eqsat_mem.backends.gpu import deviceless
from tests.backends.test_gpu_deviceless import compiler
from tests.backends.test_gpu_siblings import H100, predicted

N = 4096
GIVEN = [jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((N, N), jnp.float32)]


def normal(key, x):
    return jax.random.normal(jax.random.wrap_key_data(key), x.shape)


def dropped(key, x):
    return jnp.where(jax.random.bernoulli(jax.random.wrap_key_data(key), 0.9, x.shape), x / 0.9, 0.0)


def weighted(key, x):
    return (normal(key, x) * x).sum(1)


def read_twice(key, x):
    """By two folds: written once."""
    z = normal(key, x)
    return (z * x).sum(1), (z * z).sum(0)


def before_a_product(key, x):
    return normal(key, x) @ x


def antithetic(key, x):
    z = normal(key, x)
    return (jnp.exp(z) + jnp.exp(-z)).mean(0)


def drawn(key, x):
    return jax.random.categorical(jax.random.wrap_key_data(key), x, shape=(16, N))


def noisy(key, x):
    return jax.grad(lambda x: jnp.sum(jnp.tanh(x + 0.1 * normal(key, x)) ** 2))(x)


def of_two_keys(key, x):
    first, second = jax.random.split(jax.random.wrap_key_data(key))
    return jax.random.uniform(first, x.shape) * x + jax.random.normal(second, x.shape)


def ordered(key, x):
    return jnp.sort(normal(key, x), -1)


SQUARES = {
    dropped: 2,
    weighted: 1,
    read_twice: 2,
    before_a_product: 3,
    antithetic: 2,
    drawn: 1,
    noisy: 2,
    of_two_keys: 2,
    ordered: 3,
}
"""Programs with the squares that each holds, the argument and results among them: read from compiled programs."""


@pytest.mark.parametrize("function", SQUARES)
def test_squares_that_are_predicted(function):
    assert predicted(function, GIVEN) == pytest.approx(SQUARES[function] * 4 * N * N, rel=0.03)


@compiler
@pytest.mark.parametrize("function", SQUARES)
def test_squares_that_are_held(function):
    held = deviceless.compile_for(function, GIVEN, H100, settings=["triton"]).held_bytes
    assert held == pytest.approx(SQUARES[function] * 4 * N * N, rel=0.03)
