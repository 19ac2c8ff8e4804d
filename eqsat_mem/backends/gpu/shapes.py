"""Shapes of folds: how long they are, and in which order of axes they read arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eqsat_mem.backends.gpu import habits
from eqsat_mem.ir import Const, Dot, Fold, Input, Map, Program, Rename, Term, bits, is_leaf, itemsize
from eqsat_mem.schedule.backend import extent_of


def folded(program: Program, t: int, extents: Sequence[int]) -> tuple[int, bool]:
    """How many elements a fold combines to one, and whether they lie side by side: its indices are the last of its operand."""
    term = program.terms[t]
    assert isinstance(term, Fold)
    over = program.free[term.arg] & term.over
    return extent_of(extents, over), over > program.free[t]


def turned_bytes(program: Program, members: Sequence[int], size: Callable[[int], int]) -> int:
    """Bytes of the smallest array that a fold reads in another order of axes than the others, of which XLA makes a copy."""
    read = {c for t in members for c in operands(program, t) if c not in members and program.free[c].bit_count() > 1}
    orders = {c: axes for c in read if (axes := order(program, c)) is not None}
    turned = [c for c, axes in orders.items() if axes != tuple(sorted(axes))]
    straight = [c for c in orders if c not in turned]
    return min(map(size, (*turned, *straight))) if turned and straight else 0


def operands(program: Program, t: int) -> Sequence[int]:
    """The operands of an elementwise operation or a fold."""
    term = program.terms[t]
    return term.args if isinstance(term, Map) else (term.arg,) if isinstance(term, Fold) else ()


def order(program: Program, t: int) -> tuple[int, ...] | None:
    """The indices of an array in the order of its axes; None for what is no array."""
    term = program.terms[t]
    if isinstance(term, Rename):
        names = dict(term.pairs)
        own = order(program, term.arg)
        return None if own is None else tuple(names.get(i, i) for i in own)
    if isinstance(term, Input | Const):
        return tuple(i for axis in term.axes for i in axis)
    return None if is_leaf(term) else tuple(bits(program.free[t]))


def held(program: Program, step: int, members: Sequence[int]) -> list[int]:
    """The values that only tile kernels compute inside a fold, and XLA writes out."""

    def is_held(term: Term) -> bool:
        return isinstance(term, Dot) or (isinstance(term, Fold) and program.extent(term.over) >= habits.INNER_FOLD // 2)

    return [t for t in members if t != step and is_held(program.terms[t])] if isinstance(program.terms[step], Fold) else []


def size(program: Program, t: int, extents: Sequence[int]) -> int:
    """Bytes of a value."""
    return extent_of(extents, program.free[t]) * itemsize(program.terms[t].dtype)
