"""Rule files that ask for too much: an error names the rule, and the process that plans goes on."""

import resource
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.egraph import saturate as saturation
from eqsat_mem.egraph import worker
from eqsat_mem.egraph.engine import Failure, LocalSession, Overrun, Panic
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import Limits, saturate, session
from eqsat_mem.egraph.soundness.sample_programs import PROGRAMS
from eqsat_mem.egraph.worker import Worker
from eqsat_mem.errors import RuleError
from eqsat_mem.frontend.load import load
from tests.oracles import hostile_rules
from tests.oracles.hostile_rules import CARD, hostile, outcome
from tests.tiers import tiered

SAMPLE = [*range(4), 104, 26, 36, 46, 7, 8, 9]
"""Seeds, one for each kind of file and some more, that take a second at most."""


def file(tmp_path, text, name="mine.egg"):
    path = tmp_path / name
    path.write_text(text)
    return path


def distances(x, y):
    return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1))


POINTS = np.ones((20, 3), np.float32), np.ones((30, 3), np.float32)
DOUBLE = "(relation name (String))\n" + CARD + '(rule ((= e (Exp a)) (= t (dtype a))) ((name t)) :ruleset simplify :name "named")\n'
DOUBLE += CARD + '(rule ((name s)) ((name (+ s s))) :ruleset simplify :name "doubled")\n'


@pytest.mark.parametrize("seed", SAMPLE, ids=[f"{hostile(seed)[0]}-{seed}" for seed in SAMPLE])
def test_a_hostile_file_ends_in_time_and_is_named(seed, tmp_path):
    what = outcome(seed, tmp_path)
    assert hostile_rules.verdict((seed, 0.0, 0, what)) in ("named", "planned", "stopped"), what


@pytest.mark.parametrize("count", tiered([8, 120], [], [8]))
def test_no_hostile_file_of_several_hangs_or_kills_python(count):
    results = hostile_rules.run(20_000, count)
    assert len(results) == count
    assert [r for r in results if hostile_rules.verdict(r) not in ("named", "planned", "stopped")] == []


def test_every_kind_of_file_is_in_the_sample():
    assert {hostile(seed)[0] for seed in SAMPLE} >= {kind.__name__ for kind in hostile_rules.KINDS} - {"wide"}


def test_optimize_names_the_rule_and_plans_without_it_if_asked(tmp_path):
    path = file(tmp_path, DOUBLE)
    with pytest.raises(RuleError, match=r"^mine.egg:9: rule 'doubled': takes more than .*\['doubled'\], or \['mine'\]"):
        eqsat_mem.optimize(distances, memory_limit="1MiB", rules=path).plan(*POINTS)
    for without in (["doubled"], ["mine"]):
        plan = eqsat_mem.optimize(distances, memory_limit="1MiB", rules=path, without_rules=without).plan(*POINTS)
        assert ("named" in plan.rules_fired) is (without == ["doubled"] and not plan.unchanged)


@pytest.mark.parametrize("value", ["(/ m 0)", "(% m 0)", "(<< m 64)", "(>> m -1)", "(* 9223372036854775807 (+ m 2))"])
def test_numbers_without_a_value_are_told_with_their_rule(tmp_path, value):
    path = file(tmp_path, CARD + f'(rule ((= e (Exp a)) (= m (free e))) ((want {value})) :ruleset analysis :name "partial")')
    program = load_of(distances)
    with pytest.raises(RuleError, match=r"^mine.egg:4: rule 'partial': .* has no value: it overflows, divides by zero or shifts too far"):
        saturate(program, load_rules([path]))
    path.write_text(CARD + f'(rule ((= e (Exp a)) (= m (free e)) (= n {value})) ((want n)) :ruleset analysis :name "partial")')
    assert saturate(program, load_rules([path])).stopped == "saturated"


def load_of(fun, args=POINTS):
    return load(jax.make_jaxpr(fun)(*args), ["x", "y"])


@pytest.mark.slow
def test_a_rule_that_takes_too_long_is_found_among_others(tmp_path):
    links = " ".join(f"(link e {n})" for n in range(60))
    text = "(relation link (T i64))\n" + CARD + f'(rule ((= e (Exp a))) ({links}) :ruleset analysis :name "linked")\n'
    joined = " ".join(f"(link e n{k})" for k in range(6)) + " (= -1 (+ n0 (+ n1 (+ n2 (+ n3 (+ n4 n5))))))"
    text += CARD + f'(rule ({joined}) ((link e n0)) :ruleset splitting :name "joined")\n'
    text += CARD + '(rewrite (Neg (Neg a)) a :ruleset simplify :name "innocent")\n'
    with pytest.raises(RuleError, match=r"^mine.egg:9: rule 'joined': takes more than 1 s"):
        saturate(load_of(distances), load_rules([file(tmp_path, text)]), Limits(max_seconds=6.0))


def test_what_has_no_meaning_is_traced_to_the_rule_that_made_it(tmp_path):
    text = CARD + '(rewrite (Neg (Neg a)) a :ruleset simplify :name "innocent")\n'
    text += CARD + '(rule ((= e (Exp a))) ((set (splits e) (not-i64 0))) :ruleset splitting :name "all-bits")\n'
    path = file(tmp_path, text)
    with pytest.raises(RuleError, match=r"^mine.egg:8: rule 'all-bits': does what no rule may: a rule made the index set -0x1"):
        eqsat_mem.optimize(distances, memory_limit="1MiB", rules=path).plan(*POINTS)


def test_relations_of_thousands_are_refused(tmp_path):
    with pytest.raises(RuleError, match=r"^mine.egg:1: 'broad' has 3000 arguments, more than 32\."):
        load_rules([file(tmp_path, f"(relation broad ({'T ' * 3000}))")])


def test_shipped_rules_run_in_this_process_and_others_elsewhere(tmp_path, monkeypatch):
    innocent = file(tmp_path, CARD + '(rewrite (Neg (Neg a)) a :ruleset simplify :name "innocent")')
    rules = load_rules([innocent])
    assert rules.given == {"innocent"}
    assert isinstance(session(load_rules()), LocalSession)
    assert isinstance(session(load_rules([innocent], without=["innocent"])), LocalSession)
    where = session(rules)
    assert isinstance(where, Worker)
    where.close()
    monkeypatch.setattr(saturation, "Worker", None)
    saturate(load_of(distances), load_rules())  # needs none


@pytest.mark.parametrize("name", ["kernel_vector", "attention", "moments", "noise_plus"])
def test_a_worker_finds_what_is_found_in_this_process(tmp_path, name):
    never = file(tmp_path, CARD + '(rewrite (Clz (Clz (Clz a))) (Clz a) :ruleset simplify :name "never")')
    fun, args = PROGRAMS[name]
    program = load(jax.make_jaxpr(fun)(*args), [f"a{k}" for k in range(len(args))])
    here, there = (saturate(program, load_rules(paths), Limits(large_elements=0, max_rows=5_000)) for paths in ([], [never]))
    assert here.nodes == there.nodes
    assert (here.facts, here.levels, here.matches, here.stopped) == (there.facts, there.levels, there.matches, there.stopped)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes cannot be stopped there")
def test_a_worker_that_waits_is_told_from_one_that_works(monkeypatch):
    monkeypatch.setattr(worker, "PATIENCE", 0.5)
    monkeypatch.setattr(worker, "LEAST_S", 0.0)
    stopped = Worker(2)
    stopped.rows()
    stopped._process._popen.send_signal(signal.SIGSTOP)
    with pytest.raises(Overrun, match=r"^has no answer after 1.0 s, for 2 s of the processor$"):
        stopped.rows()
    stopped.close()


GROWING = (
    "growing",
    ("(ruleset r)", "(relation number (i64))", "(number 0)", '(rule ((number n)) ((number (+ n 1))) :ruleset r :name "more")'),
)


def test_a_process_that_came_to_no_harm_serves_the_next_worker_that_begins_alike():
    first = Worker(3)
    first.declare([GROWING])
    assert first.step("r", 4)[0]
    first.declare([("later", ("(number 100)",))])
    process, rows = first._process, first.rows()
    first.close()
    again = Worker(3)
    again.declare([GROWING])
    assert again._process is process
    assert again.rows() == rows - 5  # none of what came later
    with pytest.raises(Failure):
        again.declare([("unknown", ("(number unbound)",))])
    again.close()
    other = Worker(3)
    other.declare([GROWING])
    assert other._process is not process
    other.close()


def test_a_process_that_has_ended_meanwhile_is_not_taken_over():
    first = Worker(3)
    first.declare([GROWING])
    process = first._process
    first.close()
    process._popen.kill()
    process._popen.wait()
    again = Worker(3)
    again.declare([GROWING])
    assert again._process is not process
    assert again.step("r", 1)[0]
    again.close()


def test_what_a_process_did_before_does_not_count_against_the_next_worker():
    processes = []
    for _ in range(2):
        busy = Worker(1)
        busy.declare([GROWING])
        assert busy.spent < 0.2
        while busy.spent < 0.6:
            busy.step("r", 50)
        processes.append(busy._process)
        busy.close()
    assert processes[0] is processes[1]  # which took more than a second by now


def test_a_worker_ends_at_its_limits():
    declared = "(ruleset r)", "(relation name (String))", '(name "a")', '(rule ((name s)) ((name (+ s s))) :ruleset r :name "doubled")'
    process = Worker(5, 1 << 28)
    process.declare([("declared", declared)])
    with pytest.raises(Overrun, match=r"takes more than 256 MiB of memory"):
        process.step("r", 60)
    process.close()
    process = Worker(5)
    with pytest.raises(Panic):
        process.declare([("unknown", ("(run nowhere 1)",))])
    process.close()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    process = Worker(1)
    process.declare([("declared", ("(ruleset r)", "(relation number (i64))", *(f"(number {n})" for n in range(2000))))])
    joined = '(rule ((number a) (number b) (number c) (< a b) (< b c)) ((number (+ a c))) :ruleset r :name "joined")'
    process.declare([("joined", (joined,))])
    with pytest.raises(Overrun, match="takes more than 1 s"):
        process.step("r", 1)
    process.close()
    if sys.platform == "linux":
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (64 << 10)
