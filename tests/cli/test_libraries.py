"""Scripts on top of JAX's libraries, unmodified, over a limit without us and within it with us."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.cli.test_run import python, run
from tests.tiers import tiered

HERE = Path(__file__).resolve().parent

SCRIPTS = {
    "gpjax_regression": (["gpjax"], "4MiB"),
    "equinox_network": (["equinox", "optax"], "48MiB"),
    "flax_network": (["flax", "optax"], "24MiB"),
    "ott_sinkhorn": (["ott"], "8MiB"),
}


@pytest.mark.parametrize("name", tiered(SCRIPTS, [], ["flax_network"]))
def test_scripts_on_libraries_fit(name, tmp_path):
    libraries, limit = SCRIPTS[name]
    missing = [library for library in libraries if find_spec(library) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install '.[libraries]'")
    command = [str(HERE.parent / "oracles" / "held.py"), str(HERE / "libraries" / f"{name}.py")]
    plain = python(*command, cwd=tmp_path)
    ours, said = run("--memory-limit", limit, "--report", "report.json", *command, cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    assert ours.returncode == 0, ours.stderr + said
    entries = json.loads((tmp_path / "report.json").read_text())["functions"]
    assert "planned" in {entry["outcome"] for entry in entries} <= {"planned", "fitting"}, said
    *expected, plain_peak = map(float, plain.stdout.split())
    *values, peak = map(float, ours.stdout.split())
    assert peak <= entries[0]["limit_bytes"] < plain_peak
    np.testing.assert_allclose(values, expected, rtol=1e-3)
