"""Slices and paddings along several axes as pieces along one axis after the other, those that are dealt out first.

A slice of a padded array is pieces of the array itself along every axis: nothing has the extents of the padded one, which devices do not
divide. Each axis that is dealt out is one exchange with neighbours; rows of corners come in two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from eqsat_mem.ir import Axes, Block, Program
from eqsat_mem.mesh.cuts import Cut, cuts, index_of, written_operand

if TYPE_CHECKING:
    from eqsat_mem.mesh.pieces import Pieces


def padded_along_several(new: Program, term: Block) -> list[Cut]:
    """The axes along which an operation pads, if these are several."""
    every = cuts(new, term) if term.call.prim.name == "pad" else []
    is_all = [any(config) for config in term.call.params.get("padding_config", ())].count(True) == len(every)
    return every if len(every) > 1 and is_all else []


def of_padded(new: Program, term: Block, padding: Block, every: Sequence[Cut]) -> list[Cut]:
    """The cuts of an array, and of what pads it, that a slice of the padded array is; none where an axis is cut otherwise."""
    inside, outside = {cut.axis: cut for cut in cuts(new, padding)}, {cut.axis: cut for cut in every}
    before, after = term.call.in_axes[0], term.call.out_axes[0]
    if any(b != c and a not in outside for a, (b, c) in enumerate(zip(before, after, strict=True))):
        return []
    found = []
    for a in sorted({*inside, *outside}):
        if a not in inside:
            found.append(replace(outside[a], along=(outside[a].along[0], -1)))
        elif a not in outside:
            found.append(inside[a])
        else:
            found.append(replace(outside[a], along=inside[a].along, reads=tuple(_through(outside[a], inside[a]))))
    return found


def _through(outside: Cut, inside: Cut) -> Iterator[tuple[int, int, int, int, int]]:
    """The reads of the operands of a padding, along an axis, by a slice of what it makes."""
    for low, high, _, offset, step in outside.reads:
        for first, last, k, moved, steps in inside.reads:
            if step == 0:
                begin, end = (low, high) if first <= offset < last else (low, low)
            else:
                begin, end = max(low, -(-(first - offset) // step)), min(high, -(-(last - offset) // step))
            if begin < end:
                yield begin, end, k, steps * offset + moved if inside.along[k] >= 0 else 0, steps * step if inside.along[k] >= 0 else 0


def one_after_the_other(writer: Pieces, new: Program, term: Block, every: Sequence[Cut], args: tuple[int, ...], layout: Axes) -> int | None:
    """The pieces of an array with these axes along each axis of several cuts; None where fewer than one is dealt out.

    Args:
        writer: writes the program anew.
        new: the program as far as it is written.
        term: the operation.
        every: its cuts, all of the first of ``args``, and of others that have none of its axes.
        args: the array, and what stands outside of it.
        layout: the axes of the array.
    """
    ordered = sorted(every, key=lambda cut: not writer.is_dealt_out(cut, writer.reads(new, cut, args)))
    value, *rest = args
    for cut in ordered:
        axis = (cut.index,) if cut.index >= 0 else ()
        layout = (*layout[: cut.axis], axis, *layout[cut.axis + 1 :])
        if index_of(layout[cut.axis]) != cut.index:
            return None
        found = writer.value(new, term, cut, (value, *rest), layout)
        if found is None:
            return None
        value = found
    return value


def along_the_other(writer: Pieces, new: Program, term: Block, axis: int, operands: tuple[int, int], layout: Axes) -> int | None:
    """An update along one more axis as pieces of what is there and of what is written, which are as long along all others; None where that
    axis is not dealt out, or cut otherwise.

    Args:
        writer: writes the program anew.
        new: the program as far as it is written.
        term: the operation.
        axis: the axis.
        operands: what is there, and what is written.
        layout: the axes of the result.
    """
    cut = next((cut for cut in cuts(new, term) if cut.axis == axis), None)
    if cut is None or cut.index < 0:
        return None
    own = cut.index if new.free[operands[0]] >> cut.index & 1 else -1
    written = written_operand(term)
    reads = tuple(
        (low, high, 1, offset, step) if k == written else (low, high, 0, 0, int(own >= 0)) for low, high, k, offset, step in cut.reads
    )
    found = replace(cut, along=(own, cut.along[written]), reads=reads)
    is_dealt_out = writer.is_dealt_out(found, writer.reads(new, found, operands))
    return writer.value(new, term, found, operands, layout) if is_dealt_out else None
