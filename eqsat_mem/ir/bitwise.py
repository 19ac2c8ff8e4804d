"""Values that are compared with elements selected from them, which must have the same bits wherever they are computed.

``x == max(x)`` may be false everywhere if ``x`` is computed twice and rounded differently. XLA contracts multiplications and
additions in some kernels and not in others, and libraries sum in an order that depends on shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import jax.numpy as jnp

from eqsat_mem.ir import Block, Dot, Fold, Map, Program, Rename, children

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
SUMS, PRODUCTS = frozenset({"add", "sub", "neg"}), frozenset({"mul", "square", "integer_pow"})


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


def rounded_in(program: Program) -> set[int]:
    """The terms that values depend on which must keep their bits."""
    stack = [t for exact in compared(program).values() for t in exact]
    found = set(stack)
    while stack:
        new = set(children(program.terms[stack.pop()])) - found
        found |= new
        stack += new
    return found


def shared_products(program: Program, exact: Iterable[int]) -> frozenset[int]:
    """Return the products that are added up in values which must keep their bits, and that other terms read too.

    A compiler contracts an addition with a product that nothing else in the kernel reads: of two products with another one in a kernel
    that has a further reader of the first, and it rounds the sum differently there.
    """
    stack, found = [*exact], set[int]()
    if not stack:
        return frozenset()
    seen = set(stack)
    readers = Counter(c for t in program.reachable() for c in {_source(program, c) for c in children(program.terms[t])})
    while stack:
        term = program.terms[stack.pop()]
        if not isinstance(term, Map | Fold):
            continue
        new = {_source(program, c) for c in children(term)}
        if term.monoid == "add" if isinstance(term, Fold) else term.op in SUMS:
            products = {c for c in new if isinstance(made := program.terms[c], Map) and made.op in PRODUCTS}
            found |= {c for c in products if readers[c] > 1 and _rounds(program, c)}
        stack += new - seen
        seen |= new
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
