"""The left side of a rule as a shape to be filled in: the conditions that premises state, with the premises of the facts that they ask for.

A premise such as ``(sum-of-squares e k s)`` holds where another rule stated it. So it is replaced by the premises of one of the rules that
state it, and theirs in turn, until only terms are left. What guards ask is left to egglog.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from eqsat_mem.egraph import language
from eqsat_mem.egraph.rule_files import Rule, RuleSet
from eqsat_mem.egraph.sexpr import read_forms

Tree = Any
"""A parsed expression: an atom, or a list of a head and arguments."""
Variable = tuple[str, int]
"""A name, and the number of the rule's use that it belongs to."""

TRIES = 40
"""Other rules that state the facts of a premise are looked for so many times, where those that were taken contradict one another."""
DEPTH = 4
"""Premises are traced back through at most so many rules that state facts."""


@dataclass(frozen=True)
class App:
    """A constructor on arguments: variables, atoms, or constructors again."""

    head: str
    args: tuple[Any, ...]


@dataclass
class Shape:
    """The values of variables, as far as the premises say.

    ``roots`` are the terms that must be there, ``guards`` all premises; ``free`` are variables for index sets, each with a term that
    depends on these indices, ``dtypes`` terms of which premises name the dtype.
    """

    bound: dict[Variable, Any] = field(default_factory=dict)
    roots: list[Any] = field(default_factory=list)
    uses: int = 0
    functions: set[str] = field(default_factory=set)
    guards: list[tuple[Tree, int]] = field(default_factory=list)
    free: list[tuple[Variable, Any]] = field(default_factory=list)
    dtypes: list[tuple[Variable, str]] = field(default_factory=list)
    _single: set[Any] | None = None

    @cached_property
    def definitions(self) -> list[tuple[Variable, Tree, int]]:
        """The variables that premises equate with what can be computed: index sets, numbers and dtypes."""
        equations = [(premise[1:], use) for premise, use in self.guards if premise[0] == "="]
        return [
            ((name, use), tree, use)
            for sides, use in equations
            for name in sides
            for tree in sides
            if isinstance(name, str) and not _is_literal(name) and isinstance(tree, list)
        ]

    def resolve(self, term: Any) -> Any:
        """A term with its outermost variable replaced by what it stands for."""
        while isinstance(term, tuple) and term in self.bound:
            term = self.bound[term]
        return term

    @cached_property
    def terms(self) -> list[App]:
        """All terms that must be there."""
        found: list[App] = []
        stack = list(self.roots)
        while stack:
            term = self.resolve(stack.pop())
            if isinstance(term, App) and term not in found:
                found.append(term)
                stack.extend(term.args)
        return found

    def single(self, own: language.Own) -> set[Any]:
        """The variables that stand for one index, not for a set of them, wherever they stand."""
        if self._single is None:
            roles = [(arg, role) for term in self.terms for arg, role in zip(term.args, language.roles(term.head, len(term.args), own))]
            asked = [((call[1], use), "index") for premise, use in self.guards for call in _calls(premise) if call[0] == "extent"]
            self._single = {self.resolve(arg) for arg, role in (*roles, *asked) if role == "index"}
        return self._single

    def unify(self, left: Any, right: Any) -> bool:
        """Make two terms one; whether that is possible."""
        left, right = self.resolve(left), self.resolve(right)
        if left == right:
            return True
        for one, other in ((left, right), (right, left)):
            if isinstance(one, tuple):
                self.bound[one] = other
                return True
        if isinstance(left, App) and isinstance(right, App) and left.head == right.head and len(left.args) == len(right.args):
            return all(self.unify(a, b) for a, b in zip(left.args, right.args))
        return False


def is_constructor(head: Any, own: language.Own) -> bool:
    """Whether a head makes a term that can be filled in."""
    return head in language.ROLES or head in language.primitive_of() or head in own


@cache
def directions(rule: Rule) -> Sequence[tuple[list[Tree], list[Tree]]]:
    """A rule's premises and actions, once per direction; asked for at every draw, and parsed once."""
    (form,) = read_forms(rule.text, rule.place)
    head, *rest = form.tree
    if head == "rule":
        return [(rest[0], rest[1])]
    left, right = rest[:2]
    when = rest[rest.index(":when") + 1] if ":when" in rest else []
    sides = [(left, right), (right, left)][: 2 if head == "birewrite" else 1]
    return [([["=", "_root", a], *when], [["union", "_root", b]]) for a, b in sides]


def shape(rule: Rule, rules: RuleSet, rng: random.Random) -> Shape | None:
    """A shape of a rule's left side, at random among those that its facts may come from; None if none was found."""
    known = _Known.of(rules)
    for _ in range(TRIES):
        out = Shape()
        premises, _ = rng.choice(directions(rule))
        if _assume(out, premises, known, rng, DEPTH):
            return out
    return None


def stated(actions: Sequence[Tree]) -> Iterator[Tree]:
    """The facts that actions state, those of functions without their values."""
    for action in actions:
        if action and action[0] not in ("union", "let"):
            yield action[1] if action[0] == "set" else action


def supports(rule: Rule, rules: RuleSet) -> list[Rule]:
    """The rules that state what a rule asks for, and what those ask for in turn."""
    needed, found = _asked(rule), {rule.name: rule}
    while True:
        more = [r for r in rules.rules if r.name not in found and _stated_heads(r) & needed]
        if not more:
            return [r for r in found.values() if r is not rule]
        for r in more:
            found[r.name] = r
            needed |= _asked(r)


def names_indices(rule: Rule, own: language.Own) -> bool:
    """Whether a rule is about more than elementwise operations: anything that folds, reads or asks for indices."""
    heads = {head for premises, actions in directions(rule) for head in (*_heads(premises), *_heads(actions))}
    plain = set(language.primitive_of()) | {"Lit", "Convert", "IntegerPow", "dtype", "union", "let", *language.FACTS_OF_NAMES}
    plain |= {name for name, operation in own.items() if not operation.dimensions}
    return bool(heads - plain - (language.PRIMITIVES - {"&", "|", "not-i64"}))


def _stated_heads(rule: Rule) -> set[str]:
    return {str(fact[0]) for _, actions in directions(rule) for fact in stated(actions)}


def _asked(rule: Rule) -> set[str]:
    """The heads of everything in a rule's premises that is no part of the language."""
    heads = {word for premises, _ in directions(rule) for word in _heads(premises)}
    return heads - language.NAMES


def _heads(tree: Tree) -> Iterator[str]:
    return (call[0] for call in _calls(tree))


def _calls(tree: Tree) -> Iterator[list[Tree]]:
    """All parts of an expression that have a head."""
    if isinstance(tree, list):
        if tree and isinstance(tree[0], str):
            yield tree
        for part in tree:
            yield from _calls(part)


Way = tuple[Sequence[Tree], Tree]
"""The premises under which a rule states a fact, and that fact, in which names are replaced by what the rule lets them be."""


@cache
def _stating(rule: Rule) -> Mapping[str, Sequence[Way]]:
    """The ways in which a rule states facts, by relation."""
    found: dict[str, list[Way]] = {}
    for premises, actions in directions(rule):
        made = {action[1]: action[2] for action in actions if action[0] == "let"}
        for said in stated(actions):
            found.setdefault(said[0], []).append((premises, filled(said, made)))
    return found


@dataclass(frozen=True)
class _Known:
    """The material of shapes: the ways in which rules state the facts of each relation, and the user's operations."""

    ways: Mapping[str, Sequence[Way]]
    own: language.Own

    @classmethod
    def of(cls, rules: RuleSet) -> _Known:
        ways: dict[str, list[Way]] = {}
        for rule in rules.rules:
            for relation, those in _stating(rule).items():
                ways.setdefault(relation, []).extend(those)
        return cls(ways, rules.own)


def _assume(out: Shape, premises: Sequence[Tree], known: _Known, rng: random.Random, depth: int) -> bool:
    """Add premises to a shape; whether they can hold together."""
    use, out.uses = out.uses, out.uses + 1
    return all(_premise(out, premise, use, known, rng, depth) for premise in premises)


def _premise(out: Shape, premise: Tree, use: int, known: _Known, rng: random.Random, depth: int) -> bool:
    head, args = premise[0], premise[1:]
    out.functions |= set(_heads(premise))
    out.guards.append((premise, use))
    if head == "=":
        sides = [side for a in args if (side := _term(a, use, known.own)) is not None]
        out.roots += [s for s in sides if isinstance(s, App)]
        free, dtypes = ([_term(a[1], use, known.own) for a in args if isinstance(a, list) and a[0] == of] for of in ("free", "dtype"))
        out.free += [(s, term) for s in sides if isinstance(s, tuple) for term in free if isinstance(term, tuple)]
        out.dtypes += [(term, s.strip('"')) for s in sides if isinstance(s, str) for term in dtypes if isinstance(term, tuple)]
        facts = [a for a in args if isinstance(a, list) and _is_stated(a[0], known.own)]
        united = all(out.unify(sides[0], other) for other in sides[1:])
        return united and all(_state(out, fact, use, known, rng, depth) for fact in facts)
    if is_constructor(head, known.own):
        out.roots.append(_term(premise, use, known.own))
        return True
    return not _is_stated(head, known.own) or _state(out, premise, use, known, rng, depth)


def _is_stated(head: str, own: language.Own) -> bool:
    """Whether rules state it: it is no part of the language."""
    return head not in language.NAMES | language.PRIMITIVES and not is_constructor(head, own)


def _state(out: Shape, fact: Tree, use: int, known: _Known, rng: random.Random, depth: int) -> bool:
    """Add the premises of some rule that states a fact."""
    ways = known.ways.get(fact[0], ())
    if not ways or depth == 0:
        return False
    premises, said = rng.choice(ways)
    inner = out.uses
    if not _assume(out, premises, known, rng, depth - 1):
        return False
    pairs = ((_term(a, use, known.own), _term(b, inner, known.own)) for a, b in zip(fact[1:], said[1:]))
    return all(a is None or b is None or out.unify(a, b) for a, b in pairs)


def filled(tree: Tree, meaning: Mapping[str, Tree]) -> Tree:
    """An expression with names replaced by what they mean, and names in that likewise."""
    if isinstance(tree, str):
        inner = {name: other for name, other in meaning.items() if name != tree}
        return filled(meaning[tree], inner) if tree in meaning else tree
    return [tree[0], *(filled(part, meaning) for part in tree[1:])]


def _term(tree: Tree, use: int, own: language.Own) -> Any:
    """A parsed expression as a term of a shape; None for what only egglog computes."""
    if isinstance(tree, str):
        return tree if _is_literal(tree) else (tree, use)
    if tree and is_constructor(tree[0], own):
        args = [_term(a, use, own) for a in tree[1:]]
        return App(tree[0], tuple((f"_{id(tree[k])}", use) if a is None else a for k, a in enumerate(args, 1)))
    return None


@cache
def _is_literal(atom: str) -> bool:
    return atom.startswith('"') or atom in ("true", "false") or bool(re.fullmatch(r"-?(\d[\d.e+-]*|inf|NaN)", atom))
