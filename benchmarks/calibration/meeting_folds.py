"""Costs of folds that repeat the same arrays and whose results meet in one operation, by how many results there are.

python -m benchmarks.calibration.meeting_folds
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from benchmarks.calibration.sweep import Case, main, steps

MEASURES = ("backends.cpu.fusion.MET",)
LENGTH = 2048


def _shares(x: Any, y: Any) -> Any:
    return jnp.sum(jnp.minimum(x[:, None], y), 1) / jnp.sum(jnp.maximum(x[:, None], y), 1)


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each element that is folded."""
    length = 8 if tiny else LENGTH
    for results in steps(tiny, 1024, 2048, 3072, 4095, 4096, 8192):
        yield Case(f"{results} results", _shares, [(results,), (length,)], float(results * length))


if __name__ == "__main__":
    main("meeting_folds")
