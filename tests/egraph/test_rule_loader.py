"""The loader against arbitrary text: it loads or raises RuleError with file and line, and what loads runs within limits."""

import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eqsat_mem.egraph import rule_files
from eqsat_mem.egraph.extract import extract
from eqsat_mem.egraph.graph import EGraph
from eqsat_mem.egraph.rule_files import default_files, load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.egraph.sexpr import read_forms
from eqsat_mem.errors import RuleError
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.ops import Operation

CARD = ";; a = a\n;; sound: real -- why\n;; memory: none\n"
FORMS = [form for path in default_files() for form in read_forms(path.read_text(), path.name)]
ATOMS = sorted({atom for form in FORMS for atom in re.findall(r'"[^"]*"|[^\s()]+', form.text)})
LIMITS = Limits(max_rows=3_000, max_iterations=3, max_seconds=5.0, large_elements=0)


def program():
    x, y = np.ones((2, 3)), np.ones((4, 3))

    def fun(x, y):
        return jnp.sum((x[:, None] - y[None]) ** 2, -1), jnp.exp(jnp.negative(-x)) * 2.0, jnp.max(x, 0)

    return load(jax.make_jaxpr(fun)(x, y), ["x", "y"])


PROGRAM = program()


def mutated(seed: int) -> str:
    """A shipped form with some atoms exchanged, dropped or repeated."""
    rng = random.Random(seed)
    tokens = re.findall(r'"[^"]*"|[()]|[^\s()]+', rng.choice(FORMS).text)
    for _ in range(rng.choice((1, 1, 2, 4))):
        k = rng.randrange(len(tokens))
        action = rng.choice(("swap", "swap", "swap", "drop", "repeat", "number"))
        new = {"swap": [rng.choice(ATOMS)], "drop": [], "repeat": [tokens[k]] * 2, "number": [str(rng.choice((-1, 0, 7, 2**63, 1e300)))]}
        tokens[k : k + 1] = new[action]
    return " ".join(tokens)


def loads_or_says_where(tmp_path, text):
    """The rules with a file of this text, or None where it was refused with its line."""
    path = tmp_path / "fuzzed.egg"
    path.write_text(text, encoding="utf-8")
    try:
        return load_rules([path])
    except RuleError as error:
        refused = str(error)
    assert re.match(r"fuzzed\.egg:\d+: ", refused), refused
    return None


def runs_or_says_why(rules):
    """Saturation and extraction end, or raise RuleError; egglog never panics."""
    try:
        view = saturate(PROGRAM, rules, LIMITS)
        extract(view, lambda program, t, unrolled: 1.0, 0.0)
    except RuleError as error:
        refused = str(error)
        assert not refused.startswith("egglog failed"), refused
    else:
        assert view.rows < 100 * LIMITS.max_rows


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_rules_with_exchanged_words(tmp_path, seed):
    text = mutated(seed)
    text = re.sub(r':name\s+"[^"]*"', f':name "fuzzed-{seed}"', text)
    rules = loads_or_says_where(tmp_path, CARD + text)
    if rules is not None:
        runs_or_says_why(rules)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.text(max_size=80), st.lists(st.sampled_from([*ATOMS, "(", "(", ")", ")", ";", '"', "\n"]), max_size=40).map(" ".join)))
def test_any_text_loads_or_is_refused_with_its_line(tmp_path, text):
    loads_or_says_where(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        '(rule ((= e (Exp a))) ((union e (Fold "add" (not-i64 0) a))) :ruleset simplify :name "all-bits")',
        '(rule ((= e (Exp a)) (= f (free a))) ((union e (Ren f (^ f 1) a))) :ruleset simplify :name "set-for-index")',
        '(rule ((= e (Exp a)) (= f (free a))) ((set (splits e) (<< 1 60))) :ruleset splitting :name "no-such-index")',
    ],
)
def test_index_sets_that_hold_no_index_are_refused(tmp_path, text):
    rules = loads_or_says_where(tmp_path, CARD + text)
    with pytest.raises(RuleError, match="a rule made"):
        extract(saturate(PROGRAM, rules, LIMITS), lambda program, t, unrolled: 1.0, 0.0)


GROWTH = ["(union e (Mul (Exp (Neg a)) (Exp (Exp a))))", "(union e (Exp (Add (Neg (Neg a)) (Mul a a))))"]


@pytest.mark.parametrize("action", [*GROWTH, "(union e (Exp (Exp a)))"])
def test_rules_that_explore_for_ever_stop_at_the_limits_and_are_named(tmp_path, action):
    rules = loads_or_says_where(tmp_path, CARD + f'(rule ((= e (Exp a))) ({action}) :ruleset explore :name "endless")')
    view = saturate(PROGRAM, rules, Limits(max_rows=3_000, max_seconds=60.0, large_elements=10**9))
    assert view.rows < 10 * 3_000
    assert view.matches["endless"] > 1
    if view.stopped not in ("saturated", "after 30 iterations"):
        assert "rule 'endless' added most" in view.stopped


@pytest.mark.parametrize("ruleset", ["simplify", "analysis", "splitting"])
@pytest.mark.parametrize("action", GROWTH)
def test_rules_that_run_to_rest_and_never_do_are_refused(tmp_path, ruleset, action):
    rules = loads_or_says_where(tmp_path, CARD + f'(rule ((= e (Exp a))) ({action}) :ruleset {ruleset} :name "endless")')
    with pytest.raises(RuleError, match=r"fuzzed.egg:4: rule 'endless': does not come to rest"):
        saturate(PROGRAM, rules, Limits(max_rows=3_000, max_seconds=60.0, large_elements=10**9))


def test_without_the_grammar_egglog_would_panic(monkeypatch):
    """The checks prevent a panic of egglog's: here of a name twice, which the loader refuses."""
    twice = [("one", '(rewrite (Neg a) a :ruleset simplify :name "twice")')] * 2
    with pytest.raises(RuleError, match="egglog failed"):
        EGraph(PROGRAM, twice, {"Neg": 1}, 0, 16)


def test_shipped_rules_say_nothing_that_a_rule_may_not_say():
    """Plans do not check them again: this is where they are checked."""
    texts = tuple((path.name, path.read_text(encoding="utf-8")) for path in rule_files.default_files())
    as_given = rule_files._checked(texts, 0, ())
    assert as_given.given == {rule.name for rule in load_rules().rules}
    broken = (*texts, ("more.egg", CARD + '(rewrite (Nothing a) a :ruleset simplify :name "more")'))
    with pytest.raises(RuleError, match="Nothing"):
        rule_files._checked(broken, len(texts), ())


def test_files_are_parsed_once_and_again_when_they_change(tmp_path, monkeypatch):
    path, parsed = tmp_path / "own.egg", []
    monkeypatch.setattr(rule_files, "read_forms", lambda text, name: parsed.append(name) or read_forms(text, name))

    def names(rule):
        path.write_text(f'{CARD}(rewrite (Exp a) (Exp a) :ruleset simplify :name "{rule}")', encoding="utf-8")
        return {rule.name for rule in load_rules([path]).rules}

    assert "first" in names("first")
    assert "own.egg" in parsed
    parsed.clear()
    assert "first" in {rule.name for rule in load_rules([path], without=["splitting"]).rules}
    assert parsed == [], "other options need no other text"
    assert "other" in names("other"), "of the same length"
    assert "longer" in names("longer")
    path.write_text("(rule", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(RuleError, match=r"own\.egg:1: the form that begins here lacks"):
            load_rules([path])
    path.unlink()
    with pytest.raises(RuleError, match="cannot be read"):
        load_rules([path])


def test_what_one_caller_changes_no_other_sees():
    twice = [Operation("twice", lambda x: x + x) for _ in range(2)]
    one, other = (load_rules(operations=[operation]) for operation in twice)
    assert (one.own["Twice"], other.own["Twice"]) == tuple(twice)
    one.own.clear()
    assert load_rules(operations=twice[:1]).own == {"Twice": twice[0]}
    assert load_rules().own == {}
