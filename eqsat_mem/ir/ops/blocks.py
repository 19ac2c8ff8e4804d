"""Operations that bind some axes of their operands and are pointwise in the others, one row each.

A *place* is an axis of an operand or of a result, ``("in", k, axis)`` or ``("out", k, axis)``. A *group* is the places
where one pointwise index stands: slice all of them alike, and the sliced operation gives the slice of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Place = tuple[str, int, int]
Group = tuple[Place, ...]
Shape = tuple[int, ...]
Shapes = Sequence[Shape]
Params = Mapping[str, Any]
Pointwise = Callable[[Shapes, Shapes, Params], list[Group]]
Resize = Callable[[Params, Shapes, Sequence[Group]], dict[str, Any]]
Text = Callable[[Params, Sequence[str], Shapes], str | None]


def unchanged(params: Params, ins: Shapes, groups: Sequence[Group]) -> dict[str, Any]:
    """Parameters that say nothing about extents."""
    return dict(params)


def nothing(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """All axes are bound."""
    return []


def no_text(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    """The primitive has no readable source."""
    return None


@dataclass(frozen=True)
class Selection:
    """How an operation that picks elements along an axis combines what it picks from chunks of it.

    ``axis(params, rank)`` is that axis of the first operand, ``least(params)`` the fewest elements of a chunk.
    ``text(params, rank, picked, more, start)`` is source of the results for all chunks so far: ``picked`` for those before, ``more`` for
    the chunk whose first element stands at ``start``. Results for no chunk have extent zero along the axes that the operation binds.
    Without a text, the operation's own computation combines results, and its last operands are those for no chunk.
    """

    axis: Callable[[Params, int], int]
    least: Callable[[Params], int]
    text: Callable[[Params, int, Sequence[str], Sequence[str], str], str] | None


@dataclass(frozen=True)
class BlockOp:
    """A primitive that binds some axes: its meaning; costs and habits of compilers are the backends'.

    Attributes:
        name: the primitive's name.
        pointwise: ``pointwise(in_shapes, out_shapes, params)`` lists its groups.
        resize: ``resize(params, in_shapes, groups)`` is the parameters of the same call where ``groups`` have the extents of
            ``in_shapes``.
        text: ``text(params, args, in_shapes)`` is source of its value (a tuple if it has several results), or None.
        helpers: functions that ``text``, ``written_out`` or the selection's text may call.
        moves: whether it only moves elements.
        selection: how it folds an axis, as monoids do.
        shared: lists the groups of bound axes that are one index, as ``pointwise`` does those of others.
        written_out: ``written_out(params, elements)`` is source of the result of an operation that binds one axis of its only
            operand, from the slices of the operand along it.
        monoid: the monoid by which it combines elements of its first operand with those that it writes there; the ``shared``
            axes, whose elements meet, are folded if that operand is a number that does not count, were it combined once more.
    """

    name: str
    pointwise: Pointwise = nothing
    resize: Resize = unchanged
    text: Text = no_text
    helpers: tuple[Callable[..., Any], ...] = ()
    moves: bool = False
    selection: Selection | None = None
    shared: Pointwise = nothing
    written_out: Callable[[Params, Sequence[str]], str] | None = None
    monoid: str | None = None


def all_but(bound: Sequence[int], rank: int, operands: Sequence[int] = (0,), results: Sequence[int] = (0,)) -> list[Group]:
    """A group for every axis but ``bound``, at the same position in operands and results."""
    free = [a for a in range(rank) if a not in set(bound)]
    return [tuple([("in", k, a) for k in operands] + [("out", k, a) for k in results]) for a in free]


def extents(groups: Sequence[Group], ins: Shapes, operand: int = 0) -> dict[int, int]:
    """The extents of the pointwise axes of one operand."""
    return {a: ins[k][a] for group in groups for side, k, a in group if side == "in" and k == operand}


def replaced(sizes: Sequence[int], new: Mapping[int, int]) -> tuple[int, ...]:
    """``sizes`` with some entries changed."""
    return tuple(new.get(a, n) for a, n in enumerate(sizes))
