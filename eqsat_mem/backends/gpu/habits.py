"""Decisions of XLA:GPU by arithmetic on extents: which products become folds, into how many parts folds and products are cut, and padding.

Found with compiled programs of JAX 0.10.2 by bisection, and checked against the compiler where that is installed;
docs/xla-gpu.md has all that was found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import jax

from eqsat_mem.backends.gpu.targets import Target

VECTOR_ELEMENTS = 10**7
"""A matrix times a vector is a fold of products, and fused like one, if both have fewer elements than this together;
in float64 it always is. Sweep: benchmarks/gpu_model.py --thresholds."""
ROW_FOLD, COLUMN_FOLD = 2**14, 2**12
"""More elements than this are folded in two passes: along the last axis, and along another.
Sweep: benchmarks/gpu_model.py --thresholds."""
STREAMED_ROW = 2**14
"""Rows of up to so many elements that are folded and then computed with, as in a softmax, are one kernel, and
nothing of it is in memory. Sweep: benchmarks/gpu_model.py --thresholds."""
INNER_FOLD = 16
"""A fold of fewer elements is computed inside the fold that reads it. (Where the outer one has up to 10^6 results,
from about half as many on it is not.) Sweep: benchmarks/gpu_model.py --thresholds."""
LOOPED_FOLD = 32
"""A fold of fewer elements is computed as a loop inside an elementwise kernel, unless it is of a power of two.
Sweep: benchmarks/gpu_model.py --thresholds."""
SEARCHED_FOLD = 64
"""A fold of fewer elements is computed inside a search (argmin and the like) that reads it. It is below
what was seen of searches with many results; in one of 1000 x 1000, folds of 8 have a kernel of their own.
Sweep: benchmarks/gpu_model.py --thresholds."""
TOP_K, TOP_K_ROW = 16, 1024
"""Up to so many of a row of at least so many numbers are selected without scratch; else the row is sorted.
Sweep: benchmarks/gpu_model.py --thresholds."""
SELECTED = frozenset({"float32", "bfloat16"} if jax.__version_info__ < (0, 11) else {"float32"})
"""The dtypes of such rows; those of others are sorted, since JAX 0.11 also bfloat16. Sweep: benchmarks/gpu_model.py --only selection."""
MERGED_BYTES = 2**26
"""Products of one matrix with several are one product if one of them takes no more bytes than this, with its other operand
(JAX 0.11; with both of its operands in 0.10). Sweep: benchmarks/gpu_model.py --thresholds."""

WRITTEN, READ, EACH_TIME, WRITTEN_FAR, READ_FAR, NARROW = 4.9, 9.0, 5.5, 1.0, 14.0, 0.2
"""The additions that take as long, as XLA estimates, as writing four bytes, as reading them in a kernel, and as each time that it reads
them; and as writing them and each reading where the cache does not hold the array. What share of all that a single byte takes. Two
operations more or less. Sweep: benchmarks/gpu_model.py --thresholds."""

JOINED = 45.0
"""The additions from which on a value is written out that an elementwise kernel and a fold read which become one, each in place of the
other's share: 48 to 50 with one fold by rows, 41 to 42 with two, read from compiled programs of 1000 x 4096 to 8192 x 8192."""

SPREAD_COST: Mapping[str, int] = MappingProxyType(
    {"sin": 350, "cos": 350, "tan": 350, "pow": 140, "tanh": 112, "atan2": 105, "log1p": 88, "log": 75, "exp": 30}
)
"""Operations that XLA counts an operation as where an elementwise kernel would repeat it: read from compiled programs of one to four
functions, on matrices of 128 to 4096 rows."""
HIDDEN, SAVED, STARTED = 70, 70, 3e7
"""The operations that such a kernel does while it reads and writes an element, those that take as long as writing an element and reading
it, and as starting a kernel: read from compiled programs, too."""


def is_computed_where_spread(elements: int, spread: int, cost: int) -> bool:
    """Whether an elementwise kernel computes a value of so many elements, each at such a cost, as often as it is spread along other axes.

    >>> [is_computed_where_spread(n * n, 2, SPREAD_COST["pow"]) for n in (512, 1024)]
    [True, False]
    >>> [is_computed_where_spread(2**20, spread, SPREAD_COST["tanh"]) for spread in (2, 8)]
    [True, False]
    """
    return cost <= HIDDEN + (SAVED + STARTED / elements) / spread


def is_computed_again(kernels: int, broadcast: int, work: float, width: int, in_cache: bool = True) -> bool:
    """Whether so many kernels, which read each element so often, compute a value for themselves, so that it is not in memory.

    Args:
        kernels: those that read it.
        broadcast: the elements that each makes of one.
        work: the additions that one element takes, as XLA estimates.
        width: bytes of one element. Two are widened to four before they are folded; more than four were not measured, and count as these.
        in_cache: whether the array would be in the L2 cache.

    >>> [is_computed_again(2, 1, work, 4) for work in (33, 34)], [is_computed_again(1, 3, work, 4) for work in (15, 16)]
    ([True, False], [True, False])
    >>> [is_computed_again(1, 3, work, 4, in_cache=False) for work in (21, 22)]
    [True, False]
    """
    near, far = READ + EACH_TIME * broadcast, READ_FAR * broadcast
    traffic = WRITTEN + kernels * near if in_cache else WRITTEN_FAR + kernels * far
    return (kernels * broadcast - 1) * work <= traffic * (NARROW if width == 1 else 1.0)


def vector_is_fold(matrix: int, vector: int, itemsize: int) -> bool:
    """Whether a matrix times a vector is a fold of products: it then holds no operand that is computed elementwise.

    Args:
        matrix: elements of the matrix, batch axes left out.
        vector: elements of the vector, likewise.
        itemsize: bytes of one element.
    """
    return itemsize == 8 or matrix + vector < VECTOR_ELEMENTS


def is_looped(extent: int) -> bool:
    """Whether a fold has no kernel of its own where an elementwise kernel reads it.

    >>> [extent for extent in (2, 3, 4, 15, 16, 31, 33) if is_looped(extent)]
    [3, 15, 31]
    """
    return extent < LOOPED_FOLD and not is_power_of_two(extent)


def is_power_of_two(extent: int) -> bool:
    """Whether an extent is a power of two: XLA makes a kernel of such a fold where it computes those of other extents inside a reader."""
    return extent.bit_count() == 1


def fold_parts(extent: int, last: bool) -> int:
    """The number of partial results that a fold leaves of each element: 1 where it takes one pass. Along the last axis this is an upper
    bound.

    A long axis is cut into about as many parts as each has elements: the number between half the square root and the
    root that pads the axis least, powers of two first among equals. Along the last axis XLA may swap the number of
    parts and their length, for reasons not found out.

    >>> fold_parts(16_384, last=True), fold_parts(16_384, last=False)
    (1, 128)
    """
    if extent <= (ROW_FOLD if last else COLUMN_FOLD):
        return 1
    root = math.isqrt(extent)
    best = root
    for parts in range(root - 1, root // 2, -1):
        padding, least = -extent % parts, -extent % best
        if padding < least or (padding == least and parts.bit_count() == 1):
            best = parts
    length = -(-extent // best)
    return max(best, length) if last and not _even_cut(extent, best) else best


def _even_cut(extent: int, parts: int) -> bool:
    """Whether an axis is cut into equal parts of even length, which XLA was never seen to swap with their number."""
    return extent % parts == 0 and extent // parts % 2 == 0


@dataclass(frozen=True)
class _Weights:
    """Of XLA's estimate of a product: reading and writing, adding up parts, starting to. Arithmetic weighs 100 for
    each operation."""

    memory: float
    parts: float
    start: float


def _weights(target: Target) -> _Weights:
    if target.capability >= (10, 0):
        return _Weights(0.0848863, 189.711, 1.21563e8)
    if target.capability >= (9, 0):
        return _Weights(0.194136, 193.1384, 4.36e7)
    return _Weights(0.0666955, 467.815, 5.65307e7)


ARITHMETIC, TILE, MOST_PARTS = 100.0, 128, 2**11
"""Of the same estimate: the weight of an operation, rows and columns of a block, and the most parts. Like the weights
above, found from the parts into which products of many sizes are cut: benchmarks/gpu_model.py --only products."""


@lru_cache(maxsize=2**14)
def product_parts(batch: int, m: int, n: int, k: int, itemsize: int, target: Target) -> int:
    """Into how many parts a Triton kernel cuts the contracted axis; each leaves a result, of float32 or wider,
    before they are added up.

    XLA takes the power of two for which it estimates the least time (xla/backends/gpu/transforms/splitk_rewriter.cc,
    2026): the longer of arithmetic, in tiles of 128 x 128 that all multiprocessors share, and of memory traffic; and
    for more parts than one the time to add them up.

    Args:
        batch, m, n, k: extents of the product.
        itemsize: bytes of an element of the operands, before they are widened.
        target: the card.
    """
    candidates = [2**e for e in range(MOST_PARTS.bit_length())]
    return min(candidates, key=lambda parts: _product_cost(batch, m, n, k, itemsize, parts, target))


def _product_cost(batch: int, m: int, n: int, k: int, itemsize: int, parts: int, target: Target) -> float:
    weights, wide = _weights(target), max(itemsize, 4)
    rows, columns = min(m, TILE), min(n, TILE)
    tiles = batch * parts * -(-m // TILE) * -(-n // TILE)
    waves = max(1.0, tiles / (target.multiprocessors * TILE * TILE / (rows * columns)))
    arithmetic = 2.0 * rows * columns * -(-k // parts) * waves * ARITHMETIC
    written = batch * parts * m * n * (wide if parts > 1 else itemsize)
    seconds = max(arithmetic, (batch * k * (m + n) * itemsize + written) * weights.memory)
    if parts == 1:
        return seconds
    return seconds + weights.start + (written + batch * m * n * itemsize) * weights.parts


def padded_contraction(k: int, parts: int, itemsize: int) -> int:
    """The extent to which the contracted axis is padded, both operands being written out, so that parts are equal
    and begin at 16 bytes; ``k`` if none is."""
    if parts == 1:
        return k
    step = parts * max(16 // itemsize, 1)
    return -(-k // step) * step


def product_scratch(batch: int, m: int, n: int, k: int, itemsize: int, target: Target) -> int:
    """Bytes that a product by a Triton kernel holds besides operands and result: padded operands and partial results.

    >>> from eqsat_mem.backends.gpu.targets import named
    >>> product_scratch(1, 64, 64, 1_000_000, 4, named("h100"))
    521142272
    """
    parts = product_parts(batch, m, n, k, itemsize, target)
    if parts == 1:
        return 0
    padded = padded_contraction(k, parts, itemsize)
    operands = batch * padded * (m + n) * itemsize if padded != k else 0
    return operands + batch * parts * m * n * max(itemsize, 4)


def is_selected(k: int, row: int, dtype: object) -> bool:
    """Whether the largest ``k`` of rows of so many elements are selected by a kernel, and not found by sorting the rows."""
    return k <= TOP_K and row >= TOP_K_ROW and str(dtype) in SELECTED
