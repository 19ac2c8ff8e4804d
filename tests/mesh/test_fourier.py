"""Fourier transforms along axes that lie in shares: one axis at a time, and shares of one axis for those of another between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize

N = 256
"""Extents are equal, so that axes taken for each other would not be seen in shapes."""


def on(shape, names):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def poisson(x):
    k = jnp.arange(N, dtype=jnp.float32)
    return jnp.fft.ifft2(jnp.fft.fft2(x) / (1 + k[:, None] ** 2 + 2 * k[None])).real


def filtered(x):
    return jnp.fft.irfft2(jnp.fft.rfft2(x) * jnp.arange(N // 2 + 1), x.shape[-2:])


def transposed(x):
    return jnp.abs(jnp.fft.fft2(x)) + x.T


def volume(x):
    return jnp.fft.ifftn(jnp.fft.fftn(x) * jnp.arange(x.shape[2])).real


SQUARE, MATRICES, CUBE = (N, N), (4, N, N), (64, 64, 64)
S, T = P("x"), P(None, "x")
CASES = {
    "spectrum": (jnp.fft.fft2, SQUARE, S, S, 2.0),
    "to columns": (lambda x: jnp.abs(jnp.fft.fft2(x)), SQUARE, S, T, 1.0),
    "solver": (poisson, SQUARE, S, S, 1.5),
    "columns solved": (poisson, SQUARE, T, T, 1.5),
    "half spectrum": (filtered, SQUARE, S, S, 1.8),
    "of many": (filtered, MATRICES, T, T, 1.0),
}
"""Functions, how their argument and result lie, and the limit over the bytes of all of the argument, which is real."""


def agrees(fun, x, mesh, given, left, limit):
    f = optimize(fun, memory_limit=limit, mesh=mesh, in_shardings=given, out_shardings=left)
    got, expected = f(x), jax.jit(fun)(x)
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())
    assert not f.plan(x).unchanged
    return f.plan(x)


@pytest.mark.parametrize("name", CASES)
def test_transforms_in_shares_have_the_values_of_one_device(name):
    fun, shape, given, left, room = CASES[name]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    agrees(fun, x, on((8,), ("x",)), given, left, int(room * x.nbytes))


@pytest.mark.slow
@pytest.mark.parametrize("given", [P("x", "y"), P("y", None, "x"), P(("x", "y"))])
def test_transforms_of_three_axes_on_two(given):
    x = np.random.default_rng(0).standard_normal(CUBE).astype(np.float32)
    agrees(volume, x, on((4, 2), ("x", "y")), given, given, int(1.5 * x.nbytes))


def test_a_transform_beside_its_transpose_stays_whole():
    x = np.random.default_rng(0).standard_normal(SQUARE).astype(np.float32)
    f = optimize(transposed, memory_limit=5 * x.nbytes, mesh=on((8,), ("x",)), in_shardings=S, out_shardings=S)
    np.testing.assert_allclose(f(x), jax.jit(transposed)(x), rtol=1e-4, atol=1e-3)


def test_no_device_holds_the_whole_of_what_is_transformed():
    x = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)

    def solved(x):
        k = jnp.arange(512, dtype=jnp.float32)
        return jnp.fft.ifft2(jnp.fft.fft2(x) / (1 + k[:, None] ** 2 + 2 * k[None])).real

    share = 8 * x.size // 8
    plan = agrees(solved, x, on((8,), ("x",)), S, S, 6 * share)
    assert plan.compiled_peak_bytes <= 6 * share
    assert {sent.kind for sent in plan.collectives} == {"all_to_all"}
    assert plan.received_bytes <= 2 * share
