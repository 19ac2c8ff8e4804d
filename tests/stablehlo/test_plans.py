"""A module has the plan that the function has which it was exported from: what lowering loses is found again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax

import eqsat_mem
from tests.tiers import tiered


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def distances(x, y):
    return jnp.sum((x[:, None] - y) ** 2, -1)


def product(x, y, v):
    return jnp.exp(-0.5 * distances(x, y)) @ v


def nearest(x, y):
    return jnp.argmin(distances(x, y), 1), lax.top_k(-distances(x, y), 5)


def transport(x, y):
    cost = distances(x, y)

    def step(duals, _):
        _, g = duals
        f = -jax.nn.logsumexp(g - cost, 1)
        return (f, -jax.nn.logsumexp(f[:, None] - cost, 0)), jnp.max(f)

    return lax.scan(step, (jnp.zeros(len(x)), jnp.zeros(len(y))), None, length=10)


def bound(x, z, y):
    factor = jnp.linalg.cholesky(jnp.exp(-0.5 * distances(z, z)) + 1e-3 * jnp.eye(len(z)))
    a = jax.scipy.linalg.solve_triangular(factor, jnp.exp(-0.5 * distances(z, x)), lower=True)
    return jnp.sum((a @ y) ** 2), a @ a.T


FUNCTIONS = {
    "product": (product, [f32(3000, 3), f32(3000, 3), f32(3000)], "2MiB"),
    "gradient": (jax.grad(lambda *args: jnp.sum(product(*args) ** 2)), [f32(3000, 3), f32(3000, 3), f32(3000)], "4MiB"),
    "attention": (lambda q, k, v: jax.nn.softmax(q @ k.mT / 8, -1) @ v, [f32(4, 1500, 64)] * 3, "8MiB"),
    "nearest": (nearest, [f32(3000, 3)] * 2, "2MiB"),
    "transport": (transport, [f32(2000, 3)] * 2, "2MiB"),
    "bound": (bound, [f32(20_000, 3), f32(100, 3), f32(20_000)], "4MiB"),
}


@pytest.mark.parametrize("name", tiered(FUNCTIONS, ["product"]))
def test_a_module_has_the_plan_of_its_function(name):
    function, arguments, limit = FUNCTIONS[name]
    read = eqsat_mem.from_stablehlo(export.export(jax.jit(function), platforms=["cpu"])(*arguments))
    direct, through = (eqsat_mem.optimize(f, memory_limit=limit, verify=False).plan(*arguments) for f in (function, read))
    assert through.loops
    assert through.original_peak_bytes == pytest.approx(direct.original_peak_bytes, rel=0.01)
    assert through.peak_bytes == pytest.approx(direct.peak_bytes, rel=0.05)
    assert through.predicted_s <= 1.3 * direct.predicted_s
