"""The collectives of a compiled program by their kinds: how often each runs, and what each device receives by it."""

from __future__ import annotations

from collections import Counter

from eqsat_mem.backends.collectives import exchanged

KINDS = {
    "all-reduce": "psum",
    "all-gather": "all_gather",
    "reduce-scatter": "psum_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "ppermute",
}
"""XLA's collectives, and the functions of ``jax.lax`` that they come from (``pmax`` and ``pmin`` are all-reduces too)."""


def collectives(text: str, devices: int) -> dict[str, tuple[int, float]]:
    """How often each kind of collective runs in one call, and the bytes that a device receives by it."""
    times, received = Counter[str](), Counter[str]()
    for one in exchanged(text, devices):
        times[one.op] += one.times
        received[one.op] += one.received * one.times
    return {op: (times[op], received[op]) for op in times}
