"""The check of rules: shipped rules pass, every wrong rule is caught, and what is shown of it runs by itself."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqsat_mem import Operation
from eqsat_mem.__main__ import main
from eqsat_mem.cli.counterexample import counterexample
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.soundness.claims import contradictions, equations
from eqsat_mem.egraph.soundness.compare import first_difference
from eqsat_mem.egraph.soundness.instrument import stated_heads
from eqsat_mem.egraph.soundness.judge import judge
from eqsat_mem.egraph.soundness.patterns import App, shape, supports
from eqsat_mem.egraph.soundness.sample_programs import fired
from eqsat_mem.egraph.soundness.values import KINDS
from tests.tiers import tiered

BROKEN = sorted((Path(__file__).parent / "rules_broken").glob("*.egg"))
UNUSUAL = Path(__file__).parent / "rules_right" / "unusual.egg"
RULES = load_rules(accuracy="any")
WRONG = [(path, rule.name) for path in BROKEN for rule in load_rules([path], "any").rules if rule.file == path.stem]
UNUSUAL_NAMES = [rule.name for rule in load_rules([UNUSUAL], "any").rules if rule.file == UNUSUAL.stem]
CHOOSING = {"tame", "triangle", "prefix-sum", "centred", "centred-on", "sinks", "square-of-difference", "measured", "vanishing"}
"""Facts of shipped rules that choose where others apply, and claim nothing of values."""
UNTESTED = {"has-the-sign", "has-been-seen", "everything-is-tame", "centred-on-the-left", "shrunk-squared", "shrunk-grown"}
UNTESTED |= {"squared-about-maximum", "found-last", "found-anywhere", "found-maximum", "found-shifted"}
"""Wrong rules of whose facts nothing says what they mean, or that state them of what no planner would take: unchecked, which fails."""
LOGDET = Operation("log_det", lambda a: jnp.linalg.slogdet(a)[1], "(n,m)->()", cost=lambda n, m: n * m**2)
CARD = ";; a\n;; sound: {} -- why\n;; memory: none\n"


def verdict(path, name, seed=0):
    rules = load_rules([path], "any")
    return judge(next(rule for rule in rules.rules if rule.name == name), rules, seed)


def written(tmp_path, text, sound="real", declared="", unchecked=""):
    path = tmp_path / "mine.egg"
    path.write_text(declared + CARD.format(sound) + f";; unchecked: {unchecked}\n" * bool(unchecked) + text)
    return path


@pytest.mark.parametrize("rule", tiered(RULES.rules, RULES.rules[::8]), ids=lambda rule: rule.name)
def test_every_shipped_rule_is_right(rule):
    found = judge(rule, RULES)
    assert found.accepted, found.summary()
    assert found.status == "right" or set(stated_heads(rule)) <= CHOOSING
    assert not found.thin, found.summary()


def test_many_rules_are_kept_that_are_wrong_and_that_are_right_but_unusual():
    assert len(WRONG) >= 160
    assert len(UNUSUAL_NAMES) >= 25


@pytest.mark.parametrize("name", tiered(UNUSUAL_NAMES, UNUSUAL_NAMES[::3], UNUSUAL_NAMES[1::3]))
def test_no_alarm_is_raised_on_what_is_right_but_unusual(name):
    found = verdict(UNUSUAL, name)
    assert found.status == "right", found.summary()
    assert not found.thin


@pytest.mark.slow
def test_rules_about_operations_of_your_own_are_judged(tmp_path):
    scaled = "(rule ((= e (LogDet n m (Mul c a))) (= (& (| n m) (free c)) 0) (= s (extent n)) (= t (dtype a)) (floating t)) ((union e {})))"
    forms = {"right": "(Add (Mul (Lit s t) (Log (Abs c))) (LogDet n m a))", "wrong": "(Add (Log (Abs c)) (LogDet n m a))"}
    for status, made in forms.items():
        path = tmp_path / f"{status}.egg"
        path.write_text(CARD.format("guarded") + scaled.format(made)[:-1] + f' :ruleset explore :name "log-det-{status}")')
        rules = load_rules([path], "any", operations=[LOGDET])
        found = judge(next(rule for rule in rules.rules if rule.name == f"log-det-{status}"), rules)
        assert found.status == status, found.summary()


def test_what_nothing_tests_passes_only_where_its_own_file_says_why(tmp_path):
    form = '(rule ((= e (Exp a))) ((rising e)) :ruleset simplify :name "rises")'
    declared = "(relation rising (T))\n"
    assert not verdict(written(tmp_path, form, declared=declared), "rises").accepted
    for text in (";; unchecked: it only marks what to look at\n" + declared, declared):
        path = written(tmp_path, form, declared=text, unchecked="it only marks what to look at" * (text == declared))
        found = verdict(path, "rises")
        assert (found.status, found.accepted, found.compared) == ("unchecked", True, 0)
        assert found.summary() == "it only marks what to look at"
    tame = written(tmp_path, '(rule ((= e (Exp a))) ((tame e)) :ruleset explore :name "all-tame")')
    assert not verdict(tame, "all-tame").accepted  # what another file says of its rules is no excuse


def test_a_fact_is_tested_for_what_its_relation_means(tmp_path):
    means = "(relation at-most-one (T))\n"
    meant = ";; means: (at-most-one e) (= t (dtype e)) => (union e (Min e (Lit 1.0 t)))\n" + means
    for operation, status in (("Sin", "right"), ("Tan", "wrong")):
        form = f'(rule ((= e ({operation} a)) (= t (dtype a)) (floating t)) ((at-most-one e)) :ruleset simplify :name "bounded")'
        assert verdict(written(tmp_path, form, "bitwise", declared=meant), "bounded").status == status
        assert verdict(written(tmp_path, form, "bitwise", declared=means), "bounded").status == "unchecked"


def test_a_rule_that_was_hardly_seen_is_told(tmp_path):
    narrow = '(rewrite (Neg (Neg a)) a :when ((= (dtype a) "float16") (= (free a) 0)) :ruleset simplify :name "narrow")'
    found = verdict(written(tmp_path, narrow), "narrow")
    assert found.status == "right"
    assert found.thin == (found.compared < 30) == ("thinly checked" in found.summary())
    assert not verdict(written(tmp_path, '(rewrite (Neg (Neg a)) a :ruleset simplify :name "wide")'), "wide").thin


def test_numbers_that_are_none_of_their_dtype_are_told(tmp_path):
    form = "(rule ((= e (Neg a)) (= t (dtype a)) {}) ((union e (Mul (Lit -1.0 t) (Mul (Lit 70000.0 t) (Div a (Lit 70000.0 t)))))) "
    form += ':ruleset simplify :name "far")'
    assert "70000.0 is no number of float16" in verdict(written(tmp_path, form.format("(fractional t)")), "far").summary()
    assert verdict(written(tmp_path, form.format("(floating t)")), "far").status == "right"


def test_rules_that_state_one_equation_claim_the_same_of_it():
    assert [(one.name, other.name) for one, other in contradictions(RULES.rules)] == []


@pytest.mark.slow
def test_equations_are_known_by_other_names_in_either_direction_and_through_what_premises_equate(tmp_path, capsys):
    text = '(rule ((= product (Mul w u)) (= same (Mul u w))) ((union same product)) :ruleset simplify :name "exchanged")'
    mine = written(tmp_path, text, "reassociate")
    rules = load_rules([mine])
    found = {frozenset((one.name, other.name)) for one, other in contradictions(rules.rules)}
    assert found == {frozenset(("exchanged", name)) for name in ("mul-commutes", "products-of-exchanged")}
    assert main(["check-rules", str(mine)]) == 1
    assert "exchanged (mine.egg:4) state one equation: bitwise and reassociate" in capsys.readouterr().out


def test_other_equations_are_others(tmp_path):
    forms = {
        "swapped": '(rewrite (Sub a b) (Neg (Sub b a)) :ruleset simplify :name "swapped")',
        "kept": '(rewrite (Sub a b) (Neg (Sub a b)) :ruleset simplify :name "kept")',
        "let": '(rule ((= e (Sub a b))) ((let d (Sub b a)) (union e (Neg d))) :ruleset simplify :name "let")',
    }
    stated = {}
    for name, form in forms.items():
        rules = load_rules([written(tmp_path, form)])
        (stated[name],) = equations(next(rule for rule in rules.rules if rule.name == name))
    assert stated["swapped"] == stated["let"] != stated["kept"]


@pytest.mark.parametrize(("path", "name"), tiered(WRONG, WRONG[::16], WRONG[4::8]), ids=[name for _, name in WRONG])
def test_every_wrong_rule_is_caught(path, name, capsys):
    found = verdict(path, name)
    assert not found.accepted, found.summary()
    assert found.status == ("unchecked" if name in UNTESTED else "wrong")
    if found.wrong is None:
        return
    text = counterexample(found.wrong)
    assert "eqsat_mem" not in text
    before = jax.config.jax_enable_x64  # the script sets it for good
    try:
        exec(compile(text, name, "exec"), {})
    finally:
        jax.config.update("jax_enable_x64", before)
    shown = re.findall(r"^(\w+): (.*?)(?=^\w+: |\Z)", capsys.readouterr().out, re.MULTILINE | re.DOTALL)
    sides = [side for _, side in shown]
    if len(sides) == 2 and "bitwise" not in Path(path).read_text().split(f'"{name}"')[0].rsplit(";; sound:")[-1]:
        assert sides[0] != sides[1], text  # what differs in its last bit only may agree in another order of summation


@pytest.mark.parametrize("name", tiered(["sub-commutes", "sum-of-constant", "reassociate-exchanged"], ["sum-of-constant"]))
def test_a_wrong_rule_is_caught_by_any_seed(name):
    path = next(path for path, other in WRONG if other == name)
    assert {verdict(path, name, seed).status for seed in range(1, 4)} == {"wrong"}


def test_a_verdict_is_reproducible():
    path, name = WRONG[0]
    assert counterexample(verdict(path, name).wrong) == counterexample(verdict(path, name).wrong)


def test_a_guard_makes_a_rule_right(tmp_path):
    guarded = written(tmp_path, '(rewrite (Sqrt (Mul d d)) d :when ((nonnegative d)) :ruleset simplify :name "root-of-square")')
    assert verdict(guarded, "root-of-square").status == "right"


def test_the_condition_of_a_guarded_card_is_not_held_against_it(tmp_path):
    cancel = '(rewrite (Div (Mul a b) b) a :when ((= t (dtype a)) (floating t)) :ruleset simplify :name "cancel")'
    assert verdict(written(tmp_path, cancel, "guarded"), "cancel").status == "right"  # where b is zero, the left side is no number
    assert verdict(written(tmp_path, cancel, "real"), "cancel").status == "wrong"


def test_both_directions_of_a_birewrite_are_checked(tmp_path):
    both = written(tmp_path, '(birewrite (Exp (Add a b)) (Mul (Exp a) (Exp b)) :ruleset explore :name "exp-of-sum")')
    found = verdict(both, "exp-of-sum")
    assert found.status == "right"
    assert found.compared > 20


def test_a_rule_that_nothing_meets_is_told(tmp_path):
    never = written(tmp_path, '(rewrite (Neg a) a :when ((= (free a) 0) (!= (free a) 0)) :ruleset simplify :name "never")')
    found = verdict(never, "never")
    assert found.status == "unchecked"
    assert found.summary() == "no left side drawn at random meets its premises and guards"


def test_premises_are_traced_back_through_rules_that_state_facts():
    import random

    rule = next(rule for rule in RULES.rules if rule.name == "expand-distance")
    assert {"centre", "centre-on-left", "sum-of-squares-fold"} <= {r.name for r in supports(rule, RULES)}
    shapes = [shape(rule, RULES, random.Random(seed)) for seed in range(8)]
    heads = {s.resolve(root).head for s in shapes if s for root in s.roots if isinstance(s.resolve(root), App)}
    assert {"Sub", "Mul"} <= heads | {"Mul"}
    assert {"Fold", "Dot"} & heads


def test_claims_are_held_to_what_they_say():
    left = np.ones((len(KINDS), 2), np.float32)
    close, far = np.nextafter(left, 2), left * 1.01

    def differ(claim, one, other, kinds=KINDS, whole=True):
        return first_difference(claim, one, other, np.ones(len(kinds)), np.ones(len(kinds), bool), kinds, whole) is not None

    assert not differ("bitwise", left, left.copy())
    assert differ("bitwise", left, close)
    assert differ("bitwise", left * 0, -left * 0)
    assert not differ("fact", left * 0, -left * 0)
    assert differ("fact", left, close)
    assert not differ("real", left, close)
    assert differ("real", left, far)
    assert differ("real", left * np.nan, left)
    assert not differ("real", left * np.nan, left, whole=False)  # the extreme of nothing
    assert not differ("guarded", left * np.nan, left)
    assert differ("guarded", left, left * np.nan)
    assert not differ("real", left, far, kinds=("special",) * len(KINDS))
    whole = np.ones((len(KINDS), 2), np.int8)
    assert differ("real", whole, 2 * whole, kinds=("wide",) * len(KINDS))
    assert not differ("guarded", whole, 2 * whole, kinds=("wide",) * len(KINDS))


@pytest.mark.slow
def test_the_command_shows_counterexamples_and_rules_that_never_fire(tmp_path, capsys):
    path = written(tmp_path, '(rewrite (Sub a b) (Sub b a) :ruleset simplify :name "sub-commutes")')
    path.write_text(path.read_text() + CARD.format("bitwise") + '(rewrite (Tan (Neg (Neg a))) (Tan a) :ruleset simplify :name "tan-twice")')
    assert main(["check-rules", str(path)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^wrong +sub-commutes +real +mine.egg:4 ", out, re.MULTILINE)
    assert "def left(" in out
    assert re.search(r"^right +tan-twice ", out, re.MULTILINE)
    assert "never fire on the sample programs: tan-twice" in out
    assert "2 rules: 1 right, 1 not" in out
    assert main(["check-rules", str(path), "--rule", "tan-twice"]) == 0
    assert main(["check-rules", "--rule", "tan-thrice"]) == 2
    assert "no rule, pass or rule file is named 'tan-thrice'" in capsys.readouterr().err


def test_an_error_of_egglog_is_that_rule_s_verdict(tmp_path):
    path = written(tmp_path, '(rewrite (Neg a) (Iota a "int32") :ruleset simplify :name "sorts")')
    found = verdict(path, "sorts")
    assert found.status == "wrong"
    assert "mine.egg:4" in found.summary()


def test_every_shipped_rule_fires_on_a_sample():
    assert {rule.name for rule in RULES.rules} <= fired(RULES)
