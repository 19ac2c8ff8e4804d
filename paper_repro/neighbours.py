"""Nearest neighbours by other programs (KeOps, scikit-learn, faiss), and the check of what they all find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from paper_repro import keops

Search = Callable[[np.ndarray], np.ndarray]
"""Positions of the nearest points, of shape (m, k), for queries of shape (m, d)."""


def searches(column: str, points: np.ndarray, distance: str, k: int) -> Search | None:
    """Exact search among ``points`` by the program that a column is named after; None for columns of JAX.

    What a program does before it sees a query (copying points, scaling them) is done here.
    """
    metric = distance.split()[0]  # without how it is computed
    makers = {"keops": _keops, "sklearn": _sklearn, "faiss": _faiss}
    return makers[column](points, metric, k) if column in makers else None


def _keops(points: np.ndarray, metric: str, k: int) -> Search:
    if metric != "cosine":
        return lambda queries: keops.nearest(queries, points, k, metric)
    points = _unit(points)
    return lambda queries: keops.nearest(_unit(queries), points, k, metric)


def _sklearn(points: np.ndarray, metric: str, k: int) -> Search:
    from sklearn.neighbors import NearestNeighbors

    names = {"L2": "euclidean", "L1": "manhattan", "cosine": "cosine"}
    found = NearestNeighbors(n_neighbors=k, algorithm="brute", metric=names[metric], n_jobs=-1).fit(points)
    return lambda queries: np.asarray(found.kneighbors(queries, return_distance=False))


def _faiss(points: np.ndarray, metric: str, k: int) -> Search:
    import faiss

    kinds = {"L2": faiss.METRIC_L2, "L1": faiss.METRIC_L1, "cosine": faiss.METRIC_INNER_PRODUCT}
    index = faiss.IndexFlat(points.shape[1], kinds[metric])
    prepare: Any = _unit if metric == "cosine" else np.asarray
    index.add(prepare(points))
    return lambda queries: np.asarray(index.search(prepare(queries), k)[1])


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def excess(points: np.ndarray, queries: np.ndarray, found: np.ndarray, distance: str) -> float:
    """How far the found neighbours are beyond the true ones, by float64: the largest difference of distances of equal rank, relatively.

    Ties do not count, since only distances are compared. ``found`` has shape (m, k).
    """
    worst = 0.0
    for query, positions in zip(queries, found):
        apart = _distances(points, query, distance.split()[0])
        nearest = np.sort(np.partition(apart, len(positions) - 1)[: len(positions)])
        worst = max(worst, float(np.max(np.abs(np.sort(apart[positions]) - nearest) / max(nearest[-1], 1e-12))))
    return worst


def _distances(points: np.ndarray, query: np.ndarray, metric: str) -> np.ndarray:
    p, q = points.astype(np.float64), query.astype(np.float64)
    if metric == "L1":
        return np.abs(p - q).sum(1)
    if metric == "cosine":
        return 1 - p @ q / np.sqrt((p * p).sum(1) * (q @ q))
    return ((p - q) ** 2).sum(1)
