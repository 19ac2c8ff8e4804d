"""Planning of the bodies of ``scan``, ``while`` and ``cond``, under the limit minus the memory that is live around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jax.extend.core import ClosedJaxpr

from eqsat_mem.ir import Block, Call, Program, argument_bytes, is_leaf
from eqsat_mem.ir.jaxprs import aval_bytes, largest_value

Planner = Callable[[ClosedJaxpr, int], tuple[Any, int, int]]
"""A function that plans a jaxpr under a limit in bytes. It returns the schedule (None to leave the jaxpr as written), and the bytes held
in addition to arguments, as planned and as written."""

SMALL_BYTES = 2**20
"""Bodies are not planned if all of their values are smaller than this and than a sixteenth of the limit."""


def plan_bodies(program: Program, limit: int, planner: Planner) -> tuple[Program, int]:
    """Plan the large bodies of a program's control flow.

    Args:
        program: the program.
        limit: the limit for the whole program, in bytes.
        planner: plans one body.

    Returns:
        The program with the plans in its calls, and the most bytes that this saves in one call.
    """
    new: dict[Call, Call] = {}
    saved = 0
    for call, live in calls(program).items():
        changed, written = _planned(call, limit - argument_bytes(program) - live, min(SMALL_BYTES, limit // 16), planner)
        if changed is not None:
            new[call] = changed
            saved = max(saved, written - changed.scratch_bytes)
    return (program.replace_calls(new) if new else program), saved


def calls(program: Program) -> dict[Call, int]:
    """Return the control-flow calls of a program, with the bytes of each one's results and of its operands that are not leaves."""
    found: dict[Call, int] = {}
    for t in program.reachable():
        term = program.terms[t]
        if isinstance(term, Block) and term.call.prim.name in BODIES:
            made = (a for a in {program.source_of(a) for a in term.args} if not is_leaf(program.terms[a]))
            found.setdefault(term.call, sum(map(program.nbytes, made)))
            found[term.call] += program.nbytes(t)
    return found


def _planned(call: Call, room: int, small: int, planner: Planner) -> tuple[Call | None, int]:
    """Plan the bodies of a call.

    Args:
        call: the call.
        room: the bytes that its bodies may hold in addition to the memory live around the call.
        small: bodies whose values all have fewer bytes than this are not planned.
        planner: plans one body.

    Returns:
        The call with planned bodies, or None if it does not change, and the bytes that its bodies hold as written.
    """
    left_alone: tuple[Any, int, int] = None, 0, 0
    plans = [
        left_alone if largest_value(body) < small else planner(body, max(room, 0) + aval_bytes(body.in_avals)) for body in bodies(call)
    ]
    schedules = tuple(schedule for schedule, _, _ in plans)
    held, written = max(held for _, held, _ in plans), max(written for _, _, written in plans)
    changed = held > 0 or any(schedule is not None for schedule in schedules)
    return (replace(call, bodies=schedules, scratch_bytes=held) if changed else None), written


def bodies(call: Call) -> list[ClosedJaxpr]:
    """Return the functions that a loop or branch runs."""
    values = [call.params[key] for key in BODIES[call.prim.name]]
    return [body for value in values for body in (value if isinstance(value, tuple | list) else (value,))]


def has_plans(program: Program) -> bool:
    """Whether a loop or branch of the program has a plan of its own."""
    return any(s is not None for call in calls(program) for s in call.bodies)


BODIES = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
"""The parameters of each control-flow primitive that hold its bodies."""
