"""Costs of random numbers by how many are drawn at once: a few are drawn by one core.

python -m benchmarks.calibration.draws
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.calibration.sweep import Case, main, steps

MEASURES = ("backends.cpu.backend.DEALT_DRAWS_S", "backends.cpu.backend.DRAWN_BY_ONE", "backends.cpu.weights.DRAWN")
EVERY = 2**20
"""The numbers that each program draws."""


def drawn(count: int, times: int) -> Callable[[Any], Any]:
    """Bits of so many numbers, drawn so many times with keys that wait for one another."""

    def step(carry: Any, _: None) -> tuple[Any, None]:
        key, bits = carry
        key = jax.random.fold_in(key, 1)
        return (key, bits ^ jax.random.bits(key, (count,))), None

    return lambda key: lax.scan(step, (key, jnp.zeros(count, jnp.uint32)), None, length=times)[0][1]


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each number."""
    for count in steps(tiny, 2**6, 2**8, 2**10, 2**11, 2**12, 2**13, 2**14, 2**16, 2**18, 2**20):
        times = 2 if tiny else EVERY // count
        yield Case(f"{count} numbers", drawn(count, times), [jax.random.PRNGKey(0)], float(count * times))


if __name__ == "__main__":
    main("draws")
