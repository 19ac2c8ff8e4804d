"""Where a function says how values inside of it lie, the planner places them: values are what they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize

N = 256
TWO = (AxisType.Auto,) * 2


@pytest.fixture(scope="module")
def grid():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=TWO)


def lies(x, mesh, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def layers(x, w, mesh):
    y = lies(jax.nn.relu(x @ w), mesh, "data", "model")
    k = lies(y @ y.T, mesh, "data", "model")
    return jnp.sum(jax.nn.softmax(k, -1) * k, -1)


def steps(x, w, mesh):
    def step(y, _):
        y = lies(jnp.tanh(y @ w), mesh, "data", "model")
        return y, jnp.sum(lies(jnp.exp(-((y[:, None] - y[None]) ** 2)), mesh, "model", None, "data"))

    return lax.scan(step, x, None, length=3)[1]


def branches(x, w, mesh):
    def inner(x):
        return lies(jnp.exp(x @ x.T), mesh, None, "data") @ x

    return jnp.sum(lax.cond(w[0, 0] > 0, inner, lambda x: jax.device_put(x @ w, NamedSharding(mesh, P("model"))), x), 1)


def until(x, w, mesh):
    return jnp.sum(lax.while_loop(lambda c: jnp.max(lies(c, mesh, "data")) < 3, lambda c: lies(c + jnp.abs(c @ w), mesh, "model"), x), 1)


def gradient(x, w, mesh):
    return jnp.sum(jax.grad(lambda x: jnp.sum(steps(x, w, mesh)))(x), 1)


@pytest.mark.parametrize("fun", [layers, steps, branches, until, pytest.param(gradient, marks=pytest.mark.slow)])
def test_constraints_inside_leave_values_as_they_are(fun, grid):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((N, 16)).astype(np.float32), 0.3 * rng.standard_normal((16, 16)).astype(np.float32)

    def program(x, w):
        return fun(x, w, grid)

    out = P("data") if fun is not steps else P()
    f = optimize(program, memory_limit="160KiB", mesh=grid, in_shardings=(P("data"), P(None, "model")), out_shardings=out)
    expected = jax.jit(program)(x, w)
    np.testing.assert_allclose(f(x, w), expected, rtol=2e-5, atol=1e-5 * np.abs(expected).max())


def test_a_plan_on_a_mesh_holds_no_constraint(grid):
    def program(x, w):
        return layers(x, w, grid)

    shapes = jax.ShapeDtypeStruct((8 * N, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    plan = optimize(program, memory_limit="2MiB", mesh=grid, in_shardings=(P("data"), P()), out_shardings=P("data")).plan(*shapes)
    assert not plan.unchanged
    assert "sharding_constraint" not in plan.source
    pod = AbstractMesh((4, 2), ("data", "model"), axis_types=TWO)
    far = optimize(program, memory_limit="2MiB", mesh=pod, in_shardings=(P("data"), P()), out_shardings=P("data"), device="cpu")
    assert far.plan(*shapes).source == plan.source
