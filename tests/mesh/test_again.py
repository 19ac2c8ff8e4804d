"""Whether a value is gathered or computed once more: devices receive no more for it than the value has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize

S, R = P("x"), P()
ROWS, COLUMNS = 1024, 1024
BYTES = 4 * ROWS * COLUMNS


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def spectrum(x):
    """Half of the numbers are not there once absolute values are taken."""
    return jnp.abs(jnp.fft.fft(x, axis=1))


def of_two(x, y):
    """One matrix made of two is gathered, not both."""
    return jnp.sin(x) * jnp.cos(y)


def of_numbers(x):
    """What positions alone say is gathered nowhere."""
    return jnp.sin(x) * jnp.arange(ROWS, dtype=jnp.float32)[:, None]


@pytest.mark.parametrize(("fun", "arguments"), [(spectrum, 1), (of_two, 2), (of_numbers, 1)])
def test_devices_receive_no_more_than_the_value_has(fun, arguments, mesh):
    args = [np.random.default_rng(k).standard_normal((ROWS, COLUMNS)).astype(np.float32) for k in range(arguments)]
    f = optimize(fun, memory_limit=int(2.5 * BYTES), mesh=mesh, in_shardings=S, out_shardings=R)
    assert f.plan(*args).received_bytes <= 7 / 8 * BYTES
    expected = jax.jit(fun)(*args)
    np.testing.assert_allclose(f(*args), expected, atol=1e-5 * np.abs(expected).max())
