"""Sums of exponentials less a level, or of squares less a mean, as an extracted program computes them: what joining chunks needs.

``rules/streaming.egg`` states them.
"""

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

    Nothing else between them reads the level, so that these terms with another level give the sum with another factor. Where the level is
    a mean, ``mean_over`` are its indices, and they give the sum of squared differences from another mean.
    """

    level: int
    shift: int
    chain: frozenset[int]
    mean_over: int = 0

    def renumbered(self, ids: Mapping[int, int]) -> Rescaled:
        """The same of terms that have other numbers."""
        return Rescaled(ids[self.level], ids[self.shift], frozenset(ids[t] for t in self.chain), self.mean_over)


def rescaled_sums(view: View, program: Program, class_of: Mapping[int, int]) -> dict[int, Rescaled]:
    """The sums whose terms hold the factor that rules stated, or are squared differences, as the chosen terms are computed."""
    term_of: dict[int, int] = {}
    for t, c in class_of.items():
        term_of.setdefault(c, t)

    def stated(pairs: Mapping[int, frozenset[int]]) -> dict[int, list[int]]:
        return {t: [term_of[r] for r in sorted(pairs[c]) if r in term_of] for t, c in class_of.items() if c in pairs}

    levels, means = stated(view.levels), stated(view.means)
    ways = [
        *((t, chain(program, t, r, levels)) for t in levels for r in levels[t]),
        *((t, squares(program, t, m)) for t in means for m in means[t]),
    ]
    return {t: way for t, way in reversed(ways) if way is not None and isinstance(program.terms[t], ir.Dot | ir.Fold)}


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


def squares(program: Program, t: int, mean: int) -> Rescaled | None:
    """The way from a sum of squared differences down to the mean of what they are of, if it is that simple."""
    total, over = program.terms[t], ir.folded(program.terms[t])
    square = program.terms[total.arg] if isinstance(total, ir.Fold) else total
    between = {t, total.arg} if isinstance(total, ir.Fold) else {t}
    if len(sides := set(ir.children(square))) != 1 or not _is_mean(program, mean, over) or np.dtype(total.dtype).itemsize < 4:
        return None
    (shift,) = sides
    return Rescaled(mean, shift, frozenset(between), over) if _subtracts(program, shift, mean) else None


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


def _is_mean(program: Program, t: int, over: int) -> bool:
    """Is ``t`` written as a sum over these indices by the number of its terms?"""
    term = program.terms[t]
    if not isinstance(term, ir.Map) or term.op != "div":
        return False
    total, count = (program.terms[a] for a in term.args)
    return ir.folded(total) == over and isinstance(count, ir.Literal)
