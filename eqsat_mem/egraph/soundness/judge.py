"""Whether a rule says what is true: its left side at random, both sides evaluated, and the difference judged by what its card claims.

egglog itself decides where a rule matches and what it then says: left sides drawn at random
(:mod:`eqsat_mem.egraph.soundness.generators`) stand in an e-graph with the rule, and with those that state the facts it asks for. The rule
tells which classes it makes equal to something (:mod:`eqsat_mem.egraph.soundness.instrument`); all nodes of those must have one value. The
facts that it states are tested for what they claim (:mod:`eqsat_mem.egraph.soundness.facts`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from eqsat_mem import ir
from eqsat_mem.egraph import language
from eqsat_mem.egraph.encode import Encoder, Node
from eqsat_mem.egraph.graph import Classes, EGraph
from eqsat_mem.egraph.rule_files import Rule, RuleSet
from eqsat_mem.egraph.saturate import Limits, session
from eqsat_mem.egraph.sexpr import read_forms
from eqsat_mem.egraph.soundness import patterns
from eqsat_mem.egraph.soundness.builder import Builder, IllFormed, NotTaken
from eqsat_mem.egraph.soundness.compare import CLAIMS, FACT, first_difference
from eqsat_mem.egraph.soundness.evaluation import arguments, below, evaluated, moved, over
from eqsat_mem.egraph.soundness.facts import BUILT_IN, Facts
from eqsat_mem.egraph.soundness.generators import MOST_ELEMENTS, NARROW, SOME_DTYPES, Drawn, Generator, arities
from eqsat_mem.egraph.soundness.instrument import CLAIMED, MEANT, TESTED, TOLD, claims, meanings, stated_heads, telling
from eqsat_mem.egraph.soundness.stream_checks import Streams
from eqsat_mem.egraph.soundness.values import FEW_KINDS, KINDS
from eqsat_mem.errors import RuleError
from eqsat_mem.ir import Program, bits, children, folded


@dataclass(frozen=True)
class Group:
    """Indices of some extents, over which so many left sides are drawn; in each, an index set that is named has an extent in ``about``."""

    extents: tuple[int, ...]
    wanted: int
    about: range
    kinds: tuple[str, ...] = KINDS
    dtypes: tuple[tuple[str, ...], ...] = SOME_DTYPES


GROUPS = {
    "plain": Group((3, 2, 4, 3, 2), 9, range(2, 1000)),
    "ones": Group((1, 3, 3, 2, 1), 4, range(1, 2)),
    "square": Group((4, 4, 1, 2, 3), 4, range(4, 1000)),
    "empty": Group((0, 3, 2, 0, 3), 3, range(1)),
    "long": Group((512, 260, 260, 2, 1), 3, range(257, MOST_ELEMENTS), FEW_KINDS, (NARROW,)),
    "around": Group((256, 256, 3, 2, 1), 2, range(256, MOST_ELEMENTS), FEW_KINDS, (("uint8", "int8"),)),
}
"""Equal extents among them, for diagonals; ones; none; more elements than narrow dtypes can count; as many as bytes count to zero."""
AGAIN, FEW = 32, 8
"""E-graphs of left sides at most, one where that is enough; and how many tell that a rule is seen too rarely for all to be enough."""
ROUNDS = 2
"""Steps of the rules that explore, besides one for each rule that states a fact for the next."""
MOST_ROWS = 60_000
MOST_FACTS = 60
"""Facts of one relation that are tested."""
MOST_OTHERS = 6
"""Terms of one class, besides those drawn, that its left side is compared with."""
THIN = 30
"""A rule that was compared fewer times was hardly seen."""


@dataclass(frozen=True)
class Difference:
    """Two terms that a rule says are equal and that differ.

    ``left`` and ``right`` are terms of ``program``, ``args`` its arguments by slot. There is no ``right`` where the right side means
    nothing, or where what differs is the left side computed otherwise.
    """

    what: str
    program: Program
    left: int | None
    right: int | None
    args: Mapping[int, Any]


@dataclass(frozen=True)
class Verdict:
    """The outcome of checking one rule.

    Attributes:
        rule: the rule.
        matches: how often it matched.
        compared: how many left sides were compared with right sides, or facts tested, each for many values.
        wrong: the smallest difference of the first e-graph that has one.
        error: egglog's message about the rule, if it is refused or does not end.
        untested: the facts that it states of which nothing says what they mean, or which nothing came of that could be tested.
        excuse: why its file says that what is unchecked may stay so.
    """

    rule: Rule
    matches: int
    compared: int
    wrong: Difference | None = None
    error: str = ""
    untested: tuple[str, ...] = ()
    excuse: str = ""

    @property
    def status(self) -> str:
        """ "wrong", "right", or "unchecked" where something that it says was compared with nothing."""
        if self.wrong or self.error:
            return "wrong"
        return "right" if self.compared and not self.untested else "unchecked"

    @property
    def accepted(self) -> bool:
        """Whether it is right, or its file says why it is unchecked."""
        return self.status == "right" or (self.status == "unchecked" and bool(self.excuse))

    @property
    def thin(self) -> bool:
        """Whether it was hardly seen."""
        return self.status == "right" and self.compared < THIN

    def summary(self) -> str:
        """The number of comparisons, or the first difference, in one line."""
        if self.error or self.wrong:
            return self.error or str(self.wrong and self.wrong.what)
        seen = f"{self.matches} matches, {self.compared} comparisons"
        if self.status == "right":
            return seen + (f": thinly checked, seen fewer than {THIN} times" if self.thin else "")
        if self.excuse:
            return self.excuse
        if not self.matches:
            return "no left side drawn at random meets its premises and guards"
        if self.untested:
            return (
                f"{seen}; nothing tests what ({', '.join(self.untested)}) claims: write ';; means: premises => action' above its "
                "declaration, or ';; unchecked: why' there or above the rule"
            )
        return f"{seen}: what it makes equal could not be evaluated"


def judge(rule: Rule, rules: RuleSet, seed: int = 0) -> Verdict:
    """Check one rule of ``rules`` on random left sides. The same seed draws the same.

    Of several differences in one e-graph, the verdict has the smallest.
    """
    matches = compared = 0
    heads = stated_heads(rule)
    tested, meant = dict.fromkeys(heads, 0), {relation for relation, _ in rules.meant()}
    testable = claims(rule) or not meant.union(BUILT_IN).isdisjoint(heads)
    with jax.enable_x64(True):
        for number in range(AGAIN):
            try:
                trial = _Trial(rule, rules, AGAIN * seed + number)
                found = list(trial.differences())
            except RuleError as error:
                return Verdict(rule, matches, compared, error=str(error))
            matches, compared = matches + trial.matches, compared + len(found)
            tested = {head: n + trial.tested[head] for head, n in tested.items()}
            wrong = [difference for difference in found if difference is not None]
            if wrong:
                return Verdict(rule, matches, compared, min(wrong, key=_elements))
            if compared >= THIN or not testable or (number >= FEW and compared * AGAIN < THIN * number / 2):
                break  # it is seen often enough, or would not be in all that may be drawn
    reasons = {relation: why for file, relation, why in rules.unchecked if file == rule.file}
    untested = tuple(head for head, n in tested.items() if not n and head not in reasons)
    excused = [reasons[head] for head in heads if head in reasons]
    excuse = rule.unchecked or ("; ".join(dict.fromkeys(excused)) if excused and not untested and not claims(rule) else "")
    return Verdict(rule, matches, compared, untested=untested, excuse=excuse)


def _elements(difference: Difference) -> tuple[bool, int]:
    """The number of elements that a reader of a difference has to look at, by which differences are ordered; one without elements is
    last."""
    program = difference.program
    terms = below(program, [t for t in (difference.left, difference.right) if t is not None])
    sizes = [program.extent(program.free[t] | folded(program.terms[t])) for t in terms]
    return 0 in sizes, sum(sizes)


class _Trial:
    """One e-graph of left sides, with the rule applied."""

    def __init__(self, rule: Rule, rules: RuleSet, seed: int) -> None:
        self.rule, self.rng = rule, random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.program = Program([ir.Index(f"{name}{letter}", n) for name, g in GROUPS.items() for letter, n in zip("ijklm", g.extents)])
        self.support = patterns.supports(rule, rules)
        builds_on = [r.sound for r in self.support if claims(r)]
        self.claim = max([rule.sound, *builds_on], key=CLAIMS.index)
        self.heads = stated_heads(rule)
        self.tested = dict.fromkeys(self.heads, 0)
        self.matches = 0
        self._draw(rules, seed)
        self.classes = self._apply(rules)

    def _draw(self, rules: RuleSet, seed: int) -> None:
        whole = Program(list(self.program.indices))
        axes = tuple((i,) for i in range(len(whole.indices)))
        whole.inputs.append(ir.Buffer("x", whole.shape(axes), np.dtype(bool)))
        whole.outputs = [_output(whole, whole.add(ir.Input(np.dtype(bool), 0, axes)))]
        self.drawn = Drawn(Builder(self.program, Encoder(whole, rules.own)))
        self.everything = self.drawn.builder.leaf((1 << len(whole.indices)) - 1, "bool")  # so that each index has the same bit everywhere
        generator, universe = Generator(self.rule, rules, self.drawn, seed, self.claim == "bitwise"), iter(range(len(whole.indices)))
        for name, group in GROUPS.items():
            indices = [next(universe) for _ in group.extents]
            if (name != "empty" or generator.folds) and (name not in ("long", "around") or patterns.names_indices(self.rule, rules.own)):
                generator.fill(name, indices, group.wanted, group.dtypes, group.about)

    def _apply(self, rules: RuleSet) -> Classes:
        terms = self.drawn.terms
        leaves = [t for t in terms.values() if not children(self.program.terms[t])]
        used = {t for t in terms if t < len(self.program.terms)} | {*leaves, self.everything}
        self.program.outputs = [_output(self.program, t) for t in sorted(used)]
        meant = list(meanings(self.rule, rules))
        texts = [
            *rules.declarations,
            *((r.place, r.text) for r in self.support),
            *telling(self.rule, rules),
            ("meaning", "(ruleset meaning)"),
            *meant,
        ]
        trees = [form.tree for place, text in texts for form in read_forms(text, place)]
        maps = language.elementwise_used(trees) | arities()
        given = rules.given & {r.name for r in (*self.support, self.rule)}
        with closing(session(replace(rules, given=given))) as where:
            graph = EGraph(self.program, texts, maps, 0, Limits().unrolled_elements, rules.own, where)
            graph.add(self.drawn.nodes)
            rounds = ROUNDS + min(len(self.support), patterns.DEPTH)
            steps = ("analysis", *("simplify", "analysis", "explore", "analysis") * rounds, "simplify", "analysis", "splitting")
            for ruleset in (*steps, "meaning") if meant else steps:
                self._run(graph, ruleset)
            return graph.classes([CLAIMED, MEANT, *(prefix + head for prefix in (TOLD, TESTED) for head in self.heads)])

    def _run(self, graph: EGraph, ruleset: str) -> None:
        for _ in range(20 if ruleset in ("analysis", "splitting") else 1):
            if graph.rows() > MOST_ROWS:
                break
            updated, matches = graph.step(ruleset)
            self.matches += sum(n for name, n in matches.items() if name.removesuffix("<=") == self.rule.name)
            if not updated:
                break

    def differences(self) -> Iterator[Difference | None]:
        """Each comparison made: the difference, or None."""
        self.terms_of: dict[int, list[int]] = {}
        for key, t in self.drawn.terms.items():
            self.terms_of.setdefault(self.classes.class_of[key], []).append(t)
        yield from self._equal()
        yield from self._facts()

    # what the rule makes equal

    def _equal(self) -> Iterator[Difference | None]:
        one = self._representatives()
        pairs: dict[tuple[str, str], dict[tuple[int, int], None]] = {}
        weak = FACT if self.claim == "bitwise" else self.claim
        for relation, claim in ((CLAIMED, self.claim), (MEANT, weak)):
            for c in dict.fromkeys(row[0] for row in self.classes.told[relation]):
                if c not in one:
                    continue
                left = self.terms_of.get(c, [one[c]])[-1]
                try:
                    others = self._others(c, left, one)
                except NotTaken:
                    continue
                except IllFormed as error:
                    yield self._shown(f"it makes what has no meaning: {error}", left, None, {}, 0)
                    return
                for t in others:
                    if self._computable(left) and self._computable(t):
                        pairs.setdefault((claim, self._group(left, t)), {})[left, t] = None
        for (claim, group), some in pairs.items():
            yield from self._compare(list(some), claim, GROUPS[group].kinds)

    def _others(self, c: int, left: int, one: Mapping[int, int]) -> list[int]:
        """The terms that a term of a class must equal: those of the other nodes. Where all nodes are one term, that is itself."""
        made = [t for node in self.classes.nodes[c] if (t := self._build(node, one)) is not None]
        drawn = self.terms_of.get(c, ())
        rest = [t for t in dict.fromkeys(made) if t not in drawn]
        self.rng.shuffle(rest)
        others = [t for t in (*drawn, *rest[:MOST_OTHERS]) if t != left]
        return others or [left] * (len(made) > 1 or len(self.classes.nodes[c]) == 1)

    def _representatives(self) -> dict[int, int]:
        """A term of each class: the smallest drawn where there is one, else that of the first node whose operands have terms."""
        one = {c: terms[0] for c, terms in self.terms_of.items()}
        self.meaningless: dict[int, str] = {}
        missing = [c for c in range(len(self.classes.nodes)) if c not in one]
        while True:
            before = len(one) + len(self.meaningless)
            for c in missing:
                for node in self.classes.nodes[c]:
                    try:
                        term = self._build(node, one)
                    except IllFormed as error:
                        self.meaningless.setdefault(c, str(error))
                        continue
                    if term is not None:
                        one[c] = term
                        self.meaningless.pop(c, None)
                        break
            missing = [c for c in missing if c not in one]
            if len(one) + len(self.meaningless) == before:
                return one

    def _build(self, node: Node, one: Mapping[int, int]) -> int | None:
        for c in node.children:
            if c not in one and c in self.meaningless:
                raise IllFormed(self.meaningless[c])
        if node.constructor in ("Leaf", "Block") or not all(c in one for c in node.children):
            return None
        return self.drawn.builder.term(node, [one[c] for c in node.children])

    def _compare(self, pairs: Sequence[tuple[int, int]], claim: str, kinds: Sequence[str]) -> Iterator[Difference | None]:
        program, wanted = self.program, sorted({t for pair in pairs for t in pair})
        args = arguments(program, kinds, self.numbers, wanted)
        values = evaluated(program, args, wanted, len(kinds))
        for left, right in pairs:
            dtypes = [program.terms[t].dtype for t in (left, right)]
            if dtypes[0] != dtypes[1]:
                found = f"the left side is {dtypes[0]}, the right side {dtypes[1]}", 0
                yield self._shown(found[0], left, right, args, 0)
                continue
            free = program.free[left] | program.free[right]  # a side may depend on an index along which it is constant
            sides = [over(program, values.of[t], program.free[t], free) for t in (left, right)]
            scale, finite = np.maximum(values.scale[left], values.scale[right]), values.finite[left] & values.finite[right]
            wrong = first_difference(claim, sides[0], sides[1], scale, finite, kinds, whole=not self._empty(left))
            if wrong is not None and claim not in ("bitwise", FACT):
                slack = moved(program, args, [left, right], sides)
                wrong = first_difference(claim, sides[0], sides[1], scale, finite, kinds, whole=not self._empty(left), slack=slack)
            yield None if wrong is None else self._shown(wrong[0], left, right, args, wrong[1])

    # what it states

    def _facts(self) -> Iterator[Difference | None]:
        drawn = [t for terms in self.terms_of.values() for t in terms]
        class_of = {t: c for c, terms in self.terms_of.items() for t in terms}

        def related(pairs: Mapping[int, frozenset[int]]) -> dict[int, list[int]]:
            return {t: [r for c in sorted(pairs[class_of[t]]) for r in self.terms_of.get(c, ())] for t in drawn if class_of[t] in pairs}

        streams = Streams(self.program, related(self.classes.levels), related(self.classes.places))
        facts = Facts(self.program, self.terms_of, streams, self.numbers, self.claim)
        for head in self.heads:
            if head not in BUILT_IN:
                self.tested[head] += len(self.classes.told.get(TESTED + head, ()))
                continue
            rows = list(dict.fromkeys(self.classes.told[TOLD + head]))
            self.rng.shuffle(rows)
            done = 0
            for row in rows:
                terms = self.terms_of.get(row[0], [])
                if done < MOST_FACTS and all(map(self._computable, terms)) and not any(map(self._empty, terms)):
                    found = list(facts.check(head, row, GROUPS[self._group(*terms)].kinds))
                    done += bool(found)
                    self.tested[head] += len(found)
                    yield from (None if checked is None else self._shown(*checked) for checked in found)

    # about terms

    def _spans(self, t: int) -> int:
        """All indices over which a term, or something that it is made of, is computed."""
        found = 0
        for u in below(self.program, [t]):
            found |= self.program.free[u] | folded(self.program.terms[u])
        return found

    def _group(self, *terms: int) -> str:
        """The group of indices that terms are about."""
        first = next((i for t in terms for i in bits(self._spans(t))), 0)
        return list(GROUPS)[first // 5]

    def _empty(self, t: int) -> bool:
        """Whether anything is folded over nothing on the way to a term."""
        return not self.program.extent(self._spans(t))

    def _computable(self, t: int) -> bool:
        """Whether nothing on the way to a term has too many elements."""
        program = self.program
        return all(program.extent(program.free[u] | folded(program.terms[u])) <= 4 * MOST_ELEMENTS for u in below(program, [t]))

    def _shown(self, what: str, left: int | None, right: int | None, args: Mapping[int, Any], sample: int) -> Difference:
        """A difference in a program whose indices have short names."""
        used = 0
        for t in (left, right):
            used |= 0 if t is None else self._spans(t)
        names = dict(zip(bits(used), "ijklmnopqrstuvwxyz"))
        program = replace(
            self.program, indices=[ir.Index(names.get(i, index.name), index.extent) for i, index in enumerate(self.program.indices)]
        )
        return Difference(what, program, left, right, {slot: array[sample] for slot, array in args.items()})


def _output(program: Program, t: int) -> ir.Output:
    return ir.Output(t, tuple((i,) for i in bits(program.free[t])))
