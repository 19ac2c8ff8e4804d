"""Compiler targets: the figures of a device, and what its compiler does with a program.

:class:`Backend` is XLA as it documents itself for every device: it fuses elementwise operations and short folds into their
readers, runs kernels in program order, needs no idioms in source, and reports all memory that it takes. A target that
differs overrides methods; :mod:`eqsat_mem.backends` has one folder or file for each. A backend is chosen once per plan and
carried by searches and schedules, so that every stage asks the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
from jax.extend.core import ClosedJaxpr

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.frontend.preferences import Preferences
from eqsat_mem.ir import Block, Dot, Fold, Map, Program, Term, itemsize
from eqsat_mem.ir.loop_tree import Loop
from eqsat_mem.ir.mesh import Devices, Names
from eqsat_mem.ir.precision import rounds
from eqsat_mem.schedule.checks import Check, Hidden, lowered, telling_of_missing_calls
from eqsat_mem.schedule.device import Device
from eqsat_mem.schedule.idioms import Idioms
from eqsat_mem.schedule.kernel import Kernel
from eqsat_mem.schedule.ties import Tie
from eqsat_mem.schedule.weights import BASE, Weights

if TYPE_CHECKING:
    from eqsat_mem.schedule.fusion import Fused
    from eqsat_mem.schedule.tiles import Tile


# --- behaviour ---------------------------------------------------------------------------------------

THIN = 16
"""Extents of a contraction that run at half the full rate."""
SMALL_FOLD = 64
"""Elements up to which a fold is computed inside its reader."""


@dataclass(frozen=True)
class Backend:
    """A compiler for a device; the base is what XLA documents for every device. Subclasses override what differs.

    Attributes:
        device: the figures of the device.
        in_loop: whether programs are bodies of loops, whose results lie where the loop has them, rather than functions, whose outputs
            have memory of their own from the beginning.
        donated: the numbers of the arguments in whose memory results lie.
    """

    device: Device
    in_loop: bool = field(default=False, kw_only=True)
    donated: tuple[int, ...] = field(default=(), kw_only=True)

    platform: ClassVar[str | None] = None
    """JAX's name of the platform; None is the default one."""
    weights: ClassVar[Weights] = BASE
    tie: ClassVar[Tie | None] = None
    """The way to keep recomputed values apart; None where none is known, so that nothing is recomputed."""
    asked_up_to: ClassVar[float] = 2.5
    """Predicted peak over limit up to which the compiler is asked about a program as written: of 104 predictions two were more than 2.4
    times too high, of folds inside folds, and these a hundred times."""
    library_bytes: ClassVar[int] = 0
    """Scratch of libraries that a contraction may take, and that :meth:`narrowed` does without."""
    rounds_operands: ClassVar[bool] = False
    """Whether operands of float32 contractions are rounded unless full precision is asked for."""
    loops_beside_outputs: ClassVar[bool] = False
    """Whether bodies of loops take no memory of outputs that are not written yet."""
    begins_loops_ahead: ClassVar[bool] = False
    """Whether what loops begin with, zeros that wait for nothing, is made at the beginning of the region around them."""
    adds_at_once: ClassVar[bool] = False
    """Whether a chunk of what a loop sums is added as soon as it is there; otherwise it may wait for the end of the turn."""
    packs: ClassVar[bool] = False
    """Whether gaps between the values of a loop's body count: see :mod:`eqsat_mem.schedule.packing`."""
    compares_inside: ClassVar[bool] = False
    """Whether kernels may each compute a value of which they read a view, or which they compare with what is selected from it."""
    fused_blocks: ClassVar[frozenset[str]] = frozenset({"argmax", "argmin", "reduce"})
    """Block operations inside which XLA computes elementwise operands."""
    scatters_far: ClassVar[bool] = True
    """Whether sums may be made in shares between machines, rather than whole on every device."""
    room_toll: ClassVar[float] = 0.02
    """The share of its time that filling the limit must save: plans that are predicted to be as fast in less leave room."""
    turns_computed: ClassVar[bool] = False
    """Whether scans step along a copy of what is computed, too, where it has another order of axes."""
    adds_in_place: ClassVar[bool] = False
    """Whether a contraction over chunks adds to the sum of those before as it is computed: then it has no result of its own."""
    needless_rules: ClassVar[tuple[str, ...]] = ("augmented",)
    """Rules, or files of rules, that do not help this compiler: additions to a contraction's result are fused with what follows."""
    unrolled_elements: ClassVar[int] = 16
    """Folds and searches over at most so many elements may be written out element by element, which makes them elementwise."""
    unrolled_weight: ClassVar[float] = 1.0
    """The cost of an operation that is repeated for each element of a fold that is written out."""
    crowded_weight: ClassVar[float] = 1.0
    """The same in a kernel with an operation of at least :attr:`crowding_weight`."""
    crowding_weight: ClassVar[float] = math.inf
    """The weight from which on an operation leaves no registers for several elements at once."""
    short_fold: ClassVar[int] = 32
    """A fold over fewer elements than this does not fill vector registers along its axis."""
    rereads: ClassVar[frozenset[str]] = frozenset()
    """Block operations that read operands in several kernels, each of which computes virtual operands again."""
    compile_equation_s: ClassVar[float] = 0.005
    """About the seconds that the compiler takes for each equation of a traced function, from which the time for planning is set."""

    @property
    def preferences(self) -> Preferences:
        """The preferences with which a jaxpr should be loaded."""
        return Preferences(self.platform)

    @property
    def idioms(self) -> Idioms:
        """The idioms in which source is written."""
        return Idioms()

    def keeping_bits(self) -> Self:
        """The same target with only those idioms that keep every bit of the operations that they replace."""
        return self

    def inside(self) -> Self:
        """The same target for the bodies of loops."""
        return self if self.in_loop else replace(self, in_loop=True, donated=())

    def among(self, devices: int) -> Self:
        """The same target where so many devices of this machine run a program at once."""
        return self

    def variants(self, ex: Extraction) -> tuple[Self, ...]:
        """The targets that a program is searched for: the ways in which this one may compute it of which neither is always better, with
        tile kernels and without, say: what they compute inside is held, or computed several times, where none is faster."""
        return (self,)

    def plain(self) -> Self:
        """The same target for a program as its author wrote it, without what only emitted source asks the compiler for."""
        return self

    def without_tiles(self) -> Self:
        """The same target whose folds are never tile kernels."""
        return self

    def as_emitted(self, ex: Extraction) -> Extraction:
        """A program with what it is emitted with of what rules allow."""
        return ex

    def as_written(self, ex: Extraction) -> Extraction:
        """A program with what rules allow of it where it runs as its author wrote it, for predictions."""
        return ex

    def cautious(self) -> Self | None:
        """The same target with fewer assumptions about fusion, for programs of which the compiler holds more than predicted."""
        return None

    def gathering(self) -> Self | None:
        """The same target whose loops gather the slices that they read, where a compiler may copy arrays for slices of them."""
        return None

    def narrowed(self) -> Self | None:
        """The same target with further :attr:`compiler_options` under which programs hold less; None if there are none."""
        return None

    # fusion: which values exist, and in which order kernels run

    def fuses_into_fold(self, ex: Extraction, t: int, fold: Fold, alone: bool) -> bool:
        """Whether an elementwise value is computed inside the fold that reads it; ``alone``: no other kernel needs it."""
        term = ex.program.terms[t]
        return alone or (isinstance(term, Map) and self.is_cheap(ex.program, t))

    def computes_again(self, ex: Extraction, t: int, kernels: Collection[int], only_folds: bool, is_whole: bool) -> bool:
        """Whether kernels, folds among them or ``only_folds``, would each compute an elementwise value that they read, if they do at all.
        It ``is_whole``, or is made in a loop."""
        return True

    def compute_fold_again(self, ex: Extraction, t: int, kernels: Collection[int], is_whole: bool) -> bool:
        """Whether these kernels, that need a fold, would each compute it, if they do at all; it ``is_whole``, or is made in a loop."""
        return len(kernels) == 1

    def computes_spread(self, program: Program, t: int) -> bool:
        """Whether elementwise kernels compute an elementwise value once more for each element that they make of one of it."""
        return True

    def are_one(self, ex: Extraction, kernels: Collection[int]) -> bool:
        """Whether these kernels, which read the same value, the first of them, are one kernel, which computes the value once."""
        return False

    def fuses_fold(self, ex: Extraction, t: int, extent: int, reader: int, alone: bool) -> bool:
        """Whether a fold over so many elements, not unrolled, is computed inside the fold or kernel ``reader``.

        ``alone``: no other needs it. Where several do, :meth:`compute_fold_again` says that each may.
        """
        return alone and extent <= SMALL_FOLD

    def computes_in_tiles(self, ex: Extraction, extent: int, ends: Collection[int]) -> bool:
        """Whether a fold or contraction over so many elements is computed inside each of the kernels ``ends``, being tile kernels."""
        return False

    def fuses_block(self, ex: Extraction, t: int, ends: Collection[int], is_one: bool) -> bool:
        """Whether a block operation is computed inside the kernels that read it, which end in ``ends``; ``is_one`` if they are one."""
        (term, *readers) = (ex.program.terms[u] for u in (t, *ends))
        return isinstance(term, Block) and term.call.prim.name == "slice" and all(isinstance(reader, Map) for reader in readers)

    def takes_in(self, program: Program, t: int) -> bool:
        """Whether an operation computes elementwise operands inside itself."""
        term = program.terms[t]
        return isinstance(term, Map | Fold) or (isinstance(term, Block) and term.call.prim.name in self.fused_blocks)

    def is_cheap(self, program: Program, t: int) -> bool:
        """Whether XLA computes a value again in every consumer, so that it is never materialised for their sake.

        Among others a division that XLA turns into a product with what is materialised: by a value of fewer indices, or by
        the result of an operation that it can invert.
        """
        term = program.terms[t]
        if not isinstance(term, Map) or term.op != "div":
            return isinstance(term, Map) and self.weights.is_cheap(term)
        below = program.terms[term.args[1]]
        return program.free[term.args[1]] != program.free[t] or (isinstance(below, Map) and below.op in INVERTED)

    def recomputes(self, program: Program, members: Sequence[int]) -> bool:
        """Whether elementwise kernels compute the operand that ``members`` make, or the last of them, again rather than reading it."""
        return False

    def as_run(self, ex: Extraction, fused: Fused, escapes: Collection[int], is_whole: bool) -> Fused:
        """The kernels of a region, ``is_whole`` unless it is in a loop, in the order in which they run, with copies that are made."""
        return fused

    def tile(self, ex: Extraction, step: int, members: Sequence[int], extents: Sequence[int]) -> Tile | None:
        """The kernel of ``step``, which computes ``members``, as a tile kernel; None where there is none, or it is slower."""
        return None

    # memory

    def width(self, ex: Extraction, t: int, contracted: bool) -> int:
        """Bytes of an element of a value where it is materialised; ``contracted``: it is an operand of a contraction."""
        return itemsize(ex.program.terms[t].dtype)

    def copies_slices(self, ex: Extraction, t: int) -> bool:
        """Whether an operation reads slices that a loop makes from copies of them."""
        return isinstance(ex.program.terms[t], Dot | Block)

    def widens(self, ex: Extraction, t: int, reader: Term) -> bool:
        """Whether a reader has its operand ``t`` widened, which is counted as a copy of its own."""
        return False

    def scratch_bytes(self, ex: Extraction, t: int, members: Sequence[int], extents: Sequence[int], size: Callable[[int], int]) -> int:
        """Bytes that the kernel of ``t``, which computes ``members``, takes besides operands, result and workspaces of block operations
        (:attr:`weights`); ``size`` tells those of a value."""
        return 0

    def can_take_over(self, ex: Extraction, t: int, step: int, extents: Sequence[int]) -> bool:
        """Whether the elementwise result ``step`` can be written into the buffer of ``t``, of its size, which dies there."""
        return True

    # time

    def element_factor(self, dtype: Any) -> float:
        """The time of an operation in this dtype, in times of one in float32."""
        return itemsize(dtype) / 4

    def contraction_rate(self, term: Dot) -> float:
        """Multiplications and additions per second of a contraction that fills the matrix units."""
        width = itemsize(term.dtype)
        if width <= 2:
            return self.device.narrow_flops * 2 / width
        is_rounded = self.rounds_operands and rounds(term.dtype, term.precision)
        return (self.device.narrow_flops / 2 if is_rounded else self.device.flops) * 4 / width

    def contraction_s(self, term: Dot, batch: int, m: int, n: int, k: int) -> float:
        """Seconds of ``batch`` contractions of m x k by k x n, neither side a vector: less than the full rate for thin sides."""
        fill = m / (m + THIN) * n / (n + THIN) * k / (k + THIN)
        return 2.0 * batch * m * n * k / (self.contraction_rate(term) * fill)

    def fold_weight(self, program: Program, t: int, extents: Sequence[int], count: int) -> float:
        """Additions for each of ``count`` elements that a fold combines."""
        return self.device.short_reduce_weight if count < self.short_fold else self.device.reduce_weight

    def arithmetic_s(self, kernel: Kernel, seconds: float, of_term: Callable[[int], float]) -> float:
        """Seconds of a kernel's arithmetic, given their sum over its terms; ``of_term`` tells those of any term."""
        return seconds

    def share(self, kernel: Kernel) -> float:
        """The share of the device that a kernel is dealt out to: rates are those of all of it."""
        return 1.0

    def overhead_s(self, kernel: Kernel) -> float:
        """Seconds that a kernel takes besides its arithmetic and its traffic."""
        return self.device.kernel_s

    def exchange_s(self, kind: str, received: float, names: Names, devices: Devices) -> float:
        """Seconds of a collective along some mesh axes, by which each device receives so many bytes."""
        link = self.device.far if devices.far.intersection(names) else self.device.near
        return link.seconds(kind, received, devices.count(names))

    def turn_s(self, ex: Extraction, loop: Loop) -> float:
        """Seconds that a turn of a loop takes besides its kernels and the traffic of its results."""
        return self.device.iteration_s

    @property
    def step_s(self) -> float:
        """Seconds that a step of a loop of the user's takes besides its kernels."""
        return self.device.iteration_s

    # the compiler

    @property
    def is_here(self) -> bool:
        """Whether programs planned for this target can run on the device in use."""
        return self.platform is None or jax.default_backend() == self.platform

    @property
    def exported_for(self) -> str | None:
        """The platform, as JAX's exports call it, that a program planned for this target is lowered for where it cannot run; else None."""
        return None

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes that a program may hold when no limit is given; None is the capacity of the device in use."""
        return None

    @property
    def memory_bytes(self) -> int | None:
        """All memory of the device, which no limit may exceed; None where that is not known."""
        return None

    @property
    def check_options(self) -> Mapping[str, str | bool]:
        """Compiler options for a compilation that is only asked how much memory the program holds."""
        return {}

    @property
    def compiler_options(self) -> Mapping[str, str | bool]:
        """Compiler options that planned programs run with."""
        return {}

    def compiling(self, jaxpr: ClosedJaxpr) -> Self:
        """The same target, less compiler options under which XLA computes wrong values for a program."""
        return self

    def check(
        self,
        function: Callable[..., Any],
        avals: Sequence[Any],
        donate: Sequence[int] = (),
        optimise: bool = False,
        limit: int | None = None,
        shardings: Sequence[Any] | None = None,
    ) -> Check:
        """Compile a function of flat arguments, run nothing, and say how much memory it takes.

        Args:
            function: takes and returns flat arrays.
            avals: the arguments; they have ``shape`` and ``dtype``.
            donate: positions of donated arguments.
            optimise: whether the program is going to be run. Else machine code may be slower and sooner there; it holds the same.
            limit: bytes beyond which it does not matter how many they are.
            shardings: how each argument lies on several devices, None where that is the compiler's to say; the bytes are those of each.

        Raises:
            DeviceCompilerError: if the program cannot be compiled for the target here; the text says what to install or register.
            NotImplementedError: if the compiler does not analyse memory.
        """
        program = lowered(function, avals, donate, shardings)
        with telling_of_missing_calls():
            compiled = program.compile() if optimise else self._compiled_for_check(program)
        return self.checked(compiled)

    def _compiled_for_check(self, program: Any) -> Any:
        try:
            return program.compile(dict(self.check_options) or None)
        except jax.errors.JaxRuntimeError:  # a jaxlib of other options
            return program.compile()

    def checked(self, compiled: Any) -> Check:
        """The bytes that a compiled program takes at its peak: arguments (used or not), outputs and temporaries, without outputs in the
        memory of donated arguments, and bytes that are :meth:`hidden`.

        Raises:
            NotImplementedError: if the compiler does not analyse memory.
        """
        memory = compiled.memory_analysis()
        if memory is None:
            raise NotImplementedError("this backend does not tell what a compiled program holds: pass verify=False to plan without it.")
        reported = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
        hidden = self.hidden(compiled)
        return Check(int(reported) + hidden.nbytes, compiled, hidden.doubts)

    def hidden(self, compiled: Any) -> Hidden:
        """The memory that a compiled program takes at its peak besides that which its memory analysis reports."""
        return Hidden()


INVERTED = ("sqrt", "rsqrt", "exp", "pow")
"""Operations by whose inverse XLA multiplies rather than divide by their result."""
