"""Sums that scans carry move behind what is linear in them, so that only smaller sums are ever whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem import pipeline, verification
from eqsat_mem.candidates import Forms
from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import original
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.events import Clock
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.interpreter import evaluate
from eqsat_mem.ir.jaxprs import aval_bytes
from eqsat_mem.options import Options
from eqsat_mem.request import request_of
from eqsat_mem.testing import same_values
from eqsat_mem.transforms.control_flow import repeats
from eqsat_mem.transforms.scan_rewrite import forms
from eqsat_mem.transforms.step_sums import with_step_sums
from tests.oracles.targets import CPU
from tests.tiers import tiered

RULES = load_rules()
POINTS, OTHERS, STEPS = 160, 150, 4
MATRIX = POINTS * OTHERS * 4
MIB = 2**20


def values(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def points(seed=0):
    return values((POINTS, 3), (OTHERS, 3), (OTHERS,), seed=seed)


def program_of(function, args):
    return load(jax.make_jaxpr(lambda *a: jax.tree.leaves(function(*a)))(*args), [f"x{k}" for k in range(len(args))])


def function_of(program):
    return lambda *args: list(evaluate(program, args))


def summed(function, args=None):
    return with_step_sums(program_of(function, args or points()), RULES.passes)


def largest_carry(program):
    """Bytes of the largest value that a scan of a program carries."""
    scans = [scan for scan in repeats(program) if scan.call.prim.name == "scan"]
    return max((aval_bytes([aval]) for scan in scans for aval in scan.body.out_avals[: scan.carries]), default=0)


def distances(x, y):
    return jnp.sum((x[:, None] - y) ** 2, -1)


# --- programs drawn at random -------------------------------------------------------------------------


class Drawn:
    """Iterations with a matrix that is made from points, and the gradient of what they come to with respect to the points."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.matrix, self.change, self.step, self.again, self.reverse = (int(n) for n in rng.integers(0, 60, 5))

    def loss(self, x, y, v):
        d = distances(x, y)
        kernels = [lambda: jnp.exp(-d), lambda: 1 / (1 + d), lambda: d / POINTS, lambda: jax.nn.softmax(-d, -1), lambda: x @ y.T / 9]
        k = kernels[self.matrix % len(kernels)]()
        changes = [
            lambda: k,
            lambda: k / k.sum(1, keepdims=True),
            lambda: jnp.where(d < 4.0, k, 0.0),
            lambda: k - k.mean(0),
            lambda: -2 * k,
            lambda: jnp.where(d < 4.0, k, d / POINTS),
        ]
        k = changes[self.change % len(changes)]()

        def step(v, _):
            ways = [
                lambda: jnp.tanh(k.T @ jnp.tanh(k @ v)),
                lambda: jax.nn.logsumexp(jax.nn.logsumexp(v - k, 1)[:, None] - k, 0) / 9,
                lambda: v + jnp.sum(jnp.sin(k * v), 0) / POINTS,
            ]
            return ways[self.step % len(ways)](), jnp.sum(v)

        v, sums = lax.scan(step, v, None, length=STEPS, reverse=self.reverse % 2 == 0)
        after = [lambda: 0.0, lambda: jnp.mean(k @ v), lambda: jnp.mean(d * k)]
        return jnp.mean(v**2) + jnp.mean(sums) + after[self.again % len(after)]()

    def __call__(self, x, y, v):
        return jax.value_and_grad(self.loss, (0, 1))(x, y, v)


@pytest.mark.parametrize("seed", tiered(range(60), range(6), range(6, 20)))
def test_no_sum_as_large_as_the_matrix_is_carried(seed):
    function, args = Drawn(seed), points(seed)
    program = program_of(function, args)
    new = with_step_sums(program, RULES.passes)
    assert largest_carry(program) == MATRIX
    assert new is not None
    assert new.passes == {"sums-of-steps"}
    made = list(forms(original(new, RULES), RULES))
    for form in (new, *made):
        comparison = same_values(function_of(program), function_of(form), args, tolerance=2e-4)
        assert comparison.same, comparison
    assert max(map(largest_carry, made)) < MATRIX / 8


# --- what moves, and what stays -----------------------------------------------------------------------


def carried(read, step=lambda total, part: total + part, start=None):
    """A function that reads a sum over steps, to each of which a part of it is added."""

    def function(x, y, v):
        def turn(total, s):
            part = jnp.exp(-s * distances(x, y))
            return step(total, part), None

        return read(lax.scan(turn, jnp.zeros((POINTS, OTHERS)) if start is None else start, jnp.arange(4.0))[0], x, y, v)

    return function


MOVES = {
    "a product with a vector": lambda s, x, y, v: s @ v,
    "a sum of products": lambda s, x, y, v: jnp.sum(s * distances(x, y)),
    "row sums, divided": lambda s, x, y, v: jnp.sum(s / (1 + distances(x, y)), 1),
    "what is chosen of it, transposed": lambda s, x, y, v: jnp.sum(jnp.where(distances(x, y) < 1, s, 0.0).T, 0),
    "a difference from something else": lambda s, x, y, v: (distances(x, y) - s) @ v,
    "a choice between it and something else": lambda s, x, y, v: jnp.where(distances(x, y) < 1, s, v) @ y,
    "a sum less its own mean": lambda s, x, y, v: ((s - s.mean(1, keepdims=True)) * distances(x, y)) @ y,
    "a sum with one vector added to each row": lambda s, x, y, v: jnp.einsum("ij,jk->k", s + v, y),
    "two that are small": lambda s, x, y, v: (s @ y, -s.T @ x),
}

STAYS = {
    "a result": lambda s, x, y, v: s,
    "a function that is not linear": lambda s, x, y, v: jnp.exp(s) @ v,
    "a product with itself": lambda s, x, y, v: (s * s) @ v,
    "a quotient by it": lambda s, x, y, v: (v / s).sum(0),
    "a maximum": lambda s, x, y, v: s.max(1),
    "a choice by it": lambda s, x, y, v: jnp.where(s > 0, v, 0.0).sum(1),
    "a vector, and a result": lambda s, x, y, v: (s @ v, s),
    "a linear function that is no smaller": lambda s, x, y, v: jnp.sin(2 * s) @ v,
    "rows in order": lambda s, x, y, v: jnp.sort(s * 2, 1)[:, 0],
}


@pytest.mark.parametrize("name", MOVES)
def test_what_is_linear_and_smaller_moves(name):
    function, args = carried(MOVES[name]), points()
    new = summed(function)
    assert new is not None
    assert same_values(function_of(program_of(function, args)), function_of(new), args, tolerance=1e-5).same
    assert largest_carry(next(iter(forms(original(new, RULES), RULES)))) < MATRIX / 8


@pytest.mark.parametrize("name", STAYS)
def test_what_is_not_linear_or_not_smaller_stays(name):
    assert summed(carried(STAYS[name])) is None


ADDS = {
    "on the left": lambda total, part: part + total,
    "two values": lambda total, part: (total + part) + 2 * part,
    "less a value": lambda total, part: total - part,
    "less one and with another": lambda total, part: (total - part) + 3 * part,
}
OTHERWISE = {
    "a decay": lambda total, part: 0.5 * total + part,
    "from a value": lambda total, part: part - total,
    "with itself": lambda total, part: total + total,
    "what is read": lambda total, part: total + jnp.sin(total),
    "unchanged": lambda total, part: total,
}


@pytest.mark.parametrize("name", ADDS)
def test_a_carry_to_which_steps_add_is_a_sum(name):
    function, args = carried(MOVES["a product with a vector"], ADDS[name]), points()
    new = summed(function)
    assert new is not None
    assert same_values(function_of(program_of(function, args)), function_of(new), args, tolerance=1e-5).same


@pytest.mark.parametrize("name", OTHERWISE)
def test_another_carry_is_none(name):
    assert summed(carried(MOVES["a product with a vector"], OTHERWISE[name])) is None


def test_a_sum_that_begins_with_something():
    start = np.full((POINTS, OTHERS), 2.5, np.float32)
    function, args = carried(MOVES["a product with a vector"], start=start), points()
    new = summed(function)
    assert new is not None
    assert same_values(function_of(program_of(function, args)), function_of(new), args, tolerance=1e-5).same


def test_whole_numbers_are_divided_after_they_are_summed():
    def function(x, y):
        def turn(total, s):
            return total + jnp.round(s * distances(x, y)).astype(jnp.int32), None

        total = lax.scan(turn, jnp.zeros((POINTS, OTHERS), jnp.int32), jnp.arange(4.0))[0]
        return jnp.sum(lax.div(total, jnp.full((POINTS, OTHERS), 3)), 1)

    assert summed(function, points()[:2]) is None


def test_small_sums_stay():
    x, y, v = points()
    assert summed(carried(MOVES["a product with a vector"], start=jnp.zeros((20, OTHERS))), [x[:20], y, v]) is None


def test_bitwise_accuracy_leaves_sums_in_their_order():
    program = program_of(carried(MOVES["a product with a vector"]), points())
    assert with_step_sums(program, load_rules(accuracy="bitwise").passes) is None


# --- plans --------------------------------------------------------------------------------------------


def transport(x, y):
    """The gradient of entropic transport with the iterations written out: each step reads all distances."""
    cost = distances(x, y)

    def step(duals, _):
        f, g = duals
        f = -0.5 * jax.nn.logsumexp((g - cost) / 0.5, 1)
        return (f, -0.5 * jax.nn.logsumexp((f[:, None] - cost) / 0.5, 0)), None

    (f, g), _ = lax.scan(step, (jnp.zeros(len(x)), jnp.zeros(len(y))), None, length=5)
    return jnp.mean(f) + jnp.mean(g)


@pytest.mark.parametrize("share", [2, 16])
def test_gradients_of_iterations_with_a_matrix_are_planned_below_its_size(share, monkeypatch):
    """And XLA is asked about no program of which a step fits nowhere, which would be as it was written."""
    asked = []
    monkeypatch.setattr(verification, "emit", lambda s, name: asked.append(s) or emit(s, name))
    function, args = jax.value_and_grad(transport), values((1500, 3), (1400, 3))
    matrix = 1500 * 1400 * 4
    fast = eqsat_mem.optimize(function, memory_limit=matrix // share)
    plan = fast.plan(*args)
    assert plan.compiled_peak_bytes <= matrix // share
    assert "sums-of-steps" in plan.rules_fired
    assert asked
    assert all(s.is_complete for s in asked)
    assert same_values(function, fast, args, tolerance=2e-5).same


def test_a_plan_that_reads_sums_in_each_step_is_chosen_where_others_fit_too_and_take_longer(monkeypatch):
    """And nothing else is searched for it than what was written and the forms that read sums."""

    def spread(scale, x, y):
        weights = jnp.exp(-distances(x * scale, x * scale))
        weights = weights / weights.sum(1, keepdims=True)
        return jnp.mean((lax.fori_loop(0, 8, lambda _, z: 0.9 * (weights @ z) + 0.1 * y, y) - 1) ** 2)

    searched = []
    search = Forms._fastest
    monkeypatch.setattr(Forms, "_fastest", lambda self, form, *rest: searched.append(form) or search(self, form, *rest))
    args = values((3,), (1200, 3), (1200, 4))
    function, limit = jax.value_and_grad(spread), 2 * 1200 * 1200 * 4
    plan = eqsat_mem.optimize(function, memory_limit=limit, verify=False, without_rules=["steps-at-once"]).plan(*args)
    assert "sums-of-steps" in plan.rules_fired
    assert plan.predicted_s < plan.original_predicted_s
    of_program = [form for form in searched if len(form.outputs) == 2 and len(form.inputs) == 3]
    assert "slices-in-scans" not in of_program[0].passes
    assert all("sums-of-steps" in form.passes for form in of_program[1:])


def test_forms_that_did_not_fit_are_not_searched_for_less(monkeypatch):
    args = values((400, 3), (380, 3))
    function = jax.value_and_grad(transport)
    jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(function(*a)))(*args)
    options = Options(memory_limit=400 * 380 * 4)
    request = request_of(jaxpr, options, ["x", "y"], "transport", CPU, (), None, None)
    forms_of = pipeline._forms(request, pipeline.BodyPlans(), Clock())
    first = forms_of.fastest(CPU, request.limit).best
    searched = []
    search = Forms._fastest
    monkeypatch.setattr(Forms, "_fastest", lambda self, form, *rest: searched.append((self, form)) or search(self, form, *rest))
    second = forms_of.fastest(CPU, request.limit - 2**16).best
    assert first.fits(request.limit)
    assert second.fits(request.limit - 2**16)
    assert [form.passes >= {"sums-of-steps"} for own, form in searched if own is forms_of] == [True]


def test_a_plan_that_reads_sums_in_each_step_is_not_chosen_where_it_takes_longer():
    def loss(w, x, h):
        rows = jnp.tanh(x @ w)
        h, _ = lax.scan(lambda h, _: (jnp.tanh(jax.nn.softmax(rows @ h) @ rows), None), h, None, length=40)
        return jnp.mean(h**2)

    args = values((64, 96), (6000, 64), (96,))
    plan = eqsat_mem.optimize(jax.value_and_grad(loss), memory_limit=16 * MIB, verify=False).plan(*args)
    assert "sums-of-steps" not in plan.rules_fired
