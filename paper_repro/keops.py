"""KeOps, which compiles a formula over all pairs of two sets of points: the paper's main comparison. Needs pykeops and a C++ compiler."""

from __future__ import annotations

import importlib.util
import shutil
from typing import Any

import numpy as np


def installed() -> bool:
    """Whether KeOps can run here."""
    return importlib.util.find_spec("pykeops") is not None and any(map(shutil.which, ("g++", "clang++")))


def kernel_product(x: np.ndarray, y: np.ndarray, v: np.ndarray) -> np.ndarray:
    """K(x, y) v for the squared exponential kernel of unit scale; shapes (n, d), (m, d) and (m, 1)."""
    x_i, y_j = _pairs(x, y)
    return np.asarray((-0.5 * ((x_i - y_j) ** 2).sum(-1)).exp() @ v)


def nearest(queries: np.ndarray, points: np.ndarray, k: int, distance: str) -> np.ndarray:
    """The positions of the k points nearest to each query, of shape (m, k); ``cosine`` wants both of unit length."""
    q_i, p_j = _pairs(queries, points)
    if distance == "L1":
        apart = (q_i - p_j).abs().sum(-1)
    elif distance == "cosine":
        apart = -(q_i | p_j)
    else:
        apart = ((q_i - p_j) ** 2).sum(-1)
    return np.asarray(apart.argKmin(k, dim=1))


def _pairs(x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
    from pykeops.numpy import LazyTensor

    return LazyTensor(np.ascontiguousarray(x[:, None, :])), LazyTensor(np.ascontiguousarray(y[None, :, :]))
