"""Elements of stacks that equal operations read: XLA:CPU compiles one kernel for them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.codegen.unknown import unknown
from eqsat_mem.codegen.unstacked import LEAST


@pytest.mark.parametrize("numbers", [(0,), (7, 3), (0, 1, 2), (5, 6, 990, 4_000, 8)])
def test_unknown_numbers_are_these_numbers(numbers):
    assert tuple(map(int, jax.jit(lambda: unknown(*numbers))())) == numbers


def test_positions_high_in_a_tall_array_are_as_few_as_slices():
    """Rows near the end of a long one: as many numbers are unknown as are read, not as many as there are rows."""
    rng, rows = np.random.default_rng(0), 4_000
    ws, ms, g = [f32(rng, 600) for _ in range(12)], [f32(rng, 600) for _ in range(12)], f32(rng, rows, 600)

    def updates(ws, ms, g):
        ms = [0.9 * m + 0.1 * jnp.tanh(g[rows - 1 - k]) for k, m in enumerate(ms)]
        return [w - 1e-3 * m / (jnp.abs(m) + 1e-8) * jnp.cos(w) for w, m in zip(ws, ms)], ms

    fixed = sum(a.nbytes for a in jax.tree.leaves((ws, ms, g, ws, ms)))
    own = eqsat_mem.optimize(updates, memory_limit=fixed + 400_000)
    for a, b in zip(jax.tree.leaves(own(ws, ms, g)), jax.tree.leaves(updates(ws, ms, g)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    source = own.plan(ws, ms, g).source
    assert "unknown(" not in source or f"unknown(*range({rows - 12}, {rows}))" in source


def step(p, m, x, clipped=False):
    def loss(p):
        y = x
        for w, b in p:
            y = y + jnp.tanh(jax.nn.softmax(y @ y.T) @ y @ w + b)
        return jnp.mean(y**2)

    g = jax.grad(loss)(p)
    if clipped:
        norm = jnp.sqrt(sum(jnp.sum(a**2) for a in jax.tree.leaves(g)))
        g = jax.tree.map(lambda a: a * jnp.minimum(1.0, 1.0 / norm), g)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g * g, m, g)
    return jax.tree.map(lambda p, m, g: p - 1e-3 * g / (jnp.sqrt(m) + 1e-8), p, m, g), m


def arguments(layers):
    rng = np.random.default_rng(layers)
    p = [(f32(rng, 16, 16) * 0.3, f32(rng, 16)) for _ in range(layers)]
    return p, jax.tree.map(lambda a: np.abs(f32(rng, *a.shape)), p), f32(rng, 96, 16)


def f32(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def kernels(compiled):
    """How many fused computations differ, of those that take square roots, and how many there are."""
    bodies = re.findall(r"^%fused_computation[^\n]*\{\n(.*?)^\}", compiled.as_text(), re.DOTALL | re.MULTILINE)
    roots = [re.sub(r"%[\w.\-]+|, metadata=\{[^\n]*", "", body) for body in bodies if "sqrt(" in body]
    return len(set(roots)), len(roots)


@pytest.mark.parametrize(("layers", "clipped"), [(LEAST + 4, False), (LEAST + 5, True)])
def test_updates_of_stacked_gradients_are_few_kernels(layers, clipped):
    args = arguments(layers)
    plain = jax.jit(lambda p, m, x: step(p, m, x, clipped))
    fixed = sum(a.nbytes for a in jax.tree.leaves(args)) + sum(a.nbytes for a in jax.tree.leaves(args[:2]))
    limit = fixed + plain.lower(*args).compile().memory_analysis().temp_size_in_bytes // 3
    own = eqsat_mem.optimize(lambda p, m, x: step(p, m, x, clipped), memory_limit=limit)
    plan = own.plan(*args)
    assert plan.compiled_peak_bytes <= limit
    assert "= unknown(" in plan.source
    assert "lax.scan(" in plan.source
    assert plan.source.count("@jax.jit\n    def update") == plan.source.count("def update")  # traced once for arrays of a shape
    differing, found = kernels(own.lower(*args).compile())
    assert found >= 2 * layers
    assert differing <= 6
    known = dict(plan.namespace)
    exec(re.sub(r"= unknown\((.*)\)", r"= (\1,)", plan.source), known)
    for a, b in zip(jax.tree.leaves(own(*args)), jax.jit(known[plan.name])(*jax.tree.leaves(args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)  # a product may be contracted with a sum in one of the kernels only


def test_other_compilers_are_told_positions():
    """XLA:GPU merges such kernels into few anyway. (4 MiB are what cuBLAS may hold, without which no program with products fits.)"""
    args = arguments(LEAST)
    own = eqsat_mem.optimize(lambda p, m, x: step(p, m, x), memory_limit=2**22 + 150_000, device="h100", verify=False)
    source = own.plan(*args).source
    assert "lax.scan(" in source
    assert "= unknown(" not in source
