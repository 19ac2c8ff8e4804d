"""Explanations of plans: the rules that they need, the effects of loops, the runners-up, and the contents of the peak.

Nothing here is kept while planning. A :class:`Record` holds what it takes to search again; the search is deterministic, so that leaving a
rule out and searching again tells what the rule is good for.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from eqsat_mem.deadline import Deadline
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.events import Event, Explaining, listening, tell
from eqsat_mem.ir import Program
from eqsat_mem.ir.loop_tree import loops
from eqsat_mem.reports.explanation import EQUAL, Explanation, Found, Held, LoopEffect, NeededRule
from eqsat_mem.reports.minimal_sets import smallest
from eqsat_mem.reports.outline import loop_summaries, outline
from eqsat_mem.reports.plan import Plan
from eqsat_mem.reports.plan_text import stopped_text
from eqsat_mem.reports.record import Record
from eqsat_mem.reports.runners_up import SearchRecord, rivals
from eqsat_mem.reports.words import array_type, describe
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.search import Search, fastest
from eqsat_mem.schedule.timing import Timing
from eqsat_mem.transforms.plan_bodies import calls


class OutOfTime(Exception):
    """The seconds for an explanation have passed. It never leaves this module."""


def ending(deadline: Deadline) -> Callable[[Event], None]:
    """A listener that ends a search at the first event after a deadline."""

    def listener(event: Event) -> None:
        if deadline.passed():
            raise OutOfTime

    return listener


def explained(plan: Plan, record: Record, deadline: Deadline) -> Explanation:
    """Explain a plan, which was made with this record, as far as the time allows."""
    s: Schedule = plan.schedule
    fired: list[str] = [] if plan.unchanged else list(plan.rules_fired)
    needed: list[NeededRule] = []
    unasked = fired
    if not record.searched:
        with suppress(OutOfTime), listening(ending(deadline)):
            tell(Explaining(0))
            record.searches()
    searches = record.searches() if record.searched else None
    if searches is not None and not plan.unchanged:
        fired = searches.seen.rules_fired()
        needed, unasked = _needed(searches, s, fired, deadline)
    names = {rule.rule.name for rule in needed}
    return Explanation(
        name=plan.name,
        unchanged=plan.unchanged,
        repeated=plan.unchanged or searches is None or searches.found(frozenset(), s).reached,
        rules=needed,
        spare_rules=[] if unasked else [name for name in sorted(fired) if name not in names],
        unasked=sorted(unasked),
        measured="" if plan.tuning is None or not plan.tuning.plans else str(plan.tuning),
        stopped=stopped_text(plan),
        loops=loop_effects(s),
        rivals=[] if searches is None else rivals(searches.seen, s, record.limit_bytes),
        peak_before=held_at_peak(record.before),
        peak_after=held_at_peak(s),
        original_peak_bytes=plan.original_peak_bytes,
        peak_bytes=plan.peak_bytes,
        limit_bytes=record.limit_bytes,
        seconds=s.seconds,
        searches=0 if searches is None else searches.count,
    )


class Searches:
    """The search of a record without some rules, each set of rules searched with once.

    Attributes:
        seen: the record of the search with all rules.
        best: its best schedule.
        count: the number of searches.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.scheduler = Remembering()
        self.seen = SearchRecord()
        self.count = 0
        with listening(self.seen):
            self.best = self._search(frozenset())
        self._known = {frozenset[str](): self.best}

    def found(self, without: frozenset[str], plan: Schedule) -> Found:
        """The result of the search without these rules, compared with the plan, or with the best where that is not reached again."""
        if without not in self._known:
            self._known[without] = self._search(without)
        s, goal = self._known[without], plan if _as_good(self.best, plan) else self.best
        fits = s.fits(self.record.limit_bytes)
        return Found(peak_bytes=s.peak_bytes, seconds=s.seconds, fits=fits, loops=outline(s), reached=_as_good(s, goal))

    def knows(self, without: frozenset[str]) -> bool:
        """Whether the search without these rules has been run."""
        return without in self._known

    def seen_with(self, without: frozenset[str]) -> SearchRecord:
        """The record of a search without these rules."""
        seen = SearchRecord()
        with listening(seen):
            self._search(without)
        return seen

    def _search(self, without: frozenset[str]) -> Schedule:
        best = self.record.again(without=without, scheduler=self.scheduler)
        self.count += 1
        return best


def _as_good(s: Schedule, goal: Schedule) -> bool:
    """Whether ``s`` is as small and as fast as ``goal``, and bodies of loops and branches, which no time model sees, are planned as
    fast."""
    times, wanted = _times(s), _times(goal)
    as_fast = len(times) == len(wanted) and all(a <= b * (1 + EQUAL) for a, b in zip(times, wanted))
    return as_fast and s.peak_bytes <= goal.peak_bytes


def _times(s: Schedule) -> list[float]:
    """Predicted seconds of a schedule, then of the plans of its bodies."""
    bodies = (body for call in calls(s.ex.program) for body in call.bodies if body is not None)
    return [s.seconds, *(seconds for body in bodies for seconds in _times(body))]


class Remembering:
    """The scheduler, asked once per program and limit: most rules that are left out change no candidate."""

    def __init__(self) -> None:
        self._known: dict[Any, Schedule] = {}

    def __call__(self, search: Search, rival: Schedule | None) -> Schedule:
        ex, program = search.ex, search.ex.program
        facts = (tuple(sorted(table.items())) for table in (ex.splits, ex.accumulates, ex.unrolls))
        planned = tuple(id(call) for call in calls(program) if call.bodies)  # calls are equal whatever the plans of their bodies
        against = rival and (rival.splits, rival.peak_bytes, rival.seconds)
        key = (tuple(program.terms), tuple(program.outputs), tuple(program.effects), planned, *facts, search.limit, against)
        if key not in self._known:
            self._known[key] = fastest(search, rival)
        return self._known[key]


# --- rules --------------------------------------------------------------------------------------------


def _needed(searches: Searches, plan: Schedule, fired: Sequence[str], deadline: Deadline) -> tuple[list[NeededRule], list[str]]:
    """The smallest set of rules that reaches the plan, in the order in which they first match when they are the only ones.

    Where the time is too short, these are the rules that are known to be needed. The rules about which nothing can be said yet come second.
    """
    every = frozenset(fired)

    def enough(rules: frozenset[str]) -> bool:
        tell(Explaining(searches.count))
        return searches.found(every - rules, plan).reached

    try:
        with listening(ending(deadline)):
            names = smallest(fired, enough)
            only = searches.seen_with(every - frozenset(names))
            for name in names:
                enough(every - {name})
        unasked: list[str] = []
    except OutOfTime:
        alone = (name for name in fired if searches.knows(frozenset([name])))
        names, only = [name for name in alone if not searches.found(frozenset([name]), plan).reached], searches.seen
        unasked = [name for name in fired if name not in names]
    where = {name: only if name in only.first_step else searches.seen for name in names}
    options = searches.record.options
    cards = {
        card.name: card for card in load_rules(options.rules, options.accuracy, options.only_rules, operations=options.operations).cards
    }
    order = {name: k for k, name in enumerate(cards)}
    needed = [
        NeededRule(
            rule=cards[name],
            step=where[name].first_step[name],
            matches=where[name].matches[name],
            without=searches.found(frozenset([name]), plan),
        )
        for name in names
    ]
    return sorted(needed, key=lambda n: (n.step, order[n.rule.name])), unasked


# --- loops --------------------------------------------------------------------------------------------


def loop_effects(s: Schedule) -> list[LoopEffect]:
    """The saving and the cost of each loop of a schedule, in the order of :func:`loop_summaries`."""
    memory = Memory(s.ex, s.backend)
    timing = Timing(memory)
    effects = []
    for loop, summary in zip(loops(s.seq), loop_summaries(s), strict=True):
        once = {**s.chunks, loop: summary.extent}
        peak, seconds = memory.total(s.seq, once), timing.total(s.seq, once)
        effects.append(
            LoopEffect(
                loop=summary,
                one_turn_peak_bytes=peak,
                one_turn_s=seconds,
                saves_bytes=peak - s.peak_bytes,
                costs_s=s.seconds - seconds,
            )
        )
    return effects


# --- peaks --------------------------------------------------------------------------------------------


def held_at_peak(s: Schedule) -> list[Held]:
    """The values that a schedule holds at its peak, largest first: every argument, and the values that are live there."""
    program, memory = s.ex.program, Memory(s.ex, s.backend)
    arguments = (
        Held(what=f"{array_type(b.shape, b.dtype)} argument {b.name}", nbytes=nbytes, whole_bytes=nbytes, place="", line="")
        for b, nbytes in zip(program.inputs, program.input_bytes(), strict=True)
    )
    live, _ = memory.at_peak(s.seq, memory.full_extents(), s.chunks)
    values = (held(program, value.term, value.nbytes, value.extents) for value in live)
    return sorted([*arguments, *values], key=lambda tensor: -tensor.nbytes)


def held(program: Program, t: int, nbytes: int, extents: Sequence[int] | None = None) -> Held:
    """A value of which ``nbytes`` are held, in a loop with the ``extents`` of a chunk, with the line that made it."""
    source = program.source.get(t)
    place, line = ("", "") if source is None else (str(source), linecache.getline(source.file, source.line).strip())
    return Held(what=describe(program, t, extents), nbytes=nbytes, whole_bytes=program.nbytes(t), place=place, line=line)
