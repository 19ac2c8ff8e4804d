"""Sums of exponentials less a level, as an extracted program computes them: what rescaling chunks needs (``rules/streaming.egg``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eqsat_mem import ir
from eqsat_mem.egraph import View
from eqsat_mem.ir import Program


@dataclass(frozen=True)
class Rescaled:
    """How a sum depends on a level: ``chain`` are the terms from the sum down to ``shift``, which subtracts ``level``.

    Nothing else between them reads the level, so that these terms with another level give the sum with another factor.
    """

    level: int
    shift: int
    chain: frozenset[int]

    def renumbered(self, ids: Mapping[int, int]) -> Rescaled:
        """The same of terms that have other numbers."""
        return Rescaled(ids[self.level], ids[self.shift], frozenset(ids[t] for t in self.chain))


def rescaled_sums(view: View, program: Program, class_of: Mapping[int, int]) -> dict[int, Rescaled]:
    """The sums whose terms hold the factor that rules stated, as the chosen terms are computed."""
    term_of: dict[int, int] = {}
    for t, c in class_of.items():
        term_of.setdefault(c, t)
    levels = {t: [term_of[r] for r in sorted(view.levels[c]) if r in term_of] for t, c in class_of.items() if c in view.levels}
    found: dict[int, Rescaled] = {}
    for t in levels:
        if isinstance(program.terms[t], ir.Dot | ir.Fold):
            known = next(filter(None, (chain(program, t, level, levels) for level in levels[t])), None)
            found |= {} if known is None else {t: known}
    return found


def chain(program: Program, t: int, level: int, levels: Mapping[int, Sequence[int]]) -> Rescaled | None:
    """The only way from a sum down to a level, if there is one and every term on it holds the level's exponential, as ``levels`` says."""
    if program.free[level] & ~program.free[t]:
        return None
    depends = {level}
    for u in range(level + 1, t + 1):
        if depends.intersection(ir.children(program.terms[u])):
            depends.add(u)
    way = [t]
    while True:
        below = [c for c in ir.children(program.terms[way[-1]]) if c in depends]
        if len(below) != 1 or below == [level]:
            return None
        (u,) = below
        if level in ir.children(program.terms[u]):
            return Rescaled(level, u, frozenset(way)) if _subtracts(program, u, level) else None
        if level not in levels.get(u, ()):
            return None
        way.append(u)


def with_higher_level(program: Program, t: int, known: Rescaled, by: float) -> int:
    """The sum ``t`` with a level that is higher by a number: it is ``exp(-by)`` times the sum."""
    dtype = program.terms[known.level].dtype
    higher = program.add(ir.Map(dtype, "add", (known.level, program.add(ir.Literal.of(np.dtype(dtype).type(by), dtype)))))
    new = {known.level: higher}
    for u in (known.shift, *sorted(known.chain)):
        new[u] = program.add(ir.with_children(program.terms[u], tuple(new.get(c, c) for c in ir.children(program.terms[u]))))
    return new[t]


def _subtracts(program: Program, t: int, level: int) -> bool:
    """Is ``t`` something else less the level?"""
    term = program.terms[t]
    return isinstance(term, ir.Map) and term.op == "sub" and term.args[1] == level != term.args[0]
