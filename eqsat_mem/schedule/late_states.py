"""States that loops begin with once what they read is there, where a compiler would make them before anything else.

What a loop begins to write into is a constant, which some compilers make ahead of all kernels around the loop
(:attr:`eqsat_mem.schedule.backend.Backend.begins_loops_ahead`): of a network whose layers are loops, the results of all layers are there
from the beginning. A constant to which a zero is added that is known only with a value that the loop reads is made then.
"""

from __future__ import annotations

from eqsat_mem.ir import Dot, Fold, Program, is_leaf
from eqsat_mem.ir.loop_tree import Loop
from eqsat_mem.schedule.ties import BitTie

LEAST_BYTES = 2**18
"""A loop whose state is smaller is left to begin when it will."""


def late_state(program: Program, loop: Loop, nbytes: int) -> tuple[int, frozenset[int]] | None:
    """The value that a loop waits for, and the results of the loop whose memory does.

    None if it reads nothing that is computed, or has a state of fewer ``nbytes`` than are worth it.
    """
    tie = BitTie()
    computed = [t for t in loop.body.reads if not is_leaf(program.terms[t]) and tie.can_wait_for(program, t)]
    late = frozenset(t for t in (*loop.folds, *loop.stacks) if _can_wait(program, loop, t))
    return (max(computed), late) if computed and late and nbytes >= LEAST_BYTES else None


def _can_wait(program: Program, loop: Loop, t: int) -> bool:
    """Whether a state begins as an array of one number to which a zero can be added."""
    term = program.terms[t]
    kind = getattr(term.dtype, "kind", "")
    return (t in loop.stacks and kind in "biuf") or (isinstance(term, Fold | Dot) and kind in "iuf")
