"""Costs of elements by the size of chunks: XLA:CPU deals out to cores what has enough to do, its kernel library what has enough elements.

python -m benchmarks.calibration.dealing
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.calibration.sweep import Case, main, steps
from eqsat_mem.backends.cpu.vector_width import WIDE_BITS, compiler_options

MEASURES = (
    "backends.cpu.backend.CORE_BYTES",
    "backends.cpu.backend.CORE_FLOPS",
    "backends.cpu.backend.PER_FUNCTION",
    "backends.cpu.backend.PER_BYTE",
    "backends.cpu.backend.FOLDED_BY_ONE",
)
COLUMNS = 4096


def apart(value: jax.Array) -> jax.Array:
    """The value as a kernel of its own, which the library does not compute inside its fold."""
    return lax.reduce_precision(value, 8, 23)


def light(x: jax.Array, y: jax.Array) -> jax.Array:
    """Rows of one difference and one function: fewer operations than bytes."""
    return jnp.sum(apart(jnp.sin(x[:, None] - y)), 1)


def polynomial(x: jax.Array, y: jax.Array) -> jax.Array:
    """The same of a function that vectors compute."""
    return jnp.sum(apart(jnp.exp(x[:, None] - y)), 1)


def dense(x: jax.Array, y: jax.Array) -> jax.Array:
    """Rows of more operations than bytes."""
    z = x[:, None] - y
    return jnp.sum(apart(((z * z + 0.5) * z + 0.25) * z + z * (z - 2.0) * (z + 3.0)), 1)


def folded(x: jax.Array, y: jax.Array) -> jax.Array:
    """Rows that the library computes and folds."""
    return jnp.sum(jnp.exp(x[:, None] - y), 1)


def loop(rows: int, of_rows: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., Any]:
    def program(x: jax.Array, y: jax.Array) -> jax.Array:
        def turn(t: jax.Array, out: jax.Array) -> jax.Array:
            mine = lax.dynamic_slice_in_dim(x, t * rows, rows)
            return lax.dynamic_update_slice_in_dim(out, of_rows(mine, y), t * rows, 0)

        return lax.fori_loop(0, x.size // rows, turn, jnp.zeros_like(x))

    return program


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each element of all chunks together."""
    wide = compiler_options(WIDE_BITS)
    for kind, options in ((light, None), (polynomial, None), (polynomial, wide), (dense, None), (folded, None)):
        name = f"{kind.__name__}, vectors of {WIDE_BITS} bits" if options else kind.__name__
        for rows in steps(tiny, 1, 2, 4, 8, 16, 32, 64, 128, 512):
            label = f"{name}, chunks of {rows * COLUMNS * 4 // 1024} KiB"
            yield Case(label, loop(rows, kind), [(COLUMNS,), (COLUMNS,)], float(COLUMNS**2), options=options or None)


if __name__ == "__main__":
    main("dealing")
