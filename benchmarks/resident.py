"""Growth of resident memory while a function runs, in a process that has run little else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

WARM_EXTENT = 256
"""Rows of the matrices that a process is warmed up with."""


def grown(run: Callable[[], Any]) -> tuple[Any, int | None]:
    """What ``run`` returns, once it is there, and the bytes by which the process grew at most meanwhile; None where Linux does not tell.

    >>> import numpy as np
    >>> out, nbytes = grown(lambda: np.ones(2**24))
    >>> nbytes is None or 2**26 < nbytes < 2**29
    True
    """
    try:
        before = _field("VmRSS")
        RESET.write_text("5")  # the high-water mark starts again from here
    except OSError:
        return jax.block_until_ready(run()), None
    out = jax.block_until_ready(run())
    return out, max(_field("VmHWM") - before, 0)


def warm_up(dtype: Any) -> None:
    """Let threads start, and libraries allocate what they keep, so that growth counts none of it."""
    if dtype in (jnp.float32, jnp.float64):
        square = jnp.eye(WARM_EXTENT, dtype=dtype)
        rows = jnp.ones((WARM_EXTENT, 8 * WARM_EXTENT), dtype)
        solved = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(square), rows, lower=True)
        jax.block_until_ready(solved @ solved.T)


def _field(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
