"""Results in the memory of donated arguments, and loops that begin with such an argument and write over what they have read.

XLA gives a result the memory of a donated argument of its shape and dtype, the first result that of the first such argument. That memory is
never free: no other value lies in it before the result is written. If something reads the argument afterwards, or more of it than
is written at that moment, XLA makes a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from eqsat_mem.ir import Dot, Fold, Input, Program, Rename
from eqsat_mem.ir.loop_tree import Loop, Seq, Step, made


@dataclass(frozen=True, eq=False)
class Places:
    """The places of results that take the memory of donated arguments.

    Attributes:
        copied: those for which XLA makes a copy.
        begun: for each loop, those of its results whose argument the loop begins with, and that argument.
    """

    copied: frozenset[int] = frozenset()
    begun: dict[Loop, dict[int, int]] = field(default_factory=dict)


def taking(program: Program, donated: Sequence[int]) -> dict[int, int]:
    """The results that take the memory of donated arguments, by their terms, with the numbers of these arguments."""
    free = {slot: (program.inputs[slot].shape, program.inputs[slot].dtype) for slot in donated}
    found: dict[int, int] = {}
    for o in program.outputs:
        kind = program.shape(o.axes), program.terms[o.term].dtype
        slot = next((slot for slot, own in free.items() if own == kind), None)
        if slot is not None:
            del free[slot]
            found.setdefault(o.term, slot)
    return found


def places(program: Program, seq: Seq, taken: Mapping[int, int]) -> Places:
    """The places of the results of a program's tree that take the memory of the arguments of these numbers."""
    steps, copied, begun = [*_straight(seq)], set[int](), dict[Loop, dict[int, int]]()
    for t, slot in taken.items():
        reads = {k for k, term in enumerate(program.terms) if isinstance(term, Input) and term.slot == slot}
        maker = max((k for k, step in enumerate(steps) if t in made(step)), default=None)
        if maker is None:
            continue
        step, read = steps[maker], reads & _read(program, steps[maker])
        if any(reads & _read(program, later) for later in steps[maker + 1 :]):
            copied.add(t)
        elif read and isinstance(step, Loop) and t in step.stacks and len(read) == 1 and _is_sliced(program, step, t, *read):
            begun.setdefault(step, {})[t] = read.pop()
        elif read and (isinstance(step, Loop) or isinstance(program.terms[t], Dot | Fold)):
            copied.add(t)
    return Places(frozenset(copied), begun)


def _straight(seq: Seq) -> Iterator[int | Loop]:
    for step in seq.steps:
        if isinstance(step, Seq):
            yield from _straight(step)
        else:
            yield step


def _read(program: Program, step: Step) -> frozenset[int]:
    return frozenset(program.operands(step)) if isinstance(step, int) else step.body.reads if isinstance(step, Loop) else step.reads


def _is_sliced(program: Program, loop: Loop, t: int, argument: int) -> bool:
    """Whether a loop reads an argument in the chunks in which it writes a result, along the same axes."""
    term = program.terms[argument]
    assert isinstance(term, Input)
    is_renamed = any(isinstance(other, Rename) and other.arg == argument for other in program.terms)
    returned = [o.axes for o in program.outputs if o.term == t]
    if is_renamed or len(returned) > 1 or not all(len(axis) == 1 for axis in (*term.axes, *returned[0])):
        return False
    own, others = ([axis[0] for axis in axes] for axes in (term.axes, returned[0]))
    return loop.index in own and own.index(loop.index) == (others.index(loop.index) if loop.index in others else -1)
