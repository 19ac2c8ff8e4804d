"""Rules that state one equation, whose cards must claim the same of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from eqsat_mem.egraph import language
from eqsat_mem.egraph.rule_files import Rule
from eqsat_mem.egraph.soundness.patterns import Tree, directions, filled, is_constructor

Equation = tuple[str, str]
"""Two sides as text, with variables numbered in the order in which they are met; the lesser text first."""


def contradictions(rules: Sequence[Rule], own: language.Own = language.NOTHING) -> Iterator[tuple[Rule, Rule]]:
    """The pairs of rules that state an equation in common, up to names of variables and direction, and differ in soundness.

    Guards are no part of an equation: where a guard is what makes one of two rules sound, both have the claim of what is true under it.
    """
    stated = {rule.name: frozenset(equations(rule, own)) for rule in rules}
    for one, other in combinations(rules, 2):
        if one.sound != other.sound and stated[one.name] & stated[other.name]:
            yield one, other


def equations(rule: Rule, own: language.Own = language.NOTHING) -> Iterator[Equation]:
    """The terms that a rule makes equal, each variable that its premises equate with a constructor replaced by that."""
    for premises, actions in directions(rule):
        meaning: dict[str, Tree] = {}
        pairs: list[tuple[Tree, Tree]] = []
        for premise in premises:
            if premise[0] == "=":
                sides = premise[1:]
                terms = [side for side in sides if isinstance(side, list) and is_constructor(side[0], own)]
                meaning |= {side: terms[0] for side in sides if isinstance(side, str) and terms}
        for action in actions:
            if action[0] == "let":
                meaning[action[1]] = action[2]
            elif action[0] == "union":
                pairs.append((action[1], action[2]))
        for left, right in pairs:
            sides = [filled(side, meaning) for side in (left, right)]
            yield min(_numbered(sides), _numbered(sides[::-1]))


def _numbered(sides: Sequence[Tree]) -> Any:
    """Both sides as text, with variables numbered from the left."""
    numbers: dict[str, str] = {}

    def text(tree: Tree) -> str:
        if isinstance(tree, list):
            return f"({' '.join([tree[0], *map(text, tree[1:])])})"
        is_variable = tree[0].isalpha() or tree[0] in "_?"
        return numbers.setdefault(tree, f"v{len(numbers)}") if is_variable and tree not in ("true", "false", "inf", "NaN") else tree

    return tuple(text(side) for side in sides)
