"""Rematerialisation: values that are kept for a late use are computed again there.

Where no loop helps, a program's peak is made of values that wait: the activations of a network wait for its backward pass. A *move* lets
such a value die after its uses before the peak and computes it again, with those of its operands that have died meanwhile, right before
its next use. Moves are made in order of bytes saved at the peak per second of work added, one after the other, until the schedule
fits; what was computed again is never moved once more.

A compiler would merge the second computation with the first, or run it as early as it can. The backend's *tie* keeps them apart: it
makes an operand of the second computation depend on a value that exists only late (:class:`eqsat_mem.schedule.ties.Tie`). Where a
backend knows no such tie, nothing is rematerialised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.egraph.online_folds import Rescaled
from eqsat_mem.ir import Block, Call, Dot, Input, Program, Rename, argument_bytes, children, is_leaf, with_children
from eqsat_mem.ir.jaxprs import IMPURE, inner_jaxprs, repeatable
from eqsat_mem.ir.loop_tree import Loop, Path, Seq, at, enclosing, made
from eqsat_mem.schedule.cost_model import arithmetic_s, spread_weight
from eqsat_mem.schedule.fusion import Fused
from eqsat_mem.schedule.memory import Extents, Memory, extents_inside
from eqsat_mem.schedule.search import Schedule
from eqsat_mem.schedule.split import gathers, has_effects
from eqsat_mem.schedule.ties import Tie
from eqsat_mem.schedule.timing import Timing

MOST_MOVES = 400
"""Moves of one schedule."""
MOST_REBUILT = 400_000
"""Terms that the moves of one schedule write anew: each move writes the whole program."""
TRIED = 6
"""Moves that are tried before the next one is given up."""
LONGEST = 24
"""Kernels that one move computes again."""
SMALL = 1 / 16
"""Operands of at most this share of a value are kept for its second computation rather than computed again."""


class Moved:
    """A schedule and what moves make of it, one after the other: the same for every limit, and made when a limit asks for it."""

    def __init__(self, s: Schedule):
        self.made = [s]
        self.further = _further(s)

    def fitting(self, limit: int) -> Schedule:
        """The first that fits ``limit`` bytes; the smallest if none does."""
        while (found := next((s for s in self.made if s.fits(limit)), None)) is None and (new := next(self.further, None)) is not None:
            self.made.append(new)
        return found or min(self.made, key=lambda s: s.peak_bytes)


def _further(s: Schedule) -> Iterator[Schedule]:
    """A schedule after one move, after two, and so on."""
    moved: frozenset[int] = frozenset()
    for _ in range(min(MOST_MOVES, MOST_REBUILT // max(len(s.ex.program.terms), 1))):
        memory = _written(s)
        waiting = memory.total(s.seq, s.chunks)
        tried = filter(None, (_apply(s, memory, move, moved) for move in _moves(s, memory, moved)[:TRIED]))
        following = next((new for new in tried if _written(new[0]).total(new[0].seq, new[0].chunks) <= waiting), None)
        if following is None:
            break
        s, moved = following
        yield s


def least_bytes(s: Schedule) -> int:
    """A bound that no moves get below: a contraction or a block outside of loops has its operands and its result in memory at once."""
    memory, terms, most = _written(s), s.ex.program.terms, 0
    fused, extents = memory.fused(s.seq), memory.full_extents()
    for step, read in zip(fused.kept, fused.operands, strict=True):
        if isinstance(step, int) and isinstance(terms[step], Dot | Block):
            most = max(most, sum(memory.size(t, extents) for t in {step, *read} if not is_leaf(terms[t])))
    return argument_bytes(s.ex.program) + most


def tie_of(s: Schedule) -> Tie:
    """The way in which a schedule's backend keeps recomputed values apart; it must have one."""
    assert s.backend.tie is not None, "a backend without a tie cannot rematerialise"
    return s.backend.tie


def _written(s: Schedule) -> Memory:
    """Memory with kernels in program order, which moves change one at a time. Results are judged in the order of execution."""
    return Memory(s.ex, s.backend, as_run=False)


@dataclass(frozen=True)
class Move:
    """In the region at ``path``, kernels ``chain`` (positions among those it keeps) run again before kernel ``use``.

    ``late`` is a value that is there only shortly before; ``saved`` the bytes that no longer wait at the peak, ``work_s`` the seconds of
    the chain.
    """

    path: Path
    chain: tuple[int, ...]
    use: int
    late: int
    saved: int
    work_s: float


def _moves(s: Schedule, memory: Memory, moved: frozenset[int]) -> list[Move]:
    """The moves that save bytes at the peak, those that save most per second first."""
    peak = memory.peak(s.seq, memory.full_extents(), s.chunks)
    found: list[Move] = []
    for depth in range(len(peak.path) + 1):
        path = peak.path[:depth]
        seq = _at(s.seq, path)
        if seq is not None:
            extents = memory.full_extents()
            for loop in enclosing(s.seq, path):
                extents = extents_inside(extents, loop, s.chunks)
            position = memory.peak(seq, extents, s.chunks).position
            found += _Waiting(s, memory, path, seq, extents, position).moves(moved)
    return sorted(found, key=lambda move: (-move.saved / move.work_s, move.path, move.chain))


def _at(seq: Seq, path: Path) -> Seq | None:
    try:
        return at(seq, path)
    except AssertionError:  # the last step of the path is a term
        return None


@dataclass(frozen=True)
class _Waiting:
    """The values of one region that wait while it is at its peak."""

    s: Schedule
    memory: Memory
    path: Path
    seq: Seq
    extents: Extents
    position: int

    def moves(self, moved: frozenset[int]) -> Iterator[Move]:
        fused = self.memory.fused(self.seq)
        place = {t: q for q, step in enumerate(fused.kept) for t in ([step] if isinstance(step, int) else made(step))}
        for q, t in enumerate(fused.kept[: max(self.position, 0)]):
            if not isinstance(t, int) or t in moved or t in self.seq.outs or t in fused.operands[self.position]:
                continue
            use = next((n for n in range(self.position + 1, len(fused.kept)) if t in fused.operands[n]), None)
            chain = None if use is None else self.chain(fused, place, q, use)
            if use is None or chain is None:
                continue
            late = self.late(fused, place, chain, use)
            saved = self.size(t) - sum(self.size(c) for c in self.extended(fused, place, chain, use))
            if late is not None and saved > 0:
                yield Move(self.path, chain, use, late, saved, self.work_s(fused, chain))

    def size(self, t: int) -> int:
        return self.memory.size(t, self.extents)

    def chain(self, fused: Fused, place: Mapping[int, int], value: int, use: int) -> tuple[int, ...] | None:
        """The kernels that make a value at a late use from what is there: arguments, values that live, small ones that are kept."""
        chain: set[int] = set()
        stack = [value]
        while stack:
            q = stack.pop()
            if q in chain:
                continue
            chain.add(q)
            if len(chain) > LONGEST or not self.repeatable(fused, q):
                return None
            gone = (c for c in fused.operands[q] if c in place and not self.lives(fused, c, use))
            stack.extend(place[c] for c in gone if not self.is_small(c, fused.kept[value]))
        return tuple(sorted(chain))

    def repeatable(self, fused: Fused, q: int) -> bool:
        """Whether a kernel gives the same bits again and does nothing else."""
        step, ex = fused.kept[q], self.s.ex
        if not isinstance(step, int):
            return False
        for t in fused.members[q]:
            term = ex.program.terms[t]
            if t in ex.exact or has_effects(term) or (isinstance(term, Block) and not _pure(term.call)):
                return False
        return True

    def lives(self, fused: Fused, t: int, use: int) -> bool:
        return t in self.seq.outs or fused.last_use.get(t, -1) >= use

    def is_small(self, t: int, value: Any) -> bool:
        return self.size(t) <= SMALL * self.size(value)

    def extended(self, fused: Fused, place: Mapping[int, int], chain: Sequence[int], use: int) -> set[int]:
        """The small values that live longer because of a move."""
        read = {c for q in chain for c in fused.operands[q] if c in place and place[c] not in chain}
        return {c for c in read if not self.lives(fused, c, use)}

    def late(self, fused: Fused, place: Mapping[int, int], chain: Sequence[int], use: int) -> int | None:
        """A value made after the peak and before the use, as late as possible; first among those that the use reads."""
        read = [t for t in fused.operands[use] if self.position <= place.get(t, -1) < use]
        others = [t for t, q in place.items() if self.position <= q < use]
        for values in (read, others):
            able = [t for t in values if tie_of(self.s).can_tie(self.s.ex.program.terms[t].dtype)]
            if able:
                return max(able, key=lambda t: (place[t], -self.size(t), -t))
        return None

    def work_s(self, fused: Fused, chain: Sequence[int]) -> float:
        program, backend = self.s.ex.program, self.s.backend
        slowest = backend.device.levels[-1][1]
        seconds = 0.0
        for q in chain:
            members = fused.members[q]
            spread = dict.fromkeys(fused.spread, spread_weight(program, members, backend))
            arithmetic = (arithmetic_s(program, t, self.extents, backend, spread.get(t)) for t in members)
            moved = sum(self.size(t) for t in (*fused.operands[q], fused.kept[q]) if isinstance(t, int))
            seconds += max(sum(arithmetic), moved / slowest) + backend.device.kernel_s
        return seconds


def _pure(call: Call) -> bool:
    return call.prim.name not in IMPURE and all(map(repeatable, inner_jaxprs(call.params)))


# --- the schedule after a move -----------------------------------------------------------------------


def _apply(s: Schedule, before: Memory, move: Move, moved: frozenset[int]) -> tuple[Schedule, frozenset[int]] | None:
    """The schedule after a move, and its terms that are computed again; None if a sum that a loop rescales would lose its level."""
    new = _Rebuilt(s, before, move, moved)
    if not new.rescaled <= new.ex.rescales.keys():
        return None
    memory = Memory(new.ex, s.backend)
    total = memory.total(new.seq, new.chunks)
    seconds = Timing(memory).total(new.seq, new.chunks)
    return Schedule(new.ex, s.backend, new.seq, new.chunks, total, seconds), frozenset(new.moved)


class _Rebuilt:
    """A schedule written anew, kernel by kernel, with a move."""

    def __init__(self, s: Schedule, memory: Memory, move: Move, moved: frozenset[int]):
        self.s, self.memory, self.move, self.old, self.was_moved, self.tie = s, memory, move, s.ex.program, moved, tie_of(s)
        self.program: Program = s.ex.program.empty_like()
        self.origin: dict[int, int] = {}
        self.moved: set[int] = set()
        self.rescaled: set[int] = set()
        self.chunks: dict[Loop, int] = {}
        values: dict[int, int] = {}
        self.seq = self.sequence(s.seq, values, ())
        self.program.take_roots(self.old, lambda t: self.read(t, values))
        self.ex = Extraction(
            self.program,
            self.stated(s.ex.splits),
            self.stated(s.ex.accumulates),
            self.stated(s.ex.unrolls),
            self.rescales(),
            s.ex.origin and (s.ex.origin[0], self.stated(s.ex.origin[1])),
        )

    def stated(self, table: Mapping[int, int]) -> dict[int, int]:
        """The facts that rules stated of the old program's terms, for the new one's."""
        return {t: table[old] for t, old in self.origin.items() if old in table}

    def rescales(self) -> dict[int, Rescaled]:
        """The new program's sums with levels of their own: the same chains of new terms, unless a second computation stands between."""
        found: dict[int, Rescaled] = {}
        for t, old in self.origin.items():
            known = self.s.ex.rescales.get(old)
            if known is None:
                continue
            chain, inside = [t], known.chain | {known.shift}
            while self.origin.get(chain[-1]) in known.chain:
                below = children(self.program.terms[chain[-1]])
                chain.append(next((c for c in below if self.origin.get(c) in inside), -1))
            if chain[-1] >= 0:
                place = children(self.old.terms[known.shift]).index(known.level)
                level = children(self.program.terms[chain[-1]])[place]
                found[t] = replace(known, level=level, shift=chain[-1], chain=frozenset(chain[:-1]))
        return found

    def sequence(self, seq: Seq, values: dict[int, int], path: Path | None) -> Seq:
        """A sequence of the new program; ``values`` are the new terms of values from outside, to which it adds its own."""
        fused = self.memory.fused(seq)
        here = path == self.move.path
        steps: dict[int | Loop | Seq, None] = {}
        for q, step in enumerate(fused.kept):
            if here and q == self.move.use:
                self.again(fused, values, steps)
            if isinstance(step, int):
                values[step] = self.kernel(fused.members[q], values, steps)
                continue
            inner = None if path is None else (*path, seq.steps.index(step))
            if isinstance(step, Seq):
                steps[self.sequence(step, values, inner)] = None
            else:
                steps[self.loop(step, values, inner)] = None
        return _sequence(self.program, tuple(steps), frozenset(values[t] for t in seq.outs))

    def loop(self, loop: Loop, values: dict[int, int], path: Path | None) -> Loop:
        own = dict(values)
        body = self.sequence(loop.body, own, path)
        folds, stacks = (tuple(own[t] for t in ts) for ts in (loop.folds, loop.stacks))
        values |= {t: own[t] for t in made(loop)}
        new = replace(loop, body=body, folds=folds, stacks=stacks, rescaled=tuple(own[t] for t in loop.rescaled))
        self.chunks[new] = self.s.chunks[loop]
        self.rescaled |= set(new.rescaled)
        return new

    def kernel(self, members: Sequence[int], values: Mapping[int, int], steps: dict[Any, None], again: bool = False) -> int:
        """The terms that one kernel computes, the last of which it keeps."""
        local = dict(values)
        new = -1
        for t in members:
            args = tuple(self.read(c, local) for c in children(self.old.terms[t]))
            new = local[t] = self.program.add(with_children(self.old.terms[t], args), self.old.source.get(t))
            self.origin.setdefault(new, t)
            steps[new] = None
            if again or t in self.was_moved:
                self.moved.add(new)
        return new

    def read(self, t: int, values: Mapping[int, int]) -> int:
        """The new term of a value, a leaf, or a view of one."""
        if t in values:
            return values[t]
        term = self.old.terms[t]
        if isinstance(term, Rename):
            return self.program.add(Rename(term.dtype, term.pairs, self.read(term.arg, values)), self.old.source.get(t))
        assert is_leaf(term), "a value is read before it is made"
        return self.program.add(term, self.old.source.get(t))

    # what is computed again

    def again(self, fused: Fused, values: dict[int, int], steps: dict[Any, None]) -> None:
        """The chain of the move, from operands of which one per kernel is tied to what is late."""
        add = partial(self.step, steps=steps)
        token = self.tie.token(self.program, values[self.move.late], add)
        fresh: set[int] = set()
        for q in self.move.chain:
            own = dict(values)
            if not fresh & fused.operands[q]:
                able = {t: views for t in fused.operands[q] if (views := self.untied_views(t, fused.members[q])) is not None}
                if able:
                    t = min(able, key=lambda t: (self.old.nbytes(t), t))
                    own |= {view: self.read(view, values) for view in able[t]}
                    own[t] = self.tie.tied(self.program, self.read(t, values), token, add)
            kept = fused.members[q][-1]
            values[kept] = self.kernel(fused.members[q], own, steps, again=True)
            fresh.add(kept)

    def untied_views(self, t: int, members: Sequence[int]) -> set[int] | None:
        """The views of a value that a kernel reads as they are though the value is tied; None if it cannot be tied.

        In a loop the tied value is a slice. A view that reads the value whole along the loop's index reads the value from outside.
        """
        term = self.old.terms[t]
        if not self.tie.can_tie(term.dtype) or (is_leaf(term) and not isinstance(term, Input)):
            return None
        reads = {(m, c) for m in members for c in children(self.old.terms[m]) if self.old.source_of(c) == t}
        around = [loop.index for loop in enclosing(self.s.seq, self.move.path)]
        whole = {c for m, c in reads if any(gathers(self.s.ex, m, c, i) for i in around)}
        return None if t in whole or (whole and whole == {c for _, c in reads}) else whole

    def step(self, term: Any, steps: dict[Any, None]) -> int:
        new = self.program.add(term)
        steps[new] = None
        self.moved.add(new)
        return new


def _sequence(program: Program, steps: tuple[Any, ...], outs: frozenset[int]) -> Seq:
    """A sequence of terms, loops and nested stretches."""
    read: set[int] = set()
    inside: set[int] = set()
    for step in steps:
        inside |= made(step)
        read.update(program.operands(step) if isinstance(step, int) else step.body.reads if isinstance(step, Loop) else step.reads)
    return Seq(steps, outs, frozenset(read - inside))
