"""Chains of matrix products with transposes: planning time, peak memory and time against the number of matrices.

    python -m paper_repro.matmul_chains
    python -m paper_repro.matmul_chains --scale paper     extents up to 5000

Chains of 4 to 72 matrices, whose extents are drawn between 1 and a bound; every other group of four is stored transposed, as in the
paper's scripts. "best order" is an ``einsum`` whose order was found by dynamic programming over the number of multiplications. The other
columns run the same function object. Points are kept; a re-run continues.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measuring import RESULTS, measure_jax
from benchmarks.plots import legend_below
from eqsat_mem.options import device_capacity
from paper_repro.experiment import Experiment, Point, Row, main
from paper_repro.showing import device_line, grid_table, limit_label, lines, seconds, size

LENGTHS = {"tiny": [4, 8], "small": [4, 8, 16, 24, 36, 48, 72], "paper": [4, 8, 16, 24, 36, 48, 60, 72]}
EXTENTS = {"tiny": 40, "small": 1_000, "paper": 5_000}
GROUP = 4
SEED = 111


def chain(*matrices: jax.Array) -> jax.Array:
    """The product from left to right; every other group of matrices is stored transposed."""
    return reduce(jnp.matmul, upright(matrices))


def by_dynamic_programming(*matrices: jax.Array) -> jax.Array:
    """The same in the order that needs the fewest multiplications. (``jax.numpy.linalg.multi_dot`` transposes the product of 26 to 51.)"""
    operands = [part for k, matrix in enumerate(upright(matrices)) for part in (matrix, (k, k + 1))]
    return jnp.einsum(*operands, (0, len(matrices)), optimize="dp")


def upright(matrices: Sequence[Any]) -> Iterator[Any]:
    """The matrices as factors of the product."""
    for k, matrix in enumerate(matrices):
        yield matrix.T if k // GROUP % 2 else matrix


def random_matrices(length: int, largest: int) -> list[np.ndarray]:
    """Matrices whose product in order of the list is defined after every other group is transposed; float32, of norms near one."""
    rng = np.random.default_rng([SEED, length])
    extents = rng.integers(1, largest, length + 1)
    factors = [(rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32) for shape in itertools.pairwise(extents)]
    return [np.ascontiguousarray(matrix) for matrix in upright(factors)]


def measure_point(point: Point, folder: Path) -> dict[str, Any]:
    """One chain in one column, with the error relative to float64."""
    matrices = random_matrices(point["length"], point["largest"])
    function, limit = chain, None
    if point["column"] == "best order":
        function = by_dynamic_programming
    elif point["column"] != "plain":
        limit = device_capacity() if point["column"] == "none" else point["column"]
    out, results = measure_jax(function, lambda: matrices, limit)
    if out is None:
        return results
    results["argument_bytes"] = sum(matrix.nbytes for matrix in matrices)
    results["output_bytes"] = out.nbytes
    results["error"] = _error(np.asarray(out), matrices)
    return results


def _error(out: np.ndarray, matrices: Sequence[np.ndarray]) -> float:
    want = np.linalg.multi_dot([np.asarray(matrix, np.float64) for matrix in upright(matrices)])
    return float(np.max(np.abs(out - want)) / max(np.max(np.abs(want)), 1e-300))


def grid(options: argparse.Namespace) -> Iterator[Point]:
    """Every length as written, in the best order, and planned with no limit (or the limits given)."""
    for length in LENGTHS[options.scale]:
        for column in ["plain", "best order", *(options.limit or ["none"])]:
            yield {"length": length, "largest": EXTENTS[options.scale], "column": column}


def tables(rows: Sequence[Row]) -> str:
    """Seconds of a run; bytes of temporaries; seconds of planning."""
    heads = {"length": "matrices"}
    shown = {
        "Seconds of a product:": seconds,
        "Temporaries:": lambda row: size(str(temporaries(row))) if row["seconds"] else "",
        "Seconds of tracing and planning:": lambda row: f"{float(row['plan_seconds']):.3g}" if row["plan_seconds"] else "",
    }
    parts = [f"{title}\n\n{grid_table(rows, heads, 'column', cell, limit_label)}" for title, cell in shown.items()]
    return "\n\n".join([*parts, device_line(rows)])


def temporaries(row: Row) -> int:
    """Bytes that the compiled program holds besides arguments and output."""
    return int(row["held_bytes"]) - int(row["argument_bytes"]) - int(row["output_bytes"])


def draw(rows: Sequence[Row], figure: Any) -> None:
    """Temporaries, seconds of a run, and seconds of planning, against the length."""
    done = [row | {"temporaries": str(max(temporaries(row), 1))} for row in rows if row["status"] == "ok"]
    shown = [("temporaries", "MB of temporaries", 1e-6), ("seconds", "seconds", 1.0), ("plan_seconds", "seconds of planning", 1.0)]
    for axes, (field, label, scale) in zip(figure.subplots(1, 3), shown, strict=True):
        lines(done, axes, "length", field, label, scale, x_label="matrices")
    legend_below(figure)


EXPERIMENT = Experiment(
    module="paper_repro.matmul_chains",
    about=__doc__,
    keys=("length", "largest", "column"),
    results=(*RESULTS, "argument_bytes", "output_bytes"),
    grid=grid,
    measure=measure_point,
    tables=tables,
    draw={"matmul_chains": draw},
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
