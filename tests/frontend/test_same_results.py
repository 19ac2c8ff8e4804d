"""Results of loops that are the same for all rows of a batch, such as counts of steps: loops of their own compute them."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block
from eqsat_mem.ir.interpreter import evaluate

ROWS, WIDTH, STEPS = 6_000, 24, 9


def arguments(seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((ROWS, WIDTH), np.float32), rng.standard_normal((WIDTH, WIDTH), np.float32) / 8


def loops(function, *args):
    """The operands and pointwise axes of each loop."""
    program = load(jax.make_jaxpr(function)(*args), [f"x{k}" for k in range(len(args))])
    calls = {program.terms[t].call for t in program.reachable() if isinstance(program.terms[t], Block)}
    return sorted((bool(call.pointwise), len(call.in_axes)) for call in calls if call.prim.name in ("scan", "while"))


def integrated(y, w):
    """Steps of a solver that counts them, and shortens them, until they are short."""

    def step(state):
        count, time, length, y = state
        half = y + length / 2 * jnp.tanh(y @ w)
        return count + 1, time + length, 0.9 * length, y + length * jnp.tanh(half @ w)

    return lax.while_loop(lambda state: state[2] > 0.05, step, (0, jnp.float32(0), jnp.float32(0.2), y))


def filtered(y, w):
    """A filter whose gains are the same for all series: a matrix that each step makes of itself, stacked."""

    def step(state, x):
        spread, mean = state
        gain = spread @ jnp.linalg.inv(spread + jnp.eye(WIDTH))
        return (spread - 0.5 * gain @ spread + 0.1 * w @ w.T, mean + (jnp.sin(y + x) - mean) @ gain.T), (jnp.trace(gain), gain[0])

    return lax.scan(step, (jnp.eye(WIDTH), y), jnp.arange(STEPS, dtype=jnp.float32))


def trained(y, w):
    """A step of each row's own, with the moments and the count of an optimiser, inside of a loop over ``vmap``."""

    def row(v):
        def step(state, _):
            count, scale, v, moment = state
            count, scale = count + 1, scale * 0.9
            gradient = jax.grad(lambda v: jnp.sum(jnp.cos(w @ v) * v))(v)
            moment = 0.9 * moment + gradient
            return (count, scale, v - 0.1 * moment / (1 - scale), moment), jnp.sum(v)

        return lax.scan(step, (0, jnp.float32(1), v, jnp.zeros_like(v)), None, length=STEPS)

    return jax.vmap(row, out_axes=((None, None, 0, 0), 0))(y)


LOOPS = {"integrated": integrated, "filtered": filtered, "trained": trained}


@pytest.mark.parametrize("name", LOOPS)
def test_what_is_the_same_for_all_rows_is_computed_apart(name):
    y, w = arguments(0)
    (whole, few), (by_rows, all_operands) = loops(LOOPS[name], y, w)
    assert not whole
    assert by_rows
    assert few < all_operands


@pytest.mark.parametrize("name", LOOPS)
def test_loops_with_results_that_are_the_same_for_all_rows_run_in_chunks(name):
    y, w = arguments(1)

    def f(y, w):
        *_, last = results = jax.tree.leaves(LOOPS[name](y, w))
        pairs = jnp.sum(jnp.tanh(y[:, :, None] * results[3 if name == "integrated" else -3][..., :1, None]), (1, 2))
        return [jnp.sum(x) if x.ndim > 1 else x for x in results], pairs * jnp.sum(last)

    compiled = jax.jit(f).lower(y, w).compile()
    want = compiled(y, w)
    memory = compiled.memory_analysis()
    limit = y.nbytes + w.nbytes + memory.output_size_in_bytes + memory.temp_size_in_bytes // 3
    planned = eqsat_mem.optimize(f, memory_limit=limit)
    assert planned.plan(y, w).compiled_peak_bytes <= limit
    for a, b in zip(jax.tree.leaves(planned(y, w)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)


def test_what_rows_decide_together_is_no_result_of_a_chunk():
    """A count of steps that lasts as long as any row does, and a number that all rows make."""
    y, w = arguments(2)

    def ends(y, w):
        return lax.while_loop(lambda s: jnp.any(s[1] > 1), lambda s: (s[0] + 1, 0.5 * s[1]), (0, jnp.abs(y)))

    def made(y, w):
        return lax.scan(lambda s, _: ((jnp.tanh(s[0] + jnp.max(s[1])), jnp.sin(s[1]) * s[0]), s[0]), (jnp.float32(1), y), None, length=3)

    assert [by_rows for by_rows, _ in loops(ends, y, w)] == [False]
    assert [by_rows for by_rows, _ in loops(made, y, w)] == [False]


@pytest.mark.parametrize("seed", range(6))
def test_random_loops_are_those_of_jax(seed):
    draw = random.Random(seed)
    kinds = [draw.choice(["count", "decay", "rows", "sum", "matrix"]) for _ in range(draw.randint(2, 5))] + ["count", "rows"]
    draw.shuffle(kinds)
    first = {"count": 0, "decay": jnp.float32(1), "sum": jnp.float32(0), "matrix": 0.1 * jnp.ones((WIDTH, WIDTH))}
    is_scan, stacks = draw.random() < 0.5, draw.choice(["decay", "rows", "matrix"])

    def f(y, w):
        def step(state):
            alike = sum(jnp.sum(s) for kind, s in zip(kinds, state) if kind in ("count", "decay", "matrix"))
            new = {
                "count": lambda s: s + 1,
                "decay": lambda s: 0.9 * s + 0.01 * jnp.tanh(alike),
                "rows": lambda s: s + 0.1 * jnp.tanh(s @ w) * jnp.cos(alike),
                "sum": lambda s: s + jnp.sum(jnp.sin(y)) * jnp.tanh(alike),
                "matrix": lambda s: 0.5 * s + 0.01 * jnp.cos(s @ w),
            }
            return [new[kind](s) for kind, s in zip(kinds, state)]

        begin = [y if kind == "rows" else first[kind] for kind in kinds]
        place = kinds.index(stacks) if stacks in kinds else 0
        if is_scan:
            last, stacked = lax.scan(lambda s, _: (step(s), s[place]), begin, None, length=5)
            return last, stacked
        counter = kinds.index("count")
        return lax.while_loop(lambda s: s[counter] < 5, step, begin), ()

    y, w = arguments(seed)
    program = load(jax.make_jaxpr(f)(y, w), ["y", "w"])
    want = jax.tree.leaves(jax.jit(f)(y, w))
    for a, b in zip(evaluate(program, [y, w]), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)
    assert any(by_rows for by_rows, _ in loops(f, y, w))
    planned = eqsat_mem.optimize(f, memory_limit=sum(x.nbytes for x in (y, w, *want)) + 6 * y.nbytes)
    for a, b in zip(jax.tree.leaves(planned(y, w)), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)
