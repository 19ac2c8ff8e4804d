"""Sums that are added to a contraction become part of it: values stay, near points keep their digits, and it is done only where it pays."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import Extraction, extract
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import saturate
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block, Dot, DotPlus, Map
from eqsat_mem.ir.interpreter import evaluate
from eqsat_mem.ir.loop_tree import loops
from eqsat_mem.schedule.cost_model import term_seconds
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.split import region, split
from tests.oracles.targets import CPU

RULES = load_rules()


def expanded(x, y):
    half = jnp.float32(0.5)
    return (half * jnp.sum(x * x, -1)[..., :, None] - x @ jnp.swapaxes(y, -1, -2)) + half * jnp.sum(y * y, -1)[..., None, :]


def doubled(x, y):
    return (jnp.einsum("ik,ik->i", x, x)[:, None] + jnp.einsum("jk,jk->j", y, y)) - 2 * (x @ y.T)


def negated(x, y):
    return (x @ y.T - 0.5 * jnp.sum(x**2, -1)[:, None]) - 0.5 * jnp.sum(y**2, -1)


def subtracted(x, y):
    return 2 * (x @ y.T) - (jnp.sum(x * x, -1)[:, None] + jnp.sum(y * y, -1))


def with_itself(x, _):
    norms = jnp.sum(x * x, -1)
    return norms[:, None] + norms - 2 * (x @ x.T)


def weighted(x, y):
    w = jnp.exp(jnp.max(y, 0))
    return jnp.sum(w * (x * x), -1)[:, None] - 2 * ((w * x) @ y.T) + jnp.sum(w * (y * y), -1)


def points(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def loaded(function, *arrays):
    return load(jax.make_jaxpr(function)(*arrays), [f"x{k}" for k in range(len(arrays))])


def augmented(program, rules=RULES) -> Extraction:
    """The program with augmented contractions wherever there are any."""
    return extract(saturate(program, rules), lambda p, t, _: 0.0 if isinstance(p.terms[t], DotPlus) else p.extent(p.free[t]), 0.0)


def joined(ex):
    return [t for t in ex.program.reachable() if isinstance(ex.program.terms[t], Block)]


@pytest.mark.parametrize("features", [2, 3, 9, 16, 33])
@pytest.mark.parametrize("function", [expanded, doubled, negated, with_itself, weighted, subtracted])
def test_three_sums_are_one_contraction_of_the_same_value(function, features):
    x, y = points(130, features), points(150, features, seed=1)
    program = loaded(function, x, y)
    new = augmented(program)
    assert len(joined(new)) == 2
    (out,) = new.program.outputs
    assert isinstance(new.program.terms[out.term], Dot)
    (before,), (after,) = (evaluate(p, [x, y]) for p in (program, new.program))
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.abs(before).max())


def test_batches_stay_batches():
    x, y = points(5, 70, 4), points(5, 80, 4, seed=1)
    program = loaded(expanded, x, y)
    new = augmented(program)
    assert len(joined(new)) == 2
    (before,), (after,) = (evaluate(p, [x, y]) for p in (program, new.program))
    np.testing.assert_allclose(after, before, atol=1e-5)


def test_what_may_be_sliced_still_may():
    program = loaded(expanded, points(130, 9), points(150, 9))
    new = augmented(program)
    (out,) = new.program.outputs
    assert new.splits[out.term] == program.free[program.outputs[0].term] == new.program.free[out.term]
    for t in joined(new):
        assert new.splits[t]
        assert not new.splits[t] & ~new.program.terms[t].call.pointwise
    whole = augmented(program, load_rules(without=("slice-dot-plus",)))
    assert whole.program.outputs[0].term not in whole.splits


def product_used_twice(x, y):
    product = x @ y.T
    return (jnp.sum(x * x, -1)[:, None] - 2 * product) + jnp.sum(y * y, -1), product


def other_sums(x, y):
    return (jnp.sum(x * x, -1)[:, None] - 2 * (x @ y.T)) + jnp.sum(y)


@pytest.mark.parametrize(
    ("function", "rules", "n"),
    [
        (other_sums, RULES, 150),
        (expanded, load_rules(accuracy="bitwise"), 150),
        (expanded, load_rules(without=("sums-into-dot",)), 150),
        (expanded, RULES, 10),
    ],
)
def test_a_program_stays_where_sums_are_others_or_may_not_move_or_little_is_added(function, rules, n):
    assert not joined(augmented(loaded(function, points(130, 9), points(n, 9)), rules))


def test_a_product_that_is_there_anyway_is_not_computed_again():
    def ways(function):
        return joined(extract(saturate(loaded(function, points(1300, 9), points(1500, 9)), RULES), partial(term_seconds, backend=CPU), 0.0))

    assert ways(negated)
    assert not ways(product_used_twice)


def test_near_points_keep_more_digits_than_the_separate_sums_leave_them():
    """Partial sums stay as small as the distance, so they round less."""
    x = points(300, 96)
    y = x + np.float32(0.3) * points(300, 96, seed=1)
    wide = [a.astype(np.float64) for a in (x, y)]
    truth = 0.5 * np.sum((wide[0] - wide[1]) ** 2, -1)
    program = loaded(expanded, x, y)

    def error(program):
        run = jax.jit(lambda *arrays: evaluate(program, arrays)[0])
        return np.sqrt(np.mean((np.diag(run(x, y)) - truth) ** 2))

    assert error(augmented(program).program) < 0.75 * error(program)


def test_infinities_stay_infinite():
    def kernel(x, y):
        return jnp.exp(-jnp.sum((x[:, None] - y) ** 2, -1)) @ jnp.ones(len(y))

    x, y = points(500, 20), points(400, 20, seed=1)
    x[7], y[3, 2] = np.inf, -np.inf
    function = eqsat_mem.optimize(kernel, memory_limit="1MiB", verify=False)
    assert "append_sums" in function.plan(x, y).source
    found = np.asarray(function(x, y))
    assert found[7] == 0
    np.testing.assert_allclose(found, np.asarray(jax.jit(kernel)(x, y)), rtol=1e-4, atol=1e-12)


def test_a_kernel_product_of_few_features_is_one_contraction_and_an_exponential():
    def product(x, y, v):
        return jnp.exp(-0.5 * jnp.sum((x[:, None] - y) ** 2, -1)) @ v

    x, y, v = points(1003, 12), points(2001, 12, seed=1), points(2001, seed=2)
    function = eqsat_mem.optimize(product, memory_limit="1MiB")
    plan = function.plan(x, y, v)
    assert plan.loops
    program = plan.schedule.ex.program
    large = [t for t in program.reachable() if program.extent(program.free[t]) == 1003 * 2001]
    assert [program.terms[t].op for t in large if isinstance(program.terms[t], Map)] == ["min", "exp"]
    np.testing.assert_allclose(function(x, y, v), jax.jit(product)(x, y, v), rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("result", [0, 1])
def test_one_result_of_a_selection_brings_the_other_along(result):
    """Chunks of what is selected combine elements and their places, whichever is returned."""
    x, y = points(130, 16), points(150, 16, seed=1)
    ex = augmented(loaded(lambda x, y: jax.lax.top_k(-expanded(x, y), 3)[result], x, y))
    assert any(term.call.prim.name == "with_sums" for term in ex.program.terms if isinstance(term, Block))
    (folded,) = {term.call.folds for term in ex.program.terms if isinstance(term, Block) and term.call.folds}
    tree = split(ex, region(ex), folded.bit_length() - 1)
    assert tree is not None
    code = emit(Schedule(ex, CPU, tree, dict.fromkeys(loops(tree), 50), 0, 0.0))
    assert "merge_top_k" in code.source
    want = jax.lax.top_k(-expanded(jnp.asarray(x), jnp.asarray(y)), 3)[result]
    np.testing.assert_allclose(jax.jit(code.function)(x, y)[0], want, rtol=1e-4)
