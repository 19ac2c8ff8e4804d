"""Costs of folds along short and long rows, by functions of the user's, and of cumulative folds.

python -m benchmarks.calibration.folds
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.calibration.sweep import Case, main, steps

MEASURES = (
    "backends.cpu.backend.SHORT",
    *(f"backends.cpu.weights.{name}" for name in ("STEP", "COMBINED", "CUMULATED", "CUMULATED_LOGARITHM")),
)


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each element."""
    elements = 64 if tiny else 2**20
    for length in steps(tiny, 4, 8, 16, 24, 32, 48, 64, 256, 1024):
        shape = (elements // length, length)
        yield Case(f"sum of rows of {length}", lambda x: jnp.sum(x, 1), [shape], float(elements))
    for operations in (1, 2) if tiny else (1, 2, 4, 8):
        own = partial(lax.reduce, init_values=np.float32(0), computation=_combination(operations), dimensions=(1,))
        yield Case(f"reduce by {operations} operations", own, [(elements // 8, 8)], float(elements))
    for name, fold in (("sum", lax.cumsum), ("product", lax.cumprod), ("maximum", lax.cummax), ("logsumexp", lax.cumlogsumexp)):
        for axis in (0, 1):
            side = int(elements**0.5)
            yield Case(f"cumulative {name} along axis {axis}", partial(fold, axis=axis), [(side, side)], float(side * side))


def _combination(operations: int) -> Callable[[Any, Any], Any]:
    """A combination of so many operations that XLA does not take for one of its own."""

    def combine(a: Any, b: Any) -> Any:
        for k in range(operations):
            a = a * b if k % 2 else a - b
        return a

    return combine


if __name__ == "__main__":
    main("folds")
