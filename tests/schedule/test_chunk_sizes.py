"""A tighter limit gives a program that holds no more once compiled."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.backends.xla import compiled_peak
from tests.schedule.test_remat import normalised
from tests.schedule.test_search import kernel_vector
from tests.schedule.test_split import bound, softmax
from tests.test_pipeline import layers, nearest
from tests.tiers import tiered
from tests.transforms.test_scan_rewrite import loss

SHARES = (1.5, 0.5, 0.15, 0.04)
"""Limits, as shares of what the program holds as written; the ladder ends where no plan fits."""


def squares(function, *arguments):
    return jax.value_and_grad(lambda *a: jnp.sum(function(*a) ** 2), arguments)


PROGRAMS = {
    "kernel gradients": (squares(kernel_vector, 0, 1, 2), [(600, 3), (600, 3), (600, 2)]),
    "bound and gradients": (jax.value_and_grad(bound, (0, 2)), [(1500, 3), (1500, 1), (16, 3)]),
    "attention gradients": (squares(softmax, 0, 1, 2), [(400, 16)] * 3),
    "nearest neighbours": (nearest, [(300, 8), (1003, 8)]),
    "network gradients": (jax.value_and_grad(layers, (1, 2)), [(1500, 16), (16, 128), (128, 4)]),
    "gradient of a scan": (jax.value_and_grad(loss, (0, 1)), [(1000,), (1000,), (100,)]),
    "batch normalisation": (jax.grad(lambda x, *w: normalised(w, x), tuple(range(1, 7))), [(400, 16), *[(16, 16)] * 6]),
    "matrix chain": (lambda a, b, c, d: jnp.sum(jnp.tanh(a @ b) @ (c @ d)), [(800, 20), (20, 900), (900, 10), (10, 700)]),
}


@pytest.mark.parametrize(
    "name", tiered(PROGRAMS, ["nearest neighbours", "matrix chain"], [name for name in PROGRAMS if name != "batch normalisation"])
)
def test_tighter_limits_hold_no_more(name):
    function, shapes = PROGRAMS[name]
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    written = compiled_peak(function, args, optimise=False)[0]
    peaks = []
    for share in SHARES:
        try:
            plan = eqsat_mem.optimize(partial(function), memory_limit=int(share * written), max_seconds=60.0).plan(*args)
        except eqsat_mem.MemoryLimitError:
            break
        assert plan.compiled_peak_bytes <= share * written
        peaks.append(plan.compiled_peak_bytes)
    assert len(peaks) >= 2
    assert all(tighter <= looser for looser, tighter in itertools.pairwise(peaks)), peaks


def test_a_program_that_fits_as_written_stays_whatever_was_predicted_of_it():
    """XLA computes this product in one fusion that holds nothing, which the model does not foresee."""
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in [(600, 3), (600, 3), (600, 2)]]
    limit = compiled_peak(kernel_vector, args)[0]
    plan = eqsat_mem.optimize(kernel_vector, memory_limit=limit).plan(*args)
    assert plan.unchanged
    assert plan.compiled_peak_bytes == limit < plan.original_peak_bytes
