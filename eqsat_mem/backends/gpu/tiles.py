"""Tile kernels in Mosaic GPU, JAX's own language for kernels on NVIDIA cards: which folds can be one, and what it costs.

The kernel is that of :func:`eqsat_mem.backends.gpu.tile_kernel.folded_pairs`. Instructions were counted in machine code for
sm_90a (JAX 0.11.2, ptxas 13.0); docs/xla-gpu.md has the counts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import ClassVar, Self

import jax
from jax.extend.core import ClosedJaxpr

from eqsat_mem.backends.gpu import measured, scratch
from eqsat_mem.backends.gpu.targets import Target
from eqsat_mem.backends.gpu.tile_kernel import HELPERS
from eqsat_mem.backends.gpu.weights import COUNTS, SPECIAL_LANES
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block, Call, Dot, Fold, Input, Literal, Map, Program, Term, bits
from eqsat_mem.ir.ops import picks
from eqsat_mem.schedule.device import Device
from eqsat_mem.schedule.sizes import extent_of
from eqsat_mem.schedule.tiles import Pairs, Tile, folding, is_place, pairs_of

OLDEST_JAX = (0, 11)
"""The first version whose kernels run in an interpreter, and so were checked: JAX's documentation
of releases."""
CAPABILITY = (9, 0)
"""The compute capability of these kernels in JAX's documentation."""
BLOCKS = ((128, 64), (64, 64), (64, 32), (64, 16), (64, 8))
"""Rows and columns of a block of 128 threads, by ascending instructions per pair. Rows come in groups of 64, columns of 8: JAX's
documentation of Mosaic GPU."""
THREADS = 128
"""Threads of a block, a warpgroup: JAX's documentation of Mosaic GPU."""
REGISTERS = 96
"""Registers of a thread for partial results and rows with which the rest was seen to fit as well: nothing is spilled in the
kernels that were compiled; what they cost is guessed."""
TURN = 8
"""Instructions of a turn over a block of columns besides those of its pairs: guessed."""
LEVEL = 12
"""Instructions of a turn for each row whose sums are brought to a new level: guessed."""
TAKEN_APART = 6
"""Instructions that bring a number of a column to all threads of its row: read from compiled programs of one to six numbers."""
MOST_PICKED = 4
"""Elements of a selection: more would leave registers for too few columns. Guessed."""
PICKED = 7.0
"""Instructions for each element that a selection keeps: read from compiled programs that keep one to four."""
FOLDS = frozenset({"add", "mul", "max", "min"})
"""The monoids whose combinations Mosaic compiles for all its numbers."""
APPROXIMATED: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"exp": (2.0, 1.0), "exp2": (1.0, 1.0), "sqrt": (2.0, 1.0), "rsqrt": (1.0, 1.0)}
)
"""Functions whose approximations by hardware are as exact as their operands: instructions, and those of the special-function unit,
as NVIDIA's documentation of PTX has them."""
INEXACT = frozenset({"log", "tanh"})
"""Functions whose approximations lose digits: a kernel with one of them computes all by software. (Sines
by software have so many steps that registers are spilled: they are none of these kernels.)"""
OTHERS = frozenset({"abs", "clamp", "div", "integer_pow", "logistic", "round", "sign", "square"})
"""Further operations on float32 that Mosaic compiles."""
SIMPLE = frozenset({"add", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "neg", "select_n", "sub"})
"""Those on int32 as well."""
LOGICAL = frozenset({"and", "or", "xor"})
"""Those on truth values: they are part of the comparisons that they join."""
NUMBERS = ("float32", "int32")
"""The dtypes of what kernels read and return; truth values there are between."""
CONVERTED = {("bool", "float32"), ("bool", "int32"), ("int32", "float32")}
"""Conversions that Mosaic compiles."""


def has_kernels() -> bool:
    """Whether the installed JAX compiles these kernels."""
    if jax.__version_info__[:2] < OLDEST_JAX:
        return False
    return importlib.util.find_spec("jax.experimental.pallas.mosaic_gpu") is not None


@dataclass(frozen=True)
class Tiles:
    """Tile kernels on a card."""

    target: Target

    platform: ClassVar[str] = "cuda"

    @classmethod
    def of(cls, target: Target) -> Self | None:
        """None where the card or the installed JAX has no such kernels."""
        return cls(target) if target.capability == CAPABILITY and has_kernels() else None

    def tile(self, ex: Extraction, step: int, members: Sequence[int], extents: Sequence[int], device: Device) -> Tile | None:
        """The fastest tile kernel of a fold; None if it cannot be one."""
        program = ex.program
        pairs = pairs_of(ex, step, members, extents, scratch.order)
        if pairs is None or not _compiles(program, pairs):
            return None
        approximate = INEXACT.isdisjoint(_operations(program, pairs))
        loads = _loads(program, pairs, extents)
        seconds = {
            block: self._seconds(program, pairs, block, extents, device, approximate)
            for block in BLOCKS
            if block[0] <= extents[pairs.rows]
            and block[1] <= extents[pairs.columns]
            and _registers(block, _numbers(program, pairs), loads[0] + bool(pairs.streamed)) <= REGISTERS
        }
        if not seconds:
            return None
        best = min(seconds, key=lambda block: seconds[block])
        return Tile(pairs, best, seconds[best], approximate, HELPERS, self.platform)

    def suits(self, program: Program, t: int) -> bool:
        """Whether a term is a fold that, for all that is known of itself, may be a tile kernel: it is then a kernel of its own."""
        how = folding(program, t)
        if how is None or not _is_known(program, program.terms[t]):
            return False
        rows, columns = (max((program.indices[i].extent for i in bits(mask)), default=0) for mask in (how.rest, how.over))
        return min(rows, columns) >= BLOCKS[-1][0]

    def _seconds(
        self, program: Program, pairs: Pairs, block: tuple[int, int], extents: Sequence[int], device: Device, approximate: bool
    ) -> float:
        rows, columns = extents[pairs.rows], extents[pairs.columns]
        batch = extent_of(extents, sum(1 << i for i in pairs.batch))
        blocks = batch * -(-rows // block[0])
        computed = blocks * block[0] * -(-columns // block[1]) * block[1]
        busy = min(1.0, blocks / (measured.tile_blocks(block[0] * block[1] / THREADS) * self.target.multiprocessors))
        issued = computed * self.instructions(program, pairs, block, extents, approximate)
        return (issued + blocks * THREADS * _last_instructions(program, pairs, block)) / (device.elements * busy)

    def instructions(self, program: Program, pairs: Pairs, block: tuple[int, int], extents: Sequence[int], approximate: bool) -> float:
        """Instructions of a thread for each pair. Special functions count as those that could begin meanwhile.

        What is there for columns alone a thread loads once for all its rows, two numbers at a time. An addition of a product is no
        instruction of its own.
        """
        levels = LEVEL * _rows(block) if pairs.streamed else 0.0
        issued, special = (TURN + levels) * THREADS / (block[0] * block[1]), 0.0
        issued += sum(_is_product(program, c) for c in pairs.folded[1:]) if pairs.streamed else 0  # brought to a new level, and added
        issued += sum(is_place(program, c, pairs.columns) for c in pairs.folded)
        for t in pairs.members:
            times = 1 if t in pairs.steps else extent_of(extents, program.free[t] & pairs.elements)
            counted = _instructions(program, t, extents, approximate, pairs.elements)
            issued, special = issued + times * counted[0], special + times * counted[1]
        issued += _loads(program, pairs, extents)[1] / _rows(block) / 2
        return max(issued, special * self.target.lanes / SPECIAL_LANES)


def _rows(block: tuple[int, int]) -> int:
    """The rows of a block that one thread works on: every 32nd, with a quarter of the columns."""
    return block[0] // 32


def _registers(block: tuple[int, int], numbers: int, of_rows: int) -> int:
    """Registers of a thread for partial results of so many numbers and for what it keeps of its rows."""
    return block[0] * block[1] // THREADS * numbers + of_rows * _rows(block)


def _last_instructions(program: Program, pairs: Pairs, block: tuple[int, int]) -> float:
    """Instructions of a thread by which it combines its partial results at the end, and takes tiles apart for that."""
    step = pairs.step
    term, own = program.terms[step], block[0] * (block[1] - 8) // THREADS + 7 * _rows(block)
    if isinstance(term, Block) and picks(term.call):
        each = PICKED * _picked(term) ** 2
    else:
        each = _instructions(program, step, (), True, 0)[0] if isinstance(term, Block) else float(len(pairs.steps))
    return own * each + 8 * TAKEN_APART * _rows(block) * _numbers(program, pairs)


def _numbers(program: Program, pairs: Pairs) -> int:
    """The numbers of a partial result for each pair; the maximum of what is streamed is one of each row."""
    term = program.terms[pairs.step]
    if isinstance(term, Block) and picks(term.call):
        return 2 * _picked(term)
    return len(pairs.folded) - bool(pairs.streamed)


def _picked(term: Block) -> int:
    """The number of elements that a selection returns."""
    return int(term.call.params["k"])


def _loads(program: Program, pairs: Pairs, extents: Sequence[int]) -> tuple[int, int]:
    """The numbers that a kernel loads for each row and for each column."""
    read = [program.free[read.term] for read in pairs.reads]
    rows, columns = (sum(extent_of(extents, free & pairs.elements) for free in read if free >> i & 1) for i in (pairs.rows, pairs.columns))
    return rows, columns


def _compiles(program: Program, pairs: Pairs) -> bool:
    """Whether Mosaic compiles the operations of a fold, and loads what it reads."""
    reads = all(str(program.terms[read.term].dtype) in NUMBERS for read in pairs.reads)
    return reads and all(_is_known(program, program.terms[t]) for t in pairs.members)


def _operations(program: Program, pairs: Pairs) -> Iterator[str]:
    """The elementwise operations of a kernel."""
    step = program.terms[pairs.step]
    combined = _combination(step.call).terms if isinstance(step, Block) and not picks(step.call) else ()
    return (term.op for term in (*(program.terms[t] for t in pairs.members), *combined) if isinstance(term, Map))


@lru_cache(maxsize=64)
def _combination(call: Call) -> Program:
    """The function by which a reduction combines two elements, as a program of numbers."""
    jaxpr = call.params["jaxpr"]
    closed = jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, call.params.get("consts", ()))
    return load(closed, [f"x{k}" for k in range(len(closed.in_avals))], passes=())


def _combines(term: Block) -> bool:
    """Whether Mosaic compiles the function by which a reduction combines elements, whose numbers it has."""
    program = _combination(term.call)
    computed = [step for step in program.terms if not isinstance(step, Input | Literal)]
    are_numbers = all(str(dtype) in NUMBERS for dtype in term.call.out_dtypes)
    return are_numbers and all(isinstance(step, Map) and _is_known(program, step) for step in computed)


def _is_known(program: Program, term: Term) -> bool:
    """Whether an operation is one that Mosaic compiles for operands of these dtypes."""
    if isinstance(term, Fold):
        return term.monoid in FOLDS and str(term.dtype) in NUMBERS
    if isinstance(term, Block):
        of_numbers = str(program.terms[term.args[0]].dtype) == "float32"
        return of_numbers and _picked(term) <= MOST_PICKED if picks(term.call) else _combines(term)
    if isinstance(term, Dot):
        return all(str(program.terms[t].dtype) == str(term.dtype) == "float32" for t in (term.lhs, term.rhs))
    if not isinstance(term, Map):
        return False
    of = [str(program.terms[a].dtype) for a in term.args]
    if term.op == "convert_element_type":
        return (of[0], str(term.dtype)) in CONVERTED
    if term.op == "integer_pow" and (power := dict(term.params)["y"]) < 2 and power != -1:
        return False  # Mosaic multiplies, and has the reciprocal
    kinds = {*of[term.op == "select_n" :], *({str(term.dtype)} - {"bool"})}
    if kinds == {"float32"}:
        return term.op in SIMPLE | OTHERS | INEXACT | APPROXIMATED.keys()
    return term.op in LOGICAL if kinds == {"bool"} else kinds == {"int32"} and term.op in SIMPLE


def _instructions(program: Program, t: int, extents: Sequence[int], approximate: bool, written_out: int) -> tuple[float, float]:
    """Instructions of one element of a term, and those of the special-function unit; folds fold what is ``written_out``."""
    term = program.terms[t]
    if isinstance(term, Dot):
        return float(extent_of(extents, term.over)), 0.0
    if isinstance(term, Fold):
        count = extent_of(extents, term.over & written_out)
        return (0.0 if term.monoid == "add" and _is_product(program, term.arg) else 1.0) * count, 0.0
    if isinstance(term, Block):
        if picks(term.call):
            return PICKED * _picked(term), 0.0
        own = _combination(term.call)
        each = [_instructions(own, u, (), approximate, 0) for u, step in enumerate(own.terms) if isinstance(step, Map)]
        return sum(issued for issued, _ in each), sum(special for _, special in each)
    assert isinstance(term, Map), "members are elementwise, or folds"
    if term.op in LOGICAL and str(term.dtype) == "bool":
        return 0.0, 0.0
    if term.op in ("add", "sub") and any(_is_product(program, a) for a in term.args):
        return 0.0, 0.0
    if approximate and term.op in APPROXIMATED:
        return APPROXIMATED[term.op]
    if term.op == "integer_pow":
        return max(1.0, abs(dict(term.params)["y"]).bit_length() - 1.0), 0.0
    counts = COUNTS.get(term.op, ((1.0, 0.0, 0.0),))[0]
    assert counts is not None, f"{term.op} has no count"
    return counts[0], counts[2]


def _is_product(program: Program, t: int) -> bool:
    term = program.terms[t]
    return isinstance(term, Map) and (term.op in ("mul", "square") or (term.op == "integer_pow" and dict(term.params)["y"] == 2))
