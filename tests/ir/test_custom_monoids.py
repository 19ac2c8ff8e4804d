"""Folds of the user's: plain JAX, taken apart by loops, named by rules; what is no monoid is told."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem import Monoid, Operation, OptionError
from eqsat_mem.__main__ import main
from eqsat_mem.egraph.extract import extract, original
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.egraph.soundness.judge import judge
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block, Fold, check
from eqsat_mem.schedule.cost_model import term_seconds
from tests.oracles.evaluation import values
from tests.oracles.extraction import chaos
from tests.oracles.targets import CPU
from tests.tiers import tiered

SECONDS = partial(term_seconds, backend=CPU)


def both(a, b):
    """States of a running maximum and the sum of exponentials less it."""
    m = jnp.maximum(a[0], b[0])
    return m, a[1] * jnp.exp(a[0] - m) + b[1] * jnp.exp(b[0] - m)


def plus(a, b):
    return tuple(x + y for x, y in zip(a, b))


LSE = Monoid("log_sum_exp", (-jnp.inf, 0.0), both, lambda x: (x, jnp.ones_like(x)), lambda s: s[0] + jnp.log(s[1]))
MEAN_SQUARE = Monoid("mean_square", (0, 0), plus, lambda x: (x * x, jnp.ones_like(x)), lambda s: s[0] / s[1])
WEIGHTED = Monoid("weighted_mean", (0, 0), plus, lambda w, x: (w * x, w), lambda s: s[0] / s[1], dtype=1)
TOTAL = Monoid("total", 0, lambda a, b: a + b)
COUNT = Monoid("count_positive", 0, lambda a, b: a + b, lambda x: jnp.where(x > 0, np.int32(1), np.int32(0)), dtype="int32")
OWN = [LSE, MEAN_SQUARE, WEIGHTED, TOTAL, COUNT]

PLAIN = {
    "log_sum_exp": lambda x: jax.nn.logsumexp(x, -1),
    "mean_square": lambda x: jnp.mean(x * x, -1),
    "total": lambda x: jnp.sum(x, -1),
    "count_positive": lambda x: jnp.sum(x > 0, -1),
}
CARD = ";; a\n;; sound: {} -- why\n;; memory: none\n"


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def program_of(function, *args):
    return load(jax.make_jaxpr(function)(*args), [f"a{k}" for k in range(len(args))])


# --- plain JAX ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("monoid", [m for m in OWN if m is not WEIGHTED], ids=repr)
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 1)])
def test_a_fold_is_what_its_parts_say(monoid, shape):
    x = normal(*shape)
    plain = PLAIN[monoid.name]
    want, *others = jax.jit(lambda x: (plain(x), monoid(x), monoid(jnp.moveaxis(x, -1, 0), axis=0)))(x)
    for got in (monoid(x), *others):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    if monoid is not COUNT:
        grads = jax.jit(lambda x: [jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x))))(x) for f in (monoid, plain)])(x)
        np.testing.assert_allclose(*grads, rtol=1e-4, atol=1e-6)


def test_operands_broadcast():
    w, x = np.abs(normal(7)), normal(3, 7)
    np.testing.assert_allclose(WEIGHTED(w, x), np.sum(w * x, -1) / np.sum(w), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(WEIGHTED, (None, 0))(w, x), WEIGHTED(w, x), rtol=1e-6)


def test_values_of_a_state_that_are_combined_by_themselves_are_folds_of_the_table():
    states = MEAN_SQUARE.lifted([normal(3)])
    assert MEAN_SQUARE.reductions(states) == ("add", "add")
    assert LSE.reductions(LSE.lifted([normal(3)])) == ("max", None)
    assert Monoid("off", 1, lambda a, b: a + b).reductions((np.float32(0),)) == (None,)  # another identity than addition's


# --- loops --------------------------------------------------------------------------------------------


def rows(x, y):
    return LSE(jnp.tanh(x @ y.T), axis=0), LSE(jnp.tanh(x @ y.T))


def squares(x, y):
    return MEAN_SQUARE(jnp.tanh(x @ y.T), axis=0), MEAN_SQUARE(jnp.tanh(x @ y.T))


def weighted(x, y):
    return WEIGHTED(jnp.exp(x @ y.T), jnp.tanh(x @ y.T))


@pytest.mark.parametrize("function", [rows, squares, weighted])
def test_loops_fold_chunk_by_chunk_within_the_limit(function):
    args = normal(97, 2), normal(20_001, 2)
    planned = eqsat_mem.optimize(function, memory_limit="900kB")
    plan = planned.plan(*args)
    assert any(loop.extent == 20_001 for loop in plan.loops)
    assert plan.peak_bytes <= 900_000
    assert not plan.namespace
    scope = {}
    exec(plan.source, scope)
    want = jax.tree.leaves(jax.jit(function)(*args))
    for got in (planned(*args), jax.jit(scope[function.__name__])(*args)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), jax.tree.leaves(got), want)


def test_one_loop_over_the_folded_axis_carries_the_state():
    plan = eqsat_mem.optimize(rows, memory_limit="900kB").plan(normal(97, 2), normal(20_001, 2))
    assert re.search(r"reduce_0, reduce_1 = combine\w*\(\(reduce_0, reduce_1\), ", plan.source)
    assert "jnp.full((97,), -jnp.inf, jnp.float32)" in plan.source


@pytest.mark.slow
def test_gradients_stay_near_the_value():
    args = normal(40, 2), normal(301, 2)
    planned = eqsat_mem.optimize(rows, memory_limit="1MiB")
    got, want = (jax.jit(jax.grad(lambda *a, f=f: sum(jnp.sum(r**2) for r in f(*a))))(*args) for f in (planned, rows))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("function", [rows, squares, weighted])
def test_a_fold_taken_apart_is_the_fold(function):
    args = normal(5, 2), normal(4, 2)
    program = program_of(function, *args)
    ex = original(program)
    check(ex.program)
    assert not any(isinstance(t, Block) and t.call.prim.name == "operation" for t in ex.program.terms)
    assert any(isinstance(t, Fold) or (isinstance(t, Block) and t.call.prim.name == "reduce") for t in ex.program.terms)
    for got, want in zip(*values(args, ex.program, program), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_bits_are_kept_where_they_must_be():
    ex = original(program_of(rows, normal(5, 2), normal(4, 2)), load_rules(accuracy="bitwise"))
    assert not ex.accumulates
    assert original(program_of(rows, normal(5, 2), normal(4, 2))).accumulates


# --- rules --------------------------------------------------------------------------------------------

INTO = '(rewrite (Log (Fold "add" k (Exp a))) (LogSumExp k a) :ruleset explore :name "into-log-sum-exp")'
SHIFT = """(rule ((= e (LogSumExp k (Add a b))) (= (& k (free b)) 0))
      ((union e (Add (LogSumExp k a) b))) :ruleset explore :name "shift")"""
WRONG = {
    "an index too many": SHIFT.replace("(= (& k (free b)) 0)", "(= (& 0 (free b)) 0)"),
    "a factor": '(rewrite (MeanSquare k (Mul a b)) (Mul (MeanSquare k a) b) :ruleset explore :name "factor")',
    "a sum": '(rewrite (MeanSquare k a) (Fold "add" k (Mul a a)) :ruleset explore :name "sum")',
}


def rules_of(tmp_path, *texts):
    path = tmp_path / "own.egg"
    path.write_text("\n".join(CARD.format("guarded") + text for text in texts))
    return load_rules([path], operations=OWN)


@pytest.mark.slow
@pytest.mark.parametrize("text", [INTO, SHIFT])
def test_the_check_passes_rules_that_are_right(tmp_path, text):
    rules = rules_of(tmp_path, text)
    own = next(rule for rule in rules.rules if rule.file == "own")
    assert judge(own, rules).status == "right", judge(own, rules).summary()


@pytest.mark.parametrize("name", tiered(WRONG, [], [*WRONG][::2]))
def test_the_check_catches_rules_that_are_wrong(tmp_path, name):
    rules = rules_of(tmp_path, WRONG[name])
    own = next(rule for rule in rules.rules if rule.file == "own")
    assert judge(own, rules).status == "wrong"


@pytest.mark.parametrize("seed", range(4))
def test_programs_drawn_from_the_e_graph_equal_the_original(tmp_path, seed):
    args = normal(5, 2), normal(4, 2)

    def program(x, y):
        return jnp.log(jnp.sum(jnp.exp(x @ y.T + y[:, 0]), 0)), LSE(x @ y.T + x[:, :1])

    view = saturate(program_of(program, *args), rules_of(tmp_path, INTO, SHIFT), Limits(large_elements=0))
    assert {"into-log-sum-exp", "shift"} <= set(view.matches)
    for got, want in zip(values(args, chaos(view, seed).program)[0], jax.jit(program)(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("cost", "chosen"), [(1, True), (1000, False)])
def test_costs_choose_between_a_fold_and_what_it_equals(tmp_path, cost, chosen):
    rules_of(tmp_path, INTO)
    own = Monoid("log_sum_exp", LSE.identity, LSE.combine, LSE.lift, LSE.finish, cost=cost)
    args = normal(97, 2), normal(901, 2)
    program = program_of(lambda x, y: jnp.log(jnp.sum(jnp.exp(x @ y.T), 1)), *args)
    view = saturate(program, load_rules([tmp_path / "own.egg"], operations=[own]))
    ex = extract(view, SECONDS, 0.0)
    assert any(isinstance(t, Block) for t in ex.program.terms) == chosen


# --- what is refused ----------------------------------------------------------------------------------

NO_MONOIDS = {
    "minus": (Monoid("minus", 0, lambda a, b: a - b), "its identity changes what it is combined with"),
    "mean": (Monoid("mean", 0.0, lambda a, b: (a + b) / 2), "its identity changes what it is combined with"),
    "wrong identity": (Monoid("off", 1.0, lambda a, b: a + b), "its identity changes what it is combined with"),
    "first": (Monoid("first", (0.0, 0), lambda a, b: (jnp.where(a[1] > 0, a[0], b[0]), jnp.maximum(a[1], b[1])),
                     lambda x: (x, jnp.ones_like(x)), lambda s: s[0]), "combine is not commutative"),
    "least that is large": (Monoid("least", 100.0, lambda a, b: jnp.minimum(a, b)), "its identity changes what it is combined with"),
    "saturating": (Monoid("saturating", 0.0, lambda a, b: jnp.clip(a + b, -500.0, 500.0)), "its identity changes what it is combined with"),
    "saturating sum": (Monoid("capped", (0.0,), lambda a, b: (jnp.clip(a[0] + b[0], -500.0, 500.0),),
                              lambda x: (jnp.clip(x, -500.0, 500.0),), lambda s: s[0]), "combine is not associative"),
    "ties": (Monoid("where", (-jnp.inf, 0.0), lambda a, b: tuple(jnp.where(a[0] >= b[0], x, y) for x, y in zip(a, b)),
                    lambda x: (jnp.floor(x), x), lambda s: s[1]), "combine is not commutative"),
    "product of matrices": (Monoid("shear", (1.0, 0.0), lambda a, b: (a[0] * b[0], a[0] * b[1] + a[1]),
                                   lambda x: (x, x + 1), lambda s: s[1]), "combine is not commutative"),
    "not associative": (Monoid("rough", 0.0, lambda a, b: a + b + 0.5 * a * a * b * b), "combine is not associative"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_MONOIDS)
def test_what_is_no_monoid_is_told_before_it_is_folded_in_chunks(name):
    monoid, problem = NO_MONOIDS[name]
    assert problem in monoid.problem()
    with pytest.raises(
        OptionError, match=rf"test_custom_monoids.py:\d+: '{monoid.name}' is no monoid, and may not be folded in chunks: .*one order"
    ):
        eqsat_mem.optimize(monoid, memory_limit="1MiB").plan(jax.ShapeDtypeStruct((8, 8), jnp.float32))


@pytest.mark.parametrize("monoid", OWN, ids=repr)
def test_what_is_a_monoid_has_no_problem(monoid):
    assert monoid.problem() == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"combine": 3}, "monoid 'own': combine must be a function, not 3"),
        ({"identity": "0"}, "monoid 'own': identity must be a number for each value of a state, not '0'"),
        ({"identity": (0, 0)}, "monoid 'own' has states of 2 values: pass finish, which makes them one"),
        ({"lift": lambda *x: x[0]}, "monoid 'own': lift must name its parameters, one per operand"),
        ({"name": "Own"}, "an operation has a name in small letters"),
    ],
)
def test_monoids_that_mean_nothing(given, message):
    with pytest.raises(OptionError, match=message):
        Monoid(**{"name": "own", "identity": 0, "combine": lambda a, b: a + b, **given})


def test_states_that_do_not_fit():
    with pytest.raises(OptionError, match="monoid 'own': identity has 2 values, and lift makes 1"):
        Monoid("own", (0, 0), plus, lambda x: x, lambda s: s[0])(normal(3))
    with pytest.raises(OptionError, match="monoid 'own': combine makes int32 of states of float32"):
        Monoid("own", 0, lambda a, b: (a + b).astype(np.int32))(normal(3))
    fixed = Monoid("fixed", 0, lambda a, b: a + b, lambda x: jax.lax.while_loop(lambda y: y > 1, lambda y: y / 2, x))
    with pytest.raises(OptionError, match="monoid 'fixed': lift is made of more than elementwise operations"):
        eqsat_mem.optimize(fixed, memory_limit="1MiB").plan(jax.ShapeDtypeStruct((8, 8), jnp.float32))


@pytest.mark.slow
def test_the_command_checks_them(tmp_path, capsys):
    rule = '(rewrite (Total k a) (Fold "add" k a) :when ((= t (dtype a)) (floating t)) :ruleset simplify :name "total")'
    (tmp_path / "own.egg").write_text(CARD.format("real") + rule)
    (tmp_path / "own.py").write_text(
        "from eqsat_mem import Monoid\ntotal = Monoid('total', 0, lambda a, b: a + b)\nminus = Monoid('minus', 0, lambda a, b: a - b)\n"
    )
    assert main(["check-rules", str(tmp_path / "own.egg"), "--operations", str(tmp_path / "own.py")]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^right +total +monoid +own.py:2$", out, re.MULTILINE)
    assert re.search(r"^wrong +minus +monoid +own.py:3 +its identity changes", out, re.MULTILINE)
    assert re.search(r"^right +total +real ", out, re.MULTILINE)
    assert "1 rules: 1 right, 0 not" in out


def test_an_operation_and_a_monoid_of_one_name():
    with pytest.raises(OptionError, match="operation 'total' is 'Total' in rules, as is 'total' of"):
        load_rules(operations=[TOTAL, Operation("total", lambda x: x)])


@pytest.mark.parametrize("axis", [None, (0, 1)])
def test_a_fold_of_several_axes_says_what_to_do(axis):
    with pytest.raises(TypeError, match=r"total folds one axis, not axis=.*: to fold several, reshape them to one"):
        Monoid("total", 0, lambda a, b: a + b)(jnp.ones((2, 3)), axis=axis)
