"""The scripts that reproduce the paper: points are measured right, kept, and continued."""

import csv

import pytest

from paper_repro import kernel_mvm


@pytest.mark.parametrize("limit", ["none", "1MB"])
def test_a_point_is_right_and_within_its_limit(limit):
    row = kernel_mvm.measure(700, limit)
    assert row["status"] == "ok"
    assert row["error"] < 1e-12
    if limit == "none":
        assert row["held_bytes"] > 700 * 700 * 8
    else:
        assert row["held_bytes"] <= 1e6


def test_plain_programs_that_do_not_fit_are_left_out():
    grid = list(kernel_mvm.points({"sizes": [10, 1000], "plain_bytes": 1000.0}, ["none", "1MB"]))
    assert grid == [(10, "none"), (10, "1MB"), (1000, "1MB")]


def test_a_second_run_measures_only_what_is_missing(tmp_path, monkeypatch, capsys):
    asked = []

    def point(n, limit):
        asked.append((n, limit))
        return {"device": "test", "status": "ok", "held_bytes": 2**20, "seconds": 0.5, "plan_seconds": 0.1, "error": 0.0}

    monkeypatch.setattr(kernel_mvm, "RESULTS", tmp_path)
    monkeypatch.setattr(kernel_mvm, "in_own_process", point)
    monkeypatch.setitem(kernel_mvm.SCALES, "small", {"sizes": [10, 20], "limits": ["none", "1MB"], "plain_bytes": 1e9})
    monkeypatch.setattr("sys.argv", ["kernel_mvm"])
    path = tmp_path / "kernel_mvm.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, kernel_mvm.FIELDS)
        writer.writeheader()
        writer.writerow({"n": 10, "limit": "none", "status": "out of memory"})
    assert kernel_mvm.main() == 0
    assert asked == [(20, "none"), (10, "1MB"), (20, "1MB")]
    assert "| 10 | does not fit | 0.5 s, 1.0 MiB |" in capsys.readouterr().out
