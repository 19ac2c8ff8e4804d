"""Elements that unrolled folds read from gathers and other moves: each is moved on its own, and values are those of the program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import as_written
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Input
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.schedules import unscheduled
from eqsat_mem.schedule.search import schedule
from eqsat_mem.schedule.strided_reads import Columns
from tests.oracles.evaluation import results
from tests.oracles.targets import CPU

RULES = load_rules()


def trees(x, features, thresholds):
    """The leaves that rows reach in trees of a few levels, as whole numbers."""
    levels = (x[:, features] > thresholds).astype(jnp.int32)
    return jnp.sum(levels * 2 ** jnp.arange(features.shape[1]), -1)


def neighbours(x, near):
    """Sums over neighbours of a function of their distances: the gathered axis that is folded holds coordinates."""
    return jnp.sum(jnp.exp(-jnp.sum((x[near] - x[:, None]) ** 2, -1)), 1)


def neighbours_of_others(x, table, near):
    """The same of rows of another array."""
    return jnp.sum(jnp.exp(-jnp.sum((table[near] - x[:, None]) ** 2, -1)), 1)


def mean_of_neighbours(x, near):
    """Here the folded axis counts neighbours."""
    return jnp.tanh(jnp.sum(x[near] * x[:, None], 1))


def columns(x, features):
    """Rows at a few places, each of one number: without their place they have no axis."""
    return jnp.sum(jnp.cos(x[0, features[0]] + x[:, features[1]]), -1)


def joined(x, y):
    """Coordinates of two arrays side by side."""
    both = jnp.concatenate([x[:, None], jnp.broadcast_to(y, (x.shape[0], *y.shape))], 1)
    return jnp.sum(jnp.sin(both), -1)


def arguments(kind, seed, rows, coordinates, count):
    random = np.random.RandomState(seed)
    x = random.standard_normal((rows, coordinates)).astype(np.float32)
    if kind is columns:
        return x, random.randint(0, coordinates, (2, count))
    if kind is trees:
        return x, random.randint(0, coordinates, (5, count)), random.standard_normal((5, count)).astype(np.float32)
    if kind is neighbours_of_others:
        return x, random.standard_normal((3 * rows, coordinates)).astype(np.float32), random.randint(0, 3 * rows, (rows, count))
    return x, random.standard_normal((4, coordinates)).astype(np.float32) if kind is joined else random.randint(0, rows, (rows, count))


def extraction(kind, args):
    program = load(jax.make_jaxpr(kind)(*args), [f"x{k}" for k in range(len(args))])
    return as_written(saturate(program, RULES, Limits(max_iterations=0, large_elements=1)))


@pytest.mark.parametrize("kind", [trees, neighbours, neighbours_of_others, mean_of_neighbours, columns, joined])
@settings(deadline=None, max_examples=12, derandomize=True)
@given(st.integers(0, 99), st.integers(2, 40), st.integers(1, 4), st.integers(1, 6))
def test_values(kind, seed, rows, coordinates, count):
    args = arguments(kind, seed, rows, coordinates, count)
    ex, (expected,) = extraction(kind, args), results(kind, *args)
    for made in (unscheduled(ex, CPU), schedule(ex, 0, CPU)):
        (found,) = results(emit(made).function, *args)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "count", "pieces", "size"), [(trees, 6, 6, 40 * 5), (neighbours, 20, 3, 40 * 20), (neighbours, 2, 6, 40)])
def test_no_gather_is_sliced(kind, count, pieces, size):
    """XLA takes ten times as long to slice a gather as to gather slices."""
    args = arguments(kind, 0, 40, 3, count)
    jaxpr = jax.make_jaxpr(emit(unscheduled(extraction(kind, args), CPU)).function)(*args)
    gathers = [eqn for eqn in jaxpr.eqns if eqn.primitive is lax.gather_p]
    assert [eqn.outvars[0].aval.size for eqn in gathers] == [size] * pieces


def test_a_gather_that_is_read_whole_is_made_once():
    """What is read whole beside the fold is there."""

    def both(x, features):
        moved = x[:, features]
        return jnp.sum(moved**2, -1), moved

    x, features, _ = arguments(trees, 1, 40, 3, 4)
    ex = extraction(both, (x, features))
    jaxpr = jax.make_jaxpr(emit(unscheduled(ex, CPU)).function)(x, features)
    assert sum(eqn.primitive is lax.gather_p for eqn in jaxpr.eqns) == 1


def test_what_loops_gather_from_is_not_copied_column_by_column():
    """Columns made outside of a loop would be a copy of the table, which XLA holds throughout."""
    args = arguments(neighbours_of_others, 2, 4000, 3, 8)
    made = schedule(extraction(neighbours_of_others, args), 3 * 2**18, CPU)
    outside = jax.make_jaxpr(emit(made).function)(*args).jaxpr
    assert made.chunks
    assert not [
        eqn
        for eqn in outside.eqns
        if eqn.primitive is not lax.while_p and eqn.primitive is not lax.scan_p and outside.invars[1] in eqn.invars
    ]
    read = Columns(made.ex).read_by_loops(made.seq, Memory(made.ex, CPU).fused)
    table = next(t for t, term in enumerate(made.ex.program.terms) if isinstance(term, Input) and term.slot == 1)
    assert table in read.whole - read.apart
