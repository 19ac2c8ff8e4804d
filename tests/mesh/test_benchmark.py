"""The benchmark of meshes at its small sizes: versions agree, and plans hold and receive what they should; no time is judged."""

import pytest

from benchmarks import mesh_programs
from benchmarks.mesh_programs import measured, table
from benchmarks.mesh_rows import rows, step
from eqsat_mem.options import parse_bytes
from tests.tiers import tiered

ROWS = {row.name: row for row in (*rows(), step(small=True))}
QUICK = ["kernel product", "attention", "two-layer step"]
SLOW = ["attention, keys in shares", "attention gradients", "k-means step", "Sinkhorn"]


@pytest.fixture(autouse=True)
def few_turns(monkeypatch):
    monkeypatch.setattr(mesh_programs, "TURNS", 1)


@pytest.mark.parametrize("name", tiered(ROWS, QUICK, SLOW))
def test_a_row(name):
    row = ROWS[name]
    found = measured(row, small=True, timed=True)  # raises where versions differ
    assert found["held"]["plan"] <= parse_bytes(row.limits[1], "limit")
    assert found["received"]["plan"] <= 1.05 * found["received"]["jit"] + 2**10
    assert row.name in table([found])
