"""Schedules written anew with a move: values that are computed again right before a late use, or only then.

A second computation is kept apart from the first by the backend's tie.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.egraph.online_folds import Rescaled
from eqsat_mem.ir import Input, Program, Rename, children, is_leaf, with_children
from eqsat_mem.ir.loop_tree import Loop, Path, Seq, enclosing, made
from eqsat_mem.schedule.fusion import Fused
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.split import gathers
from eqsat_mem.schedule.ties import Tie
from eqsat_mem.schedule.timing import Timing


def tie_of(s: Schedule) -> Tie:
    """The way in which a schedule's backend keeps recomputed values apart; it must have one."""
    assert s.backend.tie is not None, "a backend without a tie cannot rematerialise"
    return s.backend.tie


def written(s: Schedule) -> Memory:
    """Memory with kernels in program order, which moves change one at a time. Results are judged in the order of execution."""
    return Memory(s.ex, s.backend).in_program_order()


@dataclass(frozen=True)
class Move:
    """In the region at ``path``, kernels ``chain`` (positions among those it keeps) run again before kernel ``use``.

    ``late`` is a value that is there only shortly before; ``saved`` the bytes that no longer wait at the peak, ``work_s`` the seconds of
    the chain. A move that ``delays`` leaves out the first computation.
    """

    path: Path
    chain: tuple[int, ...]
    use: int
    late: int
    saved: int
    work_s: float
    delays: bool = False


class Rewritten(NamedTuple):
    """A schedule after moves, its terms that are computed again, and its memory in program order."""

    schedule: Schedule
    moved: frozenset[int]
    memory: Memory

    def in_order(self) -> int:
        """The bytes that it holds in program order."""
        return self.memory.total(self.schedule.seq, self.schedule.chunks)


def apply(s: Schedule, before: Memory, moves: Sequence[Move], moved: frozenset[int]) -> Rewritten | None:
    """The schedule after moves in one region, none of which computes again what another one does or reads; ``moved`` are its terms that
    are computed again already. None if a sum that a loop rescales would lose its level."""
    new = _Rebuilt(s, before, moves, moved)
    if not new.rescaled <= new.ex.rescales.keys():
        return None
    memory = Memory(new.ex, s.backend)
    total = memory.total(new.seq, new.chunks)
    seconds = Timing(memory).total(new.seq, new.chunks)
    after = Schedule(new.ex, s.backend, new.seq, new.chunks, total, seconds)
    return Rewritten(after, frozenset(new.moved), memory.in_program_order())


class _Rebuilt:
    """A schedule written anew, kernel by kernel, with moves in the region at ``path``."""

    def __init__(self, s: Schedule, memory: Memory, moves: Sequence[Move], moved: frozenset[int]):
        self.s, self.memory, self.old, self.was_moved, self.tie = s, memory, s.ex.program, moved, tie_of(s)
        (self.path,) = {move.path for move in moves}
        self.before: defaultdict[int, list[Move]] = defaultdict(list)
        for move in moves:
            self.before[move.use].append(move)
        self.left_out = {q for move in moves if move.delays for q in move.chain}
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
        here = path == self.path
        steps: dict[int | Loop | Seq, None] = {}
        for q, step in enumerate(fused.kept):
            for move in self.before.get(q, ()) if here else ():
                self.again(move, fused, values, steps)
            if here and q in self.left_out:
                continue
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

    def again(self, move: Move, fused: Fused, values: dict[int, int], steps: dict[Any, None]) -> None:
        """The chain of a move, from operands of which one per kernel is tied to what is late."""
        add = partial(self.step, steps=steps)
        token = self.tie.token(self.program, values[move.late], add)
        fresh: set[int] = set()
        for q in move.chain:
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
        around = [loop.index for loop in enclosing(self.s.seq, self.path)]
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
