"""Table 1 of the paper: queries per second of exact k-nearest-neighbour search.

    python -m paper_repro.knn                                      sizes for a 2-core machine
    python -m paper_repro.knn --scale paper                        the paper's sizes
    python -m paper_repro.knn --data MNIST=train-images-idx3-ubyte.gz --data Glove-50=glove-50-angular.hdf5

Data sets whose files are not given are replaced by random numbers of the same shape, and their rows say so. ``--limit`` is what a program
may hold besides points, queries and results. The JAX columns run the same function object, which knows nothing of memory. Points are
kept; a re-run continues.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import peers
from benchmarks.measuring import RESULTS, measure, measure_jax
from eqsat_mem.options import parse_bytes
from paper_repro.datasets import load_points
from paper_repro.experiment import Experiment, Point, Row, main
from paper_repro.showing import device_line, grid_table, limit_label, origin

K = 10
LIMITS = {"tiny": ["100kB"], "small": ["100MB"], "paper": ["100MB"]}
SEED = 111
SAMPLED = 8
"""Queries whose neighbours are compared with those found in float64."""

# --- the programs -------------------------------------------------------------------------------------


def nearest_l2(points: jax.Array, queries: jax.Array) -> jax.Array:
    """Positions of the K nearest points of each query, of shape (m, K); squared distances are expanded, as the paper's script has them."""
    squared = jnp.sum(points**2, 1) - 2 * queries @ points.T + jnp.sum(queries**2, 1)[:, None]
    return lax.top_k(-squared, K)[1]


def nearest_l2_direct(points: jax.Array, queries: jax.Array) -> jax.Array:
    """The same by the definition of the distance."""
    return lax.top_k(-jnp.sum((queries[:, None] - points) ** 2, -1), K)[1]


def nearest_l1(points: jax.Array, queries: jax.Array) -> jax.Array:
    """Positions of the K nearest points by the sum of absolute differences."""
    return lax.top_k(-jnp.sum(jnp.abs(queries[:, None] - points), -1), K)[1]


def nearest_cosine(points: jax.Array, queries: jax.Array) -> jax.Array:
    """Positions of the K points at the smallest angles."""
    lengths = jnp.sqrt(jnp.sum(queries**2, 1)[:, None] * jnp.sum(points**2, 1))
    return lax.top_k(queries @ points.T / lengths - 1, K)[1]


PROGRAMS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "L2": nearest_l2,
    "L2 direct": nearest_l2_direct,
    "L1": nearest_l1,
    "cosine": nearest_cosine,
}


def chunked(program: Callable[[jax.Array, jax.Array], jax.Array], rows: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A loop as written by hand around ``program``: so many queries at a time."""

    def by_hand(points: jax.Array, queries: jax.Array) -> jax.Array:
        return lax.map(lambda query: program(points, query[None])[0], queries, batch_size=rows)

    return by_hand


# --- the grid -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A line of the table: a data set, or ``Random``, with its shape, and which distance."""

    data: str
    distance: str
    n: int
    d: int
    m: int


CASES = {
    "tiny": [Case("Random", "L2", 300, 3, 20), Case("MNIST", "L1", 200, 784, 10), Case("digits", "L2", 1500, 64, 20)],
    "small": [
        *(Case("Random", "L2", 10_000, d, 10_000) for d in (100, 3)),
        *(Case("Random", "L2", 1_000_000, d, 500) for d in (100, 3)),
        Case("Random", "L2", 1_000_000, 3, 3_000),
        Case("Random", "L2 direct", 10_000, 3, 10_000),
        Case("Random", "L2 direct", 1_000_000, 3, 500),
        Case("digits", "L2", 1_500, 64, 297),
        *(Case(data, "L2", 60_000, 784, 500) for data in ("MNIST", "Fashion")),
        Case("MNIST", "L1", 60_000, 784, 50),
        *(Case(f"Glove-{d}", "cosine", 118_000, d, 500) for d in (50, 100, 200)),
    ],
    "paper": [
        *(Case("Random", "L2", n, d, 10_000) for n in (10_000, 1_000_000, 10_000_000) for d in (3, 10, 100)),
        *(Case("Random", distance, 1_000_000, d, 10_000) for distance in ("L2 direct", "L1", "cosine") for d in (10, 100)),
        *(Case(data, distance, 60_000, 784, 10_000) for data in ("MNIST", "Fashion") for distance in ("L2", "L1")),
        *(Case(f"Glove-{d}", "cosine", 1_180_000, d, 10_000) for d in (50, 100, 200)),
    ],
}
PUBLISHED = ("MNIST", "Fashion", "Glove-50", "Glove-100", "Glove-200")


def grid(options: argparse.Namespace) -> Iterator[Point]:
    """Every case in every column whose package is there."""
    files = dict(options.data or ())
    columns = ["plain", "chunked", *(name for name, package in peers.SEARCHES.items() if peers.has(package))]
    for case in CASES[options.scale]:
        if case.data == "digits" and not peers.has("sklearn"):
            continue
        for limit in options.limit or LIMITS[options.scale]:
            for column in [*columns, limit]:
                yield {**vars(case), "file": files.get(case.data, ""), "column": column, "limit": limit}


def data_options(parser: argparse.ArgumentParser) -> None:
    """Files of data sets."""
    names = ", ".join(PUBLISHED)
    parser.add_argument("--data", action="append", type=_named_file, metavar="NAME=FILE", help=f"the file of {names}; may be repeated")


def _named_file(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in PUBLISHED or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE with a NAME among {', '.join(PUBLISHED)}.")
    return name, path


# --- one point ----------------------------------------------------------------------------------------


def measure_point(point: Point, folder: Path) -> dict[str, Any]:
    """One case in one column: how far, relatively, the worst neighbour found for sampled queries is beyond the true one."""
    points, queries = data(point)
    distance, column = point["distance"], point["column"]
    out, results = _run(column, points, queries, distance, parse_bytes(point["limit"], "--limit"))
    if out is not None:
        sample = np.random.default_rng(SEED).choice(len(queries), min(SAMPLED, len(queries)), replace=False)
        results["error"] = peers.excess(points, queries[sample], np.asarray(out)[sample], metric(distance))
        results["queries_per_s"] = len(queries) / results["seconds"]
    return results


def _run(column: str, points: np.ndarray, queries: np.ndarray, distance: str, room: int) -> tuple[Any, dict[str, Any]]:
    if column in peers.SEARCHES:
        search = peers.search(column, points, metric(distance), K)
        search(queries[:16])  # compiles, starts threads
        return measure(lambda: search(queries), points.nbytes + queries.nbytes)
    program, limit = PROGRAMS[distance], None
    if column == "chunked":
        rows = max(1, min(len(queries), room // (4 * len(points) * 2)))  # distances, and their order
        program = chunked(program, rows)
    elif column != "plain":
        limit = points.nbytes + queries.nbytes + 4 * K * len(queries) + room
    return measure_jax(program, lambda: (points, queries), limit)


def metric(distance: str) -> str:
    """A distance without how it is computed."""
    return distance.split()[0]


def data(point: Point) -> tuple[np.ndarray, np.ndarray]:
    """Points of shape (n, d) and queries of shape (m, d), float32: from the file (whose size counts), bundled, or random."""
    rng = np.random.default_rng(SEED)
    n, d, m = point["n"], point["d"], point["m"]
    if point["file"]:
        points, queries = load_points(point["file"])
        return points, (queries if queries is not None else points[rng.permutation(len(points))])[:m]
    if point["data"] == "digits":
        from sklearn.datasets import load_digits

        images = load_digits().data.astype(np.float32)[rng.permutation(1797)]
        return images[:n], images[n : n + m]
    return tuple(rng.standard_normal((rows, d), dtype=np.float32) for rows in (n, m))


# --- what is shown ------------------------------------------------------------------------------------


def tables(rows: Sequence[Row]) -> str:
    """Queries per second; and bytes besides points and queries."""
    rows = [row | {"data": _origin(row)} for row in rows]
    heads = {"data": "data", "distance": "distance", "n": "n", "d": "d", "m": "m"}
    speed = grid_table(rows, heads, "column", _per_second, _label)
    memory = grid_table(rows, heads, "column", _besides, _label)
    return f"Queries per second:\n\n{speed}\n\nMemory besides points and queries, as the process grew:\n\n{memory}\n\n{device_line(rows)}"


def _per_second(row: Row) -> str:
    return f"{float(row['queries_per_s']):,.0f}{origin(row)}" if row["queries_per_s"] else row["status"]


def _label(column: str) -> str:
    return limit_label(column).replace("limit", "limit arguments +")


def _origin(row: Row) -> str:
    return row["data"] if row["file"] or row["data"] not in PUBLISHED else f"{row['data']} (synthetic)"


def _besides(row: Row) -> str:
    if not row["resident_bytes"]:  # it did not run, or on a GPU, whose memory only JAX tells
        return "" if row["status"] == "ok" else row["status"]
    besides = int(row["resident_bytes"]) - 4 * int(row["d"]) * (int(row["n"]) + int(row["m"]))
    return f"{besides / 1e6:,.1f} MB"


EXPERIMENT = Experiment(
    module="paper_repro.knn",
    about=__doc__,
    keys=("data", "distance", "n", "d", "m", "file", "column", "limit"),
    results=(*RESULTS, "queries_per_s"),
    grid=grid,
    measure=measure_point,
    tables=tables,
    options=data_options,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
