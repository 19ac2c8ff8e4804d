"""Contractions on devices that round their operands: rules make none less precise than what was written."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.egraph.extract import extract
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Dot, DotPlus, precision
from eqsat_mem.ir.interpreter import Machine, evaluate
from eqsat_mem.schedule.cost_model import dot_s, term_seconds
from tests.oracles.extraction import chaos
from tests.oracles.targets import CPU, GPU

RULES = load_rules()
SMALL = Limits(large_elements=0)
"""Every value counts as large: rules apply everywhere."""
ROUNDED_BITS = 10
SECONDS = partial(term_seconds, backend=GPU)


class Rounding(Machine):
    """Rounds the operands of float32 contractions as GPUs do, unless they ask for full precision."""

    def dot(self, term, lhs, rhs, contract, batch):
        if precision.rounds(term.dtype, term.precision):
            lhs, rhs = (lax.reduce_precision(operand, 8, ROUNDED_BITS) for operand in (lhs, rhs))
        return super().dot(term, lhs, rhs, contract, batch)


def normal(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def distances(x, y):
    return jnp.sum((x[:, None] - y[None]) ** 2, -1)


def error(program, args, want):
    (got,) = evaluate(program, args, Rounding())
    return float(np.max(np.abs(np.asarray(got, np.float64) - want)) / np.max(np.abs(want)))


def in_float64(f, args):
    with jax.enable_x64(True):
        return np.asarray(f(*(arg.astype(np.float64) for arg in args)))


def view_of(f, args, limits=SMALL):
    names = [f"a{k}" for k in range(len(args))]
    return saturate(load(jax.make_jaxpr(f)(*args), names), RULES, limits, rounds_operands=True)


PROGRAMS = {
    "distances": (distances, normal((40, 5), (50, 5)), 3e-6),
    "a sum of products": (lambda x, y: jnp.sum(x[:, None] * y[None], -1), normal((40, 30), (50, 30)), 3e-6),
    "a kernel times a vector": (lambda x, y, v: jnp.exp(-distances(x, y)) @ v, normal((40, 5), (50, 5), (50, 2)), 1e-3),
    "squared norms of a product": (lambda x, w: jnp.sum((x @ w) ** 2, -1), normal((40, 30), (30, 50)), 1e-3),
    "a product of three": (lambda x, y, z: (x @ y) @ z, normal((40, 30), (30, 50), (50, 2)), 2e-3),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_that_rules_make_rounds_more_than_what_was_written(name):
    f, args, most = PROGRAMS[name]
    view, want = view_of(f, args), in_float64(f, args)
    assert error(view.program, args, want) < most
    for seed in range(15):
        assert error(chaos(view, seed).program, args, want) < most
    assert error(extract(view, SECONDS, 0.0).program, args, want) < most


def test_rounded_distances_would_be_seen(monkeypatch):
    f, args, most = PROGRAMS["distances"]
    monkeypatch.setattr("eqsat_mem.egraph.graph.of_rules", lambda dtype, rounds_operands: None)
    view, want = view_of(f, args), in_float64(f, args)
    assert max(error(chaos(view, seed).program, args, want) for seed in range(15)) > 30 * most


def test_products_in_another_order_are_as_precise_as_they_were_written():
    x, y, z = normal((400, 300), (300, 500), (500, 2))

    def precisions(given):
        f = partial(lambda x, y, z: jnp.matmul(jnp.matmul(x, y, precision=given), z, precision=given))
        program = extract(view_of(f, [x, y, z]), SECONDS, 0.0).program
        found = [program.terms[t] for t in program.reachable() if isinstance(program.terms[t], Dot)]
        assert all(program.extent(program.free[t]) < 400 * 500 for t in program.reachable() if isinstance(program.terms[t], Dot))
        return [term.precision for term in found]

    assert precisions(None) == [None, None]
    assert precisions("highest") == [precision.FULL, precision.FULL]


def test_what_is_returned_too_is_computed_in_full():
    """x (y z), whose inner product is also the sum of elementwise products that the program returns."""
    x, y, z = normal((40, 30), (30, 50), (50, 2))
    view = view_of(lambda x, y, z: ((x @ y) @ z, jnp.sum(y[:, :, None] * z, 1)), [x, y, z])
    returned = [program.terms[program.outputs[1].term] for program in (chaos(view, seed).program for seed in range(20))]
    precisions = [term.precision for term in returned if isinstance(term, Dot)]
    assert precisions
    assert set(precisions) == {precision.FULL}


def test_precision_is_the_strictest_of_what_was_written_of_one_value():
    x, y = normal((40, 30), (30, 50))

    def f(x, y):
        return x @ y, 2 * jnp.matmul(x, y, precision="highest"), 3 * jnp.matmul(x, y, precision="high")

    view = view_of(f, [x, y])
    assert set(view.precisions.values()) == {precision.FULL}


def test_an_algorithm_is_left_to_its_author():
    x, y = normal((40, 30), (30, 50))
    view = view_of(lambda x, y: lax.dot(x, y, precision=lax.DotAlgorithmPreset.F32_F32_F32) * 2, [x, y])
    assert view.precisions == {}
    program = extract(view, SECONDS, 0.0).program
    assert [t.precision for t in program.terms if isinstance(t, Dot)] == [lax.DotAlgorithmPreset.F32_F32_F32]


def test_a_contraction_that_sums_are_part_of_is_precise():
    """The sums would be rounded with its operands."""

    def expanded(x, y):
        return jnp.sum(x**2, 1)[:, None] - 2 * x @ y.T + jnp.sum(y**2, 1)

    x, y = normal((300, 8), (200, 8))
    view = view_of(expanded, [x, y])
    program = extract(view, lambda p, t, _: 0.0 if isinstance(p.terms[t], DotPlus) else 1.0, 0.0).program
    assert [t.precision for t in program.terms if isinstance(t, Dot)] == [precision.FULL]
    assert error(program, [x, y], in_float64(expanded, [x, y])) < 1e-6


def test_what_was_written_to_be_rounded_gets_no_sums():
    """A contraction in full precision takes longer than one that rounds, and additions."""

    def expanded(x, y, given):
        return jnp.sum(x**2, 1)[:, None] + jnp.matmul(x, y.T, precision=given) + jnp.sum(y**2, 1)

    def chosen(given):
        return str(extract(view_of(partial(expanded, given=given), normal((3000, 64), (2000, 64))), SECONDS, 0.0).program)

    assert "with_sums" not in chosen(None)


def test_a_plan_asks_for_full_precision_where_rules_made_the_contraction(monkeypatch):
    monkeypatch.setattr(CpuBackend, "rounds_operands", True)
    x, y, v = normal((4096, 64), (4096, 64), (4096, 1))
    kernel = eqsat_mem.optimize(lambda x, y, v: jnp.exp(-distances(x, y) / 64) @ v, memory_limit="8MiB")
    lines = [line for line in kernel.plan(x, y, v).source.splitlines() if "jnp.einsum" in line]
    asked = ["HIGHEST" in line for line in lines]
    assert sorted(asked) == [False, True], "the distance's, and not that with v"
    np.testing.assert_allclose(kernel(x, y, v), jax.jit(lambda x, y, v: jnp.exp(-distances(x, y) / 64) @ v)(x, y, v), rtol=1e-3, atol=1e-4)


def test_full_precision_is_costed():
    x, y = (jax.ShapeDtypeStruct((8192, 8192), np.float32),) * 2

    def seconds(given):
        program = load(jax.make_jaxpr(lambda x, y: jnp.matmul(x, y, precision=given))(x, y), "xy")
        (dot,) = (term for term in program.terms if isinstance(term, Dot))
        return dot_s(program, dot, [index.extent for index in program.indices], GPU)

    assert seconds("highest") > 5 * seconds(None)


def test_nothing_is_rounded_on_a_cpu():
    assert GPU.rounds_operands
    assert not CPU.rounds_operands
    assert precision.of_rules("float32", CPU.rounds_operands) is None
    assert not precision.rounds(jnp.float64, None)
    assert precision.of_rules("float64", rounds_operands=True) is None
