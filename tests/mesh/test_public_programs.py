"""Every sample program, its gradient and its batched form on two devices: nothing crashes, and values are those of one device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import eqsat_mem
from eqsat_mem.egraph.soundness.sample_programs import PROGRAMS
from tests.tiers import tiered

# a value of more than 64 bytes is made in chunks, so that programs do not stay as they are
optimize = partial(eqsat_mem.optimize, memory_limit="1GiB", tensor_size_threshold=64, verify=False, max_rows=2_000, max_iterations=4)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def mesh():
    assert jax.device_count() == 2
    return Mesh(np.array(jax.devices()), ("x",))


def in_shares(mesh, args):
    """Arguments that lie along their first even axis, and whole ones."""
    axes = [next((k for k, n in enumerate(np.shape(a)) if n and n % 2 == 0), None) for a in args]
    specs = [P() if k is None else P(*[None] * k, "x") for k in axes]
    return tuple(jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True))


def whole(mesh, args):
    return tuple(jax.device_put(a, NamedSharding(mesh, P())) for a in args)


def agree(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        tolerance = 1e-6 if a.dtype == np.float64 else 1e-4
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def scalar(fun):
    """The sum of all floating results, smoothly."""
    return lambda *args: sum(jnp.sum(jnp.tanh(x)) for x in jax.tree.leaves(fun(*args)) if jnp.issubdtype(x.dtype, jnp.floating))


@pytest.mark.parametrize("lying", [in_shares, whole])
@pytest.mark.parametrize("name", tiered(PROGRAMS, [*PROGRAMS][::3], []))
def test_a_program(name, lying, mesh):
    fun, args = PROGRAMS[name]
    agree(optimize(fun)(*lying(mesh, args)), jax.jit(fun)(*args))


@pytest.mark.parametrize("name", tiered(PROGRAMS, [*PROGRAMS][1::3], []))
def test_its_gradient(name, mesh):
    fun, args = PROGRAMS[name]
    every = tuple(range(len(args)))
    agree(jax.grad(scalar(optimize(fun)), every)(*in_shares(mesh, args)), jax.jit(jax.grad(scalar(fun), every))(*args))


@pytest.mark.parametrize("name", tiered(PROGRAMS, [*PROGRAMS][2::3], []))
def test_its_batched_form(name, mesh):
    fun, args = PROGRAMS[name]
    args = tuple(np.stack([a, 0.9 * a]) for a in args)
    agree(jax.vmap(optimize(fun))(*in_shares(mesh, args)), jax.jit(jax.vmap(fun))(*args))


def nearest(x, q):
    return lax.top_k(-jnp.sum((q[:, None] - x[None]) ** 2, -1), 3)


def test_a_search_over_shares_that_ended_the_process(mesh):
    x, q = np.random.default_rng(0).standard_normal((2, 4096, 4)).astype(np.float32)
    q = q[:64]
    found = eqsat_mem.optimize(nearest, memory_limit="512KiB")(jax.device_put(x, NamedSharding(mesh, P("x"))), q)
    want = jax.jit(nearest)(x, q)
    assert np.array_equal(found[1], want[1])
    np.testing.assert_allclose(found[0], want[0], rtol=1e-5, atol=1e-5)


def test_a_search_inside_shard_map_that_ended_the_process(mesh):
    x, q = np.random.default_rng(0).standard_normal((2, 4096, 4)).astype(np.float32)
    local = eqsat_mem.optimize(nearest, memory_limit="256KiB")
    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x")))(x, q[:64])
    assert np.array_equal(found[1], jax.jit(nearest)(x, q[:64])[1])


def test_two_shardings_have_plans_of_their_own(mesh):
    x = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
    f = optimize(lambda x: jnp.exp(-jnp.sum((x[:, None] - x[None]) ** 2, -1)) @ x)
    rows, columns, both = (jax.device_put(x, NamedSharding(mesh, spec)) for spec in (P("x"), P(None), P()))
    plans = [f.plan(a) for a in (rows, columns, x)]
    assert [plan.in_specs for plan in plans] == [[P("x", None)], [P(None, None)], []]
    for a in (rows, columns, both, x):
        agree(f(a), jax.jit(f.__wrapped__)(x))
