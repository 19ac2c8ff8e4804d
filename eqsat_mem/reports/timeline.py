"""Memory over the points of a program: what is held while each of its steps runs, loop bodies once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from eqsat_mem.ir.loop_tree import Loop, Seq
from eqsat_mem.reports.outline import describe
from eqsat_mem.schedule.memory import Extents, Memory, within
from eqsat_mem.schedule.search import Schedule


@dataclass(frozen=True)
class Point:
    """A step of a program, and what is held while it runs.

    Attributes:
        what: the value that the step makes, by its operation and indices; or what happens.
        place: the user's file, line and function, or empty.
        nbytes: bytes held, arguments and outputs included.
        held: the values among these besides arguments, with their bytes.
        terms: the values that the step makes.
        loops: the indices of the loops around it, outermost first; a loop's body appears once.
    """

    what: str
    place: str
    nbytes: int
    held: tuple[tuple[int, int], ...] = ()
    terms: tuple[int, ...] = ()
    loops: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Outside:
    """What is held around a region, and the loops around it."""

    nbytes: int
    held: dict[int, int] = field(default_factory=dict)
    loops: tuple[str, ...] = ()


def timeline(s: Schedule) -> list[Point]:
    """The points of a schedule in the order of the program; the largest is its predicted peak.

    A loop's results are there, whole, from its first step on. What a program holds as written inside the body of a ``scan`` that is planned
    is not known step by step, and stands at the largest point.
    """
    memory = Memory(s.ex, s.backend)
    extents = memory.full_extents()
    fixed = memory.total(s.seq, s.chunks) - memory.peak(s.seq, extents, s.chunks).nbytes
    points = [Point("arguments", "", fixed), *_points(s, memory, s.seq, extents, _Outside(fixed))]
    highest = max(range(len(points)), key=lambda k: points[k].nbytes)
    points[highest] = replace(points[highest], nbytes=s.peak_bytes)
    return points


def _points(s: Schedule, memory: Memory, seq: Seq, extents: Extents, outside: _Outside) -> Iterator[Point]:
    """The points of a region."""
    program, region = memory.ex.program, memory.footprint(seq, extents)
    for position, (step, around) in enumerate(zip(region.kept, region.around, strict=True)):
        now = replace(outside, nbytes=outside.nbytes + around, held={**outside.held, **dict(region.live(position))})
        if isinstance(step, Loop):
            name = program.indices[step.index].name
            now = replace(now, nbytes=now.nbytes + memory.beside(step, extents, s.chunks), loops=(*now.loops, name))
            yield from _points(s, memory, step.body, within(extents, step, s.chunks), now)
        elif isinstance(step, Seq):
            yield from _points(s, memory, step, extents, now)
        else:
            source = program.source.get(step)
            place = "" if source is None else str(source)
            yield Point(describe(program, step), place, now.nbytes, tuple(now.held.items()), (step,), now.loops)
