"""The programs of :mod:`benchmarks.programs`: plans against plain JAX and chunks by hand. ``python -m benchmarks.speed``"""

from __future__ import annotations

from collections.abc import Iterator

import jax

from benchmarks.programs import BENCHMARKS
from benchmarks.racing import Contest, Question, Row, main, race, table

TINY = ("low_rank_chain",)


def rows(scale: str) -> Iterator[Row]:
    """A race for each program under its limit."""
    for b in BENCHMARKS:
        if scale != "tiny" or b.name in TINY:
            with jax.enable_x64(b.x64):
                others = {} if b.by_hand is None else {"by hand": b.by_hand}
                loose = None if any(dtype == "bfloat16" for _, dtype in b.shapes) or b.name.startswith("nearest") else 1e-2
                contest = Contest(b.name, {}, b.arguments(), b.limit_bytes, b.function, others, tolerance=loose)
                yield race(contest, 2 if scale == "tiny" else 3)


QUESTION = Question("speed", "Programs as written, by hand, and planned", rows, table)

if __name__ == "__main__":
    main(QUESTION)
