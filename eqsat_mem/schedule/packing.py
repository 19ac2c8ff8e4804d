"""Values of known sizes and lifetimes in one block of memory, as XLA's heap places them: the largest first, each in the smallest gap."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

SMALL = 1 / 64
"""The share of the largest scratch up to which values are taken to lie in gaps between others: guessed."""


class Placed(NamedTuple):
    """A value: its bytes, and the first and last moment at which it is there."""

    nbytes: int
    first: float
    last: float


def _meet(one: Placed, other: Placed) -> bool:
    """Whether two values are there at the same time."""
    return one.first <= other.last and other.first <= one.last


def packed_bytes(values: Iterable[Placed]) -> int:
    """The bytes of a block in which all values lie, none over another that is there at the same time.

    It may be more than are there at any moment. Of values of one size, what is there for longer is placed first.

    >>> packed_bytes([Placed(4, 0, 0), Placed(2, 0, 1), Placed(2, 1, 2), Placed(4, 2, 2)])
    8
    """
    there: list[tuple[int, Placed]] = []
    top = 0
    for value in sorted((v for v in values if v.nbytes), key=lambda v: (-v.nbytes, v.first - v.last)):
        taken = sorted((at, at + v.nbytes) for at, v in there if _meet(v, value))
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


def at_once(scratch: Iterable[Iterable[int]]) -> list[Placed]:
    """Values that are there at one moment alone, given their sizes in bytes for each moment."""
    return [Placed(max(nbytes, 0), moment, moment) for moment, sizes in enumerate(scratch) for nbytes in sizes]


def with_gaps(around: Sequence[int], values: Iterable[Placed], scratch: Iterable[Placed]) -> list[int]:
    """Bytes at each moment, of which the most are those of a block of memory with its gaps."""
    highest, packed = max(around, default=0), packed_bytes((*values, *scratch))
    return [max(nbytes, packed) if nbytes == highest else nbytes for nbytes in around]


def free_outputs(values: Iterable[Placed], scratch: Iterable[Placed], moments: int) -> list[Counter[int]]:
    """The outputs (values without end) that are to be written after each moment, but for those in which a value lies: sizes, and how many.

    All outputs have their memory from the beginning. Each has room for one value at a time, none that is larger.

    >>> free_outputs([Placed(4, 2, math.inf), Placed(2, 2, math.inf), Placed(3, 0, 0)], [Placed(8, 1, 1)], 3)
    [Counter({2: 1}), Counter({4: 1, 2: 1}), Counter()]
    """
    values = [v for v in values if v.nbytes]
    outputs = [v for v in values if v.last == math.inf and v.first]
    if not outputs:
        return [Counter()] * moments
    written, begun, ended = ([list[int]() for _ in range(moments + 1)] for _ in range(3))
    for out in outputs:
        written[int(out.first)].append(out.nbytes)
    largest = max(out.nbytes for out in outputs)
    for value in (*values, *scratch):
        if value.last < math.inf and 0 < value.nbytes <= largest:
            begun[int(value.first)].append(value.nbytes)
            ended[int(value.last) + 1].append(value.nbytes)
    room, there = Counter(out.nbytes for out in outputs), Counter[int]()
    free = []
    for moment in range(moments):
        room.subtract(written[moment])
        there.update(begun[moment])
        there.subtract(ended[moment])
        free.append(_without(room, there)[0])
    return free


def added_by_scratch(values: Iterable[Placed], scratch: Iterable[Placed]) -> int:
    """The bytes by which scratch lengthens a block of memory, in which all values lie that find no room in outputs (values without end).

    Where two values follow one another, and each needs scratch by itself, neither takes its place once that is free:

    >>> added_by_scratch([Placed(4, 0, 1), Placed(4, 1, 2)], [Placed(5, 0, 0), Placed(5, 2, 2)])
    5
    """
    scratch = [v for v in scratch if v.nbytes > 0]
    largest = max((v.nbytes for v in scratch), default=0)
    large = [v for v in values if v.nbytes > SMALL * largest]
    return packed_beside_outputs([*large, *scratch]) - packed_beside_outputs(large) if scratch else 0


def packed_beside_outputs(values: Sequence[Placed]) -> int:
    """The bytes of a block in which all values lie that find no room in outputs (values without end) before these are written."""
    rooms = [[out] for out in sorted((v for v in values if v.last == math.inf), key=lambda v: v.nbytes)]
    apart: list[Placed] = []
    for value in sorted((v for v in values if v.last < math.inf), key=lambda v: (-v.nbytes, v.first - v.last)):
        suited = (there for there in rooms if value.nbytes <= there[0].nbytes and not any(_meet(value, other) for other in there))
        room = next(suited, None)
        (apart if room is None else room).append(value)
    return packed_bytes(apart)


def bytes_of(sizes: Mapping[int, int]) -> int:
    """The bytes of values of these sizes, of which there are so many."""
    return sum(nbytes * count for nbytes, count in sizes.items())


def bytes_within(room: Mapping[int, int], values: Mapping[int, int]) -> int:
    """The most bytes of values that lie in room: each in one that is no smaller, and no two in the same.

    >>> bytes_within({4: 1, 2: 2}, {8: 1, 3: 2, 1: 1})
    4
    """
    return _without(room, values)[1]


def _without(room: Mapping[int, int], values: Mapping[int, int]) -> tuple[Counter[int], int]:
    """The room that is left where the largest values choose first, the smallest that they find, and the bytes in what they have."""
    rooms = sorted(((nbytes, count) for nbytes, count in room.items() if count), reverse=True)
    suited: list[tuple[int, int]] = []
    smaller, lying = 0, 0
    for nbytes, count in sorted(values.items(), reverse=True):
        while smaller < len(rooms) and rooms[smaller][0] >= nbytes:
            suited.append(rooms[smaller])
            smaller += 1
        while count and suited:
            size, there = suited.pop()
            used = min(there, count)
            if used < there:
                suited.append((size, there - used))
            lying += used * nbytes
            count -= used
    return Counter(dict((*suited, *rooms[smaller:]))), lying


def _place(taken: list[tuple[int, int]], nbytes: int) -> int:
    """The beginning of the smallest gap between places taken that has room for so many bytes, else the end of the last."""
    end, best, least = 0, -1, 0
    for begin, after in taken:
        gap = begin - end
        if gap >= nbytes and (best < 0 or gap < least):
            best, least = end, gap
        end = max(end, after)
    return end if best < 0 else best
