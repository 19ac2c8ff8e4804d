"""Live sets and peaks of a loop tree.

Steps run in order; a value is live from the step that makes it to the last that reads it, and outputs stay. A loop holds its results and,
on top of what is live around it, the peak of its body at the chunk's extent. An elementwise result takes over the buffer of an operand of
the same size that dies with it. Values computed on the way are not held (see :mod:`eqsat_mem.schedule.fusion`). All sizes are bytes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from operator import itemgetter

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Block, Const, Dot, Input, Map, argument_bytes, bits, children, itemsize
from eqsat_mem.ir.jaxprs import consts_and_carries
from eqsat_mem.ir.loop_tree import Chunks, Loop, Seq, Step, loops, made
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.copies import output_copies, turned_results
from eqsat_mem.schedule.donated import places, taking
from eqsat_mem.schedule.footprint import Footprint, Live, Passing, Peak
from eqsat_mem.schedule.fusion import Fused, Inside, added_apart, adds_to_sum, fuse, reads_others
from eqsat_mem.schedule.late_states import LEAST_BYTES, waiting
from eqsat_mem.schedule.loop_bodies import block_scratch
from eqsat_mem.schedule.packing import at_once, bytes_of, bytes_within, places_of, with_gaps
from eqsat_mem.schedule.sizes import Extents, Sizes, region_of
from eqsat_mem.schedule.strided_reads import Columns
from eqsat_mem.schedule.widened import Widened


@dataclass(eq=False)
class Memory:
    """Peaks of regions of one program, each computed once per combination of extents."""

    ex: Extraction
    backend: Backend
    streams: bool = False
    """Whether values that a library passes on row by row count as not held. It does so for large ones only: others must count."""
    as_written: bool = False
    """Whether products are as large as in the function that was traced, which may repeat them along an axis."""
    as_run: bool = True
    """Whether kernels run in the backend's order rather than that of their region."""
    _fused: dict[Seq, Fused] = field(default_factory=dict)
    _fused_alike: dict[tuple[tuple[Step, ...], frozenset[int], bool], Fused] = field(default_factory=dict)
    _computed_inside: Inside = field(default_factory=dict)
    _in_loops: set[Seq] = field(default_factory=set)
    _inner: dict[Seq, tuple[Loop, ...]] = field(default_factory=dict)
    _peaks: dict[tuple[Seq, Extents, tuple[int, ...]], Peak] = field(default_factory=dict)
    _footprints: dict[tuple[Seq, Extents], Footprint] = field(default_factory=dict)
    _sliced_along: dict[Seq, int] = field(default_factory=dict)
    _returned: dict[Seq, frozenset[int]] = field(default_factory=dict)
    """Of a stretch, what the region around it returns and does not read."""
    _flows: dict[Seq, dict[int, Passing]] = field(default_factory=dict)
    _waiting: dict[Seq, Mapping[Loop, tuple[int, frozenset[int]]]] = field(default_factory=dict)
    _sizes: dict[Extents, Sizes] = field(default_factory=dict)
    _copied: dict[Seq, frozenset[int]] = field(default_factory=dict)
    """Of a region in no loop, the program's results that XLA copies into the memory of donated arguments."""
    _held: Memory | None = None

    def __post_init__(self) -> None:
        program = self.ex.program
        self._full = Extents(i.extent for i in program.indices) if self._held is None else self._held.full_extents()
        repeated = program.repeated if self.as_written else {}
        self._layouts = [bits(free | repeated.get(t, 0)) for t, free in enumerate(program.free)]
        contracted = {c for term in program.terms if isinstance(term, Dot) for c in (term.lhs, term.rhs)}
        self._widths = [self.backend.width(self.ex, t, t in contracted) for t in range(len(program.terms))]
        self._columns = Columns(self.ex)
        self._widened = Widened(program, self._widths)
        self._block_scratch = cache(partial(block_scratch, program, self.backend))
        scans = ((t, term) for t, term in enumerate(program.terms) if isinstance(term, Block) and term.call.prim.name == "scan")
        self._stacked_by_scans = frozenset(t for t, term in scans if term.out >= consts_and_carries(term.call.params)[1])

    def stored(self, t: int, extents: Extents) -> int:
        """Bytes of a value that loops stack, or that is returned: in its own dtype."""
        return self.size(t, extents) * itemsize(self.ex.program.terms[t].dtype) // self._widths[t]

    def result(self, step: int, seq: Seq, extents: Extents) -> tuple[int, int]:
        """Bytes that a kernel's result takes, and that it takes besides while it is computed.

        What the whole program returns is in its own dtype; a contraction in float32 is narrowed afterwards.
        """
        if self.streams and step in self.fused(seq).streamed:
            return 0, 0
        term, size = self.ex.program.terms[step], self.size(step, extents)
        if step not in self._returned.get(seq, seq.outs) or seq in self._sliced_along or step in self.fused(seq).last_use:
            return (0 if self._is_added(step, seq) else size), 0
        stored = self.stored(step, extents)
        return stored, size if isinstance(term, Dot) and stored < size else 0

    def _is_added(self, step: int, seq: Seq) -> bool:
        """Whether a contraction, or a scatter, adds to the sum of a loop as it is computed."""
        term, along, fused = self.ex.program.terms[step], self._sliced_along.get(seq), self.fused(seq)
        if along is None or not isinstance(term, Dot):
            return along is not None and adds_to_sum(self.ex.program, step, along, seq, fused)
        return self.backend.adds_in_place and step in seq.outs and step not in fused.last_use and bool(term.over >> along & 1)

    def size(self, t: int, extents: Extents) -> int:
        """Bytes of a value at the given extents of its indices."""
        return self.sizes(extents)[t]

    def sizes(self, extents: Extents) -> Sizes:
        """Bytes of each value at the given extents."""
        known = self._sizes.get(extents)
        if known is None:
            known = self._sizes[extents] = Sizes(extents, self._layouts, self._widths)
        return known

    def full_extents(self) -> Extents:
        return self._full

    def fused(self, seq: Seq) -> Fused:
        """The kernels of a region; one inside others is asked for after those around it. Different trees have regions of the same steps."""
        if seq not in self._fused:
            alike = seq.steps, seq.outs, seq not in self._in_loops
            known = self._fused_alike.get(alike) or fuse(self.ex, seq, self.backend, self.as_run, alike[-1], self._computed_inside)
            self._fused[seq] = self._fused_alike[alike] = known
            self._in_loops.update(known.looped(seq in self._in_loops))
        return self._fused[seq]

    def in_program_order(self) -> Memory:
        """The same with kernels in the order of their region."""
        return Memory(self.ex, self.backend, as_run=False, _computed_inside=self._computed_inside)

    def streaming(self) -> Memory:
        """The same, except that ``streams`` is set: regions without values that are passed on hold what they hold here."""
        return replace(self, streams=True, _peaks={}, _footprints={}, _held=self)

    def key(self, seq: Seq, extents: Extents, chunks: Chunks) -> tuple[Seq, Extents, tuple[int, ...]]:
        """The key of a figure of a region: the extents around it and the chunks inside it, on which it depends."""
        inner = self._inner.get(seq)
        if inner is None:
            inner = self._inner[seq] = tuple(loops(seq))
        return seq, extents, tuple([chunks[loop] for loop in inner])

    def total(self, seq: Seq, chunks: Chunks) -> int:
        """Arguments, outputs and temporaries of the whole program."""
        return self._fixed + max(self.peak(seq, self.full_extents(), chunks).nbytes, self._at_the_end(seq)) + self._taken_apart(seq)

    @cached_property
    def _fixed(self) -> int:
        """Bytes that no plan changes, besides outputs that are computed."""
        return argument_bytes(self.ex.program) + output_copies(self.ex.program)

    def _taken_apart(self, seq: Seq) -> int:
        """Arguments that loops read position by position are copied position by position, once, before all loops."""
        program, read = self.ex.program, self._columns.read_by_loops(seq, self.fused)
        return sum(program.nbytes(t) for t in read.apart if isinstance(program.terms[t], Input | Const))

    @cached_property
    def _taken(self) -> Mapping[int, int]:
        """The results that take the memory of donated arguments, with these."""
        return taking(self.ex.program, self.backend.donated)

    @property
    def _begins_loops_ahead(self) -> bool:
        return self.as_run and self.backend.begins_loops_ahead

    @cached_property
    def _turned_results(self) -> Mapping[int, int]:
        return turned_results(self.ex.program)

    def _at_the_end(self, seq: Seq) -> int:
        """Bytes of the outputs that a program makes and of the stacks of its scans that it returns in another order, if there are any."""
        turned = sum(nbytes for t, nbytes in self._turned_results.items() if t in seq.steps)
        return turned + sum(self.stored(t, self.full_extents()) for t in seq.outs if turned)

    def peak(self, seq: Seq, extents: Extents, chunks: Chunks) -> Peak:
        """The largest live set inside ``seq`` of values that it makes."""
        key = self.key(seq, extents, chunks)
        known = self._peaks.get(key)
        if known is None:
            known = self._peaks[key] = self._highest(seq, extents, chunks)
        return known

    def _highest(self, seq: Seq, extents: Extents, chunks: Chunks) -> Peak:
        """The first of the highest points of a region. What lies in free outputs is found where it may matter, which takes a while."""
        region = self.footprint(seq, extents)
        best, within_step = region.highest, None
        found: list[tuple[int, int, Loop | Seq, Peak, int]] = []
        for position, step in region.kernels.nested:
            inner = self._inside(step, extents, chunks)
            nbytes = region.around[position] + inner.nbytes
            found.append((-nbytes - region.free_bytes[position], position, step, inner, nbytes))
        for least, position, step, inner, nbytes in sorted(found, key=itemgetter(0, 1)):
            if -least < best.nbytes:
                break
            nbytes += self._left_free(region.free(position), step, extents, chunks)
            if nbytes > best.nbytes or (nbytes == best.nbytes and position < best.position):
                best, within_step = Peak(nbytes, inner.path, position), step
        return best if within_step is None else Peak(best.nbytes, (seq.steps.index(within_step), *best.path), best.position)

    def _inside(self, step: Loop | Seq, extents: Extents, chunks: Chunks) -> Peak:
        return self.peak(*region_of(step, extents, chunks), chunks)

    def _left_free(self, free: Mapping[int, int], step: Loop | Seq, extents: Extents, chunks: Chunks) -> int:
        """The bytes of outputs, free around a step, in which nothing lies while it holds most; what is no value is taken to lie there."""
        if not free or self.backend.loops_beside_outputs:
            return 0
        held = self._inside(step, extents, chunks).nbytes
        if held <= min(free):
            return bytes_of(free) - held
        values = [live.nbytes for live in self.at_peak(*region_of(step, extents, chunks), chunks)[0]]
        return max(bytes_of(free) - bytes_within(free, Counter(values)) - max(held - sum(values), 0), 0)

    def at_peak(self, seq: Seq, extents: Extents, chunks: Chunks) -> tuple[list[Live], int | None]:
        """The values that are there at the peak of ``seq``, those of outer regions first, and the operation that runs then, if any."""
        at, region = self.peak(seq, extents, chunks).position, self.footprint(seq, extents)
        step = region.kept[at] if at >= 0 else None
        here = [Live(t, nbytes, extents) for t, nbytes in (*region.live(at), *self.unwritten(region, at, extents, chunks))]
        if step is None or isinstance(step, int):
            return here, step
        values, running = self.at_peak(*region_of(step, extents, chunks), chunks)
        return here + values, running

    def peaks_inside(self, seq: Seq, chunks: Chunks) -> bool:
        """Whether a whole program is at its peak while the body of a loop or branch runs that has a program of its own."""
        _, running = self.at_peak(seq, self.full_extents(), chunks)
        term = None if running is None else self.ex.program.terms[running]
        return isinstance(term, Block) and any(term.call.bodies)

    def unwritten(self, region: Footprint, position: int, extents: Extents, chunks: Chunks) -> list[tuple[int, int]]:
        """The program's outputs in whose memory nothing lies yet while a kernel runs, a loop at its peak, with these bytes."""
        if not (free := region.free(position)):
            return []
        step = region.kept[position]
        nbytes = bytes_of(free) if isinstance(step, int) else self._left_free(free, step, extents, chunks)
        return region.unwritten(position, nbytes)

    def footprint(self, seq: Seq, extents: Extents) -> Footprint:
        """The memory that a region holds around its steps. A region inside others is asked for after those around it."""
        key = seq, extents
        known = self._footprints.get(key)
        if known is None:
            if self._held is None or self.fused(seq).streamed:
                known = self._walk(seq, extents)
            else:
                known = self._held.footprint(seq, extents)
            self._footprints[key] = known
        return known

    def _walk(self, seq: Seq, extents: Extents) -> Footprint:
        program, fused, sizes = self.ex.program, self.fused(seq), self.sizes(extents)
        every = fused.members_at(self.ex, extents, self.backend)
        live: dict[int, int] = {}
        around: list[int] = []
        lives: list[tuple[int, int, int, float]] = []
        is_whole = seq not in self._sliced_along and seq not in self._returned and not self.backend.in_loop
        if is_whole and self._taken:
            self._copied[seq] = places(program, seq, self._taken).copied
        copied = self._copied.get(seq, ())
        packs = self.backend.packs and (seq in self._sliced_along or self.backend.in_loop) and not fused.nested
        beside, joined = list[tuple[int, int]](), dict[int, int]()
        begun = self._begun_ahead(seq, extents, seq in self._sliced_along)
        total, waiting = 0, sum(sum(states.values()) for states in begun.values())
        along = self._sliced_along.get(seq) if self.backend.adds_at_once else None
        stay = seq.outs if along is None else seq.outs - added_apart(program, seq, along, fused)
        for position, (step, written) in enumerate(zip(fused.kept, self.written_out(seq, extents), strict=True)):
            dying, sliced = self._flow(seq, position, every[position], live)
            scratch, own, new = written, 0, dict[int, int]()
            if isinstance(step, int):
                if isinstance(term := program.terms[step], Block) and not self.ex.unrolls.get(step):
                    own = self._block_scratch(term.call, term.args, extents)
                new[step], more = self.result(step, seq, extents)
                scratch += more + sum(map(sizes.__getitem__, sliced))
                own += self.backend.scratch_bytes(self.ex, step, every[position], extents, sizes.__getitem__)
            elif isinstance(step, Loop):
                new = self.state(step, extents)
                self._sliced_along[step.body] = step.index
                scratch += sum(map(sizes.__getitem__, sliced)) + self._widened.ahead(step, self._sliced_along.get(seq), extents, self.fused)
            else:
                self._enter(step, seq)
            if not isinstance(step, int):
                scratch += self._outputs_ahead(seq, live.keys() | made(step))
            scratch += sum(nbytes for t, nbytes in new.items() if t in copied)
            over = self._taken_over(step, every[position], new, dying, live, extents)
            joined |= over
            there = begun.get(position, {})
            waiting -= sum(there.values())
            around.append(total + sum(new.values()) - sum(live[t] for t in over.values()) + scratch + own + waiting)
            beside.append((scratch, own))
            if isinstance(step, Seq):
                new = {t: nbytes for t, nbytes, _, _ in self.footprint(step, extents).lives if t in step.outs}
            live |= new
            total += sum(new.values())
            for t, nbytes in new.items():
                read = math.inf if t in stay else fused.last_use.get(t, position)
                lives.append((t, nbytes, 0 if t in there else position + isinstance(step, Seq), read))
            for t in (*dying, *(t for t in new if t not in fused.last_use and t not in stay)):
                total -= live.pop(t)
        if packs:  # inside of loops, also of the user's
            around = with_gaps(around, places_of(lives, joined), at_once(beside))
        elif is_whole:
            return Footprint.of_program(fused, around, lives, joined, beside, self.backend.packs)
        return Footprint(fused, tuple(around), tuple(lives))

    def _begun_ahead(self, seq: Seq, extents: Extents, is_inside: bool) -> dict[int, dict[int, int]]:
        """The results that are there from the beginning of a region, ``is_inside`` a loop or not, by the positions of their kernels:
        constants that loops and scans begin to write into, and results in the memory of donated arguments."""
        taken = frozenset() if is_inside else frozenset(self._taken)
        if not (taken or self._begins_loops_ahead):
            return {}
        fused, alone = self.fused(seq), taken | (self._stacked_by_scans if self._begins_loops_ahead else frozenset())
        begun = {p: self._begun(step, seq, extents, is_inside) for p, step in fused.nested}
        stacked = ((p, t) for p, t in enumerate(fused.kept) if isinstance(t, int) and t in alone)
        return begun | {p: {t: self.result(t, seq, extents)[0]} for p, t in stacked}

    def _begun(self, step: Loop | Seq, seq: Seq, extents: Extents, is_inside: bool) -> dict[int, int]:
        if isinstance(step, Seq):
            return dict(itertools.chain.from_iterable(there.items() for there in self._begun_ahead(step, extents, is_inside).values()))
        state = self.state(step, extents)
        if is_inside:
            return state
        waits = self.waiting(step, seq)
        late = frozenset() if waits is None else waits[1]
        return {t: nbytes for t, nbytes in state.items() if t in self._taken or (self._begins_loops_ahead and t not in late)}

    def waiting(self, loop: Loop, seq: Seq) -> tuple[int, frozenset[int]] | None:
        """The value that a loop of a region, inside of no loop, waits for, and the results whose memory does; None if it does not wait."""
        if not self.backend.begins_loops_ahead or sum(self.state(loop, self.full_extents()).values()) < LEAST_BYTES:
            return None
        if seq not in self._waiting:
            self._waiting[seq] = waiting(self.ex.program, seq)
        return self._waiting[seq].get(loop)

    def state(self, loop: Loop, extents: Extents) -> dict[int, int]:
        """The results of a loop, which it carries, with their bytes."""
        return {t: self.size(t, extents) for t in loop.folds} | {t: self.stored(t, extents) for t in loop.stacks}

    def _enter(self, stretch: Seq, seq: Seq) -> None:
        """Note of a stretch what the region around it does with it."""
        self._copied[stretch] = self._copied.get(seq, frozenset())
        self._returned[stretch] = self._returned.get(seq, seq.outs).difference(self.fused(seq).last_use) & stretch.outs
        if seq in self._sliced_along:
            self._sliced_along[stretch] = self._sliced_along[seq]

    def _outputs_ahead(self, seq: Seq, there: Collection[int]) -> int:
        """Bytes of the program's outputs that a region makes after a loop, where the loop cannot use their memory."""
        if not self.backend.loops_beside_outputs or self.backend.in_loop or seq in self._sliced_along:
            return 0
        unwritten = seq.outs.intersection(o.term for o in self.ex.program.outputs).difference(there, self._taken)
        return sum(self.stored(t, self.full_extents()) for t in unwritten)

    def written_out(self, seq: Seq, extents: Extents) -> list[int]:
        """Bytes of what is written out in float32, at a larger shape, or position by position, while each kernel runs."""
        fused, along = self.fused(seq), self._sliced_along.get(seq)
        changes = [0] * (len(fused.kept) + 1)
        for s in fused.copies:
            if along is None or not self._widened.is_unchanged(s, along):
                nbytes = self._widened.nbytes(s, extents)
                changes[s.first] += nbytes
                changes[s.last + 1] -= nbytes
        for t, first, last in self._columns.beside(seq, self.fused):
            changes[first] += self.size(t, extents)
            changes[last + 1] -= self.size(t, extents)
        return list(itertools.accumulate(changes[:-1]))

    def _taken_over(
        self, step: Step, members: Collection[int], new: dict[int, int], dying: Sequence[int], live: dict[int, int], extents: Extents
    ) -> dict[int, int]:
        """An elementwise result, with the operand of its size that dies here over which it is written; nothing where there is none."""
        if not isinstance(step, int) or step in self._taken or not isinstance(self.ex.program.terms[step], Map):
            return {}
        alike = (t for t in dying if live[t] == new[step] and not reads_others(self.ex.program, step, members, t, extents))
        return next(({step: t} for t in alike if self.backend.can_take_over(self.ex, t, step, extents)), {})

    def _flow(self, seq: Seq, position: int, members: tuple[int, ...], live: Collection[int]) -> Passing:
        """The flow of the values that are ``live`` as a kernel of some members runs, whatever their sizes."""
        if members is not self.fused(seq).members[position]:  # a tile kernel at these extents
            return self._flow_at(seq, position, members, live)
        known = self._flows.setdefault(seq, {})
        if position not in known:
            known[position] = self._flow_at(seq, position, members, live)
        return known[position]

    def _flow_at(self, seq: Seq, position: int, members: tuple[int, ...], live: Collection[int]) -> Passing:
        fused = self.fused(seq)
        dying = tuple(t for t in fused.read_last[position] if t in live and t not in seq.outs)
        step, along = fused.kept[position], self._sliced_along.get(seq)
        if along is None or isinstance(step, Seq):
            return Passing(dying, ())
        read = self._copied_reads(step, members) if isinstance(step, int) else fused.operands[position]
        return Passing(dying, tuple(c for c in read if along in self._layouts[c] and self.ex.program.source_of(c) not in live))

    def _copied_reads(self, step: int, members: tuple[int, ...]) -> Collection[int]:
        """The operands that a kernel reads from a copy if they are slices of a loop; widened ones are counted as such already."""
        terms, term, own = self.ex.program.terms, self.ex.program.terms[step], frozenset(members)
        read = {c for t in members for c in children(terms[t]) if c not in own} if self.backend.copies_slices(self.ex, step) else ()
        return frozenset(c for c in read if not self.backend.widens(self.ex, c, term))
