"""Slices at computed positions of an axis in shares: devices send the rows that are read, and not all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize
from tests.oracles.row_slices import sliced
from tests.oracles.stencils import failure
from tests.tiers import tiered

N, WIDTH = 4096, 8
S, R = P("x"), P()


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def farthest(x):
    """Each point is the farthest one from those before."""

    def step(d, _):
        k = jnp.argmax(d)
        return jnp.minimum(d, jnp.sum((x - x[k]) ** 2, -1)), k

    return lax.scan(step, jnp.full(len(x), 1e9), None, length=6)


def batches(x):
    """Steps of a stochastic gradient on rows in a row."""

    def step(k, w):
        part = lax.dynamic_slice_in_dim(x, 600 * k, 512)
        return w - 0.01 * part.T @ jnp.tanh(part @ w)

    return lax.fori_loop(0, 8, step, jnp.ones(WIDTH))


def beyond(x):
    """Slices begin where all of them is there, however far their positions are."""

    def step(c, k):
        places = jnp.asarray([-5, -1, 0, N - 1, N, 2 * N, 77], jnp.int32)
        part = lax.dynamic_slice(x, (places[k], 0), (3, WIDTH))
        row = lax.dynamic_index_in_dim(x, places[k], 0, keepdims=False)
        return c + jnp.sum(jnp.sin(part), 0) * row, jnp.sum(lax.dynamic_index_in_dim(x, places[k] % WIDTH, 1))

    return lax.scan(step, jnp.zeros(WIDTH), jnp.arange(7))


def gradient(x):
    """What is read of a slice goes back to its rows."""

    def loss(x):
        return jnp.sum(lax.scan(lambda c, k: (c, jnp.prod(lax.dynamic_slice_in_dim(x, k, 2), 0)), 0.0, jnp.arange(5) * 900)[1])

    return jax.grad(loss)(x)


def caches(x):
    """Rows are written one after the other, and all are read after each."""

    def step(c, k):
        cache, q = c
        cache = lax.dynamic_update_slice(cache, jnp.cos(q)[None], (k * 700, 0))
        cache = cache.at[k * 3 + 1].set(q)
        return (cache, jnp.tanh(jax.nn.softmax(cache @ q) @ cache)), q

    (cache, _), every = lax.scan(step, (x, x[5]), jnp.arange(6))
    return cache, every


def overwritten(x):
    """Several rows in a row, some of them beyond the end, where the slice ends with the last row."""
    places = jnp.asarray([-5, 0, N - 2, N, 2 * N, 77, 509, 510], jnp.int32)

    def step(k, x):
        return lax.dynamic_update_slice_in_dim(x, x[:5] * 0.5 + k, places[k], 0)

    return lax.fori_loop(0, 8, step, x), lax.dynamic_update_slice(x.T, x[:4].T * 2, (0, places[5]))


CASES = {
    "caches": (caches, (S, R)),
    "overwritten": (overwritten, (S, P(None, "x"))),
    "farthest": (farthest, (S, R)),
    "batches": (batches, R),
    "beyond": (beyond, (R, R)),
    "gradient": (gradient, S),
}


@pytest.mark.parametrize("dtype", tiered(["float32", "bfloat16"], ["float32"]))
@pytest.mark.parametrize("name", CASES)
def test_rows_of_slices_are_those_of_one_device(name, dtype, mesh):
    fun, out = CASES[name]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((N, WIDTH)), dtype)
    f = optimize(fun, memory_limit=N * 4 * WIDTH, mesh=mesh, in_shardings=S, out_shardings=out)
    for got, expected in zip(jax.tree.leaves(f(x)), jax.tree.leaves(jax.jit(fun)(x)), strict=True):
        if expected.dtype.kind in "iu":
            np.testing.assert_array_equal(got, expected)
        else:
            np.testing.assert_allclose(np.float32(got), np.float32(expected), rtol=2e-2 if dtype == "bfloat16" else 1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "rows"), [("farthest", 6 * 2), ("batches", 8 * 512 * 2), ("caches", 6 * 4)])
def test_devices_receive_rows_and_not_the_table(name, rows, mesh):
    fun, out = CASES[name]
    x = jax.ShapeDtypeStruct((64 * N, WIDTH), jnp.float32)
    plan = optimize(fun, memory_limit="7MiB", mesh=mesh, in_shardings=S, out_shardings=out).plan(x)
    assert plan.received_bytes <= (rows + 16) * 4 * WIDTH


@pytest.mark.parametrize("block", tiered(range(12), [], [0, 1]))
def test_plans_of_random_slices_compute_the_same(block):
    with jax.enable_x64(True):
        for seed in range(3 * block, 3 * block + 3):
            assert (found := failure(seed, seed % 4 == 0, sliced)) is None, found
