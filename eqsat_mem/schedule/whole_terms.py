"""The terms of a split region that are computed outside of its loops: between which of them each has its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from eqsat_mem.ir import Block, Call, Dot, Program, Term, is_leaf
from eqsat_mem.ir.ops import joins


def has_effects(term: Term) -> bool:
    return isinstance(term, Block) and term.call.effects


def runs_steps(call: Call) -> bool:
    """Whether a call is a loop, of which all results have to come from one run: roundings may grow from step to step, so that those of
    another run are far from them."""
    return call.prim.name in ("scan", "while")


def with_all_picked(program: Program, terms: Iterable[int]) -> set[int]:
    """Add to ``terms`` all results of operations that select elements: those of chunks are combined together even if not all are used."""
    calls = {(id(term.call), term.args) for t in terms if isinstance(term := program.terms[t], Block) and joins(term.call)}
    every = enumerate(program.terms if calls else ())
    return {*terms, *(t for t, term in every if isinstance(term, Block) and (id(term.call), term.args) in calls)}


@dataclass(frozen=True, eq=False)
class WholeTerms:
    """The whole terms of a region, and what decides on their places among its loops; see :mod:`eqsat_mem.schedule.split`.

    Attributes:
        program: the program.
        terms: all terms of the region, operands first.
        outs: those that are needed after it.
        whole: those that no loop computes slice by slice.
        phase: the phase of each term.
        phases: the phases that have a loop, in order.
        loops_of: the loops that compute each term, as bits.
        together: terms that are computed with others of their operation.
        small: terms that hardly count.
        late: whether groups without a contraction are moved past loops, too.
    """

    program: Program
    terms: Sequence[int]
    outs: frozenset[int]
    whole: frozenset[int]
    phase: Mapping[int, int]
    phases: Sequence[int]
    loops_of: Mapping[int, int]
    together: frozenset[int]
    small: frozenset[int]
    late: bool = False

    def stretches(self, count: int) -> dict[int, list[int]]:
        """Return the whole terms of each sequence between loops, in order."""
        stretches: dict[int, list[int]] = {}
        for t, p in self._place_whole(count - 1).items():
            stretches.setdefault(p, []).append(t)
        inside = frozenset(self.terms)
        return {p: sorted(with_all_picked(self.program, terms) & inside) for p, terms in stretches.items()}

    def _place_whole(self, last: int) -> dict[int, int]:
        """Return the position among the loops of every whole term that is computed outside of them.

        A term larger than its operands is placed as late as its users allow, any other as early as possible; then terms that are computed
        of each other, contractions among them, are placed after a loop rather than before it if fewer bytes wait for that loop's end.
        """
        program = self.program
        used: dict[int, int] = {}
        for t, loops in self.loops_of.items():
            for c in program.operands(t):
                outside = loops & ~self.loops_of.get(c, 0)
                if outside:
                    used[c] = min(used.get(c, last), (outside & -outside).bit_length() - 1)
        place: dict[int, int] = {}
        for t in reversed(self.terms):
            needed = t in used or t in self.outs or has_effects(program.terms[t])
            if t not in self.whole or not needed:
                continue
            read = program.operands(t)
            grows = program.nbytes(t) > sum(program.nbytes(c) for c in read)
            late = grows and not has_effects(program.terms[t])
            place[t] = max(self.phase[t], used.get(t, last)) if late else self.phase[t]
            for c in read:
                used[c] = min(used.get(c, last), place[t])
        for p in self.phases:
            place |= dict.fromkeys(self._better_after(p, place), p + 1)
        return place

    def _better_after(self, p: int, place: Mapping[int, int]) -> set[int]:
        """Return the whole terms placed before the loop of a phase that leave less to wait for its end if they are computed after it.

        Such as the forward pass of one network whose backward pass comes after a loop over the examples of another. What takes no
        contraction stays unless asked: kernels compute most of it again for each reader.
        """
        if not self._counts({t for t, at in place.items() if at == p}):
            return set()
        program, fixed, readers = self.program, set(self.together), self._readers
        movable: set[int] = set()
        for t in reversed(self.terms):
            before = t in place and place[t] <= p
            if before and place[t] == p and t not in fixed and not has_effects(program.terms[t]):
                movable.add(t)
            for c in program.operands(t):
                if (before and t not in movable) or self.loops_of[t] & ~self.loops_of.get(c, 0) & ((2 << p) - 1):
                    fixed.add(c)
        moved: set[int] = set()
        for group in _connected(program, movable, readers):
            early = sum(program.nbytes(t) for t in group if t in self.outs or not group.issuperset(readers.get(t, ())))
            read = {c for t in group for c in program.operands(t) if c not in group and not is_leaf(program.terms[c])}
            late = sum(program.nbytes(c) for c in read if all(place.get(u, p) <= p for u in readers[c]))
            if late < early and self._counts(group):
                moved |= group
        return moved

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        """The terms of the region that read each value."""
        readers: dict[int, list[int]] = {}
        for t in self.terms:
            for c in self.program.operands(t):
                readers.setdefault(c, []).append(t)
        return readers

    def _counts(self, terms: set[int]) -> bool:
        """Whether some of the terms are large, and contractions unless all count."""
        return any(self.late or isinstance(self.program.terms[t], Dot) for t in terms - self.small)


def _connected(program: Program, terms: set[int], readers: Mapping[int, Sequence[int]]) -> list[set[int]]:
    """Return groups of the terms, of which none reads one of another group."""
    groups: list[set[int]] = []
    left = set(terms)
    while left:
        group, stack = set(), [left.pop()]
        while stack:
            t = stack.pop()
            group.add(t)
            near = left.intersection((*program.operands(t), *readers.get(t, ())))
            left -= near
            stack += near
        groups.append(group)
    return groups
