"""Growth of resident memory in folds of leading axes: the kernel library leaves a row of partial results for every few rows.

python -m benchmarks.calibration.partial_folds
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from benchmarks.calibration.sweep import Case, main

MEASURES = ("backends.cpu.hidden_scratch.FOLDED_AT_ONCE",)


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are shares of the operand: a row of partial results for so many rows leaves one over so many."""
    elements = 64 if tiny else 2**26
    for length in (4, 8) if tiny else (16, 64, 256, 1024, 4096, 16384):
        shape = (elements // length, length)
        yield Case(f"sum of {shape[0]} rows of {length}", lambda x: jnp.sum(x, 0), [shape], 4.0 * elements, watched=True)
    wide = (4, 4, 4) if tiny else (64, 64, elements // 2**12)
    yield Case(f"sum of {wide[0]} rows of {wide[1]} x {wide[2]}", lambda x: jnp.sum(x, 0), [wide], 4.0 * elements, watched=True)


if __name__ == "__main__":
    main("partial_folds")
