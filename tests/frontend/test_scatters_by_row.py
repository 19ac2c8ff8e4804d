"""Scatters told the rows that they write: the same arrays in chunks of rows, whatever is written where."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.egraph.extract import original
from eqsat_mem.frontend.load import load
from eqsat_mem.frontend.scatters import with_scatters
from eqsat_mem.ir import Block
from eqsat_mem.ir.ops import scatters_at
from eqsat_mem.testing import same_values
from tests.oracles import stepwise
from tests.oracles.differential import RULES, Case, check_plan, random_schedule
from tests.tiers import tiered

N, M, UPDATES = 7, 5, 40
RNG = np.random.default_rng(0)
P, Q = (RNG.integers(-n - 2, n + 2, UPDATES).astype(np.int32) for n in (N, M))
"""Positions in both axes, some from the end, some outside, many twice."""
U = RNG.integers(-4, 5, UPDATES).astype(np.float32)
X = RNG.standard_normal((N, M)).astype(np.float32)
ZEROS = jnp.zeros((N, M))


def folded(a):
    """Chunks of rows and of columns are worth something."""
    return jnp.tanh(a).sum(0), (a * X).sum(1)


def clipped(p, q, u):
    return folded(ZEROS.at[p, q].add(u, mode="clip"))


def written(p, q, u):
    return folded(ZEROS.at[p, q].set(u))


def into_computed(p, q, u):
    return folded(jnp.cos(X).at[p, q].multiply(u))


def extremes(p, q, u):
    return folded(ZEROS.at[p, q].max(u)), folded(ZEROS.at[p, q].min(u, mode="clip"))


def both_ways(p, q, u):
    a = jnp.zeros((N, N)).at[p, p[::-1]].add(u)
    return jnp.tanh(a + a.T).sum(0), (a - 2 * a.T).max(1)


def whole_rows(p, q, u):
    return folded(ZEROS.at[p].add(u[:, None] * X[0]))


def in_words(p, q, u):
    return folded(ZEROS.at[p.astype(np.int8), q.astype(np.int8)].add(u, mode="clip"))


def unsigned(p, q, u):
    return folded(ZEROS.at[abs(p).astype(np.uint8), abs(q).astype(np.uint8)].add(u, mode="clip"))


def windows(p, q, u):
    numbers = lax.ScatterDimensionNumbers(update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1))
    update = u[:, None] * jnp.arange(1.0, 4)
    return [folded(lax.scatter_add(ZEROS, jnp.stack([p, q], 1), update, numbers, mode=mode)) for mode in ("drop", "clip")]


def cubes(p, q, u):
    a = jnp.zeros((N, 3, M)).at[p, abs(p) % 3, q].add(u)
    return jnp.sin(a).sum((0, 1)), a.max(2)


def weights(p, q, u):
    return jax.value_and_grad(lambda x: jnp.tanh(ZEROS.at[p, q].add(u) * x).sum())(X)


PROGRAMS = [clipped, written, into_computed, extremes, both_ways, whole_rows, in_words, unsigned, windows, cubes, weights]


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_chunks_of_rows_are_rows_of_the_whole(function):
    args = [P, Q, U]
    jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(function(*a)))(*args)
    case = Case(jaxpr, args, stepwise.run(jaxpr, args), ["p", "q", "u"])
    program = with_scatters(load(jaxpr, case.names))
    assert program is not None
    told = [term for t in program.reachable() if isinstance(term := program.terms[t], Block) and term.call.prim in scatters_at.values()]
    assert all(term.call.pointwise for term in told)
    ex = original(program, RULES)
    for seed in range(8):
        check_plan(case, random_schedule(ex, random.Random(seed)))


def test_positions_of_the_rows_themselves_stay_one_scatter():
    """The updates have an index of what they are written into, which chunks would cut at both."""

    def program(x, q):
        return (jnp.exp(x).at[jnp.arange(N)[:, None], q].add(x[:, :2] * 2) * x).sum(1)

    loaded = load(jax.make_jaxpr(program)(X, np.zeros((N, 2), np.int32)), ["x", "q"])
    made = with_scatters(loaded)
    if made is not None:
        for t in made.reachable():
            term = made.terms[t]
            if isinstance(term, Block) and term.call.prim in scatters_at.values():
                rows = {axes[0][0] for axes in term.call.in_axes[3:]}
                assert not rows & {i for axes in term.call.in_axes[1:3] for axis in axes for i in axis}


def test_nothing_scattered_is_no_other_form():
    assert with_scatters(load(jax.make_jaxpr(lambda x: x @ x.T)(X), ["x"])) is None
    with jax.enable_x64(True):  # places are counted in int32 or int64, and some of these are neither
        numbers = lax.ScatterDimensionNumbers(update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
        wide = jax.make_jaxpr(lambda q: lax.scatter_add(ZEROS, q[:, None], jnp.ones((UPDATES, M), ZEROS.dtype), numbers))(
            Q.astype(np.uint64)
        )
        assert with_scatters(load(wide, ["q"])) is None
    assert with_scatters(load(jax.make_jaxpr(clipped)(P, Q, U), ["p", "q", "u"]), passes=()) is None


def factorisation(u, v, users, items):
    ratings = jnp.zeros((u.shape[0], v.shape[0])).at[users, items].set(1.0)
    return jax.value_and_grad(lambda u, v: jnp.mean((1 + 10 * ratings) * (ratings - u @ v.T) ** 2), (0, 1))(u, v)


def bags(words, documents, table):
    counts = jnp.zeros((1200, 1500)).at[documents, words].add(1.0)
    return jnp.log1p(counts) @ table, counts.max(0)


def graph(x, src, dst):
    edges = jnp.zeros((1200, 1200)).at[src, dst].add(1.0)
    edges = edges + edges.T + jnp.eye(1200)
    return edges @ x / edges.sum(1, keepdims=True)


def made(*shape):
    return (RNG.standard_normal(shape) * 0.3).astype(np.float32)


def places(n, count):
    return RNG.integers(0, n, count).astype(np.int32)


DENSE = {
    "factorisation": (factorisation, [made(1200, 8), made(1500, 8), places(1200, 3000), places(1500, 3000)]),
    "bags of words": (bags, [places(1500, 4000), places(1200, 4000), made(1500, 4)]),
    "graph": (graph, [made(1200, 4), places(1200, 3000), places(1200, 3000)]),
}


@pytest.mark.parametrize("name", tiered(DENSE, ["bags of words"], ["factorisation", "graph"]))
def test_matrices_made_of_lists_are_never_whole(name):
    function, args = DENSE[name]
    limit = 2 * 2**20  # the matrix takes 5.5 MiB or more
    planned = eqsat_mem.optimize(function, memory_limit=limit)
    plan = planned.plan(*args)
    assert plan.compiled_peak_bytes <= limit
    assert "scattered_at(" in plan.source
    comparison = same_values(function, planned, args, tolerance=1e-4)
    assert comparison.same, comparison
