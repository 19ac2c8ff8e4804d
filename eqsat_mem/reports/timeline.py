"""Memory over the steps of a program: the values held while each step runs, with loop bodies once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from eqsat_mem.ir.loop_tree import Loop, Seq
from eqsat_mem.reports.words import axis_names, describe, loop_name
from eqsat_mem.schedule.footprint import Live
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.sizes import Extents, extents_inside


@dataclass(frozen=True)
class Point:
    """A step of a program, and the memory held while it runs.

    Attributes:
        what: a description of the step: the operation and indices of the value that it computes, or another event.
        place: the user's file, line and function, or empty.
        nbytes: the bytes held, including arguments and outputs.
        held: the values held other than arguments, in a loop with the extents of a chunk.
        terms: the terms that the step computes.
        loops: the axes that the enclosing loops run over, outermost first.
        state: the results of these loops, to which turns add, or of which they write slices.
    """

    what: str
    place: str
    nbytes: int
    held: tuple[Live, ...] = ()
    terms: tuple[int, ...] = ()
    loops: tuple[str, ...] = ()
    state: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Outside:
    """The memory held around a region, the loops around it, and their results."""

    nbytes: int
    held: dict[int, Live] = field(default_factory=dict)
    loops: tuple[str, ...] = ()
    state: frozenset[int] = frozenset()


def timeline(s: Schedule) -> list[Point]:
    """Return the points of a schedule in program order; the largest has its predicted peak.

    The results of a loop are held whole from its first step on. The memory that a planned body of a ``scan`` holds as written is not
    known step by step, so it is added to the largest point only.
    """
    memory = Memory(s.ex, s.backend)
    extents = memory.full_extents()
    fixed = memory.total(s.seq, s.chunks) - memory.peak(s.seq, extents, s.chunks).nbytes
    points = [Point("arguments", "", fixed), *_points(s, memory, s.seq, extents, _Outside(fixed))]
    highest = max(range(len(points)), key=lambda k: points[k].nbytes)
    points[highest] = replace(points[highest], nbytes=s.peak_bytes)
    return points


def _points(s: Schedule, memory: Memory, seq: Seq, extents: Extents, outside: _Outside) -> Iterator[Point]:
    """Yield the points of a region."""
    program, region = memory.ex.program, memory.footprint(seq, extents)
    for position, (step, around) in enumerate(zip(region.kept, region.around, strict=True)):
        later = memory.unwritten(region, position, extents, s.chunks)
        here = {t: Live(t, nbytes, extents) for t, nbytes in (*region.live(position), *later)}
        if not isinstance(step, int):
            around += sum(nbytes for _, nbytes in later)
        now = replace(outside, nbytes=outside.nbytes + around, held={**outside.held, **here})
        if isinstance(step, Loop):
            now = replace(
                now,
                loops=(*now.loops, loop_name(program, axis_names(program), s.seq, step)),
                state=now.state.union(step.folds, step.stacks),
            )
            yield from _points(s, memory, step.body, extents_inside(extents, step, s.chunks), now)
        elif isinstance(step, Seq):
            yield from _points(s, memory, step, extents, now)
        else:
            source = program.source.get(step)
            place = "" if source is None else str(source)
            yield Point(describe(program, step, extents), place, now.nbytes, tuple(now.held.values()), (step,), now.loops, now.state)
