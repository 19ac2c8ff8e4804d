"""Scatters of computed elements are computed in chunks, whose results combine as the elements do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.errors import MemoryLimitError
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block, folded
from tests.tiers import tiered

N, M, PLACES = 331, 307, 11
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((N, 3), np.float32), RNG.standard_normal((M, 3), np.float32)
LABELS = RNG.integers(0, PLACES, M).astype(np.int32)


def scores(x, y):
    return jnp.tanh(x @ y.T)


def place(s):
    return jnp.clip(((s + 1) * PLACES / 2).astype(jnp.int32), 0, PLACES - 1)


def histogram(x, y):
    return jnp.zeros(PLACES, jnp.int32).at[place(scores(x, y))].add(1)


def counts(x, y):
    return jnp.bincount(place(scores(x, y)).reshape(-1), length=PLACES)


def moments(x, y):
    s = scores(x, y).reshape(-1)
    return jnp.zeros((PLACES, 2)).at[place(s)].add(jnp.stack([s, s * s], -1))


def taken_away(x, y):
    return jnp.zeros(PLACES).at[place(scores(x, y))].subtract(scores(x, y))


def products(x, y):
    return jnp.ones(PLACES).at[place(scores(x, y))].mul(1 + 1e-3 * scores(x, y))


def segment_least(x, y):
    return jax.ops.segment_min(scores(x, y).T, LABELS, num_segments=PLACES).min(1)


def largest_above_zero(x, y):
    """The number that the maximum begins with counts, in every chunk."""
    return jnp.zeros(PLACES).at[place(scores(x, y))].max(scores(x, y) - 0.2)


def table_gradient(x, y):
    """Two positions, each along one side."""
    rows = place(jnp.tanh(x[:, 0]))

    def loss(table):
        return jnp.sum(table[rows[:, None], LABELS[None, :]] * scores(x, y) ** 2)

    return jax.grad(loss)(jnp.ones((PLACES, PLACES)))


def two_sides(x, y):
    """Elements of one row meet, and rows do not."""
    s = scores(x, y)
    return jax.vmap(lambda row: jnp.zeros(PLACES).at[place(row)].add(row))(s).max(0)


FOLDED = [histogram, counts, moments, taken_away, products, segment_least, largest_above_zero, table_gradient, two_sides]


@pytest.mark.parametrize("fun", tiered(FOLDED, [histogram, segment_least, table_gradient]), ids=lambda fun: fun.__name__)
def test_elements_that_meet_are_made_in_chunks(fun):
    fast = eqsat_mem.optimize(fun, memory_limit=X.nbytes + Y.nbytes + N * M)  # a byte per element, which has four at the least
    assert fast.plan(X, Y).loops
    np.testing.assert_allclose(fast(X, Y), fun(X, Y), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "complex64"])
def test_other_dtypes_meet_in_their_own(dtype):
    def fun(x, y):
        return jnp.zeros(PLACES, dtype).at[place(scores(x, y))].add((scores(x, y) > 0.9).astype(dtype))

    fast = eqsat_mem.optimize(fun, memory_limit=X.nbytes + Y.nbytes + N * M)
    got, want = fast(X[:40], Y[:30]), fun(X[:40], Y[:30])
    assert got.dtype == want.dtype
    np.testing.assert_allclose(np.asarray(got, np.complex64), np.asarray(want, np.complex64), rtol=1e-2)


def folds(fun, *args):
    """The indices that the blocks of a program fold, by name."""
    program = load(jax.make_jaxpr(fun)(*args), [f"a{k}" for k in range(len(args))])
    blocks = (program.terms[t] for t in program.reachable() if isinstance(program.terms[t], Block))
    return [folded(block) for block in blocks if "scatter" in block.call.prim.name]


def test_what_is_there_before_counts_once():
    assert folds(lambda i, u: jnp.ones(5).at[i].add(u), LABELS, Y[:, 0]) == [0]
    assert folds(lambda i, u, x: x.at[i].add(u), LABELS, Y[:, 0], X[:5, 0]) == [0]
    assert folds(lambda i, u: jnp.zeros(5).at[i].set(u), LABELS, Y[:, 0]) == [0]
    assert all(folds(lambda i, u: jnp.ones(5).at[i].max(u), LABELS, Y[:, 0]))


def test_a_scatter_into_an_argument_is_not_taken_apart():
    def fun(table, x, y):
        return table.at[place(scores(x, y))].add(scores(x, y))

    with pytest.raises(MemoryLimitError):
        eqsat_mem.optimize(fun, memory_limit=X.nbytes + Y.nbytes + N * M).plan(np.ones(PLACES, np.float32), X, Y)
