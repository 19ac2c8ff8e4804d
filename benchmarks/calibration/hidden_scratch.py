"""Growth of resident memory in programs whose kernel libraries take memory that XLA does not report.

python -m benchmarks.calibration.hidden_scratch
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from benchmarks.calibration.sweep import Case, main

MEASURES = (
    "backends.cpu.backend.DOUBT",
    *(f"backends.cpu.hidden_scratch.{name}" for name in ("STREAMED_ROWS", "WEIGHTED_ROWS", "LONE_AXIS", "PACKED", "PACKED_ELEMENTS")),
)


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are multiples of the value named, the result included; the table in the module of these constants has what was seen.

    How many contractions of a batch run at once depends on the threads: PJRT_NPROC says how many XLA:CPU has.
    """
    n, depth = (8, 2) if tiny else (4096, 16)
    square = 4.0 * n * n
    yield Case(f"sum exp(q k), {n} x {n}", lambda q, k: jnp.exp(q @ k.T).sum(1), [(n, depth)] * 2, square, watched=True)
    yield Case(f"sum exp(q k), {n // 2} x {n * 2}", lambda q, k: jnp.exp(q @ k.T).sum(1), [(n // 2, depth), (n * 2, depth)], square, True)
    yield Case("the same in a batch of 2", _attention_weights, [(2, n // 2, depth)] * 2, square / 2, watched=True)
    yield Case("two attentions, one of the other", _chained, [(2, n // 2, depth)] * 2, square / 2, watched=True)
    yield Case("a weighted sum of rows", lambda x, y, w: (jnp.abs(x[:, None] - y) * w).sum(1), [(n,)] * 3, square, watched=True)
    yield Case("a weighted sum of columns", lambda x, y, w: (jnp.abs(x[:, None] - y) * w[:, None]).sum(0), [(n,)] * 3, square, True)
    yield Case("a weighted sum of columns in memory", lambda x, w: jnp.sum(x * w[:, None], 0), [(n, n), (n,)], square, watched=True)
    for rows in (n, 2 * n, 16 * n):  # sums of many rows copy them
        shape = (rows, n * n // rows)
        yield Case(f"{rows} negated sums", lambda x: -jnp.sum(jnp.abs(x), 1), [shape], square, watched=True)
        yield Case(f"{rows} sums added to an array", lambda x, y: y + jnp.sum(jnp.abs(x), 1), [shape, (rows,)], square, watched=True)
    yield Case("products with a lone axis", lambda x, y: (x * y).sum(-1), [(1, n, n)] * 2, square, watched=True)
    yield Case("products without one", lambda x, y: (x * y).sum(-1), [(n, n)] * 2, square, watched=True)
    wide = ((extent, batch, extent) for batch, extent in ((8, 1024), (16, 1024), (4, 1024), (64, 512), (8, 512), (256, 128)))
    for extent, batch, columns in ((4, 2, 4), (4, 2, 3)) if tiny else (*wide, (1024, 8, 64), (512, 64, 64)):
        shapes, operands = [(batch, extent, extent), (batch, extent, columns)], 4.0 * batch * extent * (extent + columns)
        label = f"bki,bkj->bij, {batch} x {extent} x {extent} and {columns} columns"
        yield Case(label, lambda a, b: jnp.einsum("bki,bkj->bij", a, b), shapes, operands, watched=True)


def _attention_weights(q: Any, k: Any) -> Any:
    return jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k)).sum(-1)


def _chained(q: Any, k: Any) -> Any:
    first = jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k)) @ k
    return (jnp.exp(jnp.einsum("bqd,bkd->bqk", first, k)) @ k).sum()


if __name__ == "__main__":
    main("hidden_scratch")
