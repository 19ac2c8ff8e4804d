"""Costs of folds of leading axes by the bytes of the rows that stay: from some length on the kernel library takes much longer.

python -m benchmarks.calibration.long_rows
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from benchmarks.calibration.sweep import Case, main, steps

MEASURES = ("backends.cpu.backend.LONG_ROW", "backends.cpu.backend.PER_LONG_ROW")
ROWS = 48


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each element."""
    for length in steps(tiny, 2**10, 2**12, 2**13, 2**14 - 4, 2**14, 2**14 + 4, 2**14 + 64, 2**15, 2**15 + 4, 2**16, 2**17):
        yield Case(f"sum of {ROWS} rows of {length * 4} bytes", lambda x: jnp.sum(x, 0), [(ROWS, length)], float(ROWS * length))


if __name__ == "__main__":
    main("long_rows")
