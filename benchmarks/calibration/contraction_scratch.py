"""Seconds of a turn of a loop with a contraction, by the size of its result: beyond some size its scratch is new memory in every turn.

python -m benchmarks.calibration.contraction_scratch
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from benchmarks.calibration.sweep import Case, main, steps

MEASURES = ("backends.cpu.backend.SCRATCH",)
TURNS, DEPTH = 4, 8


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each element of the result. They rise where SCRATCH times its bytes exceed ``reused_bytes`` of the device."""
    for rows in steps(tiny, 512, 1024, 1448, 2048, 2896, 4096, 5792):

        def function(x: Any, y: Any) -> Any:
            return lax.map(lambda chunk: jnp.max(lax.optimization_barrier(chunk @ y)), x)

        yield Case(f"{TURNS} turns of {rows * rows * 4} bytes", function, [(TURNS, rows, DEPTH), (DEPTH, rows)], float(TURNS * rows * rows))


if __name__ == "__main__":
    main("contraction_scratch")
