"""The script that runs other people's test suites: what differs between the two ways is seen, whatever way a test ends."""

import argparse
import json
import subprocess
import sys
import textwrap

import pytest

from tests.suites import __main__ as suites
from tests.suites import catalogue
from tests.suites.__main__ import Outcome, compare, outcomes, told
from tests.suites.catalogue import SUITES, Suite


def lines(*records):
    return "\n".join(json.dumps({"test": test, "outcome": outcome, **more}) for test, outcome, more in records)


def test_a_test_that_only_began_has_died():
    text = lines(("a", "began", {}), ("a", "passed", {"seconds": 1.0, "said": ""}), ("b", "began", {}))
    assert outcomes(text) == {"a": Outcome("passed", 1.0, ""), "b": Outcome("died")}


def test_what_fails_once_is_not_mended_by_its_teardown():
    text = lines(
        ("a", "began", {}), ("a", "failed", {"said": "E"}), ("a", "passed", {}), ("b", "began", {}), ("b", "passed", {}), ("b", "error", {})
    )
    assert {test: outcome.outcome for test, outcome in outcomes(text).items()} == {"a": "failed", "b": "error"}


ENTRY = {"function": "f", "place": "a.py:1", "outcome": "failed", "traceback": "RuntimeError"}


def test_only_what_passes_plain_can_be_broken(monkeypatch):
    monkeypatch.setitem(catalogue.EXCUSED, "lib:b::*", "it counts compilations")
    plain = {
        "a::1": Outcome("passed"),
        "a::2": Outcome("failed"),
        "b::1": Outcome("passed"),
        "c::1": Outcome("passed"),
        "d::1": Outcome("passed"),
    }
    ours = {"a::1": Outcome("failed", said="no"), "a::2": Outcome("failed"), "b::1": Outcome("died"), "c::1": Outcome("skipped")}
    found = compare("lib", plain, ours, [{"functions": [ENTRY, {**ENTRY, "outcome": "planned", "traceback": ""}]}])
    assert found.broken == {"lib:a::1": "failed: no"}
    assert found.excused == {"lib:b::1": "it counts compilations"}
    assert (found.both["passed"], found.both["failed"], found.missing) == (3, 1, 1)
    assert found.planned == {"failed": 1, "planned": 1}
    assert found.inside == {"lib: f (a.py:1)": "RuntimeError"}
    text = "\n".join(told("lib", found))
    assert "1 broken, 1 excused, 1 not reached under run" in text
    assert "BROKEN lib:a::1" in text


SLOW = """\
    import json, os, signal, sys, time

    def note(test, outcome):
        with open(os.environ["SUITES_OUTCOMES"], "a") as file:
            print(json.dumps({"test": test, "outcome": outcome}), file=file)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # as the plugin does
    DEAF
    note("a", "began")
    note("a", "passed")
    try:
        note("b", "began")
        while True:
            time.sleep(0.01)
    finally:
        print("the report", flush=True)
"""


@pytest.mark.parametrize("hears", [True, False])
def test_what_runs_when_time_is_up_is_not_broken_and_its_report_is_written(hears, tmp_path, monkeypatch):
    (tmp_path / "lib" / "tests").mkdir(parents=True)
    (tmp_path / "lib" / "tests" / "a_test.py").touch()
    text = textwrap.dedent(SLOW).replace("DEAF", "" if hears else "signal.signal(signal.SIGINT, signal.SIG_IGN)")
    monkeypatch.setattr(suites, "command", lambda *_: [sys.executable, "-c", text])
    monkeypatch.setattr(suites, "GRACE", 300.0 if hears else 0.1)
    waited = subprocess.Popen.wait

    def wait(process, timeout=None):
        if timeout == 1:  # until the second test runs
            while '"b"' not in (tmp_path / "results" / "lib" / "run" / "tests.a_test.jsonl").read_text():
                pass
            raise subprocess.TimeoutExpired("pytest", timeout)
        return waited(process, timeout)

    monkeypatch.setattr(suites.subprocess.Popen, "wait", wait)
    options = argparse.Namespace(checkouts=tmp_path, files=[], together=False, python="", sample=1, seed=0, seconds=1, process_seconds=1)
    lib = Suite("lib", "pytest", "a/b", "{}", ("tests/*_test.py",))
    assert list(suites.run(lib, "run", tmp_path / "results", options)) == ["lib run tests/a_test.py: 1 passed, 1 stopped stopped"]
    noted = tmp_path / "results" / "lib" / "run"
    assert ("the report" in (noted / "tests.a_test.log").read_text()) == hears
    ours = outcomes((noted / "tests.a_test.jsonl").read_text())
    assert compare("lib", {"a": Outcome("passed"), "b": Outcome("passed")}, ours, []).broken == {}


def test_names_of_suites_are_those_of_folders():
    assert len({suite.name for suite in SUITES}) == len(SUITES)
    assert all(suite.tag.count("{}") == 1 and suite.files for suite in SUITES)


TESTS = """\
    import os
    import sys

    import jax
    import jax.numpy as jnp
    import pytest

    ours = "eqsat_mem" in sys.modules


    @pytest.mark.parametrize("rows", [300, 400])
    def test_passes(rows):
        f = jax.jit(lambda x: jnp.sort(jnp.abs(x[:, None] - x), axis=1)[:, 1])
        assert f(jnp.arange(rows) * 1.0).max() == 1


    def test_fails():
        assert 0


    def test_fails_under_run():
        assert not ours


    def test_takes_too_long_under_run():
        while ours:
            pass


    def test_ends_the_process_under_run():
        if ours:
            os._exit(3)
"""


@pytest.mark.thorough
def test_a_suite_of_every_outcome(tmp_path, monkeypatch, capsys):
    (tmp_path / "checkouts" / "lib" / "tests").mkdir(parents=True)
    (tmp_path / "checkouts" / "lib" / "tests" / "a_test.py").write_text(textwrap.dedent(TESTS))
    monkeypatch.setattr(suites, "SUITES", (Suite("lib", "pytest", "a/b", "{}", ("tests/*_test.py",)),))
    arguments = ["--checkouts", str(tmp_path / "checkouts"), "--seconds", "10"]
    monkeypatch.setattr(sys, "argv", ["suites", *arguments, "--results", str(tmp_path / "results")])
    assert suites.main() == 1
    said = capsys.readouterr().out
    assert "lib plain tests/a_test.py: 1 failed, 5 passed" in said
    assert "lib: 6 tests (5 passed, 1 failed), 3 broken, 0 excused" in said
    for test, why in (("fails_under_run", "failed"), ("takes_too_long_under_run", "too long"), ("ends_the_process_under_run", "died")):
        assert f"BROKEN lib:tests/a_test.py::test_{test}\n      {why}" in said
    assert suites.main() == 1  # from what was noted
    assert "lib plain" not in capsys.readouterr().out
    (tmp_path / "checkouts" / "lib" / "tests" / "a_test.py").write_text(textwrap.dedent(TESTS).partition("def test_fails()")[0])
    monkeypatch.setattr(sys, "argv", ["suites", *arguments, "--together", "--results", str(tmp_path / "again")])
    assert suites.main() == 0
    assert "functions: 2 " in capsys.readouterr().out
    (report,) = (tmp_path / "again" / "lib" / "run").glob("*.json")
    limits = [entry["limit_bytes"] for entry in json.loads(report.read_text())["functions"]]
    assert all(0.25 * 4 * 300**2 < limit < 5 * 4 * 400**2 for limit in limits)
