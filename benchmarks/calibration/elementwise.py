"""Costs of elementwise operations: each in one kernel over arrays that stay in the cache.

python -m benchmarks.calibration.elementwise
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from benchmarks.calibration.instructions import INTEGERS, PARAMETERS, operand
from benchmarks.calibration.sweep import Case, main
from eqsat_mem.backends.cpu.weights import MEASURED
from eqsat_mem.ir.ops.elementwise import MAPS

MEASURES = ("backends.cpu.weights.MEASURED", "backends.cpu.weights.FUNCTION")
EIGHTH = 8
"""Of the operations, every one of so many is compiled at tiny scale."""
CHAINED = 4
"""Results that are added: a kernel with one cheap operation would wait for memory."""


def cases(tiny: bool) -> Iterator[Case]:
    n = 8 if tiny else 2**15
    for op in list(MEASURED)[:: EIGHTH if tiny else 1]:
        yield _case(op, n)


def _case(op: str, n: int) -> Case:
    """An operation of shifted operands, added up."""
    row, parameters = MAPS[op], PARAMETERS.get(op, {})
    dtype = operand(op, jnp.float32)

    def function(*xs: Any) -> Any:
        shifted = ([x + jnp.asarray(k, dtype) / CHAINED if op not in INTEGERS else x + k for x in xs] for k in range(CHAINED))
        return sum(jnp.real(row.bind(*args, **parameters)) for args in shifted)

    if op == "polygamma":  # its order is a whole number
        return Case(op, lambda x: row.bind(jnp.ones_like(x), x), [jnp.linspace(0.1, 0.9, n)], float(n))
    return Case(op, function, [jnp.linspace(0.1, 0.9, n).astype(dtype)] * row.arity, float(n * CHAINED))


if __name__ == "__main__":
    main("elementwise")
