"""Costs of searches for the place of an extreme, of selections of the largest elements, whole and by blocks, and of sorts.

python -m benchmarks.calibration.searches
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax.numpy as jnp
from jax import lax

from benchmarks.calibration.sweep import Case, main, steps
from eqsat_mem.backends.cpu.top_k import top_k_by_blocks

MEASURES = tuple(
    f"backends.cpu.weights.{name}"
    for name in (
        "SHORT_SEARCH",
        "SEARCHED_TOGETHER",
        "SEARCHED_ALONE",
        "SELECTION",
        "REPLACEMENT",
        "GATHERED",
        "BLOCK_MAXIMUM",
        "COMPARED",
    )
)


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each element."""
    elements = 64 if tiny else 2**18
    for length in steps(tiny, 4, 8, 16, 24, 31, 32, 33, 48, 64, 128, 1024):
        shape = elements // length, length
        yield Case(f"argmin along {length}", partial(jnp.argmin, axis=1), [shape], float(shape[0] * length))
        yield Case(f"sort along {length}", partial(jnp.sort, axis=1), [shape], float(shape[0] * length))
    for length in (16,) if tiny else (512, 2048, 8192, 65536):
        for k in (1, 3) if tiny else (1, 4, 16, 64):
            shape = elements // length, length
            yield Case(f"top {k} of {length}", partial(lax.top_k, k=k), [shape], float(elements))
            yield Case(f"top {k} of {length} by blocks", partial(top_k_by_blocks, k=k), [shape], float(elements))


if __name__ == "__main__":
    main("searches")
