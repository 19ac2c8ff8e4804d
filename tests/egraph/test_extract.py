"""Extraction against trying every choice, and what an extraction keeps of the original."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqsat_mem import ir
from eqsat_mem.egraph.extract import as_written, extract, search
from eqsat_mem.egraph.node_costs import node_costs
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.egraph.soundness.sample_programs import PROGRAMS
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.interpreter import evaluate
from eqsat_mem.schedule.cost_model import term_seconds
from eqsat_mem.transforms.plan_bodies import calls
from tests.oracles.evaluation import values
from tests.oracles.extraction import cheapest, cost_of
from tests.oracles.targets import CPU
from tests.tiers import tiered

SECONDS = partial(term_seconds, backend=CPU)

RULES = load_rules()
SEARCHED = ("kernel_vector", "by_norm", "scaled", "chain", "chain_with_transposes", "chain_with_batch", "sums", "quotients", "noise_plus")
SMALL = Limits(max_rows=20_000, large_elements=0)


def view_of(name, limits=SMALL):
    fun, args = PROGRAMS[name]
    return saturate(load(jax.make_jaxpr(fun)(*args), [f"a{k}" for k in range(len(args))]), RULES, limits)


@pytest.mark.parametrize("price", tiered([0.0, 1e-9], [1e-9]))
@pytest.mark.parametrize("kind", ["seconds", "random"])
def test_the_search_reaches_95_percent_of_the_optimum(kind, price):
    compared = 0
    for name in SEARCHED:
        view, rng = view_of(name), random.Random(1)
        costs = node_costs(view, SECONDS if kind == "seconds" else lambda program, t, unrolled, rng=rng: rng.random(), price)
        best = cheapest(view, costs)
        if best is not None:
            compared += 1
            assert best >= 0.95 * cost_of(costs, view, search(view, costs)), name
    assert compared >= 8


def test_the_price_of_memory_chooses_the_smaller_value():
    def f(a, b, c):
        return (a @ b) @ c

    args = [np.ones((40, 400), np.float32), np.ones((400, 300), np.float32), np.ones((300, 400), np.float32)]
    view = saturate(load(jax.make_jaxpr(f)(*args), "abc"), RULES, SMALL)

    def backwards(program, t, unrolled):
        term = program.terms[t]
        return 1e6 / program.extent(program.free[t]) if isinstance(term, ir.Dot) else 0.0

    def largest(price):
        program = extract(view, backwards, price).program
        return max(program.extent(program.free[t]) for t in program.reachable() if isinstance(program.terms[t], ir.Dot))

    assert largest(0.0) == 400 * 400
    assert largest(1e3) == 40 * 400


def test_a_product_used_twice_is_computed_once():
    def f(a, b, v, w):
        p = a @ b
        return p @ v, p @ w, p

    args = [np.ones(s, np.float32) for s in [(300, 300), (300, 300), (300, 200), (300, 200)]]
    view = saturate(load(jax.make_jaxpr(f)(*args), "abvw"), RULES)
    program = extract(view, SECONDS, 0.0).program
    assert sum(isinstance(program.terms[t], ir.Dot) for t in program.reachable()) == 3


def test_outputs_effects_and_lines_stay():
    def f(x):
        jax.debug.print("{}", x[0])
        return jnp.sum(x * x), x

    x = np.ones(3, np.float32)
    program = load(jax.make_jaxpr(f)(x), ["x"])
    taken = extract(saturate(program, RULES, SMALL), SECONDS, 0.0).program
    assert len(taken.effects) == len(program.effects) == 1
    assert [o.axes for o in taken.outputs] == [o.axes for o in program.outputs]
    assert taken.inputs == program.inputs
    assert {str(s) for s in taken.source.values()} <= {str(s) for s in program.source.values()}
    for got, want in zip(evaluate(taken, [x]), evaluate(program, [x]), strict=True):
        np.testing.assert_array_equal(got, want)


def test_renames_that_swap_names_go_through_a_spare_index():
    def f(a):
        s = jnp.tanh(a @ a.T)
        return s + s.T * 2.0

    a = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    program = load(jax.make_jaxpr(f)(a), "a")
    view = saturate(program, RULES, SMALL)
    ((got,),) = values([a], extract(view, SECONDS, 1e-6).program)
    np.testing.assert_allclose(got, jax.jit(f)(a), rtol=1e-5)


def test_numbers_that_egglog_would_confuse_stay_apart():
    def f(x):
        return x * -0.0, x * 0.0, x + jnp.nan, x + jnp.inf, x.astype(np.int32) + 2**30

    x = np.float32(1.5)
    program = load(jax.make_jaxpr(f)(x), "x")
    taken = extract(saturate(program, RULES, SMALL), SECONDS, 0.0).program
    for got, want in zip(evaluate(taken, [x]), f(jnp.asarray(x)), strict=True):
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_low_precision_is_kept():
    def f(x, y):
        return jnp.sum((x[:, None] - y[None]) ** 2, -1), x @ y.T

    x, y = (jnp.ones((n, 3), jnp.bfloat16) for n in (4, 5))
    program = load(jax.make_jaxpr(f)(x, y), "xy")
    taken = extract(saturate(program, RULES, SMALL), SECONDS, 0.0).program
    for got, want in zip(evaluate(taken, [x, y]), f(x, y), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def with_scan(seed, table=1.0):
    """A program with a scan between other operations, which ``seed`` draws, and a closed-over array."""
    rng = random.Random(seed)
    before, after = (rng.sample([jnp.sin, jnp.exp, jnp.tanh, jnp.negative], 2) for _ in range(2))
    weights = np.full((60, 50), table, np.float32)

    def function(x, y):
        distances = jnp.sum((before[0](x)[:, None] - before[1](y)[None]) ** 2, -1)
        carry, stacked = jax.lax.scan(lambda c, z: (c + jnp.exp(z) @ y, z * 2), y[:1], distances[:, None, :] * weights[:, None])
        return after[0](stacked[:, 0]) @ after[1](y) + carry

    return load(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((n, 3), jnp.float32) for n in (60, 50))), ["x", "y"])


@pytest.mark.parametrize("seed", range(4))
def test_a_program_with_other_plans_of_its_bodies_has_the_same_e_graph(seed):
    program = with_scan(seed)
    (call,) = calls(program)

    def planned(scratch):
        return program.replace_calls({call: replace(call, scratch_bytes=scratch, bodies_s=(1e-6 * scratch,))})

    limits = Limits(large_elements=0, max_rows=5_000)
    view, other = saturate(planned(1000), RULES, limits), planned(2000)
    same, anew = view.with_calls(other), saturate(planned(2000), RULES, limits)
    assert same is not None
    assert same.program is other
    assert (same.nodes, same.facts, same.levels, same.rows) == (anew.nodes, anew.facts, anew.levels, anew.rows)
    for built in (as_written, *(partial(extract, seconds=SECONDS, memory_price=price) for price in (0.0, 1e-8))):
        one, two = built(same), built(anew)
        assert str(one.program) == str(two.program)
        assert (one.splits, one.accumulates, one.unrolls) == (two.splits, two.accumulates, two.unrolls)
        assert {call.scratch_bytes for call in calls(one.program)} == {2000}


def test_another_program_has_another_e_graph():
    program = with_scan(0)
    view = saturate(program, RULES, Limits(max_iterations=0))
    assert view.with_calls(with_scan(1)) is None
    assert view.with_calls(with_scan(0)) is None, "whose body is another function"
    assert view.with_calls(replace(program, consts=[const + 1 for const in program.consts])) is None
    assert view.with_calls(replace(program)) is not None
