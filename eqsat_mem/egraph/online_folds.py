"""Folds of values that depend on another fold, as an extracted program computes them, and the facts needed to join their chunks.

Sums of exponentials less a level, sums of squares less a mean, and sums and places of the elements that are an extreme.

``rules/streaming.egg`` states them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from eqsat_mem import ir
from eqsat_mem.egraph.graph import View
from eqsat_mem.ir import Program


@dataclass(frozen=True)
class Rescaled:
    """The dependence of a sum on a level: ``chain`` are the terms from the sum down to ``shift``, which subtracts ``level``.

    Nothing else between them reads the level, so that these terms with another level give the sum with another factor. Where the level is
    a mean, ``mean_over`` are its indices, and they give the sum of squared differences from another mean. Where it is an ``extreme``,
    ``shift`` compares elements with it, and what they give of elements that are less than another extreme counts as nothing.
    """

    level: int
    shift: int
    chain: frozenset[int]
    mean_over: int = 0
    extreme: bool = False

    @property
    def exponential(self) -> bool:
        """Whether another level changes the sum by an exponential."""
        return not self.mean_over and not self.extreme

    def renumbered(self, ids: Mapping[int, int]) -> Rescaled:
        """The same of terms that have other numbers."""
        return Rescaled(ids[self.level], ids[self.shift], frozenset(ids[t] for t in self.chain), self.mean_over, self.extreme)


def rescaled_sums(view: View, program: Program, class_of: Mapping[int, int]) -> dict[int, Rescaled]:
    """The folds that depend on levels, means or extremes as rules stated it, as the chosen terms are computed."""
    term_of: dict[int, int] = {}
    for t, c in class_of.items():
        term_of.setdefault(c, t)

    def stated(pairs: Mapping[int, frozenset[int]]) -> dict[int, list[int]]:
        return {t: [term_of[r] for r in sorted(pairs[c]) if r in term_of] for t, c in class_of.items() if c in pairs}

    levels, means, places = stated(view.levels), stated(view.means), stated(view.places)
    ways = [
        *((t, chain(program, t, r, levels)) for t in levels for r in levels[t]),
        *((t, squares(program, t, m)) for t in means for m in means[t]),
        *((t, first_place(program, t, r, levels, places)) for t in places for r in places[t]),
    ]
    return {t: way for t, way in reversed(ways) if way is not None and isinstance(program.terms[t], ir.Dot | ir.Fold)}


def chain(program: Program, t: int, level: int, levels: Mapping[int, Sequence[int]]) -> Rescaled | None:
    """The only way from a sum down to a level, if there is one and every term on it holds the level's factor, as ``levels`` says."""
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
            compares = _compares(program, u, level)
            return Rescaled(level, u, frozenset(way), extreme=compares) if compares or _subtracts(program, u, level) else None
        if level not in levels.get(u, ()):
            return None
        way.append(u)


def squares(program: Program, t: int, mean: int) -> Rescaled | None:
    """The way from a sum of squared differences down to the mean of what they are of, if it is that simple."""
    total, over = program.terms[t], ir.folded(program.terms[t])
    square = program.terms[total.arg] if isinstance(total, ir.Fold) else total
    between = {t, total.arg} if isinstance(total, ir.Fold) else {t}
    if not over or len(sides := set(ir.children(square))) != 1 or not _is_mean(program, mean, over) or np.dtype(total.dtype).itemsize < 4:
        return None
    (shift,) = sides
    return Rescaled(mean, shift, frozenset(between), over) if _subtracts(program, shift, mean) else None


def first_place(
    program: Program, t: int, extreme: int, levels: Mapping[int, Sequence[int]], places: Mapping[int, Sequence[int]]
) -> Rescaled | None:
    """The way from the first place of an extreme down to the comparison with it, if places lie between zero and what stands for none.

    Places of what is not a number may lie below zero.
    """
    total = program.terms[t]
    known = chain(program, t, extreme, {u: [*levels.get(u, ()), *places.get(u, ())] for u in {*levels, *places}})
    if known is None or not known.extreme or not isinstance(total, ir.Fold) or total.monoid != "min":
        return None
    found = total.arg
    while found not in levels:
        term = program.terms[found]
        if not isinstance(term, ir.Map) or term.op != "select_n":
            return None
        which, otherwise, here = term.args
        if which in known.chain or which == known.shift:
            none, (least, most) = _bounds(program, otherwise), _bounds(program, here)
            return known if least >= 0 and most <= none[0] else None
        if _bounds(program, here)[1] >= 0:
            return None
        found = otherwise
    return None


def _bounds(program: Program, t: int) -> tuple[float, float]:
    """Numbers between which all elements of a value lie: of positions, and of sums and products of those and of numbers."""
    term = program.terms[t]
    if isinstance(term, ir.Literal) and np.dtype(term.dtype).kind in "biuf" and np.isfinite(term.value):
        return float(term.value), float(term.value)
    if isinstance(term, ir.Iota):
        return 0.0, program.indices[term.index].extent - 1.0
    if isinstance(term, ir.Map) and term.op == "convert_element_type":
        return _bounds(program, term.args[0])
    combine = _MONOTONE.get(term.op) if isinstance(term, ir.Map) else None
    if combine is None:
        return -np.inf, np.inf
    ends = [combine(a, b) for a, b in product(*(_bounds(program, a) for a in ir.children(term)))]
    return (min(ends), max(ends)) if all(map(np.isfinite, ends)) else (-np.inf, np.inf)


_MONOTONE: Mapping[str, Callable[[float, float], float]] = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


def with_higher_level(program: Program, t: int, known: Rescaled, by: float) -> int:
    """The sum ``t`` with a level that is higher by a number: it is ``exp(-by)`` times the sum."""
    dtype = program.terms[known.level].dtype
    higher = program.add(ir.Map(dtype, "add", (known.level, program.add(ir.Literal.of(np.dtype(dtype).type(by), dtype)))))
    new = {known.level: higher}
    for u in (known.shift, *sorted(known.chain)):
        new[u] = program.add(ir.with_children(program.terms[u], tuple(new.get(c, c) for c in ir.children(program.terms[u]))))
    return new[t]


def _subtracts(program: Program, t: int, level: int) -> bool:
    """Whether ``t`` is something else less the level."""
    term = program.terms[t]
    return isinstance(term, ir.Map) and term.op == "sub" and term.args[1] == level != term.args[0]


def _compares(program: Program, t: int, level: int) -> bool:
    """Whether ``t`` says which elements are the level, the largest or the least of them."""
    term, extreme = program.terms[t], program.terms[level]
    if not isinstance(term, ir.Map) or term.op != "eq" or not isinstance(extreme, ir.Fold) or extreme.monoid not in ("max", "min"):
        return False
    return set(term.args) == {level, extreme.arg}


def _is_mean(program: Program, t: int, over: int) -> bool:
    """Whether ``t`` is written as a sum over these indices by the number of its terms."""
    term = program.terms[t]
    if not isinstance(term, ir.Map) or term.op != "div":
        return False
    total, count = (program.terms[a] for a in term.args)
    return ir.folded(total) == over and isinstance(count, ir.Literal)
