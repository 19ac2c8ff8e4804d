"""Programs outside of eqsat_mem that compute the same: KeOps, scikit-learn, faiss, opt_einsum. Each is imported where it is used."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.measuring import Run

Search = Callable[[np.ndarray], np.ndarray]
"""Positions of the nearest points, of shape (m, k), for queries of shape (m, d)."""


def has(package: str) -> bool:
    """Whether a package is installed; KeOps compiles, and needs a C++ compiler too."""
    return importlib.util.find_spec(package) is not None and (package != "pykeops" or any(map(shutil.which, ("g++", "clang++"))))


# --- kernel products ----------------------------------------------------------------------------------


def keops_product(x: np.ndarray, y: np.ndarray, v: np.ndarray) -> np.ndarray:
    """K(x, y) v for the squared exponential kernel of unit scale; shapes (n, d), (m, d) and (m, 1)."""
    x_i, y_j = _pairs(x, y)
    return np.asarray((-0.5 * ((x_i - y_j) ** 2).sum(-1)).exp() @ v)


def keops_gradient(x: np.ndarray, y: np.ndarray, v: np.ndarray, w: np.ndarray) -> Run:
    """A run that computes the gradient of w' K(x, y) v with respect to x, of shape (n, d); v and w have shapes (m,) and (n,)."""
    from pykeops.numpy import Genred

    d = x.shape[1]
    variables = [f"x = Vi({d})", f"y = Vj({d})", "v = Vj(1)", "w = Vi(1)"]
    reduced = Genred("Grad(Exp(-SqDist(x, y) * IntInv(2)) * v, x, w)", variables, axis=1)
    return lambda: reduced(x, y, v[:, None], w[:, None])


def _pairs(x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
    from pykeops.numpy import LazyTensor

    return LazyTensor(np.ascontiguousarray(x[:, None, :])), LazyTensor(np.ascontiguousarray(y[None, :, :]))


# --- nearest neighbours -------------------------------------------------------------------------------

SEARCHES = {"keops": "pykeops", "sklearn": "sklearn", "faiss": "faiss"}
"""The programs that :func:`search` knows, and the packages that they come in."""


def search(program: str, points: np.ndarray, metric: str, k: int) -> Search:
    """Exact search for the k nearest among ``points`` of shape (n, d) by L2, L1 or cosine, by one of ``SEARCHES``.

    The preparation of the points (copying, scaling) is done here, before a query is seen.
    """
    return {"keops": _keops, "sklearn": _sklearn, "faiss": _faiss}[program](points, metric, k)


def _keops(points: np.ndarray, metric: str, k: int) -> Search:
    prepare: Any = _unit if metric == "cosine" else np.asarray
    points = prepare(points)

    def nearest(queries: np.ndarray) -> np.ndarray:
        q_i, p_j = _pairs(prepare(queries), points)
        if metric == "L1":
            apart = (q_i - p_j).abs().sum(-1)
        elif metric == "cosine":
            apart = -(q_i | p_j)
        else:
            apart = ((q_i - p_j) ** 2).sum(-1)
        return np.asarray(apart.argKmin(k, dim=1))

    return nearest


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


def excess(points: np.ndarray, queries: np.ndarray, found: np.ndarray, metric: str) -> float:
    """The excess of the neighbours found over the true ones, by float64: the largest difference of distances of equal rank, relatively.

    Ties do not count, since only distances are compared. ``found`` has shape (m, k).
    """
    worst = 0.0
    for query, positions in zip(queries, found):
        apart = _distances(points, query, metric)
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


# --- products of many tensors -------------------------------------------------------------------------


def opt_einsum_contract(spec: str, *tensors: Any) -> Any:
    """The contraction of JAX arrays in the order of fewest operations; a tensor stands for two where the spec names twice as many."""
    import opt_einsum

    times = (spec.partition("->")[0].count(",") + 1) // len(tensors)
    return opt_einsum.contract(spec, *(t for t in tensors for _ in range(times)), optimize="dp", backend="jax")
