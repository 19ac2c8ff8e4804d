"""Operations that bind some axes of their operands and are pointwise in the others, one row each.

A *place* is an axis of an operand or of a result, ``("in", k, axis)`` or ``("out", k, axis)``. A *group* is the set of places of one
pointwise index: if all of them are sliced alike, the operation on the slices gives the slice of the result.
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
Parts = Callable[[Shapes, Shapes, Params], list[tuple[int, Group]]]
Resize = Callable[[Params, Shapes, Sequence[Group]], dict[str, Any]]
Text = Callable[[Params, Sequence[str], Shapes], str | None]


def unchanged(params: Params, ins: Shapes, groups: Sequence[Group]) -> dict[str, Any]:
    """Return the parameters of a primitive whose parameters do not depend on extents."""
    return dict(params)


def nothing(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return no groups: all axes are bound."""
    return []


def no_parts(ins: Shapes, outs: Shapes, params: Params) -> list[tuple[int, Group]]:
    """Return no axes that have parts."""
    return []


def no_text(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    """Return None: the primitive has no readable source."""
    return None


@dataclass(frozen=True)
class Selection:
    """The combination of the elements that an operation selects along an axis from those that it selects from chunks of the axis.

    Attributes:
        axis: ``axis(params, rank)`` returns that axis of the first operand.
        least: ``least(params)`` returns the fewest elements that a chunk may have.
        text: ``text(params, rank, picked, more, start)`` returns source of the results for all chunks so far, from the results
            ``picked`` for the earlier chunks and ``more`` for the chunk whose first element is at position ``start``. The results
            for no chunk have extent zero along the axes that the operation binds. If None, the operation's own computation combines
            results, and its last operands are the results for no chunk.
        running: ``running(params)`` returns source of the same as a fold that takes in elements one by one, as
            :func:`eqsat_mem.ir.ops.top_k.running_top_k` does. None where the operation's own computation does that.
    """

    axis: Callable[[Params, int], int]
    least: Callable[[Params], int]
    text: Callable[[Params, int, Sequence[str], Sequence[str], str], str] | None
    running: Callable[[Params], str] | None = None


@dataclass(frozen=True)
class Window:
    """The windows of an operation along one axis of its first operand, one for each element of another axis.

    The window of element ``o`` begins at position ``step * o - before`` and has ``span`` positions, of the operand with ``gap - 1`` zeros
    between its elements; what lies outside of the operand is padding.

    Attributes:
        number: which of the operation's spatial axes it is.
        operand: that axis of the first operand.
        other: the place of the other axis: of the result, or of the second operand if the result has an element for each place in the
            windows, as the gradient of a convolution's kernel.
    """

    number: int
    operand: int
    other: Place
    step: int
    gap: int
    before: int
    span: int

    def reach(self, low: int, high: int) -> tuple[int, int]:
        """Return how far the windows of a stretch reach beyond the stretch of the dilated operand with the same positions.

        The other axis's stretch has ``low`` elements before a position that is a multiple of a tile and ``high`` after another.
        """
        return low * self.step + self.before, (high - 1) * self.step - self.before + self.span


@dataclass(frozen=True)
class Windowed:
    """The windows of an operation whose elements read no more than windows of its first operand.

    Attributes:
        along: returns them, with the arguments of ``pointwise``.
        padded: ``padded(params, number, low, high, extent)`` returns the parameters of the same call on ``extent`` elements of the operand
            along the spatial axis ``number`` with other padding.
        monoid: the monoid whose identity is the padding; the second operand is where it is None.
        aligned: whether the second operand is read at the same places as the result has, which are those of whole groups of ``gap``.
        cuts: whether padding may be negative, so that it cuts elements away.
    """

    along: Callable[[Shapes, Shapes, Params], list[Window]]
    padded: Callable[[Params, int, int, int, int], dict[str, Any]]
    monoid: str | None
    aligned: bool = False
    cuts: bool = False


@dataclass(frozen=True)
class BlockOp:
    """The meaning of a primitive that binds some axes; backends have its costs and the compilers' behaviour.

    Attributes:
        name: the primitive's name.
        pointwise: ``pointwise(in_shapes, out_shapes, params)`` returns the groups of its pointwise axes.
        resize: ``resize(params, in_shapes, groups)`` returns the parameters of the same call when ``groups`` have the extents in
            ``in_shapes``.
        text: ``text(params, args, in_shapes)`` returns source of its value (a tuple if it has several results), or None.
        helpers: the functions that ``text``, ``written_out`` or the selection's text may call.
        moves: whether it only moves elements.
        selection: how chunks of an axis combine, if the operation folds one by selecting elements.
        shared: returns the groups of bound axes that are one index, with the arguments of ``pointwise``.
        parts: ``parts(in_shapes, out_shapes, params)`` returns numbers of equal parts, which are pointwise indices, with the places of the
            axes that have them, one part after the other: features of a convolution in groups. Groups mean the axis of a part there.
        written_out: ``written_out(params, elements)`` returns source of the unrolled result of an operation that binds one axis of
            its only operand, from the slices of the operand along that axis.
        monoid: the monoid by which it combines elements along the ``shared`` axes, which it folds.
        writes_into: whether it combines them with elements of its first operand, too, where it writes them. The shared axes are then folded
            if that operand is a number that changes nothing when it is combined once more.
        linear: the operands in which it is linear, in all of them together; None if it is not. The others are places, or masks.
        windows: the windows that its elements read of the first operand, if they read no more of it.
    """

    name: str
    pointwise: Pointwise = nothing
    resize: Resize = unchanged
    text: Text = no_text
    helpers: tuple[Callable[..., Any], ...] = ()
    moves: bool = False
    selection: Selection | None = None
    shared: Pointwise = nothing
    parts: Parts = no_parts
    written_out: Callable[[Params, Sequence[str]], str] | None = None
    monoid: str | None = None
    writes_into: bool = False
    linear: slice | None = None
    windows: Windowed | None = None


def all_but(bound: Sequence[int], rank: int, operands: Sequence[int] = (0,), results: Sequence[int] = (0,)) -> list[Group]:
    """Return a group for every axis except ``bound``, at the same position in all operands and results.

    Args:
        bound: the axes that are not pointwise.
        rank: the number of axes.
        operands: the operands that have these axes.
        results: the results that have these axes.
    """
    free = [a for a in range(rank) if a not in set(bound)]
    return [tuple([("in", k, a) for k in operands] + [("out", k, a) for k in results]) for a in free]


def parts_at(row: BlockOp, ins: Shapes, outs: Shapes, params: Params) -> dict[Place, int]:
    """Return how many parts axes have, by place."""
    return {place: count for count, group in row.parts(ins, outs, params) for place in group}


def extents(groups: Sequence[Group], ins: Shapes, operand: int = 0) -> dict[int, int]:
    """Return the extents of the pointwise axes of one operand, by axis."""
    return {a: ins[k][a] for group in groups for side, k, a in group if side == "in" and k == operand}


def replaced(sizes: Sequence[int], new: Mapping[int, int]) -> tuple[int, ...]:
    """Return ``sizes`` with the entries at the positions in ``new`` replaced."""
    return tuple(new.get(a, n) for a, n in enumerate(sizes))
