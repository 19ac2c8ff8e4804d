"""The benchmark of meshes at its small sizes: versions agree, and plans hold and receive what they should; no time is judged."""

import pytest

from benchmarks import mesh_programs
from benchmarks.mesh_programs import measured, rows, step, table
from eqsat_mem.options import parse_bytes
from tests.tiers import tiered

ROWS = {row.name: row for row in (*rows(), step(small=True))}


@pytest.fixture(autouse=True)
def few_turns(monkeypatch):
    monkeypatch.setattr(mesh_programs, "TURNS", 1)


@pytest.mark.parametrize("name", tiered(ROWS, [row.name for row in rows()][::2], []))
def test_a_row(name):
    row = ROWS[name]
    found = measured(row, small=True, timed=True)  # raises where versions differ
    assert found["held"]["plan"] <= parse_bytes(row.limits[1], "limit")
    assert found["received"]["plan"] <= 1.05 * found["received"]["jit"] + 2**10
    assert row.name in table([found])
