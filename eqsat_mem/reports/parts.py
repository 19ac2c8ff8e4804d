"""The parts of the memory that is held at a point of a program: tensors and scratch, each with its role. They add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from eqsat_mem.ir import Program
from eqsat_mem.ir.ops.control import LOOPS
from eqsat_mem.ir.source import Source
from eqsat_mem.reports.timeline import Point
from eqsat_mem.reports.words import array_type, bodies_of, describe, of_a_step, operation
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.sizes import Extents

ROLES = {
    "arguments": ("#8793a6", "#8b97aa"),
    "outputs": ("#2f9e8f", "#35a899"),
    "gradients": ("#b565a7", "#c47ab8"),
    "loop state": ("#e0962e", "#dd9a3c"),
    "temporaries": ("#3d78c9", "#5b93dd"),
    "scratch": ("#a8865c", "#9a7b55"),
}
"""The roles, in the order in which they are stacked from below, with their colours on a light and on a dark ground."""


@dataclass(frozen=True)
class HeldPart:
    """A part of what is held at a point.

    Attributes:
        what: the tensor by its shape, dtype and operation, or another description.
        nbytes: the bytes held: in a loop, of a chunk.
        role: one of ``ROLES``. Gradients are what a backward pass computes, and arguments whose name says so.
        source: the user's line that makes it, if known.
        term: the term of the program whose value it is, if it is one.
    """

    what: str
    nbytes: int
    role: str
    source: Source | None = None
    term: int | None = None


def parts_of(s: Schedule, points: Sequence[Point], as_written: bool = False) -> list[list[HeldPart]]:
    """The parts of each point of a schedule's timeline, the largest first but scratch last; those of a point add up to its bytes.

    Of a program ``as_written`` it is not known which values the bodies of its loops and branches hold.
    """
    program = s.ex.program
    fixed, arguments = min(point.nbytes for point in points), list(_arguments(program))
    beside = fixed - sum(part.nbytes for part in arguments)
    if beside > 0:
        arguments.append(HeldPart("copies of arguments and outputs", beside, "scratch"))
    outputs = {program.source_of(output.term) for output in program.outputs}

    @cache
    def words(t: int, extents: Extents) -> str:  # values wait for many points
        return describe(program, t, extents)

    values = (_values(s, point, point.nbytes - fixed, outputs, as_written, words) for point in points)
    return [sorted([*arguments, *found], key=_place_in_list) for found in values]


def _place_in_list(part: HeldPart) -> tuple[bool, int]:
    return part.role == "scratch", -part.nbytes


def by_role(parts: Sequence[HeldPart]) -> dict[str, int]:
    """The bytes of each role, in the order of ``ROLES``."""
    return {role: sum(part.nbytes for part in parts if part.role == role) for role in ROLES}


def _arguments(program: Program) -> Iterator[HeldPart]:
    for buffer, nbytes in zip(program.inputs, program.input_bytes(), strict=True):
        role = "gradients" if "grad" in buffer.name.lower() else "arguments"
        yield HeldPart(f"{array_type(buffer.shape, buffer.dtype)} argument {buffer.name}", int(nbytes), role)


def _values(
    s: Schedule, point: Point, nbytes: int, outputs: set[int], as_written: bool, words: Callable[[int, Extents], str]
) -> Iterator[HeldPart]:
    """The parts of a point besides arguments, which add up to ``nbytes``; ``words`` are those for a value at extents."""
    program = s.ex.program
    over = sum(live.nbytes for live in point.held) - nbytes
    for t, size, extents in sorted(point.held, key=lambda live: live.term in point.terms):
        if t in point.terms and over > 0:  # it is written where an operand stood
            size = max(size - over, 0)
        size = min(size, nbytes)
        nbytes -= size
        if size:
            yield HeldPart(words(t, extents), size, _role(program, t, point, outputs), program.source.get(t), t)
    for t in point.terms:
        if as_written and bodies_of(program, t) and nbytes > 0:
            yield HeldPart(f"in {operation(program, t)}, as written", nbytes, "temporaries", program.source.get(t))
            return
        for part in _inside(program, t, point, nbytes):
            nbytes -= part.nbytes
            yield part
        if nbytes > 0 and operation(program, t) in LOOPS and not bodies_of(program, t):
            yield HeldPart(f"in {operation(program, t)}: {of_a_step(operation(program, t))}", nbytes, "temporaries", program.source.get(t))
            return
    if nbytes > 0:
        yield HeldPart("scratch of operations", nbytes, "scratch")


def _role(program: Program, t: int, point: Point, outputs: set[int]) -> str:
    if t in outputs:
        return "outputs"
    if t in point.state or (t in point.terms and bodies_of(program, t)):
        return "loop state"
    source = program.source.get(t)
    return "gradients" if source is not None and source.backward else "temporaries"


def _inside(program: Program, t: int, point: Point, most: int) -> Iterator[HeldPart]:
    """The values that the body of a loop or branch of the user's holds at its own peak, as far as they are within ``most`` bytes."""
    bodies = bodies_of(program, t)
    if not bodies:
        return
    body = max(bodies, key=lambda body: int(body.peak_bytes))
    memory, inner = Memory(body.ex, body.backend), body.ex.program
    live, running = memory.at_peak(body.seq, memory.full_extents(), body.chunks)
    values = [
        HeldPart(describe(inner, u, extents), size, _role(inner, u, point, set()), inner.source.get(u)) for u, size, extents in live if size
    ]
    if running is not None:
        values += _inside(inner, running, point, most)
    for part in values:
        if 0 < part.nbytes <= most:
            most -= part.nbytes
            yield replace(part, what=f"in {operation(program, t)}: {part.what}")
