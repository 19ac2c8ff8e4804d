"""Folds of computed operands in loops: inside the kernel library's fusion, and written to memory first, by the operations that they take.

python -m benchmarks.calibration.fused_operands
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from benchmarks.calibration.sweep import Case, main

MEASURES = tuple(f"backends.cpu.kernel_library.{name}" for name in ("HEAVY", "GAINED", "SLOWER", "SLOWEST"))
PAIRS: dict[int, Callable[[Any, Any], Any]] = {
    1: lambda x, y: x - y,
    2: lambda x, y: jnp.abs(x - y),
    3: lambda x, y: jnp.abs(x - y) + 1.0,
    4: lambda x, y: jnp.sqrt(jnp.abs(x - y) + 1.0),
    6: lambda x, y: 1.0 / (1.0 + jnp.sqrt(1.0 + (x - y) ** 2)),
}
"""Functions of a pair of numbers, by their operations."""
SINGLE: dict[str, Callable[[Any], Any]] = {
    "sign": jnp.sign,
    "erf": lax.erf,
    "logistic": lax.logistic,
    "exp": lambda v: jnp.exp(-v),
    "log": jnp.log,
    "log1p": jnp.log1p,
    "expm1": lambda v: jnp.expm1(-v),
}
"""Operations that one of the two computes faster."""


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each pair: of one column by these functions, and of the squared distances over several columns."""
    rows, columns = (8, 8) if tiny else (4096, 2048)
    several = {3 * depth - 1: depth for depth in ((2,) if tiny else (2, 3, 4, 8, 12, 16, 32))}
    for operations in (*sorted({*PAIRS, *several}), *SINGLE):
        depth = several.get(operations, 1) if isinstance(operations, int) else 1

        def pairs(x: Any, y: Any, operations: int | str = operations, depth: int = depth) -> Any:
            if isinstance(operations, str):
                return SINGLE[operations](1 + jnp.abs(x[:, None, 0] - y[None, :, 0]))
            if depth == 1:
                return PAIRS[operations](x[:, None, 0], y[None, :, 0])
            return sum((x[:, None, d] - y[None, :, d]) ** 2 for d in range(depth))

        for chunk in (4,) if tiny else (8, 64, 512):
            for name, fence in (("fused", lambda v: v), ("written", lambda v: lax.reduce_precision(v, 8, 23))):

                def folded(x: Any, y: Any, made: Any = pairs, fence: Any = fence, chunk: int = chunk) -> Any:
                    return lax.map(lambda own: jnp.min(fence(made(own, y)), 1), x.reshape(-1, chunk, x.shape[1]))

                shapes = [(rows, depth), (columns, depth)]
                what = f"{operations} operations" if isinstance(operations, int) else operations
                yield Case(f"{what}, {chunk} rows, {name}", folded, shapes, float(rows * columns))


if __name__ == "__main__":
    main("fused_operands")
