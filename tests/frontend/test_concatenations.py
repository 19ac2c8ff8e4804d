"""Sums over concatenated axes, part by part: the same values, in programs of this kind drawn at random."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.frontend.concatenations import MOST_PARTS, with_parts
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block, Dot, Map, check
from eqsat_mem.testing import same_values
from tests.oracles.evaluation import values
from tests.tiers import tiered

N = 5


def made(*shape, seed=0):
    return np.random.RandomState(seed).uniform(-1, 1, shape).astype(np.float32)


def loaded(fun, *args):
    return load(jax.make_jaxpr(fun)(*args), [f"x{k}" for k in range(len(args))])


def drawn(seed):
    """A function of matrices with N rows that sums over their columns, side by side, and its arguments."""
    rng = random.Random(seed)
    widths = [rng.choice([(1,), (2,), (3,), (2, 3)]) for _ in range(rng.randint(2, 4))]
    parts = [made(N, *w, seed=k) for k, w in enumerate(widths)]
    total = sum(int(np.prod(w)) for w in widths)
    beside = made(N, total, seed=7), made(total, N, seed=8), made(total, seed=9)

    def whole(parts, scale=1.0):
        return jnp.concatenate([jnp.sin(scale * p).reshape(N, -1) for p in parts], 1)

    def changed(a, beside, how):
        return {0: a, 1: jnp.tanh(a), 2: a * beside[0], 3: a - beside[2], 4: jnp.maximum(a, beside[1].T), 5: a * whole(parts, 0.5)}[how]

    ends = [
        lambda a, beside: a @ a.T,
        lambda a, beside: a @ beside[1],
        lambda a, beside: jnp.einsum("ik,jk,k->ij", a, beside[0], beside[2]),
        lambda a, beside: jnp.sum(a, 1),
        lambda a, beside: jnp.max(a, 1),
        lambda a, beside: jnp.sum(jnp.exp(a[:, None] - beside[0][None]), (1, 2)),
        lambda a, beside: jnp.sum((a[:, None] - a[None]) ** 2, -1),
        lambda a, beside: (jnp.sum(a, 0) @ beside[2], jnp.sum(a * a)),
    ]
    first, second, end = rng.randrange(6), rng.randrange(6), rng.choice(ends)
    return lambda parts, beside: end(changed(changed(whole(parts), beside, first), beside, second), beside), (parts, beside)


@pytest.mark.parametrize("seed", range(16))
def test_sums_of_parts_are_the_sums(seed):
    fun, args = drawn(seed)
    flat, tree = jax.tree.flatten(args)
    program = loaded(lambda *flat: fun(*jax.tree.unflatten(tree, flat)), *flat)
    parted = with_parts(program)
    assert parted is not None
    check(parted)
    for mine, theirs in zip(values(flat, parted)[0], jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5 * float(np.max(np.abs(theirs))))


def test_nothing_is_summed_by_parts_where_nothing_is_concatenated_or_summed():
    x = made(N, 3)
    assert with_parts(loaded(lambda x: jnp.sum(x, 1), x)) is None
    assert with_parts(loaded(lambda x: jnp.concatenate([x, jnp.sin(x)], 1), x)) is None
    assert with_parts(loaded(lambda x: jnp.cumsum(jnp.concatenate([x, jnp.sin(x)], 1), 0), x)) is None
    many = [x * k for k in range(1, MOST_PARTS + 2)]
    assert with_parts(loaded(lambda *xs: jnp.sum(jnp.concatenate(xs, 1), 1), *many)) is None


def convolved(x, kernel, stride=1):
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def drawn_network(seed):
    """A loss of images whose features are side by side before convolutions, its gradient, and their arguments."""
    rng = random.Random(seed)
    widths, out, batch, side = [rng.randint(1, 3) for _ in range(rng.randint(2, 3))], rng.randint(1, 3), rng.randint(1, 2), 6
    images = [made(batch, side, side, w, seed=k) for k, w in enumerate(widths)]
    kernels = [made(3, 3, sum(widths), out, seed=5), made(1, 1, sum(widths), out, seed=6), made(sum(widths), out, seed=7)]
    before, middle, end, stride = rng.randrange(3), rng.randrange(4), rng.randrange(3), rng.choice([1, 2])

    def loss(images, kernels):
        changed = [jnp.sin(x) if before else x * x for x in images]
        x = jnp.concatenate(changed, -1)
        if middle == 1:
            x = jnp.maximum(x, 0.1)
        elif middle == 2:
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
        elif middle == 3:
            x = x * jnp.mean(x, (1, 2), keepdims=True)
        y = [convolved(x, kernels[0], stride), convolved(x, kernels[1]), x @ kernels[2]][end]
        return jnp.sum(jnp.tanh(y) ** 2)

    return jax.value_and_grad(loss, (0, 1)), (images, kernels)


def largest_together(program):
    """The most elements that a concatenation, or what is split into pieces, has."""
    together = 0
    for t in program.reachable():
        term = program.terms[t]
        if isinstance(term, Block) and term.call.prim.name in ("concatenate", "split"):
            whole = t if term.call.prim.name == "concatenate" else term.args[0]
            together = max(together, program.extent(program.free[whole]))
    return together


@pytest.mark.parametrize("seed", tiered(range(40), range(6), range(6, 12)))
def test_convolutions_of_parts_are_the_convolutions(seed):
    """With gradients, and what reads parts on the way; only gradients of kernels are put together."""
    fun, args = drawn_network(seed)
    flat, tree = jax.tree.flatten(args)
    program = loaded(lambda *flat: jax.tree.leaves(fun(*jax.tree.unflatten(tree, flat))), *flat)
    parted = with_parts(program)
    assert parted is not None
    check(parted)
    assert largest_together(parted) <= max(kernel.size for kernel in args[1])
    for mine, theirs in zip(values(flat, parted)[0], jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5 * float(np.max(np.abs(theirs))))


@pytest.mark.parametrize("end", ["product", "convolution"])
def test_a_skip_connection_and_its_gradient_hold_no_features_side_by_side(end):
    """What is read is a network's features beside those of an earlier layer: neither these, nor their cotangents, are ever together."""

    def loss(a, kernel, late, image):
        x = jnp.tanh(image @ a)
        x = jnp.concatenate([jnp.sin(x), x], -1)
        y = convolved(x, kernel) if end == "convolution" else x @ kernel[0, 0]
        return jnp.sum(jnp.tanh(y) @ late)

    args = made(3, 8), made(3, 3, 16, 4, seed=1), made(4, 2, seed=2), made(1, 40, 40, 3, seed=3)
    gradient = jax.value_and_grad(loss, (0, 1))
    program = loaded(lambda *args: jax.tree.leaves(gradient(*args)), *args)
    features, kernels = 40 * 40 * 16, 3 * 3 * 16 * 4
    assert largest_together(program) == features
    parted = with_parts(program)
    assert parted is not None
    assert largest_together(parted) <= kernels
    for mine, theirs in zip(values(args, parted)[0], jax.tree.leaves(gradient(*args)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5 * float(np.max(np.abs(theirs))))


def test_what_is_returned_whole_is_not_made_in_parts_as_well():
    """A product is read as the parts of a concatenation, and is a result: the pieces are slices of it."""

    def function(a, b, g, w):
        y = g @ w.T
        return jnp.concatenate([jnp.sin(a), jnp.sin(b)], 1) @ w, y, jnp.exp(y[:, :3]), jnp.exp(y[:, 3:])

    args = made(N, 3), made(N, 4, seed=1), made(N, 2, seed=2), made(7, 2, seed=3)
    parted = with_parts(loaded(function, *args))
    assert parted is not None
    assert sum(isinstance(parted.terms[t], Dot) for t in parted.reachable()) == 3
    for mine, theirs in zip(values(args, parted)[0], function(*args), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_gradient_of_one_image_fits_without_features_side_by_side():
    """A layer, a deeper one at half the resolution, and both side by side: as written 4.2 MiB, and 2.9 MiB if these are together."""

    def loss(kernels, x, y):
        first = jax.nn.relu(convolved(x, kernels[0]))
        deeper = jax.nn.relu(convolved(first, kernels[1], 2))
        both = jnp.concatenate([jnp.repeat(jnp.repeat(deeper, 2, 1), 2, 2), first], -1)
        return jnp.mean((convolved(jax.nn.relu(convolved(both, kernels[2])), kernels[3]) - y) ** 2)

    shapes = (3, 16), (16, 32), (48, 16), (16, 1)
    args = [made(3, 3, *s, seed=k) / s[0] for k, s in enumerate(shapes)], made(1, 64, 64, 3, seed=4), made(1, 64, 64, 1, seed=5)
    step = jax.value_and_grad(loss)
    for without in ("overlapping-tiles", "sums-of-parts"):  # tiles hold less than parts; either fits
        fast = eqsat_mem.optimize(step, memory_limit=2_700_000, without_rules=without)
        plan = fast.plan(*args)
        assert plan.compiled_peak_bytes <= 2_700_000
        assert {"overlapping-tiles", "sums-of-parts"} - {without} <= set(plan.rules_fired)
        assert same_values(step, fast, list(args)).same


@pytest.mark.slow
def test_a_tangent_kernel_holds_no_jacobian():
    """A network's Jacobian for each example, its parameters side by side: what is asked is its product with its transpose."""

    def network(w, x):
        return (jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) @ w[2])[0]

    def kernel(w, x):
        rows = jax.vmap(jax.grad(network), (None, 0))(w, x)
        rows = jnp.concatenate([a.reshape(a.shape[0], -1) for a in jax.tree.leaves(rows)], 1)
        return rows @ rows.T

    w, x = (made(8, 40), made(40, 40, seed=1), made(40, 1, seed=2)), made(100, 8)
    limit = 400 * 1024  # the Jacobian has 760 KiB, the kernel 39 KiB
    fast = eqsat_mem.optimize(kernel, memory_limit=limit)
    plan = fast.plan(w, x)
    assert plan.peak_bytes <= limit
    assert "sums-of-parts" in plan.rules_fired
    assert same_values(kernel, fast, [w, x]).same


def test_parts_of_another_dtype_are_converted():
    """A product of two dtypes has that of the result: parts of one element are products, too."""

    def product(a, b):
        return jnp.einsum("ij,k->ijk", a, jnp.concatenate([b[:1], b, b[-1:]])).sum(2)

    a, b = made(4, 3), made(5, seed=1).astype(np.float16)
    program = with_parts(loaded(product, a, b))
    assert program is not None
    for t in program.reachable():
        if isinstance(term := program.terms[t], Map) and term.op == "mul":
            assert {program.terms[c].dtype for c in term.args} == {term.dtype}
    np.testing.assert_allclose(values([a, b], program)[0][0], product(a, b), rtol=1e-5)
