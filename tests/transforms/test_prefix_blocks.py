"""Prefix sums by blocks: the same sums, also in programs of this kind drawn at random, with fewer operations and in little room."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.frontend.load import load
from eqsat_mem.passes import EVERY, PREFIXES
from eqsat_mem.transforms.prefix_blocks import LENGTH, prefix_sum, with_prefix_blocks
from tests.oracles.evaluation import values
from tests.tiers import tiered

KIB = 2**10


def made(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def loaded(fun, *args):
    return load(jax.make_jaxpr(fun)(*args), [f"x{k}" for k in range(len(args))])


def attention(q, k, v):
    """Causal linear attention (Katharopoulos et al., 2020); positions come before features, heads before both."""
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    sums, weights = jnp.cumsum(k[..., :, None] * v[..., None, :], axis=-3), jnp.cumsum(k, axis=-2)
    return jnp.einsum("...td,...tde->...te", q, sums) / jnp.einsum("...td,...td->...t", q, weights)[..., None]


def gradient(function):
    return jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(function(*args))), (0, 1, 2))


@pytest.mark.parametrize("extent", [1, 64, 129, 192, 1000, 9000])
@pytest.mark.parametrize("reverse", [False, True])
def test_prefix_sums_are_cumulative_sums(extent, reverse):
    """Over one block, several, and blocks of blocks; sums of small whole numbers are exact."""
    x = np.random.default_rng(0).integers(-9, 9, (2, extent, 3)).astype(np.float32)
    want = np.flip(np.cumsum(np.flip(x, 1), 1), 1) if reverse else np.cumsum(x, 1)
    np.testing.assert_array_equal(prefix_sum(x, 1, reverse), want)
    np.testing.assert_array_equal(prefix_sum(x, 1, reverse, strictly=True), want - x)


def with_rest(q, k, v):
    """Values at positions that are filled up are not numbers, infinite, or more than one at all others."""
    sums = jnp.cumsum(jnp.log(jnp.abs(k))[:, :, None] * (1 / v)[:, None], 0)
    read = jnp.einsum("td,tde->te", q, sums)
    places = jnp.arange(len(q))[:, None]
    return (read, jnp.max(read, 0), jnp.min(jnp.cos(v), 0), jnp.prod(1 + 0.01 * jnp.sin(v), 0), jnp.sum(jnp.exp(-(q**2)), 0),
            jnp.sort(read, 0) - places, q.T @ read, (jnp.tanh(q @ k.T) @ v)[::2], lax.cummax(read, 0), jnp.any(read > 9, 0))  # fmt: skip


def exclusive(q, k, v):
    products = k[:, :, None] * v[:, None]
    before, after = jnp.cumsum(products, 0) - products, -products + lax.cumsum(products, 0, reverse=True)
    return jnp.einsum("td,tde->te", q, before) + jnp.sum(q[:, :, None] * after, 1)


def read_twice(q, k, v):
    """The gradient sums a sum of products."""
    sums = jnp.cumsum(k[:, :, None] * v[:, None], 0)
    return jnp.einsum("td,tde->te", q, sums) + jnp.tanh(jnp.einsum("tde,te->td", sums, v))


def decaying(q, k, v):
    rate = 0.01 * jnp.arange(len(q))[:, None]
    return jnp.einsum("td,tde->te", q * jnp.exp(-rate), jnp.cumsum(jnp.einsum("td,te->tde", k * jnp.exp(rate), v) / 3, 0))


def two_lengths(q, k, v):
    """Prefix sums along two axes of one extent of one value, and one of another extent."""
    pairs = jnp.cumsum(jnp.cumsum(q[:, None, :2] * k[None, :, :2], 0), 1)
    return jnp.sum(pairs, (1, 2)), attention(q[:-3], k[:-3], v[:-3]), jnp.cumsum(v, 0)


PROGRAMS = {
    "attention": attention,
    "gradient": gradient(attention),
    "heads": jax.vmap(attention, 1, 1),
    "rest": with_rest,
    "exclusive": exclusive,
    "gradient of exclusive": gradient(exclusive),
    "read twice": gradient(read_twice),
    "decaying": gradient(decaying),
    "two lengths": two_lengths,
}


@pytest.mark.parametrize("extent", [3 * LENGTH, 3 * LENGTH - 1, 2 * LENGTH + 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_compute_the_same(name, extent):
    shape = (extent, 2, 12) if name == "heads" else (extent, 12)
    with jax.enable_x64(True):
        args = [made(*shape, seed=k, dtype=np.float64) for k in range(3)]
        program = loaded(PROGRAMS[name], *args)
        new = with_prefix_blocks(program)
        assert PREFIXES.name in new.passes
        for mine, theirs in zip(*values(args, new, program), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9 * np.max(np.abs(theirs)))


STAY = {
    "sums of arguments": (lambda x: jnp.cumsum(x, 0), (made(1000, 40),)),
    "sums of sums": (lambda x, y: jnp.cumsum(x[:, :, None] + y[:, None], 0), (made(1000, 10), made(1000, 10))),
    "few positions": (lambda x, y: jnp.cumsum(x[:, :, None] * y[:, None], 0), (made(2 * LENGTH, 20), made(2 * LENGTH, 20))),
    "few elements": (lambda x, y: jnp.cumsum(x[:, :, None] * y[:, None], 0), (made(300, 5), made(300, 5))),
    "extremes": (lambda x, y: lax.cummax(x[:, :, None] * y[:, None], 0), (made(1000, 10), made(1000, 10))),
    "whole numbers": (lambda x, y: jnp.cumsum(x[:, :, None] * y[:, None], 0), (made(1000, 10, dtype=int), made(1000, 10, dtype=int))),
    "one number at all positions": (lambda x, y: jnp.cumsum(jnp.broadcast_to(jnp.outer(x, y), (300, 20, 20)), 0), (made(20), made(20))),
    "keys": (lambda keys, x: jnp.cumsum(x[:, :, None] * jax.vmap(jax.random.normal)(keys)[:, None, None] * x[:, None], 0),
             (jax.random.split(jax.random.key(0), 300), made(300, 10))),
}  # fmt: skip


@pytest.mark.parametrize("name", STAY)
def test_other_sums_stay_as_they_are(name):
    fun, args = STAY[name]
    assert with_prefix_blocks(loaded(fun, *args)) is None


def test_the_pass_can_be_left_out():
    program = loaded(attention, *(made(500, 16, seed=k) for k in range(3)))
    assert with_prefix_blocks(program, [known for known in EVERY if known is not PREFIXES]) is None


# --- plans ---------------------------------------------------------------------------------------------


def planned(function, limit, args):
    return eqsat_mem.optimize(function, memory_limit=limit).plan(*args)


CASES = {
    "attention": (attention, (1024, 32), 700 * KIB),
    "odd": (attention, (1021, 32), 1300 * KIB),
    "batch": (attention, (2, 3, 257, 24), 1200 * KIB),
    "gradient": (gradient(attention), (1024, 32), 1800 * KIB),
    "odd gradient": (gradient(attention), (1021, 32), 2300 * KIB),
    "read twice": (gradient(read_twice), (1024, 32), 1800 * KIB),
}


def peak(compiled):
    held = compiled.memory_analysis()
    return held.argument_size_in_bytes + held.output_size_in_bytes + held.temp_size_in_bytes


@pytest.mark.parametrize("name", tiered(CASES, ["odd"]))
def test_plans_fit(name):
    """In about as much room again as arguments and results take, where the prefix sums alone would be twenty times as large."""
    function, shape, limit = CASES[name]
    args = [made(*shape, seed=k) for k in range(3)]
    plan = planned(function, limit, args)
    assert PREFIXES.name in plan.rules_fired
    assert peak(jax.jit(plan.function).lower(*args).compile()) <= limit


@pytest.mark.parametrize("name", tiered(CASES, ["attention"]))
def test_plans_move_less(name):
    """A third of the bytes as the compiler counts them, and less in all than the prefix sums; errors are about those as written."""
    function, shape, _ = CASES[name]
    args = [made(*shape, seed=k) for k in range(3)]
    plan = planned(function, 2**26, args)
    assert PREFIXES.name in plan.rules_fired
    compiled, written = (jax.jit(f).lower(*args).compile() for f in (plan.function, function))
    assert compiled.memory_analysis().temp_size_in_bytes < args[0].nbytes * shape[-1]
    assert compiled.cost_analysis()["bytes accessed"] < written.cost_analysis()["bytes accessed"] / 3
    for mine, theirs, want in zip(compiled(*args), jax.tree.leaves(written(*args)), exactly(function, args), strict=True):
        assert error(mine, want) <= 2 * error(theirs, want) + 1e-6


def exactly(function, args):
    with jax.enable_x64(True):
        return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(function)(*(np.asarray(a, np.float64) for a in args)))]


def error(value, want):
    return np.linalg.norm(np.asarray(value).astype(np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("dtype", tiered(["bfloat16", "float16"], ["bfloat16"]))
def test_plans_of_narrow_floats_are_as_close_as_written(dtype):
    args = [jnp.asarray(made(1021, 32, seed=k), dtype) for k in range(3)]
    plan = planned(attention, 2**20, args)
    assert PREFIXES.name in plan.rules_fired
    (want,) = exactly(attention, args)
    assert error(plan.function(*args)[0], want) <= 1.3 * error(jax.jit(attention)(*args), want)


def test_bodies_of_loops_are_planned_so_too():
    def layers(q, k, v):
        return lax.scan(lambda x, _: (jnp.tanh(attention(x + q, x + k, v)), None), q, None, length=3)[0]

    args = [made(512, 32, seed=k) for k in range(3)]
    plan = planned(layers, 2**20, args)
    assert "cumsum" not in plan.source
    np.testing.assert_allclose(plan.function(*args)[0], layers(*args), rtol=1e-4, atol=1e-5)


# --- random programs -------------------------------------------------------------------------------------


def drawn(seed):
    """A random program of products that are summed up to each position, and contracted, and its arguments."""
    rng = np.random.default_rng(seed)
    extent = int(rng.choice([2 * LENGTH + 1, 3 * LENGTH, 4 * LENGTH - 1, 300]))
    batch = tuple(int(n) for n in rng.integers(2, 4, rng.integers(0, 2)))
    d, e = (int(n) for n in rng.integers(6, 14, 2))
    axis, reverse = -3, bool(rng.integers(2))
    feature = [lambda x: x, jnp.tanh, lambda x: jax.nn.elu(x) + 1, jnp.square][rng.integers(4)]
    weight = [None, lambda n: jnp.exp(-0.01 * jnp.arange(n)), lambda n: 1.0 / (1 + jnp.arange(n))][rng.integers(3)]
    own, normalised, read = (bool(n) for n in rng.integers(2, size=3))

    def function(q, k, v):
        q, k = feature(q), feature(k)
        w = 1.0 if weight is None else weight(extent)[:, None, None]
        products = k[..., :, None] * v[..., None, :] * w
        sums = lax.cumsum(products, products.ndim + axis, reverse) - (products if own else 0)
        out = jnp.einsum("...td,...tde->...te", q, sums) if read else jnp.sum(sums * v[..., None, :], -1)
        return out / (1 + jnp.sum(jnp.cumsum(jnp.abs(k), -2), -1))[..., None] if normalised else out

    args = [made(*batch, extent, n, seed=seed + k) for k, n in enumerate((d, d, e))]
    return gradient(function) if rng.integers(2) else function, args


@pytest.mark.parametrize("seed", tiered(range(20), range(1, 4), [0, 4, 5]))
def test_random_programs_compute_the_same(seed):
    with jax.enable_x64(True):
        function, args = drawn(seed)
        args = [a.astype(np.float64) for a in args]
        plan = eqsat_mem.optimize(function, memory_limit=8 * sum(a.nbytes for a in args), verify=False).plan(*args)
        want = jax.tree.leaves(jax.jit(function)(*args))
        for mine, theirs in zip(jax.jit(plan.function)(*args), want, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-8, atol=1e-8 * np.max(np.abs(theirs)))
