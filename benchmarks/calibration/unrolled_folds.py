"""Costs of folds that are written out term by term, against the same as folds: by their length, and beside functions.

python -m benchmarks.calibration.unrolled_folds
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from benchmarks.calibration.sweep import Case, main

MEASURES = tuple(f"backends.cpu.backend.{name}" for name in ("UNROLLED", "SPREAD", "CROWDED", "CROWDING", "STRIDED", "NOT_UNROLLED"))
FUNCTIONS: dict[str, Callable[[Any], Any]] = {"nothing": lambda x: x, "a root": jnp.sqrt, "an exponential": lambda x: jnp.exp(-x)}
"""Operations on the sum, from one that leaves registers to one that leaves none: below and above CROWDING."""
TURNS = 8


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each term of a sum: as a fold, written out, and written out in a loop over chunks of rows."""
    rows = 8 if tiny else 1024
    for depth in (2, 3) if tiny else (2, 3, 4, 8, 12, 16, 20, 24, 32, 64):
        for name, then in FUNCTIONS.items():

            def folded(x: Any, y: Any, then: Callable[[Any], Any] = then) -> Any:
                return then(jnp.sum(jnp.abs(x[:, None] - y[None]), -1))

            def written_out(x: Any, y: Any, then: Callable[[Any], Any] = then) -> Any:
                return then(sum(jnp.abs(x[:, None, d] - y[None, :, d]) for d in range(x.shape[1])))

            def in_loop(x: Any, y: Any, body: Callable[..., Any] = written_out) -> Any:
                return lax.map(lambda chunk: body(chunk, y), x.reshape(TURNS, -1, x.shape[1]))

            shapes = [(rows, depth), (rows, depth)]
            for how, function in (("as a fold", folded), ("written out", written_out), ("written out in a loop", in_loop)):
                yield Case(f"{depth} terms before {name}, {how}", function, shapes, float(rows * rows * depth))


if __name__ == "__main__":
    main("unrolled_folds")
