"""``cond`` and ``switch`` are pointwise in the axes that all branches act on row by row, and sum over those that all sum over."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqsat_mem.frontend import loop_roles
from tests.tiers import tiered
from tests.transforms.test_loop_axes import squeezed, values
from tests.transforms.test_while_axes import split_along

ROWS, WIDTH = 5, 3


@pytest.fixture
def small_too(monkeypatch):
    """Choices are looked into however small they are."""
    monkeypatch.setattr(loop_roles, "SMALL_BYTES", 0)


APART = [
    lambda x, w: (jnp.tanh(x @ w), jnp.sum(x, 0)),
    lambda x, w: (jnp.sort(x, 1), jnp.zeros(WIDTH)),
    lambda x, w: (x, jnp.sum(x * x, 0) @ w),
    lambda x, w: (jnp.zeros_like(x), w[0] * jnp.sum(x, 0)),
    lambda x, w: (lax.scan(lambda c, y: (c + y * x[:, 0], c), x[:, 1], x.T)[1].T, -jnp.sum(x, 0)),
]
MIXED = [lambda x, w: (x[::-1], jnp.sum(x, 0)), lambda x, w: (x - x.mean(0), jnp.sum(x, 0)), lambda x, w: (x, jnp.max(x, 0))]


def drawn(branches):
    def function(which, x, w):
        rows, sums = lax.switch(which, branches, x, w)
        return rows * 2, sums

    return function


@pytest.mark.parametrize("seed", tiered(range(40), range(6), range(6, 20)))
def test_branches_that_keep_rows_apart_are_split(seed, small_too):
    rng = np.random.default_rng(seed)
    branches = [APART[0], *(APART[k] for k in rng.integers(0, len(APART), rng.integers(1, 4)))]
    args = [np.int32(rng.integers(len(branches))), *values((ROWS, WIDTH), (WIDTH, WIDTH), seed=seed)]
    assert split_along(drawn(branches), args, "cond") == ({ROWS}, {ROWS})
    mixed = [*branches, MIXED[rng.integers(len(MIXED))]]
    assert ROWS not in split_along(drawn(mixed), args, "cond")[0]


def test_a_sum_in_one_branch_only_is_no_sum(small_too):
    branches = [lambda x: jnp.sum(x, 0), lambda x: jnp.ones(WIDTH)]
    args = [np.int32(1), *values((ROWS, WIDTH))]
    assert split_along(lambda which, x: lax.switch(which, branches, x), args, "cond")[1] == set()


def kernels(which, x, v):
    distances = jnp.sum((x[:, None] - x[None]) ** 2, -1)
    return lax.switch(which, [lambda d: jnp.exp(-d), lambda d: 1 / (1 + d), lambda d: jnp.maximum(1 - d, 0.0)], distances) @ v


def folded(big, x):
    return lax.cond(big, lambda y: jnp.sum(jnp.exp(y), 1), lambda y: y[:, 0], jnp.sin(x[:, None] * x))


def summed(which, x, y):
    distances = jnp.sum((x[:, None] - y) ** 2, -1)
    return lax.switch(which, [lambda d: jnp.exp(-d).sum(1), lambda d: (1 / (1 + d)).sum(1)], distances)


PLANS = {
    "summed": lambda: (summed, [np.int32(1), *values((1501, 4), (1499, 4))]),
    "kernels": lambda: (kernels, [np.int32(1), *values((500, 3), (500, 2))]),
    "folded": lambda: (folded, [True, *values((700,))]),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_choice_runs_in_chunks_of_rows(name):
    function, args = PLANS[name]()
    assert squeezed(function, args, 0.25).loops


@pytest.mark.parametrize("part", [0.02, 0.04])
def test_sums_of_all_branches_are_added_up_chunk_by_chunk(part):
    function, args = PLANS["summed"]()
    assert squeezed(function, args, part).loops
