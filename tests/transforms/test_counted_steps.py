"""Loops that count, as people write chunks by hand, become scans over the rows that their steps read and write."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.interpreter import evaluate
from eqsat_mem.testing import same_values
from eqsat_mem.transforms.control_flow import repeats
from eqsat_mem.transforms.counted_steps import with_counted_steps
from eqsat_mem.transforms.steps_at_once import with_steps_at_once
from tests.oracles.evaluation import values as evaluated

PASSES = load_rules().passes
ROWS, SIZE, WIDTH = 48, 6, 5
MIB = 2**20


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def program_of(function, args):
    return load(jax.make_jaxpr(lambda *a: jax.tree.leaves(function(*a)))(*args), [f"x{k}" for k in range(len(args))])


def counted(function, args=None):
    """The form without numbers that steps count, which computes the same bit for bit."""
    args = args or arrays((ROWS, WIDTH), (7, WIDTH))
    program = program_of(function, args)
    new = with_counted_steps(program, PASSES)
    if new is not None:
        before, after = evaluated(args, program, new)
        for x, y in zip(before, after, strict=True):
            np.testing.assert_array_equal(x, y)
    return new


def scans(program):
    return [scan for scan in repeats(program) if scan.call.prim.name == "scan"]


def kernel(x, y):
    return jnp.exp(-jnp.sum((x[:, None] - y) ** 2, -1)).sum(1)


def rows(x, start, size=SIZE):
    return lax.dynamic_slice_in_dim(x, start, size)


def written(out, part, start):
    return lax.dynamic_update_slice_in_dim(out, part, start, 0)


def fori(step, start, turns=ROWS // SIZE):
    return lax.fori_loop(0, turns, step, start)


OF_ROWS = {
    "chunks are read and written": lambda x, y: fori(lambda i, out: written(out, kernel(rows(x, i * SIZE), y), i * SIZE), jnp.zeros(ROWS)),
    "single rows are read and written": lambda x, y: fori(lambda i, out: out.at[i].set(kernel(x[i][None], y)[0]), jnp.zeros(ROWS), ROWS),
    "chunks are read by a map over numbers": lambda x, y: lax.map(lambda i: kernel(rows(x, i * SIZE), y), jnp.arange(ROWS // SIZE)),
    "starts are given": lambda x, y: lax.map(lambda start: kernel(rows(x, start), y), jnp.arange(0, ROWS, SIZE)),
    "chunks are summed": lambda x, y: fori(lambda i, total: total + kernel(y, rows(x, i * SIZE)), jnp.zeros(7)),
    "columns are read and written": lambda x, y: lax.fori_loop(
        0, WIDTH, lambda i, out: lax.dynamic_update_slice(out, jnp.sin(lax.dynamic_slice(x, (0, i), (ROWS, 1))), (0, i)), jnp.zeros_like(x)
    ),
    "loops begin later": lambda x, y: lax.fori_loop(
        3, 7, lambda i, out: written(out, kernel(rows(x, i * SIZE), y), i * SIZE), jnp.ones(ROWS)
    ),
    "numbers count what is read, too": lambda x, y: fori(
        lambda i, out: written(out, kernel(rows(x, i * SIZE), y) * i, i * SIZE), jnp.zeros(ROWS)
    ),
    "rows are read before they are written": lambda x, y: fori(
        lambda i, out: written(out, 2 * rows(out, i * SIZE) + rows(x, i * SIZE), i * SIZE), x + 1.0
    ),
    "rows are added": lambda x, y: lax.fori_loop(
        1, 5, lambda i, out: out + written(jnp.zeros(ROWS), kernel(rows(x, i * SIZE), y), i * SIZE), jnp.arange(1.0 * ROWS)
    ),
    "steps go backwards": lambda x, y: lax.scan(
        lambda out, i: (written(out, kernel(rows(x, i * SIZE), y), i * SIZE), None), jnp.zeros(ROWS), jnp.arange(ROWS // SIZE), reverse=True
    )[0],
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_are_slices_that_the_scan_reads_and_stacks(name):
    new = counted(OF_ROWS[name])
    for scan in scans(new):
        kinds = {eqn.primitive.name for eqn in scan.body.jaxpr.eqns}
        assert not kinds & {"dynamic_slice", "dynamic_update_slice", "scatter", "select_n"}
        assert all(aval.dtype != np.int32 for aval in scan.body.out_avals)


OTHER = {
    "windows overlap": lambda x, y: lax.map(lambda i: kernel(rows(x, i * (SIZE - 1)), y), jnp.arange(ROWS // SIZE)),
    "rows are left out": lambda x, y: lax.map(lambda i: kernel(rows(x, 2 * i * SIZE), y), jnp.arange(ROWS // SIZE // 2)),
    "places are drawn": lambda x, y: lax.map(lambda i: kernel(rows(x, i), y), (y[:, 0] * 10).astype(jnp.int32)),
    "rows that were written are read": lambda x, y: fori(
        lambda i, out: written(out, rows(out, (i - 1) * SIZE) + rows(x, i * SIZE), i * SIZE), x
    ),
    "what is written into is read whole": lambda x, y: fori(lambda i, out: written(out, rows(x, i * SIZE) + out.sum(), i * SIZE), x),
    "the last place is beyond the end": lambda x, y: lax.fori_loop(
        4, 9, lambda i, out: written(out, kernel(rows(x, i * SIZE), y), i * SIZE), jnp.zeros(ROWS)
    ),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_places_are_read_and_written_as_before(name):
    args = arrays((ROWS, WIDTH), (7, WIDTH))
    new = counted(OTHER[name], args)
    kinds = {eqn.primitive.name for scan in scans(new or program_of(OTHER[name], args)) for eqn in scan.body.jaxpr.eqns}
    assert kinds & {"dynamic_slice", "dynamic_update_slice"}


def test_what_is_read_of_a_carry_after_it_was_written_is_what_was_written():
    def twice(x, y):
        def step(i, carry):
            out, total = carry
            out = written(out, rows(x, i * SIZE), i * SIZE)
            return out, total + rows(out, i * SIZE).sum()

        return fori(step, (jnp.zeros((ROWS, WIDTH)), 0.0))

    counted(twice)


def walk(x, key):
    def step(carry, row):
        key, h = carry
        key, own = jax.random.split(key)
        return (key, jnp.tanh(h + row * jax.random.normal(own, row.shape))), h

    return lax.scan(step, (key, x[0]), x)[1]


def constant_place(x, _):
    return lax.fori_loop(0, 8, lambda i, out: lax.dynamic_update_slice(out, out[3:4] * 1.1 + i, (3, 0)), x)


def places_of_two_indices(x, _):
    places = (jnp.arange(4)[:, None] * 2 + jnp.arange(2)[None]).reshape(8)
    return lax.scan(lambda carry, p: ((carry[0] + 1, carry[1] + x[0] * p), p), (0, x[0]), places)


def places_of_shared_terms(x, _):
    places = jnp.arange(8)
    for _ in range(40):
        places = places + places * places
    return lax.scan(lambda carry, p: ((carry[0] + 1, carry[1] + p), p), (0, 0), places)


ODD = {
    "keys are carried": (walk, lambda: [arrays((8, 5))[0], jax.random.key(3)]),
    "a place is the same in all steps": (constant_place, lambda: arrays((8, 4), (1,))),
    "numbers come from two indices": (places_of_two_indices, lambda: arrays((8, 4), (1,))),
    "numbers come from shared terms": (places_of_shared_terms, lambda: arrays((8, 4), (1,))),
    "what is folded is empty": (
        lambda x, z: lax.map(lambda row: (jnp.sin(row[0]), jnp.sum(row[1], -1)), (x, z)),
        lambda: [np.ones((16, 4), np.float32), np.zeros((16, 0, 3), np.float32)],
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_steps_are_planned(name):
    function, args = ODD[name][0], ODD[name][1]()
    fast = eqsat_mem.optimize(function, memory_limit=2 * MIB)
    for x, y in zip(jax.tree.leaves(fast(*args)), jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_counters_are_counted_modulo_a_power_of_two():
    def wrapped(x, _):
        def step(carry, row):
            i, out = carry
            return (i + np.uint8(200), out + row * i), None

        return lax.scan(step, (np.uint8(0), x[0]), x)[0]

    program = program_of(wrapped, arrays((40, 4), (1,)))
    new = with_counted_steps(program, PASSES)
    for form in filter(None, (program, new)):
        for x, y in zip(evaluate(form, arrays((40, 4), (1,))), jax.tree.leaves(wrapped(*arrays((40, 4), (1,)))), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5)


@pytest.mark.parametrize("name", ["chunks are read and written", "chunks are summed", "single rows are read and written"])
def test_gradients_of_chunks_by_hand_are_scans_over_rows_and_then_none_at_all(name):
    args = arrays((ROWS, WIDTH), (7, WIDTH))
    gradient = jax.grad(lambda *a: jnp.sum(OF_ROWS[name](*a) ** 2), argnums=(0, 1))
    new = with_counted_steps(program_of(gradient, args), PASSES)
    at_once = with_steps_at_once(new, PASSES)
    assert len(scans(new)) == 2
    assert not scans(at_once)
    for form in (new, at_once):
        for x, y in zip(evaluate(form, args), gradient(*args), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


def test_chunks_by_hand_are_planned_anew():
    """And faster than they are predicted to be: rules apply to what the chunks compute, and chunks have other sizes."""

    def product(x, y, v):
        def step(i, out):
            part = rows(x, i * 16, 16)
            weights = jnp.exp(-0.5 * jnp.sum((part[:, None] - y) ** 2, -1))
            return written(out, weights @ v, i * 16)

        return lax.fori_loop(0, len(x) // 16, step, jnp.zeros(len(x)))

    args = arrays((1536, 6), (1500, 6), (1500,))
    fast = eqsat_mem.optimize(product, memory_limit=2 * MIB)
    plan = fast.plan(*args)
    assert "steps-at-once" in plan.rules_fired
    assert plan.compiled_peak_bytes <= 2 * MIB
    assert plan.predicted_s < plan.original_predicted_s / 2
    assert same_values(product, fast, args).same
