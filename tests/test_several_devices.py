"""The tests of ``tests/mesh`` in processes with two and with eight devices: JAX decides how many there are when it starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "tests" / "mesh").glob("test_*.py"))
ON_TWO = [path for path in FILES if path.stem == "test_public_programs"]
"""Files whose tests are for two devices."""
FIRST = [path for path in FILES if path.stem == "test_api"]
"""Files of which the tests that are not slow are of the first tier; all others are of the second."""
REST = [path for path in FILES if path not in ON_TWO + FIRST]
AT_ONCE = {"api": FIRST, "two": ON_TWO, **{f"eight {k}": REST[k::3] for k in range(3)}}
"""Files that are tested by one process: starting it takes as long as the tests of some."""


def test_on_several_devices():
    run_on_several_devices(FIRST, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("paths", AT_ONCE.values(), ids=AT_ONCE)
def test_more_on_several_devices(paths):
    run_on_several_devices(paths, "slow and not thorough" if paths == FIRST else "not thorough")


@pytest.mark.thorough
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in FILES if "tiered(" in path.read_text()])
def test_most_on_several_devices(path):
    run_on_several_devices([path], "thorough")


def run_on_several_devices(paths, marked):
    devices = 2 if paths == ON_TWO else 8
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marked, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert not [path.name for path in paths if not re.search(rf"{path.name}::.* PASSED", done.stdout)], "nothing was collected"
