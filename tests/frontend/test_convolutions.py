"""Convolutions sum over features, which are the batch in gradients of kernels: training steps of them go through the batch in chunks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.backends.cpu.idioms import CpuIdioms
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block, folded
from eqsat_mem.ir.interpreter import evaluate
from eqsat_mem.ir.ops import BLOCKS
from eqsat_mem.options import Options
from eqsat_mem.pipeline import plan
from tests.tiers import tiered

BATCH = 12
LAYOUTS = [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("HWNC", "IHWO", "CHWN")]
CASES = ["-".join(layouts) for layouts in (*LAYOUTS, ("NHC", "HIO", "NHC"), ("CNH", "OHI", "HNC"))]


def drawn(rng, layouts):
    """A convolution of random sizes, with its arguments: images or rows of them."""
    layouts = tuple(layouts.split("-"))
    sides = len(layouts[0]) - 2
    strides, dilation = (tuple(int(n) for n in rng.integers(1, 3, sides)) for _ in range(2))
    sizes = dict(zip("HW", rng.integers(5, 9, sides))) | {"N": BATCH, "C": int(rng.integers(2, 4))}
    kernel = {"H": 3, "W": 2, "I": sizes["C"], "O": int(rng.integers(2, 4))}
    arrays = [rng.standard_normal([int(of[c]) for c in layout], np.float32) for layout, of in zip(layouts, (sizes, kernel))]

    def convolve(x, w):
        return lax.conv_general_dilated(x, w, strides, "SAME", rhs_dilation=dilation, dimension_numbers=layouts)

    return convolve, arrays


def convolutions(program):
    return [t for t in map(program.terms.__getitem__, program.reachable()) if isinstance(t, Block) and "conv" in t.call.prim.name]


def loaded(fun, *args):
    return load(jax.make_jaxpr(fun)(*args), [f"a{k}" for k in range(len(args))])


@pytest.mark.parametrize("layouts", tiered(CASES, CASES[-1:]))
def test_gradients_of_kernels_accumulate_over_the_batch(layouts):
    rng = np.random.default_rng(3)
    convolve, (x, w) = drawn(rng, layouts)

    def gradient(x, w):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(convolve(jnp.sin(x), w)) ** 2))(w)

    program = loaded(gradient, x, w)
    summed = [program.indices[i].extent for term in convolutions(program) for i in range(len(program.indices)) if folded(term) >> i & 1]
    assert sorted(summed) == sorted([BATCH, x.shape[layouts.index("C")]])  # the features of the first, the batch of the second
    made = plan(jax.make_jaxpr(gradient)(x, w), Options(memory_limit=x.nbytes * 3, verify=False), ["x", "w"])
    np.testing.assert_allclose(made.function(x, w)[0], jax.jit(gradient)(x, w), rtol=2e-4, atol=1e-4)


def test_groups_of_features_are_not_summed_in_pieces():
    x, w = np.ones((2, 8, 4), np.float32), np.ones((3, 1, 4), np.float32)
    grouped = loaded(lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", None, None, ("NHC", "HIO", "NHC"), 4), x, w)
    assert [folded(term) for term in convolutions(grouped)] == [0]


def test_gradients_of_kernels_of_each_feature_accumulate_over_the_batch():
    rng = np.random.default_rng(4)
    x, w = rng.standard_normal((BATCH, 16, 4), np.float32), rng.standard_normal((3, 1, 8), np.float32)

    def gradient(x, w):
        def loss(w):
            return jnp.sum(jnp.tanh(lax.conv_general_dilated(jnp.sin(x), w, (1,), "SAME", None, None, ("NHC", "HIO", "NHC"), 4)) ** 2)

        return jax.grad(loss)(w)

    program = loaded(gradient, x, w)
    assert [program.extent(folded(term)) for term in convolutions(program) if folded(term)] == [BATCH]
    made = plan(jax.make_jaxpr(gradient)(x, w), Options(memory_limit=x.nbytes * 3, verify=False), ["x", "w"])
    assert made.loops
    np.testing.assert_allclose(made.function(x, w)[0], jax.jit(gradient)(x, w), rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("layouts", CASES)
def test_the_layout_of_the_library_gives_the_same(layouts):
    rng = np.random.default_rng(7)
    convolve, args = drawn(rng, layouts)
    eqn = next(eqn for eqn in jax.make_jaxpr(convolve)(*args).jaxpr.eqns if eqn.primitive.name == "conv_general_dilated")
    shapes = [a.shape for a in args]
    write = CpuIdioms().block("conv_general_dilated").text
    assert write is not None
    text = write(eqn.params, ["x", "w"], shapes)
    assert text is not None
    assert ("NHWC" in text) if "W" in layouts else ("NWC" in text)
    given = dict(zip("xw", map(jnp.asarray, args)), lax=lax, jnp=jnp)
    plain: Any = BLOCKS["conv_general_dilated"].text(eqn.params, ["x", "w"], shapes)
    np.testing.assert_allclose(eval(text, dict(given)), eval(plain, dict(given)), rtol=1e-5, atol=1e-5)


def in_groups(rng):
    """A convolution in groups with random sizes and parameters, and its arguments."""
    sides, groups = int(rng.integers(1, 4)), int(rng.choice([2, 3, 4]))
    letters = "DHW"[3 - sides :]
    layouts = tuple("".join(rng.permutation(list(head + letters))) for head in ("NC", "IO", "NC"))
    own, out = (int(n) for n in rng.integers(1, 4, 2))
    strides, gaps, holes = (tuple(int(n) for n in rng.integers(1, 3, sides)) for _ in range(3))
    padding = tuple((int(low), int(high)) for low, high in rng.integers(0, 3, (sides, 2)))
    sizes = dict(zip(letters, rng.integers(5, 8, sides))) | {"N": int(rng.choice([1, 6])), "C": groups * own}
    kernel = dict(zip(letters, rng.integers(1, 4, sides))) | {"I": own, "O": groups * out}
    arrays = [rng.standard_normal([int(of[c]) for c in layout], np.float32) for layout, of in zip(layouts, (sizes, kernel))]

    def convolve(x, w):
        return lax.conv_general_dilated(x, w, strides, padding, gaps, holes, layouts, groups)

    return convolve, groups, arrays


def as_planned(fun, args, limit):
    return plan(jax.make_jaxpr(fun)(*args), Options(memory_limit=limit, verify=False), [f"a{k}" for k in range(len(args))])


def agree(made, fun, args):
    for got, want in zip(jax.tree.leaves(made.function(*args)), jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-4 * float(np.max(np.abs(want), initial=1.0)))


@pytest.mark.parametrize("seed", tiered(range(16), range(5)))
def test_groups_of_features_are_an_index(seed):
    """Of a convolution, and of the gradients of its operand and of its kernel, whose groups JAX has in the batch."""
    convolve, groups, args = in_groups(np.random.default_rng(seed))

    def both(x, w):
        made, pullback = jax.vjp(convolve, jnp.sin(x), jnp.cos(w))
        return [made, *pullback(jnp.tanh(made))]

    program = loaded(both, *args)
    found = convolutions(program)
    assert len(found) == 3
    for term in found:
        along = [i for i in range(len(program.indices)) if term.call.pointwise >> i & 1 and program.indices[i].extent == groups]
        assert any(all(any(axis[:1] == (i,) for axis in axes) for axes in (*term.call.in_axes, *term.call.out_axes)) for i in along)
    values = evaluate(program, args)
    for got, want in zip(values, jax.jit(both)(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", tiered(range(12), range(3)))
def test_convolutions_in_groups_are_computed_group_by_group(seed):
    convolve, _, args = in_groups(np.random.default_rng(seed))

    def summed(x, w):
        return jnp.sum(jnp.tanh(jnp.einsum("...,...->...", convolve(jnp.sin(x), w), convolve(jnp.cos(x), w))) ** 2)

    whole = 2 * (args[0].nbytes + jax.eval_shape(convolve, *args).size * 4)
    made = as_planned(summed, args, sum(a.nbytes for a in args) + whole)
    assert made.loops
    agree(made, summed, args)


def per_example(rng):
    """The clipped gradients of examples, one by one, as private training has them."""
    kernels = [rng.standard_normal((3, 3, a, b), np.float32) / 3 for a, b in ((2, 4), (4, 4))]
    x, y = rng.standard_normal((BATCH, 10, 10, 2), np.float32), rng.standard_normal((BATCH, 4), np.float32)

    def loss(kernels, x, y):
        h = x[None]
        for w in kernels:
            h = jax.nn.relu(lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=LAYOUTS[0]))
        return jnp.mean((h.mean((1, 2)) - y) ** 2)

    def clipped(x, y, *kernels):
        slopes = jax.vmap(jax.grad(loss), (None, 0, 0))(list(kernels), x, y)
        norms = jnp.sqrt(sum(jnp.sum(g**2, range(1, g.ndim)) for g in slopes))
        return [jnp.tensordot(jnp.minimum(1, 1 / norms), g, 1) for g in slopes]

    return clipped, (x, y, *kernels)


def ensemble(rng):
    """The gradients of the summed losses of networks of one kind."""
    members = 6
    kernels = [rng.standard_normal((members, 3, 3, a, b), np.float32) / 3 for a, b in ((2, 3), (3, 4))]
    x, y = rng.standard_normal((BATCH, 10, 10, 2), np.float32), rng.standard_normal((BATCH, 4), np.float32)

    def loss(kernels, x, y):
        for w in kernels:
            x = jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUTS[0]))
        return jnp.mean((x.mean((1, 2)) - y) ** 2)

    def slopes(x, y, *kernels):
        return jax.grad(lambda kernels: jnp.sum(jax.vmap(loss, (0, None, None))(kernels, x, y)))(list(kernels))

    return slopes, (x, y, *kernels)


@pytest.mark.parametrize("drawn", [per_example, ensemble])
def test_networks_that_are_mapped_are_computed_one_by_one(drawn):
    fun, args = drawn(np.random.default_rng(5))
    temporaries = jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes
    made = as_planned(fun, args, sum(a.nbytes for a in args) + sum(w.nbytes for w in args[2:]) + temporaries // 3)
    assert made.loops
    assert "feature_group_count=size_" in made.source
    agree(made, fun, args)


def network(rng):
    """A training step of a random network of convolutions, pooling and skipped layers, with momentum."""
    width, depth = int(rng.integers(2, 5)), int(rng.integers(1, 4))
    kernels = [rng.standard_normal((3, 3, 2 if k == 0 else width, width), np.float32) / 4 for k in range(depth)]
    skips, pools = rng.random(depth) < 0.5, rng.random(depth) < 0.3
    x, y = rng.standard_normal((BATCH, 16, 16, 2), np.float32), rng.standard_normal((BATCH, width), np.float32)

    def loss(kernels, x, y):
        for k, w in enumerate(kernels):
            new = jax.nn.silu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUTS[0]))
            x = x + new if k and skips[k] else new
            if pools[k]:
                x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.mean((jnp.mean(x, (1, 2)) - y) ** 2)

    def step(kernels, momentum, x, y):
        value, slope = jax.value_and_grad(loss)(kernels, x, y)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, slope)
        return value, jax.tree.map(lambda w, m: w - 0.1 * m, kernels, momentum), momentum

    return step, (kernels, [np.zeros_like(w) for w in kernels], x, y)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_training_steps_go_through_the_batch(seed):
    step, args = network(np.random.default_rng(seed))
    fixed = sum(a.nbytes for a in jax.tree.leaves(args)) + sum(w.nbytes for w in args[0]) * 2
    activations = args[2].nbytes // 2 * args[0][0].shape[-1]
    fast = eqsat_mem.optimize(step, memory_limit=fixed + int(1.5 * activations))
    made = fast.plan(*args)
    assert any("conv" in result for loop in made.loops for result in loop.accumulates)
    for got, want in zip(jax.tree.leaves(fast(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)
