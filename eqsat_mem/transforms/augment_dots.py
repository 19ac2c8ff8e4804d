"""Sums that are added to a contraction over the same index, as part of it.

``sum_k x y + sum_k u + sum_k w``, where ``u`` has the indices of ``x`` and ``w`` those of ``y``, is one contraction of ``[x, sum_k u, 1]``
with ``[y, 1, sum_k w]`` over a longer index. A squared distance, expanded, is of this form. For each element of the result two additions
are saved. Where ``k`` has many elements, each part of it is followed by its own sums: partial sums then stay near half the squared
distance, where those of the products alone grow to the squared norms and round as these do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from eqsat_mem.egraph.extract import Extraction, picked_with
from eqsat_mem.egraph.rule_files import RuleSet
from eqsat_mem.ir import Block, Call, Dot, Fold, Literal, Map, Output, Program, Rename, Term, bits, children, mask_of, with_children
from eqsat_mem.ir.ops import with_sums_p
from eqsat_mem.ir.precision import of_rules, rounds

RULE = "sum-of-dot"
"""The rule whose permission this needs: sums may be taken in another order."""
LARGE = 2**14
"""Elements of a result from which on additions are worth a copy of the operands."""
MOST_PARTS = 3
"""Parts of a contraction that are each followed by their sums; of fewer than eight elements there is one."""


def absorbed(ex: Extraction, rules: RuleSet, rounds_operands: bool) -> Extraction:
    """The program with the sums that are added to its contractions as part of those, where rules allow it."""
    if all(rule.name != RULE for rule in rules.rules):
        return ex
    found = _totals(ex.program, rounds_operands)
    return _Rewriting(ex, rounds_operands).run(found) if found else ex


# --- what is found ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sum:
    """``factor`` times the sum of the product of ``factors``, one or two, over an index; the sum is read under other ``names``."""

    term: int
    factor: float
    factors: tuple[int, ...]
    over: int
    names: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class _Total:
    """A contraction and a sum for each of its operands: what stands under the sum has the same indices as the operand."""

    product: _Sum
    left: _Sum
    right: _Sum


def _totals(program: Program, rounds_operands: bool) -> dict[int, _Total]:
    """Where three sums over one index are added up, by the term that has their total."""
    reachable = program.reachable()
    uses = Counter(program.roots())
    for t in reachable:
        uses.update(children(program.terms[t]))
    found = {}
    for t in reachable:
        term = program.terms[t]
        if isinstance(term, Map) and term.op in ("add", "sub") and term.dtype in (np.float32, np.float64):
            total = _total(program, t, uses, rounds_operands) if program.extent(program.free[t]) >= LARGE else None
            if total is not None:
                found[t] = total
    return found


def _total(program: Program, t: int, uses: Counter[int], rounds_operands: bool) -> _Total | None:
    free = program.free[t]
    sums = _summands(program, t, 1.0, t, uses)
    products = [s for s in sums if program.free[s.term] == free and len(s.factors) == 2 and all(free & ~program.free[f] for f in s.factors)]
    if len(sums) != 3 or len(products) != 1 or len({s.over for s in sums}) != 1 or sums[0].over.bit_count() != 1:
        return None
    (product,) = products
    dtype = program.terms[product.term].dtype
    if rounds_operands and rounds(dtype, _precision(program.terms[product.term], rounds_operands)):
        return None  # the sums would be rounded with its operands
    one, other = (s for s in sums if s is not product)
    whole = [program.free[f] for f in product.factors]
    for left, right in ((one, other), (other, one)):
        if [_under(program, left), _under(program, right)] == whole and uses[product.term] == 1 and not product.names:
            return _Total(product, left, right)
    return None


def _summands(program: Program, t: int, factor: float, top: int, uses: Counter[int]) -> list[_Sum]:
    """The sums that a term adds up, each with its factor; none if it is anything else."""
    term = program.terms[t]
    if isinstance(term, Map):
        if t != top and program.free[t] == program.free[top] and uses[t] != 1:
            return []  # it is there anyway
        parts = _added(program, term)
        found = [_summands(program, c, factor * by, top, uses) for c, by in parts]
        return [s for each in found for s in each] if all(found) else []
    names, inner = (term.pairs, program.terms[term.arg]) if isinstance(term, Rename) else ((), term)
    if isinstance(inner, Dot):
        return [_Sum(t, factor, (inner.lhs, inner.rhs), inner.over, names)]
    if isinstance(inner, Fold) and inner.monoid == "add":
        under = program.terms[inner.arg]
        factors = under.args if isinstance(under, Map) and under.op == "mul" else (inner.arg,)
        return [_Sum(t, factor, factors, inner.over, names)]
    return []


def _added(program: Program, term: Map) -> list[tuple[int, float]]:
    """The operands that an operation adds up, each with its factor; none if it is another operation."""
    match term.op:
        case "add":
            return [(term.args[0], 1.0), (term.args[1], 1.0)]
        case "sub":
            return [(term.args[0], 1.0), (term.args[1], -1.0)]
        case "neg":
            return [(term.args[0], -1.0)]
        case "mul":
            numbers = [(program.terms[a], other) for a, other in zip(term.args, reversed(term.args))]
            return [(other, float(number.value)) for number, other in numbers if isinstance(number, Literal)][:1]
    return []


def _under(program: Program, s: _Sum) -> int:
    """The indices of what stands under a sum, by the names that it is read under; 0 if the summed index would be renamed."""
    to = dict(s.names)
    if s.over & mask_of(i for pair in s.names for i in pair):
        return 0
    return mask_of(to.get(i, i) for f in s.factors for i in bits(program.free[f]))


def _precision(term: Term, rounds_operands: bool) -> Any:
    """That of the contraction which computes a sum of products."""
    return term.precision if isinstance(term, Dot) else of_rules(term.dtype, rounds_operands)


# --- the program with them ----------------------------------------------------------------------------


class _Rewriting:
    """The new program, the number in it of each old term, and what may be done with new ones."""

    def __init__(self, ex: Extraction, rounds_operands: bool) -> None:
        self.ex, self.old, self.rounds_operands = ex, ex.program, rounds_operands
        self.new = ex.program.empty_like()
        self.ids: dict[int, int] = {}
        self.splits: dict[int, int] = {}

    def run(self, totals: Mapping[int, _Total]) -> Extraction:
        old, new, ex = self.old, self.new, self.ex
        reachable = old.reachable()
        for t in sorted({*reachable, *(other for u in reachable for other in picked_with(old, u))}):
            term = old.terms[t]
            if t in totals:
                self.ids[t] = self.contraction(t, totals[t])
            else:
                self.ids[t] = new.add(with_children(term, tuple(self.ids[c] for c in children(term))), old.source.get(t))
        new.outputs = [Output(self.ids[o.term], o.axes, o.weak_type) for o in old.outputs]
        new.effects = [self.ids[t] for t in old.effects]
        tables = ex.splits, ex.accumulates, ex.unrolls
        splits, accumulates, unrolls = ({self.ids[t]: allowed for t, allowed in table.items() if t in self.ids} for table in tables)
        rescales = {self.ids[t]: sum_of.renumbered(self.ids) for t, sum_of in ex.rescales.items() if t in self.ids}
        origin = old, {t: o for o, t in self.ids.items()}
        return Extraction(new, splits | self.splits, accumulates, unrolls, rescales, origin)

    def contraction(self, t: int, total: _Total) -> int:
        """The contraction that is the total."""
        new, like = self.new, self.old.terms[total.product.term]
        (k,) = bits(total.product.over)
        parts = max(min(new.indices[k].extent // 8, MOST_PARTS), 1)
        longer = new.new_index(new.indices[k].name, new.indices[k].extent + 2 * parts)
        allowed = self.ex.splits.get(t, 0)
        first, second = (self.ids[f] for f in total.product.factors)
        first = self.times(first, total.product.factor, allowed)
        left = self.with_sums(first, total.left, {"parts": parts, "first": True}, longer, allowed)
        right = self.with_sums(second, total.right, {"parts": parts, "first": False}, longer, allowed)
        return new.add(Dot(like.dtype, 1 << longer, left, right, _precision(like, self.rounds_operands)), self.old.source.get(t))

    def with_sums(self, x: int, summed: _Sum, params: dict[str, Any], longer: int, allowed: int) -> int:
        """An operand of the contraction, with a sum, over an index that is ``longer``."""
        new, dtype = self.new, self.new.terms[x].dtype
        factors = [self.ids[f] for f in summed.factors]
        if summed.names:
            factors = [new.add(Rename(dtype, summed.names, f)) for f in factors]
        under = self.kept(Map(dtype, "mul", tuple(factors)), allowed) if len(factors) == 2 else factors[0]
        under = self.times(under, summed.factor, allowed)
        own = new.free[x] & ~summed.over
        axes = tuple((i,) for i in bits(own))
        call = Call(with_sums_p, params, ((*axes, *((i,) for i in bits(summed.over))),) * 2, ((*axes, (longer,)),), (dtype,), own)
        return self.kept(Block(dtype, call, (x, under), 0), allowed)

    def times(self, x: int, factor: float, allowed: int) -> int:
        """A term times a number."""
        dtype = self.new.terms[x].dtype
        if factor == 1.0:
            return x
        if factor == -1.0:
            return self.kept(Map(dtype, "neg", (x,)), allowed)
        return self.kept(Map(dtype, "mul", (self.new.add(Literal.of(factor, dtype)), x)), allowed)

    def kept(self, term: Term, allowed: int) -> int:
        """A new term, which may be sliced where the total may."""
        t = self.new.add(term)
        self.splits[t] = self.splits.get(t, 0) | allowed & self.new.free[t]
        return t
