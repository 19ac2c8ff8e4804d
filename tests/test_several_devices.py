"""The tests of ``tests/mesh`` in processes with two and with eight devices: JAX decides how many there are when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "tests" / "mesh").glob("test_*.py"))
TWO = ("test_public_programs",)
"""Files whose tests are for two devices."""
FIRST = ("test_api",)
"""Files of which the tests that are not slow are of the first tier; all others are of the second."""


def devices(path: Path) -> int:
    return 2 if path.stem in TWO else 8


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in FILES if path.stem in FIRST])
def test_on_several_devices(path):
    run_on_several_devices(path, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in FILES])
def test_more_on_several_devices(path):
    run_on_several_devices(path, "slow and not thorough" if path.stem in FIRST else "not thorough")


@pytest.mark.thorough
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in FILES if "tiered(" in path.read_text()])
def test_most_on_several_devices(path):
    run_on_several_devices(path, "thorough")


def run_on_several_devices(path, marked):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices(path)}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marked, str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout, "nothing was collected"
