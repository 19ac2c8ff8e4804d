"""A rule that also tells what it says: which classes it makes equal to something, and which facts it states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from eqsat_mem.egraph import language
from eqsat_mem.egraph.rule_files import Rule, RuleSet
from eqsat_mem.egraph.sexpr import read_forms
from eqsat_mem.egraph.soundness.patterns import Tree, directions

TOLD = "told/"
"""The beginning of the names of relations that hold the equations and facts that a rule has stated; no rule file may use such names."""
CLAIMED, MEANT, TESTED = TOLD + "claimed", TOLD + "meant", TOLD + "tested/"
"""The relations of the classes that the rule makes equal to something, of those that must be equal to something if the facts hold that it
states, and of the facts of which that is known."""


def stated_heads(rule: Rule) -> list[str]:
    """The facts that a rule states, by their relations and functions."""
    heads = (_fact(action)[0] for _, actions in directions(rule) for action in actions if action[0] not in ("union", "let"))
    return list(dict.fromkeys(heads))


def claims(rule: Rule) -> bool:
    """Whether a rule makes anything equal."""
    return any(action[0] == "union" for _, actions in directions(rule) for action in actions)


def telling(rule: Rule, rules: RuleSet) -> Iterator[tuple[str, str]]:
    """The rule as text, with its place, that tells; and the relations that hold what it tells."""
    sorts = _sorts(rules)
    yield "told", f"(relation {CLAIMED} (T))"
    yield "told", f"(relation {MEANT} (T))"
    for head in stated_heads(rule):
        yield "told", f"(relation {TOLD}{head} ({' '.join(sorts[head])}))"
    for (premises, actions), suffix in zip(directions(rule), ("", "<=")):
        told = [*actions, *(_tell(action) for action in actions if action[0] != "let")]
        yield rule.place, f'(rule {_text(premises)} {_text(told)} :ruleset {rule.ruleset} :name "{rule.name}{suffix}")'


def meanings(rule: Rule, rules: RuleSet) -> Iterator[tuple[str, str]]:
    """The meanings of the facts that the rule states, as rules about the facts that it has told."""
    heads, sorts = stated_heads(rule), _sorts(rules)
    for place, text in rules.meanings:
        (form,) = read_forms(text, place)
        _, premises, actions, *_, name = form.tree
        head = name.strip('"').removeprefix("means-")
        if head in heads:
            fact = next(part for part in _parts(premises) if part[0] == head)
            arguments = sorts[head][: len(fact) - 1]
            equal = [[MEANT, action[1]] for action in actions if action[0] == "union"]
            told = [*actions, *equal, [TESTED + head, *fact[1:]]]
            yield place, f"(relation {TESTED}{head} ({' '.join(arguments)}))"
            yield place, f"(rule {_text(_renamed(premises, head))} {_text(told)} :ruleset meaning :name {name})"


def _parts(tree: Tree) -> Iterator[list[Tree]]:
    """All lists inside a tree."""
    if isinstance(tree, list):
        yield from ([tree] if tree and isinstance(tree[0], str) else [])
        for part in tree:
            yield from _parts(part)


def _renamed(premises: Tree, head: str) -> Tree:
    """Premises about a relation, as premises about what the rule has told of it."""
    return [[TOLD + head, *premise[1:]] if premise[0] == head else premise for premise in premises]


def _tell(action: Tree) -> Tree:
    if action[0] == "union":
        return [CLAIMED, action[1]]
    head, *args = _fact(action)
    return [TOLD + head, *args]


def _fact(action: Tree) -> Tree:
    """A fact as its head and its arguments, the value of a function last."""
    return [*action[1], action[2]] if action[0] == "set" else action


def _sorts(rules: RuleSet) -> Mapping[str, list[str]]:
    """The sorts of the arguments of what rules may state, the value of a function last."""
    sorts = {fact: ["T", "i64"] for fact in (*language.FACTS, "centred")} | {"want": ["i64"], "sinks": ["i64", "T", "T"]}
    for place, text in rules.declarations:
        for form in read_forms(text, place):
            sorts[form.tree[1]] = [*form.tree[2], *form.tree[3:4]]
    return sorts


def _text(tree: Tree) -> str:
    return tree if isinstance(tree, str) else f"({' '.join(map(_text, tree))})"
