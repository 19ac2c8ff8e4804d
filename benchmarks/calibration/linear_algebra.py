"""Costs of factorisations and triangular solves of small and large matrices, and of solves as XLA:CPU writes them for LAPACK.

python -m benchmarks.calibration.linear_algebra
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.calibration.sweep import Case, main, steps

MEASURES = tuple(
    f"backends.cpu.{name}"
    for name in (
        "backend.BY_COLUMNS",
        "weights.CUBED",
        "weights.SQUARED",
        "weights.LINEAR",
        "weights.EIGENVECTORS",
        "weights.SOLVED",
        "weights.SUBSTITUTED",
        "weights.STARTED",
    )
)
BATCH = 8


def cases(tiny: bool) -> Iterator[Case]:
    """Costs of a factorisation are for each row, of a solve for each element of the right side."""
    for n in steps(tiny, 4, 16, 64, 256, 1024, 2048):
        matrix = jnp.eye(n) + jnp.full((BATCH, n, n), 0.5 / n)
        yield Case(f"cholesky, {n} rows", jnp.linalg.cholesky, [matrix], float(BATCH * n))
        if n <= 256:
            yield Case(f"eigh, {n} rows", jnp.linalg.eigh, [matrix], float(BATCH * n**3))
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
