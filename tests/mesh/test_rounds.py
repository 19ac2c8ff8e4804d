"""What many devices pick is merged in rounds between pairs of them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize
from eqsat_mem.ir.ops import collectives
from eqsat_mem.ir.ops.collectives import ROUNDS_FROM, merge_top_k_in_rounds


def with_ties(shape, seed=0):
    """Integers with zeros of both signs, infinities and NaNs among them."""
    rng = np.random.default_rng(seed)
    odd = rng.choice(np.float32([-0.0, 0.0, np.inf, -np.inf, np.nan]), shape)
    return np.where(rng.random(shape) < 0.1, odd, rng.integers(-3, 4, shape).astype(np.float32))


@pytest.mark.parametrize("devices", [2, 8, 64])
@pytest.mark.parametrize("axis", [0, 1])
def test_merged_in_rounds_are_the_first_of_all_shares(devices, axis):
    x = with_ties((5, devices * 7), devices)
    own = partial(lax.top_k, k=3, axis=axis)

    def one(share):
        return merge_top_k_in_rounds(*own(share), share=7, names="x", devices=devices, axis=axis)

    shares = np.stack(np.split(x if axis else x.T, devices, axis=axis))
    values, places = jax.vmap(one, axis_name="x")(shares)
    expected = own(x if axis else x.T)
    for got, want in zip((values, places), expected, strict=True):
        for each in got:  # every device has them
            np.testing.assert_array_equal(each, want)
    np.testing.assert_array_equal(np.signbit(values[0]), np.signbit(expected[0]))


def neighbours(x, q):
    return lax.top_k(-jnp.sum((q[:, None] - x[None]) ** 2, -1), 5)


@pytest.mark.parametrize("mesh_shape", [(8,), (4, 2)])
def test_plans_in_rounds_find_the_first_of_equals(mesh_shape, monkeypatch):
    monkeypatch.setattr(collectives, "ROUNDS_FROM", 8)
    names = ("x", "y")[: len(mesh_shape)]
    mesh = jax.make_mesh(mesh_shape, names, axis_types=(AxisType.Auto,) * len(names))
    rng = np.random.default_rng(0)
    x, q = rng.integers(0, 3, (65536, 4)).astype(np.float32), rng.integers(0, 3, (64, 4)).astype(np.float32)
    f = optimize(neighbours, memory_limit="512KiB", mesh=mesh, in_shardings=(P(names), P()), out_shardings=P())
    plan = f.plan(x, q)
    assert {exchange.kind for exchange in plan.collectives} == {"ppermute"}
    assert plan.received_bytes == 3 * 64 * 5 * 8
    compiled = jax.jit(plan.function, in_shardings=plan.in_shardings).lower(x, q).compile()
    assert compiled.as_text().count("collective-permute(") + compiled.as_text().count("collective-permute-start(") == 2 * 3
    for got, expected in zip(f(x, q), jax.jit(neighbours)(x, q), strict=True):
        assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    ("devices", "kind", "shares"), [(ROUNDS_FROM, "ppermute", 6), (ROUNDS_FROM - 4, "all_gather", 59), (8, "all_gather", 7)]
)
def test_many_devices_receive_few_shares(devices, kind, shares):
    mesh = AbstractMesh((devices,), ("x",), axis_types=(AxisType.Auto,))
    x, q = (jax.ShapeDtypeStruct((n, 4), jnp.float32) for n in (960 * 256, 512))
    plan = optimize(neighbours, memory_limit="2MiB", mesh=mesh, in_shardings=(P("x"), P()), out_shardings=P(), device="cpu").plan(x, q)
    (exchange,) = plan.collectives
    assert exchange.kind == kind
    assert plan.received_bytes == shares * 512 * 5 * 8
