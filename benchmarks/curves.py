"""Time and memory of a kernel product against its size and against its limit: ``python -m benchmarks.curves``"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.kernels import product
from benchmarks.racing import Contest, Question, contests, main, table
from eqsat_mem.options import parse_bytes

SIZES = {"tiny": [200], "small": [2_048, 4_096, 8_192, 16_384, 32_768], "full": [4_096, 16_384, 65_536, 131_072]}
LIMITS = {
    "tiny": ["1MiB"],
    "small": ["1MiB", "4MiB", "16MiB", "64MiB", "256MiB", "1GiB", "4GiB"],
    "full": ["4MiB", "64MiB", "1GiB", "8GiB"],
}
LIMIT = "16MiB"
"""The limit where sizes vary."""


def make(scale: str) -> Iterator[Contest]:
    """Sizes under one limit, then limits at the middle size."""
    sizes = SIZES[scale]
    middle = sizes[len(sizes) // 2]
    for n, limit in [*((n, LIMIT) for n in sizes), *((middle, limit) for limit in LIMITS[scale] if limit != LIMIT)]:
        rng = np.random.default_rng(0)
        args = [rng.standard_normal(shape).astype(np.float32) for shape in ((n, 3), (n, 3), n)]
        varies = "limit" if limit != LIMIT else "size"
        yield Contest(f"n = {n:,}", {"n": n, "limit_bytes": parse_bytes(limit), "varies": varies}, args, limit, product)


QUESTION = Question("curves", "A kernel product against its size and its limit", contests(make, turns=3), table)

if __name__ == "__main__":
    main(QUESTION)
