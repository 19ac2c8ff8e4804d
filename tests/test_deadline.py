"""A bound on planning: wherever it strikes there is a plan that fits, or an error, and both say so."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem import pipeline, request
from eqsat_mem.deadline import NEVER, Deadline
from eqsat_mem.egraph.graph import View
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import OUT_OF_TIME, Limits, saturate
from eqsat_mem.events import Began, Ended, Scheduled, Tried, listening
from eqsat_mem.frontend.load import load
from eqsat_mem.options import Options
from eqsat_mem.request import COMPILATIONS, LEAST_S, planning_seconds
from eqsat_mem.testing import same_values
from tests.oracles.targets import CPU

SAID = "planning was cut short to end within"


def asked(times):
    """A deadline that has passed when it is asked for the time so many times: the same on every machine."""
    return Deadline(times, clock=count().__next__)


def kernel_vector(x, y, v):
    return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


def steps(w, x):
    def step(x, w):
        a = jnp.exp(jnp.sin(x[:, None] * w[None, :]))
        return x + a @ w / w.size, a.sum(0)  # means, lest steps make a small error a large one

    x, sums = jax.lax.scan(step, x, w)
    return x, sums


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PROGRAMS = {
    "kernel_vector": (kernel_vector, (f32(900, 3), f32(800, 3), f32(800)), 200_000),
    "steps": (steps, (f32(6, 700), f32(700)), 200_000),
}


def planned(name, deadline, limit=None):
    function, args, enough = PROGRAMS[name]
    jaxpr = jax.make_jaxpr(function)(*args)
    names = [f"x{k}" for k in range(len(args))]
    return pipeline.plan(jaxpr, Options(memory_limit=limit or enough, verify=False), names, name, CPU, deadline=deadline)


def outcome(name, deadline):
    """The plan, or the error where none was found in time."""
    try:
        return planned(name, deadline)
    except eqsat_mem.MemoryLimitError as error:
        return error


@pytest.fixture(scope="module")
def patient():
    """For each program its plan, and how often its planning asks for the time."""
    plans = {}
    for name in PROGRAMS:
        deadline = asked(10**9)
        plan = planned(name, deadline)
        assert plan.planning_bound_s is None
        assert SAID not in str(plan)
        plans[name] = plan, next(deadline.clock.__self__)
    return plans


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("name", PROGRAMS)
def test_wherever_it_strikes_there_is_a_plan_that_fits_or_an_error(name, share, patient):
    full, questions = patient[name]
    found = outcome(name, asked(max(int(share * questions), 1)))
    if isinstance(found, eqsat_mem.MemoryLimitError):
        assert "Planning was cut short to end within" in str(found)
        assert found.smallest_bytes > found.limit_bytes
        return
    assert found.peak_bytes <= found.limit_bytes
    function, args, _ = PROGRAMS[name]
    values = [np.random.default_rng(k).standard_normal(a.shape, np.float32) for k, a in enumerate(args)]
    comparison = same_values(lambda *values: jax.tree.leaves(function(*values)), lambda *values: list(found.function(*values)), values)
    assert comparison.same, comparison
    if found.source != full.source:
        assert found.planning_bound_s is not None
        assert f"{SAID} " in str(found)
        assert json.loads(found.to_json())["planning_bound_s"] == found.planning_bound_s


def test_with_more_time_the_outcome_is_no_worse_at_its_ends(patient):
    full, questions = patient["kernel_vector"]
    assert isinstance(outcome("kernel_vector", asked(1)), eqsat_mem.MemoryLimitError)
    last = outcome("kernel_vector", asked(100 * questions))
    assert (last.source, last.planning_bound_s) == (full.source, None)


def test_once_time_is_up_hardly_any_tree_is_tried():
    tried = []
    with listening(lambda event: tried.append(event) if isinstance(event, Tried) else None):
        outcome("steps", asked(1))
    assert len(tried) <= 2


def test_bodies_are_planned_until_the_deadline_of_the_program_around_them():
    tried = {}
    for deadline in (NEVER, asked(1)):
        events = []
        with listening(events.append):
            outcome("steps", deadline)
        inside = (sum(isinstance(event, Began) - isinstance(event, Ended) for event in events[:k]) > 1 for k in range(len(events)))
        tried[deadline] = sum(isinstance(event, Tried) and is_inside for event, is_inside in zip(events, inside, strict=True))
    first, last = tried.values()
    assert first > last == 0


def test_the_compiled_program_is_not_searched_anew_when_time_is_up():
    function, args, limit = PROGRAMS["kernel_vector"]
    jaxpr = jax.make_jaxpr(function)(*args)
    clock, checks = [0.0], count()

    class Backend(type(CPU)):
        def check(self, *args, **kwargs):
            clock[0] = 100.0  # which compiling has taken
            next(checks)
            return replace(super().check(*args, **kwargs), held_bytes=10 * limit)

    searches = []
    deadline = Deadline(50.0, clock=lambda: clock[0])
    with (
        listening(lambda event: searches.append(clock[0]) if isinstance(event, Scheduled) else None),
        pytest.raises(eqsat_mem.MemoryLimitError, match=r"^no plan .*\n(.*\n)*Planning was cut short to end within 50 s"),
    ):
        pipeline.plan(jaxpr, Options(memory_limit=limit), ["x", "y", "v"], "f", Backend(CPU.device), deadline=deadline)
    assert searches
    assert set(searches) == {0.0}
    assert next(checks) == 1  # nor is the program as written compiled, which is predicted to hold far more


def test_saturation_stops_and_still_says_where_loops_may_be():
    program = load(jax.make_jaxpr(kernel_vector)(*PROGRAMS["kernel_vector"][1]), ["x", "y", "v"])
    full, stopped = saturate(program, load_rules()), saturate(program, load_rules(), Limits(deadline=asked(40)))
    assert full.stopped == "saturated"
    assert stopped.stopped.startswith(OUT_OF_TIME)
    assert stopped.rows < full.rows
    assert loops_allowed(stopped)


def loops_allowed(view: View):
    return any(view.facts["splits"].values())


def test_rules_are_not_blamed_where_planning_has_no_time(tmp_path):
    (tmp_path / "mine.egg").write_text("""
;; a (b + c) = a b + a c
;; sound: real -- distribution
;; memory: none
(birewrite (Mul a (Add b c)) (Add (Mul a b) (Mul a c)) :ruleset explore :name "mine")
""")
    program = load(jax.make_jaxpr(lambda a, b, c: a * (b + c))(*[f32(300, 300)] * 3), "abc")
    for times in range(1, 12):
        saturate(program, load_rules([str(tmp_path / "mine.egg")]), Limits(deadline=asked(times)))


@pytest.mark.slow
def test_an_explanation_repeats_that_planning_was_stopped(patient):
    _, questions = patient["kernel_vector"]
    found = (outcome("kernel_vector", asked(int(questions * share))) for share in (0.99, 0.95, 0.9, 0.8, 0.7))
    plan = next(p for p in found if isinstance(p, eqsat_mem.Plan) and p.planning_bound_s is not None)
    assert SAID in str(plan.explain())


def test_a_deadline_and_its_parts():
    now = [0.0]
    whole = Deadline(100.0, clock=lambda: now[0])
    first = whole.part(1 / 2)
    now[0] = 49.0
    assert not first.passed()
    now[0] = 50.0
    assert not whole.struck
    assert first.passed()
    assert whole.struck
    assert not whole.passed()
    assert whole.part(1 / 2).end == 75.0
    now[0] = 200.0
    assert whole.part(1 / 2).passed()
    assert whole.again().end == 300.0
    assert NEVER.part(1 / 2).end == math.inf
    assert not NEVER.passed()


def test_by_default_a_large_program_has_more_time():
    def function(depth):
        def chain(x):
            for _ in range(depth):
                x = jnp.sin(x) + 1
            return x

        return jax.make_jaxpr(chain)(f32(3))

    assert planning_seconds(function(10), CPU) == LEAST_S
    equations = 8000
    assert planning_seconds(function(equations // 2), CPU) == COMPILATIONS * equations * CPU.compile_equation_s > LEAST_S


@pytest.mark.parametrize(("option", "variable", "expected"), [(None, "7.5", 7.5), (3.0, "7.5", 3.0), (2, "", 2.0), (None, " ", LEAST_S)])
def test_where_the_bound_comes_from(option, variable, expected, monkeypatch):
    made = []
    monkeypatch.setenv("EQSAT_MEM_MAX_PLANNING_SECONDS", variable)
    monkeypatch.setattr(request, "deadline_of", lambda *args: made.append(real(*args)) or made[-1])
    eqsat_mem.optimize(kernel_vector, verify=False, max_planning_seconds=option).plan(f32(3, 3), f32(3, 3), f32(3))
    assert made[0].seconds == expected


real = request.deadline_of


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_what_is_no_bound(text, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_MAX_PLANNING_SECONDS", text)
    message = "^EQSAT_MEM_MAX_PLANNING_SECONDS must be a number of seconds above zero, not"
    with pytest.raises(eqsat_mem.OptionError, match=message):
        eqsat_mem.optimize(kernel_vector).plan(f32(3, 3), f32(3, 3), f32(3))
