"""Searches that may be approximate, ``lax.approx_max_k`` and ``lax.approx_min_k``, are exact ones off TPUs: planned as ``top_k`` is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.ops import block_op


@pytest.mark.parametrize(("search", "axis"), [(lax.approx_max_k, 0), (lax.approx_min_k, -1)])
def test_the_nearest_are_found_in_chunks(search, axis):
    rng = np.random.default_rng(axis + 5)
    rows, columns, k = (int(n) for n in rng.integers((60, 70, 1), (90, 120, 9)))
    x, y = (jnp.asarray(rng.standard_normal((n, 3)), jnp.float32) for n in (rows, columns))

    def nearest(x, y):
        return search(jnp.sum((x[:, None] - y[None]) ** 2, -1), k, reduction_dimension=axis)

    values, places = eqsat_mem.optimize(nearest, memory_limit=16_000)(x, y)
    expected, found = nearest(x, y)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    np.testing.assert_array_equal(places, found)


@pytest.mark.parametrize("search", [lax.approx_max_k, lax.approx_min_k])
def test_they_are_selections(search):
    program = load(jax.make_jaxpr(lambda x: search(x, 3))(jnp.zeros((4, 50))), ["x"])
    assert {term.call.prim.name for term in program.terms if hasattr(term, "call")} == {"top_k"}


def test_what_devices_are_to_join_stays_as_it_is_and_is_pointwise_in_rows():
    """Without the last step, in which the largest of all are chosen, there are more results than are asked for."""

    def parts(x):
        return lax.approx_max_k(x, 2, recall_target=0.5, aggregate_to_topk=False)

    program = load(jax.make_jaxpr(parts)(jnp.zeros((4, 4096))), ["x"])
    (call,) = {term.call for term in program.terms if hasattr(term, "call")}
    assert call.prim.name == "approx_top_k"
    ins, outs = ([program.shape(axes) for axes in side] for side in (call.in_axes, call.out_axes))
    assert block_op("approx_top_k").pointwise(ins, outs, call.params) == [(("in", 0, 0), ("out", 0, 0), ("out", 1, 0))]
