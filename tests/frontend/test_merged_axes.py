"""Blocks along axes that a reshape has merged are computed in pieces along each of the merged ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem

B, T, K = 37, 41, 53
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((B, 1, 4), np.float32), RNG.standard_normal((1, T, 4), np.float32)
W = RNG.standard_normal((4, K), np.float32)
TABLE = RNG.standard_normal((13, 4), np.float32)


def logits(x, y, w):
    """Rows for each pair, as one axis."""
    return (jnp.tanh(x + y) @ w).reshape(B * T, K)


def sorted_rows(x, y, w):
    return jnp.sort(logits(x, y, w), 1)[:, ::7].sum(0)


def picked(x, y, w):
    values, places = lax.top_k(logits(x, y, w), 3)
    return values.reshape(B, T, 3).max(1), places.sum(0)


def running(x, y, w):
    return jnp.cumsum(logits(x, y, w), 1).max(0)


def stacked(x, y, w):
    flat = logits(x, y, w)
    return jnp.stack([flat, flat * flat], -1).sum((0, 1))


def looked_up(x, y, w):
    places = jnp.argmax(logits(x, y, w), 1) % 13
    return (jnp.asarray(TABLE)[places] * jnp.tanh(x + y).reshape(B * T, 4)).sum(0)


def transforms(x, y, w):
    return jnp.abs(jnp.fft.rfft(logits(x, y, w))).mean(0)


def moved(x, y, w):
    flat = logits(x, y, w)
    return (jnp.roll(flat, 1, axis=1) * jnp.concatenate([flat[:, 5:], flat[:, :5]], 1)).sum(1).reshape(B, T)


@pytest.mark.parametrize("fun", [sorted_rows, picked, running, stacked, looked_up, transforms, moved], ids=lambda fun: fun.__name__)
def test_a_merged_axis_is_taken_apart_again(fun):
    rows = 4 * B * T * K
    fast = eqsat_mem.optimize(fun, memory_limit=rows // 2, without_rules="components-apart")  # no loop is needed for `stacked` with it
    plan = fast.plan(X, Y, W)
    assert plan.loops
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4), fast(X, Y, W), fun(X, Y, W))
