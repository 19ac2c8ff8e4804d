"""Values of known sizes and lifetimes in one block of memory, as XLA's heap places them: the largest first, each in the smallest gap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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


def places_of(lives: Iterable[tuple[int, int, int, float]], joined: Mapping[int, int]) -> list[Placed]:
    """Values with their bytes and lifetimes; those ``joined`` to another, which dies with them, lie in its place."""
    places: dict[int, Placed] = {}
    for t, nbytes, first, last in lives:
        own = joined.get(t, t)
        if own in places and own != t:
            places[t] = places.pop(own)._replace(last=last)
        else:
            places[t] = Placed(nbytes, first, last)
    return [*places.values()]


def with_gaps(around: Sequence[int], values: Iterable[Placed], scratch: Iterable[Placed]) -> list[int]:
    """Bytes at each moment, of which the most are those of a block of memory with its gaps."""
    highest, packed = max(around, default=0), packed_bytes((*values, *scratch))
    return [max(nbytes, packed) if nbytes == highest else nbytes for nbytes in around]


def with_outputs(steps: Sequence[object], around: Sequence[int], values: Iterable[Placed], scratch: Iterable[Placed]) -> list[int]:
    """Bytes at each moment, with those of outputs that are still to be written where the step is a kernel, a number."""
    ahead = ahead_of_outputs(values, scratch, len(around))
    return [nbytes + more if isinstance(step, int) else nbytes for nbytes, more, step in zip(around, ahead, steps, strict=True)]


def ahead_of_outputs(values: Iterable[Placed], scratch: Iterable[Placed], moments: int) -> list[int]:
    """The bytes of outputs (values without end) at each moment before they are written, less those of values that lie in their memory.

    Each has room for one value at a time, none that is larger, and the largest choose first.

    >>> ahead_of_outputs([Placed(4, 2, math.inf), Placed(2, 2, math.inf), Placed(3, 0, 0)], [Placed(8, 1, 1)], 3)
    [3, 6, 0]
    """
    values = list(values)
    outputs = [v for v in values if v.last == math.inf]
    others = [*(v for v in values if v.last < math.inf), *scratch]
    held = [sum(out.nbytes for out in outputs if out.first > moment) for moment in range(moments)]
    inside: dict[Placed, list[Placed]] = {out: [] for out in sorted(outputs)}
    for value in sorted((v for v in others if v.nbytes), key=lambda v: -v.nbytes):
        for out, there in inside.items():
            overlap = any(v.first <= value.last and value.first <= v.last for v in there)
            if value.nbytes <= out.nbytes and value.last < out.first and not overlap:
                there.append(value)
                for moment in range(int(value.first), int(value.last) + 1):
                    held[moment] -= value.nbytes
                break
    return held


def _place(taken: list[tuple[int, int]], nbytes: int) -> int:
    """The beginning of the smallest gap between places taken that has room for so many bytes, else the end of the last."""
    end, best, least = 0, -1, 0
    for begin, after in taken:
        gap = begin - end
        if gap >= nbytes and (best < 0 or gap < least):
            best, least = end, gap
        end = max(end, after)
    return end if best < 0 else best
