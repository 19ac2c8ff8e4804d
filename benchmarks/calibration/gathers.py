"""Costs of gathers and scatters by the number and the size of their windows.

python -m benchmarks.calibration.gathers
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from benchmarks.calibration.sweep import Case, main

MEASURES = tuple(f"backends.cpu.weights.{name}" for name in ("READ_AT", "READ", "WRITTEN_AT", "WRITTEN", "COPIED"))


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each window: those of its place, and for each of its elements. The last scatter writes one window: it copies."""
    rows, windows = (16, 8) if tiny else (2**14, 2**14)
    for width in (1, 2) if tiny else (1, 2, 4, 16, 64):
        for count in (windows, 1):
            places = np.random.default_rng(0).integers(0, rows, count)
            shape = (rows, width)
            yield Case(f"gather of {count} x {width}", _read, [shape, places], float(count))
            yield Case(f"scatter of {count} x {width} into {rows}", _written, [shape, places, (count, width)], float(count))


def _read(x: jax.Array, places: jax.Array) -> jax.Array:
    return x[places]


def _written(x: jax.Array, places: jax.Array, new: jax.Array) -> jax.Array:
    return x.at[places].add(new)


if __name__ == "__main__":
    main("gathers")
