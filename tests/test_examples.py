"""The programs of examples/ run as their first lines say, check their own values, and keep to their limits."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from eqsat_mem.options import parse_bytes

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_its_plans_fit(path):
    command = f"python examples/{path.name}"
    assert command in path.read_text().split('"""')[1]
    done = subprocess.run([sys.executable, *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    plans = re.findall(r"^\w+ (fits|fits as written): ([\d.]+ \w+) of ([\d.]+ \w+)", done.stdout, re.MULTILINE)
    assert plans, done.stdout
    for verdict, peak, limit in plans:
        assert verdict == "fits", "the limit asks nothing of the program"
        assert parse_bytes(peak) <= parse_bytes(limit)


def test_there_are_examples_and_the_readme_names_their_folder():
    assert len(EXAMPLES) >= 5
    assert "(examples)" in (ROOT / "README.md").read_text()
