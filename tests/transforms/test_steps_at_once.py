"""What steps compute apart from what they carry leaves the scan; what the recurrence needs stays."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.interpreter import evaluate
from eqsat_mem.ir.jaxprs import nested_jaxprs
from eqsat_mem.testing import same_values
from eqsat_mem.transforms.control_flow import repeats
from eqsat_mem.transforms.step_parts import Parts
from eqsat_mem.transforms.steps_at_once import with_segments, with_steps_at_once
from tests.tiers import tiered

PASSES = load_rules().passes
STEPS, ROWS, UNITS = 12, 3, 80
MIB = 2**20


def values(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(shape) / max(shape[-1], 1) ** 0.5).astype(np.float32) for shape in shapes]


def program_of(function, args):
    return load(jax.make_jaxpr(lambda *a: jax.tree.leaves(function(*a)))(*args), [f"x{k}" for k in range(len(args))])


def scans(program):
    return [scan for scan in repeats(program) if scan.call.prim.name == "scan"]


def products(scan):
    """The contractions in the steps of a scan."""
    return sum(eqn.primitive.name == "dot_general" for inner in nested_jaxprs(scan.body.jaxpr) for eqn in inner.eqns)


def close(found, wanted, bound=3e-6):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=bound * max(1e-30, float(np.max(np.abs(y)))) if np.size(y) else 0)


def at_once(function, args):
    """The form with what steps compute at once, which computes the same."""
    program = program_of(function, args)
    new = with_steps_at_once(program, PASSES)
    if new is not None:
        close(evaluate(new, args), jax.tree.leaves(function(*args)))
        assert "steps-at-once" in new.passes
    return new


def weights(seed=0):
    return values((UNITS, UNITS), (UNITS, UNITS), (STEPS, ROWS, UNITS), seed=seed)


def states(recurrent, own, xs, **options):
    def step(h, x):
        h = jnp.tanh(x @ own + h @ recurrent)
        return h, h

    return lax.scan(step, jnp.zeros((ROWS, UNITS)), xs, **options)[1]


# --- what leaves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 3}])
def test_products_of_what_is_read_come_before_the_scan(options):
    new = at_once(lambda *args: states(*args, **options), weights())
    (scan,) = scans(new)
    assert products(scan) == 1  # of the state
    assert scan.reverse == options.get("reverse", False)


def test_products_with_what_is_carried_come_after_the_scan():
    def outputs(recurrent, out, xs):
        def step(h, x):
            h = jnp.tanh(x + h @ recurrent)
            return h, jax.nn.softmax(h @ out)

        return lax.scan(step, jnp.zeros((ROWS, UNITS)), xs)[1]

    (scan,) = scans(at_once(outputs, weights()))
    assert products(scan) == 1
    assert scan.body.out_avals[scan.carries].shape == (ROWS, UNITS)


@pytest.mark.parametrize("options", [{}, {"reverse": True}])
def test_the_gradient_of_a_recurrent_network_sums_over_steps_outside_of_its_scan(options):
    gradient = jax.grad(lambda *args: jnp.sum(states(*args, **options) ** 2), argnums=(0, 1, 2))
    forward, backward = scans(at_once(gradient, weights()))
    assert (products(forward), products(backward)) == (1, 1)
    assert backward.carries == 1  # the cotangent of the state: the sums over steps are none
    assert len(scans(program_of(gradient, weights()))[1].body.out_avals) > len(backward.body.out_avals)


def test_what_is_made_of_stacked_values_is_not_stacked():
    gradient = jax.grad(lambda *args: jnp.sum(states(*args) ** 2), argnums=(0, 1))
    forward, _ = scans(at_once(gradient, weights()))
    stacked = [aval for aval in forward.body.out_avals[forward.carries :] if aval.shape == (ROWS, UNITS)]
    assert len(stacked) == 2  # the states before and after each step; not 1 - h, which the gradient reads


def test_sums_take_what_is_subtracted_and_keep_what_stays():
    def sums(recurrent, _, xs):
        def step(carry, x):
            h, total = carry
            h = jnp.tanh(x + h @ recurrent)
            return (h, total + h.T @ x - jnp.outer(h[0], h[1]) + jnp.sin(h[0])), None

        return lax.scan(step, (jnp.zeros((ROWS, UNITS)), jnp.ones((UNITS, UNITS))), xs)[0]

    (scan,) = scans(at_once(sums, weights()))
    assert products(scan) == 1
    assert scan.carries == 2


@pytest.mark.parametrize("kind", ["stacked", "summed", "both"])
def test_where_only_sums_go_from_step_to_step_no_scan_is_left(kind):
    def rows(x, y, v):
        def step(total, row):
            weight = jnp.exp(-jnp.sum((row - y) ** 2, -1))
            return total + weight, jax.lax.top_k(weight * v[0, 0], 3)[0]

        total, stacked = lax.scan(step, jnp.zeros(UNITS), x)
        return {"stacked": stacked, "summed": total, "both": (total, stacked)}[kind]

    assert not scans(at_once(rows, values((STEPS, UNITS), (UNITS, UNITS), (1, 1))))


def test_carries_that_are_what_was_read_come_from_outside():
    def delayed(own, _, xs):
        def step(h, x):
            return x @ own, jnp.sin(h)

        return lax.scan(step, jnp.zeros((ROWS, UNITS)), xs)

    (scan,) = scans(at_once(delayed, weights()))
    assert products(scan) == 0


# --- what stays ----------------------------------------------------------------------------------------


def test_the_recurrence_stays():
    def power(w, _, xs):
        return lax.scan(lambda h, _: (h @ w, None), xs[0], None, length=STEPS)[0]

    assert at_once(power, weights()) is None


def test_products_that_spare_little_stay():
    def many_rows(own, _, xs):
        return lax.scan(lambda h, x: (jnp.tanh(h + x @ own), None), jnp.zeros((500, 80)), xs)[0]

    assert at_once(many_rows, values((80, 80), (1, 1), (STEPS, 500, 80))) is None
    small = values((8, 8), (8, 8), (STEPS, ROWS, 8))
    assert at_once(lambda w, u, xs: lax.scan(lambda h, x: (jnp.tanh(x @ u + h @ w), None), jnp.zeros((ROWS, 8)), xs)[0], small) is None


def test_what_branches_or_has_effects_stays():
    def branching(recurrent, own, xs):
        def step(h, x):
            made = lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)
            return jnp.tanh(made @ own + h @ recurrent), None

        return lax.scan(step, jnp.zeros((ROWS, UNITS)), xs)[0]

    assert at_once(branching, weights()) is None

    def printing(recurrent, own, xs):
        jax.debug.print("{}", xs[0, 0, 0])
        return states(recurrent, own, xs)

    assert at_once(printing, weights()) is None


def test_sums_of_all_rows_of_a_batch_stay_where_they_spare_nothing():
    """Microbatches: the gradients that are summed are smaller than what they are products of."""

    def accumulated(_, own, xs):
        def loss(w, x):
            return jnp.sum(jnp.tanh(x @ w) ** 2)

        return lax.scan(lambda total, x: (total + jax.grad(loss)(own, jnp.sin(x + total[0, 0])), None), jnp.zeros((UNITS, UNITS)), xs)[0]

    assert at_once(accumulated, values((1, 1), (UNITS, UNITS), (STEPS, 400, UNITS))) is None


def test_accuracy_and_names_of_passes_decide():
    program = program_of(states, weights())
    assert with_steps_at_once(program, load_rules(accuracy="bitwise").passes) is None
    assert with_steps_at_once(program, load_rules(without=["steps-at-once"]).passes) is None


# --- segments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [64, 67])
def test_segments_compute_the_same(steps, reverse):
    recurrent, own, xs = values((UNITS, UNITS), (UNITS, UNITS), (steps, ROWS, UNITS))
    function = jax.value_and_grad(lambda *args: jnp.sum(states(*args, reverse=reverse) ** 2), argnums=(0, 1))
    program = program_of(function, [recurrent, own, xs])
    new = with_segments(program, PASSES)
    close(evaluate(new, [recurrent, own, xs]), jax.tree.leaves(function(recurrent, own, xs)))
    assert any(eqn.primitive.name == "scan" for scan in scans(new) for eqn in scan.body.jaxpr.eqns)


def test_segments_of_scans_that_read_nothing():
    def reservoir(w, v):
        def step(h, _):
            h = jnp.tanh(h @ w + 0.1)
            return h, jnp.sin(h @ v)

        return lax.scan(step, jnp.ones((1, UNITS)), None, length=170)

    args = values((UNITS, UNITS), (UNITS, UNITS))
    program = program_of(reservoir, args)
    for form in (with_steps_at_once(program, PASSES), with_segments(program, PASSES)):
        close(evaluate(form, args), jax.tree.leaves(reservoir(*args)))


def test_segments_are_as_long_as_makes_their_products_as_large_as_the_matrix():
    (scan,) = scans(program_of(states, values((UNITS, UNITS), (UNITS, UNITS), (960, ROWS, UNITS))))
    size = Parts(scan).segment
    spared, moved = UNITS * UNITS, 2 * ROWS * UNITS
    assert spared / moved / 2 <= size <= 2 * spared / moved + 1
    assert 960 % size == 0
    assert with_segments(program_of(states, weights()), PASSES) is None  # fewer than two segments


# --- random steps --------------------------------------------------------------------------------------


def random_step(rng):
    """A step of a scan that mixes products, elementwise operations and sums at random, of what it carries and of what it reads."""
    plan = [(rng.choice(["dot", "dot", "add", "mul", "tanh", "sum", "swap"]), rng.random(), rng.random(), rng.random()) for _ in range(9)]
    reads_carry, kept = rng.random() < 0.7, rng.random()

    def step(matrices, carry, x):
        h, total, vector = carry
        made = [x, h] if reads_carry else [x]
        added, weight = [], []
        for kind, first, second, third in plan:
            a, b = made[int(first * len(made))], made[int(second * len(made))]
            if kind == "dot":
                made.append(a @ matrices[int(third * len(matrices))])
            elif kind == "sum":
                added.append(a.T @ b)
                weight.append(jnp.sum(a, 0))
            else:
                made.append({"add": a + b, "mul": a * b, "tanh": jnp.tanh(a), "swap": a[:, ::-1]}[kind])
        for part in added:
            total = total - part if third < 0.5 else total + part
        for part in weight:
            vector = vector + part
        return (jnp.tanh(made[-1]) if kept < 0.6 else h, total, vector), (made[-1], made[int(kept * len(made))])

    return step


@pytest.mark.parametrize("seed", tiered(range(300), range(24), range(24, 80)))
def test_random_steps_compute_the_same_in_all_forms(seed):
    rng = random.Random(seed)
    step, options = random_step(rng), {"reverse": rng.random() < 0.3}
    rows, length = rng.choice([1, 2, 5]), rng.choice([4, 9, 16])
    args = values((UNITS, UNITS), (UNITS, UNITS), (length, rows, UNITS), (rows, UNITS), seed=seed)

    def function(v, w, xs, start):
        init = start, jnp.zeros((UNITS, UNITS)), jnp.ones(UNITS)
        return lax.scan(lambda carry, x: step((v, w), carry, x), init, xs, **options)

    if rng.random() < 0.4:
        plain = function

        def function(*args):
            return jax.grad(lambda *a: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(plain(*a))), argnums=(0, 1, 2))(*args)

    program = program_of(function, args)
    wanted = jax.tree.leaves(function(*args))
    for form in (with_steps_at_once(program, PASSES), with_segments(program, PASSES)):
        if form is not None:
            close(evaluate(form, args), wanted, bound=3e-5)


def test_some_random_steps_are_taken_apart():
    taken = 0
    for seed in range(40):
        step = random_step(random.Random(seed))
        init = np.zeros((2, UNITS), np.float32), np.zeros((UNITS, UNITS), np.float32), np.zeros(UNITS, np.float32)
        args = values((UNITS, UNITS), (UNITS, UNITS), (16, 2, UNITS))
        program = program_of(lambda v, w, xs, step=step, init=init: lax.scan(lambda c, x: step((v, w), c, x), init, xs), args)
        taken += with_steps_at_once(program, PASSES) is not None
    assert taken >= 20


# --- plans ---------------------------------------------------------------------------------------------


def test_a_loop_over_single_rows_runs_in_chunks_of_rows():
    def attention(queries, keys, rows):
        return lax.map(lambda query: jax.nn.softmax(query @ keys.T) @ rows, queries)

    args = values((1024, 32), (1024, 32), (1024, 32))
    fast = eqsat_mem.optimize(attention, memory_limit=4 * MIB)
    plan = fast.plan(*args)
    assert "steps-at-once" in plan.rules_fired
    assert plan.compiled_peak_bytes <= 4 * MIB
    assert same_values(attention, fast, args).same


def test_recurrent_networks_are_planned_with_products_of_all_steps_or_of_segments():
    function = jax.value_and_grad(lambda *args: jnp.mean(states_of(*args) ** 2), argnums=(0, 1))
    recurrent, own, xs = values((192, 192), (192, 192), (256, 4, 192))
    written = jax.jit(function).lower(recurrent, own, xs).compile().memory_analysis()
    given = written.argument_size_in_bytes + written.output_size_in_bytes
    for share in (0.8, 0.25):
        limit = int(given + share * written.temp_size_in_bytes)
        fast = eqsat_mem.optimize(function, memory_limit=limit)
        plan = fast.plan(recurrent, own, xs)
        assert plan.compiled_peak_bytes <= limit
        assert plan.predicted_s < plan.original_predicted_s
        assert same_values(function, fast, [recurrent, own, xs]).same


def states_of(recurrent, own, xs):
    def step(h, x):
        h = jnp.tanh(x @ own + h @ recurrent)
        return h, h

    return lax.scan(step, jnp.zeros(xs.shape[1:]), xs)[1]
