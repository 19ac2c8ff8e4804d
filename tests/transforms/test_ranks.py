"""Elements of sorted values found by counting: the same elements, also in programs of this kind drawn at random."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.frontend.load import load
from eqsat_mem.transforms.ranks import LEAST, MOST_READ, of_ranks, with_ranks
from tests.oracles.evaluation import results, values

N = 131
"""Its square is above LEAST."""


def made(*shape, seed=0):
    return np.random.RandomState(seed).uniform(-2, 2, shape).astype(np.float32)


def loaded(fun, *args):
    return load(jax.make_jaxpr(fun)(*args), [f"x{k}" for k in range(len(args))])


def distances(x):
    return jnp.sum((x[:, None] - x[None]) ** 2, -1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int8", "uint32", "uint8"])
def test_ranks_are_elements_of_the_sorted(dtype):
    """Ties, zeros of both signs, infinities, subnormal numbers and what is not a number: places are those that a sort has."""
    x = 40 * np.random.RandomState(0).standard_normal((3, 600, 2))
    if "float" in dtype:
        x[0, :5, 0] = [np.nan, np.inf, -np.inf, 0.0, -0.0]
        x[1, :, 1] *= 1e-41
        x[2, :500, 0] = np.nan
    elif dtype == "uint32":
        x = np.abs(x) * 2.0**24
    elif dtype == "uint8":
        x = np.abs(x)
    x = jnp.asarray(x.astype(dtype))
    ranks = np.array([0, 1, 299, 300, 598, 599, 99])
    mine, theirs = of_ranks(x, jnp.asarray(ranks), 1), np.sort(np.asarray(x).astype(np.float64), 1)[:, ranks]
    np.testing.assert_array_equal(np.asarray(mine).astype(np.float64), theirs)


def test_ranks_of_float64():
    with jax.enable_x64(True):
        x = np.random.RandomState(0).standard_normal(500)
        np.testing.assert_array_equal(of_ranks(jnp.asarray(x), jnp.array([7, 250]), 0), np.sort(x)[[7, 250]])


@pytest.mark.parametrize("dtype", ["float8_e4m3fnuz", "float8_e5m2", "float8_e8m0fnu"])
def test_floats_of_eight_bits_are_sorted(dtype):
    """Not all of their bits are a sign and a size: some have no sign, some a NaN where others have a zero."""
    program = loaded(lambda x: jnp.sort(x.astype(dtype))[7].astype(jnp.float32), made(2 * LEAST))
    assert with_ranks(program) is None


READS = [
    lambda a: jnp.median(a),
    lambda a: jnp.quantile(a, jnp.array([0.05, 0.5, 0.9])),
    lambda a: jnp.percentile(a, 99.0, method="nearest"),
    lambda a: jnp.sort(a.ravel())[17],
    lambda a: jnp.sort(a, axis=None)[-4:],
    lambda a: jnp.sort(a.ravel())[100:130:10],
    lambda a: lax.dynamic_slice(jnp.sort(a.ravel()), (a.size + 9,), (3,)),
    lambda a: jnp.sort(a.ravel()).at[jnp.array([5, 70])].get(mode="clip"),
    lambda a: jnp.median(jnp.stack([a.ravel(), jnp.cos(a).ravel()]), axis=1),
]
"""Reads of a few elements of sorted matrices with more than LEAST elements."""


@pytest.mark.parametrize("read", READS)
def test_reads_of_sorts_are_ranks(read):
    program = loaded(read, made(N, N))
    counted = with_ranks(program)
    assert counted is not None
    assert "sort" not in str(counted)
    assert counted.passes == {"ranks-by-counting"}
    args = [made(N, N, seed=3)]
    for mine, theirs in zip(values(args, counted)[0], jax.tree.leaves(jax.jit(read)(*args)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


OTHERS = [
    lambda a: jnp.sort(a.ravel()),
    lambda a: jnp.cumsum(jnp.sort(a.ravel()))[5],
    lambda a: jnp.sort(a, 1)[:, 3],  # rows are short
    lambda a: jnp.sort(a.ravel())[: MOST_READ + 1],
    lambda a: jnp.sort(a.ravel())[jnp.argsort(a[0])[:3]],  # where depends on a sort
    lambda a: jnp.argsort(a.ravel())[:3],
    lambda a: jnp.sort(a.ravel()[: LEAST - 1])[3],
]


@pytest.mark.parametrize("read", OTHERS)
def test_other_sorts_stay(read):
    assert with_ranks(loaded(read, made(N, N))) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_programs_with_medians_fit_where_nothing_sorted_does(seed):
    """Scales, thresholds and clips that are medians or quantiles of what is computed of all pairs."""
    rng = np.random.RandomState(seed)
    pairs = [distances, lambda x: jnp.abs(x @ x.T), lambda x: jnp.sum(jnp.abs(x[:, None] - x[None]), -1), lambda x: jnp.tanh(x @ x.T)]
    level = [
        lambda d: jnp.median(d),
        lambda d: jnp.median(jnp.sqrt(jnp.abs(d))) ** 2,
        lambda d: jnp.quantile(d, 0.8),
        lambda d: jnp.diff(jnp.quantile(d, jnp.array([0.25, 0.75])))[0],
        lambda d: jnp.sort(d.ravel())[4000],
    ]
    ends = [
        lambda d, s, v: jnp.exp(-d / (jnp.abs(s) + 0.1)) @ v,
        lambda d, s, v: jnp.minimum(d, s).sum(0),
        lambda d, s, v: jax.nn.softmax(-d / (1 + s * s), axis=1) @ v,
        lambda d, s, v: (jax.nn.sigmoid(4 * (s - d)).mean(), d.max(1)),
    ]
    pick = [rng.randint(len(of)) for of in (pairs, level, ends)]

    def fun(x, v):
        d = pairs[pick[0]](x)
        return ends[pick[2]](d, level[pick[1]](d), v)

    n = rng.randint(400, 460)
    args = made(n, 3, seed=seed), made(n, 2, seed=seed + 1)
    plan = eqsat_mem.optimize(fun, memory_limit="150 KiB").plan(*args)
    assert plan.compiled_peak_bytes <= 150 * 2**10 < 4 * n * n
    assert "ranks-by-counting" in plan.rules_fired
    for mine, theirs in zip(jax.jit(plan.function)(*args), jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_two_sorts_one_of_which_decides_what_the_other_sorts():
    def fun(x):
        d = distances(x)
        centre = jnp.median(d)
        return jnp.median(jnp.abs(d - centre)), centre

    x = made(400, 3)
    plan = eqsat_mem.optimize(fun, memory_limit="150 KiB").plan(x)
    assert plan.compiled_peak_bytes <= 150 * 2**10
    for mine, theirs in zip(jax.jit(plan.function)(x), jax.jit(fun)(x), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "place"), [("uint32", 4_000_000_000), ("int64", 2**32), ("int64", -(2**32)), ("uint8", 200), ("int8", -3)]
)
def test_places_beyond_the_last_are_the_last_in_any_dtype(dtype, place):
    def one(x, i):
        return lax.dynamic_index_in_dim(jnp.sort(distances(x).reshape(-1)), i, keepdims=False)

    with jax.enable_x64(True):
        x, i = jnp.asarray(made(N, 3)), jnp.asarray(place, dtype)
        counted = with_ranks(loaded(one, x, i))
        assert counted is not None
        assert values([x, i], counted) == [results(one, x, i)]
