"""Loops keep the slices for later loops that spare most: small ones in place of all that these are made of."""

from __future__ import annotations

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.schedule.cost_model import again_s
from eqsat_mem.schedule.kept_slices import worth_keeping
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.minimum_cut import sink_side
from eqsat_mem.schedule.split import Kind, Phases, region
from eqsat_mem.testing import same_values
from tests.oracles.targets import CPU
from tests.schedule.test_split import index_of, traced
from tests.tiers import tiered

ROWS, COLUMNS = 1009, 601


def price(arcs, side):
    """The price of the arcs to one side from the other."""
    return sum(cost for begin, end, cost in arcs if begin not in side and end in side)


def test_no_side_of_a_network_costs_less_and_none_as_cheap_is_smaller():
    rng = random.Random(5)
    for _ in range(200):
        nodes = ["s", "t", *range(rng.randint(0, 5))]
        arcs = [(rng.choice(nodes), rng.choice(nodes), rng.randint(0, 4)) for _ in range(rng.randint(0, 14))]
        arcs = [(begin, end, cost) for begin, end, cost in arcs if begin != end]
        found = sink_side(arcs, "s", "t")
        sides = [{"t", *inside} for k in range(len(nodes) - 1) for inside in itertools.combinations(nodes[2:], k)]
        assert found in sides
        least = min(price(arcs, side) for side in sides)
        assert price(arcs, found) == least
        assert all(found <= side for side in sides if price(arcs, side) == least)


def rows_read(rng):
    """What is read of rows at fixed positions after an operation along them, or of several such."""
    count = rng.randint(3, COLUMNS // 2)
    along = rng.choice([
        lambda m: jnp.sort(m, 1),
        lambda m: jnp.cumsum(m, 1),
        lambda m: jnp.fft.rfft(m)[:, :count].real,
        lambda m: lax.cumlogsumexp(m, 1),
        lambda m: lax.cummax(m, 1),
        lambda m: lax.top_k(m, 5)[0],
    ])  # fmt: skip
    read = rng.choice([
        lambda v: v[:, v.shape[1] // 2],
        lambda v: v[:, 1 :: max(v.shape[1] // 3, 1)],
        lambda v: 0.25 * v[:, v.shape[1] // 4] + 0.75 * v[:, v.shape[1] // 4 + 1],
        lambda v: v[:, 1:4].mean(1),
        lambda v: jnp.stack([v[:, 0], v[:, -1]], 1),
        lambda v: jnp.concatenate([v[:, :2], v[:, -1:]], 1),
    ])  # fmt: skip
    one = lambda m: read(along(m))  # noqa: E731
    return rng.choice(
        [one, one, lambda m: one(m).reshape(len(m), -1)[:, 0] - m.mean(1), lambda m: one(m).reshape(len(m), -1).sum(1) + m.max(1)]
    )


def drawn(seed):
    """A program that reads a few numbers of each row of a matrix, and again with all of them; and what makes the matrix."""
    rng = random.Random(seed)
    make = rng.choice(["sin", "cos", "tanh"])
    read = rows_read(rng)
    use = rng.choice([
        lambda v: v / jnp.max(v),
        lambda v: v - v.mean(0),
        lambda v: (v.mean(0), jnp.where(jnp.any(v > 0.9), v, -v)),
        lambda v: jax.nn.softmax(v, 0),
        lambda v: (v - v.mean(0)) / (v.std(0) + 0.1),
        lambda v: (v / (1 + jnp.abs(v).sum()), jnp.sort(v, 0)[len(v) // 2]),
    ])  # fmt: skip
    return lambda x, y: use(read(getattr(jnp, make)(x[:, None] * y + y))), make


def choices(phases, seconds):
    """Which slices may be kept, in every way, where there are few: of those that take time, and of what reads these."""
    able = [t for t, loops in phases.loops_of.items() if phases.kind[t] is Kind.SLICE and loops >> phases.phase[t] > 1]
    made = set[int]()
    for t in able:
        if seconds[t] or not made.isdisjoint(phases.ex.program.operands(t)):
            made.add(t)
    return (frozenset(some) for k in range(4) for some in itertools.combinations(sorted(made), k))


@pytest.mark.parametrize("seed", tiered(range(40), quick=range(10), slow=()))
def test_no_other_choice_takes_less_than_what_is_worth_keeping(seed):
    """Seconds of computing slices again and of storing what is kept, over all ways to keep up to three of them."""
    ex = traced(drawn(seed)[0], (ROWS,), (COLUMNS,))
    memory, i = Memory(ex, CPU), index_of(ex.program, ROWS)
    full = memory.full_extents()
    phases = Phases(ex, region(ex), i)
    seconds = {t: again_s(ex, t, full, CPU) for t in phases.terms}
    stored = 3 / CPU.device.levels[-1][1]

    def spent(keep):
        kept = phases.keeping(keep)
        again = sum(seconds[t] * loops.bit_count() for t, loops in kept.loops_of.items())
        return again + stored * sum(memory.size(t, full) for t in kept.stacked - phases.stacked)

    found = spent(frozenset(worth_keeping(ex, memory, CPU, phases, full)))
    assert found <= min(map(spent, choices(phases, seconds))) * (1 + 1e-6)


@pytest.mark.parametrize("seed", tiered(range(40), quick=range(1, 3), slow=range(16)))
def test_rows_are_made_once_where_a_fold_reads_them_and_what_is_made_with_it(seed):
    f, make = drawn(seed)
    rng = np.random.default_rng(seed)
    args = rng.standard_normal(ROWS).astype(np.float32), rng.standard_normal(COLUMNS).astype(np.float32)
    outputs = sum(4 * out.size for out in jax.tree.leaves(jax.eval_shape(f, *args)))
    limit = 4 * (ROWS + COLUMNS) + 2 * outputs + 500 * 1024
    planned = eqsat_mem.optimize(f, memory_limit=limit)
    plan = planned.plan(*args)
    assert plan.loops
    assert plan.compiled_peak_bytes <= limit
    assert plan.source.count(f"jnp.{make}(") == 1
    assert same_values(f, planned, args, tolerance=1e-4)
