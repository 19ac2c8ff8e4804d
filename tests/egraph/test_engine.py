"""E-graphs in this process: the rules of one are declared once in a thread, and another begins as if they had been declared for it."""

import random
import threading
from contextlib import closing
from dataclasses import replace

import pytest

from eqsat_mem.egraph import engine
from eqsat_mem.egraph import saturate as saturation
from eqsat_mem.egraph.engine import KEPT, CopiedSession, Failure, LocalSession
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.egraph.soundness.sample_programs import PROGRAMS, program_of

RULES = load_rules()
SMALL = Limits(max_rows=5_000, large_elements=0)
NUMBERS = (
    ("declared", ("(sort T)", "(constructor Number (i64) T)", "(ruleset r)")),
    ("next", ('(rule ((= e (Number n)) (< n 3)) ((Number (+ n 1))) :ruleset r :name "next")',)),
)


@pytest.fixture(autouse=True)
def in_a_thread_that_keeps_nothing():
    CopiedSession._kept.__dict__.clear()


def numbers(where, first):
    """The numbers that follow from one in an e-graph, and how many rows it had at first."""
    where.declare(NUMBERS)
    before = where.rows()
    where.declare([("first", (f"(Number {first})",))])
    while where.step("r", 1)[0]:
        pass
    return sorted(inputs[0] for inputs, _ in where.tables("T", ())["Number"][2]), before


def found(program, monkeypatch, session, rules=RULES):
    monkeypatch.setattr(saturation, "CopiedSession", session)
    view = saturate(program, rules, SMALL)
    return view.nodes, view.class_of, view.facts, view.levels, view.matches, view.rows, view.stopped


def test_an_e_graph_that_begins_as_another_did_has_nothing_of_what_came_later():
    for first, expected in ((2, [2, 3]), (0, [0, 1, 2, 3]), (7, [7])):
        with closing(CopiedSession()) as where:
            assert numbers(where, first) == (expected, 0)


def test_rules_are_declared_once_in_a_thread(monkeypatch):
    declared = []
    monkeypatch.setattr(LocalSession, "declare", lambda self, texts, of=LocalSession.declare: declared.append(texts) or of(self, texts))
    for _ in range(3):
        with closing(CopiedSession()) as where:
            where.declare(NUMBERS)
    assert declared == [NUMBERS]
    there = threading.Thread(target=lambda: CopiedSession().declare(NUMBERS))
    there.start()
    there.join()
    assert declared == [NUMBERS] * 2


def test_two_e_graphs_at_once_are_two():
    with closing(CopiedSession()) as one, closing(CopiedSession()) as other:
        one.declare(NUMBERS)
        other.declare(NUMBERS)
        one.declare([("first", ("(Number 1)",))])
        assert (one.rows(), other.rows()) == (1, 0)


def test_an_e_graph_in_which_something_failed_is_not_begun_with_again():
    with closing(CopiedSession()) as where:
        where.declare(NUMBERS)
        with pytest.raises(Failure):
            where.declare([("unknown", ("(Nobody 1)",))])
    assert CopiedSession()._ready() == {}


def test_only_the_e_graphs_used_last_are_kept():
    for k in range(KEPT + 2):
        with closing(CopiedSession()) as where:
            where.declare([("sort", (f"(sort S{k})",))])
    assert [texts[0][1] for texts in CopiedSession()._ready()] == [(f"(sort S{k})",) for k in (KEPT, KEPT + 1)]


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_is_loaded_becomes_nodes_and_is_not_counted(in_memory, monkeypatch):
    if in_memory and engine._in_memory() is None:
        pytest.skip("this system has no files in memory")
    if not in_memory:
        monkeypatch.setattr(engine, "DESCRIPTORS", "/nowhere")
    made = '(rule ((given n name)) ((Number (+ n 1))) :ruleset loading :name "made")'
    with closing(LocalSession()) as where:
        where.declare([*NUMBERS, ("given", ("(relation given (i64 String))", "(ruleset loading)", made))])
        where.load({"given": [(1, "one"), (-(2**62), "least")]}, [("union", ("Number", (7,)), ("Number", (7,)))])
        assert sorted(inputs[0] for inputs, _ in where.tables("T", ())["Number"][2]) == [1 - 2**62, 2, 7]
        assert where.rows() == 3


@pytest.mark.parametrize("name", ["kernel_vector", "attention"])
def test_programs_saturate_alike_whatever_was_saturated_before(name, monkeypatch):
    program = program_of(PROGRAMS[name][0], *PROGRAMS[name][1])
    afresh = found(program, monkeypatch, LocalSession)
    for other in ("moments", name):
        saturate(program_of(PROGRAMS[other][0], *PROGRAMS[other][1]), RULES, SMALL)
        assert found(program, monkeypatch, CopiedSession) == afresh


@pytest.mark.parametrize("name", ["kernel_vector", "moments"])
def test_programs_saturate_with_some_rules_as_where_the_others_are_unknown(name, monkeypatch):
    program = program_of(PROGRAMS[name][0], *PROGRAMS[name][1])
    fired, rng = sorted(saturate(program, RULES, SMALL).matches), random.Random(3)
    for count in (1, len(fired) // 2, len(fired)):
        some = load_rules(without=rng.sample(fired, count))
        assert found(program, monkeypatch, CopiedSession, some) == found(program, monkeypatch, LocalSession, replace(some, shipped=()))


def test_rules_that_are_left_out_are_no_other_beginning(monkeypatch):
    declared = []
    monkeypatch.setattr(LocalSession, "declare", lambda self, texts, of=LocalSession.declare: declared.append(texts) or of(self, texts))
    program = program_of(PROGRAMS["moments"][0], *PROGRAMS["moments"][1])
    for without in ([], ["distance"], ["reassociate"]):
        saturate(program, load_rules(without=without), SMALL)
    assert sum(len(texts) > len(RULES.rules) for texts in declared) == 1
