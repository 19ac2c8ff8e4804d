"""Changes of names on their way down a program: what they would copy, and the program in which they have passed some way."""

from __future__ import annotations

from collections.abc import Callable

from eqsat_mem import ir
from eqsat_mem.ir import Program, mask_of

Pairs = tuple[tuple[int, int], ...]
Opens = Callable[[int], bool]
"""Whether names may pass a term to its operands."""


def copied(program: Program, term: ir.Rename, opens: Opens, most: int, fewest: int = 0) -> int:
    """The number of terms that a change of names would copy on its way down, or just more than ``most``.

    It ends at terms that do not open, that bind a new name, or that depend on less than ``fewest`` indices.
    """
    seen: set[tuple[int, Pairs]] = set()
    stack = [(term.arg, _changed(program, term.arg, term.pairs))]
    while stack and len(seen) <= most:
        t, pairs = stack.pop()
        if pairs and (t, pairs) not in seen:
            seen.add((t, pairs))
            inner = program.terms[t]
            if isinstance(inner, ir.Rename):
                before = {d: s for s, d in inner.pairs}
                pairs = tuple((before.get(s, s), d) for s, d in pairs if before.get(s, s) != d)
            if _passes(program, t, pairs, opens, fewest):
                stack.extend((c, _changed(program, c, pairs)) for c in ir.children(inner))
    return len(seen)


def passed_down(program: Program, term: ir.Rename, opens: Opens, fewest: int) -> list[int]:
    """Terms, operands first, of which the last is the same value: names change further down, where :func:`copied` ends."""
    known: dict[tuple[int, Pairs], int] = {}

    def below(t: int, pairs: Pairs) -> int:
        pairs = _changed(program, t, pairs)
        if (t, pairs) not in known:
            inner = program.terms[t]
            if not _passes(program, t, pairs, opens, fewest):
                made = program.add(ir.Rename(inner.dtype, pairs, t))
            elif isinstance(inner, ir.Rename):
                made = program.add(ir.Rename(inner.dtype, pairs, t))  # one change of both
                both = program.terms[made]
                made = below(both.arg, both.pairs) if isinstance(both, ir.Rename) else made
            else:
                operands = tuple(below(c, pairs) for c in ir.children(inner))
                made = program.add(ir.with_children(inner, operands), program.source.get(t))
            known[t, pairs] = made
        return known[t, pairs]

    below(term.arg, term.pairs)
    return list(known.values())


def _passes(program: Program, t: int, pairs: Pairs, opens: Opens, fewest: int) -> bool:
    """Whether a change of names goes on to the operands of a term."""
    if not pairs or ir.is_leaf(program.terms[t]) or program.free[t].bit_count() < fewest:
        return False
    return opens(t) and not ir.folded(program.terms[t]) & mask_of(d for _, d in pairs)


def _changed(program: Program, t: int, pairs: Pairs) -> Pairs:
    """The changes that a term sees."""
    return tuple((s, d) for s, d in pairs if program.free[t] >> s & 1)
