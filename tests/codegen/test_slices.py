"""Slices that loops read: XLA:CPU takes long for one that a kernel repeats along two axes, so that each way has its own."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.backends.gpu.targets import named
from eqsat_mem.egraph.extract import original
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Fold
from eqsat_mem.options import Options
from eqsat_mem.pipeline import plan

RNG = np.random.default_rng(5)


def f32(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def pairs(s, t):
    d = s[:, :, None] - s[:, None, :]
    return jnp.sum(jnp.exp(-jnp.abs(d)) * (t[:, :, None] > t[:, None, :]))


def triples(s):
    return jnp.sum(jnp.tanh(s[:, :, None, None] + s[:, None, :, None] * s[:, None, None, :]))


def one_way(s, t):
    return jnp.sum(jnp.exp(-jnp.abs(s[:, :, None] - t[:, None, :])))


@pytest.mark.parametrize(
    ("function", "shapes", "limit", "second", "third"),
    [
        (pairs, [(31, 60)] * 2, 120_000, 2, 0),
        (triples, [(300, 6)], 60_000, 1, 1),
        (one_way, [(31, 60)] * 2, 120_000, 0, 0),
    ],
)
def test_each_way_of_reading_has_a_slice_of_its_own(function, shapes, limit, second, third):
    args = [f32(*shape) for shape in shapes]
    gradient = jax.value_and_grad(function)
    planned = eqsat_mem.optimize(gradient, memory_limit=limit)
    source = planned.plan(*args).source
    assert "fori_loop" in source
    assert (source.count(", 0), size_"), source.count(", -1), size_")) == (second, third)
    for mine, theirs in zip(jax.tree.leaves(planned(*args)), jax.tree.leaves(gradient(*args)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def running(s, t):
    return jnp.sum(jnp.cumsum(jnp.exp(-jnp.abs(s[:, :, None] - s[:, None])), -1) * t[:, None], -1)


@pytest.mark.parametrize(("own", "slices"), [(CpuBackend.built_in(), 1), (GpuBackend.of(named("h100")), 0)], ids=["cpu", "gpu"])
def test_other_compilers_read_one_slice(own, slices):
    avals = [jax.ShapeDtypeStruct((64, 256), jnp.float32)] * 2
    made = plan(jax.make_jaxpr(running)(*avals), Options(memory_limit="2MB", verify=False), "st", "f", own)
    assert "fori_loop" in made.source
    assert made.source.count("jnp.maximum(start") == slices


def written_out(function, *shapes):
    """The folds that are written out on a CPU, and those that may be."""
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    ex = original(load(jax.make_jaxpr(function)(*avals), [f"x{k}" for k in range(len(avals))]), load_rules())
    emitted = CpuBackend.built_in().as_emitted(ex)
    return tuple(sum(isinstance(ex.program.terms[t], Fold) for t in some.unrolls) for some in (emitted, ex))


def triplets(x):
    d = jnp.sum((x[:, None] - x) ** 2, -1)
    return jnp.sum(jnp.maximum(d[:, :, None] - d[:, None] + 1.0, 0.0), (1, 2))


def through_cheap_values(x):
    d = 2.0 * jnp.sum((x[:, None] - x) ** 2, -1) + 1.0
    return jnp.sum(jnp.maximum(d[:, :, None] - d[:, None], 0.0), (1, 2))


def behind_a_function(x):
    d = jnp.exp(-jnp.sum((x[:, None] - x) ** 2, -1))
    return jnp.sum(jnp.maximum(d[:, :, None] - d[:, None], 0.0), (1, 2))


def forces(x):
    d = x[:, None] - x
    return jnp.sum(d / jnp.sum(d**2, -1, keepdims=True) ** 2, 1)


@pytest.mark.parametrize(
    ("function", "shape", "kept"),
    [(triplets, (90, 6), True), (through_cheap_values, (90, 6), True), (behind_a_function, (90, 6), False), (forces, (300, 3), False)],
)
def test_folds_are_not_written_out_where_readers_repeat_their_elements(function, shape, kept):
    assert written_out(function, shape) == ((0, 1) if kept else (1, 1))


def test_a_loss_of_triplets_computes_distances_once():
    x = f32(120, 8)
    planned = eqsat_mem.optimize(jax.grad(lambda x: jnp.sum(triplets(x))), memory_limit=500_000)
    assert "x[:, 0]" not in planned.plan(x).source
    want = jax.grad(lambda x: jnp.sum(triplets(x)))(x)
    np.testing.assert_allclose(planned(x), want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def triplet_loss(z, labels):
    """Which pairs are alike is read under two names by a loop over the first of three, which computes that again after a count of all."""
    squares = jnp.sum(z * z, -1)
    d = jnp.sqrt(jnp.maximum(squares[:, None] + squares[None] - 2 * z @ z.T, 0) + 1e-8)
    same = labels[:, None] == labels[None]
    valid = same[:, :, None] & ~same[:, None, :]
    return jnp.sum(jnp.maximum(d[:, :, None] - d[:, None, :] + 0.2, 0) * valid) / jnp.maximum(jnp.sum(valid), 1)


def test_what_a_loop_computes_again_is_not_sliced_under_another_name():
    z, labels = f32(300, 6), RNG.integers(0, 5, 300).astype(np.int32)
    plan = eqsat_mem.optimize(triplet_loss, memory_limit=200_000, device="h100", verify=False).plan(z, labels)
    sliced = re.findall(r"dynamic_slice_in_dim\((\w+)", plan.source)
    assert len(re.findall(r" = ~\w+", plan.source)) == 2
    assert "_not" not in sliced
    np.testing.assert_allclose(plan.function(z, labels)[0], triplet_loss(z, labels), rtol=1e-4)
