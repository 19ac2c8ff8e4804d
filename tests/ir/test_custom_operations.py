"""Operations of the user's: plain JAX without `optimize`, planned with it, and words of the language for rule files."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem import Operation, OptionError, RuleError
from eqsat_mem.__main__ import main
from eqsat_mem.backends.cpu.kernel_library import knows
from eqsat_mem.cli.counterexample import counterexample
from eqsat_mem.egraph.printer import in_rule_language
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.egraph.soundness.judge import judge
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Map
from eqsat_mem.schedule.backend import Backend
from tests.oracles.evaluation import values
from tests.oracles.extraction import chaos
from tests.oracles.targets import CPU
from tests.tiers import tiered

CARD = ";; a\n;; sound: {} -- why\n;; memory: none\n"


def halved(x):
    """As many halvings as it takes: a loop, which no elementwise operation of JAX's is."""
    return jax.lax.while_loop(lambda y: jnp.abs(y) > 1, lambda y: y / 2, x)


SOFT = Operation("soft_difference", lambda x, y: jnp.log1p(jnp.exp(x - y)))
DISTANCE = Operation("distance", lambda a, b: jnp.sqrt(jnp.sum((a - b) ** 2)), "(d),(d)->()", cost=lambda d: 3 * d)
SOFTMAX = Operation("row_softmax", jax.nn.softmax, "(n)->(n)")
CLOSE = Operation("close", lambda x, y: jnp.abs(x - y) < 0.1, dtype="bool")
HALVED = Operation("halved", halved, cost=20)
OWN = [SOFT, DISTANCE, SOFTMAX, CLOSE, HALVED]


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def rules_of(tmp_path, text, sound="real", operations=OWN):
    path = tmp_path / "own.egg"
    path.write_text(CARD.format(sound) + text)
    return load_rules([path], operations=operations)


def verdict(rules):
    return judge(next(rule for rule in rules.rules if rule.file == "own"), rules)


# --- plain JAX ----------------------------------------------------------------------------------------

CASES = {
    "elementwise": (SOFT, [(3, 1, 4), (2, 4)]),
    "scalar": (SOFT, [(3, 4), ()]),
    "rows": (DISTANCE, [(3, 1, 4), (2, 4)]),
    "one row": (DISTANCE, [(4,), (4,)]),
    "same shape": (SOFTMAX, [(2, 3, 4)]),
    "extent one": (SOFT, [(1, 3), (1, 1)]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call_is_that_of_jnp_vectorize(name):
    operation, shapes = CASES[name]
    args = [normal(*shape) for shape in shapes]
    plain = jnp.vectorize(operation.fun, signature=operation.text)
    np.testing.assert_allclose(operation(*args), plain(*args), rtol=1e-6)

    def derivatives(*args):
        """The value, the tangent and the gradients."""
        every = tuple(range(len(args)))
        return [(f(*args), jax.jvp(f, args, args)[1], *jax.grad(lambda *a, f=f: f(*a).sum(), every)(*args)) for f in (operation, plain)]

    for got, want in zip(*jax.jit(derivatives)(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 1), (-1, 0)])
def test_vmap(axes):
    args = [normal(4, 4, 4), normal(4, 4, 4)]
    plain = jnp.vectorize(DISTANCE.fun, signature=DISTANCE.text)
    got, want = jax.jit(lambda *a: (jax.vmap(DISTANCE, axes)(*a), jax.vmap(plain, axes)(*a)))(*args)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_numbers_take_the_dtype_of_arrays():
    with jax.enable_x64(True):
        assert SOFT(jnp.float32(1), 2.0).dtype == np.float32
        assert SOFT(1.0, 2).dtype == np.float64
        assert CLOSE(jnp.float32(1), 1).dtype == bool


def test_costs_are_counted_or_given():
    assert CPU.weights.of_map(of_two(SOFT)) == 1 + 21 + 63
    assert Backend.weights.of_map(of_two(SOFT)) == 1 + 10 + 10
    assert CPU.weights.of_map(of_two(HALVED)) == Backend.weights.of_map(of_two(HALVED)) == 20
    assert CPU.weights.of_operation(DISTANCE, [(7,), (7,)]) == 21
    assert not CPU.weights.is_cheap(of_two(SOFT))
    assert not CPU.weights.is_cheap(of_two(CLOSE))
    assert CPU.weights.is_cheap(of_two(Operation("twice", lambda x: x + x)))


def test_the_kernel_library_knows_operations_by_what_they_are_made_of():
    assert knows(of_two(SOFT))
    assert not knows(of_two(HALVED))


def of_two(operation):
    """The term of an elementwise operation on two values."""
    return Map(np.dtype(np.float32), operation.name, (0, 1), (("operation", operation),))


# --- planned ------------------------------------------------------------------------------------------


def kernel(x, y, v):
    return SOFT(DISTANCE(x[:, None], y[None]), 1.0) @ v


def scored(x, y, v):
    return SOFTMAX(SOFT(DISTANCE(x[:, None], y[None]), 1.0)) @ v


def weights(x, y, v):
    return SOFTMAX(x @ y.T) @ HALVED(v)


def nearest(x, y, v):
    return jnp.sum(jnp.where(CLOSE(x @ y.T, v[:, 0]), 1.0, 0.0), 1)


@pytest.mark.parametrize("function", [scored, weights, nearest])
def test_loops_split_along_what_the_function_does_not_see(function):
    args = normal(1001, 3), normal(700, 3), normal(700, 2)
    planned = eqsat_mem.optimize(function, memory_limit="1MiB")
    plan = planned.plan(*args)
    assert plan.loops
    assert plan.peak_bytes <= 2**20
    scope = {}
    exec(plan.source, scope)
    assert not plan.namespace
    want = jax.jit(function)(*args)
    for got in (planned(*args), *jax.jit(scope[function.__name__])(*args)):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_gradients_stay_under_the_limit():
    args = normal(500, 3), normal(401, 3), normal(401, 2)
    planned = eqsat_mem.optimize(kernel, memory_limit="1MiB")
    every = (jax.jit(jax.grad(lambda *a, f=f: jnp.sum(f(*a) ** 2), (0, 2)))(*args) for f in (planned, kernel))
    for got, want in zip(*every, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)


def test_the_reference_interpreter_knows_them():
    args = normal(5, 3), normal(4, 3), normal(4, 2)
    for function in (kernel, weights, nearest):
        program = load(jax.make_jaxpr(function)(*args), ["x", "y", "v"])
        np.testing.assert_allclose(values(args, program)[0][0], jax.jit(function)(*args), rtol=1e-5, atol=1e-6)


def test_a_body_of_a_scan_holds_them():
    def walk(x, v):
        return jax.lax.scan(lambda c, row: (SOFT(c, DISTANCE(row, c)), c), v, x)

    args = normal(7, 3), normal(3)
    planned = eqsat_mem.optimize(walk, memory_limit="1MiB")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), planned(*args), walk(*args))


# --- rules --------------------------------------------------------------------------------------------

INTO = '(rewrite (Log1p (Exp (Sub x y))) (SoftDifference x y) :ruleset simplify :name "into")'
OUT_OF = """(rule ((= e (Distance d a b)) (= t (dtype a)) (floating t))
      ((union e (Sqrt (Fold "add" d (Mul (Sub a b) (Sub a b)))))) :ruleset explore :name "out-of")"""


def plain(x, y, v):
    return jnp.log1p(jnp.exp(x[:, None] - y)) @ v


def test_rules_rewrite_into_an_operation(tmp_path):
    rules_of(tmp_path, INTO)
    args = normal(900), normal(700), normal(700)
    planned = eqsat_mem.optimize(plain, memory_limit="1MiB", rules=tmp_path / "own.egg", operations=SOFT)
    plan = planned.plan(*args)
    assert "into" in plan.rules_fired
    np.testing.assert_allclose(planned(*args), plain(*args), rtol=1e-4, atol=1e-4)
    cheap = Operation("soft_difference", SOFT.fun, cost=1)
    plan = eqsat_mem.optimize(plain, memory_limit="1MiB", rules=tmp_path / "own.egg", operations=cheap).plan(*args)
    assert "soft_difference(" in plan.source  # it costs less than what it stands for


def test_rules_rewrite_an_operation_into_something_else(tmp_path):
    rules_of(tmp_path, OUT_OF)
    args = normal(1000, 3), normal(700, 3), normal(700, 1)
    planned = eqsat_mem.optimize(kernel, memory_limit="1MiB", rules=tmp_path / "own.egg", operations=OWN)
    plan = planned.plan(*args)
    assert {"out-of", "expand-distance"} <= set(plan.rules_fired)
    np.testing.assert_allclose(planned(*args), kernel(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_programs_drawn_from_the_e_graph_equal_the_original(tmp_path, seed):
    both = '(birewrite (Distance d a b) (Distance d b a) :ruleset explore :name "symmetric")\n'
    rules = rules_of(tmp_path, both + CARD.format("real") + OUT_OF + "\n" + CARD.format("real") + INTO)
    args = normal(5, 3), normal(4, 3), normal(4, 2)

    def program(x, y, v):
        return kernel(x, y, v) + jnp.log1p(jnp.exp(DISTANCE(x[:, None], x[None]) - y[0, 0])) @ kernel(x, y, v) @ SOFTMAX(v.T @ v)

    view = saturate(load(jax.make_jaxpr(program)(*args), ["x", "y", "v"]), rules, Limits(large_elements=0))
    assert {"symmetric", "out-of", "into"} <= set(view.matches)
    np.testing.assert_allclose(values(args, chaos(view, seed).program)[0][0], jax.jit(program)(*args), rtol=1e-3, atol=1e-3)


RIGHT = {
    "into": INTO,
    "out of": OUT_OF,
    "symmetric": '(rewrite (Distance d a b) (Distance d b a) :ruleset explore :name "symmetric")',
    "another dtype": '(rewrite (Close a b) (Close b a) :ruleset explore :name "close")',
    "same axes": """(rule ((= e (RowSoftmax n a)) (= t (dtype a)) (floating t) (!= (& n (free a)) 0))
        ((union e (Exp (Sub a (Log (Fold "add" n (Exp a))))))) :ruleset explore :name "softmax")""",
}
WRONG = {
    "swapped": '(rewrite (SoftDifference a b) (SoftDifference b a) :ruleset explore :name "swapped")',
    "no root": OUT_OF.replace("Sqrt", "Abs"),
    "no sum": '(rewrite (RowSoftmax n a) (Exp a) :ruleset explore :name "no-sum")',
    "one index twice": '(rewrite (Mul (RowSoftmax n a) b) (RowSoftmax n (Mul a b)) :ruleset explore :name "inside")',
    "always close": '(rewrite (Close a b) (Lit 1.0 "bool") :ruleset explore :name "always")',
}


@pytest.mark.parametrize("name", tiered(RIGHT, ["into"], [*RIGHT][1::2]))
def test_the_check_passes_rules_that_are_right(tmp_path, name):
    found = verdict(rules_of(tmp_path, RIGHT[name]))
    assert found.status == "right", found.summary()


@pytest.mark.parametrize("name", tiered(WRONG, ["swapped"], ["no root"]))
def test_the_check_catches_rules_that_are_wrong(tmp_path, name):
    found = verdict(rules_of(tmp_path, WRONG[name]))
    assert found.status == "wrong"
    text = counterexample(found.wrong)
    assert "eqsat_mem" not in text
    if found.wrong.args:
        before = jax.config.jax_enable_x64
        try:
            exec(compile(text, name, "exec"), {})
        finally:
            jax.config.update("jax_enable_x64", before)


def test_a_program_is_shown_with_their_constructors():
    args = normal(5, 3), normal(4, 3), normal(4, 2)
    shown = in_rule_language(load(jax.make_jaxpr(kernel)(*args), ["x", "y", "v"]))
    assert re.search(r"= \(Distance \{j\} %\d+ %\d+\) : float32\[i k\]", shown)
    assert re.search(r"= \(SoftDifference %\d+ %\d+\) : float32\[i k\]", shown)


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "Soft"}, "an operation has a name in small letters, such as 'soft_difference', not 'Soft'"),
        ({"fun": 3}, "operation 'soft': fun must be a function, not 3"),
        ({"cost": 0}, "operation 'soft': cost must be a number of additions above zero, or a function, not 0"),
        ({"signature": "n,n->n"}, r"operation 'soft': a signature is written '\(m,n\),\(n\)->\(m\)', not 'n,n->n'"),
        ({"signature": "(n,n)->()"}, "the axes of one array have different names"),
        ({"signature": "(n)->(m)"}, r"no operand in '\(n\)->\(m\)' has the axis 'm' of the result"),
        ({"dtype": 2}, "operation 'soft' has no operand 2 to take the dtype of its result from"),
        ({"dtype": "floaty"}, "dtype must be the position of an operand or the name of a dtype, not 'floaty'"),
        ({"fun": lambda *x: x[0]}, r"how many operands its function takes is not to be seen: pass signature='\(\),\(\)->\(\)'"),
    ],
)
def test_operations_that_mean_nothing(given, message):
    with pytest.raises(OptionError, match=message):
        Operation(**{"name": "soft", "fun": lambda x, y: x, **given})


def test_calls_that_mean_nothing():
    with pytest.raises(TypeError, match="soft_difference takes 2 operands, not 1"):
        SOFT(1.0)
    with pytest.raises(ValueError, match=r"distance is \(d\),\(d\)->\(\): operand 1 has 0 axes, and needs at least 1"):
        DISTANCE(normal(3), 1.0)
    with pytest.raises(
        OptionError, match=r"operation 'shape' is \(n\)->\(n\), and its function returns an array of shape \(\), not \(3,\)"
    ):
        Operation("shape", jnp.sum, "(n)->(n)")(normal(3))
    with pytest.raises(OptionError, match="the result of operation 'compare' is bool, not float32: pass dtype='bool'"):
        Operation("compare", lambda x: x > 0)(normal(3))


def test_names_that_are_taken(tmp_path):
    for other, message in (
        (Operation("exp", jnp.exp), r"operation 'exp' is 'Exp' in rules, which is a word of the language; rename it"),
        (
            Operation("soft_Difference", SOFT.fun),
            r"test_custom_operations.py:\d+: operation 'soft_Difference' is 'SoftDifference' in rules, as is",
        ),
        ("exp", "operations must be eqsat_mem.Operation or eqsat_mem.Monoid objects, not 'e'"),
    ):
        with pytest.raises(OptionError, match=message):
            eqsat_mem.optimize(kernel, operations=other if isinstance(other, str) else [SOFT, other])
    with pytest.raises(RuleError, match=r"own.egg:4: 'Distance' is taken by an operation of test_custom_operations.py:\d+"):
        rules_of(tmp_path, "(relation Distance (T))")


def test_rules_that_misuse_them(tmp_path):
    with pytest.raises(RuleError, match=r"own.egg:4: 'Distance' is not known"):
        rules_of(tmp_path, OUT_OF, operations=())
    with pytest.raises(RuleError, match=r"own.egg:4: 'Distance' takes 3 arguments, not 2"):
        rules_of(tmp_path, '(rewrite (Distance a b) a :ruleset explore :name "x")')
    with pytest.raises(RuleError, match=r"own.egg:4: 1 in 'Distance': indices have no fixed numbers"):
        rules_of(tmp_path, '(rewrite (Distance 1 a b) a :ruleset explore :name "x")')


# --- the command line ---------------------------------------------------------------------------------

FILE = """
import jax.numpy as jnp
from eqsat_mem import Operation

soft_difference = Operation("soft_difference", lambda x, y: jnp.log1p(jnp.exp(x - y)))
"""


@pytest.mark.slow
def test_commands_take_the_file_that_defines_them(tmp_path, capsys):
    rules_of(tmp_path, INTO)
    (tmp_path / "own.py").write_text(FILE)
    (tmp_path / "none.py").write_text("x = 1\n")
    own = str(tmp_path / "own.egg")
    assert main(["check-rules", own, "--operations", str(tmp_path / "own.py")]) == 0
    assert re.search(r"^right +into ", capsys.readouterr().out, re.MULTILINE)
    assert main(["rules", "--rules", own, "--operations", str(tmp_path / "own.py")]) == 0
    assert "into " in capsys.readouterr().out
    assert main(["check-rules", own]) == 2
    assert "'SoftDifference' is not known" in capsys.readouterr().err
    assert main(["check-rules", own, "--operations", str(tmp_path / "none.py")]) == 2
    assert "none.py has no operations: it assigns eqsat_mem.Operation(...) or eqsat_mem.Monoid(...) to names" in capsys.readouterr().err
