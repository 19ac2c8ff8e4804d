"""Figure 2 of the paper: y = K(x, x') v with a squared exponential kernel in one dimension; memory and time against n.

    python -m paper_repro.kernel_mvm                    float64, sizes for a 2-core machine
    python -m paper_repro.kernel_mvm --scale paper      float64 and float32, n up to 10^6, limits of 0.1 to 20 GB
    python -m paper_repro.kernel_mvm --limit 50MB       this limit only, beside plain JAX and KeOps

The JAX columns run the same function object, which knows nothing of memory. Points are kept; a re-run continues.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import peers
from benchmarks.measuring import RESULTS, measure, measure_jax
from paper_repro.experiment import Experiment, Point, Row, main
from paper_repro.showing import device_line, grid_table, limit_label, memory, memory_and_time, seconds

SIZES = {
    "tiny": [300, 700],
    "small": [1_000, 3_000, 10_000, 30_000, 100_000],
    "paper": [1_000, 10_000, 100_000, 250_000, 500_000, 750_000, 1_000_000],
}
LIMITS = {
    "tiny": ["1MB"],
    "small": ["10MB", "30MB", "100MB"],
    "paper": ["100MB", "1GB", "2GB", "5GB", "7GB", "10GB", "20GB"],
}
DTYPES = {"tiny": ["float64"], "small": ["float64"], "paper": ["float64", "float32"]}
SEED = 111


def product(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """K(x, y) v for the squared exponential kernel of unit scale: x of shape (n, d), y of shape (m, d), v of shape (m, 1)."""
    distance = jnp.sum((x[:, None, :] - y[None, :, :]) ** 2, axis=-1)
    return jnp.exp(-0.5 * distance) @ v


def measure_point(point: Point, folder: Path) -> dict[str, Any]:
    """One n in one column, with the largest relative error of sampled rows."""
    n, column = point["n"], point["column"]
    rng = np.random.default_rng(SEED)
    x, y, v = (rng.standard_normal((n, 1)).astype(point["dtype"]) for _ in range(3))
    if column == "keops":
        peers.keops_product(x[:100], y[:100], v[:100])  # compiles
        out, results = measure(lambda: peers.keops_product(x, y, v), x.nbytes + y.nbytes + v.nbytes)
    else:
        with jax.enable_x64(point["dtype"] == "float64"):
            out, results = measure_jax(product, lambda: (x, y, v), None if column == "plain" else column)
    if out is not None:
        rows = rng.integers(0, n, 8)
        wide = [array.astype(np.float64) for array in (x, y, v)]
        want = np.exp(-0.5 * (wide[0][rows] - wide[1][:, 0]) ** 2) @ wide[2]
        results["error"] = float(np.max(np.abs(np.asarray(out)[rows] - want)) / np.max(np.abs(want)))
    return results


def grid(options: argparse.Namespace) -> Iterator[Point]:
    """Every n in every column."""
    others = ["plain", *(["keops"] if peers.has("pykeops") else [])]
    for dtype in DTYPES[options.scale]:
        for n in SIZES[options.scale]:
            for column in [*others, *(options.limit or LIMITS[options.scale])]:
                yield {"n": n, "dtype": dtype, "column": column}


def tables(rows: Sequence[Row]) -> str:
    """The figure as text: seconds and memory."""
    shown = {"Seconds of a run:": seconds, "Memory that the compiled program holds (and that the process grew by):": memory}
    parts = [f"{title}\n\n{grid_table(rows, {'dtype': 'dtype', 'n': 'n'}, 'column', cell, limit_label)}" for title, cell in shown.items()]
    return "\n\n".join([*parts, device_line(rows)])


EXPERIMENT = Experiment(
    module="paper_repro.kernel_mvm",
    about=__doc__,
    keys=("n", "dtype", "column"),
    results=RESULTS,
    grid=grid,
    measure=measure_point,
    tables=tables,
    draw={"kernel_mvm": lambda rows, figure: memory_and_time("n", "points")([r for r in rows if r["dtype"] == "float64"], figure)},
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
