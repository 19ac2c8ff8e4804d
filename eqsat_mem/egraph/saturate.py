"""Equality saturation within limits: one iteration at a time, since nothing interrupts a running one."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace

from eqsat_mem.egraph.engine import EgglogPanic, EGraph, View
from eqsat_mem.egraph.rule_files import RuleSet
from eqsat_mem.events import Saturated, Settled, Stepped, tell
from eqsat_mem.ir import Program

SETTLE_ITERATIONS = 200
"""Iterations after which rulesets that should come to rest are left alone; each only looks at what is new."""

SETTLE_GROWTH = 4
"""How often `max_rows` a ruleset that should come to rest may be expected to reach by its next step."""


@dataclass(frozen=True)
class Limits:
    """When saturation stops.

    Attributes:
        max_rows: rows of the e-graph that no further step is expected to exceed.
        max_iterations: steps of the rules that explore.
        max_seconds: seconds in all, checked between steps. Far more than the other limits allow for: what stops first should not
            depend on how busy the machine is.
        large_elements: a value of more elements is `large`: rules that explore apply where one is at stake.
        unrolled_elements: folds and searches over at most so many elements may be written out element by element; a backend says.
    """

    max_rows: int = 50_000
    max_iterations: int = 30
    max_seconds: float = 60.0
    large_elements: int = 16_384
    unrolled_elements: int = 16


def saturate(program: Program, rules: RuleSet, limits: Limits = Limits(), rounds_operands: bool = False) -> View:
    """The e-graph of ``program`` under ``rules``: closed under them, or as far as the limits allow (``View.stopped`` says which).

    Where egglog fails, the e-graph is built again with fewer iterations. ``rounds_operands`` says whether the device rounds operands of
    contractions, so that those which rules make need full precision.

    Raises:
        RuleError: if egglog refuses a rule, or fails without any iteration.
    """
    run = _Run(program, rules, limits)
    iterations = 0
    try:
        run.settle("simplify")
        while not (stopped := run.exhausted(iterations)) and run.step("explore"):
            iterations += 1
            run.settle("simplify")
        run.settle("splitting")
        view = run.graph.read()
    except EgglogPanic:
        if limits.max_iterations == 0:
            raise
        return saturate(program, rules, replace(limits, max_iterations=min(iterations, limits.max_iterations - 1)), rounds_operands)
    view.matches, view.rows, view.iterations = dict(sorted(run.matches.items())), run.rows[-1], iterations
    view.stopped, view.rounds_operands = stopped or "saturated", rounds_operands
    for name, spent in run.graph.seconds.items():
        if rule_of(name) in run.most_rows:
            view.seconds[rule_of(name)] = view.seconds.get(rule_of(name), 0.0) + spent
    tell(Saturated(view))
    return view


class _Run:
    """One saturation: its e-graph, clock and statistics."""

    def __init__(self, program: Program, rules: RuleSet, limits: Limits) -> None:
        self.limits = limits
        self.end = time.perf_counter() + limits.max_seconds
        self.graph = EGraph(program, list(rules.texts()), dict(rules.maps), limits.large_elements, limits.unrolled_elements, rules.own)
        self.most_rows = {rule.name: rule.most_rows for rule in rules.rules}
        self.matches: Counter[str] = Counter()
        self.added: dict[str, float] = {}
        self.cut = False
        self.size = self.graph.rows()
        self.rows = [self.size]

    def settle(self, ruleset: str) -> None:
        """Run a ruleset and the analysis in turn until both rest, or until a limit."""
        for _ in range(SETTLE_ITERATIONS):
            self._analyse()
            if not self.step(ruleset) or self.cut or time.perf_counter() > self.end:
                break
        self._analyse()
        self.rows.append(self.size)
        tell(Settled(ruleset, self.rows[-1]))

    def step(self, ruleset: str) -> bool:
        """One iteration; whether it changed anything."""
        before = self.size
        updated, counts = self.graph.step(ruleset)
        matches = Counter({rule_of(name): n for name, n in counts.items() if n and rule_of(name) in self.most_rows})
        self.matches.update(matches)
        self.size = after = self.graph.rows()
        shares = {name: n * self.most_rows[name] for name, n in matches.items()}
        for name, share in shares.items():
            self.added[name] = self.added.get(name, 0.0) + (after - before) * share / max(sum(shares.values()), 1)
        self.cut = self.cut or after > self.limits.max_rows or after * (after / before) > SETTLE_GROWTH * self.limits.max_rows
        tell(Stepped(ruleset, matches))
        return updated

    def exhausted(self, iterations: int) -> str:
        """The limit that forbids another step, if any. A step is expected to grow the e-graph by the last step's factor once more."""
        if iterations >= self.limits.max_iterations:
            return f"after {iterations} iterations"
        if time.perf_counter() > self.end:
            return f"after {self.limits.max_seconds} s; {self._busiest()}"
        last = self.rows[-1]
        growth = last / self.rows[-2] if iterations else 1.0
        if self.cut or last * growth > self.limits.max_rows:
            return f"at {last} rows, which the next step would multiply; {self._busiest()}"
        return ""

    def _analyse(self) -> None:
        for _ in range(SETTLE_ITERATIONS):
            if self.cut or not self.step("analysis"):
                break

    def _busiest(self) -> str:
        """The rule that added most, for messages: a step's rows are shared out by matches and what each can add."""
        most = max(self.added.items(), key=lambda item: (item[1], item[0]), default=("none", 0.0))
        return f"rule {most[0]!r} added most (about {most[1]:.0f} rows in {self.matches[most[0]]} matches)"


def rule_of(match: str) -> str:
    """The rule that a name among matches stands for: a birewrite's two directions count for one rule."""
    return match.removesuffix("=>").removesuffix("<=")
