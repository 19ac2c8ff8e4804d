"""Tuning: the best few plans that fit, different in structure, run on the device, and the fastest is taken.

Each is verified as any plan is before it runs, and compiled as it will be run, but without donation, which would use up the arguments. The
first is what predictions choose, so that tuning which comes to nothing changes nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from eqsat_mem.deadline import Deadline
from eqsat_mem.events import Event, Kept, Nesting, Scheduled, Searched, Tried
from eqsat_mem.ir import Program
from eqsat_mem.ir.loop_tree import Loop, Seq
from eqsat_mem.reports.measured import MeasuredPlan, Tuning
from eqsat_mem.reports.outline import outline
from eqsat_mem.request import Request
from eqsat_mem.schedule.chunk_sizes import tied
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.search import Search
from eqsat_mem.searches import SearchResult
from eqsat_mem.verification import Chosen, asked_up_to, compiled, keep

MOST = 8
"""Programs that are run at most: the plan, the program as written, and runners-up."""
SLOWEST = 4.0
"""A runner-up is left out if it is predicted to take so many times as long as the fastest."""
ALIKE = 4
"""Loop trees of one program are alike if they have the same loops, each in chunks of sizes that differ by less than this factor."""
VARIED = 2
"""Of the best loop trees so many are tried with other chunk sizes, too."""
BEHIND = 3.0
"""What takes so many times as long as the fastest in its first run is not run again."""
LEAST_ROUNDS, MOST_ROUNDS, ENOUGH_S = 5, 50, 1.0
"""Programs are run in turns until these rounds have taken so many seconds, at least and at most so many."""

NOT_DONATED = "programs that are run again cannot donate their arguments, and do not fit without"

clock: Callable[[], float] = time.perf_counter
"""The clock of budgets and of runs, in seconds; tests have their own."""


def timed(run: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """The seconds of one run, until its results are there."""
    start = clock()
    jax.block_until_ready(run(*arguments))
    return clock() - start


@dataclass(eq=False)
class Tuner:
    """The tuning of one plan: a listener to its search, which keeps the loop trees that the search looks at, and then runs the best.

    Attributes:
        seconds: the time for compiling and running, after the search.
        given: the arguments to run with, flat; None for each that is to be made up.
        known: the measurements of the same plan by another process, whose choice is taken; nothing is run then.
    """

    seconds: float
    given: Sequence[Any] = ()
    known: Tuning | None = None
    seen: list[Schedule] = field(default_factory=list)
    _nesting: Nesting = field(default_factory=Nesting)

    def __call__(self, event: Event) -> None:
        """Listen to a search; those of bodies inside are left out."""
        if self._nesting.is_inside(event):
            return
        match event:
            case Tried() | Scheduled() | Searched():
                self.seen.append(event.schedule)
            case Kept():
                self.seen += event.schedules

    def choose(self, request: Request, found: SearchResult, plan: Chosen, program: Program) -> tuple[Chosen, Tuning]:
        """The fastest of the plan that is predicted to be best and its runners-up, and what was measured.

        ``program`` is what was loaded, and ``found`` what the search found of it.
        """
        every = self._candidates(request, found, plan, program)
        if self.known is not None:
            position = self.known.plans[0].position if self.known.plans else 0
            return next((candidate for k, candidate in every if k == position), plan), self.known
        avals = request.jaxpr.in_avals
        given = [x if is_value(x) else None for x in self.given or [None] * len(avals)]
        reason = _why_not(request, given)
        if reason:
            return plan, Tuning(bound_s=self.seconds, reason=reason)
        made = np.random.default_rng(0)
        arguments = [made_up(made, aval) if x is None else as_array(x, aval) for x, aval in zip(given, avals, strict=True)]
        deadline = Deadline(self.seconds, clock)
        runs = _started(request, every, arguments, deadline)
        _in_turns(runs, arguments, deadline)
        if not any(run.position == 0 for run in runs):
            reason = "the time for it was over before the first run" if deadline.struck else NOT_DONATED
            return plan, Tuning(bound_s=self.seconds, struck=deadline.struck, reason=reason)
        first = min(runs, key=lambda run: run.median)
        ordered = [first, *(run for run in runs if run is not first)]
        told = [run.told() for run in ordered]
        return first.of, Tuning(bound_s=self.seconds, plans=told, arguments=_described(given), struck=deadline.struck)

    def _candidates(self, request: Request, found: SearchResult, plan: Chosen, program: Program) -> Iterator[tuple[int, Chosen]]:
        """The plan, the program as written, and runners-up, each verified when it is asked for, with its position among them all."""
        yield 0, plan
        before, limit = found.before, request.limit
        if not plan.unchanged and before.fits(asked_up_to(request, program)):
            written = keep(request, program, before)
            if written is not None:
                yield 1, written
        here = [s for s in self.seen if s.fits(plan.planned_limit)]
        bases = different(here, None) if plan.unchanged else [plan.schedule, *different(here, plan.schedule)]
        here += [new for s in bases[:VARIED] for new in other_chunks(s, plan.planned_limit) if new.fits(plan.planned_limit)]
        for position, s in enumerate(different(here, None if plan.unchanged else plan.schedule), 2):
            candidate = compiled(request, s.backend, s, plan.planned_limit)
            if candidate.check is not None and candidate.check.held_bytes <= limit:
                yield position, candidate


def _why_not(request: Request, given: Sequence[Any]) -> str:
    """The reason for which nothing can be run on arguments of which some are given; else empty."""
    if request.placement is not None:
        return "plans for several devices are compared by what is predicted"
    if request.jaxpr.effects:
        return "the function has effects, which each run would repeat"
    for x, aval in zip(given, request.jaxpr.in_avals, strict=True):
        if x is None and jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
            return f"arguments of type {aval.str_short()} are not made up: plan with arrays"
    return ""


def _described(given: Sequence[Any]) -> str:
    unknown = [x is None for x in given]
    return "the arguments given" if not any(unknown) else "made-up arguments" if all(unknown) else "arguments of which some are made up"


# --- candidates ---------------------------------------------------------------------------------------


def different(found: Sequence[Schedule], plan: Schedule | None) -> list[Schedule]:
    """The schedules that are predicted to be fastest, none of which is like the plan or another."""
    kept = [] if plan is None else [plan]
    fastest = min((s.seconds for s in (*kept, *found)), default=0.0)
    texts: dict[int, str] = {}
    for s in sorted(found, key=lambda s: (s.seconds, s.peak_bytes)):
        if s.seconds > SLOWEST * fastest or len(kept) >= MOST - 1:
            break
        if not any(alike(s, other, texts) for other in kept):
            kept.append(s)
    return kept if plan is None else kept[1:]


def alike(one: Schedule, other: Schedule, texts: dict[int, str] | None = None) -> bool:
    """Whether two schedules are predicted to be the same, or are of one program, with the same loops, in chunks of about the same sizes.

    ``texts`` keeps the texts of programs.
    """
    if (one.seconds, one.peak_bytes) == (other.seconds, other.peak_bytes):  # programs that differ in nothing that counts
        return True
    known = {} if texts is None else texts
    (loops, chunks), (others, other_chunks) = tree(one), tree(other)
    if loops != others or one.backend != other.backend or _text(one, known) != _text(other, known):
        return False
    return all(max(a, b) < ALIKE * min(a, b) for a, b in zip(chunks, other_chunks, strict=True))


def tree(s: Schedule) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The loops of a schedule, nested as they are, with how many results each has; and their chunk sizes."""
    chunks: list[int] = []

    def nested(seq: Seq) -> tuple[Any, ...]:
        found: list[Any] = []
        for step in seq.steps:
            if isinstance(step, Loop):
                chunks.append(s.chunks[step])
                found.append((step.index, len(step.folds), len(step.stacks), nested(step.body)))
            elif isinstance(step, Seq):
                found += nested(step)
        return tuple(found)

    return nested(s.seq), tuple(chunks)


def other_chunks(s: Schedule, limit: int) -> Iterator[Schedule]:
    """A schedule with chunks of one index that are so much smaller, or larger, that it is no longer alike, where there are such."""
    search = Search(s.ex, limit, s.backend)
    for together in tied(list(s.chunks), s.chunks):
        now, steps = s.chunks[together[0]], search.steps(together)
        for several in ([n for n in steps if n * ALIKE <= now][-1:], [n for n in steps if n >= ALIKE * now][:1]):
            yield from (search.rechunked(s, dict.fromkeys(together, n)) for n in several)


def _text(s: Schedule, known: dict[int, str]) -> str:
    program = s.ex.program
    if id(program) not in known:
        known[id(program)] = str(program)
    return known[id(program)]


# --- arguments ----------------------------------------------------------------------------------------


def is_value(x: Any) -> bool:
    """Whether an argument is there to run with: neither a shape nor a tracer, and not donated before."""
    if isinstance(x, jax.core.Tracer):
        return False
    if isinstance(x, jax.Array):
        return not x.is_deleted()
    return isinstance(x, np.ndarray | np.generic | bool | int | float | complex)


def as_array(x: Any, aval: Any) -> jax.Array:
    """An argument as the array that the program takes."""
    return x if isinstance(x, jax.Array) else jax.numpy.asarray(x, aval.dtype)


def made_up(random: np.random.Generator, aval: Any) -> jax.Array:
    """An argument of a shape and dtype: zeros for integers, which may be positions, and else random numbers between 0 and 1."""
    if jax.numpy.issubdtype(aval.dtype, np.integer):
        return jax.numpy.zeros(aval.shape, aval.dtype)
    numbers = random.random(aval.shape, np.float32)
    if np.dtype(aval.dtype).kind == "b":
        return jax.numpy.asarray(numbers < 0.5)
    is_complex = np.dtype(aval.dtype).kind == "c"
    return jax.numpy.asarray(numbers + 1j * random.random(aval.shape, np.float32) if is_complex else numbers, aval.dtype)


# --- runs ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Racer:
    """A program that is run again and again: its executable, and the seconds of its first run and of those after it."""

    of: Chosen
    position: int
    executable: Any
    first: float
    times: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.times or [self.first])

    def told(self) -> MeasuredPlan:
        s, check = self.of.schedule, self.of.check
        return MeasuredPlan(
            program="as written" if self.of.unchanged else outline(s),
            seconds=self.median,
            runs=len(self.times),
            predicted_s=s.seconds,
            peak_bytes=s.peak_bytes if check is None else check.held_bytes,
            position=self.position,
        )


def _started(request: Request, every: Iterator[tuple[int, Chosen]], arguments: Sequence[Any], deadline: Deadline) -> list[_Racer]:
    """The programs that were compiled and run once in the time: none that would take longer than is left, as far as is known."""
    runs: list[_Racer] = []
    for position, candidate in every:
        if deadline.passed():
            break
        slower = min((run.first / run.of.schedule.seconds for run in runs if run.of.schedule.seconds), default=1.0)
        if candidate.schedule.seconds * slower > deadline.end - deadline.clock():
            deadline.struck = True
            continue
        executable = request.executable(candidate.backend, candidate.code, candidate.unchanged)
        if executable is not None:
            runs.append(_Racer(candidate, position, executable, timed(executable, arguments)))
        if len(runs) >= MOST:
            break
    return runs


def _in_turns(runs: Sequence[_Racer], arguments: Sequence[Any], deadline: Deadline) -> None:
    """Run programs again in turns, so that a machine that slows down slows all of them, without those that are far behind."""
    best = min((run.first for run in runs), default=0.0)
    racing = [run for run in runs if run.first <= BEHIND * best]
    for turn in range(MOST_ROUNDS if len(racing) > 1 else 0):
        if turn >= LEAST_ROUNDS and sum(sum(run.times) for run in racing) >= ENOUGH_S:
            return
        for run in racing:
            if deadline.passed():
                return
            run.times.append(timed(run.executable, arguments))
