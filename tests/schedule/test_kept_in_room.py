"""Of slices that loops would compute again, those are kept that spare most and for which there is room."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import eqsat_mem
from eqsat_mem.schedule.cuts import Lazy, most_worth

ROWS, WIDTH = 2048, 32


def chain_cost(costs, read_last):
    """The cost of a chain whose values are each computed in every loop that comes later, from the last one before it that is kept."""

    def spent(keep):
        total = 0.0
        for reader in range(read_last):
            for t in range(min(reader, len(costs) - 1), -1, -1):
                total += costs[t] if t == reader or t not in keep else 0.0
                if t != reader and t in keep:
                    break
        return total

    return spent


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 6))
def test_what_is_kept_is_near_the_best_choice(costs, later, places):
    """Values of one size: at least the share of what the best choice spares that greedy algorithms promise, 1 - 1 / e."""
    spent = chain_cost(costs, len(costs) + later)
    able = range(len(costs))
    chosen = most_worth(able, dict.fromkeys(able, 1), spent, places)
    assert len(chosen) == len(set(chosen)) <= places
    best = min(spent(frozenset(some)) for k in range(places + 1) for some in itertools.combinations(able, k))
    nothing = spent(frozenset())
    assert nothing - spent(frozenset(chosen)) >= (1 - 1 / np.e) * (nothing - best) - 1e-9


def test_nothing_is_kept_that_spares_nothing_or_has_no_room():
    assert most_worth([1, 2], {1: 5, 2: 5}, lambda keep: 3.0, 100) == []
    assert most_worth([1, 2], {1: 5, 2: 50}, lambda keep: 3.0 - len(keep), 49) == [1]
    asked = []
    assert most_worth([1, 2, 3], {1: 1, 2: 1, 3: 1}, lambda keep: asked.append(keep) or 10.0 - sum(keep), 2) == [3, 2]
    assert len(asked) <= 6  # and not each again after each


def test_ways_to_split_are_made_when_they_are_asked_for_and_once():
    made = []
    ways = Lazy(made.append(k) or k for k in range(3))
    assert next(iter(ways)) == 0
    assert made == [0]
    assert [*ways] == [*ways] == made == [0, 1, 2]


def normalised(ws, x, y):
    """Layers with batch normalisation: each needs all rows of the one before."""
    for w, g in ws:
        x = x @ w
        x = jnp.tanh((x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-5) * g)
    return jnp.mean((x.sum(1) - y) ** 2)


def arguments(depth):
    rng = np.random.default_rng(3)
    f32 = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return [(f32(WIDTH, WIDTH) / 6, f32(WIDTH)) for _ in range(depth)], f32(ROWS, WIDTH), f32(ROWS)


def test_layers_are_kept_as_far_as_there_is_room(monkeypatch):
    args, kept = arguments(5), 3
    layer = ROWS * WIDTH * 4
    fixed = sum(a.nbytes for a in jax.tree.leaves(args)) + sum(a.nbytes for a in jax.tree.leaves(args[0])) + 4
    gradient = jax.value_and_grad(normalised)
    planned = eqsat_mem.optimize(gradient, memory_limit=int(fixed + (kept + 1.8) * layer))
    plan = planned.plan(*args)
    monkeypatch.setattr("eqsat_mem.schedule.search.kept_in_room", lambda *given: ())
    without = eqsat_mem.optimize(lambda *a: gradient(*a), memory_limit=int(fixed + (kept + 1.8) * layer), verify=False)
    before = without.plan(*args)
    assert plan.predicted_s < 0.9 * before.predicted_s
    want = gradient(*args)
    for mine, theirs in zip(jax.tree.leaves(planned(*args)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def evolved(w, x, key):
    """A step of evolution: perturbations are drawn for a population, and summed by how well each did among all."""
    drawn = jax.random.normal(key, (256, WIDTH, WIDTH))
    fitness = jax.vmap(lambda e: jnp.mean(jnp.tanh(x @ (w + 0.1 * e)) ** 2))(drawn)
    return w + jnp.tensordot(fitness - fitness.mean(), drawn, 1)


def test_numbers_made_of_random_bits_are_kept_and_not_the_bits():
    """The bits are two words for each number: there is no room for these."""
    rng = np.random.default_rng(8)
    args = (
        rng.standard_normal((WIDTH, WIDTH), np.float32),
        rng.standard_normal((128, WIDTH), np.float32),
        jax.random.key_data(jax.random.key(1)),
    )
    drawn = 256 * WIDTH * WIDTH * 4
    outside = 2 * args[0].nbytes + args[1].nbytes
    fast = eqsat_mem.optimize(evolved, memory_limit=outside + int(1.7 * drawn))
    made = fast.plan(*args)
    assert [text for loop in made.loops for text in loop.stacks if f"256,{WIDTH},{WIDTH}" in text and "f32" in text]
    assert not [text for loop in made.loops for text in loop.stacks if "u32" in text]
    np.testing.assert_allclose(fast(*args), jax.jit(evolved)(*args), rtol=1e-4, atol=1e-5)
