"""Explanations: the rules they name are those without which the plan is not found, found out here by planning without each."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.scipy.linalg import solve_triangular

import eqsat_mem
from eqsat_mem import pipeline
from eqsat_mem.egraph.saturate import rule_of
from eqsat_mem.reports.explanation import EQUAL
from eqsat_mem.reports.minimal_sets import smallest
from tests.schedule.test_search import kernel_vector
from tests.tiers import tiered

MIB = 2**20


def bound(x, z, noise):
    """The terms of the evidence bound of a sparse Gaussian process, after Titsias, that depend on all of the data."""

    def kernel(a, b):
        return jnp.exp(-0.5 * jnp.sum((a[:, None] - b[None]) ** 2, -1))

    a = solve_triangular(jnp.linalg.cholesky(kernel(z, z)), kernel(z, x), lower=True) / jnp.sqrt(noise)
    return jnp.linalg.cholesky(a @ a.T), jnp.sum(a**2)


def chain(a, b, c):
    return (a @ b.T) @ c


def longer(a, b, c, d):
    """Rules find its order, and so does a pass."""
    return ((a @ b.T) @ c) @ d


def power_iteration(x, v):
    """Its kernel product is planned inside the body of a scan."""
    return lax.scan(lambda v, _: (kernel_vector(x, x, v), None), v, None, length=3)[0]


CASES = {
    "bound": (bound, [(9000, 3), (40, 3), ()], "1MiB"),
    "chain": (chain, [(3000, 40), (3000, 40), (3000, 20)], "8MiB"),
    "longer": (longer, [(3000, 40), (3000, 40), (3000, 20), (20, 500)], "8MiB"),
    "scan": (power_iteration, [(2000, 3), (2000, 1)], "1MiB"),
}
NEEDS = {
    "bound": {"slice-pointwise", "accumulate-dot", "unroll-fold"},
    "chain": {"reassociate"},
    "longer": set(),
    "scan": {"slice-pointwise", "unroll-fold"},
}
"""Rules that certainly belong to the explanation of each; those of the scan fire in its body only."""


@cache
def planned(name, only_rules=None):
    fun, shapes, limit = CASES[name]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return eqsat_mem.optimize(fun, memory_limit=limit, only_rules=only_rules, verify=False, max_seconds=60.0).plan(*args)


@cache
def explained(name):
    return planned(name).explain()


def as_good_without(name, rules):
    return _as_good_without(name, frozenset(rules))


@cache
def _as_good_without(name, rules):
    """Whether planning from the start, without some rules, gives a plan as small and as fast."""
    plan = planned(name)
    record = plan.record
    try:
        other = pipeline.plan(record.jaxpr, replace(record.options, without_rules=tuple(sorted(rules))), record.arg_names)
    except eqsat_mem.MemoryLimitError:
        return False
    pairs = [(other.predicted_s, plan.predicted_s), *zip(body_seconds(other), body_seconds(plan), strict=True)]
    return other.peak_bytes <= plan.peak_bytes and all(a <= b * (1 + EQUAL) for a, b in pairs)


def body_seconds(plan):
    """The predicted seconds of the planned bodies of a plan's only scan, if any."""
    blocks = (plan.program.terms[t] for t in plan.program.reachable())
    return [body.seconds for term in blocks for body in getattr(getattr(term, "call", None), "bodies", ()) if body]


@pytest.mark.parametrize("name", tiered(CASES, ["chain"], [name for name in CASES if name not in ("chain", "bound", "scan")]))
def test_the_rules_named_are_those_without_which_the_plan_is_not_reached(name):
    why = explained(name)
    alone = {n.rule.name for n in why.rules if not n.without.reached}
    stand_ins = {n.rule.name for n in why.rules if n.without.reached}
    every = alone | stand_ins | set(why.spare_rules)
    assert alone >= NEEDS[name]
    assert set(map(rule_of, planned(name).rules_fired)) <= every
    assert {rule for rule in every if not as_good_without(name, {rule})} == alone


@pytest.mark.slow
def test_a_pass_stands_in_for_a_rule():
    why = explained("longer")
    stand_ins = [n for n in why.rules if n.without.reached]
    assert {n.rule.name for n in stand_ins} & {"reassociate", "order-of-products"}
    assert {"reassociate", "order-of-products"} <= {n.rule.name for n in why.rules} | set(why.spare_rules)
    assert not as_good_without("longer", {"reassociate", "order-of-products"})


@pytest.mark.parametrize("name", tiered(CASES, ["chain"], ["longer", "scan"]))
def test_they_suffice_together_and_none_of_them_is_spare(name):
    why = explained(name)
    needed = {n.rule.name for n in why.rules}
    assert as_good_without(name, why.spare_rules)
    for rule in needed:
        assert not (as_good_without(name, {rule}) and as_good_without(name, {*why.spare_rules, rule}))


@pytest.mark.slow
def test_rules_stand_in_the_order_in_which_they_matched():
    rules = explained("scan").rules
    assert [n.step for n in rules] == sorted(n.step for n in rules)
    assert all(n.matches > 0 for n in rules)
    splitting = [n.step for n in rules if n.rule.ruleset == "splitting"]
    assert min(splitting) > max((n.step for n in rules if n.rule.ruleset == "explore"), default=0)


@pytest.mark.parametrize("name", tiered(["bound", "chain"], ["chain"], []))
def test_the_figures_are_those_of_the_plan(name):
    plan, why = planned(name), explained(name)
    assert why.repeated
    assert (why.peak_bytes, why.original_peak_bytes, why.limit_bytes) == (plan.peak_bytes, plan.original_peak_bytes, plan.limit_bytes)
    assert [effect.loop for effect in why.loops] == plan.loops
    for rival in why.rivals:
        assert (rival.peak_bytes, rival.seconds) != (plan.peak_bytes, plan.predicted_s)
        assert ("over the limit" in rival.why) == (rival.peak_bytes > plan.limit_bytes)
    assert any(rival.program == "as written" for rival in why.rivals)


@pytest.mark.thorough
def test_a_loop_saves_what_a_single_turn_would_hold():
    plan = planned("bound")
    (effect,) = explained("bound").loops
    assert effect.one_turn_peak_bytes > plan.limit_bytes
    assert effect.saves_bytes == effect.one_turn_peak_bytes - plan.peak_bytes
    assert effect.costs_s == pytest.approx(plan.predicted_s - effect.one_turn_s)


def test_peaks_are_told_in_the_users_lines():
    why = planned("bound").explain(max_seconds=0)  # that takes no search
    largest = why.peak_before[0]
    assert largest.nbytes == largest.whole_bytes == 9000 * 40 * 4
    assert "test_explain.py" in largest.place
    assert largest.line in ("return jnp.exp(-0.5 * jnp.sum((a[:, None] - b[None]) ** 2, -1))",
                            "a = solve_triangular(low, kernel(z, x), lower=True) / jnp.sqrt(noise)")  # fmt: skip
    assert any(tensor.nbytes < tensor.whole_bytes for tensor in why.peak_after)
    arguments = sum(tensor.nbytes for tensor in why.peak_after if " argument " in tensor.what)
    assert arguments == planned("bound").argument_bytes


def test_it_prints():
    text = str(explained("chain"))
    assert text.startswith("why this plan of chain\nrules without which it is not reached, in the order in which they matched (")
    assert "1. reassociate [reassociate]: Dot(k2, Dot(k1, a, b), c) = " in text
    for part in ("without it: ", " times as long", "rules that matched and are not needed: ", "no loops\n", "runners-up\n", "as written: "):
        assert part in text
    assert "held at the peak before: " in text
    assert "at test_explain.py:" in text


def test_it_is_data():
    record = json.loads(explained("chain").to_json())
    assert {rule["rule"]["name"] for rule in record["rules"]} == {n.rule.name for n in explained("chain").rules}
    assert record["peak_after"][0].keys() == {"what", "nbytes", "whole_bytes", "place", "line"}


def test_a_function_left_as_it_was_needs_no_rule():
    plan = eqsat_mem.optimize(lambda x: x + 1, memory_limit="1GiB", verify=False).plan(jax.ShapeDtypeStruct((8,), jnp.float32))
    why = plan.explain()
    assert (why.unchanged, why.rules, why.loops) == (True, [], [])
    assert "the function runs as it was written" in str(why)


def test_a_plan_made_by_hand_has_no_search():
    plan = dataclasses.replace(planned("chain"), record=None)
    with pytest.raises(ValueError, match=r"^this plan was not made by optimize\(\), or not in this process, so there is no search"):
        plan.explain()


@pytest.mark.parametrize(
    ("enough", "expected"),
    [
        (lambda some: True, ""),
        (lambda some: {"b", "e"} <= some, "be"),
        (lambda some: "a" in some and ("c" in some or "d" in some), "ad"),
        (lambda some: len(some) >= 3, "def"),
        (lambda some: len(some) == 6 or some == {"a"}, "abcdef"),
        (lambda some: len(some) % 2 == 0 and len(some) > 2, "abcdef"),
        (lambda some: "a" in some and len(some) != 2, "a"),
    ],
)
def test_the_smallest_set(enough, expected):
    found = smallest("abcdef", enough)
    every = frozenset("abcdef")
    assert found == list(expected)
    assert enough(frozenset(found))
    assert not any(enough(frozenset(found) - {name}) and enough(every - {name}) for name in found)


@pytest.mark.parametrize("seconds", ["plan.html", True, float("nan")])
def test_seconds_are_a_number(seconds):
    plan = eqsat_mem.optimize(lambda x: jnp.exp(x[:, None] - x).sum(1), memory_limit="64KiB").plan(jnp.ones(1000))
    with pytest.raises(eqsat_mem.OptionError, match=r"^why_seconds must be a number of seconds above zero, not "):
        eqsat_mem.page(plan, seconds)
