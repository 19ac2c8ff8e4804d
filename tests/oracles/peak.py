"""The most memory that a loop tree takes on XLA:CPU, by running every turn of every loop and counting every array.

The program, the loop tree and the kernels are given: which terms a kernel computes, in which order kernels run, what is copied for
them, and in which shape XLA writes what they compute is a question of fusion, on which other tests ask XLA. So is the memory that
outputs have before they are written: the program is one whose results lie elsewhere, as those of a loop's body do. All bytes are
counted here, from shapes and dtypes, by an allocator with reference counts; nothing of :mod:`eqsat_mem.schedule.memory`, which is
judged by them, is asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.ir import Block, Dot, Fold, Map, bits, children, folded, is_leaf, itemsize
from eqsat_mem.ir.jaxprs import consts_and_carries
from eqsat_mem.ir.loop_tree import Loop, Seq, made, walk_regions
from eqsat_mem.schedule.fusion import Copy, Fused, fuse
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.strided_reads import Columns

Extents = tuple[int, ...]
NARROW = ("bfloat16", "float16")
FLOAT32 = 4
"""Bytes of a number in which XLA:CPU contracts narrow numbers, and in which it computes all bfloat16 ones."""
READ_AT_ONCE = 32_768
"""Elements that XLA:CPU's library adds up into one row of results; of several such rows it makes the result afterwards."""


def brute_force_peak(made_by: Schedule) -> int:
    """The most bytes that values of the loop tree take together, without the program's arguments."""
    run = _Run(made_by)
    run.region(made_by.seq, tuple(i.extent for i in made_by.ex.program.indices), None, frozenset(made_by.seq.outs))
    return run.heap.high


@dataclass
class Heap:
    """Bytes allocated, and the most there ever were."""

    now: int = 0
    high: int = 0

    def allocate(self, nbytes: int) -> None:
        self.now += nbytes
        self.high = max(self.high, self.now)

    def release(self, nbytes: int) -> None:
        self.now -= nbytes

    @contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """Memory that is there for as long as a step runs."""
        self.allocate(nbytes)
        yield
        self.release(nbytes)


@dataclass
class _Run:
    schedule: Schedule
    heap: Heap = field(default_factory=Heap)
    kernels: dict[Seq, Fused] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert isinstance(self.schedule.backend, CpuBackend), "what is counted here is what XLA:CPU does"
        self.ex, self.program = self.schedule.ex, self.schedule.ex.program
        self.contracted = {c for term in self.program.terms if isinstance(term, Dot) for c in (term.lhs, term.rhs)}
        self.columns = Columns(self.ex)

    def fused(self, seq: Seq) -> Fused:
        if seq not in self.kernels:
            self.kernels[seq] = fuse(self.ex, seq, self.schedule.backend)
        return self.kernels[seq]

    # bytes

    def is_narrow(self, t: int) -> bool:
        return str(self.program.terms[t].dtype) in NARROW

    def elements(self, over: int, extents: Extents) -> int:
        return math.prod(extents[i] for i in bits(over))

    def as_declared(self, t: int, extents: Extents) -> int:
        """Bytes of a value in its own dtype: of what loops stack, and of what is returned."""
        return self.elements(self.program.free[t], extents) * itemsize(self.program.terms[t].dtype)

    def as_computed(self, t: int, extents: Extents) -> int:
        """Bytes of a value as XLA:CPU computes it."""
        term = self.program.terms[t]
        in_contraction = isinstance(term, Dot) or t in self.contracted
        if self.is_narrow(t) and not is_leaf(term) and (in_contraction or str(term.dtype) == "bfloat16"):
            return self.elements(self.program.free[t], extents) * FLOAT32
        return self.as_declared(t, extents)

    def slices(self, read: Iterable[int], alive: dict[int, int], extents: Extents, along: int | None) -> int:
        """Bytes of what the loop over ``along`` cuts out of values from outside of the region."""
        outer = [c for c in read if self.program.source_of(c) not in alive]
        return sum(self.as_computed(c, extents) for c in outer if along is not None and self.program.free[c] >> along & 1)

    # regions

    def region(
        self, seq: Seq, extents: Extents, along: int | None, returned: frozenset[int], begun: dict[int, int] | None = None
    ) -> dict[int, int]:
        """Run a region, in a turn of a loop over ``along``; afterwards its results are still allocated: their bytes.

        What its loops begin with, constants, is allocated first of all, unless it is ``begun`` by the region around it.
        """
        kernels = self.fused(seq)
        if begun is None:
            begun = self.begun_ahead(seq, extents, returned)
            self.heap.allocate(sum(begun.values()))
        readers = {t: sum(t in own for own in kernels.operands) for step in kernels.kept for t in made(step)}
        readers = {t: n + (t in seq.outs and (n > 0 or not self.is_summed(t, along))) for t, n in readers.items()}
        alive: dict[int, int] = {}
        for position, (step, operands) in enumerate(zip(kernels.kept, kernels.operands)):
            for t in operands & readers.keys():
                readers[t] -= 1
            dying = [t for t in operands if t in alive and not readers[t]]
            with self.heap.holding(self.written_out(seq, position, extents, along)):
                if isinstance(step, Loop):
                    self.loop(step, operands, alive, extents, along)
                    alive |= {t: begun[t] for t in made(step)}
                elif isinstance(step, Seq):
                    alive |= self.region(step, extents, along, returned.difference(*kernels.operands[position + 1 :]), begun)
                else:
                    own = kernels.members[position]
                    last = step in returned and not readers[step] - 1
                    self.kernel(step, own, dying, alive, extents, along, last, begun)
            for t in {*dying, *(t for t in made(step) if t in alive and not readers[t])} & alive.keys():
                self.heap.release(alive.pop(t))
        return alive

    def begun_ahead(self, seq: Seq, extents: Extents, returned: frozenset[int]) -> dict[int, int]:
        """Bytes of what loops carry and scans stack in a region, those in stretches of it included, but not those in other loops."""
        kernels = self.fused(seq)
        begun: dict[int, int] = {}
        for position, step in enumerate(kernels.kept):
            if isinstance(step, Loop):
                begun |= {t: self.as_computed(t, extents) for t in step.folds} | {t: self.as_declared(t, extents) for t in step.stacks}
            elif isinstance(step, Seq):
                begun |= self.begun_ahead(step, extents, returned.difference(*kernels.operands[position + 1 :]))
            elif self.is_stacked(step):
                last = step in returned.difference(*kernels.operands)
                begun[step] = (self.as_declared if last else self.as_computed)(step, extents)
        return begun

    def is_summed(self, t: int, along: int | None) -> bool:
        """Whether the loop over ``along`` sums what its turns compute: where nothing else reads that, it is added at once."""
        return along is not None and bool(folded(self.program.terms[t]) >> along & 1)

    def is_stacked(self, step: int) -> bool:
        """Whether a kernel's result is what the steps of a scan stack, beside what they carry."""
        term = self.program.terms[step]
        return isinstance(term, Block) and term.call.prim.name == "scan" and term.out >= consts_and_carries(term.call.params)[1]

    def written_out(self, seq: Seq, position: int, extents: Extents, along: int | None) -> int:
        """Bytes of the copies that are there while a kernel runs: widened, at a larger shape, or position by position."""
        copies = [c for c in self.fused(seq).copies if c.first <= position <= c.last and not self.is_made_before(c, along)]
        apart = [t for t, first, last in self.columns.beside(seq, self.fused) if first <= position <= last]
        return sum(self.copied(c, extents) for c in copies) + sum(self.as_computed(t, extents) for t in apart)

    def copied(self, copy: Copy, extents: Extents) -> int:
        wide = self.is_narrow(copy.term)
        return self.elements(copy.over, extents) * (FLOAT32 if wide else itemsize(self.program.terms[copy.term].dtype))

    def is_made_before(self, copy: Copy, along: int | None) -> bool:
        """Whether a copy is a widened argument that the loop over ``along`` does not cut: it is made before the loop."""
        is_argument = is_leaf(self.program.terms[copy.term]) and copy.over == self.program.free[copy.term]
        return along is not None and is_argument and not copy.over >> along & 1

    # steps

    def loop(self, loop: Loop, read: frozenset[int], alive: dict[int, int], extents: Extents, along: int | None) -> None:
        inside = [c for _, seq in walk_regions(loop.body) for c in self.fused(seq).copies if self.is_made_before(c, loop.index)]
        widened = {(c.term, c.over): c for c in inside if not self.is_made_before(c, along)}
        with self.heap.holding(self.slices(read, alive, extents, along) + sum(self.copied(c, extents) for c in widened.values())):
            self.turns(loop, extents)

    def turns(self, loop: Loop, extents: Extents) -> None:
        def at(chunk: int) -> Extents:
            return (*extents[: loop.index], chunk, *extents[loop.index + 1 :])

        whole, rest = divmod(extents[loop.index], chunk := min(self.schedule.chunks[loop], extents[loop.index]))
        for size in [chunk] * whole + [rest] * bool(rest):
            self.turn(loop, at(size))

    def turn(self, loop: Loop, extents: Extents) -> None:
        self.heap.release(sum(self.region(loop.body, extents, loop.index, frozenset()).values()))

    def kernel(
        self,
        step: int,
        members: tuple[int, ...],
        dying: list[int],
        alive: dict[int, int],
        extents: Extents,
        along: int | None,
        last: bool,
        begun: dict[int, int],
    ) -> None:
        """One kernel: its result, in the buffer of an operand where that can be, and what it takes while it runs.

        ``last``: the program returns the result, and nothing else reads it.
        """
        term = self.program.terms[step]
        wide, size = self.as_computed(step, extents), (self.as_declared if last else self.as_computed)(step, extents)
        beside = wide if isinstance(term, Dot) and size < wide else 0
        if isinstance(term, Block) and not self.ex.unrolls.get(step):
            assert term.call.prim.name not in self.schedule.backend.weights.workspaces, "what libraries allocate is measured, not counted"
            beside += term.call.scratch_bytes
        folds = isinstance(term, Fold) and not self.ex.unrolls.get(step)
        if folds or isinstance(term, Dot | Block):  # kernels that call libraries read slices from copies
            read = {c for t in members for c in children(self.program.terms[t]) if c not in members}
            widened = {c for c in read if isinstance(term, Dot) and self.is_narrow(c)}
            beside += self.slices(read - widened, alive, extents, along)
        if folds:
            beside += size * self.rows_of_results(step, extents)
        if isinstance(term, Map):
            can = self.schedule.backend.can_take_over
            alike = (t for t in dying if alive[t] == size and can(self.ex, t, step, extents))
            taken = next((t for t in alike if not self.folds_inside(step, members, t, extents)), None)
            if taken is not None:
                self.heap.release(alive.pop(taken))
        with self.heap.holding(beside):
            self.heap.allocate(0 if step in begun else size)
        alive[step] = size

    def folds_inside(self, step: int, members: tuple[int, ...], t: int, extents: Extents) -> bool:
        """Whether a kernel combines elements of an array to one of its result, which cannot be written over the array then."""
        reads = {c for member in members for c in children(self.program.terms[member]) if self.program.source_of(c) == t}
        return any(self.elements(self.program.free[c] & ~self.program.free[step], extents) > 1 for c in reads)

    def rows_of_results(self, step: int, extents: Extents) -> int:
        """The number of rows of results that a fold of leading axes leaves; none where it adds up its result at once."""
        term = self.program.terms[step]
        assert isinstance(term, Fold)
        axes = list(bits(self.program.free[term.arg]))
        folded = [i for i in axes if term.over >> i & 1]
        if not folded or axes[0] != folded[0]:
            return 0
        row = self.elements(self.program.free[step], extents)
        groups = math.ceil(math.prod(extents[i] for i in folded) / max(1, READ_AT_ONCE // max(row, 1)))
        return groups if groups > 1 else 0
