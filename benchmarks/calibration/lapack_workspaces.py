"""Growth of resident memory in LAPACK's routines, in squares of the lesser extent of their matrices.

python -m benchmarks.calibration.lapack_workspaces
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax.numpy as jnp
from jax import lax

from benchmarks.calibration.sweep import Case, main

MEASURES = ("backends.cpu.lapack.WORKSPACE",)


def cases(tiny: bool) -> Iterator[Case]:
    """Costs in squares, results included; those in the table are without results."""
    for k in (4,) if tiny else (512, 1024):
        square = 4.0 * k * k
        yield Case(f"eigh, {k} rows", jnp.linalg.eigh, [(k, k)], square, watched=True)
        for rows in (k, 8 * k):
            for algorithm in (lax.linalg.SvdAlgorithm.DEFAULT, lax.linalg.SvdAlgorithm.QR):
                svd = partial(lax.linalg.svd, full_matrices=False, algorithm=algorithm)
                yield Case(f"svd ({algorithm.name.lower()}), {rows} x {k}", svd, [(rows, k)], square, watched=True)
        for left, right in ((False, False), (False, True), (True, True)):
            eig = partial(lax.linalg.eig, compute_left_eigenvectors=left, compute_right_eigenvectors=right)
            yield Case(f"eig, {k} rows, {left + right} sets of vectors", eig, [(k, k)], square, watched=True)


if __name__ == "__main__":
    main("lapack_workspaces")
