"""States that loops begin with once what they read is there, where a compiler would make them before anything else.

What a loop begins to write into is a constant, which some compilers make ahead of all kernels around the loop
(:attr:`eqsat_mem.schedule.backend.Backend.begins_loops_ahead`): of a network whose layers are loops, the results of all layers are there
from the beginning. A constant to which a zero is added that is known only with a value that the loop reads is made then.
"""

from __future__ import annotations

from collections.abc import Mapping

from eqsat_mem.ir import Block, Dot, Fold, Program
from eqsat_mem.ir.loop_tree import Loop, Seq, Step, loops, made
from eqsat_mem.schedule.ties import BitTie, computed
from eqsat_mem.schedule.whole_terms import runs_steps

LEAST_BYTES = 2**18
"""A loop whose state is smaller is left to begin when it will."""


def waiting(program: Program, seq: Seq) -> Mapping[Loop, tuple[int, frozenset[int]]]:
    """The loops of a region that can wait: the value that each waits for, and the results whose memory does.

    It is, of the values that the loop reads, the one behind most loops of the region, and of those the one computed last. A loop that reads
    nothing which another has made cannot wait: whatever else is computed may be there from the beginning.
    """
    behind: dict[int, int] = {}
    order: dict[int, int] = {}
    found: dict[Loop, tuple[int, frozenset[int]]] = {}
    for step in seq.steps:
        reads = program.operands(step) if isinstance(step, int) else (step.body if isinstance(step, Loop) else step).reads
        most = max((behind.get(t, 0) for t in reads), default=0)
        if isinstance(step, Loop):
            able = [t for t in reads if behind.get(t, 0) and _can_be_waited_for(program, t)]
            late = frozenset(t for t in (*step.folds, *step.stacks) if _can_wait(program, step, t))
            if able and late:
                found[step] = max(able, key=lambda t: (behind[t], order[t])), late
        most += _is_loop(program, step)
        for t in made(step):
            behind[t], order[t] = most, len(order)
    return found


def _is_loop(program: Program, step: Step) -> bool:
    if isinstance(step, int):
        return isinstance(term := program.terms[step], Block) and runs_steps(term.call)
    return isinstance(step, Loop) or next(loops(step), None) is not None


def _can_be_waited_for(program: Program, t: int) -> bool:
    """Whether a number that XLA does not know can be made of the first element of a value, which is no view of another."""
    return BitTie().can_tie(program.terms[t].dtype) and computed(program, t) == t and program.extent(program.free[t]) > 0


def _can_wait(program: Program, loop: Loop, t: int) -> bool:
    """Whether a state begins as an array of one number to which a zero can be added."""
    term = program.terms[t]
    kind = getattr(term.dtype, "kind", "")
    return (t in loop.stacks and kind in "biuf") or (isinstance(term, Fold | Dot) and kind in "iuf")
