"""Formulas for how long operations take on a GPU, with figures that were measured on an H100 with JAX 0.11.2 (benchmarks/gpu_times.py).

Figures in seconds are those of that card: on others operations take as much longer as additions do. docs/xla-gpu.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from eqsat_mem.backends.gpu import habits
from eqsat_mem.backends.gpu.targets import Target
from eqsat_mem.ir.ops import Shapes
from eqsat_mem.ir.precision import rounds
from eqsat_mem.schedule.weights import BLOCKS, BlockWeight, Params

ELEMENTS = 24.9e12
"""Additions per second, and multiprocessors, of the card that was measured."""
MULTIPROCESSORS = 132

APART = 32.0
"""Additions that a term of a fold along contiguous axes takes at most: threads that read next to each other read rows apart, each from a
sector of its own."""
LONG_ROW, OF_LONG_ROW, SHORTER = 1024, 5.5, 0.635
"""A fold of a row of so many elements takes so many additions for each, and one of a part of that as many times more as the part to this
power."""
SHORT_ROW = 6.0
"""A row of ``n`` elements that a thread folds by itself takes 1 + n n / 6 additions for each: the more of them, the further apart are
those of threads side by side."""

TILE_BLOCKS, TILE_ELEMENTS, TILE_POWER = 2.7, 32, 0.6
"""A tile kernel whose threads keep so many elements each needs so many blocks for each multiprocessor to run at its full rate; of fewer
elements as many times more as the part to this power."""

SELECTED = 5.2e-6, 0.036e-6, 0.73e-6
"""Seconds of a multiprocessor in which 32 threads merge the 16 elements that each of them selects, and in which they look at one more each;
the seconds of that where a row is alone."""
SORTED, SHORTEST_SORTED = 1_600.0, 400
"""Additions for each element of a row that is sorted; shorter rows take as long as one of so many."""
COLUMN_S: Mapping[str, float] = MappingProxyType(
    {"cholesky": 0.4e-6, "triangular_solve": 0.3e-6, "lu": 1e-6, "qr": 3.8e-6, "householder_product": 3.8e-6, "eigh": 9.6e-6, "svd": 26e-6}
)
"""Seconds for each column of a matrix, one of which comes after the other. Of ``lu`` and ``householder_product`` guessed."""
SUBSTITUTED = 2.0
"""Times as long as a product of that size that a triangular system takes."""

CONVOLVED = 0.2
"""Times as long as float32 additions that the products of a convolution with rounded operands take."""

BY_TRITON: Mapping[str, float] = MappingProxyType({"full": 0.8, "rounded": 0.45, "double": 0.42, "narrow": 1.0})
"""The rate of products by Triton in shares of the libraries': of float32 numbers, of those rounded, of wider and of narrower ones."""
DEPTH = 32
"""A product whose contracted axis is so long runs at half of its rate."""


def row_fold_weight(extent: int, apart: float = APART, of_long_row: float = OF_LONG_ROW) -> float:
    """Additions for each element that a fold along contiguous axes combines.

    >>> [round(row_fold_weight(n), 1) for n in (1, 3, 5, 8, 16, 64, 1024, 16384)]
    [1.2, 2.5, 5.2, 11.7, 32.0, 32.0, 5.5, 1.0]
    """
    within_a_thread = 1 + extent**2 / SHORT_ROW
    return max(1.0, min(apart, within_a_thread, of_long_row * (LONG_ROW / max(extent, 1)) ** SHORTER))


def tile_blocks(elements: float) -> float:
    """Blocks for each multiprocessor with which tile kernels whose threads keep so many elements run at their full rate.

    >>> [round(tile_blocks(elements), 1) for elements in (4, 8, 32, 64)]
    [9.4, 6.2, 2.7, 1.8]
    """
    return TILE_BLOCKS * (TILE_ELEMENTS / elements) ** TILE_POWER


def top_k(target: Target) -> BlockWeight:
    """Additions of a selection by a kernel in which each thread of a row selects.

    Threads of a row are as many as XLA chooses (xla/stream_executor/cuda/topk_kernel).
    """

    def weight(ins: Shapes, outs: Shapes, params: Params) -> float:
        k, n, rows = max(int(params["k"]), 1), ins[0][-1], math.prod(ins[0][:-1])
        kept = 1 << (k - 1).bit_length()
        threads = min(512 * (16 // k), 1024, 1 << (n // kept).bit_length() - 1)
        merge, look, alone = SELECTED
        warps, steps = max(threads / 32, 1.0), n / threads
        merged = warps * merge * (kept / habits.TOP_K) ** 2
        seconds = max(rows / target.multiprocessors * (merged + warps * look * steps), merged + alone * steps)
        return seconds * ELEMENTS * target.multiprocessors / MULTIPROCESSORS

    return weight


def sorting(ins: Shapes, outs: Shapes, params: Params) -> float:
    """Additions of a sort along the last axis."""
    return SORTED * math.prod(ins[0][:-1]) * max(ins[0][-1], SHORTEST_SORTED)


def solver(name: str) -> BlockWeight:
    """Additions of a routine of linear algebra: those of its arithmetic, and those that would take as long as its columns one by one."""
    usual = BLOCKS[name]
    times = SUBSTITUTED if name == "triangular_solve" else 1.0
    return lambda ins, outs, params: times * usual(ins, outs, params) + min(ins[0][-2:]) * COLUMN_S[name] * ELEMENTS


def convolution(target: Target) -> BlockWeight:
    """Additions of a convolution, whose operands are rounded unless its author asks for more."""

    def weight(ins: Shapes, outs: Shapes, params: Params) -> float:
        is_rounded = target.rounds and rounds("float32", params.get("precision"))
        return BLOCKS["conv_general_dilated"](ins, outs, params) * (CONVOLVED if is_rounded else 1.0)

    return weight


def product_fill(k: int) -> float:
    """The share of its rate at which a product with a contracted axis of this length runs."""
    return k / (k + DEPTH)
