"""Costs of factorisations and triangular solves of small and large matrices, and of solves as XLA:CPU writes them for LAPACK.

python -m benchmarks.calibration.linear_algebra
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.calibration.sweep import Case, main, steps

MEASURES = tuple(
    f"backends.cpu.{name}"
    for name in (
        "backend.BY_COLUMNS",
        "weights.FACTORISED",
        "weights.SOLVED",
        "weights.SUBSTITUTED",
        "weights.STARTED",
    )
)
LARGEST = {"cholesky": 2048, "lu": 1024, "qr": 1024, "eigh": 256, "svd": 256}
ELEMENTS = 2**16
"""The least number of elements that are factorised together."""


def _factorised(name: str, a: jax.Array) -> Any:
    if name == "lu":
        return lax.linalg.lu(a)[0]
    return {"cholesky": lax.linalg.cholesky, "qr": jnp.linalg.qr, "eigh": jnp.linalg.eigh, "svd": jnp.linalg.svd}[name](a)


def cases(tiny: bool) -> Iterator[Case]:
    """Costs of a factorisation are for each row, of a solve for each element of the right side."""
    for n in steps(tiny, 3, 8, 16, 64, 256, 1024, 2048):
        batch = 1 if tiny else max(1, ELEMENTS // n**2)
        root = np.random.default_rng(0).standard_normal((batch, n, n), np.float32)
        matrix = jnp.asarray(np.eye(n, dtype=np.float32) + root @ root.swapaxes(1, 2) / n)
        for name, largest in LARGEST.items():
            if n <= largest:
                yield Case(f"{name}, {n} rows", partial(_factorised, name), [matrix], float(batch * n))
        for columns in steps(tiny, 1, 16, 256):
            for in_order in (False, True):
                solve = _solved_in_order if in_order else _solved
                order = "in LAPACK's order" if in_order else "as written"
                yield Case(f"solve, {n} rows, {columns} columns, {order}", solve, [matrix[0], (n, columns)], float(n * columns))


_solved = partial(lax.linalg.triangular_solve, left_side=True, lower=True)


def _solved_in_order(a: jax.Array, b: jax.Array) -> jax.Array:
    """The same of transposes, which LAPACK reads and writes as they stand."""
    turned = jnp.swapaxes(b, -1, -2)
    return lax.linalg.triangular_solve(a, turned, left_side=False, lower=True, transpose_a=True)


if __name__ == "__main__":
    main("linear_algebra")
