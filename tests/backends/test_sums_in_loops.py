"""Sums of several gradients in one loop: XLA:CPU adds each chunk's as soon as it is there, and holds no more of them at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqsat_mem import optimize
from eqsat_mem.backends.xla import compiled_peak

LAYERS, WIDTH, ROWS = 4, 256, 4096


def step(weights, x, y):
    def loss(w):
        h = x
        for a in w:
            h = jnp.tanh(h @ a)
        return jnp.mean((h - y) ** 2)

    return jax.grad(loss)(weights)


SHAPES = jax.eval_shape(lambda: ([jnp.zeros((WIDTH, WIDTH))] * LAYERS, jnp.zeros((ROWS, WIDTH)), jnp.zeros((ROWS, WIDTH))))


@pytest.mark.slow
def test_gradients_of_several_layers_are_summed_in_a_loop_that_holds_one_at_a_time():
    fixed = 4 * (2 * LAYERS * WIDTH**2 + 2 * ROWS * WIDTH)
    f = optimize(step, memory_limit=fixed + 2 * 4 * WIDTH**2)
    plan = f.plan(*SHAPES)
    assert plan.compiled_peak_bytes <= 1.02 * plan.peak_bytes <= 1.02 * plan.limit_bytes
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda a: rng.standard_normal(a.shape, np.float32) / 16, SHAPES)
    for got, want in zip(f(*args), jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-7)


def in_a_loop(x, *weights):
    def turn(k, sums):
        h, rows = jax.lax.dynamic_slice_in_dim(x, 16 * k, 16), []
        for w in weights:
            rows.append(h)
            h = jnp.tanh(h @ w)
        slope, found = h, []
        for w, r in zip(weights[::-1], rows[::-1], strict=True):
            slope = slope * (1 - r * r)
            found.append(r.T @ slope)
            slope = slope @ w.T
        return [s + g for s, g in zip(sums, found[::-1], strict=True)]

    return jax.lax.fori_loop(0, 8, turn, [jnp.zeros((WIDTH, WIDTH))] * len(weights))


@pytest.mark.parametrize("layers", [2, 6])
def test_xla_adds_each_gradient_as_soon_as_it_is_there(layers):
    x, weights = jax.ShapeDtypeStruct((128, WIDTH), jnp.float32), [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * layers
    matrix = 4 * WIDTH**2
    held, _ = compiled_peak(in_a_loop, [x, *weights])
    held -= 4 * 128 * WIDTH + 2 * layers * matrix
    assert held <= 1.75 * matrix
