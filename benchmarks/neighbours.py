"""The ten nearest points: plans against plain JAX, chunks by hand, KeOps, scikit-learn and faiss. ``python -m benchmarks.neighbours``"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.measuring import Run
from benchmarks.peers import SEARCHES, has, search
from benchmarks.racing import Contest, Question, contests, main, table

K = 10
CASES = {
    "tiny": [(50, 400, 3)],
    "small": [(2_048, 60_000, 3), (2_048, 16_384, 32), (1_024, 60_000, 100)],
    "full": [(2_048, 60_000, 3), (2_048, 16_384, 32), (2_048, 60_000, 100), (10_000, 60_000, 100)],
}
"""Queries, points, dimensions."""
ROWS = 128
PEERS = {"KeOps": "keops", "scikit-learn": "sklearn", "faiss": "faiss"}
"""Names of columns, and the programs of :mod:`benchmarks.peers` in them."""


def apart(metric: str, queries: jax.Array, points: jax.Array) -> jax.Array:
    """Distances of all pairs, squared for L2, as one writes them down."""
    if metric == "L2":
        return jnp.sum((queries[:, None] - points[None]) ** 2, -1)
    if metric == "L1":
        return jnp.sum(jnp.abs(queries[:, None] - points[None]), -1)
    return 1 - _unit(queries) @ _unit(points).T


def nearest(metric: str, queries: jax.Array, points: jax.Array) -> jax.Array:
    """Positions of the nearest points."""
    return lax.top_k(-apart(metric, queries, points), K)[1]


def nearest_by_hand(metric: str, queries: jax.Array, points: jax.Array) -> jax.Array:
    """Neighbours as written by hand: queries in chunks, squared distances expanded."""

    def one(query: jax.Array) -> jax.Array:
        if metric == "L2":
            return lax.top_k(2 * query @ points.T - jnp.sum(points * points, 1), K)[1]
        return lax.top_k(-apart(metric, query[None], points)[0], K)[1]

    return lax.map(one, queries, batch_size=ROWS)


def _unit(rows: jax.Array) -> jax.Array:
    return rows / jnp.linalg.norm(rows, axis=1, keepdims=True)


def make(scale: str) -> Iterator[Contest]:
    """Each size with each distance."""
    for metric in ("L2", "L1", "cosine"):
        for m, n, d in CASES[scale]:
            rng = np.random.default_rng(0)
            queries, points = (rng.standard_normal((rows, d)).astype(np.float32) for rows in (m, n))
            installed = {name: program for name, program in PEERS.items() if has(SEARCHES[program])}
            peers = {name: partial(_run, program, points, metric, queries) for name, program in installed.items()}
            case = f"{metric}, {m:,} queries, {n:,} points, d = {d}"
            function, by_hand = partial(nearest, metric), {"by hand": partial(nearest_by_hand, metric)}
            size = {"metric": metric, "m": m, "n": n, "d": d}
            yield Contest(case, size, (queries, points), "128MiB", function, by_hand, peers, tolerance=None)


def _run(program: str, points: np.ndarray, metric: str, queries: np.ndarray) -> Run:
    prepared = search(program, points, metric, K)
    return lambda: prepared(queries)


QUESTION = Question("neighbours", f"The {K} nearest neighbours", contests(make, turns=3), table)

if __name__ == "__main__":
    main(QUESTION)
