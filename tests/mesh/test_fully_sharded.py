"""Training steps whose parameters lie in shares: weights are gathered where they are used, and gradients summed to shares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize
from tests.oracles.collectives import collectives

S, T, R = P("x"), P(None, "x"), P()
LAYERS, WIDTH, ROWS = 8, 256, 2048


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def written(params, x, y):
    def loss(p):
        h = x
        for w in p:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - y) ** 2)

    value, slope = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, slope)


def scanned(params, x, y):
    def loss(p):
        return jnp.mean((lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0] - y) ** 2)

    value, slope = jax.value_and_grad(loss)(params)
    return value, params - 1e-3 * slope


BATCH = (f32(ROWS, WIDTH),) * 2
STEPS = {
    "written": (written, ([f32(WIDTH, WIDTH)] * LAYERS, *BATCH), (S, S, S), (R, S), 4.6),
    "scanned": (scanned, (f32(LAYERS, WIDTH, WIDTH), *BATCH), (T, S, S), (R, T), 6.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_steps_with_parameters_in_shares_receive_no_more_than_under_jit(name):
    function, shapes, ins, outs, limit = STEPS[name]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def received(compiled):
        return sum(count for _, count in collectives(compiled.as_text(), 8).values())

    def placed(specs):
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda spec: isinstance(spec, P))

    plain = jax.jit(function, in_shardings=placed(ins), out_shardings=placed(outs)).lower(*shapes).compile()
    f = optimize(function, memory_limit=int(limit * 2**20), mesh=mesh, in_shardings=ins, out_shardings=outs)
    plan = f.plan(*shapes)
    assert not plan.unchanged
    assert plan.compiled_peak_bytes <= limit * 2**20
    assert plan.compiled_peak_bytes <= 1.15 * plan.peak_bytes
    assert received(f.lower(*shapes).compile()) <= 1.05 * received(plain)
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(np.float32) / 16, shapes)
    for got, want in zip(jax.tree.leaves(f(*args)), jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
