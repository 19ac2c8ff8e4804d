"""Slow, obvious extraction for tests: every choice, and random choices."""

from __future__ import annotations

import math
import random

from eqsat_mem.egraph.extract import Choice, Dag, Extraction, build, greedy
from eqsat_mem.egraph.graph import View
from eqsat_mem.egraph.node_costs import Costs, node_costs


def chaos(view: View, seed: int, rounds: int = 4) -> Extraction:
    """A program drawn at random: classes in use get another well-founded node, over and over."""
    rng = random.Random(seed)
    costs = node_costs(view, lambda program, t, unrolled: 1.0, 0.0)
    roots = [view.class_of[t] for t in view.program.roots()]
    dag = Dag(view, costs, greedy(view, costs), roots)
    for _ in range(rounds):
        for c in sorted(dag.count):
            k = rng.choice([k for k, cost in enumerate(costs.of[c]) if cost < math.inf])
            if dag.buildable(c, k):
                dag.chosen[c] = k
        dag = Dag(view, costs, dag.chosen, roots)
    return build(view, dag.choice())


def cheapest(view: View, costs: Costs, most: int = 400_000) -> float | None:
    """The least cost of any well-founded choice, by trying all of them; None after ``most`` steps."""
    best, steps = math.inf, 0

    def visit(todo: list[int], choice: dict[int, int], total: float) -> None:
        nonlocal best, steps
        steps += 1
        if total >= best or steps > most:
            return
        while todo and todo[-1] in choice:
            todo = todo[:-1]
        if not todo:
            if _well_founded(view, choice):
                best = total
            return
        c = todo[-1]
        for k, cost in enumerate(costs.of[c]):
            if cost < math.inf:
                visit(todo[:-1] + list(view.nodes[c][k].children), {**choice, c: k}, total + cost)

    visit([view.class_of[t] for t in view.program.roots()], {}, 0.0)
    return None if steps > most else best


def cost_of(costs: Costs, view: View, choice: Choice) -> float:
    return sum(costs.of[c][view.nodes[c].index(node)] for c, node in choice.items())


def _well_founded(view: View, choice: dict[int, int]) -> bool:
    state: dict[int, int] = {}

    def descend(c: int) -> bool:
        if state.get(c) == 1:
            return False
        if c not in state:
            state[c] = 1
            if not all(descend(a) for a in view.nodes[c][choice[c]].children):
                return False
            state[c] = 2
        return True

    return all(descend(c) for c in choice)
