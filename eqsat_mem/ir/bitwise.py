"""Values that are compared with elements selected from them, which must have the same bits wherever they are computed.

``x == max(x)`` may be false everywhere if ``x`` is computed twice and rounded differently. XLA contracts multiplications and
additions in some kernels and not in others, and libraries sum in an order that depends on shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

import jax.numpy as jnp

from eqsat_mem.ir import Block, Dot, Fold, Iota, Literal, Map, Program, Rename, children, is_leaf

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
PRODUCTS = frozenset({"mul", "square", "integer_pow"})


def compared(program: Program) -> dict[int, frozenset[int]]:
    """Return the comparisons of a value with a value selected from it, with their operands that must keep their bits.

    Returns:
        By comparison, those of its operands that are computed, are floating-point, and from which the other operand is selected.
    """
    found: dict[int, frozenset[int]] = {}
    for t in program.reachable():
        term = program.terms[t]
        if isinstance(term, Map) and term.op in COMPARISONS:
            left, right = (_source(program, a) for a in term.args)
            pairs = ((left, right), (right, left)) if left != right else ()
            exact = frozenset(x for x, other in pairs if _rounds(program, x) and _selects_from(program, other, x))
            if exact:
                found[t] = exact
    return found


def selected_by_element(program: Program, compared: Mapping[int, Iterable[int]]) -> dict[int, frozenset[int]]:
    """Return the values compared with others that elementwise operations alone select from them, with these and what lies between.

    A kernel that computes a value and all of those compares the same bits, whatever another kernel's are. Where either is read under other
    names, other elements are compared.
    """
    found: dict[int, frozenset[int]] = {}
    for t, exact in compared.items():
        args = children(program.terms[t])
        left, right = (_source(program, a) for a in args)
        for x in exact:
            found[x] = found.get(x, frozenset()).union(_way(program, x, right if x == left else left), set(args) - {left, right})
    return {x: way for x, way in found.items() if all(isinstance(program.terms[t], Map) for t in way)}


def _way(program: Program, origin: int, t: int) -> frozenset[int]:
    """The terms that are made of ``origin`` on the way to ``t``, with this."""
    made = {origin}
    for u in range(origin + 1, t + 1):  # operands come before their users
        if not made.isdisjoint(children(program.terms[u])):
            made.add(u)
    way, stack = {t}, [t]
    while stack:
        new = (made & set(children(program.terms[stack.pop()]))) - way - {origin}
        way |= new
        stack += new
    return frozenset(way)


def rounded_in(program: Program) -> set[int]:
    """The terms that values depend on which must keep their bits."""
    stack = [t for exact in compared(program).values() for t in exact]
    found = set(stack)
    while stack:
        new = set(children(program.terms[stack.pop()])) - found
        found |= new
        stack += new
    return found


def uncontracted(program: Program, exact: Iterable[int], written_out: Collection[int]) -> frozenset[int]:
    """Return the values to keep from being contracted, so that all kernels that need one of the ``exact`` values round it alike.

    A compiler contracts an addition with a product that nothing else in the kernel reads: of two products with another one in a kernel
    that has a further reader of the first, and it rounds the sum differently there. So these are the products that are added up in exact
    values and that other terms read too. The elements of sums that are ``written_out`` are no terms: of products that may be the same,
    made of the same values, an operand stands for the product.
    """
    stack = [*exact]
    if not stack:
        return frozenset()
    seen, found, elements = set(stack), set[int](), set[frozenset[int]]()
    readers = Counter(c for t in program.reachable() for c in {_source(program, c) for c in children(program.terms[t])})
    while stack:
        t = stack.pop()
        term = program.terms[t]
        if t in written_out:
            elements.add(_made_of(program, t))
        if not isinstance(term, Map | Fold):
            continue
        new = {_source(program, c) for c in children(term)}
        if term.monoid == "add" if isinstance(term, Fold) else term.op in ("add", "sub"):
            for c in new:
                *negatives, product = _negated(program, c)
                if _is_product(program, product) and any(readers[r] > 1 for r in (*negatives, product)):
                    found.add(product)
        stack += new - seen
        seen |= new
    for t in readers.keys() - seen if elements else ():
        if _is_product(program, t) and any(_made_of(program, t) <= made_of for made_of in elements):
            operands = (_source(program, c) for c in children(program.terms[t]))
            found |= {c for c in operands if c not in seen and not is_leaf(program.terms[c])}
    return frozenset(found)


def _negated(program: Program, t: int) -> list[int]:
    """A value, what it is the negative of, and so on."""
    found = [t]
    while isinstance(term := program.terms[found[-1]], Map) and term.op == "neg":
        found.append(_source(program, term.args[0]))
    return found


def _is_product(program: Program, t: int) -> bool:
    term = program.terms[t]
    return isinstance(term, Map) and term.op in PRODUCTS and _rounds(program, t)


def _made_of(program: Program, t: int) -> frozenset[int]:
    """The arguments, contractions and folds from which a value, or an element of a sum, is computed or moved."""
    stack, seen, found = [*children(program.terms[t])], set[int](), set[int]()
    while stack:
        c = stack.pop()
        if c not in seen:
            seen.add(c)
            if is_leaf(term := program.terms[c]) or isinstance(term, Dot | Fold):
                found |= {c} if not isinstance(term, Literal | Iota) else set()
            else:
                stack += children(term)
    return frozenset(found)


def between(program: Program, terms: Iterable[int], origin: int, t: int) -> Iterator[tuple[int, set[int]]]:
    """Yield the terms on paths from ``origin`` to ``t``.

    Args:
        program: the program.
        terms: the terms to consider, ascending.
        origin: the term at which the paths begin.
        t: the term at which they end.

    Yields:
        Each such term except ``origin``, with those of its operands that are on the paths too, except ``origin``.
    """
    way = {origin}
    for u in terms:
        if origin < u <= t and (read := way.intersection(program.operands(u))):
            way.add(u)
            yield u, read - {origin}


def _source(program: Program, t: int) -> int:
    term = program.terms[t]
    return _source(program, term.arg) if isinstance(term, Rename) else t


def _rounds(program: Program, t: int) -> bool:
    return isinstance(program.terms[t], (Map, Fold, Dot, Block)) and jnp.issubdtype(program.terms[t].dtype, jnp.floating)


def _selects_from(program: Program, t: int, origin: int) -> bool:
    """Whether ``t`` depends on ``origin`` through extremes, blocks and elementwise operations only, so that the two may be equal."""
    stack, seen = [t], {t}
    while stack:
        term = program.terms[stack.pop()]
        if isinstance(term, (Map, Rename, Block)) or (isinstance(term, Fold) and term.monoid in ("max", "min")):
            for c in children(term):
                if c == origin:
                    return True
                if c > origin and c not in seen:  # operands come before their users
                    seen.add(c)
                    stack.append(c)
    return False
