"""Memory over the points of a program: what is held while each of its steps runs, loop bodies once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from eqsat_mem.costs import Device
from eqsat_mem.memory import Memory
from eqsat_mem.outline import describe
from eqsat_mem.schedule import Schedule
from eqsat_mem.tree import Loop, Seq


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


def timeline(s: Schedule, device: Device) -> list[Point]:
    """The points of a schedule in the order of the program; the largest is its predicted peak.

    A loop's results are there, whole, from its first step on. What a program holds as written inside the body of a ``scan`` that is planned
    is not known step by step, and stands at the largest point.
    """
    memory = _Noting(s.ex, device.library_folds)
    extents = memory.full_extents()
    fixed = memory.total(s.seq, s.chunks) - memory.peak(s.seq, extents, s.chunks).nbytes
    points = [Point("arguments", "", fixed), *_points(memory, s.seq, fixed, {}, ())]
    highest = max(range(len(points)), key=lambda k: points[k].nbytes)
    points[highest] = replace(points[highest], nbytes=s.peak_bytes)
    return points


@dataclass(eq=False)
class _Noting(Memory):
    """Peaks, with what was held at each step on the way. Every region of a tree is walked once."""

    notes: dict[Seq, list[tuple[int | Loop | Seq, int, dict[int, int]]]] = field(default_factory=dict)

    def _note(self, seq: Seq, step: int | Loop | Seq, nbytes: int, held: dict[int, int]) -> None:
        self.notes.setdefault(seq, []).append((step, nbytes, held))


def _points(memory: _Noting, seq: Seq, around: int, held: dict[int, int], loops: tuple[str, ...]) -> Iterator[Point]:
    """The points of a region, ``around`` which so many bytes are held, those of the values ``held`` among them."""
    program = memory.ex.program
    for step, nbytes, own in memory.notes.get(seq, ()):
        now = {**held, **own}
        if isinstance(step, Loop):
            name = program.indices[step.index].name
            yield from _points(memory, step.body, around + nbytes, now, (*loops, name))
        elif isinstance(step, Seq):
            yield from _points(memory, step, around + nbytes, now, loops)
        else:
            source = program.source.get(step)
            place = "" if source is None else str(source)
            yield Point(describe(program, step), place, around + nbytes, tuple(now.items()), (step,), loops)
