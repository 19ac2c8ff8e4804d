"""Rematerialisation: values that are kept for a late use are computed again there.

Where no loop helps, a program's peak is made of values that wait: the activations of a network wait for its backward pass. A *move* lets
such a value die after its uses before the peak and computes it again, with those of its operands that have died meanwhile, right before
its next use. Moves are made in order of bytes saved at the peak per second of work added, the first of them one after the other and later
ones a few at a time, until the schedule fits; what was computed again is never moved once more.

A compiler may also compute early what is needed late. A schedule that would fit in the order of the program is made to run in that order:
values are delayed to their first use (:mod:`eqsat_mem.schedule.delays`).

A compiler would merge the second computation with the first, or run it as early as it can. The backend's *tie* keeps them apart: it
makes an operand of the second computation depend on a value that exists only late (:class:`eqsat_mem.schedule.ties.Tie`). Where a
backend knows no such tie, nothing is rematerialised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eqsat_mem.deadline import NEVER, Deadline
from eqsat_mem.ir import Block, Call, Dot, Program, argument_bytes, axes_mask, is_leaf, itemsize
from eqsat_mem.ir.jaxprs import IMPURE, inner_jaxprs, repeatable
from eqsat_mem.ir.loop_tree import Path, Seq, Step, at, enclosing, made
from eqsat_mem.schedule.cost_model import arithmetic_s, spread_weight
from eqsat_mem.schedule.delays import delayed
from eqsat_mem.schedule.fusion import Fused
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.moves import Move, Rewritten, apply, tie_of, written
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.sizes import Extents, extent_of, extents_inside
from eqsat_mem.schedule.whole_terms import has_effects, runs_steps

MOST_MOVES = 400
"""Moves of one schedule."""
MOST_REBUILT = 400_000
"""Terms that the moves of one schedule write anew: each time that moves are made, the whole program is written."""
ALONE, TOGETHER = 16, 1 / 4
"""The number of moves that are made one after the other, and the share of those made since then that later ones are made at once."""
TRIED = 6
"""Moves that are tried before the next one is given up, and that are made while the schedule holds more than it did, as it is run."""
ENOUGH = 16
"""Moves after which what those that are left save is expected to follow from what those before did."""
LEAST = 1e-4
"""The share of what a schedule holds at its peak that a move has to save: more than :data:`MOST_MOVES` of less would change little."""
LONGEST = 24
"""Kernels that one move computes again."""
SMALL = 1 / 16
"""Operands of at most this share of a value are kept for its second computation rather than computed again."""


class Moved:
    """A schedule and what moves make of it, step by step: the same for every limit, and made when a limit asks for it."""

    def __init__(self, s: Schedule):
        self.start = s
        self.made: list[AfterMoves] = []
        self.further = _further(s)
        self.fewer: dict[tuple[int, int], Schedule | None] = {}

    def fitting(self, limit: int, slowest: float = math.inf, deadline: Deadline = NEVER) -> Schedule:
        """The first that fits ``limit`` bytes, with delays if need be; the smallest if none does, or none so far when they take more than
        ``slowest`` seconds, where there is such a bound the moves that are left will not do, or the time is up."""
        smallest, in_vain = self.start, math.inf
        for k, step in enumerate(self._each()):
            found = s = step.schedule
            if step.in_order <= limit < s.peak_bytes < in_vain:
                found = delayed(s, limit, deadline)
                in_vain = s.peak_bytes - (found.peak_bytes - limit) / 2  # until moves have saved half of what delays could not
            if found.fits(limit):
                return found if found is not s else self._with_fewest(k, limit)
            smallest = min(smallest, found, key=lambda s: s.peak_bytes)
            if s.seconds > slowest or deadline.passed() or (slowest < math.inf and self._expected(k) > limit):
                break
        return smallest

    def _with_fewest(self, k: int, limit: int) -> Schedule:
        """The schedule after step ``k``, which fits, or one that fits with fewer of the moves of that step."""
        s, group = self.made[k].schedule, self.made[k].group
        if len(group) <= 1:
            return s
        before = self.made[k - 1]
        memory = written(before.schedule)
        few, enough = 0, len(group)  # with so many it does not fit, and with so many it does
        while enough - few > 1:
            middle = (few + enough) // 2
            if (k, middle) not in self.fewer:
                new = apply(before.schedule, memory, group[:middle], before.moved)
                self.fewer[k, middle] = new and new.schedule
            if (fewer := self.fewer[k, middle]) is not None and fewer.fits(limit):
                s, enough = fewer, middle
            else:
                few = middle
        return s

    def _expected(self, k: int) -> float:
        """The bytes that a schedule is expected to hold after all moves, from the first ``k`` steps: each time that there are twice as
        many, they save more than before by the same factor, at most two."""
        now = self.made[k]
        if now.moves < ENOUGH:
            return 0.0
        half, quarter = self._after(now.moves // 2), self._after(now.moves // 4)
        late, early = half.in_order - now.in_order, quarter.in_order - half.in_order
        longer = (now.moves - half.moves) / max(half.moves - quarter.moves, 1)
        factor = min(late / (early * longer), 1.0) * 2 if early > 0 else 2.0
        left = min(MOST_MOVES - now.moves, (_most_steps(self.start) - k) * _at_once(now.moves))
        doublings = math.log2(1 + left / now.moves)
        return now.in_order - late * sum(factor**n * min(doublings - n + 1, 1.0) for n in range(1, math.ceil(doublings) + 1))

    def _after(self, moves: int) -> AfterMoves:
        """The last of those that were made with so many moves or fewer."""
        return max((step for step in self.made if step.moves <= moves), key=lambda step: step.moves)

    def _each(self) -> Iterator[AfterMoves]:
        """Each schedule, those made before first."""
        yield from self.made
        for new in self.further:
            self.made.append(new)
            yield new


@dataclass(frozen=True)
class AfterMoves:
    """A schedule after so many moves, the last of which were made as one group, and the bytes that it holds in program order."""

    schedule: Schedule
    moved: frozenset[int]
    in_order: int
    moves: int = 0
    group: Sequence[Move] = ()


def _further(s: Schedule) -> Iterator[AfterMoves]:
    """A schedule, the same after one move, after two, and so on: after many by several moves at a time."""
    now, count = Rewritten(s, frozenset(), written(s)), 0
    in_order, smallest, since = now.in_order(), s.peak_bytes, 0
    yield AfterMoves(s, frozenset(), in_order)
    for _ in range(_most_steps(s)):
        moves = _moves(*now)
        groups = [[move] for move in moves[:TRIED]]
        if moves and (most := min(_at_once(count), MOST_MOVES - count)) > 1:
            groups.insert(0, _apart(now, moves, most))
        for group in groups:
            new = apply(now.schedule, now.memory, group, now.moved)
            if new is not None and (total := new.in_order()) <= in_order:
                break
        else:
            break
        now, in_order, count = new, total, count + len(group)
        since = since + 1 if now.schedule.peak_bytes > smallest else 0
        if since > TRIED:  # what is computed again for less in program order is run at once, and held
            break
        smallest = min(smallest, now.schedule.peak_bytes)
        yield AfterMoves(now.schedule, now.moved, in_order, count, group)
        if count >= MOST_MOVES:
            break


def _at_once(moves: int) -> int:
    """The number of moves that are made at once after so many."""
    return 1 + int(TOGETHER * max(moves - ALONE, 0))


def _apart(now: Rewritten, moves: Sequence[Move], most: int) -> list[Move]:
    """The first of the moves and up to ``most`` in all in its region, none of which computes again what another one does or reads."""
    found: list[Move] = []
    again, read = set[Step](), set[Step]()
    path = moves[0].path
    fused = now.memory.fused(at(now.schedule.seq, path))
    for move in (move for move in moves if move.path == path):
        if len(found) == most:
            break
        makes, reads = {fused.kept[q] for q in move.chain}, {t for q in move.chain for t in fused.operands[q]}
        if makes.isdisjoint(again | read) and reads.isdisjoint(again):
            found.append(move)
            again |= makes
            read |= reads
    return found


def _most_steps(s: Schedule) -> int:
    """The number of times that moves of a schedule may be made."""
    return min(MOST_MOVES, MOST_REBUILT // max(len(s.ex.program.terms), 1))


def least_bytes(s: Schedule) -> int:
    """A bound that no moves get below: a contraction or a block outside of loops has its operands and its result in memory at once."""
    memory, terms, most = written(s), s.ex.program.terms, 0
    fused, extents = memory.fused(s.seq), memory.full_extents()
    for step, read in zip(fused.kept, fused.operands, strict=True):
        if isinstance(step, int) and isinstance(terms[step], Dot | Block):
            most = max(most, sum(memory.size(t, extents) for t in {step, *read} if not is_leaf(terms[t])))
    return argument_bytes(s.ex.program) + most


def _moves(s: Schedule, moved: frozenset[int], memory: Memory) -> list[Move]:
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
    found = [move for move in found if move.saved > LEAST * s.peak_bytes]
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
        place = {t: q for q, step in enumerate(fused.kept) for t in made(step)}
        next_use = {t: n for n in range(len(fused.kept) - 1, self.position, -1) for t in fused.operands[n]}
        for q, t in enumerate(fused.kept[: max(self.position, 0)]):
            if not isinstance(t, int) or t in moved or t in self.seq.outs or t in fused.operands[self.position]:
                continue
            use = next_use.get(t)
            chain = None if use is None else self.chain(fused, place, q, use)
            if use is None or chain is None:
                continue
            late = self.late(fused, place, chain, use)
            saved = self.size(t) - sum(self.size(c) for c in self.extended(fused, place, chain, use)) - self.beside(fused, chain)
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
        """Whether a kernel gives the same bits again and does nothing else, and is no loop with results that are not computed again."""
        step, ex = fused.kept[q], self.s.ex
        if not isinstance(step, int):
            return False
        for t in fused.members[q]:
            term = ex.program.terms[t]
            if t in ex.exact or has_effects(term) or (isinstance(term, Block) and not _pure(term.call)):
                return False
            if isinstance(term, Block) and runs_steps(term.call) and sum(_is_of(ex.program, term, u) for u in fused.kept) > 1:
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

    def beside(self, fused: Fused, chain: Sequence[int]) -> int:
        """The bytes of what the loops of a chain make besides what it reads: a scan that runs again stacks all that it stacked before."""
        terms, total = self.s.ex.program.terms, 0
        for q in chain:
            term = terms[step] if isinstance(step := fused.kept[q], int) else None
            if isinstance(term, Block) and any(inner_jaxprs(term.call.params)):
                made = zip(term.call.out_axes, term.call.out_dtypes, strict=True)
                sizes = [extent_of(self.extents, axes_mask(axes)) * itemsize(dtype) for axes, dtype in made]
                total += sum(sizes) - sizes[term.out]
        return total

    def late(self, fused: Fused, place: Mapping[int, int], chain: Sequence[int], use: int) -> int | None:
        """A value made after the peak and before the use, as late as possible; first among those that the use reads."""
        read = [t for t in fused.operands[use] if self.position <= place.get(t, -1) < use]
        latest_first = (made(fused.kept[q]) for q in range(use - 1, max(self.position, 0) - 1, -1))
        for values in itertools.chain([read], latest_first):
            able = [t for t in values if tie_of(self.s).can_wait_for(self.s.ex.program, t)]
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


def _is_of(program: Program, other: Block, step: Step) -> bool:
    """Whether a step of a region is a result of the same call as another."""
    term = program.terms[step] if isinstance(step, int) else None
    return isinstance(term, Block) and term.call is other.call and term.args == other.args


def _pure(call: Call) -> bool:
    return call.prim.name not in IMPURE and all(map(repeatable, inner_jaxprs(call.params)))
