"""Saved plans: another process takes them instead of planning, and refuses those of other functions, arguments, devices and limits."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem import Plan
from eqsat_mem.events import Compiled, Loaded, listening
from eqsat_mem.reports import plan_files

ARGS = [np.random.default_rng(seed).standard_normal(shape).astype(np.float32) for seed, shape in enumerate([(600, 3), (500, 3), (500,)])]
LIMIT = 300_000


def kernel_vector(x, y, v, scale=1.0):
    return jnp.exp(-scale * jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


@pytest.fixture(scope="module")
def made():
    return eqsat_mem.optimize(kernel_vector, memory_limit=LIMIT).plan(*ARGS)


@pytest.fixture
def file(made, tmp_path):
    made.save(tmp_path / "kernel.plan")
    return tmp_path / "kernel.plan"


def work(function, *args):
    """The result of a function, and what was planned and compiled on the way."""
    seen = []
    with listening(seen.append):
        result = function(*args)
    return result, [event for event in seen if isinstance(event, Loaded | Compiled)]


def test_a_saved_plan_takes_the_place_of_planning(made, file):
    optimised = eqsat_mem.optimize(kernel_vector, plan=str(file))
    plan, done = work(optimised.plan, *ARGS)
    assert done == []
    assert (plan.source, plan.limit_bytes, plan.held_bytes) == (made.source, LIMIT, made.held_bytes)
    np.testing.assert_allclose(optimised(*ARGS), kernel_vector(*ARGS), rtol=1e-4, atol=1e-3)
    assert plan.with_search().source == made.source
    gradient = jax.grad(lambda v: optimised(*ARGS[:2], v).sum())(ARGS[2])  # planned as ever, under the limit of the plan
    np.testing.assert_allclose(gradient, jax.grad(lambda v: kernel_vector(*ARGS[:2], v).sum())(ARGS[2]), rtol=1e-4, atol=1e-3)


def test_a_plan_itself_will_do_and_what_was_loaded_can_be_saved_again(made, file, tmp_path):
    assert work(eqsat_mem.optimize(kernel_vector, plan=made).plan, *ARGS)[1] == []
    loaded = Plan.load(file)
    assert str(loaded) == str(made)
    loaded.save(tmp_path / "again.plan")
    taken = eqsat_mem.optimize(kernel_vector, plan=tmp_path / "again.plan").plan(*ARGS)
    taken.save(tmp_path / "third.plan")
    assert Plan.load(tmp_path / "third.plan").source == made.source


def test_another_process_takes_it_though_lines_have_moved(file):
    script = f"""
import jax, numpy as np, jax.numpy as jnp, eqsat_mem
from eqsat_mem.events import Loaded, listening



def kernel_vector(x, y, v, scale=1.0):
    return jnp.exp(-scale * jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v

seen = []
shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in ((600, 3), (500, 3), (500,))]
with listening(seen.append):
    plan = eqsat_mem.optimize(kernel_vector, plan={str(file)!r}).plan(*shapes)
print(sum(isinstance(event, Loaded) for event in seen), plan.held_bytes)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", str(Plan.load(file).held_bytes)]


def test_a_program_that_stays_as_written_runs_as_traced(tmp_path):
    function, x = lambda x: jnp.sin(x) + 1, ARGS[0]
    eqsat_mem.optimize(function, memory_limit="1MiB").plan(x).save(tmp_path / "sine.plan")
    optimised = eqsat_mem.optimize(function, plan=tmp_path / "sine.plan")
    assert optimised.plan(x).unchanged
    np.testing.assert_array_equal(optimised(x), jax.jit(function)(x))


def test_pickled_functions_keep_the_plan_that_they_were_given(file):
    optimised = pickle.loads(pickle.dumps(eqsat_mem.optimize(stretched, memory_limit="1MiB")))
    x = ARGS[2]
    optimised.plan(x).save(file)
    again = pickle.loads(pickle.dumps(eqsat_mem.optimize(stretched, plan=file)))
    assert work(again.plan, x)[1] == []


def stretched(x):
    return 2 * x


def longer(x, y, v):
    return kernel_vector(x, y, v) + 1


REFUSED = {
    "other arguments": (lambda f: eqsat_mem.optimize(kernel_vector, plan=f)(ARGS[0][:10], *ARGS[1:]), r"x: float32\[600,3\]"),
    "another program": (lambda f: eqsat_mem.optimize(longer, plan=f)(*ARGS), "another program than longer"),
    "another static argument": (lambda f: eqsat_mem.optimize(kernel_vector, plan=f, static_argnums=3)(*ARGS, 2.0), "another program"),
    "another device": (lambda f: eqsat_mem.optimize(kernel_vector, plan=f, device="h100").plan(*ARGS), "for it without plan="),
    "a lower limit": (lambda f: eqsat_mem.optimize(kernel_vector, plan=f, memory_limit=30_000)(*ARGS), "more than the limit of"),
    "no file": (lambda f: eqsat_mem.optimize(kernel_vector, plan=f.with_name("none")), "cannot be read"),
    "no plan": (lambda f: eqsat_mem.optimize(kernel_vector, plan=3), "must be a plan or the file of one"),
    "a plan put together by hand": (lambda f: eqsat_mem.optimize(kernel_vector, plan=replace(Plan.load(f), record=None)), "does not tell"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_is_not_for_is_refused_in_words(case, file):
    ask, words = REFUSED[case]
    with pytest.raises(eqsat_mem.OptionError, match=words):
        ask(file)


def test_donation_makes_another_program(tmp_path):
    x = jnp.ones(1000)
    eqsat_mem.optimize(jnp.sin, memory_limit="1MiB", donate_argnums=0).plan(x).save(tmp_path / "sine.plan")
    with pytest.raises(eqsat_mem.OptionError, match="donated arguments"):
        eqsat_mem.optimize(jnp.sin, plan=tmp_path / "sine.plan")(x)


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-9], lambda data: data.replace(b'"program"', b'"programs"')])
def test_damaged_files_are_refused(damage, file):
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(eqsat_mem.OptionError, match="is not a plan that"):
        Plan.load(file)


def test_another_version_of_jax_is_asked_what_the_plan_holds(made, file, monkeypatch):
    monkeypatch.setattr(plan_files, "versions", lambda: {"jax": "0.0.1", "jaxlib": "0.0.1"})
    made.save(file)
    monkeypatch.undo()
    plan, done = work(eqsat_mem.optimize(kernel_vector, plan=file).plan, *ARGS)
    assert [type(event) for event in done] == [Compiled]
    assert plan.held_bytes == made.held_bytes


def test_what_python_computes_and_plans_by_hand_are_not_saved(made, tmp_path):
    def calls_back(x):
        return jax.pure_callback(np.sin, x, x)

    with pytest.raises(NotImplementedError, match="operations of Python"):
        eqsat_mem.optimize(calls_back, memory_limit="1MiB").plan(ARGS[2]).save(tmp_path / "no.plan")
    with pytest.raises(ValueError, match="not made by optimize"):
        replace(made, record=None).save(tmp_path / "no.plan")
    assert list(Path(tmp_path).iterdir()) == []


def test_the_first_lines_of_a_file_say_what_it_is(made, file):
    first, header, *_ = file.read_bytes().split(b"\n")
    assert first == b"eqsat_mem plan 1"
    told = json.loads(header)
    assert told["name"] == "kernel_vector"
    assert told["arguments"] == ["x: float32[600,3]", "y: float32[500,3]", "v: float32[500]"]
    assert told["peak_bytes"] == made.held_bytes
