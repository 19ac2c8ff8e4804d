"""Pieces that are no turns of their loops: remainders, where chunks do not divide an extent, and chunks that are alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import eqsat_mem
from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.backends.gpu.targets import named
from eqsat_mem.options import Options
from eqsat_mem.pipeline import plan


def gauss(x: Array) -> Array:
    return jnp.exp(-jnp.sum((x[:, None] - x) ** 2, -1))


def balanced(x: Array, v: Array) -> Array:
    """Sums over rows and columns of one matrix, of which remainders of two loops have the distances in common."""
    k = gauss(x)
    rows = k @ v
    return (rows / jnp.sum(k, 1)) @ k


def propagated(x: Array, v: Array) -> Array:
    """Steps of a scan, none of which changes the matrix: the remainder of a loop in its body depends on no carry."""
    k = gauss(x)
    return lax.scan(lambda u, _: (jnp.tanh(k @ u), None), v, None, length=3)[0]


@pytest.mark.parametrize("function", [balanced, propagated])
@pytest.mark.parametrize("points", [701, 1001])
def test_what_pieces_have_in_common_is_not_held(function, points):
    x, v = (jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32) for shape in ((points, 3), (points,)))
    fast = eqsat_mem.optimize(function, memory_limit=points * points // 4, device="cpu")
    made = fast.plan(x, v)
    assert "lax.fori_loop(0, once, " in made.source
    assert made.compiled_peak_bytes <= 1.1 * made.peak_bytes
    np.testing.assert_allclose(fast(x, v), jax.jit(function)(x, v), rtol=1e-4, atol=1e-5)


def test_pieces_are_no_loops_of_their_own_where_a_loop_costs_a_wait():
    points = 1001
    avals = jax.ShapeDtypeStruct((points, 3), jnp.float32), jax.ShapeDtypeStruct((points,), jnp.float32)
    made = plan(
        jax.make_jaxpr(balanced)(*avals),
        Options(memory_limit=points * points // 4, verify=False),
        ["x", "v"],
        backend=GpuBackend.of(named("h100")),
    )
    assert "once" not in made.source
