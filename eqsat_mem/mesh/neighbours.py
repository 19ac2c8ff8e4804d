"""Pieces along an axis that is dealt out: each device reads its own share of what they are read from, and rows that its neighbours send.

What all pieces read of one value is received together, once: the rows from the first that any device needs before its share to the last
that any needs after it, in a ring. Where an operand is whole, nothing is received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from eqsat_mem.egraph.take_lowering import as_gather
from eqsat_mem.ir import Block, Iota, Take, Term
from eqsat_mem.ir.ops import Piece
from eqsat_mem.mesh.local import PLACES
from eqsat_mem.mesh.pieces import axis_of, is_pieces, pieces_of, read_along

if TYPE_CHECKING:
    from eqsat_mem.mesh.localise import Localiser


@dataclass(frozen=True)
class Reach:
    """The rows that devices read of a value for one piece, counted from where the share of each begins.

    The device ``p`` reads row ``first + drift * p + step * k`` for the element ``k`` of its share; ``start`` and ``stop`` are the least row
    that any device needs, and the one after the last.
    """

    first: int
    drift: int
    step: int
    start: int
    stop: int


def is_shared(term: Term, computed: int) -> bool:
    """Whether a term that is computed in some shares is put together of pieces along one of them."""
    return is_pieces(term) and bool(computed >> axis_of(term) & 1)


def operand_shares(at: Localiser, t: int, k: int, computed: int) -> int:
    """The indices of which a term that is computed in some shares takes shares of an operand."""
    term, free = at.old.terms[t], at.old.free
    assert isinstance(term, Block)
    c, j, i = term.args[k], axis_of(term), read_along(term, k)
    if not computed >> j & 1:
        return computed & free[c]
    others = computed & free[c] & ~(1 << j)
    is_there = i >= 0 and at.divided.get(i) == at.divided[j] and at.natural(c) >> i & 1
    return others | 1 << i if is_there else others


def with_neighbours(at: Localiser, t: int, shares: int) -> int:
    """The shares that a term is computed in: not along an axis of pieces for which devices would receive no less than all rows."""
    term = at.old.terms[t]
    if not is_shared(term, shares):
        return shares
    assert isinstance(term, Block)
    j = axis_of(term)
    count = at.local.devices.count(at.divided[j])
    for k, c in enumerate(term.args):
        i = read_along(term, k)
        if operand_shares(at, t, k, shares) >> i & 1 if i >= 0 else False:
            share = at.local.share_extent(i)
            reaches = [_reach(at, term, piece) for piece in pieces_of(term) if piece[0] == k]
            received = sum(stop - start - max(min(stop, share) - max(start, 0), 0) for start, stop in _stretches(reaches, share))
            if received * 2 > (count - 1) * share:
                return shares & ~(1 << j)
        elif i >= 0 and at.divided.get(i) not in (None, at.divided[j]) and at.natural(c) >> i & 1:
            return shares & ~(1 << j)
    return shares


def put_together(at: Localiser, t: int, computed: int) -> int:
    """A device's share of a value that is put together of pieces."""
    term, local, source = at.old.terms[t], at.local, at.old.source.get(t)
    assert isinstance(term, Block)
    j = axis_of(term)
    found = -1
    for piece in pieces_of(term):
        part = _part(at, t, term, piece, computed)
        if found < 0:
            found = part
        elif part != found:
            position = at.position(Iota(PLACES, j), 1 << j)
            is_later = local.map("ge", position, local.number(piece[1], PLACES), dtype=np.dtype(bool))
            found = local.map("select_n", is_later, found, part, dtype=term.dtype)
    if source is not None:
        local.program.source.setdefault(found, source)
    return found


def _part(at: Localiser, t: int, term: Block, piece: Piece, computed: int) -> int:
    """The elements that a device reads for a piece, one for each of its share."""
    k, _, _, _, step = piece
    i, j, local = read_along(term, k), axis_of(term), at.local
    own = operand_shares(at, t, k, computed)
    value = at.value(term.args[k], own)
    if i < 0:
        return value
    if not own >> i & 1:
        return _read_whole(at, value, i, j, piece)
    reach, share = _reach(at, term, piece), at.local.share_extent(i)
    is_row = not step and reach.stop - reach.start == 1
    every = [*_reaches(at, term.args[k], i), reach]
    start, stop = next((a, b) for a, b in _stretches(every, share) if a <= reach.start and reach.stop <= b)
    if (start, stop) == (0, share) and step:
        rows, index = value, local.share[i]
    elif (start, stop) == (0, share) and is_row:
        start = reach.start
        rows, index = local.with_neighbours(value, local.share[i], (start, reach.stop), at.divided[i], at.old.source.get(t))
    else:
        rows, index = local.with_neighbours(value, local.share[i], (start, stop), at.divided[i], at.old.source.get(t))
    if is_row:
        return local.row_of(rows, index, reach.start - start)
    first = local.number(reach.first - start, PLACES) if reach.first != start or not step else None
    if reach.drift:
        begin = local.map("mul", local.device_number(at.divided[i]), local.number(reach.drift, PLACES))
        first = begin if first is None else local.map("add", begin, first)
    return _rows(at, rows, index, j, first, step)


def _rows(at: Localiser, rows: int, index: int, j: int, first: int | None, step: int) -> int:
    """The rows of a value from one on, or from the first, one for each element of a share; or this one for all."""
    local = at.local
    if step == 0 and first is not None:
        return _gathered(at, rows, index, first)
    places = local.program.add(Iota(PLACES, local.share[j]))
    if step != 1:
        places = local.map("mul", places, local.number(step, PLACES))
    if first is not None:
        places = local.map("add", places, first)
    return local.sliced_at(rows, index, places, local.share[j], step)


def _read_whole(at: Localiser, value: int, i: int, j: int, piece: Piece) -> int:
    """The rows that a device reads of a value that all devices have whole; those outside stand for the nearest inside."""
    local, (_, _, _, offset, step) = at.local, piece
    form = local.form(i, 0)
    if len(form) > 1:
        whole = local.joined_index(i)
        layout = [k for k in local.layout(value) if k not in form]
        value = local.reshaped(value, (form, *((k,) for k in layout)), ((whole,), *((k,) for k in layout)))
        form = (whole,)
    if step == 0:
        return _gathered(at, value, form[0], local.number(offset, PLACES))
    place = at.position(Iota(PLACES, j), 1 << j)
    if step != 1:
        place = local.map("mul", place, local.number(step, PLACES))
    if offset:
        place = local.map("add", place, local.number(offset, PLACES))
    return _gathered(at, value, form[0], place)


def _gathered(at: Localiser, value: int, index: int, places: int) -> int:
    return at.local.taken(as_gather(at.local.program, Take(at.local.program.terms[value].dtype, index, places, value)))


# --- rows ---------------------------------------------------------------------------------------------------


def _reach(at: Localiser, term: Block, piece: Piece) -> Reach:
    """The rows that devices read for a piece, those of the nearest turn of the ring."""
    k, low, high, offset, step = piece
    i, j = read_along(term, k), axis_of(term)
    share, own = at.local.share_extent(i), at.local.share_extent(j)
    devices = range(low // own, (high - 1) // own + 1)
    drift = step * own - share
    around = share * at.local.devices.count(at.divided[i])
    begin = offset + drift * devices[0]
    begin -= around * round((begin + (step * (own - 1) + 1 - share) / 2) / around)
    first = begin - drift * devices[0]
    ends = [first + drift * p for p in (devices[0], devices[-1])]
    return Reach(first, drift, step, min(ends), max(ends) + step * (own - 1) + 1)


def _reaches(at: Localiser, c: int, i: int) -> list[Reach]:
    """The rows that devices read of a value for any pieces along an index."""
    old, found = at.old, list[Reach]()
    for t in old.readers(c):
        term = old.terms[t]
        if is_shared(term, at.computed(t)):
            assert isinstance(term, Block)
            read = {k for k, a in enumerate(term.args) if a == c and operand_shares(at, t, k, at.computed(t)) >> i & 1}
            found += [_reach(at, term, piece) for piece in pieces_of(term) if piece[0] in read and read_along(term, piece[0]) == i]
    return found


def _stretches(reaches: Sequence[Reach], share: int) -> list[tuple[int, int]]:
    """The rows that are received together: where what pieces read overlaps. What all lies in a device's share comes by itself."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted((reach.start, reach.stop) for reach in reaches):
        if start >= 0 and stop <= share:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return [(0, share), *found]
