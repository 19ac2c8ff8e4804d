"""XLA:GPU as a backend: which values its kernels materialise, what its libraries take, and what a launch costs.

The facts are those of docs/xla-gpu.md, read from programs compiled for cards that were not there; seconds are those of
:mod:`eqsat_mem.backends.gpu.measured`, of data sheets, and of counts of machine instructions, held against an H100.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax

from eqsat_mem.backends.gpu import deviceless, habits, launches, measured, moved, scratch, siblings, workspaces
from eqsat_mem.backends.gpu.idioms import BY_COLUMNS, GpuIdioms
from eqsat_mem.backends.gpu.operations import weights_of
from eqsat_mem.backends.gpu.products import Products
from eqsat_mem.backends.gpu.targets import USUAL, Target, card_of, named
from eqsat_mem.backends.gpu.tiles import Tiles
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.errors import DeviceCompilerError
from eqsat_mem.frontend.preferences import Preferences
from eqsat_mem.ir import Block, Dot, Fold, Map, Program, itemsize
from eqsat_mem.ir.bitwise import rounded_in
from eqsat_mem.ir.loop_tree import Loop
from eqsat_mem.ir.precision import rounds
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.checks import Check, Hidden, knows_option, lowered
from eqsat_mem.schedule.cost_model import arithmetic_s
from eqsat_mem.schedule.device import Device
from eqsat_mem.schedule.fusion import Fused
from eqsat_mem.schedule.idioms import Idioms
from eqsat_mem.schedule.kernel import Kernel
from eqsat_mem.schedule.ties import BitTie, Tie
from eqsat_mem.schedule.tiles import MOST_WRITTEN_OUT, Tile, computed_for, joined
from eqsat_mem.schedule.weights import Weights

KERNEL_S, TURN_S = 1.1e-6, 2e-6
"""Seconds of a kernel in a CUDA graph besides its work, and of a turn of a loop with its counter: measured on an H100
(benchmarks/gpu_times.py)."""
TILE = 64
"""Rows and columns of a product that one block computes: blocks of launches in benchmarks/gpu_model.py."""


@dataclass(frozen=True)
class GpuBackend(Backend):
    """XLA:GPU for one card."""

    target: Target
    tiles: Tiles | None = None
    """Folds as tile kernels; None where there are none."""
    recomputes_shared: bool = True
    """Whether several folds compute an elementwise value each. XLA decides that by estimates of its own."""
    computes_columns: bool = True
    """Whether folds by columns compute their operands. XLA decides that by estimates, too, which are known for short expressions."""
    gathers: bool = False
    """Whether loops gather the slices that they read: XLA may give arrays another order of axes, and so copy them, for slices."""
    products: Products = Products.TUNED
    """By what products are computed."""

    platform: ClassVar[str] = "gpu"
    loops_beside_outputs: ClassVar[bool] = True
    tie: ClassVar[Tie] = BitTie()
    packs: ClassVar[bool] = True
    compares_inside: ClassVar[bool] = True
    adds_in_place: ClassVar[bool] = True
    room_toll: ClassVar[float] = 0.005  # most plans hold what is predicted

    @classmethod
    def of(cls, target: Target) -> Self:
        """The backend of a card, with the figures of its data sheet."""
        return cls(
            Device(
                **target.attained(),
                tile_level=0,
                kernel_s=KERNEL_S,
                iteration_s=TURN_S,
                reduce_weight=measured.OF_LONG_ROW,
                short_reduce_weight=measured.APART,
            ),
            target,
            Tiles.of(target),
        )

    @classmethod
    def built_in(cls) -> Self:
        """The backend of the card in use."""
        return cls.of(card_of(jax.local_devices()[0]) if jax.default_backend() == "gpu" else named(USUAL))

    @property
    def rounds_operands(self) -> bool:  # type: ignore[override]  # depends on the card
        return self.target.rounds

    @property
    def library_bytes(self) -> int:  # type: ignore[override]  # depends on the card
        return workspaces.cublaslt(self.target) if self.products is Products.TUNED else 0

    @property
    def is_here(self) -> bool:
        return jax.default_backend() == "gpu" and card_of(jax.local_devices()[0]) == self.target

    @property
    def exported_for(self) -> str | None:
        return None if jax.default_backend() == "gpu" else "cuda"

    @property
    def capacity_bytes(self) -> int | None:
        return None if self.is_here else self.target.usable_bytes

    @property
    def memory_bytes(self) -> int | None:
        return self.target.memory_bytes

    @property
    def idioms(self) -> Idioms:
        return GpuIdioms(self.gathers)

    @property
    def preferences(self) -> Preferences:
        """Long searches become folds of pairs, which XLA computes with their operand inside, and loops fold chunk by chunk."""
        return Preferences(self.platform, pairs=True)

    @property
    def weights(self) -> Weights:  # type: ignore[override]  # depends on the card
        return weights_of(self.target)

    def variants(self, ex: Extraction) -> tuple[Self, ...]:
        may_help = self.tiles is not None and any(self.tiles.suits(ex.program, t) for t in range(len(ex.program.terms)))
        return (self, self.without_tiles()) if may_help else (self.without_tiles(),)

    def plain(self) -> Self:
        return self.without_tiles()

    def without_tiles(self) -> Self:
        return replace(self, tiles=None)

    def as_emitted(self, ex: Extraction) -> Extraction:
        """Short folds are computed inside their readers; those are written out whose bits must be the same in all of them, and those of
        2, 4, 8 or 16 elements, which have a kernel of their own where what reads them reads another array, too: unless they fold an array
        that is larger than their result."""
        if not ex.unrolls:
            return ex
        program, rounded = ex.program, rounded_in(ex.program)

        def is_written_out(t: int, over: int) -> bool:
            if not isinstance(program.terms[t], Fold) or t in rounded:
                return True
            return habits.is_power_of_two(program.extent(over)) and not scratch.folds_an_array(program, t)

        unrolls = {t: over for t, over in ex.unrolls.items() if is_written_out(t, over)}
        return replace(ex, unrolls=unrolls) if len(unrolls) < len(ex.unrolls) else ex

    def as_written(self, ex: Extraction) -> Extraction:
        """Without what only emitted source writes out element by element."""
        return replace(ex, unrolls={}) if ex.unrolls else ex

    def cautious(self) -> Self | None:
        """With elementwise values that several folds read in memory; then also those that are folded by columns."""
        if self.recomputes_shared:
            return replace(self, recomputes_shared=False)
        return replace(self, computes_columns=False) if self.computes_columns else None

    def gathering(self) -> Self | None:
        return None if self.gathers else replace(self, gathers=True)

    def narrowed(self) -> Self | None:
        products = self.products.narrowed
        return None if products is None else replace(self, products=products)

    def tile(self, ex: Extraction, step: int, members: Sequence[int], extents: Sequence[int]) -> Tile | None:
        """A tile kernel where it takes less time than those that XLA makes of its folds."""
        tile = None if self.tiles is None else self.tiles.tile(ex, step, members, extents, self.device)
        if tile is None:
            return None
        usual = 0.0
        for fold in tile.pairs.steps:
            own = computed_for(ex.program, fold, members)
            usual += self._usual_s(ex, fold, own, extents, sum(arithmetic_s(ex.program, t, extents, self) for t in own))
        return tile if tile.seconds < usual else None

    def _held_inside(self, ex: Extraction, step: int, members: Sequence[int], size: Callable[[int], int]) -> int:
        """Bytes of what tile kernels would compute inside a fold, and XLA writes out."""
        return 0 if self.tiles is None else sum(map(size, scratch.left_to_tiles(ex.program, step, members)))

    def _usual_s(self, ex: Extraction, step: int, members: Sequence[int], extents: Sequence[int], seconds: float) -> float:
        """Seconds of XLA's kernel, given those of its arithmetic at the full rate; operands that it does not compute inside come from
        memory."""
        held = self._held_inside(ex, step, members, lambda t: scratch.size(ex.program, t, extents))
        busy = 1.0
        if not isinstance(ex.program.terms[step], Block):
            busy = launches.busy(ex, scratch.step_of_kernel(ex.program, step, members), extents, self.target)
        return seconds / busy + 2 * held / self.device.bandwidth(held)

    # fusion

    def takes_in(self, program: Program, t: int) -> bool:
        """Also a product with a vector that is a fold whatever the extents, what moves elements, and what may be a tile kernel."""
        term = program.terms[t]
        if moved.takes_in(term):
            return True
        if not isinstance(term, Dot):
            return super().takes_in(program, t) or (self.tiles is not None and self.tiles.suits(program, t))
        left, right = program.free[term.lhs], program.free[term.rhs]
        return habits.vector_is_fold(habits.VECTOR_ELEMENTS, 0, itemsize(term.dtype)) and (left | right) in (left, right)

    def fuses_into_fold(self, ex: Extraction, t: int, fold: Fold, alone: bool) -> bool:
        """Folds compute elementwise operands of any depth."""
        is_computed = self.computes_columns or not scratch.is_by_columns(ex.program, fold)
        return is_computed and (alone or self.recomputes_shared or self.is_cheap(ex.program, t))

    def computes_again(self, ex: Extraction, t: int, kernels: Collection[int], only_folds: bool, is_whole: bool) -> bool:
        """Each does, and for each element of what it is broadcast to there, unless it takes so long that XLA rather writes it out. Kernels
        that become one compute it once, unless it takes longer still."""
        program, count = ex.program, len(kernels)
        if not only_folds:
            is_one = self.are_one(ex, (t, *kernels))
            if is_one and count > 1 and scratch.work(program, t, weights_of(self.target)) > habits.JOINED:
                return False
            count = 1 if is_one else siblings.separate(program, kernels)
        broadcast = max((program.extent(program.free[u] & ~program.free[t]) for u in program.readers(t)), default=1)
        if count * broadcast <= 1:
            return True
        width, in_cache = itemsize(program.terms[t].dtype), not is_whole or program.nbytes(t) <= self.target.l2_bytes
        return habits.is_computed_again(count, broadcast, scratch.work(program, t, weights_of(self.target)), width, in_cache)

    def compute_fold_again(self, ex: Extraction, t: int, kernels: Collection[int], is_whole: bool) -> bool:
        """Two do; more, and those that spread it along other axes, by XLA's estimate, but more that fold columns do not."""
        program, few = ex.program, len(kernels) <= 2
        by_columns = any(isinstance(fold := program.terms[k], Fold) and scratch.is_by_columns(program, fold) for k in kernels)
        if few and not any(isinstance(program.terms[k], Fold) and siblings.spreads(program, t, k) for k in kernels):
            return True
        return (few or not by_columns) and self.computes_again(ex, t, kernels, True, is_whole)

    def computes_spread(self, program: Program, t: int) -> bool:
        return scratch.is_computed_where_spread(program, t)

    def are_one(self, ex: Extraction, kernels: Collection[int]) -> bool:
        return siblings.are_joined(ex, kernels)

    def fuses_fold(self, ex: Extraction, t: int, extent: int, reader: int, alone: bool) -> bool:
        """A short fold is computed inside the folds and searches that read it, and what a kernel of its own makes of it alone in that.
        Elementwise kernels compute a short one as a loop, unless it is a power of two, which has a kernel of its own."""
        if self.tiles is not None and not isinstance(ex.program.terms[reader], Fold) and self.tiles.suits(ex.program, t):
            return False  # what may be a tile kernel is none of XLA's
        read_by = ex.program.terms[reader]
        if isinstance(read_by, Fold):
            return extent < habits.INNER_FOLD // 2
        if isinstance(read_by, Block):
            return alone and extent < habits.SEARCHED_FOLD
        return habits.is_looped(extent) or (alone and scratch.transformed(ex.program, reader) == t)

    def computes_in_tiles(self, ex: Extraction, extent: int, ends: Collection[int]) -> bool:
        """Those that can be written out. Where it turns out that no tile kernel is faster, they are held: see :meth:`scratch_bytes`."""
        return self.tiles is not None and extent <= MOST_WRITTEN_OUT and all(self.tiles.suits(ex.program, t) for t in ends)

    def as_run(self, ex: Extraction, fused: Fused, escapes: Collection[int], is_whole: bool) -> Fused:
        tiles = self.tiles
        if tiles is None:
            return siblings.joined(ex.program, fused, is_whole)

        def are_faster(kernels: Sequence[Sequence[int]]) -> bool:
            together = self.tile(ex, kernels[0][-1], sorted(set[int]().union(*kernels)), extents)
            each = [tiles.tile(ex, members[-1], members, extents, self.device) for members in kernels]
            return together is not None and together.seconds < sum(math.inf if tile is None else tile.seconds for tile in each)

        extents = [index.extent for index in ex.program.indices]
        return siblings.joined(ex.program, joined(ex, fused, lambda t: tiles.suits(ex.program, t), are_faster), is_whole)

    def fuses_block(self, ex: Extraction, t: int, ends: Collection[int], is_one: bool) -> bool:
        return moved.is_inside(ex, t, ends, is_one, self.is_cheap)

    # memory

    def can_take_over(self, ex: Extraction, t: int, step: int, extents: Sequence[int]) -> bool:
        """Readers of a product by a library, or of a matrix in columns, do not work in place, nor do values that are written longer for a
        product that reads them, or that are folded in the kernel that writes them."""
        program, made = ex.program, ex.program.terms[t]
        if isinstance(made, Dot) or (isinstance(made, Block) and made.call.prim.name in (moved.JOINED, *BY_COLUMNS)):
            return False
        readers = program.readers(step)
        if any(isinstance(fold := program.terms[r], Fold) and not habits.is_looped(program.extent(fold.over)) for r in readers):
            return False
        reader = program.terms[readers[0]] if len(readers) == 1 else None
        return not (isinstance(reader, Dot) and scratch.padding(program, reader, extents, self.target) > 1)

    def scratch_bytes(self, ex: Extraction, t: int, members: Sequence[int], extents: Sequence[int], size: Callable[[int], int]) -> int:
        """Partial results and copied operands of folds, and what products by Triton or by a library take."""
        program, term = ex.program, ex.program.terms[t]
        if isinstance(term, Dot):
            return scratch.product_bytes(program, term, extents, self.target, size, self.products.scratch_bytes(self.target))
        t = scratch.step_of_kernel(program, t, members)
        term = program.terms[t]
        if not isinstance(term, Fold | Block) or ex.unrolls.get(t) or not members:
            return 0
        tile = self.tile(ex, t, members, extents)
        if tile is not None:
            others = (u for u in tile.pairs.steps if u != t)  # all results are there at once
            return sum(size(read.term) for read in tile.pairs.reads if read.copied) + sum(map(size, others))
        inner = self._held_inside(ex, t, members, size)
        if isinstance(term, Block):
            return inner + scratch.copied_operand_bytes(program, t, self.weights, size)
        return inner + scratch.fold_bytes(program, t, members, extents, self.weights, size)

    # time

    def element_factor(self, dtype: Any) -> float:
        """Weights count instructions by the width of numbers; float64 folds and products run on lanes of their own, of which those of data
        centres have half as many: with the other instructions between them that is enough."""
        own = self.target.architecture
        return max(own.lanes / own.double_lanes / 2, 1.0) if str(dtype) in ("float64", "complex128") else 1.0

    def contraction_rate(self, term: Dot) -> float:
        width = itemsize(term.dtype)
        is_rounded = self.rounds_operands and rounds(term.dtype, term.precision)
        kind = "double" if width >= 8 else "narrow" if width <= 2 else "rounded" if is_rounded else "full"
        rate = self.device.flops / self.target.flops * self.target.double_flops if width >= 8 else super().contraction_rate(term)
        return rate * self.products.rate(kind)

    def fold_weight(self, program: Program, t: int, extents: Sequence[int], count: int) -> float:
        """More where rows are folded whose elements lie side by side."""
        term = program.terms[t]
        by_columns = isinstance(term, Fold) and scratch.is_by_columns(program, term)
        return 1.0 if by_columns else measured.row_fold_weight(count, self.device.short_reduce_weight, self.device.reduce_weight)

    def contraction_s(self, term: Dot, batch: int, m: int, n: int, k: int) -> float:
        """Whole tiles at the full rate, if they occupy all multiprocessors."""
        parts = habits.product_parts(batch, m, n, k, itemsize(term.dtype), self.target)
        rows, columns = (math.ceil(side / TILE) for side in (m, n))
        busy = min(1.0, batch * rows * columns * parts / self.target.multiprocessors)
        return 2.0 * batch * rows * columns * TILE * TILE * k / (self.contraction_rate(term) * busy * measured.product_fill(k))

    def arithmetic_s(self, kernel: Kernel, seconds: float, of_term: Callable[[int], float]) -> float:
        """Less than the full rate where a kernel has few thread blocks."""
        if isinstance(kernel.term, Dot):
            return seconds
        if not kernel.members:
            return 0.0
        tile = self.tile(kernel.ex, kernel.step, kernel.members, kernel.extents)
        return tile.seconds if tile else self._usual_s(kernel.ex, kernel.step, kernel.members, kernel.extents, seconds)

    def overhead_s(self, kernel: Kernel) -> float:
        """Its launches."""
        may_be_tile = kernel.members and not isinstance(kernel.term, Dot)
        tile = self.tile(kernel.ex, kernel.step, kernel.members, kernel.extents) if may_be_tile else None
        return self.device.kernel_s * launches.count(kernel, tile, self.target)

    def turn_s(self, ex: Extraction, loop: Loop) -> float:
        """A launch for the counter, for each sum that a fold is added to, and for each result that is copied to its place."""
        folds = sum(not isinstance(ex.program.terms[t], Dot) for t in loop.folds)
        copies = sum(not isinstance(ex.program.terms[t], Map) for t in loop.stacks)
        return self.device.iteration_s + self.device.kernel_s * (folds + copies)

    # the compiler

    @property
    def compiler_options(self) -> Mapping[str, str | bool]:
        return {name: value for name, value in self.products.options.items() if not self.is_here or knows_option(name, value)}

    @property
    def check_options(self) -> Mapping[str, str | bool]:
        return self.compiler_options

    def check(
        self,
        function: Callable[..., Any],
        avals: Sequence[Any],
        donate: Sequence[int] = (),
        optimise: bool = False,
        limit: int | None = None,
        shardings: Sequence[Any] | None = None,
    ) -> Check:
        """A compilation with products by Triton and one by cuBLAS, of which the larger counts. On the card these come first, as
        trying kernels takes many times as long; what then fits is compiled as it runs."""
        if self.is_here:
            compilations = self.products.untuned(lowered(function, avals, donate, shardings)) if limit is not None and not optimise else ()
            each = ((self.checked(c).held_bytes, c.as_text(), c.memory_analysis().temp_size_in_bytes) for c in compilations)
            most = self.products.most_held(each, limit, self.target)
            fits = limit is None or most <= limit
            return super().check(function, avals, donate, optimise, limit, shardings) if fits else Check(most)
        if shardings is not None:
            raise DeviceCompilerError("programs of several cards are not compiled where the cards are not: the peak is predicted.")
        compilations = deviceless.each_setting(function, avals, self.target, donate, self.products.settings)
        found = ((each.held_bytes, each.text, each.temporaries) for each in compilations)
        return Check(self.products.most_held(found, limit, self.target))

    def hidden(self, compiled: Any) -> Hidden:
        """Scratch that libraries ask for at run time, from a table."""
        return Hidden(workspaces.library_bytes(compiled.as_text(), self.target))
