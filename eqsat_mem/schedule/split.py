"""The only transformation that makes loop trees: splitting a region along an index.

A region is a straight-line sequence of terms. Splitting it along index ``i`` assigns each term one of three kinds:

- *slice*: ``i`` is free in it and it may be computed slice by slice;
- *fold*: it folds ``i`` and may be accumulated chunk by chunk;
- *whole*: all other terms.

The phase of a term is the number of loops over ``i`` that must finish before it can be computed: the maximum over its operands of
the operand's phase, plus one if the operand is a fold over ``i`` or a slice that is needed whole. One loop per phase accumulates its folds,
stacks the slices that are needed whole, and recomputes the earlier slices that it reads. Whole terms are computed between the
loops. Loop bodies and the sequences between loops are regions again.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.egraph.online_folds import Rescaled
from eqsat_mem.ir import Block, Call, Map, Program, Rename, bits, children, folded, is_leaf
from eqsat_mem.ir.bitwise import between
from eqsat_mem.ir.loop_tree import Loop, Seq, Step, with_outs
from eqsat_mem.ir.ops import Selection, block_op, joins, picks
from eqsat_mem.schedule.whole_terms import WholeTerms, has_effects, runs_steps, with_all_picked

MOST_AGAIN = 4
"""The largest average number of loops of a split that compute the same term of its region. In a deep program in which every loop starts
from the arguments, this number grows with the depth."""


class Kind(Enum):
    """The behaviour of a term in a loop over one index."""

    SLICE = "slice"
    FOLD = "fold"
    WHOLE = "whole"


def region(ex: Extraction) -> Seq:
    """Return the whole program as one straight-line region."""
    program = ex.program
    needed = sorted(with_all_picked(program, program.reachable()))
    steps = tuple(t for t in needed if not is_leaf(program.terms[t]) and not isinstance(program.terms[t], Rename))
    outs = (program.source_of(t) for t in program.roots())
    return straight(program, steps, frozenset(t for t in outs if not is_leaf(program.terms[t])))


def _results_of(program: Program, terms: Iterable[int], asked: Callable[[Call], bool]) -> list[list[int]]:
    """Return the results of each call that is asked for."""
    calls: dict[Any, list[int]] = {}
    for t in terms:
        term = program.terms[t]
        if isinstance(term, Block) and asked(term.call):
            calls.setdefault((id(term.call), term.args), []).append(t)
    return list(calls.values())


def straight(program: Program, terms: tuple[int, ...], outs: frozenset[int] = frozenset()) -> Seq:
    """Return a straight-line sequence of terms, of which ``outs`` are needed afterwards."""
    return Seq(terms, outs, frozenset(c for t in terms for c in program.operands(t)).difference(terms))


def kind_of(ex: Extraction, t: int, i: int) -> Kind:
    """Return the behaviour of term ``t`` in a loop over index ``i``."""
    program, term = ex.program, ex.program.terms[t]
    if program.free[t] >> i & 1:
        if ex.splits.get(t, 0) >> i & 1:
            return Kind.SLICE
    elif ex.accumulates.get(t, 0) >> i & 1 and any(program.free[c] >> i & 1 for c in children(term)):
        return Kind.FOLD
    return Kind.WHOLE


def gathers(ex: Extraction, t: int, operand: int, i: int) -> bool:
    """Whether a slice of ``t`` along index ``i`` needs its operand ``operand`` whole along ``i``."""
    term, view = ex.program.terms[t], ex.program.terms[operand]
    if isinstance(view, Rename) and any(s == i for s, _ in view.pairs):
        return True
    return isinstance(term, Block) and bool(ex.program.free[operand] >> i & 1) and not (term.call.pointwise | term.call.folds) >> i & 1


@dataclass(frozen=True)
class Choices:
    """The free choices of a split.

    Attributes:
        keep: the slices to be stacked by the loop of their phase rather than rematerialised by the loops of later phases.
        sink: the whole terms to be recomputed in every turn of the loops that read them, so that these loops can be split further.
        small: the terms that may be computed whole if all their operands are whole.
        waists: whether those are so too that read small slices, which are then stacked, together with whole values that took large ones:
            what lies between two networks is computed between the loops of each.
    """

    keep: frozenset[int] = frozenset()
    sink: frozenset[int] = frozenset()
    small: frozenset[int] = frozenset()
    waists: bool = False


def split(ex: Extraction, seq: Seq, i: int, choices: Choices = Choices()) -> Seq | None:
    """Split a region into loops over an index, with sequences of whole terms between them.

    Args:
        ex: the program.
        seq: the region, a straight-line sequence of terms.
        i: the number of the index.
        choices: the free choices.

    Returns:
        The region with loops; None if no loop would compute anything, or the loops would rematerialise too much
        (:data:`MOST_AGAIN`).
    """
    return Phases(ex, seq, i, choices).split()


class Phases:
    """The kinds, phases and placement of the terms of one region split along one index."""

    def __init__(self, ex: Extraction, seq: Seq, i: int, choices: Choices = Choices()):
        self.ex, self.seq, self.index, self.sink = ex, seq, i, choices.sink
        self.terms: list[int] = [t for t in seq.steps if isinstance(t, int)]
        self.picked = _results_of(ex.program, self.terms, joins)
        self.runs = _results_of(ex.program, self.terms, runs_steps)
        self.waists = choices.waists
        self.heavy: set[int] = set()
        several = (*self.picked, *self.runs)
        self.small = choices.small.difference(*(together for together in several if not choices.small.issuperset(together)))
        assert len(self.terms) == len(seq.steps), "only straight regions are split"
        self.kind: dict[int, Kind] = {}
        self.phase: dict[int, int] = {}
        self.stacked: frozenset[int] = frozenset()
        self.levels: dict[int, frozenset[int]] = {}
        self.together: dict[int, set[int]] = {}
        self._classify(seq.outs)
        self.together = self._compared_together()
        self.needed = frozenset(self.stacked | self._compared_later())
        self._keep(choices.keep)

    def keeping(self, keep: frozenset[int]) -> Phases:
        """Return the same of which the loops keep other slices."""
        other = copy(self)
        other._keep(keep)
        return other

    def _keep(self, keep: frozenset[int]) -> None:
        self.stacked = self.needed | {t for t in keep if self.kind.get(t) is Kind.SLICE}
        self.roots = self._roots()
        self.loops_of = self._loops_of()
        if self.stacked != self.needed:
            last = self._last_loops()
            self.stacked = frozenset(t for t in self.stacked if t in self.needed or last.get(t, -1) > self.phase[t])
            self.roots = self._roots()
            self.loops_of = self._loops_of()

    def split(self, late: bool = False) -> Seq | None:
        """Return the split region: see :func:`split`; with ``late``, elementwise values, too, come after loops that need none of them where
        less waits then."""
        if not self.roots or self.computed() > MOST_AGAIN * len(self.terms):
            return None
        count = 1 + max([*self.phase.values(), *self.roots, 0]) + 1
        stretches, bodies = self._whole_terms(late).stretches(count), self._bodies()
        steps: list[Step] = []
        for p in range(count):
            steps.append(straight(self.ex.program, tuple(stretches.get(p, ()))))
            if p in self.roots:
                steps.append(self._loop(p, bodies[p]))
        return with_outs([s for s in steps if not isinstance(s, Seq) or s.steps], self.seq)

    def computed(self) -> int:
        """Return the number of terms that all loops compute; a term counts once for each loop that computes it."""
        return sum(loops.bit_count() for loops in self.loops_of.values())

    def _classify(self, outs: frozenset[int]) -> None:
        terms, effects_phase, stacked = self.ex.program.terms, 0, set[int]()
        for t in self.terms:
            kind, phase = Kind.WHOLE if self._stays_whole(t) else kind_of(self.ex, t, self.index), 0
            self.kind[t] = kind
            if self.waists and kind is Kind.WHOLE and (t not in self.small or self.heavy.intersection(self.ex.program.operands(t))):
                self.heavy.add(t)
            for view in children(terms[t]):
                c = self.ex.program.source_of(view)
                if c not in self.kind:
                    continue
                whole = self._gathered(t, view)
                if whole:
                    stacked.add(c)
                phase = max(phase, self.phase[c] + (whole or self.kind[c] is Kind.FOLD))
            if has_effects(terms[t]):
                effects_phase = phase = max(phase, effects_phase)
            self.phase[t] = phase
            if kind is Kind.FOLD and t in self.ex.rescales:
                self._rescale(t, self.ex.rescales[t])
        self.stacked = frozenset(stacked.union(t for t in outs if self.kind.get(t) is Kind.SLICE))

    def _compared_together(self) -> dict[int, set[int]]:
        """Return, by term, the operands that a loop rematerialises together with it even if they are stacked.

        A comparison reads a value that may not be reproducible bit for bit, and a value selected from it, from the same loop.
        """
        found: dict[int, set[int]] = {}
        for t, exact in self.ex.compared.items():
            for c in (c for c in exact if t in self.kind and self.kind.get(c) is Kind.SLICE and self.phase[c] == self.phase[t]):
                for user, read in between(self.ex.program, self.terms, c, t) if not self._same_bits_again(c) else ():
                    found.setdefault(user, set()).update(read)
        return found

    def _compared_later(self) -> set[int]:
        """Return the slices that are not reproducible bit for bit and are compared with values that an earlier loop selected from them."""
        pairs = ((t, c) for t, exact in self.ex.compared.items() if t in self.kind for c in exact)
        waiting = [(t, c) for t, c in pairs if self.kind.get(c) is Kind.SLICE and self.phase[c] < self.phase[t]]
        if not waiting:
            return set()
        self.roots = self._roots()
        self.loops_of = self._loops_of()
        return {c for t, c in waiting if self.loops_of[t] >> self.phase[t] and not self._same_bits_again(c)}

    def _rescale(self, t: int, rescaled: Rescaled) -> None:
        """Move fold ``t``, if possible, to the loop that accumulates the folds of its level, rather than a later one."""
        inside = (rescaled.chain | {rescaled.shift}).intersection(self.kind)
        folds, others, between = self._level(rescaled.level)
        if not folds or any(self.kind[u] is not Kind.SLICE for u in inside - {t}):
            return
        for u in inside:
            for view in children(self.ex.program.terms[u]):
                c = self.ex.program.source_of(view)
                if c in self.kind and c not in inside and c != rescaled.level:
                    others.append(self.phase[c] + (self.kind[c] is Kind.FOLD or self._gathered(u, view)))
        phase = max(folds + others)
        if phase < self.phase[t]:
            self.phase[t] = phase
            self.levels[t] = frozenset(u for u in between if self.phase[u] > phase)

    def _level(self, level: int) -> tuple[list[int], list[int], set[int]]:
        """Find the dependencies of a level.

        Returns:
            The phases of the folds from which the level is computed, the phases at which its other operands are available, and the whole
            elementwise terms that compute the level from these.
        """
        folds, others, between, stack = [], [], set(), [level]
        while stack:
            c = stack.pop()
            if self.kind.get(c) is Kind.FOLD:
                folds.append(self.phase[c])
            elif self.kind.get(c) is Kind.WHOLE and isinstance(self.ex.program.terms[c], Map):
                between.add(c)
                stack += self.ex.program.operands(c)
            elif c in self.kind:
                others.append(self.phase[c] + (self.kind[c] is Kind.SLICE))
        return folds, others, between

    def _gathered(self, t: int, view: int) -> bool:
        """Whether ``t`` needs its operand ``view``, a slice, whole."""
        c = self.ex.program.source_of(view)
        return self.kind[c] is Kind.SLICE and (self.kind[t] is Kind.WHOLE or gathers(self.ex, t, view, self.index))

    def _stays_whole(self, t: int) -> bool:
        """Whether ``t`` is small and its operands are whole; a fold over the index also needs small operands."""
        if t not in self.small:
            return False
        program = self.ex.program
        read = program.operands(t)
        sliced = [c for c in read if self.kind.get(c, Kind.WHOLE) is not Kind.WHOLE]
        if sliced and not (self.heavy.intersection(read) and all(self.kind[c] is Kind.SLICE and c in self.small for c in sliced)):
            return False
        return not folded(program.terms[t]) >> self.index & 1 or all(c in self.small for c in read)

    def _roots(self) -> dict[int, list[int]]:
        """Return the results of the loop of each phase."""
        roots: dict[int, list[int]] = {}
        for t in self.terms:
            if self.kind[t] is Kind.FOLD or t in self.stacked:
                roots.setdefault(self.phase[t], []).append(t)
        return roots

    def _loops_of(self) -> dict[int, int]:
        """Return the loops that compute each term, as bits: those whose roots need it and for which no earlier loop has stacked it."""
        program, found = self.ex.program, dict.fromkeys(self.terms, 0)
        again: dict[int, int] = dict.fromkeys(self.sink, -1)  # whole terms that loops compute too
        for p, roots in self.roots.items():
            for t in roots:
                found[t] |= 1 << p
                for level in self.levels.get(t, ()):
                    again[level] = again.get(level, 0) | 1 << p
        for t in reversed(self.terms):
            if found[t]:
                for c in program.operands(t):
                    kind = self.kind.get(c)
                    if kind is Kind.SLICE:
                        read = c in self.stacked and c not in self.together.get(t, ())
                        found[c] |= found[t] & ((2 << self.phase[c]) - 1) if read else found[t]
                    elif kind is Kind.WHOLE:
                        found[c] |= found[t] & again.get(c, 0)
        runs = ([t for t in results if self.kind[t] is Kind.SLICE] for results in self.runs)
        for together in (*self.picked, *runs):
            found |= dict.fromkeys(together, functools.reduce(operator.or_, (found[t] for t in together), 0))
        return found

    def _last_loops(self) -> dict[int, int]:
        """Return, by term, the last phase whose loop reads it. Later loops may read kept slices that are computed from it instead."""
        last: dict[int, int] = {}
        for t, loops in self.loops_of.items():
            for c in self.ex.program.operands(t):
                last[c] = max(last.get(c, -1), loops.bit_length() - 1)
        return last

    def _same_bits_again(self, t: int) -> bool:
        """Whether slice ``t`` has the same bits in every loop. Sums and blocks may not: libraries choose their order by shape."""
        seen, stack = {t}, [t]
        while stack:
            u = stack.pop()
            term = self.ex.program.terms[u]
            inexact = np.dtype(term.dtype).kind not in "biu" if not isinstance(term, Map) else False
            if inexact and not self.ex.unrolls.get(u) and getattr(term, "monoid", None) not in ("max", "min"):
                return False
            inside = {c for c in self.ex.program.operands(u) if self.kind.get(c) is Kind.SLICE}
            stack.extend(inside - seen)
            seen |= inside
        return True

    def _whole_terms(self, late: bool) -> WholeTerms:
        """Return the terms that are computed outside of the loops."""
        whole = frozenset(t for t in self.terms if self.kind[t] is Kind.WHOLE)
        together = frozenset().union(*self.picked)
        phases = sorted(self.roots)
        return WholeTerms(self.ex.program, self.terms, self.seq.outs, whole, self.phase, phases, self.loops_of, together, self.small, late)

    def _bodies(self) -> dict[int, list[int]]:
        """Return the terms that each loop computes, in order."""
        bodies: dict[int, list[int]] = {p: [] for p in self.roots}
        for t, loops in self.loops_of.items():
            for p in bits(loops):
                bodies[p].append(t)
        return bodies

    def _loop(self, p: int, body: list[int]) -> Loop:
        roots = self.roots[p]
        folds = tuple(t for t in roots if self.kind[t] is Kind.FOLD)
        stacks = tuple(t for t in roots if self.kind[t] is Kind.SLICE)
        inside = straight(self.ex.program, tuple(body), frozenset(roots))
        return Loop(self.index, inside, folds, stacks, tuple(t for t in folds if t in self.levels))

    def shared_slices(self) -> list[int]:
        """Return the slices that several loops compute: the candidates to be kept."""
        return [t for t, loops in self.loops_of.items() if self.kind[t] is Kind.SLICE and loops.bit_count() > 1]


def shared_slices(ex: Extraction, seq: Seq, i: int, choices: Choices = Choices()) -> list[int]:
    """Return the slices that several loops of the split would compute; arguments as for :func:`split`."""
    return Phases(ex, seq, i, choices).shared_slices()


def selection_of(call: Call) -> Selection:
    """Return how an operation that selects elements combines the selections from chunks."""
    selection = block_op(call.prim.name).selection
    assert selection is not None, f"{call.prim.name} picks no elements"
    return selection


def least_chunk(ex: Extraction, loop: Loop) -> int:
    """Return the smallest chunk of a loop: a selection of ``k`` elements needs at least ``k`` elements in a chunk."""
    blocks = (term.call for t in loop.folds if isinstance(term := ex.program.terms[t], Block))
    picked = (call for call in blocks if picks(call))
    return max((selection_of(call).least(call.params) for call in picked), default=1)
