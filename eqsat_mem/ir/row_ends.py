"""``while`` loops that end row by row: they run until every row has ended, and leave rows that have ended as they are.

A batch of such loops is one of them: ``vmap`` makes it so, and so do libraries. Each chunk of the rows then has its own number of steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jax.dtypes import issubdtype

from eqsat_mem.ir.inside import Inside
from eqsat_mem.ir.program import Program
from eqsat_mem.ir.terms import Fold, Input, Literal, Map, children

RISING = {True: {"lt": 0, "le": 0, "gt": 1, "ge": 1}, False: {"ge": 0, "gt": 0, "le": 1, "lt": 1}}
"""Comparisons that stay false (True: of what has to hold), or that stay true, while one operand rises, and the position of that one."""


def unchanged(inside: Inside) -> list[int]:
    """The carries as they enter a step, in the axes of the results; -1 where the body does not read one so."""
    read = {(term.slot, term.axes): t for t, term in enumerate(inside.program.terms) if isinstance(term, Input)}
    results = inside.program.outputs[: inside.carries]
    return [read.get((slot, o.axes), -1) for slot, o in enumerate(results, inside.consts)]


def ends_row_by_row(inside: Inside, index: int, alike: Collection[int], by_row: Collection[int], rows: Collection[int]) -> bool:
    """Whether a ``while`` loop ends for each row of an axis on its own.

    Args:
        inside: the loop.
        index: the axis, as the body calls it.
        alike: the terms that do not depend on the axis.
        by_row: the terms that have it, each row of which depends on the same row only.
        rows: the carries that do, by their positions.
    """
    program = inside.program
    assert inside.goes_on is not None, "a loop whose number of steps is not known"
    conditions = [t for t in _joined(program, "and", program.outputs[inside.goes_on].term) if t not in alike]
    flag = _of_any(program, index, conditions[0]) if len(conditions) == 1 else None
    return flag is not None and flag[0] in by_row and _RowEnds(inside, *flag, frozenset(rows)).end_for_good()


def _joined(program: Program, op: str, t: int) -> Iterator[int]:
    """The operands of a conjunction, or disjunction, of any number; what is none stands alone."""
    term = program.terms[t]
    if isinstance(term, Map) and term.op == op and term.dtype == bool:
        for a in term.args:
            yield from _joined(program, op, a)
    else:
        yield t


def _of_any(program: Program, index: int, t: int) -> tuple[int, bool] | None:
    """The condition on each row, and its value for rows that go on, where a term asks whether any row does."""
    term, goes_on = program.terms[t], True
    if isinstance(term, Map) and term.op == "not":
        term, goes_on = program.terms[term.args[0]], False
    while isinstance(term, Fold) and term.monoid == ("or" if goes_on else "and"):
        if term.over >> index & 1:
            return term.arg, goes_on
        term = program.terms[term.arg]
    return None


@dataclass(frozen=True)
class _RowEnds:
    """The rows of a loop: those go on whose ``flag`` is ``goes_on``."""

    inside: Inside
    flag: int
    goes_on: bool
    rows: frozenset[int]

    @property
    def program(self) -> Program:
        return self.inside.program

    @property
    def joint(self) -> str:
        """The operation by whose operands, any of them, a row ends."""
        return "and" if self.goes_on else "or"

    @cached_property
    def entering(self) -> list[int]:
        return unchanged(self.inside)

    def end_for_good(self) -> bool:
        """Whether rows that have ended keep what is carried, and do not go on again."""
        kept = all(self._keeps(self.program.outputs[k].term, self.entering[k]) for k in self.rows)
        return kept and all(map(self._stays, _joined(self.program, self.joint, self.flag)))

    def _keeps(self, t: int, old: int) -> bool:
        """Whether a term is the old value for rows that have ended."""
        if t == old:
            return True
        if old == self.flag:
            return old in _joined(self.program, self.joint, t)
        term = self.program.terms[t]
        if not isinstance(term, Map) or term.op != "select_n" or len(term.args) != 3:
            return False
        which, if_false, if_true = term.args
        is_false, is_true = self._is_ended(which, False), self._is_ended(which, True)
        return (is_true or self._keeps(if_false, old)) and (is_false or self._keeps(if_true, old))

    def _is_ended(self, t: int, value: bool) -> bool:
        """Whether a condition has a value for all rows that have ended: one of its parts decides it."""
        op = "or" if value else "and"
        parts = {*_joined(self.program, op, t)}
        if value is not self.goes_on and parts.issuperset(_joined(self.program, op, self.flag)):
            return True
        opposite = [term.args[0] for part in parts if isinstance(term := self.program.terms[part], Map) and term.op == "not"]
        return any(self._is_ended(part, not value) for part in opposite)

    def _stays(self, t: int) -> bool:
        """Whether a part of the flag keeps the value by which a row ends: its operands do not change, or a counter rises above a bound."""
        if self._is_fixed(t):
            return True
        term = self.program.terms[t]
        place = RISING[self.goes_on].get(term.op) if isinstance(term, Map) else None
        return place is not None and isinstance(term, Map) and self._rises(term.args[place]) and self._is_fixed(term.args[1 - place])

    def _is_fixed(self, t: int) -> bool:
        """Whether a value does not change for rows that have ended."""
        stack, seen = [t], set[int]()
        while stack:
            a = stack.pop()
            if a in seen:
                continue
            seen.add(a)
            k = self._carry(a)
            if k is not None and k not in self.rows and self.program.outputs[k].term != self.entering[k]:
                return False
            stack.extend(children(self.program.terms[a]))
        return True

    def _carry(self, t: int) -> int | None:
        """The carry that a term reads; None if it is no read of one."""
        term = self.program.terms[t]
        k = term.slot - self.inside.consts if isinstance(term, Input) else -1
        return k if 0 <= k < self.inside.carries else None

    def _rises(self, t: int) -> bool:
        """Whether a term is a carried integer to which each step adds."""
        k = self._carry(t)
        if k is None:
            return False
        new = self.program.terms[self.program.outputs[k].term]
        if not isinstance(new, Map) or new.op != "add" or t not in new.args or not issubdtype(new.dtype, np.integer):
            return False
        added = [self.program.terms[a] for a in new.args if a != t]
        return len(added) == 1 and isinstance(added[0], Literal) and added[0].value > 0
