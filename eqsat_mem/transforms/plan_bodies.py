"""Planning of the bodies of ``scan``, ``while`` and ``cond``, under the limit minus the memory that is live around them.

A body is asked for again and again: for every form of the program around it, and for every target of a retry. Its :class:`Frontier` keeps
what was found, and answers most questions with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jax.extend.core import ClosedJaxpr

from eqsat_mem.frontend.fingerprint import fingerprint
from eqsat_mem.ir import Block, Call, Program, argument_bytes, axes_mask, is_leaf, itemsize
from eqsat_mem.ir.jaxprs import aval_bytes, contracts_in_steps, largest_value
from eqsat_mem.transforms.control_flow import Scan, repeats


@dataclass(frozen=True, eq=False)
class BodyPlan:
    """The plan of a body under a limit.

    Attributes:
        schedule: its schedule; None to leave it as written.
        held: the bytes that it holds besides its arguments; the fewest that were found where it does not fit.
        written: the bytes that it holds besides its arguments as written.
        peak_bytes: its whole peak.
        seconds, written_s: its predicted time, and that as written; 0 where that is not known.
        fits: whether the peak is within the limit.
        least: where it is not, the fewest bytes that a search came to; 0 where nothing was searched.
    """

    schedule: Any
    held: int
    written: int
    peak_bytes: int = 0
    seconds: float = 0.0
    fits: bool = True
    written_s: float = 0.0
    least: int = 0


Planner = Callable[[ClosedJaxpr, int], BodyPlan]
"""A function that plans a jaxpr under a limit in bytes."""

RUNGS = 4
"""Limits for which a body is planned between one and its double, after the first."""
HARDLY = 0.05
"""The share of its time by which a plan with more room has to be faster for it to be looked for."""
SMALL_BYTES, SMALL_SHARE, ROOM_SHARE = 2**20, 16, 4
"""Bodies whose values are all smaller than this and than such a share of the limit are not planned, and what they hold is not counted.
Those with scans inside that contract are, for their time, with another share of the limit as room; what such a plan holds more than what
is written is counted."""


@dataclass(eq=False)
class Fingerprints:
    """The fingerprints of bodies, each found once; equal bodies have equal ones.

    The table keeps the bodies, so that no other takes the place of one in memory.
    """

    known: dict[int, tuple[ClosedJaxpr, Hashable]] = field(default_factory=dict)

    def of(self, body: ClosedJaxpr) -> Hashable:
        if id(body) not in self.known:
            self.known[id(body)] = body, fingerprint(body)
        return self.known[id(body)][1]


@dataclass(eq=False)
class Frontier:
    """The plans of one body: for a few limits, from which those for other limits follow.

    Attributes:
        found: the limits for which it has been planned, with their plans.
    """

    found: dict[int, BodyPlan] = field(default_factory=dict)

    def within(self, limit: int, planner: Callable[[int], BodyPlan]) -> BodyPlan:
        """Return a plan for a limit: the first one for just that limit, further ones for limits on a ladder.

        Args:
            limit: the limit, in bytes.
            planner: plans the body under a limit.
        """
        known = self.known(limit)
        if known is not None:
            return known
        rung = self.rung(limit)
        plan = self.found[rung] = self.found.get(rung) or planner(rung)
        if not plan.fits and rung < limit and plan.least <= limit:
            plan = self.found[limit] = planner(limit)
        return plan

    def known(self, limit: int) -> BodyPlan | None:
        """Return the plan that is known for a limit, if any.

        One for more room that fits is the plan. Where none fits with more room, or a search for less room came to more than the limit, none
        does. One for less room is the plan unless it takes longer than with more room, or where the rung below has no more room.
        """
        roomier = [self.found[asked] for asked in sorted(self.found) if asked >= limit]
        for plan in reversed(roomier):
            if plan.peak_bytes <= limit:
                return plan
        failed = next((plan for plan in roomier if not plan.fits), None)
        if failed is not None:
            return failed
        tighter = {asked: plan for asked, plan in self.found.items() if asked <= limit and plan.fits}
        if not tighter:
            return next((plan for plan in self.found.values() if limit < plan.least), None)
        best, fastest = min(tighter.values(), key=lambda plan: plan.seconds), min((plan.seconds for plan in roomier), default=0.0)
        return best if max(tighter) >= self.rung(limit) or best.seconds <= fastest * (1 + HARDLY) else None

    def rung(self, limit: int) -> int:
        """Return the limit to plan for: the largest on the ladder that is not larger than one, unless that is the first one asked."""
        if not self.found or limit < 1:
            return limit
        return min(limit, math.floor(2 ** (math.floor(RUNGS * math.log2(limit)) / RUNGS)))


def plan_bodies(program: Program, limit: int, planner: Planner, written: Planner) -> tuple[Program, dict[Call, Call]]:
    """Plan the large bodies of a program's control flow.

    Args:
        program: the program.
        limit: the limit for the whole program, in bytes.
        planner: plans one body.
        written: gives one as it is written: small bodies of scans, of which nothing else tells how long they take.

    Returns:
        The program with the plans in its calls, and each of these calls as it was written, with what its bodies hold and take so.
    """
    new: dict[Call, Call] = {}
    before: dict[Call, Call] = {}
    for call, live in calls(program).items():
        left = written if call.inside is None and call.prim.name == "scan" else _left_alone
        plans = _plans(call, limit - argument_bytes(program) - live, limit, planner, left)
        schedules, held = tuple(plan.schedule for plan in plans), max(plan.held for plan in plans)
        if held > 0 or any(plan.schedule is not None or plan.seconds for plan in plans):
            seconds, fit = tuple(plan.seconds for plan in plans), all(plan.fits for plan in plans)
            new[call] = replace(call, bodies=schedules, bodies_s=seconds, fit=fit, scratch_bytes=held)
            written_s, bytes_held = tuple(plan.written_s for plan in plans), max(plan.written for plan in plans)
            before[new[call]] = replace(call, bodies_s=written_s, scratch_bytes=bytes_held)
    return (program.replace_calls(new) if new else program), before


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


def _left_alone(body: ClosedJaxpr, limit: int) -> BodyPlan:
    """A body of which nothing is known."""
    return BodyPlan(None, 0, 0)


def _plans(call: Call, room: int, limit: int, planner: Planner, left: Planner) -> list[BodyPlan]:
    """Plan the bodies of a call.

    Args:
        call: the call.
        room: the bytes that its bodies may hold in addition to the memory live around the call.
        limit: the limit for the whole program.
        planner: plans one body.
        left: gives one that is not planned.
    """

    def plan(body: ClosedJaxpr) -> BodyPlan:
        given = aval_bytes(body.in_avals)
        if largest_value(body) >= min(SMALL_BYTES, limit // SMALL_SHARE):
            return planner(body, max(room, 0) + given)
        made = planner(body, limit // ROOM_SHARE + given) if contracts_in_steps(body.jaxpr) else left(body, given)
        return replace(made, held=max(made.held - made.written, 0), written=0, fits=True)

    return list(map(plan, bodies(call)))


def floor_bytes(program: Program) -> int:
    """Return bytes that no plan of a program gets below: its arguments, and what one of its scans reads, carries and stacks whole."""
    return argument_bytes(program) + max(map(partial(_scan_bytes, program), repeats(program)), default=0)


def _scan_bytes(program: Program, scan: Scan) -> int:
    """Return the bytes of the computed values that a scan reads step by step, of its carries, and of those that it stacks; one row of what
    loops can cut."""
    if scan.call.prim.name != "scan":
        return 0
    read = {program.source_of(t) for t in scan.xs}
    whole = {*(t for t in read if not is_leaf(program.terms[t])), *(t for _, t in scan.stacked())}
    values = [(program.free[t], program.terms[t].dtype) for t in whole]
    carried = zip(map(axes_mask, scan.call.out_axes[: scan.carries]), scan.call.out_dtypes)
    return sum(program.extent(free & ~scan.call.pointwise) * itemsize(dtype) for free, dtype in (*values, *carried))


def bodies(call: Call) -> list[ClosedJaxpr]:
    """Return the functions that a loop or branch runs."""
    values = [call.params[key] for key in BODIES[call.prim.name]]
    return [body for value in values for body in (value if isinstance(value, tuple | list) else (value,))]


def has_plans(program: Program) -> bool:
    """Whether a loop or branch of the program has a plan of its own."""
    return any(s is not None for call in calls(program) for s in call.bodies)


BODIES = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
"""The parameters of each control-flow primitive that hold its bodies."""
