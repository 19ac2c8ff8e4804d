"""The scale of pictures of memory: where it ends, its round ticks, and whether the limit is on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from eqsat_mem.reports.timeline import Point

FAR = 3.0
"""The largest multiple of the highest peak at which a limit is drawn: with a larger one, memory would look flat."""


@dataclass(frozen=True)
class Scale:
    """A scale for several timelines and a limit.

    Attributes:
        top: the bytes at its upper end.
        ticks: round sizes from zero on, in bytes.
        limit_is_near: whether the limit is on it.
    """

    top: float
    ticks: tuple[int, ...]
    limit_is_near: bool


def scale_of(peaks: Sequence[int], limit_bytes: int) -> Scale:
    """The scale for timelines with these peaks. Ticks are multiples of a power of two, three to six of them besides zero.

    >>> scale_of([100 * 2**20], 64 * 2**20).ticks[1] / 2**20
    32.0
    """
    highest = max(*peaks, 1)
    near = limit_bytes <= FAR * highest
    top = 1.12 * max(highest, limit_bytes if near else 0)
    step = 1
    while top / step > 6:
        step *= 2
    return Scale(top, tuple(range(0, int(top) + 1, step)), near)


def loop_spans(points: Sequence[Point]) -> Iterator[tuple[int, int, int, str]]:
    """Yield the loops of a timeline: depth, first point, point after the last, and the axis that it runs over.

    Adjacent loops over the same axes count as one.
    """
    deepest = max((len(point.loops) for point in points), default=0)
    for depth in range(deepest):
        for loops, group in groupby(enumerate(points), key=lambda pair: pair[1].loops[: depth + 1]):
            if len(loops) == depth + 1:
                at = [k for k, _ in group]
                yield depth, at[0], at[-1] + 1, loops[depth]


def label_rows(points: Sequence[Point], letters: int) -> Iterator[tuple[int, int, int, float, str]]:
    """Yield the loops below a timeline: row, first point, point after the last, and the label with the share of the width at its left end.

    A loop goes into the first row in which neither its line nor its label meets another.

    Args:
        points: the points of the timeline.
        letters: the letters of a label that fit into the width of the timeline.
    """
    taken: list[list[tuple[float, float]]] = []
    for _, start, end, loop in loop_spans(points):
        text = f"over {loop}"
        wide = min((len(text) + 1) / letters, 1.0)
        left = start / len(points)
        if left + wide > 1:
            left = max(end / len(points) - wide, 0)
        place = min(left, start / len(points)), max(left + wide, end / len(points))
        row = next((k for k, others in enumerate(taken) if all(place[1] <= a or place[0] >= b for a, b in others)), len(taken))
        if row == len(taken):
            taken.append([])
        taken[row].append(place)
        yield row, start, end, left, text
