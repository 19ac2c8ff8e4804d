"""Predicted seconds of a loop tree on a device."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Block, Map, Program, Term, argument_bytes, bits, output_sizes
from eqsat_mem.ir.loop_tree import Chunks, Loop, Seq, Trees, made
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.cost_model import arithmetic_s, exchange_s, spread_weight
from eqsat_mem.schedule.device import Device
from eqsat_mem.schedule.fusion import Fused, adds_to_sum
from eqsat_mem.schedule.kernel import Kernel, moves
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.sizes import Extents, extents_inside

LOOP_TOLL = 0.03
"""The share of its time that a loop must save: among schedules predicted to be as fast, the plan is the one with fewer loops."""
FOLD_TOLL = 0.02
"""The share that accumulating one more fold must save: slices keep every bit, sums of chunks round differently."""

EXCHANGE_TOLL = 0.2
"""The share of its time that a plan must save whose devices exchange values for twice as long as without loops: how long that is depends on
what else goes on between devices, which no figure of a link tells."""


@dataclass(eq=False)
class Timing:
    """Seconds of regions of one program, each computed once per combination of extents."""

    memory: Memory
    emitted: bool = True
    """Whether the program runs as emitted source, whose idioms a program as its author wrote it lacks."""
    walked: int = 0
    """Steps of regions looked at so far: the work done, in a unit that no other process changes."""
    _seconds: dict[Any, float] = field(default_factory=dict)
    _kernels: dict[Any, tuple[float | Loop | Seq, ...]] = field(default_factory=dict)
    _loops: dict[Any, float] = field(default_factory=dict)
    _tolls: dict[Any, float] = field(default_factory=dict)
    _touched: dict[Any, int] = field(default_factory=dict)
    _terms: dict[Any, float] = field(default_factory=dict)
    _traffic: dict[Seq, _Traffic] = field(default_factory=dict)
    _levels: dict[int, int] = field(default_factory=dict)
    _stacked: dict[Seq, tuple[int, ...]] = field(default_factory=dict)
    _added: dict[Seq, frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.backend: Backend = self.memory.backend
        self.device: Device = self.backend.device

    def total(self, seq: Seq, chunks: Chunks) -> float:
        """Seconds of the whole program."""
        return self.seconds(seq, self.memory.full_extents(), chunks) + self.allocating(seq, chunks)

    def allocating(self, seq: Seq, chunks: Chunks) -> float:
        """Seconds to get hold of memory: temporaries are one allocation, each output is another."""
        held = self.memory.total(seq, chunks) - self._arguments_and_outputs
        if held >= self.device.reused_bytes:
            held = self._streaming.total(seq, chunks) - self._arguments_and_outputs
        return self.device.fresh_s(held) + self._allocating_outputs

    @cached_property
    def _streaming(self) -> Memory:
        return self.memory.streaming()

    @cached_property
    def _arguments_and_outputs(self) -> int:
        return argument_bytes(self.memory.ex.program) + sum(output_sizes(self.memory.ex.program))

    @cached_property
    def _allocating_outputs(self) -> float:
        return sum(map(self.device.fresh_s, output_sizes(self.memory.ex.program)))

    def tolls(self, seq: Seq, extents: Extents, chunks: Chunks) -> float:
        """Seconds that the loops and the exchanges of a region must save: shares of their own time, whatever else the program does."""
        key = self.memory.key(seq, extents, chunks)
        known = self._tolls.get(key)
        if known is None:
            known = 0.0
            for step in seq.steps:
                if isinstance(step, int):
                    if self._exchange_price:
                        known += self._exchange_price * exchange_s(self.memory.ex.program, step, extents, self.backend)
                elif isinstance(step, Seq):
                    known += self.tolls(step, extents, chunks)
                else:
                    turns = extents[step.index] / min(chunks[step], extents[step.index])
                    own = (LOOP_TOLL + FOLD_TOLL * len(step.folds)) * self._loop(step, extents, chunks)
                    known += own + turns * self.tolls(step.body, extents_inside(extents, step, chunks), chunks)
            self._tolls[key] = known
        return known

    @cached_property
    def _exchange_price(self) -> float:
        """The toll of an exchange for each second that it takes."""
        program, extents = self.memory.ex.program, self.memory.full_extents()
        exchanging = sum(exchange_s(program, t, extents, self.backend) for t in program.reachable()) if program.shares is not None else 0.0
        if not exchanging:
            return 0.0
        return EXCHANGE_TOLL * sum(arithmetic_s(program, t, extents, self.backend) for t in program.reachable()) / exchanging

    def seconds(self, seq: Seq, extents: Extents, chunks: Chunks) -> float:
        key = self.memory.key(seq, extents, chunks)
        known = self._seconds.get(key)
        if known is None:
            known = self._seconds[key] = self._walk(seq, extents, chunks)
        return known

    def _walk(self, seq: Seq, extents: Extents, chunks: Chunks) -> float:
        self.walked += len(seq.steps)
        seconds = 0.0
        for part in self._parts(seq, extents, self.device.level(self.touched(seq, extents, chunks))):
            if isinstance(part, Seq):
                seconds += self.seconds(part, extents, chunks)
            elif isinstance(part, Loop):
                seconds += self._loop(part, extents, chunks)
            else:
                seconds += part
        return seconds

    def _parts(self, seq: Seq, extents: Extents, level: int) -> tuple[float | Loop | Seq, ...]:
        """The seconds of a region's kernels when all that it touches fits a level of the memory, its loops and its stretches in order."""
        key = seq, extents, level
        known = self._kernels.get(key)
        if known is None:
            known = self._kernels[key] = tuple(self._each(seq, extents, level))
        return known

    def _each(self, seq: Seq, extents: Extents, level: int) -> Iterator[float | Loop | Seq]:
        program, fused, sizes = self.memory.ex.program, self.memory.fused(seq), self.memory.sizes(extents)
        outside, bandwidth = extents == self.memory.full_extents(), self.device.levels[level][1]
        calls, traffic = set[tuple[int, tuple[int, ...]]](), self._traffic_of(seq)
        stacked, added, written_out = self._stacked.get(seq, ()), self._added.get(seq, frozenset()), self._written_out(fused, extents)
        every = fused.members_at(self.memory.ex, extents, self.backend)
        for step, operands, read, members in zip(fused.kept, fused.operands, traffic.read, every):
            if not isinstance(step, int):
                yield step
                continue
            term = program.terms[step]
            if isinstance(term, Block):
                call = (id(term.call), term.args)
                if call in calls:
                    continue
                calls.add(call)
            nbytes = 0 if step in added else sizes[step]
            most = nbytes if moves(term) else math.inf
            taken = [(t, min(sizes[t], most)) for t in read]
            moved = int(nbytes + sum(size for _, size in taken))
            unrolled = not written_out.unrolled.isdisjoint(members)
            kernel = Kernel(
                self.memory.ex, step, members, operands, extents, nbytes, moved, outside, self.emitted, unrolled, step in stacked
            )
            work = self.backend.arithmetic_s(
                kernel, self._work(members, written_out, extents, added), lambda t: self._arithmetic(t, extents, None)
            )
            traffic_s = 0.0 if step in traffic.passed else nbytes / bandwidth
            for t, size in taken:  # a slice of something outside comes from where the whole of it fits
                traffic_s += size / (bandwidth if t in traffic.inside else self.device.levels[max(level, self._whole_level(t))][1])
            yield max(work / self.backend.share(kernel), traffic_s) + self.backend.overhead_s(kernel)

    def _whole_level(self, t: int) -> int:
        """The level of memory that holds the whole of a value."""
        known = self._levels.get(t)
        if known is None:
            known = self._levels[t] = self.device.level(self.memory.size(t, self.memory.full_extents()))
        return known

    def arithmetic(self, seq: Seq, extents: Extents) -> float:
        """Seconds that a straight region cannot take less than: its arithmetic."""
        fused = self._written_out(self.memory.fused(seq), extents)
        return sum(self._work(members, fused, extents) for members in fused.members)

    def _written_out(self, fused: Fused, extents: Extents) -> Fused:
        """The kernels of a region, whose folds are written out along no index that a loop cuts."""
        unrolls, full = self.memory.ex.unrolls, self.memory.full_extents()
        cut = [t for t in fused.unrolled if any(extents[i] < full[i] for i in bits(unrolls[t]))]
        return fused.folding(self.memory.ex, cut) if cut else fused

    def _work(self, members: Sequence[int], fused: Fused, extents: Extents, added: Collection[int] = ()) -> float:
        """Seconds of arithmetic of one kernel, of which some terms are ``added`` to the sums of a loop."""
        if fused.spread.isdisjoint(members):
            return sum(self._arithmetic(t, extents, None, t in added) for t in members)
        weight = spread_weight(self.memory.ex.program, members, self.backend)
        return sum(self._arithmetic(t, extents, weight if t in fused.spread else None) for t in members)

    def _arithmetic(self, t: int, extents: Extents, spread: float | None, added: bool = False) -> float:
        key = t, extents, spread, added
        known = self._terms.get(key)
        if known is None:
            known = self._terms[key] = arithmetic_s(self.memory.ex.program, t, extents, self.backend, spread, added)
        return known

    def _loop(self, loop: Loop, extents: Extents, chunks: Chunks) -> float:
        key = loop, chunks[loop], *self.memory.key(loop.body, extents, chunks)
        known = self._loops.get(key)
        if known is None:
            known = self._loops[key] = self._turns(loop, extents, chunks)
        return known

    def _turns(self, loop: Loop, extents: Extents, chunks: Chunks) -> float:
        count, rest = divmod(extents[loop.index], min(chunks[loop], extents[loop.index]))
        inside = extents_inside(extents, loop, chunks)
        self._stacked[loop.body] = loop.stacks
        if loop.body not in self._added:
            self._added[loop.body] = self._added_in(loop)
        turn_s = self.backend.turn_s(self.memory.ex, loop)
        seconds = count * (self.seconds(loop.body, inside, chunks) + turn_s + self._results(loop, inside, extents))
        if rest:
            last = inside.with_extent(loop.index, rest)
            seconds += self.seconds(loop.body, last, chunks) + self._results(loop, last, extents)
        return seconds

    def _added_in(self, loop: Loop) -> frozenset[int]:
        """The sums of a loop into which its body writes."""
        program, fused = self.memory.ex.program, self.memory.fused(loop.body)
        return frozenset(t for t in loop.folds if adds_to_sum(program, t, loop.index, loop.body, fused))

    def _results(self, loop: Loop, inside: Extents, outside: Extents) -> float:
        """Writing a chunk's results: accumulators that it does not write into are read and written whole, stacked slices copied once."""
        folds = sum(3 * self.memory.size(t, inside) for t in loop.folds if t not in self._added[loop.body])
        stacks = sum(2 * self.memory.size(t, inside) for t in loop.stacks)
        held = sum(self.memory.size(t, outside) for t in made(loop))
        return (folds + stacks) / self.device.bandwidth(held) if folds or stacks else 0.0

    def touched(self, seq: Seq, extents: Extents, chunks: Chunks) -> int:
        """Bytes that one pass through a region reads and writes: it is fast if they stay in cache."""
        key = self.memory.key(seq, extents, chunks)
        known = self._touched.get(key)
        if known is None:
            traffic, inner = self._traffic_of(seq), 0
            for step in traffic.nested:
                if isinstance(step, Seq):
                    inner = max(inner, self.touched(step, extents, chunks))
                else:
                    inner = max(inner, self.touched(step.body, extents_inside(extents, step, chunks), chunks))
            known = self._touched[key] = inner + sum(map(self.memory.sizes(extents).__getitem__, traffic.touched))
        return known

    def _traffic_of(self, seq: Seq) -> _Traffic:
        known = self._traffic.get(seq)
        if known is None:
            known = self._traffic[seq] = _Traffic.of(self.memory.ex.program, self.memory.fused(seq), seq)
        return known


@dataclass(frozen=True, eq=False)
class _Traffic:
    """The values that a region moves, whatever their sizes.

    Attributes:
        passed: those that are in memory for no longer than it takes to use them: streamed ones, and those of operations that only move
            elements, or are read by one such, where XLA computes them inside what reads them.
        inside: the values that the region makes itself.
        read: the values that each kernel reads from memory.
        touched: all that are read or written.
        nested: the loops and stretches inside.
    """

    passed: frozenset[int]
    inside: frozenset[int]
    read: tuple[tuple[int, ...], ...]
    touched: tuple[int, ...]
    nested: tuple[Loop | Seq, ...]

    @classmethod
    def of(cls, program: Program, fused: Fused, seq: Seq) -> _Traffic:
        gone = fused.streamed | passed(program, fused, seq.outs)
        values = frozenset(step for step in fused.kept if isinstance(step, int)).union(*fused.operands)
        read = tuple(tuple(operands - gone) for operands in fused.operands)
        nested = tuple(step for step in fused.kept if not isinstance(step, int))
        return cls(gone, frozenset(made(seq)), read, tuple(values - gone), nested)


def passed(program: Program, fused: Fused, outs: Collection[int]) -> frozenset[int]:
    """The kept values that XLA computes inside operations that read them, though ``fused`` holds them lest too little is predicted."""
    readers: dict[int, list[Term | None]] = {}
    for step, operands in zip(fused.kept, fused.operands):
        for t in operands:
            readers.setdefault(t, []).append(program.terms[step] if isinstance(step, int) else None)

    def inside(t: int, users: Sequence[Term | None]) -> bool:
        term = program.terms[t]
        if moves(term):
            return all(isinstance(user, Map) or moves(user) for user in users)
        return isinstance(term, Map) and len(users) == 1 and moves(users[0])

    made = (t for t in fused.kept if isinstance(t, int) and t in readers and t not in outs)
    return frozenset(t for t in made if inside(t, readers[t]))


@dataclass(frozen=True, eq=False)
class Known:
    """The figures that are known of a program on a device, whatever the limit: of the parts of trees, and of these parts split along an
    index."""

    timing: Timing
    trees: Trees = field(default_factory=Trees)
    cuts: dict[Any, Any] = field(default_factory=dict)
    kept: dict[Any, tuple[Seq, ...]] = field(default_factory=dict)

    @classmethod
    def nothing(cls, ex: Extraction, backend: Backend) -> Known:
        return cls(Timing(Memory(ex, backend)))
