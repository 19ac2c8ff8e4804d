"""Seconds: a roofline of contraction rate, elementwise rate, memory traffic by cache level and overheads.

Every kernel takes the longer of its arithmetic and its memory traffic, plus a launch overhead; a loop takes its body as often as it runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from eqsat_mem.backends.cpu.vector_width import USUAL_BITS, machine_bits
from eqsat_mem.ir import Block, Const, Dot, DotPlus, Fold, Input, Iota, Literal, Map, Program, Rename, bits, children, itemsize
from eqsat_mem.ir.ops import block_weight, map_row
from eqsat_mem.ir.precision import of_rules, rounds


class Folds(StrEnum):
    """How a device folds what is computed elementwise: with all that makes it, or in a kernel library, as XLA:CPU does.

    The library computes the operations that it knows while it folds, or none and folds arrays: that depends on the version of XLA.
    """

    FUSED = "fused"
    LIBRARY = "library"
    ARRAYS = "arrays"

    @property
    def by_library(self) -> bool:
        return self is not Folds.FUSED


@dataclass(frozen=True)
class Device:
    """What a device does per second. Rates are for all cores together.

    ``flops`` counts multiplications and additions of float32 contractions computed in full, ``narrow_flops`` those of two-byte numbers; a
    contraction whose operands are rounded (:mod:`eqsat_mem.ir.precision`) runs at half of the latter.
    ``elements`` counts elementwise additions of 4-byte numbers; ``levels`` pairs a capacity in bytes with the bytes per second of data that
    fits it, smallest first, ending with main memory. ``reduce_weight`` is the cost of folding one element in additions, and
    ``short_reduce_weight`` that along an axis too short for vector registers. The rows of a
    contraction are dealt to ``matrix_cores``. An allocation of ``reused_bytes`` or more is new memory in every run, which the system
    hands out, and clears, at ``fresh_rate`` bytes per second; a smaller one is what the run before has left.
    ``folds``: see :class:`Folds`. ``vector_bits``: for how wide vectors plans are compiled (:mod:`eqsat_mem.backends.cpu.vector_width`).
    """

    name: str
    flops: float
    narrow_flops: float
    elements: float
    levels: tuple[tuple[float, float], ...]
    kernel_s: float
    iteration_s: float
    reduce_weight: float
    short_reduce_weight: float
    matrix_cores: int
    reused_bytes: float
    fresh_rate: float
    folds: Folds
    vector_bits: int

    def level(self, working_set: float) -> int:
        """The first level of the memory that holds so many bytes, or the last."""
        return next((k for k, (capacity, _) in enumerate(self.levels) if working_set <= capacity), len(self.levels) - 1)

    def bandwidth(self, working_set: float) -> float:
        return self.levels[self.level(working_set)][1]

    def fresh_s(self, allocated: float) -> float:
        """Seconds that the system takes to hand out an allocation of so many bytes."""
        return allocated / self.fresh_rate if allocated >= self.reused_bytes else 0.0


def _cache_bytes(level: int) -> int | None:
    """Size of this machine's cache of a level, from Linux's description of its first core."""
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            if int((folder / "level").read_text()) == level and (folder / "type").read_text().strip() != "Instruction":
                text = (folder / "size").read_text().strip()
                return int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]]
        except (OSError, ValueError, KeyError):
            continue
    return None


def cpu() -> Device:
    """The built-in profile of a CPU, from its number of cores and cache sizes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    l2 = (_cache_bytes(2) or 2**20) * cores
    l3 = _cache_bytes(3) or 16 * 2**20
    return Device(
        name=f"cpu ({cores} cores)",
        flops=225e9 * cores,
        narrow_flops=450e9 * cores,
        elements=50e9 * cores,
        levels=(
            (l2 / 2, 90e9 * cores),
            (l2, 75e9 * cores),
            (0.45 * l3, 65e9 * cores),
            (l3, 20e9 * cores),
            (math.inf, 15e9 * cores),
        ),
        kernel_s=1e-6,
        iteration_s=2e-6,
        reduce_weight=9.0,
        short_reduce_weight=35.0,
        matrix_cores=cores,
        reused_bytes=32 * 2**20,
        fresh_rate=4e9,
        folds=Folds.LIBRARY,
        vector_bits=machine_bits(),
    )


def gpu() -> Device:
    """The built-in profile of a data-centre GPU."""
    return Device(
        name="gpu",
        flops=45e12,
        narrow_flops=700e12,
        elements=15e12,
        levels=((40 * 2**20, 6e12), (math.inf, 2e12)),
        kernel_s=4e-6,
        iteration_s=12e-6,
        reduce_weight=1.0,
        short_reduce_weight=2.0,
        matrix_cores=64,
        reused_bytes=80 * 2**30,
        fresh_rate=2e12,
        folds=Folds.FUSED,
        vector_bits=USUAL_BITS,
    )


def device_for(platform: str) -> Device:
    return cpu() if platform == "cpu" else gpu()


CORE_ROWS, CORE_COLUMNS = 64, 512
"""A core of its own is worth so many rows of a contraction's result, fewer if they are longer than so many columns."""
SPREAD, CROWDED = 0.4, 0.9
"""The cost of an addition or a product in an unrolled fold: its terms do not wait for one another, as those of the unit do, and products
are added as they are made. The second is that beside a function of many operations, which leaves no registers for several elements."""
FUNCTION = 16
"""The weight from which on an operation is such a function: a polynomial, where a root is one instruction."""
LONG_ROW, PER_LONG_ROW = 2**16, 250.0
"""Where rows of a result have more bytes than this, XLA:CPU's library takes so many additions for each element that it folds along an axis
before theirs. Other folds are as fast as those along rows: 48 rows of 16,384 or 32,772 float32 numbers are added in 0.3 or 8 ms."""
SHORT = 32
"""A reduction over fewer elements than this does not fill vector registers along its axis."""


def spread_weight(program: Program, members: Iterable[int]) -> float:
    """The cost of an addition of an unrolled fold in the kernel of these terms."""
    maps = (term for t in members if isinstance(term := program.terms[t], Map))
    return CROWDED if any(_weight(term) >= FUNCTION for term in maps) else SPREAD


def arithmetic_s(program: Program, t: int, extents: Sequence[int], device: Device, spread: float | None = None) -> float:
    """Seconds of arithmetic of one term at the given extents of its indices, its operands ready.

    ``spread``: the cost of an addition, where it is a fold that is written out element by element, or is itself written out once for
    each element of one.
    """
    term = program.terms[t]
    out = _product(extents, program.free[t])
    width = itemsize(term.dtype) / 4
    match term:
        case Map():
            weight = _weight(term)
            return out * width * (weight if spread is None or weight > 1 else weight * spread) / device.elements
        case Fold():
            count = _product(extents, program.free[term.arg] & term.over)
            weight = device.short_reduce_weight if count < SHORT else device.reduce_weight
            row = _product(extents, program.free[t] & -1 << term.over.bit_length()) * itemsize(term.dtype)
            if device.folds.by_library and row > LONG_ROW:
                weight = PER_LONG_ROW
            weight = weight if spread is None else spread
            return out * count * width * weight / device.elements
        case Dot():
            return dot_s(program, term, extents, device)
        case DotPlus():
            return _dot_plus_s(program, term, extents, device)
        case Block():
            ins = [_shape(extents, axes) for axes in term.call.in_axes]
            outs = [_shape(extents, axes) for axes in term.call.out_axes]
            return block_weight(term.call, ins, outs) * width * (1.0 if spread is None else spread) / device.elements
    return 0.0


def _weight(term: Map) -> float:
    """The cost of one element in additions; a positive power costs the products that it is made of."""
    power = dict(term.params).get("y", 0) if term.op == "integer_pow" else 0
    return max(power.bit_length() + power.bit_count() - 2, 1) if power > 0 else map_row(term).weight


def dot_s(program: Program, term: Dot, extents: Sequence[int], device: Device) -> float:
    """A contraction at the matrix unit's rate, less where a side is too thin to fill it, or has too few rows for all cores.

    A CPU's library puts the columns in an order of its own first, for however few rows.
    """
    left, right = program.free[term.lhs], program.free[term.rhs]
    rows, columns = (left, right) if _first(left & ~right) < _first(right & ~left) else (right, left)
    m, n = (_product(extents, side & ~other & ~term.over) for side, other in ((rows, columns), (columns, rows)))
    k = _product(extents, (rows | columns) & term.over)
    batch = _product(extents, rows & columns & ~term.over)
    width = itemsize(term.dtype) / 4
    fill = m / (m + 2) * n / (n + 12) * k / (k + 8)
    busy = min(device.matrix_cores, max(1.0, m / CORE_ROWS * max(1.0, n / CORE_COLUMNS))) / device.matrix_cores
    products = 2.0 * batch * m * n * k
    vector = products * width / 2 * (1 + device.reduce_weight) / device.elements
    if m == n == 1:  # no matrix: XLA multiplies elementwise, having copied an operand into the layout of the other
        return 2 * vector
    packing = batch * k * n * itemsize(term.dtype) / device.levels[-1][1] if device.folds.by_library else 0.0
    return min(products / (_contraction_rate(term, device) * max(fill * busy, 1e-3)) + packing, vector)


def _dot_plus_s(program: Program, term: DotPlus, extents: Sequence[int], device: Device) -> float:
    """An augmented contraction as extraction sees it: the contraction and the sums that are joined to its operands.

    What the columns take that hold these sums is left out, for they save digits: where rules expand a distance, its sums are part of
    the contraction also where adding them to its result would be as fast.
    """
    product = Dot(term.dtype, term.over, term.lhs, term.rhs, of_rules(term.dtype))
    sums = sum(_product(extents, program.free[s]) for s in (term.left, term.right)) * itemsize(term.dtype) / 4
    return dot_s(program, product, extents, device) + sums * device.reduce_weight / device.elements


def _contraction_rate(term: Dot, device: Device) -> float:
    """Multiplications and additions per second of a contraction that fills the matrix unit."""
    width = itemsize(term.dtype)
    if width <= 2:
        return device.narrow_flops * 2 / width
    return (device.narrow_flops / 2 if rounds(term.dtype, term.precision) else device.flops) * 4 / width


def _first(mask: int) -> float:
    """The first index of a set: it stands first in arrays."""
    return (mask & -mask).bit_length() or math.inf


def term_seconds(program: Program, t: int, unrolled: bool = False, device: Device | None = None) -> float:
    """Seconds of one term at full extents as if its tiles stayed in cache: what extraction minimises.

    Only terms that are computed cost anything; leaves and renames are reads.
    """
    term = program.terms[t]
    if isinstance(term, (Input, Const, Iota, Literal, Rename)):
        return 0.0
    device = device or default_device()
    seconds = arithmetic_s(program, t, [i.extent for i in program.indices], device, CROWDED if unrolled else None)
    touched = program.nbytes(t) + sum(program.nbytes(c) for c in children(term)) if isinstance(term, (Dot, DotPlus, Block)) else 0
    return seconds + touched / device.levels[1][1]


@cache
def default_device() -> Device:
    return cpu()


def _product(extents: Sequence[int], mask: int) -> int:
    return math.prod(extents[i] for i in bits(mask))


def _shape(extents: Sequence[int], axes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(math.prod(extents[i] for i in axis) for axis in axes)
