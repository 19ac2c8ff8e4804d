"""Equality saturation within limits: one iteration at a time, since nothing interrupts a running one.

Rules that come with the package are trusted, and run in this process. With others the e-graph stands in a worker, which ends where they ask
for too much; the rule to blame is found by running each by itself.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from eqsat_mem.deadline import NEVER, Deadline
from eqsat_mem.egraph import language
from eqsat_mem.egraph.engine import CopiedSession, Session
from eqsat_mem.egraph.graph import EgglogPanic, EGraph, RuleOverrun, View
from eqsat_mem.egraph.rule_files import Rule, RuleSet
from eqsat_mem.egraph.worker import Worker
from eqsat_mem.errors import RuleError
from eqsat_mem.events import Saturated, Settled, Stepped, tell
from eqsat_mem.ir import Program

T = TypeVar("T")

SETTLE_ITERATIONS = 200
"""Iterations after which rulesets that should come to rest are left alone; each only looks at what is new."""

SETTLE_GROWTH = 4
"""The multiple of `max_rows` that a ruleset that should come to rest may be expected to reach by its next step."""

ROOM = 4
"""An e-graph that may grow so many times, and whose rules are trusted, is analysed without counting its rows at each step."""

BURST = 10
"""The multiple of `max_rows` that the e-graph may reach with rules that are not trusted: a larger one takes too long to read."""

SHARE = 0.25
"""From this share of the rows on, added by rules that are not trusted, a ruleset that does not come to rest is their fault. Rows of the
analysis rules about terms that others make count for nobody."""


OUT_OF_TIME = "at the end of the time for planning"
"""What is said of a saturation that planning had no more time for."""


@dataclass(frozen=True)
class Limits:
    """The limits at which saturation stops.

    Attributes:
        max_rows: rows of the e-graph that no further step is expected to exceed.
        max_iterations: steps of the rules that explore.
        max_seconds: seconds in all, checked between steps. Far more than the other limits allow for: what stops first should not
            depend on how busy the machine is. With rules that do not come with the package, a tenth of it is the processor time after which
            saturation stops, and a sixth that after which it fails, wherever it is.
        large_elements: a value of more elements is `large`: rules that explore apply where one is at stake.
        unrolled_elements: folds and searches over at most so many elements may be written out element by element; a backend says.
        deadline: the end of planning: the rules that explore may take half of the time that is left, all others half of the rest.
    """

    max_rows: int = 50_000
    max_iterations: int = 30
    max_seconds: float = 60.0
    large_elements: int = 16_384
    unrolled_elements: int = 16
    deadline: Deadline = NEVER


def saturate(program: Program, rules: RuleSet, limits: Limits = Limits(), rounds_operands: bool = False) -> View:
    """The e-graph of ``program`` under ``rules``: closed under them, or as far as the limits allow (``View.stopped`` says which).

    Where egglog fails on shipped rules, the e-graph is built again with fewer iterations. ``rounds_operands`` says whether the device
    rounds operands of contractions, so that those which rules make need full precision.

    Raises:
        RuleError: if egglog refuses a rule, or fails without any iteration; if a rule that does not come with the package takes more
            time or memory than it may, or makes egglog fail. The rule is named, with file and line.
    """
    run: _Saturation | None = None
    try:
        with closing(session(rules, limits)) as where:
            run = _Saturation(program, rules, limits, where)
            run.apply()
            view = run.view()
    except RuleError as error:
        blamed = _blamed(program, rules, limits, error)
        if blamed is not None:
            raise blamed from error
        if not isinstance(error, EgglogPanic) or limits.max_iterations == 0:
            raise
        done = 0 if run is None else run.iterations
        return saturate(program, rules, replace(limits, max_iterations=min(done, limits.max_iterations - 1)), rounds_operands)
    view.rounds_operands = rounds_operands
    tell(Saturated(view))
    return view


def session(rules: RuleSet, limits: Limits = Limits()) -> Session:
    """A session for an e-graph with these rules: in this process if all of them are trusted."""
    return Worker(max(round(limits.max_seconds / 6), 1)) if rules.given else CopiedSession()


def attributed(rules: RuleSet, attempt: Callable[[RuleSet], T]) -> T:
    """Return the result of ``attempt`` for some rules.

    Raises:
        RuleError: as it does; where the error names no place, it is that of the first rule with which, and the trusted ones, it is raised.
    """
    try:
        return attempt(rules)
    except RuleError as error:
        theirs = [rule for rule in rules.rules if rule.name in rules.given]
        if not theirs or re.search("|".join(rf"{re.escape(rule.file)}\.egg:\d" for rule in theirs), str(error)):
            raise
        low, high = 0, len(theirs)  # with the first `high` of them it is raised
        while high - low > 1:
            middle = (low + high) // 2
            later = {rule.name for rule in theirs[middle:]}
            fewer = replace(rules, rules=tuple(r for r in rules.rules if r.name not in later), given=rules.given - later)
            with suppress(RuleError):
                attempt(fewer)
                low = middle
                continue
            high = middle
        raise _told(theirs[high - 1], f"does what no rule may: {error}") from error


class _Saturation:
    """One saturation: its e-graph, clock and statistics."""

    def __init__(self, program: Program, rules: RuleSet, limits: Limits, where: Session) -> None:
        self.limits, self.where = limits, where
        self.end = time.perf_counter() + limits.max_seconds
        self.deadline = limits.deadline.part(1 / 2)
        self.given = rules.given
        knobs = limits.large_elements, limits.unrolled_elements
        self.graph = EGraph(program, list(rules.alone()), dict(rules.maps), *knobs, rules.own, where, self.together(rules))
        self.most_rows = {rule.name: rule.most_rows for rule in rules.rules}
        self.matches: Counter[str] = Counter()
        self.added: dict[str, float] = {}
        self.cut = False
        self.stopped = ""
        self.iterations = 0
        self.size = self.graph.rows()
        self.rows = [self.size]

    def together(self, rules: RuleSet) -> Iterator[tuple[str, str]]:
        """The texts that make rulesets of what is run at once, each with its place."""
        return rules.together()

    def apply(self) -> None:
        """Apply the rules until nothing changes, or until a limit."""
        self.settle("simplify")
        while not (stopped := self.exhausted(self.iterations)) and self.step("explore"):
            self.iterations += 1
            self.settle("simplify")
        self.deadline = self.limits.deadline.part(1 / 2)
        self.settle("splitting")
        self.stopped = stopped or "saturated"

    def view(self) -> View:
        """The e-graph, with what was counted."""
        view = self.graph.read()
        view.matches, view.rows, view.iterations = dict(sorted(self.matches.items())), self.rows[-1], self.iterations
        view.stopped = self.stopped
        for name, spent in self.graph.seconds.items():
            if rule_of(name) in self.most_rows:
                view.seconds[rule_of(name)] = view.seconds.get(rule_of(name), 0.0) + spent
        return view

    def settle(self, ruleset: str) -> None:
        """Run a ruleset and the analysis in turn until both rest, or until a limit."""
        for _ in range(SETTLE_ITERATIONS):
            self._analyse()
            if not self.step(ruleset):
                break
            if self.cut or self.late():
                self._restless()
                break
        else:
            self._restless()
        self._analyse()
        self.rows.append(self.size)
        tell(Settled(ruleset, self.rows[-1]))

    def step(self, ruleset: str, times: int = 1) -> bool:
        """One iteration, or several as long as they change anything; whether they did."""
        before = self.size
        updated, counts = self.graph.step(self.run_as(ruleset), times)
        matches = Counter({rule_of(name): n for name, n in counts.items() if n and rule_of(name) in self.most_rows})
        self.matches.update(matches)
        self.size = after = self.graph.rows() if updated else before
        shares = {name: n * self.most_rows[name] for name, n in matches.items()}
        for name, share in shares.items():
            self.added[name] = self.added.get(name, 0.0) + (after - before) * share / max(sum(shares.values()), 1)
        self.cut = self.cut or after > self.limits.max_rows or after * (after / before) > SETTLE_GROWTH * self.limits.max_rows
        if self.given and after > BURST * self.limits.max_rows:
            raise RuleOverrun(f"makes {after - before} rows at once.")
        tell(Stepped(ruleset, matches))
        return updated

    def run_as(self, ruleset: str) -> str:
        """The ruleset that egglog runs for a ruleset of rule files."""
        return language.together(ruleset)

    def late(self) -> bool:
        """Whether time is up: the processor's in a worker, else the clock's, or that of planning."""
        own = time.perf_counter() > self.end or self.where.spent > self.limits.max_seconds / 10
        return own or self.deadline.passed()

    def exhausted(self, iterations: int) -> str:
        """The limit that forbids another step, if any. A step is expected to grow the e-graph by the last step's factor once more."""
        if iterations >= self.limits.max_iterations:
            return f"after {iterations} iterations"
        if self.late():
            return f"{OUT_OF_TIME if self.deadline.struck else f'after {self.limits.max_seconds} s'}; {self._busiest()}"
        last = self.rows[-1]
        growth = last / self.rows[-2] if iterations else 1.0
        if self.cut or last * growth > self.limits.max_rows:
            return f"at {last} rows, which the next step would multiply; {self._busiest()}"
        return ""

    def _analyse(self) -> None:
        steps = 0 if self.cut else SETTLE_ITERATIONS
        at_once = SETTLE_ITERATIONS if not self.given and ROOM * self.size <= self.limits.max_rows else 1
        for _ in range(steps):
            if not self.step("analysis", at_once):
                return
            if self.late() or self.cut:
                break
        if steps:
            self._restless()

    def _restless(self) -> None:
        """A ruleset that runs to rest has not come to rest: an error where rules that are not trusted have their share in that."""
        if self.deadline.struck:
            return  # which is no rule's fault
        made = {name: rows for name, rows in self.added.items() if rows > 0}  # those of some rules make the e-graph smaller
        if sum(made.get(name, 0.0) for name in self.given) > SHARE * sum(made.values()):
            raise RuleOverrun(f"does not come to rest ({self.size} rows); what grows belongs in the ruleset explore.")

    def _busiest(self) -> str:
        """The rule that added most, for messages: a step's rows are shared out by matches and what each can add."""
        most = max(self.added.items(), key=lambda item: (item[1], item[0]), default=("none", 0.0))
        return f"rule {most[0]!r} added most (about {most[1]:.0f} rows in {self.matches[most[0]]} matches)"


def rule_of(match: str) -> str:
    """The rule that a name among matches stands for: a birewrite's two directions count for one rule."""
    return match.removesuffix("=>").removesuffix("<=")


# --- whose fault it is --------------------------------------------------------------------------------


class _OneByOne(_Saturation):
    """A saturation in which each rule that is not trusted has a ruleset of its own, so that it is known which one runs."""

    running: Rule | None = None

    def together(self, rules: RuleSet) -> Iterator[tuple[str, str]]:
        self.theirs = [(rules.rulesets[rule.name], rule) for rule in rules.rules if rule.name in rules.given]
        return rules.together(without=rules.given)

    def run_as(self, ruleset: str) -> str:
        return ruleset if self.running else super().run_as(ruleset)

    def step(self, ruleset: str, times: int = 1) -> bool:
        changed = super().step(ruleset, times)
        for own, rule in self.theirs:
            if rule.ruleset == ruleset:
                self.running = rule
                changed |= super().step(own, times)
        self.running = None
        return changed

    def suspect(self) -> Rule | None:
        """The rule that runs, or that has added most."""
        theirs = (rule for _, rule in self.theirs)
        return self.running or max(theirs, key=lambda rule: self.added.get(rule.name, 0.0), default=None)


def _blamed(program: Program, rules: RuleSet, limits: Limits, error: RuleError) -> RuleError | None:
    """The error of the rule that made saturation fail; None if that is no rule's fault that is not trusted."""
    if not rules.given:
        return None
    at = _place(rules, error)
    if at is not None:
        failed = re.search(r"(\([^|]*\)): call of primitive", str(error))
        if failed is None and not isinstance(error, RuleOverrun):
            return None  # egglog's message says what is wrong, and where
        what = f"{failed[1]} has no value: it overflows, divides by zero or shifts too far" if failed else str(error).partition(" ")[2]
        return _told(at, what)
    if not isinstance(error, RuleOverrun | EgglogPanic):
        return None
    with closing(session(rules, limits)) as where:
        run: _OneByOne | None = None
        try:
            run = _OneByOne(program, rules, limits, where)
            run.apply()
        except RuleError as again:
            if isinstance(again, EgglogPanic) and run is not None and run.running is None:
                return None
            error = again
    suspect = run.suspect() if run is not None else None
    return None if suspect is None else _told(suspect, str(error.__cause__ or error))


def _place(rules: RuleSet, error: RuleError) -> Rule | None:
    """The rule whose place an error names, among those that are not trusted."""
    theirs = (rule for rule in rules.rules if rule.name in rules.given)
    return next((rule for rule in theirs if re.search(rf"(^|of ){re.escape(rule.place)}(?!\d)", str(error))), None)


def _told(rule: Rule, what: str) -> RuleError:
    return RuleError(
        f"{rule.place}: rule {rule.name!r}: {what.rstrip('.')}. To plan without it, pass without_rules=[{rule.name!r}], "
        f"or [{rule.file!r}] for all rules of the file."
    )
