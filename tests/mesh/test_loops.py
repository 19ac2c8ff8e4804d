"""Loops and branches on meshes: bodies in shares compute what one device does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize

S, R, N = P("x"), P(), 1024


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


@pytest.fixture(scope="module")
def points():
    return np.random.default_rng(0).standard_normal((2, N, 3)).astype(np.float32)


def distances(x, y):
    return jnp.sum((x[:, None] - y[None]) ** 2, -1)


def sinkhorn(x, y):
    def step(carry, _):
        f, g = carry
        f = -0.5 * jax.nn.logsumexp((g[None] - distances(x, y)) / 0.5, axis=1)
        g = -0.5 * jax.nn.logsumexp((f[:, None] - distances(x, y)) / 0.5, axis=0)
        return (f, g), jnp.mean(f)

    (f, g), means = lax.scan(step, (jnp.zeros(len(x)), jnp.zeros(len(y))), None, length=4)
    return f, jnp.mean(g), means


def conjugate_gradients(x, b):
    """Kernel ridge regression, until the residual is small."""

    def product(v):
        return jnp.exp(-0.5 * distances(x, x)) @ v + 10.0 * v

    def step(state):
        a, r, p, k = state
        q = product(p)
        alpha = (r @ r) / (p @ q)
        new = r - alpha * q
        return a + alpha * p, new, new + (new @ new) / (r @ r) * p, k + 1

    start = jnp.zeros_like(b), b, b, 0
    return lax.while_loop(lambda state: (state[1] @ state[1] > 1e-2) & (state[3] < 20), step, start)[0]


def branching(x, y):
    return lax.cond(jnp.sum(x) > 0, lambda a, b: jnp.exp(-distances(a, b)) @ b, lambda a, b: -jnp.exp(-distances(a, b)) @ b, x, y)


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("specs", [(S, S), (S, R), (R, R)])
@pytest.mark.parametrize("function", [sinkhorn, branching])
def test_loops_and_branches_under_a_limit_that_no_whole_body_fits(function, specs, mesh, points):
    f = optimize(function, memory_limit="320KiB", mesh=mesh, in_shardings=specs)
    plan = f.plan(*points)
    assert plan.compiled_peak_bytes <= 320 * 1024 < N * N * 4
    same(f(*points), jax.jit(function)(*points))


def test_a_loop_until_something_is_small(mesh, points):
    x, b = points[0], points[1][:, 0]
    f = optimize(conjugate_gradients, memory_limit="256KiB", mesh=mesh, in_shardings=S, out_shardings=S)
    same(f(x, b), jax.jit(conjugate_gradients)(x, b))
    assert f.plan(x, b).collectives


def test_gradients_through_a_loop(mesh, points):
    def loss(x, y):
        return jnp.mean(sinkhorn(x, y)[0])

    f = optimize(jax.grad(loss, (0, 1)), memory_limit="1MiB", mesh=mesh, in_shardings=S, out_shardings=S, verify=False)
    same(f(*points), jax.jit(jax.grad(loss, (0, 1)))(*points))


def test_a_carry_in_shares_stays_in_shares(mesh):
    def smoothed(x):
        def step(c, _):
            return jnp.tanh(jnp.sum(jnp.exp(-((c[:, :, None] - c[:, None]) ** 2)), -1)), None

        return lax.scan(step, x, None, length=3)[0]

    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    f = optimize(smoothed, memory_limit="256KiB", mesh=mesh, in_shardings=S, out_shardings=S)
    plan = f.plan(x)
    assert not plan.collectives
    assert plan.compiled_peak_bytes <= 256 * 1024
    same(f(x), jax.jit(smoothed)(x))


def test_a_diagonal_of_an_argument_in_shares(mesh):
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)

    def traced(x):
        return jnp.einsum("ii->i", x) * jnp.sum(jnp.exp(-((x[:, None] - x[None]) ** 2)), (0, 2))

    same(optimize(traced, memory_limit="192KiB", mesh=mesh, in_shardings=S)(x), jax.jit(traced)(x))


@pytest.mark.parametrize("bins", [20, 33])
def test_a_loop_that_exchanges_nothing_runs_on_chunks_of_its_shares(bins, mesh, points):
    """Each distance finds its bin in a scan: shares of all distances are carried, or those of a few points at a time."""

    def counts(x):
        return jnp.histogram(jnp.sqrt(distances(x, x) + 1e-3), jnp.linspace(0, 5, bins + 1))[0]

    x = np.round(points[0] * 8) / 8  # sums of few bits: no distance is rounded
    fast = optimize(counts, memory_limit="300KiB", mesh=mesh, in_shardings=(S,))
    assert fast.plan(x).compiled_peak_bytes <= 300 * 1024  # a share of all distances takes 512
    np.testing.assert_array_equal(np.asarray(fast(x)), np.asarray(jax.jit(counts)(x)))


@pytest.mark.parametrize("lie", [(S, R), (S, S), (R, R)])
def test_a_search_in_a_sorted_table_runs_on_chunks_of_shares(lie, mesh):
    """Its program is the same text whether the loop is planned for shares or runs on chunks of them."""

    def interpolated(x, table):
        return jnp.interp(x, table[:, 0], table[:, 1])

    rng = np.random.default_rng(0)
    x, table = rng.standard_normal(2**18).astype(np.float32), np.sort(rng.standard_normal((256, 2)).astype(np.float32), 0)
    f = optimize(interpolated, memory_limit="320KiB", mesh=mesh, in_shardings=lie, out_shardings=S)
    if lie[0] == R:
        f = optimize(interpolated, memory_limit="1280KiB", mesh=mesh, in_shardings=lie, out_shardings=S)
    assert not f.plan(x, table).unchanged
    np.testing.assert_allclose(f(x, table), jax.jit(interpolated)(x, table), rtol=1e-5, atol=1e-5)
