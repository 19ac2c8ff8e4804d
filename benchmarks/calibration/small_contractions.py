"""Costs of contractions with thin sides, with little work, and with about as many results as the kernel library begins to share out.

python -m benchmarks.calibration.small_contractions
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from benchmarks.calibration.sweep import Case, main, steps

MEASURES = (
    "backends.cpu.profile.THIN_COLUMNS",
    "backends.cpu.profile.DEAL_S",
    *(f"backends.cpu.backend.{name}" for name in ("CORE_WORK", "THIN_ROWS", "THIN_DEPTH", "DEALT", "PANEL")),
)


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each multiplication with its addition; the seconds of the smallest are those of handing them out."""
    for m, n, k in dict.fromkeys(_extents(tiny)):
        yield Case(f"{m} x {k} by {k} x {n}", jnp.matmul, [(m, k), (k, n)], float(m * n * k))


def _extents(tiny: bool) -> Iterator[tuple[int, int, int]]:
    """Rows, columns and depths: one of them thin, few columns of a deep product, results around 2^16 of 256 columns, and few rows of few
    and of many columns: from about 8 million multiplications on a second core has its share."""
    whole = 8 if tiny else 1024
    for thin in steps(tiny, 1, 2, 4, 8, 16, 32, 64, 128, 256):
        yield from ((thin, whole, whole), (whole, thin, whole), (whole, whole, thin))
    for columns in (2, 3) if tiny else (1, 2, 4, 8, 16, 32, 64):
        yield 2, columns, 4 if tiny else 16384
    for rows in (2, 3) if tiny else (240, 248, 256, 264, 272, 512):
        yield rows, 2 if tiny else 256, 8
    for columns in (2, 3) if tiny else (64, 256, 512, 1024, 4096):
        for rows in (2, 3) if tiny else (16, 32, 64, 128, 256):
            yield rows, columns, 4 if tiny else 256


if __name__ == "__main__":
    main("small_contractions")
