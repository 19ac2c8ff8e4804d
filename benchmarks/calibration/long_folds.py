"""Costs of folds of values that no array holds, by the number of their results, with and without a fence before what reads them.

python -m benchmarks.calibration.long_folds
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from benchmarks.calibration.sweep import Case, main, steps

MEASURES = ("backends.cpu.fusion.LONG", "backends.cpu.backend.STALL")
DEPTH = 64


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each element that is folded. Beyond the threshold the first of each two takes about ten times as long."""
    for results in steps(tiny, 2**13, 2**14, 2**15 - 64, 2**15, 2**15 + 64, 2**16, 2**17):
        for fenced in (False, True):

            def function(x: Any, y: Any, fenced: bool = fenced) -> Any:
                total = jnp.sum(jnp.abs(x[:, None] - y[None, :]), 1)
                return jnp.exp(-(lax.reduce_precision(total, 8, 23) if fenced else total))

            fence = "a fence" if fenced else "no fence"
            yield Case(f"{results} results, {fence}", function, [(results,), (DEPTH,)], float(results * DEPTH))


if __name__ == "__main__":
    main("long_folds")
