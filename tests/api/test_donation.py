"""Donated arguments: what an output takes over counts once, where JAX gives it away."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqsat_mem import MemoryLimitError, optimize
from eqsat_mem.api.compiled import donated_leaves


def test_an_output_in_the_memory_of_a_donated_argument_counts_once():
    def step(w, scale):
        return w * scale

    w = jax.ShapeDtypeStruct((1 << 18,), jnp.float32)
    limit = (1 << 20) + 4096
    plan = optimize(step, memory_limit=limit, donate_argnums=0).plan(w, 2.0)
    assert plan.peak_bytes <= limit
    assert optimize(step, memory_limit=limit, donate_argnames="w").plan(scale=2.0, w=w).peak_bytes == plan.peak_bytes
    fast = optimize(step, memory_limit=limit, donate_argnums=0)
    given = jnp.ones(w.shape)
    np.testing.assert_array_equal(fast(given, 2.0), 2 * np.ones(w.shape))
    assert given.is_deleted()
    with pytest.raises(MemoryLimitError):
        optimize(step, memory_limit=limit).plan(w, 2.0)
    with pytest.raises(MemoryLimitError):  # within a larger program nothing is donated
        jax.jit(optimize(step, memory_limit=limit, donate_argnums=0))(jnp.ones(w.shape), 2.0)


@pytest.mark.parametrize(
    ("options", "donated"),
    [
        ({}, [False] * 5),
        ({"donate_argnums": 0}, [True, True, False, False, False]),
        ({"donate_argnums": (1,)}, [False, False, True, False, False]),
        ({"donate_argnums": (-1,)}, [False] * 5),  # which JAX donates neither
        ({"donate_argnames": "state"}, [False, False, False, True, True]),
        ({"donate_argnames": ("w",)}, [True, True, False, False, False]),
    ],
)
def test_leaves_of_donated_arguments(options, donated):
    def step(w, x, *, state):
        return w

    assert donated_leaves(step, options, ([1.0, 2.0], 3.0), {"state": {"m": 4.0, "v": 5.0}}) == donated
