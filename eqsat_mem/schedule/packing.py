"""Values of known sizes and lifetimes in one block of memory, as XLA's heap places them: the largest first, each in the smallest gap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Placed(NamedTuple):
    """A value: its bytes, and the first and last moment at which it is there."""

    nbytes: int
    first: float
    last: float


def packed_bytes(values: Iterable[Placed]) -> int:
    """The bytes of a block in which all values lie, none over another that is there at the same time.

    It may be more than are there at any moment. Of values of one size, what is there for longer is placed first.

    >>> packed_bytes([Placed(4, 0, 0), Placed(2, 0, 1), Placed(2, 1, 2), Placed(4, 2, 2)])
    8
    """
    there: list[tuple[int, Placed]] = []
    top = 0
    for value in sorted((v for v in values if v.nbytes), key=lambda v: (-v.nbytes, v.first - v.last)):
        taken = sorted((at, at + v.nbytes) for at, v in there if v.first <= value.last and value.first <= v.last)
        at = _place(taken, value.nbytes)
        there.append((at, value))
        top = max(top, at + value.nbytes)
    return top


def _place(taken: list[tuple[int, int]], nbytes: int) -> int:
    """The beginning of the smallest gap between places taken that has room for so many bytes, else the end of the last."""
    end, best, least = 0, -1, 0
    for begin, after in taken:
        gap = begin - end
        if gap >= nbytes and (best < 0 or gap < least):
            best, least = end, gap
        end = max(end, after)
    return end if best < 0 else best


def packed(lives: Iterable[tuple[int, int, int, float]], joined: Mapping[int, int], scratch: Iterable[Placed]) -> int:
    """Bytes of a block in which values lie with the scratch of kernels; those ``joined`` to another, which dies with them, in its place."""
    places: dict[int, Placed] = {}
    for t, nbytes, first, last in lives:
        own = joined.get(t, t)
        if own in places and own != t:
            places[t] = places.pop(own)._replace(last=last)
        else:
            places[t] = Placed(nbytes, first, last)
    return packed_bytes((*places.values(), *scratch))
