"""Elements of stacks that equal operations read: XLA:CPU compiles one kernel for them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.codegen.unknown import unknown_positions
from eqsat_mem.codegen.unstacked import LEAST


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_unknown_positions_are_the_numbers_from_zero(count):
    assert list(map(int, jax.jit(lambda: unknown_positions(count))())) == list(range(count))


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
    assert "unknown_positions" in plan.source
    assert "lax.scan(" in plan.source
    differing, found = kernels(own.lower(*args).compile())
    assert found >= 2 * layers
    assert differing <= 6
    known = dict(plan.namespace)
    exec(re.sub(r"= unknown_positions\((\d+)\)", r"= tuple(range(\1))", plan.source), known)
    for a, b in zip(jax.tree.leaves(own(*args)), jax.jit(known[plan.name])(*jax.tree.leaves(args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)  # a product may be contracted with a sum in one of the kernels only


def test_other_compilers_are_told_positions():
    """XLA:GPU merges such kernels into few anyway."""
    args = arguments(LEAST)
    own = eqsat_mem.optimize(lambda p, m, x: step(p, m, x), memory_limit="400 kB", device="h100", verify=False)
    assert "unknown_positions" not in own.plan(*args).source
