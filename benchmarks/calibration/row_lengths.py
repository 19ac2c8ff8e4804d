"""Elementwise operations by the length of the rows that they write: of pairs of numbers, and of arrays of one shape.

python -m benchmarks.calibration.row_lengths
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from benchmarks.calibration.sweep import Case, main, steps

MEASURES = tuple(f"backends.cpu.backend.{name}" for name in ("SHORT_ROW", "VECTOR", "UNEVEN"))
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sums": lambda x, y: jnp.abs(x - y) + jnp.abs(x + y) + x * y,
    "tanh": lambda x, y: jnp.tanh(x - y) * x + y,
}


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each element; what is written stays in the caches."""
    elements, turns = (256, 2) if tiny else (2**15, 64)
    for name, operation in OPERATIONS.items():
        for length in steps(tiny, 4, 8, 16, 20, 25, 32, 40, 50, 64, 100, 128, 256, 512):
            rows = elements // length

            def of_pairs(x: Any, y: Any, operation: Any = operation) -> Any:
                def turn(k: Any, state: Any) -> Any:
                    return operation(x[:, None] + k.astype(x.dtype), y) + 0.5 * state

                return lax.fori_loop(0, turns, turn, jnp.zeros((len(x), len(y)), x.dtype))

            def of_one_shape(x: Any, operation: Any = operation) -> Any:
                return lax.fori_loop(0, turns, lambda k, state: operation(x, state), x)

            work = float(turns * rows * length)
            yield Case(f"{name} of pairs, rows of {length}", of_pairs, [(rows,), (length,)], work)
            yield Case(f"{name} of one shape, rows of {length}", of_one_shape, [(rows, length)], work)


if __name__ == "__main__":
    main("row_lengths")
