"""XLA:CPU as a backend: its kernel library, its order of kernels, what it allocates, and what takes it long."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from jax.extend.core import ClosedJaxpr

from eqsat_mem.backends import hlo
from eqsat_mem.backends.cpu import fusion, kernel_library, layouts, weights
from eqsat_mem.backends.cpu.convolutions import convolution_bytes
from eqsat_mem.backends.cpu.hidden_scratch import (
    held_for_parts,
    held_for_weights,
    hidden_scratch_bytes,
    is_compiled,
    is_seen,
    partial_bytes,
    workspace_bytes,
)
from eqsat_mem.backends.cpu.idioms import CpuIdioms
from eqsat_mem.backends.cpu.profile import CpuDevice, built_in
from eqsat_mem.backends.cpu.vector_width import USUAL_BITS, compiler_options, computes_angles
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.frontend.preferences import Preferences
from eqsat_mem.ir import Block, Dot, Fold, Map, Program, Term, bits, is_leaf, itemsize
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.checks import Hidden
from eqsat_mem.schedule.fusion import Fused
from eqsat_mem.schedule.idioms import Idioms
from eqsat_mem.schedule.kernel import Kernel
from eqsat_mem.schedule.sizes import extent_of
from eqsat_mem.schedule.ties import BitTie, Tie
from eqsat_mem.schedule.weights import RANDOM_DRAWS, Weights

# --- time

LONG_ROW, PER_LONG_ROW = 2**16, 250.0
"""Folds along rows of more than ``LONG_ROW`` bytes of the result take ``PER_LONG_ROW`` additions per element in the kernel library.
Other folds are as fast as those along rows: 48 rows of 16,384 or 32,772 float32 numbers are added in 0.3 or 8 ms. Sweep:
benchmarks/calibration/long_rows.py."""
UNROLLED = 16
"""Elements of a fold or a search up to which it may be written out: benchmarks/calibration/unrolled_folds.py."""
SPREAD, CROWDED = 0.4, 0.9
"""The cost of an addition or a product in an unrolled fold: its terms do not wait for one another, as those of the unit do, and products
are added as they are made. The second is that beside a function of many operations, which leaves no registers for several elements.
Measured: benchmarks/calibration/unrolled_folds.py."""
CROWDING = 16
"""The weight from which on an operation is such a function: a polynomial, where a root is one instruction.
Measured: benchmarks/calibration/unrolled_folds.py."""
SHORT = 32
"""A fold over fewer elements than this does not fill vector registers along its axis: benchmarks/calibration/folds.py."""
CORE_WORK = 6e6
"""Multiplications of one product of matrices that occupy one core, be it alone or one of a batch, whose products follow one another:
benchmarks/calibration/small_contractions.py."""
THIN_ROWS, THIN_DEPTH = 2, 8
"""Rows of a contraction's result, and elements of its contracted axis, that run at half the full rate:
benchmarks/calibration/small_contractions.py."""
PANEL = 16
"""Columns of the right operand that the kernel library copies in no more time than two: products of 2 rows with 16,384 rows of 2 to 16
columns take 48 to 58 us, a vector 37. Measured: benchmarks/calibration/small_contractions.py."""
AT_ONCE_BYTES, AT_ONCE = 2**15, 0.2
"""A kernel whose result has at most so many bytes is run by the thread that comes to it, for this share of what it takes to deal out
another; the next step of a loop of the user's takes as little. Measured: benchmarks/calibration/small_kernels.py."""
STRIDED = 1.5
"""The factor by which unrolled folds take longer outside of loops, where XLA:CPU fuses the strided reads of their operands into them.
Measured: benchmarks/calibration/unrolled_folds.py."""
SHORT_ROW, VECTOR, UNEVEN = 240, 16, 2.0
"""The factor by which elementwise operations take longer in loops that write rows shorter than so many elements, which vectors of so many
do not divide. Measured, 1.3 to 5: benchmarks/calibration/row_lengths.py."""
NOT_UNROLLED = 5.0
"""The factor by which the same folds take longer in a program as written, which XLA:CPU does not unroll. Measured:
benchmarks/calibration/unrolled_folds.py."""
BY_COLUMNS = 75.0
"""Additions per element of a matrix that XLA:CPU writes by columns for a library, and by rows again:
benchmarks/calibration/linear_algebra.py."""
STALL = 9
"""The factor by which a fold that stalls takes longer (see :data:`eqsat_mem.backends.cpu.fusion.LONG`). Measured:
benchmarks/calibration/long_folds.py."""
CORE_BYTES, CORE_FLOPS, PER_FUNCTION, PER_BYTE = 2**18, 1e5, 2, 10
"""XLA cuts an elementwise kernel into parts of so many bytes, read and written; one with more operations than bytes into parts of so many
operations, where a function and a byte count as some. As many cores work on it. Measured: benchmarks/calibration/dealing.py."""
FOLDED_BY_ONE = 2**16
"""The kernel library folds fewer elements than this on one core: benchmarks/calibration/dealing.py."""
DRAWN_BY_ONE, DEALT_DRAWS_S = 2**11, 5e-5
"""Fewer random numbers than this are drawn by one core; to deal the kernels that draw more to all cores takes so many seconds. Measured:
benchmarks/calibration/draws.py."""
DEALT = 2**16
"""A contraction with more results than this is distributed to all cores by the kernel library:
benchmarks/calibration/small_contractions.py."""

DOUBT = 2
"""The factor by which the estimated scratch of kernel libraries counts: chains of contractions took twice the estimate. Measured:
benchmarks/calibration/hidden_scratch.py."""
UNOPTIMISED: Mapping[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": "1",
}
"""Options of a compilation that is only asked how much memory the program holds: XLA:CPU assigns buffers before it generates machine
code, and takes the shortest way there. Without its fusion emitters a scatter becomes a loop, whose counters are some hundred bytes."""


BLIND = (
    "What this version of jaxlib hands to its kernel library is not recognised, so memory that the library takes for itself is not in "
    "the compiled peak: leave room below the limit, or use a version of jaxlib that the README names."
)
UNREAD = (
    "Of the compiled program, {} instructions cannot be read ({} ...), so memory that a kernel library or LAPACK takes for them is not in "
    "the compiled peak: leave room below the limit, or use a version of jaxlib that the README names."
)

_USUAL, _PLAIN, _BITWISE = CpuIdioms(), CpuIdioms(keeps_apart=False), CpuIdioms(keeps_apart=False, keeps_bits=True)


@dataclass(frozen=True)
class CpuBackend(Backend):
    """XLA:CPU.

    Attributes:
        device: the figures of the processor.
        fuses_operands: False for versions of XLA:CPU that materialise the operands of folds.
        keeps_heavy: whether emitted source keeps the operands of folds that take many operations out of the kernel library.
        keeps_bits: whether source may only be written so that every bit stays.
        repeats_apart: whether emitted source makes what several kernels repeat along other axes anew for each.
        has_planes: whether emitted source has convolutions along three axes plane by plane.
    """

    device: CpuDevice
    fuses_operands: bool = True
    keeps_heavy: bool = True
    keeps_bits: bool = False
    repeats_apart: bool = True
    has_planes: bool = True

    platform: ClassVar[str] = "cpu"
    tie: ClassVar[Tie] = BitTie()
    begins_loops_ahead: ClassVar[bool] = True
    adds_at_once: ClassVar[bool] = True
    turns_computed: ClassVar[bool] = True
    scatters_far: ClassVar[bool] = False  # gloo's reduce-scatter gives up after 30 s, where others wait for a late process
    room_toll: ClassVar[float] = 0.1  # libraries take memory that is not predicted
    needless_rules: ClassVar[tuple[str, ...]] = ("dot-with-vector", "dot-of-few-results")  # the library contracts faster than it folds
    unrolled_elements: ClassVar[int] = UNROLLED
    unrolled_weight: ClassVar[float] = SPREAD
    crowded_weight: ClassVar[float] = CROWDED
    crowding_weight: ClassVar[float] = CROWDING
    short_fold: ClassVar[int] = SHORT
    rereads: ClassVar[frozenset[str]] = frozenset({"top_k"})  # by blocks: their maxima, then the blocks that are chosen

    @classmethod
    def built_in(cls) -> Self:
        """The backend with this machine's built-in profile."""
        return cls(built_in())

    @property
    def weights(self) -> Weights:  # type: ignore[override]  # depends on the device
        return weights.table(self.device.function_factor, self.has_planes)

    @property
    def preferences(self) -> Preferences:
        return Preferences(self.platform, weights.SHORT_SEARCH)

    @property
    def idioms(self) -> Idioms:
        return _BITWISE if self.keeps_bits else _USUAL if self.keeps_heavy else _PLAIN

    def keeping_bits(self) -> Self:
        return replace(self, keeps_bits=True, keeps_heavy=False, has_planes=False)

    def variants(self, ex: Extraction) -> tuple[Self, ...]:
        """Also with operands of folds in the library's fusion: those that are kept out need memory, and where there is little of it chunks
        become so small that they take longer. What is summed with weights takes as much inside."""
        if not (self.keeps_heavy and self.fuses_operands):
            return (self,)
        may_help = any(kernel_library.weighted(ex.program, fold) is None for fold in kernel_library.heavy_folds(ex, self))
        return (self, replace(self, keeps_heavy=False)) if may_help else (self,)

    def plain(self) -> Self:
        return replace(self, keeps_heavy=False, repeats_apart=False, has_planes=False)

    def as_emitted(self, ex: Extraction) -> Extraction:
        """Less the folds written out whose elements readers repeat: XLA computes what is elementwise and cheap again for each of these."""
        repeated = fusion.repeated_folds(ex, self.is_cheap)
        return replace(ex, unrolls={t: over for t, over in ex.unrolls.items() if t not in repeated}) if repeated else ex

    def among(self, devices: int) -> Self:
        """Virtual devices share the cores, and their caches; each has its part of all rates."""
        own, at_once = self.device, min(devices, self.device.matrix_cores)
        levels = tuple((size / at_once, rate / devices) for size, rate in own.levels)
        rates = {name: getattr(own, name) / devices for name in ("flops", "narrow_flops", "elements", "fresh_rate")}
        return replace(self, device=replace(own, levels=levels, matrix_cores=max(own.matrix_cores // devices, 1), **rates))

    def cautious(self) -> Self | None:
        """With operands of folds materialised, as jaxlib 0.10.0 does more often than 0.10.2."""
        return replace(self, fuses_operands=False) if self.fuses_operands else None

    # fusion

    def fuses_into_fold(self, ex: Extraction, t: int, fold: Fold, alone: bool) -> bool:
        """The kernel library computes the operations that it knows, and unrolled folds; operands of others are materialised."""
        term = ex.program.terms[t]
        if not self.fuses_operands or not alone or (self.keeps_heavy and t == fold.arg and fold in kernel_library.heavy_folds(ex, self)):
            return False
        return not isinstance(term, Map) or kernel_library.computes_inside(ex.program, t, fold)

    def fuses_fold(self, ex: Extraction, t: int, extent: int, reader: int, alone: bool) -> bool:
        """Folds go to the kernel library, whatever their length."""
        return False

    def recomputes(self, program: Program, members: Sequence[int]) -> bool:
        """Elementwise kernels compute cheap operands again."""
        return all(self.is_cheap(program, u) for u in members)

    def as_run(self, ex: Extraction, fused: Fused, escapes: Collection[int], is_whole: bool) -> Fused:
        apart = fusion.lone_operands(ex, fused, escapes) if self.keeps_heavy else frozenset()
        return fusion.as_run(ex, replace(fused, streamed=fusion.streamed(ex, fused, escapes, apart)), self.repeats_apart)

    # memory

    def width(self, ex: Extraction, t: int, contracted: bool) -> int:
        """XLA:CPU computes bfloat16 in float32, contracts all narrow numbers in it, and materialises the results so."""
        term = ex.program.terms[t]
        narrow = kernel_library.is_narrow(ex.program, t) and not is_leaf(term)
        return 4 if narrow and (isinstance(term, Dot) or contracted or str(term.dtype) == "bfloat16") else itemsize(term.dtype)

    def copies_slices(self, ex: Extraction, t: int) -> bool:
        return super().copies_slices(ex, t) or self._folds(ex, t)

    def widens(self, ex: Extraction, t: int, reader: Term) -> bool:
        return isinstance(reader, Dot) and kernel_library.is_narrow(ex.program, t)

    def scratch_bytes(self, ex: Extraction, t: int, members: Sequence[int], extents: Sequence[int], size: Callable[[int], int]) -> int:
        """A fold of leading axes leaves one row of results for every few rows of the operand; a sum with weights holds what it sums."""
        program, term = ex.program, ex.program.terms[t]
        if not isinstance(term, Fold) or not self._folds(ex, t):
            return 0
        axes = [*bits(program.free[term.arg])]
        shape, folded = [extents[i] for i in axes], {a for a, i in enumerate(axes) if term.over >> i & 1}
        if (value := kernel_library.weighted(program, term)) is not None and term.arg in members:
            return DOUBT * held_for_weights(shape, folded, value in members) * itemsize(term.dtype)
        return held_for_parts(shape, folded) * self.width(ex, t, contracted=False)

    def can_take_over(self, ex: Extraction, t: int, step: int, extents: Sequence[int]) -> bool:
        return layouts.is_written_into(ex.program, t, step, extents)

    def _folds(self, ex: Extraction, t: int) -> bool:
        """Whether a term is a fold, not unrolled."""
        return isinstance(ex.program.terms[t], Fold) and not ex.unrolls.get(t)

    # time

    def fold_weight(self, program: Program, t: int, extents: Sequence[int], count: int) -> float:
        term = program.terms[t]
        assert isinstance(term, Fold)
        row = extent_of(extents, program.free[t] & -1 << term.over.bit_length()) * itemsize(term.dtype)
        return PER_LONG_ROW if row > LONG_ROW else super().fold_weight(program, t, extents, count)

    def contraction_s(self, term: Dot, batch: int, m: int, n: int, k: int) -> float:
        """Less than the full rate where a side is thin, or where there is too little to do for all cores.

        The library copies the right operand into an order of its own first, for however few rows, in panels of so many columns.
        """
        cores = self.device.matrix_cores
        fill = m / (m + THIN_ROWS) * n / (n + self.device.thin_columns) * k / (k + THIN_DEPTH)
        busy = min(cores, max(1.0, m * n * k / CORE_WORK)) / cores
        packing = batch * k * max(n, PANEL if n > 1 else 1) * itemsize(term.dtype) / self.device.levels[-1][1]
        return 2.0 * batch * m * n * k / (self.contraction_rate(term) * max(fill * busy, 1e-3)) + packing

    def arithmetic_s(self, kernel: Kernel, seconds: float, of_term: Callable[[int], float]) -> float:
        if not kernel.emitted:
            slow = (t for t in kernel.operands if fusion.stalls(kernel.ex, t, kernel.extents, (kernel.term,)))
            seconds += STALL * sum(map(of_term, slow)) + self._by_columns_s(kernel)
        if kernel_library.folds_in_library(kernel.ex, kernel.step):
            inside = ((t, kernel_library.slowness(kernel.ex.program.terms[t])) for t in kernel.members)
            seconds += sum((slower - 1) * of_term(t) for t, slower in inside if slower > 1)
        if kernel.outside and kernel.unrolled:
            seconds *= STRIDED if kernel.emitted else NOT_UNROLLED
        if self._is_elementwise(kernel) and not kernel.outside and self._is_uneven(kernel):
            seconds *= UNEVEN
        return seconds

    def share(self, kernel: Kernel) -> float:
        """One core's, where there is too little to do for more, or where the loop around a kernel stacks what it computes."""
        cores = self.device.matrix_cores
        return min(cores, self._parts(kernel)) / cores

    def _parts(self, kernel: Kernel) -> float:
        """The parts that a kernel is cut into, however many cores there are."""
        program = kernel.ex.program
        if self._is_elementwise(kernel):
            if kernel.stacked:
                return 1
            if not any(weights.is_slow(program.terms[t]) for t in kernel.members):
                return math.inf
            flops, functions = self._operations(kernel)
            if flops <= kernel.moved:
                return max(1, kernel.moved // CORE_BYTES)
            return max(1, (flops + PER_FUNCTION * functions + PER_BYTE * kernel.moved) // CORE_FLOPS)
        if isinstance(kernel.term, Fold):
            return 1 if extent_of(kernel.extents, program.free[kernel.term.arg]) < FOLDED_BY_ONE else math.inf
        return 1 if self._draws(kernel) and not self._draws_many(kernel) else math.inf

    def _operations(self, kernel: Kernel) -> tuple[int, int]:
        """Elementwise operations of a kernel as XLA counts them, without functions, and functions."""
        program, counts = kernel.ex.program, [0, 0]
        for t in kernel.members:
            if isinstance(term := program.terms[t], Map):
                counts[self.weights.of_map(term) >= self.crowding_weight] += extent_of(kernel.extents, program.free[t])
        return counts[0], counts[1]

    def _is_elementwise(self, kernel: Kernel) -> bool:
        return isinstance(kernel.term, Map) or (kernel.unrolled and bool(kernel.ex.unrolls.get(kernel.step)))

    def overhead_s(self, kernel: Kernel) -> float:
        seconds = super().overhead_s(kernel)
        if isinstance(kernel.term, Dot):
            results = extent_of(kernel.extents, kernel.ex.program.free[kernel.step])
            seconds += self.device.deal_s if results > DEALT and self.device.matrix_cores > 1 else 0.0
            seconds += 0.0 if kernel.outside else self.device.fresh_s(kernel.nbytes)
        elif self._draws(kernel) and self._draws_many(kernel):
            seconds += DEALT_DRAWS_S if self.device.matrix_cores > 1 else 0.0
        elif kernel.nbytes <= AT_ONCE_BYTES:
            seconds *= AT_ONCE
        return seconds

    def _draws(self, kernel: Kernel) -> bool:
        return isinstance(kernel.term, Block) and kernel.term.call.prim.name in RANDOM_DRAWS

    def _draws_many(self, kernel: Kernel) -> bool:
        return extent_of(kernel.extents, kernel.ex.program.free[kernel.step]) >= DRAWN_BY_ONE

    @property
    def step_s(self) -> float:
        return AT_ONCE * self.device.iteration_s

    def _is_uneven(self, kernel: Kernel) -> bool:
        """Whether a kernel writes short rows that vectors do not divide."""
        free = kernel.ex.program.free[kernel.step]
        row = kernel.extents[free.bit_length() - 1] if free else SHORT_ROW
        return row < SHORT_ROW and row % VECTOR != 0 and extent_of(kernel.extents, free) > row

    def _by_columns_s(self, kernel: Kernel) -> float:
        """Seconds to write a matrix by columns, and its result by rows, for a triangular solve as its author wrote it."""
        term = kernel.term
        if not isinstance(term, Block) or term.call.prim.name != "triangular_solve" or () in term.call.out_axes[0]:
            return 0.0
        return BY_COLUMNS * kernel.nbytes / 4 / self.device.elements

    # the compiler

    @property
    def check_options(self) -> Mapping[str, str | bool]:
        return UNOPTIMISED

    @property
    def compiler_options(self) -> Mapping[str, str]:
        return compiler_options(self.device.vector_bits)

    def compiling(self, jaxpr: ClosedJaxpr) -> Self:
        wide = self.device.vector_bits > USUAL_BITS
        return replace(self, device=replace(self.device, vector_bits=USUAL_BITS)) if wide and computes_angles(jaxpr.jaxpr) else self

    def hidden(self, compiled: Any) -> Hidden:
        """The scratch of kernel libraries, and LAPACK's."""
        module = hlo.read(compiled, is_compiled)
        unseen = () if is_seen() else (BLIND,)
        unread = (UNREAD.format(len(module.unread), module.unread[0]),) if module.unread else ()
        found = DOUBT * hidden_scratch_bytes(module), workspace_bytes(module), convolution_bytes(module), partial_bytes(module)
        return Hidden(int(max(found)), (*unseen, *unread))
