"""An explanation of a plan: its contents, and its text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from eqsat_mem.egraph.rule_files import Rule
from eqsat_mem.passes import Pass
from eqsat_mem.reports.plan import LoopSummary
from eqsat_mem.reports.runners_up import Rival
from eqsat_mem.units import format_bytes, time_text, times_as_long

EQUAL = 1e-3
"""The share by which two predicted times may differ and be the same: predictions are not closer."""
SHOWN = 8
"""The number of tensors of a peak that are printed."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search with some rules left out.

    Attributes:
        peak_bytes: the predicted peak.
        seconds: the predicted time.
        fits: whether the peak is within the limit.
        loops: the loop tree in one line.
        reached: whether it is as small and as fast as the plan.
    """

    peak_bytes: int
    seconds: float
    fits: bool
    loops: str
    reached: bool

    def __str__(self) -> str:
        return f"{format_bytes(self.peak_bytes)}, {time_text(self.seconds)}, {self.loops}"


@dataclass(frozen=True, kw_only=True)
class NeededRule:
    """A rule or pass without which the plan is not reached; or one of the fewest others that complete these, for which others can stand in.

    Attributes:
        rule: the rule or pass with its card.
        step: the step of saturation in which it first matched, counted over all rulesets; rules of one step act at once. Passes count as
            one step after that.
        matches: how often it matched, the other needed rules being the only ones, or all rules where it does not match among those;
            of a pass, how many candidates it has changed.
        without: the result of the search without it, all other rules applied. Where that is as good as the plan, other rules stand in.
    """

    rule: Rule | Pass
    step: int
    matches: int
    without: Found


@dataclass(frozen=True, kw_only=True)
class LoopEffect:
    """A loop, and the plan with that loop run in a single turn: all of its index at once.

    Attributes:
        loop: the loop.
        one_turn_peak_bytes: the peak of the plan with the loop in one turn.
        one_turn_s: its predicted seconds.
        saves_bytes: how much less the plan holds than that.
        costs_s: how many seconds more the plan takes than that; negative where the loop is faster.
    """

    loop: LoopSummary
    one_turn_peak_bytes: int
    one_turn_s: float
    saves_bytes: int
    costs_s: float

    def balance(self) -> str:
        """The saving and the cost of the loop, in words."""
        saved, cost = self.saves_bytes, self.costs_s
        size = f"saves {format_bytes(saved)}" if saved > 0 else f"holds {format_bytes(-saved)} more" if saved else "saves no memory"
        return f"the loop {size} and {'costs' if cost > 0 else 'saves'} {time_text(abs(cost))}"


@dataclass(frozen=True, kw_only=True)
class Held:
    """A tensor that is held at a peak.

    Attributes:
        what: an argument by its name, or a value by its operation and indices.
        nbytes: the bytes held; ``whole_bytes`` those of the whole value, of which a loop holds a chunk.
        place: the user's file, line and function, or empty.
        line: the user's line itself, or empty.
    """

    what: str
    nbytes: int
    whole_bytes: int
    place: str
    line: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The reasons for which a plan is as it is. ``print`` shows it; :meth:`to_json` has the same as data.

    Attributes:
        name: the user's function.
        unchanged: whether the function was left as it was; then no rule is needed.
        repeated: whether searching again found the plan again; False where a limit in seconds had stopped the first search.
        rules: the rules without which the plan is not reached, and the fewest others that complete them, so that all of these reach it
            together; in the order in which they first matched.
        spare_rules: the other rules that matched; without all of these the plan is reached.
        unasked: the rules that matched and of which nothing can be said, as the time was too short; empty if all were asked.
        measured: a sentence on the times by which the plan was chosen; empty where it was by prediction, without ``tune``.
        stopped: a sentence where planning was cut short by ``max_planning_seconds``; usually empty.
        loops: the saving and the cost of each loop.
        rivals: the other schedules found, and the reasons for which they lost.
        peak_before, peak_after: the values held at the peak of the program as written and of the plan, largest first.
        original_peak_bytes, peak_bytes, limit_bytes: the predicted peaks, and the planned limit of the search: the user's, or
            less where compiled programs held more than predicted.
        seconds: the plan's predicted time.
        searches: how many searches the explanation took; none where not even the first came to its end in the seconds given.
    """

    name: str
    unchanged: bool
    repeated: bool
    rules: Sequence[NeededRule]
    spare_rules: Sequence[str]
    unasked: Sequence[str] = ()
    measured: str = ""
    stopped: str = ""
    loops: Sequence[LoopEffect]
    rivals: Sequence[Rival]
    peak_before: Sequence[Held]
    peak_after: Sequence[Held]
    original_peak_bytes: int
    peak_bytes: int
    limit_bytes: int
    seconds: float
    searches: int

    def __str__(self) -> str:
        sections = (_rule_lines(self), _loop_lines(self), _rival_lines(self), _peak_lines(self))
        return "\n".join([f"why this plan of {self.name}", *(line for section in sections for line in section)])

    def shortfall(self, found: Found) -> str:
        """Text that says by how much the result without a rule falls short of the plan."""
        if not found.fits:
            return f"{format_bytes(found.peak_bytes - self.limit_bytes)} over the limit"
        if found.seconds > self.seconds * (1 + EQUAL):
            return times_as_long(found.seconds / self.seconds)
        if found.peak_bytes > self.peak_bytes:
            return f"{format_bytes(found.peak_bytes - self.peak_bytes)} larger"
        return "a body of its loops is slower"

    def to_json(self) -> str:
        """The explanation as one JSON object; its keys are the attributes."""
        return json.dumps(asdict(self), indent=2)


# --- as text ------------------------------------------------------------------------------------------


def _rule_lines(why: Explanation) -> Iterator[str]:
    yield from filter(None, (why.measured, why.stopped))
    if why.unchanged:
        than = "ran faster" if why.measured else "is predicted to be much faster"
        yield f"the function runs as it was written: it fits, and nothing found {than}"
        return
    if not why.repeated:
        yield "the search stopped at a limit of time; what follows is what it finds without max_seconds, and with as much time for planning"
    yield f"rules without which it is not reached, in the order in which they matched ({why.searches} searches)"
    for n in why.rules:
        if not n.without.reached:
            yield f"  {n.step:>3}. {n.rule.name} [{n.rule.sound}]: {n.rule.equation}"
            yield f"       without it: {n.without}, {why.shortfall(n.without)}"
    stand_ins = [n for n in why.rules if n.without.reached]
    if stand_ins:
        yield "rules that complete them, for each of which others can stand in"
        yield from (f"  {n.step:>3}. {n.rule.name} [{n.rule.sound}]: {n.rule.equation}" for n in stand_ins)
    if why.unasked:
        yield f"not asked, as the time was too short: {', '.join(why.unasked)}"
    if why.spare_rules:
        yield f"rules that matched and are not needed: {', '.join(why.spare_rules)}"


def _loop_lines(why: Explanation) -> Iterator[str]:
    yield "loops, and what the plan would be if one ran in a single turn" if why.loops else "no loops"
    for effect in why.loops:
        yield f"  {effect.loop}"
        if effect.loop.never_whole and effect.loop.results():
            yield f"  {'  ' * effect.loop.depth}  {effect.loop.results()}"
        size, seconds = format_bytes(effect.one_turn_peak_bytes), time_text(effect.one_turn_s)
        yield f"  {'  ' * effect.loop.depth}  in one turn: {size}, {seconds}; {effect.balance()}"


def _rival_lines(why: Explanation) -> Iterator[str]:
    if why.rivals:
        yield "runners-up"
    for rival in why.rivals:
        yield f"  {format_bytes(rival.peak_bytes)}, {time_text(rival.seconds)}, {rival.loops}; {rival.program}: {rival.why}"


def _peak_lines(why: Explanation) -> Iterator[str]:
    for title, nbytes, tensors in (
        ("held at the peak before", why.original_peak_bytes, why.peak_before),
        ("held at the peak after", why.peak_bytes, why.peak_after),
    ):
        yield f"{title}: {format_bytes(nbytes)}"
        yield from (f"  {line}" for line in map(_held_line, tensors[:SHOWN]))


def _held_line(tensor: Held) -> str:
    part = f" of {format_bytes(tensor.whole_bytes)}" if tensor.nbytes < tensor.whole_bytes else ""
    line = f": {tensor.line}" if tensor.line else ""
    where = f"  at {tensor.place}{line}" if tensor.place else ""
    return f"{format_bytes(tensor.nbytes)}{part}  {tensor.what}{where}"
