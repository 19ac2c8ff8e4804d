"""The benchmarks run at tiny sizes and write what they say; no time is judged."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import applications, measuring, peers
from benchmarks.racing import Contest, Question, answer, race, table
from tests.tiers import tiered

X = np.arange(12, dtype=np.float32)


def contest(**changes):
    plain = Contest("sum", {"n": 12}, (X,), "1MiB", lambda x: jnp.sum(x * x))
    return replace(plain, **changes)


def test_versions_that_agree_are_timed_and_measured():
    row = race(contest(others={"by hand": lambda x: x @ x}, peers={"numpy": lambda: lambda: X @ X}), 3)
    assert set(row["seconds"]) == {"plan", "plain", "by hand", "numpy"}
    assert set(row["times_faster_than"]) == {"plain", "by hand", "numpy"}
    assert row["errors"] == row["skipped"] == {}
    assert row["held_bytes"]["plain"] >= X.nbytes
    assert "numpy" not in row["held_bytes"]


def test_a_version_that_differs_is_shown_as_wrong():
    row = race(contest(peers={"numpy": lambda: lambda: X @ X + 1000}), 1)
    assert row["errors"]["numpy"] > 0.5
    assert "differs by" in table([row])


def test_a_limit_that_no_plan_fits_is_a_cell():
    row = race(contest(limit=10), 1)
    assert "plan" not in row["seconds"]
    assert "no plan: the smallest found holds" in table([row])


def test_a_version_that_does_not_fit_the_machine_is_not_run(monkeypatch):
    monkeypatch.setattr(measuring, "device_capacity", lambda: 16)
    row = race(contest(), 1)
    assert row["skipped"]["plain"] == "does not fit this machine"
    assert "plain" not in row["seconds"]


def test_answers_are_kept_with_what_they_depend_on(tmp_path):
    question = Question("one", "One row", lambda scale: [race(contest(), 1)], table)
    shown = answer(question, "tiny", tmp_path)
    kept = json.loads((tmp_path / "one.json").read_text())
    assert kept["rows"][0]["case"] == "sum"
    assert {"jax", "eqsat-mem", "egglog"} <= set(kept["machine"]["versions"])
    assert {"device", "processor", "cores", "commit"} <= set(kept["machine"])
    assert question.table(kept["rows"]) == shown


@pytest.mark.parametrize("name", tiered(["applications", "chains", "curves", "kernels", "ranks"], ["curves"], ["kernels"]))
def test_the_page_has_each_answer(name, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "has", lambda package: False)  # no peer compiles anything here
    benchmarks.main(["--scale", "tiny", "--only", name, "--results", str(tmp_path / "results")])
    page = (tmp_path / "RESULTS.md").read_text()
    question = benchmarks.QUESTIONS[name]
    assert f"## {question.title}" in page
    kept = json.loads((tmp_path / "results" / f"{name}.json").read_text())
    assert kept["scale"] == "tiny"
    assert all(row["case"] in page for row in kept["rows"])


@pytest.mark.parametrize("name", tiered(applications.APPLICATIONS, [], list(applications.APPLICATIONS)[::3]))
def test_every_version_of_an_application_is_the_same_function(name):
    application = applications.APPLICATIONS[name]
    make, sizes = application.arguments["tiny"]
    args = jax.tree.map(jnp.asarray, tuple(make(*sizes)))
    want = jax.jit(application.function)(*args)
    assert set(application.others) == {"checkpoint", "by hand"}
    for other in application.others.values():
        for a, b in zip(jax.tree.leaves(jax.jit(other)(*args)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


@pytest.mark.slow
def test_a_process_that_fails_is_a_cell():
    row = applications.in_process("no such program", "tiny")
    assert "no such program" in applications.table([row])
    assert "KeyError" in row["skipped"]["plan"]


@pytest.mark.slow
def test_every_version_of_attention_is_the_same_function():
    from benchmarks import attention

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 24, 4)), jnp.float32) for _ in range(3))
    for causal in (False, True):
        for other in (attention.library, attention.attend_in_chunks):
            np.testing.assert_allclose(other(q, k, v, causal), attention.attend(q, k, v, causal), rtol=1e-4, atol=1e-5)
    hidden, words, labels = q[0], jnp.tile(k[0], (3, 1)), jnp.arange(24)
    np.testing.assert_allclose(attention.loss_by_hand(hidden, words, labels), attention.loss(hidden, words, labels), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["L2", "L1", "cosine"])
def test_chunks_by_hand_find_the_same_neighbours(metric):
    from benchmarks import neighbours

    rng = np.random.default_rng(0)
    queries, points = (jnp.asarray(rng.standard_normal((n, 5)), jnp.float32) for n in (30, 90))
    found = neighbours.nearest_by_hand(metric, queries, points)
    np.testing.assert_array_equal(found, neighbours.nearest(metric, queries, points))
