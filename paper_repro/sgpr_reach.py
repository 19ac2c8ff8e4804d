"""The largest number of inducing points of sparse Gaussian process regression that a limit has room for, as written and planned.

    python -m paper_repro.sgpr_reach                    limits for a 2-core machine
    python -m paper_repro.sgpr_reach --scale paper      the paper's data sets under 1 GB

The loss with its gradient is compiled for more and more inducing points, until the compiled program holds more than the limit or no plan
fits; the largest number that fits is then run once, except for 3droad's own shape in the small scale, which would take minutes. Points are
kept; a re-run continues.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.measuring import Prepared, device_name, measure, prepare, warm_up
from eqsat_mem.errors import MemoryLimitError
from eqsat_mem.options import parse_bytes
from paper_repro import gp
from paper_repro.datasets import standardised, synthetic_regression
from paper_repro.experiment import Experiment, Point, Row, main
from paper_repro.sgpr import DATA
from paper_repro.showing import device_line, grid_table, memory

CLOSE = 0.05
"""The search ends when the number is known within this share."""
FIRST = 8
"""Inducing points that the search starts with."""

RUN = 1
"""A point with this value for ``run`` runs its largest program; with 0 it only compiles it."""

SHAPES = {
    "tiny": [("3droad", 600, 3, "300kB", RUN)],
    "small": [("3droad", 20_000, 3, "30MB", RUN), ("3droad", 20_000, 3, "100MB", RUN), ("3droad", *DATA["3droad"], "1GB", 0)],
    "paper": [(name, *shape, "1GB", RUN) for name, shape in DATA.items()],
}
"""Data sets: name, points, dimensions, limit, and whether the largest program is run."""


def largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, within a share of CLOSE, where all smaller ones do; 0 if not even FIRST does."""
    low, high = 0, FIRST
    while fits(high):
        low, high = high, 2 * high
    while low and high - low > max(CLOSE * low, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def measure_point(point: Point, folder: Path) -> dict[str, Any]:
    """The largest number of inducing points, with what its program holds and the seconds of its first run."""
    x, y = synthetic_regression(point["n"], point["d"], seed=0)
    data = standardised(x, y, seed=111)
    limit = parse_bytes(point["limit"], "--limit")
    found: dict[int, Prepared] = {}

    def fits(m: int) -> bool:
        specs = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, (gp.start(point["d"]), data["x"], data["y"], data["x"][:1].repeat(m, 0))))
        try:
            found[m] = prepare(gp.loss_and_gradient, specs, None if point["column"] == "plain" else limit)
        except MemoryLimitError:
            return False
        return found[m].held_bytes <= limit

    with jax.enable_x64(True):
        m = largest(fits)
        results = {"device_name": device_name(), "status": "ok" if m else "nothing fits", "inducing": m, "tried": len(found)}
        results |= {"held_bytes": found[m].held_bytes} if m else {}
        return results | (_run(found[m].compiled, point, data, m) if m and point["run"] else {})


def _run(run: Any, point: Point, data: dict[str, Any], m: int) -> dict[str, Any]:
    z = gp.greedy_points(gp.start(point["d"]), data["x"][: 2 * m], m)
    args = jax.block_until_ready(jax.tree.map(jnp.asarray, (gp.start(point["d"]), data["x"], data["y"], z)))
    warm_up(args[1].dtype)
    (value, _), results = measure(lambda: run(*args), sum(leaf.nbytes for leaf in jax.tree.leaves(args)), repeat=False)
    return results | {"loss": float(value)}


def grid(options: argparse.Namespace) -> Iterator[Point]:
    """Every data set under every limit, as written and planned."""
    for data, n, d, usual, run in SHAPES[options.scale]:
        for limit in options.limit or [usual]:
            for column in ("plain", "planned"):
                yield {"data": data, "n": n, "d": d, "limit": limit, "run": run, "column": column}


def tables(rows: Sequence[Row]) -> str:
    """The largest number of inducing points, what the program holds and grows by, and the seconds of one evaluation."""

    def cell(row: Row) -> str:
        if row["status"] != "ok":
            return row["status"]
        return f"{int(row['inducing']):,}: {memory(row)}" + ("" if row["seconds"] else ", not run")

    heads = {"data": "shape of", "n": "n", "d": "d", "limit": "limit"}
    table = grid_table(rows, heads, "column", cell, lambda column: {"plain": "plain JAX", "planned": "under the limit"}[column])
    title = "Largest number of inducing points, and what the program holds (and grew by):"
    return f"{title}\n\n{table}\n\n{device_line(rows)}"


EXPERIMENT = Experiment(
    module="paper_repro.sgpr_reach",
    about=__doc__,
    keys=("data", "n", "d", "limit", "run", "column"),
    results=("device_name", "status", "inducing", "tried", "held_bytes", "resident_bytes", "seconds", "loss"),
    grid=grid,
    measure=measure_point,
    tables=tables,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
