"""Sums of exponentials less a level, as an extracted program computes them: what rescaling chunks needs (``rules/streaming.egg``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


def rescaled_sums(view: View, program: Program, class_of: Mapping[int, int]) -> dict[int, Rescaled]:
    """The sums whose terms hold the factor that rules stated, as the chosen terms are computed."""
    levels = {t: view.levels[c] for t, c in class_of.items() if view.levels[c]}
    term_of: dict[int, int] = {}
    for t, c in class_of.items():
        term_of.setdefault(c, t)
    found: dict[int, Rescaled] = {}
    for t, homes in levels.items():
        for home in homes if isinstance(program.terms[t], ir.Dot | ir.Fold) else ():
            chain = _chain(program, t, term_of[home], levels, home) if home in term_of else None
            if chain is not None:
                found.setdefault(t, chain)
    return found


def _chain(program: Program, t: int, level: int, levels: Mapping[int, tuple[int, ...]], home: int) -> Rescaled | None:
    """The only way from a sum down to its level (of class ``home``), if there is one and every term on it holds the level's factor."""
    if program.free[level] & ~program.free[t]:
        return None
    depends = {level}
    for u in range(level + 1, t + 1):
        if depends.intersection(ir.children(program.terms[u])):
            depends.add(u)
    chain, u = [t], t
    while True:
        below = [c for c in ir.children(program.terms[u]) if c in depends]
        if len(below) != 1:
            return None
        (c,) = below
        if c == level:
            term = program.terms[u]
            shifts = isinstance(term, ir.Map) and term.op == "sub" and term.args[1] == level
            return Rescaled(level, u, frozenset(chain[:-1])) if shifts else None
        is_shift = level in ir.children(program.terms[c])
        if not is_shift and home not in levels.get(c, ()):
            return None
        chain.append(c)
        u = c
