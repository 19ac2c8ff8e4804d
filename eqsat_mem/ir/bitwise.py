"""Values that are compared with what was selected from them: they must have the same bits wherever they are computed.

``x == max(x)`` holds nowhere if ``x`` is computed twice and rounds differently. XLA contracts products and sums in some kernels and not in
others, and libraries sum in an order that depends on shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax.numpy as jnp

from eqsat_mem.ir import Block, Dot, Fold, Map, Program, Rename, children

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def compared(program: Program) -> dict[int, frozenset[int]]:
    """For each comparison of some value with one selected from it: those of its operands that are computed, floating-point numbers."""
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


def between(program: Program, terms: Iterable[int], origin: int, t: int) -> Iterator[tuple[int, set[int]]]:
    """The terms, of ascending ``terms``, on the ways from ``origin`` to ``t``, with those of their operands that are on them too."""
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
    """Does ``t`` depend on ``origin`` by extremes, searches and elementwise operations only, so that it may equal it?"""
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
