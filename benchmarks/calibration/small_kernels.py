"""Costs of kernels by the bytes of their results, in a scan over steps that wait for one another: small ones are not dealt out to threads.

python -m benchmarks.calibration.small_kernels
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from benchmarks.calibration.sweep import Case, main, steps

MEASURES = ("backends.cpu.backend.AT_ONCE", "backends.cpu.backend.AT_ONCE_BYTES")
ROW, STEPS = 64, 500


def scan(kernels: int) -> Callable[..., Any]:
    """Steps of a sum of every row, which no compiler fuses with what is computed of it, and of that, so many times."""

    def step(carry: Any, _: None) -> tuple[Any, None]:
        for _ in range(kernels):
            carry = carry - 1e-3 * lax.reduce_precision(jnp.sum(carry, 1, keepdims=True), 8, 23)
        return carry, None

    return lambda x: lax.scan(step, x, None, length=STEPS)[0]


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each kernel, of which a sum and what is computed of it are two."""
    for rows in steps(tiny, 2, 8, 32, 64, 128, 256, 1024, 4096):
        for kernels in (1, 8):
            label = f"{2 * kernels} kernels of {rows * ROW * 4} bytes"
            yield Case(label, scan(kernels), [(rows, ROW)], 2.0 * kernels * STEPS)


if __name__ == "__main__":
    main("small_kernels")
