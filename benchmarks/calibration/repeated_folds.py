"""Costs of folds whose elements readers repeat along another index: written out term by term, and kept, by the extent of that index.

python -m benchmarks.calibration.repeated_folds
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from benchmarks.calibration.sweep import Case, main, steps

MEASURES = ("backends.cpu.fusion.REPEATED",)
TURNS = 8
DEPTH = 16


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each element of the readers, in a loop over chunks of rows."""
    for repeats in steps(tiny, 2, 4, 8, 16, 32, 64, 128):
        rows = 16 if tiny else 2**23 // (repeats * 2**10) // TURNS * TURNS
        for how in ("written out", "kept"):

            def distances(x: Any, y: Any, how: str = how) -> Any:
                if how == "kept":
                    return jnp.sum((x[:, None] - y) ** 2, -1)
                return sum((x[:, None, d] - y[:, d]) ** 2 for d in range(DEPTH))

            def function(x: Any, y: Any, t: Any, of: Any = distances) -> Any:
                def total(chunk: Any) -> Any:
                    return jnp.sum(jnp.maximum(of(chunk, y)[:, :, None] - t, 0.0))

                return lax.map(total, x.reshape(TURNS, -1, DEPTH))

            columns = 16 if tiny else 2**10
            shapes = [(rows, DEPTH), (columns, DEPTH), (repeats,)]
            yield Case(f"{repeats} elements for each, {how}", function, shapes, float(rows * columns * repeats))


if __name__ == "__main__":
    main("repeated_folds")
