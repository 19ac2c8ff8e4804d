"""Large values that loops do not split are computed in pieces inside them, with the short folds that kernels write out in between."""

from __future__ import annotations

import random

import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.testing import same_values
from tests.tiers import tiered

ROWS, COLUMNS = 509, 453


def drawn(seed):
    """A product of two computed matrices around an argument, reduced, whose second is of distances; and its arguments."""
    rng = random.Random(seed)
    width = rng.choice([2, 3, 5])
    fold = rng.choice([
        lambda d: jnp.sum(d**2, -1),
        lambda d: jnp.sum(jnp.abs(d), -1),
        lambda d: jnp.max(jnp.abs(d), -1),
        lambda d: jnp.sum(jnp.where(d > 0, d, 0.5 * d * d), -1),
    ])  # fmt: skip
    use = rng.choice([lambda s: jnp.sqrt(s + 1e-3), lambda s: jnp.exp(-s), lambda s: 1 / (1 + s), lambda s: jnp.tanh(s) + s])
    last = rng.choice([lambda p: p.min(1), lambda p: jnp.sum(jnp.tanh(p), 1), lambda p: p.max(1) - p.mean(1), lambda p: jnp.tanh(p).sum(0)])
    both = rng.random() < 0.5

    def matrix(a, b):
        return use(fold(a[:, None] - b[None]))

    def f(x, y, t):
        first = matrix(x, x) if both else jnp.sin(x[:, None, 0] * x[None, :, 0])
        return last(first @ t @ matrix(y, y[::-1]).T)

    numbers = np.random.default_rng(seed)
    shapes = (ROWS, width), (COLUMNS, width), (ROWS, COLUMNS)
    return f, [numbers.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("seed", tiered(range(24), quick=[0], slow=range(8)))
def test_neither_matrix_of_distances_is_ever_whole(seed):
    f, args = drawn(seed)
    limit = sum(a.nbytes for a in args) + int(0.6 * 4 * COLUMNS**2)
    planned = eqsat_mem.optimize(f, memory_limit=limit)
    assert planned.plan(*args).compiled_peak_bytes <= limit
    assert same_values(f, planned, args, tolerance=1e-3)
