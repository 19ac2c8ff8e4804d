"""The routines of LAPACK that compiled programs and modules of StableHLO call by name."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np

TRIANGULAR_SOLVES = tuple(f"lapack_{kind}trsm_ffi" for kind in "sdcz")
"""Solutions of triangular systems in the four dtypes, on operands that lie column by column."""


def prepare(text: str) -> None:
    """Have JAX find the routines that the text of a module calls: until then a call of one ends the process."""
    if "@lapack_" in text:
        _find()


@cache
def _find() -> None:
    """Lower a factorisation, at the first of which JAX finds all routines."""
    jax.jit(jax.lax.linalg.cholesky).trace(jax.ShapeDtypeStruct((1, 1), np.float32)).lower(lowering_platforms=("cpu",))
