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
"""Files of the first tier."""


def devices(path: Path) -> int:
    return 2 if path.stem in TWO else 8


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=[] if path.stem in FIRST else pytest.mark.slow) for path in FILES])
def test_on_several_devices(path):
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices(path)}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout, "nothing was collected"
