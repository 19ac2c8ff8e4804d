"""Premises about index sets, dtypes and numbers, decided for one left side before it stands in an e-graph.

Left sides are drawn at random, and most do not meet the guards of their rule. Those are left out here, so that an e-graph holds left sides
that match. egglog has the last word: what is not known here counts as met.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from eqsat_mem.egraph import language
from eqsat_mem.egraph.soundness.patterns import Shape, Tree

UNKNOWN: Any = None


class Terms(Protocol):
    """The facts that are known of the terms of a left side."""

    def bound(self, variable: Any) -> Any:
        """The value of a variable: a constant, a term, or UNKNOWN."""

    def bind(self, variable: Any, value: Any) -> None:
        """Let a variable stand for a constant."""

    def property(self, name: str, term: Any) -> Any:
        """``free`` or ``dtype`` of a term; UNKNOWN for other names."""

    def extent(self, mask: int) -> float:
        """The product of the extents of an index set."""


def met(shape: Shape, terms: Terms) -> bool:
    """Whether the guards of a shape are met, as far as can be told."""
    open_ = list(shape.guards)
    while open_:
        left = []
        for premise, use in open_:
            known = _holds(premise, use, terms)
            if known is False:
                return False
            if known is UNKNOWN:
                left.append((premise, use))
        if len(left) == len(open_):
            return True
        open_ = left
    return True


def value(tree: Tree, use: int, terms: Terms) -> Any:
    """The value of an expression of index sets, numbers and strings; UNKNOWN where it is not known."""
    if isinstance(tree, str):
        known = _literal(tree)
        return terms.bound((tree, use)) if known is UNKNOWN else known
    head, *args = tree
    if head in ("free", "dtype"):
        term = value(args[0], use, terms)
        return UNKNOWN if term is UNKNOWN else terms.property(head, term)
    given = [value(a, use, terms) for a in args]
    if any(a is UNKNOWN for a in given):
        return UNKNOWN
    if head in ("size", "extent"):
        return terms.extent(given[0])
    compute = _COMPUTED.get(head)
    try:
        return UNKNOWN if compute is None else compute(*given)
    except (ArithmeticError, TypeError, ValueError):
        return UNKNOWN


def _holds(premise: Tree, use: int, terms: Terms) -> bool | None:
    head, *args = premise
    if head == "=":
        return _equal(args, use, terms)
    if head in _COMPARED or head in _STATED:
        given = [value(a, use, terms) for a in args]
        if any(a is UNKNOWN for a in given):
            return UNKNOWN
        return bool(_COMPARED[head](*given) if head in _COMPARED else _STATED[head](given[0], terms))
    return UNKNOWN


def _equal(args: Sequence[Tree], use: int, terms: Terms) -> bool | None:
    """Whether all sides are one value; variables that stand for nothing yet then stand for it."""
    sides = [(a, value(a, use, terms)) for a in args]
    known = [v for _, v in sides if v is not UNKNOWN]
    if not known:
        return UNKNOWN
    if any(v != known[0] for v in known[1:]):
        return False
    for a, v in sides:
        if v is UNKNOWN and isinstance(a, str):
            terms.bind((a, use), known[0])
    return True if all(v is not UNKNOWN or isinstance(a, str) for a, v in sides) else UNKNOWN


@cache
def _literal(atom: str) -> Any:
    if atom.startswith('"'):
        return atom.strip('"')
    try:
        return int(atom)
    except ValueError:
        pass
    try:
        return float(atom) if atom[0] in "-0123456789" or atom == "inf" else UNKNOWN
    except ValueError:
        return UNKNOWN


_COMPARED: Mapping[str, Callable[[Any, Any], bool]] = {
    "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_STATED: Mapping[str, Callable[[Any, Terms], bool]] = {
    "large": lambda mask, terms: terms.extent(mask) > 0,
    "want": lambda mask, terms: True,
} | {fact: (lambda name, terms, names=names: name in names) for fact, names in language.FACTS_OF_NAMES.items()}
_COMPUTED: Mapping[str, Callable[..., Any]] = {
    "&": lambda *a: _folded(operator.and_, a), "|": lambda *a: _folded(operator.or_, a), "^": lambda *a: _folded(operator.xor, a),
    "+": lambda *a: _folded(operator.add, a), "*": lambda *a: _folded(operator.mul, a), "-": operator.sub,
    "/": lambda a, b: a / b if isinstance(a, float) else int(a / b), "%": math.fmod, "not-i64": operator.invert, "neg": operator.neg,
    "min": min, "max": max, "abs": abs, "<<": operator.lshift, ">>": operator.rshift, "to-f64": float, "to-i64": int,
}  # fmt: skip


def _folded(combine: Callable[[Any, Any], Any], values: Sequence[Any]) -> Any:
    out = values[0]
    for v in values[1:]:
        out = combine(out, v)
    return out
