"""Constants of backends and the scripts that measure them: each names the other, and the scripts run. No time is judged."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.calibration import constants, sensitivity, sweep
from benchmarks.calibration.constants import ROOT, SCRIPT, changed, known, scaled, value
from eqsat_mem.backends.cpu import backend
from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.egraph.extract import as_written
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.frontend.load import load

NAMED = sorted({name for constant in known().values() for name in constant.scripts})
FOLDER = Path(sweep.__file__).parent


def module_of(name):
    return importlib.import_module(f"benchmarks.calibration.{name}")


def test_constants_of_one_machine_name_the_script_that_measures_them():
    unnamed = [path for path, constant in known().items() if not constant.scripts and "``eqsat-mem calibrate``" not in constant.said]
    assert unnamed == []
    assert len(known()) > 50


def test_every_script_that_the_package_names_exists():
    texts = [path.read_text() for path in (ROOT / "eqsat_mem").rglob("*.py")]
    found = {name for text in texts for name in SCRIPT.findall(text)}
    assert found >= set(NAMED)
    assert [name for name in found if not (FOLDER / f"{name}.py").is_file()] == []


def test_every_sweep_is_named_by_a_constant():
    sweeps = {path.stem for path in FOLDER.glob("*.py") if "\nMEASURES = " in path.read_text()}
    assert sweeps == set(NAMED)


@pytest.mark.parametrize("name", NAMED)
def test_scripts_and_constants_name_one_another(name):
    named_by = {path for path, constant in known().items() if name in constant.scripts}
    assert set(module_of(name).MEASURES) == named_by


@pytest.mark.parametrize("name", NAMED)
def test_sweeps_run_at_tiny_scale(name):
    module = module_of(name)
    cases = list(module.cases(True))
    assert len(cases) > 1
    found = list(sweep.rows(cases, shortest_s=0.0, elements=1e9))
    labels = [row.label for row in found]
    assert len(set(labels)) == len(labels) == len(cases)
    for case, row in zip(cases, found, strict=True):
        assert row.measured > 0 or case.watched
        assert row.cost == pytest.approx(row.measured * (1.0 if case.watched else 1e9) / case.work)
    text = sweep.table(module, found)
    assert all(label in text for label in labels)


@pytest.mark.parametrize("name", NAMED)
def test_full_sweeps_can_be_traced(name):
    """Full sizes are wide enough to matter, and have the shapes that their functions take."""
    for case in module_of(name).cases(False):
        avals = [jax.ShapeDtypeStruct(s, jnp.float32) if isinstance(s, tuple) else s for s in case.shapes]
        assert jax.eval_shape(case.function, *avals) is not None


def test_a_sweep_has_a_command_line(capsys):
    sweep.main("long_rows", ["--tiny"])
    out = capsys.readouterr().out
    assert f"LONG_ROW = {backend.LONG_ROW}" in out
    assert "sum of 48 rows of 16 bytes" in out


def test_constants_are_changed_for_as_long_as_is_wanted():
    path, row = "backends.cpu.backend.LONG_ROW", CpuBackend.built_in().weights.elementwise["exp"]
    with changed({path: 3, "backends.cpu.weights.MEASURED[exp]": 5.0, "device.flops": 1.0}):
        assert backend.LONG_ROW == 3
        assert CpuBackend.built_in().weights.elementwise["exp"] == 5.0
        assert CpuBackend.built_in().device.flops == 1.0
    assert value(path) == backend.LONG_ROW == 2**16
    assert CpuBackend.built_in().weights.elementwise["exp"] == row
    assert CpuBackend.built_in().device.flops > 1.0


def test_a_constant_that_a_class_repeats_is_changed_there_too():
    with changed({"backends.cpu.backend.UNROLLED": 3}):
        assert CpuBackend.unrolled_elements == 3
    assert CpuBackend.unrolled_elements == backend.UNROLLED == 16


def test_tables_and_whole_numbers_are_scaled_in_kind():
    assert scaled({"a": (1, 2.0)}, 0.5) == {"a": (1, 1.0)}
    assert constants.ratio(2.0, 4.0) == pytest.approx(2.0)


def test_sensitivity_counts_the_plans_that_change(tmp_path, monkeypatch):
    monkeypatch.setattr(sensitivity.plan_sources, "SHARES", (0.5,))
    which = next(iter(sensitivity.plan_sources.programs([])))
    found = sensitivity.changes((which, ["device.flops", "backends.cpu.profile.DEAL_S"], [2.0]))
    assert found["plans"] >= 1
    assert set(found["changed"]) == {"device.flops 2", "backends.cpu.profile.DEAL_S 2"}
    report = {"factors": [2.0], "constants": ["device.flops"], "plans": 1, "programs": ["p"], "changed": {"device.flops 2": 1}}
    assert "| `device.flops` | 1 |" in sensitivity.table(json.loads(json.dumps(report)))


@pytest.mark.parametrize(("most", "unrolls"), [(2, False), (3, True)])
def test_the_target_says_which_folds_may_be_written_out(most, unrolls):
    program = load(jax.make_jaxpr(lambda x, y: jnp.abs(x[:, None] - y).sum(-1))(np.ones((200, 3)), np.ones((200, 3))), ["x", "y"])
    rules = load_rules(only=("splitting",))
    found = as_written(saturate(program, rules, Limits(max_iterations=0, unrolled_elements=most)))
    assert any(found.unrolls.values()) == unrolls
