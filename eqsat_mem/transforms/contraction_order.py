"""Long products in a better order: rules find it for a few factors, dynamic programming for any number.

An e-graph holds every order of a product, of which there are exponentially many, and it has bits for some sixty indices. A chain of
seventy matrices has more of both. So products that the rules could associate at all are given to opt_einsum whole, and the program that
results is one more candidate to be scheduled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from opt_einsum import paths

from eqsat_mem.egraph.extract import Extraction, original
from eqsat_mem.egraph.rule_files import RuleSet
from eqsat_mem.ir import Dot, Map, Program, bits, children
from eqsat_mem.passes import ORDER

FEWEST = 4
"""Factors from which on an order is looked for; of fewer, rules have all."""
NEIGHBOURS = 2
"""Dynamic programming looks at all connected sets of factors: few if each factor has so many neighbours, as in chains and rings."""
FEW = 8
"""Up to so many factors may be connected in any way."""


def reordered(ex: Extraction, rules: RuleSet, seconds: Callable[[Program, int], float]) -> Extraction | None:
    """The program with its long products in the order that takes the fewest multiplications; None if it is not faster by ``seconds``."""
    if ORDER not in rules.passes:
        return None
    products = [p for p in _products(ex.program) if len(p.factors) >= FEWEST]
    if not products:
        return None
    program = _rebuilt(ex.program, {p.root: p for p in products})
    program.passes |= {ORDER.name}
    before, after = (sum(seconds(p, t) for t in p.reachable()) for p in (ex.program, program))
    return original(program, rules) if after < before else None


@dataclass(frozen=True)
class _Product:
    """A contraction ``root`` as the sum over ``over`` of the product of ``factors``; ``inner`` are the contractions between.

    ``like`` is the root itself: all have its dtype and precision.
    """

    root: int
    like: Dot
    factors: tuple[int, ...]
    inner: tuple[int, ...]
    over: int


def _products(program: Program) -> list[_Product]:
    """The largest products of a program. A product that has another use is a factor: it is there anyway."""
    reachable = program.reachable()
    uses = Counter(program.roots())
    for t in reachable:
        uses.update(children(program.terms[t]))
    found: list[_Product] = []
    taken: set[int] = set()
    for t in reversed(reachable):
        if isinstance(program.terms[t], Dot) and t not in taken:
            found.append(_product(program, t, uses))
            taken.update(found[-1].inner)
    return found


def _product(program: Program, root: int, uses: Counter[int]) -> _Product:
    """As many factors as one sum may be taken over: inner sums bind no index that anything else of the product has."""
    top = program.terms[root]
    assert isinstance(top, Dot)
    factors, inner, over = [top.lhs, top.rhs], list[int](), top.over
    waiting = list(factors)
    while waiting:
        t = waiting.pop()
        more, summed = _two_factors(program, t, top)
        others = list(factors)
        others.remove(t)
        elsewhere = program.free[root] | over
        for other in others:
            elsewhere |= program.free[other]
        if more and uses[t] == 1 and not summed & elsewhere:
            factors, over = [*others, *more], over | summed
            inner.append(t)
            waiting += more
    return _Product(root, top, tuple(factors), tuple(inner), over)


def _two_factors(program: Program, t: int, top: Dot) -> tuple[tuple[int, ...], int]:
    """The operands of a contraction like ``top``, or of an outer product, and what they are summed over; none for any other term."""
    term = program.terms[t]
    if isinstance(term, Dot) and (term.dtype, term.precision) == (top.dtype, top.precision):
        return (term.lhs, term.rhs), term.over
    if isinstance(term, Map) and term.op == "mul" and not program.free[term.args[0]] & program.free[term.args[1]]:
        return term.args, 0
    return (), 0


def _rebuilt(program: Program, products: dict[int, _Product]) -> Program:
    """The program with these products in their orders."""
    inner = {t for p in products.values() for t in p.inner}

    def ordered(new: Program, t: int, ids: Mapping[int, int]) -> int | None:
        if t not in products:
            return None
        product = _ordered(new, products[t], [ids[f] for f in products[t].factors])
        if t in program.source:
            new.source.setdefault(product, program.source[t])
        return product

    return program.rewritten(ordered, (t for t in program.reachable() if t not in inner))[0]


def _ordered(out: Program, product: _Product, factors: list[int]) -> int:
    """The product of ``factors`` in its order, term by term."""
    result = 0
    for f in factors:
        result |= out.free[f]
    for pair in _order(out, factors, result & ~product.over):
        chosen = [factors[k] for k in pair]
        factors = [f for k, f in enumerate(factors) if k not in pair]
        rest = result & ~product.over
        for f in factors:
            rest |= out.free[f]
        factors.append(_times(out, chosen, product.over & ~rest, product.like))
    (last,) = factors
    return last


def _times(out: Program, pair: list[int], unneeded: int, like: Dot) -> int:
    """Two factors multiplied and summed over what nothing else has."""
    lhs, rhs = sorted(pair)
    over = unneeded & (out.free[lhs] | out.free[rhs])
    return out.add(Dot(like.dtype, over, lhs, rhs, like.precision) if over else Map(like.dtype, "mul", (lhs, rhs)))


def _order(program: Program, factors: list[int], result: int) -> list[tuple[int, int]]:
    """Pairs of positions to multiply one after the other; each product goes to the end of the list."""
    sets = [frozenset(bits(program.free[f])) for f in factors]
    extents = {i: index.extent for i, index in enumerate(program.indices)}
    neighbours = max(sum(bool(a & b) for k, b in enumerate(sets) if k != j) for j, a in enumerate(sets))
    find = paths.dynamic_programming if neighbours <= NEIGHBOURS or len(factors) <= FEW else paths.greedy
    path = find(sets, frozenset(bits(result)), extents)
    return [(min(step), max(step)) for step in path if len(step) == 2]
