"""With the real planner: what the optimised function's derivatives and batched forms hold when compiled, and their values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqsat_mem import optimize
from eqsat_mem.backends.xla import held_bytes
from eqsat_mem.testing import same_values
from tests.tiers import tiered

N, LIMIT = 1500, 2**20  # the matrix of distances alone has 9 MB


def kernel(x, y, v):
    return jnp.exp(-0.5 * jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


def loss(x, y, v):
    return jnp.mean(kernel(x, y, v) ** 2)


def arguments(n=N):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((n, 3), (n, 3), (n,))]


TRANSFORMS = {
    "call": lambda f: f,
    "grad": lambda f: jax.grad(f, argnums=(0, 2)),
    "value_and_grad": lambda f: jax.value_and_grad(f),
    "jvp": lambda f: lambda x, y, v: jax.jvp(f, (x, y, v), (y, x, v)),
    "hessian-vector product": lambda f: lambda x, y, v: jax.jvp(lambda v: jax.grad(f, 2)(x, y, v), (v,), (v,))[1],
    "gradient of a gradient": lambda f: jax.grad(lambda *a: jnp.sum(jax.grad(f, 2)(*a) ** 2), 2),
    "vmap": lambda f: lambda x, y, v: jax.vmap(f, (None, None, 0))(x, y, jnp.stack([v, 2 * v])),
}


@pytest.mark.parametrize("name", tiered(TRANSFORMS, ["call", "grad", "vmap"]))
def test_transformed_functions_hold_no_more_than_the_limit(name):
    args = arguments()
    transformed = jax.jit(TRANSFORMS[name](optimize(loss, memory_limit=LIMIT)))
    assert held_bytes(transformed.lower(*args).compile()) <= 1.1 * LIMIT  # outside are outputs, and copies between the parts
    comparison = same_values(jax.jit(TRANSFORMS[name](loss)), transformed, args, tolerance=1e-3)
    assert comparison.same, comparison


def through_shard_map(f):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    rows, whole = jax.sharding.PartitionSpec("i"), jax.sharding.PartitionSpec()
    return jax.shard_map(f, mesh=mesh, in_specs=(rows, whole, whole), out_specs=rows)


PROGRAMS = {
    "scan": lambda f: lambda x, y, v: jax.lax.scan(lambda c, _: (f(x, y, c) / N, None), v, None, length=2)[0],
    "while": lambda f: lambda x, y, v: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(x, y, c[1]) / N), (0, v))[1],
    "cond": lambda f: lambda x, y, v: jax.lax.cond(v[0] > 0, f, lambda x, y, v: -f(x, y, v), x, y, v),
    "checkpoint": lambda f: jax.grad(lambda *a: jnp.sum(jax.checkpoint(f)(*a)), 2),
    "shard_map": through_shard_map,
    "gradient through shard_map": lambda f: jax.grad(lambda *a: jnp.sum(through_shard_map(f)(*a)), (0, 1, 2)),
    "optimize": lambda f: optimize(lambda *a: jnp.sin(f(*a)), memory_limit=LIMIT),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_of_a_plan_work_inside_other_programs(name):
    args = arguments()
    comparison = same_values(
        jax.jit(PROGRAMS[name](kernel)), jax.jit(PROGRAMS[name](optimize(kernel, memory_limit=LIMIT))), args, tolerance=1e-3
    )
    assert comparison.same, comparison


def test_all_gradients_of_a_kernel_product_fit():
    gradients = jax.grad(lambda *a: jnp.sum(optimize(kernel, memory_limit=LIMIT)(*a)), (0, 1, 2))
    assert held_bytes(jax.jit(gradients).lower(*arguments()).compile()) <= 1.1 * LIMIT
