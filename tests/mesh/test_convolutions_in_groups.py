"""Convolutions in groups, of features or of networks that are mapped, where devices have groups or examples in shares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize
from tests.oracles.collectives import collectives
from tests.tiers import tiered

NHWC = ("NHWC", "HWIO", "NHWC")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def temporaries(function, *args):
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


def close(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-4 * float(np.max(np.abs(other))))


def step(groups):
    """The gradients of a convolution in groups, and what is left of its operand."""

    def both(x, w):
        def loss(x, w):
            return jnp.sum(jnp.tanh(lax.conv_general_dilated(jnp.sin(x), w, (1, 1), "SAME", None, None, NHWC, groups)) ** 2)

        return jax.grad(loss, (0, 1))(x, w)

    return both


@pytest.mark.parametrize("seed", tiered(range(10), range(2)))
def test_features_or_examples_may_be_in_shares(mesh, seed):
    rng = np.random.default_rng(seed)
    groups, own, out = int(rng.choice([2, 8, 12, 16])), int(rng.integers(1, 3)), int(rng.integers(1, 3))
    x = rng.standard_normal((8, 6, 6, groups * own), np.float32)
    w = rng.standard_normal((3, 3, own, groups * out), np.float32)
    ins = [(P("x"), P()), (P(None, None, None, "x"), P()), (P(None, None, None, "x"), P(None, None, None, "x"))]
    spread = [k for k in range(3) if k == 0 or all(n % 8 == 0 for n in (groups * own, groups * out))]
    placed = ins[int(rng.choice(spread))]
    f = optimize(
        step(groups), memory_limit=x.nbytes + w.nbytes + temporaries(step(groups), x, w) // 4,
        mesh=mesh, in_shardings=placed, out_shardings=placed,
    )  # fmt: skip
    close(f(x, w), jax.jit(step(groups))(x, w))


def test_devices_with_some_of_the_networks_exchange_nothing(mesh):
    rng = np.random.default_rng(3)
    kernels = [rng.standard_normal((16, 3, 3, a, b), np.float32) / 3 for a, b in ((3, 8), (8, 8))]
    x, y = rng.standard_normal((8, 12, 12, 3), np.float32), rng.standard_normal((8, 8), np.float32)

    def loss(kernels, x, y):
        for w in kernels:
            x = jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC))
        return jnp.mean((x.mean((1, 2)) - y) ** 2)

    def trained(kernels, x, y):
        slopes = jax.vmap(jax.grad(loss), (0, None, None))(kernels, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, kernels, slopes)

    limit = sum(a.nbytes for a in (*kernels, x, y)) + temporaries(trained, kernels, x, y) // 32
    f = optimize(trained, memory_limit=limit, mesh=mesh, in_shardings=(P("x"), P(), P()), out_shardings=P("x"))
    assert collectives(f.lower(kernels, x, y).compile().as_text(), 8) == {}
    close(f(kernels, x, y), jax.jit(trained)(kernels, x, y))
