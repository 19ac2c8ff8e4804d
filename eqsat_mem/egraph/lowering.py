"""Terms of extracted programs that stand for several plain ones, written out, with what rules allow for them.

Rules and extraction see a fold by a monoid of the user's, a contraction with sums added to it, as one operation each; loops, memory and
code see the terms that it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from eqsat_mem.ir import Program, Term

Table = dict[int, int]


@dataclass
class Allowed:
    """The splits that are allowed for the terms of a program: index sets by term, as in :class:`eqsat_mem.egraph.extract.Extraction`."""

    splits: Table = field(default_factory=dict)
    accumulates: Table = field(default_factory=dict)
    unrolls: Table = field(default_factory=dict)

    @property
    def tables(self) -> tuple[Table, Table, Table]:
        return self.splits, self.accumulates, self.unrolls


def allow(table: Table, t: int, mask: int) -> None:
    """Add indices to those of a term."""
    if mask:
        table[t] = table.get(t, 0) | mask


Lower = Callable[["Lowering", int, Mapping[int, int]], int]
"""Adds what a term stands for to ``new``, says in ``after`` what may be done with it, and returns its number; it is given those
of all terms before."""


class Lowering:
    """The new program, and what may be done with the terms of both."""

    def __init__(self, program: Program, allowed: Allowed) -> None:
        self.old, self.before = program, allowed
        self.new, self.after = program.empty_like(), Allowed()
        self.others: Table = {}

    def run(self, which: Mapping[int, Lower]) -> tuple[Program, Allowed, Mapping[int, int]]:
        """The program with the terms ``which`` written out, what may be done with it, and the new number of each term."""
        if not which:
            return self.old, self.before, {t: t for t in range(len(self.old.terms))}

        def lower(_: Program, t: int, ids: Mapping[int, int]) -> int | None:
            return which[t](self, t, ids) if t in which else None

        new, ids = self.old.rewritten(lower, range(len(self.old.terms)), self.new)
        for before, after in zip(self.before.tables, self.after.tables):
            for t, mask in before.items():
                if t not in which:
                    allow(after, ids[t], mask)
        return new, self.after, ids

    def beside(self, index: int) -> int:
        """Another index of the same extent, for values that are read whole where the index itself is in chunks."""
        if index not in self.others:
            self.others[index] = self.new.new_index(self.new.indices[index].name, self.new.indices[index].extent)
        return self.others[index]

    def sliced(self, term: Term, mask: int) -> int:
        """A new term, which may be computed slice by slice along those of these indices that it has."""
        t = self.new.add(term)
        allow(self.after.splits, t, mask & self.new.free[t])
        return t
