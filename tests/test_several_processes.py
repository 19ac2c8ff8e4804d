"""Two processes with four devices each, as jax.distributed joins them: one plan for both, or an error in both."""

import pytest

from tests.oracles.processes import ROOT, start, start_under_slurm

pytestmark = pytest.mark.slow


def test_both_make_the_same_plan_of_global_arrays_and_compute_it():
    first, second = start("agree")
    assert first[0] == second[0] == 0, (first[2], second[2])
    assert first[1]["source"] == second[1]["source"]
    for _, told, _ in (first, second):
        assert told["global"]
        assert told["fits"]
        assert told["far"] == ["x"]
        assert told["worst"] < 1e-5
        assert told["steep"] < 1e-5


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("limits", "they differ in memory_limit"),
        ("functions", "the same functions of the same shapes in the same order"),
        ("profiles", "the profiles of their device= differ in matrix_cores"),
    ],
)
def test_both_refuse_what_differs(case, named):
    for status, told, errors in start(case):
        assert status == 0, errors
        assert told["error"] == "PlanMismatchError"
        assert named in told["text"]
        assert told["seconds"] < 5


def test_one_that_cannot_plan_tells_the_other():
    (_, told, _), (_, failed, _) = start("failing")
    assert (told["error"], failed["error"]) == ("PlanMismatchError", "RuntimeError")
    assert failed["text"] in told["text"]


@pytest.mark.thorough
def test_one_that_is_late_is_waited_for():
    """Sums between processes are not made in shares on CPUs: gloo's ``psum_scatter`` gives up where others wait."""
    for status, told, errors in start("late"):
        assert status == 0, errors
        assert told["worst"] < 1e-5
        assert told["kinds"]
        assert "psum_scatter" not in told["kinds"]


def test_where_one_dies_the_other_ends_too():
    (status, told, errors), (died, _, _) = start("dying", timeout=120)
    assert died == 3
    assert status != 0 or told["error"], (told, errors)


def test_the_example_runs_unchanged_as_slurm_starts_it():
    for process, (status, out, errors) in enumerate(start_under_slurm(ROOT / "examples" / "several_processes.py")):
        assert status == 0, errors
        assert f"process {process} of 2: 4 of 8 shares are right" in out
