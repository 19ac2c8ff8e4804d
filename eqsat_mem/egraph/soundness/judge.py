"""Whether a rule says what is true: its left side at random, both sides evaluated, and the difference judged by what its card claims.

egglog itself decides where a rule matches and what it then says: left sides drawn at random
(:mod:`eqsat_mem.egraph.soundness.generators`) stand in an e-graph with the rule, and with those that state the facts it
asks for. Afterwards all nodes of a class must have one value.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from eqsat_mem import ir
from eqsat_mem.egraph.encode import Encoder, Node
from eqsat_mem.egraph.engine import Classes, EGraph
from eqsat_mem.egraph.language import Own
from eqsat_mem.egraph.online_folds import chain, squares, with_higher_level
from eqsat_mem.egraph.rule_files import Rule, RuleSet
from eqsat_mem.egraph.saturate import Limits
from eqsat_mem.egraph.soundness import patterns
from eqsat_mem.egraph.soundness.compare import KINDS, first_difference
from eqsat_mem.egraph.soundness.generators import Builder, Draw, IllFormed, arities
from eqsat_mem.egraph.soundness.sample_values import values_of
from eqsat_mem.egraph.soundness.sequential_interpreter import Sequential
from eqsat_mem.egraph.soundness.split_checks import wrong_piece
from eqsat_mem.errors import RuleError
from eqsat_mem.ir import Program, bits, children
from eqsat_mem.ir.interpreter import evaluate
from eqsat_mem.ir.ops import call_on, named_axes, operation_of

EXTENTS = ((3, 2, 4, 3, 2), (1, 3, 3, 2, 1), (4, 4, 1, 2, 3))
"""Extents of the indices of left sides, one e-graph each: equal ones among them, for diagonals, and ones."""
DRAWS = 48
"""Left sides drawn per e-graph."""
ENOUGH = 12
"""Comparisons per e-graph after which the others are left out."""
ROUNDS = 2
"""Steps of the rules that explore, besides one for each rule that states a fact for the next."""
MOST_ROWS = 6_000


CLAIMS = ("bitwise", "reassociate", "real", "guarded", "approx")
"""From strong to weak. A rule that builds on what another makes equal is held to the weaker claim of the two."""


@dataclass(frozen=True)
class Difference:
    """Two terms that a rule says are equal and that differ.

    ``left`` and ``right`` are terms of ``program``, ``args`` its arguments. There is no ``right`` where the right side means nothing, or
    where pieces of the left side differ from the whole.
    """

    what: str
    program: Program
    left: int | None
    right: int | None
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Verdict:
    """What was found of one rule: ``compared`` pairs of values, in ``matches`` matches; ``wrong`` is the first difference, if any."""

    rule: Rule
    matches: int
    compared: int
    wrong: Difference | None = None
    error: str = ""

    @property
    def status(self) -> str:
        """ "wrong", "right", or "unchecked" where no left side was found that the rule matches."""
        return "wrong" if self.wrong or self.error else "right" if self.matches else "unchecked"

    def summary(self) -> str:
        """What was compared, or what is wrong, in one line."""
        if self.error or self.wrong:
            return self.error or str(self.wrong and self.wrong.what)
        if not self.matches:
            return "no left side drawn at random meets its premises and guards"
        return f"{self.matches} matches, {self.compared} comparisons"


def judge(rule: Rule, rules: RuleSet, seed: int = 0) -> Verdict:
    """Check one rule of ``rules`` on random left sides. The same seed draws the same.

    Of several differences in one e-graph, the verdict has the smallest.
    """
    matches = compared = 0
    with jax.enable_x64(True):
        for number, extents in enumerate(EXTENTS):
            try:
                trial = _Trial(rule, rules, extents, seed * len(EXTENTS) + number)
            except RuleError as error:
                return Verdict(rule, matches, compared, error=str(error))
            found = list(trial.differences())
            matches, compared = matches + trial.matches, compared + len(found)
            wrong = [difference for difference in found if difference is not None]
            if wrong:
                return Verdict(rule, matches, compared, min(wrong, key=_elements))
    return Verdict(rule, matches, compared)


def _elements(difference: Difference) -> int:
    """How much there is to look at in a difference."""
    program = difference.program
    program.outputs = [_output(program, t) for t in (difference.left, difference.right) if t is not None]
    return sum(program.extent(program.free[t]) for t in program.reachable())


class _Trial:
    """One e-graph of left sides, with the rule applied."""

    def __init__(self, rule: Rule, rules: RuleSet, extents: Sequence[int], seed: int) -> None:
        self.rule = rule
        self.rng, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.program = Program([ir.Index("ijklm"[k], n) for k, n in enumerate(extents)])
        self.builder = Builder(self.program, _encoder(extents, rules.own))
        self.nodes: dict[Node, int] = {}
        self.terms: dict[int, int] = {}
        self.states_facts = all(patterns.is_fact(actions) for _, actions in patterns.directions(rule))
        self._draw(rules)
        self.classes = self._apply(rules)

    def _draw(self, rules: RuleSet) -> None:
        for _ in range(DRAWS):
            shape = patterns.shape(self.rule, rules, self.rng)
            if shape is None:
                continue
            dtype = self.rng.choice(("float32", "float64", "float32", "float64", "int32", "bool"))
            try:
                Draw(shape, self.builder, self.rng, self.nodes, self.terms, dtype).fill()
            except IllFormed:
                continue

    def _apply(self, rules: RuleSet) -> Classes:
        leaves = [t for t in self.terms.values() if not children(self.program.terms[t])]
        used = {t for t in self.terms if t < len(self.program.terms)} | set(leaves)
        self.program.outputs = [_output(self.program, t) for t in sorted(used)]
        support = patterns.supports(self.rule, rules)
        builds_on = [r.sound for r in support if not all(patterns.is_fact(actions) for _, actions in patterns.directions(r))]
        self.claim = max([self.rule.sound, *builds_on], key=CLAIMS.index)
        texts = [
            *rules.declarations,
            *((r.place, r.text) for r in (*support, self.rule)),
            ("meaning", "(ruleset meaning)"),
            *rules.meanings,
        ]
        graph = EGraph(self.program, texts, dict(rules.maps) | arities(), 0, Limits().unrolled_elements, rules.own)
        for node, key in self.nodes.items():
            graph.add(key, node)
        self.matches = 0
        rounds = ROUNDS + min(len(support), patterns.DEPTH)
        steps = ("analysis", *("simplify", "analysis", "explore", "analysis") * rounds, "simplify", "analysis", "splitting")
        for ruleset in (*steps, "meaning") if self.states_facts else steps:
            self._run(graph, ruleset)
        return graph.classes()

    def _run(self, graph: EGraph, ruleset: str) -> None:
        for _ in range(20 if ruleset in ("analysis", "splitting") else 1):
            if graph.rows() > MOST_ROWS:
                break
            updated, matches = graph.step(ruleset)
            self.matches += sum(n for name, n in matches.items() if name.removesuffix("=>").removesuffix("<=") == self.rule.name)
            if not updated:
                break

    def differences(self) -> Iterator[Difference | None]:
        """Each comparison made: the difference, or None."""
        if not self.matches:
            return
        one, written = self._representatives(), self._written()
        pairs: dict[tuple[int, int], None] = {}
        for c, nodes in enumerate(self.classes.nodes):
            for node in nodes:
                try:
                    other = self._build(node, one)
                except IllFormed as error:
                    left = written.get(c, one.get(c))
                    yield Difference(f"it makes what has no meaning: {error}", self.program, left, None, ())
                    return
                if other is not None and c in one:
                    pairs[written.get(c, one[c]), other] = None
        for key, t in self.terms.items():
            pairs[written[self.classes.class_of[key]], t] = None
        different = [(left, right) for left, right in pairs if left != right]
        self.rng.shuffle(different)
        yield from self._compare(different[:ENOUGH])
        yield from self._pieces()
        yield from self._rescaled()
        yield from self._about_means()

    def _written(self) -> dict[int, int]:
        """The left side that stands in each class: the largest drawn, of which others are operands."""
        return {self.classes.class_of[key]: t for key, t in self.terms.items()}

    def _representatives(self) -> dict[int, int]:
        """A term of each class: the smallest drawn where there is one, else that of the first node whose operands have terms."""
        one: dict[int, int] = {}
        for key, t in self.terms.items():
            one.setdefault(self.classes.class_of[key], t)
        missing = [c for c in range(len(self.classes.nodes)) if c not in one]
        while True:
            before = len(missing)
            for c in missing:
                for node in self.classes.nodes[c]:
                    try:
                        term = self._build(node, one)
                    except IllFormed:
                        continue
                    if term is not None:
                        one[c] = term
                        break
            missing = [c for c in missing if c not in one]
            if len(missing) == before:
                return one

    def _build(self, node: Node, one: dict[int, int]) -> int | None:
        if node.constructor in ("Leaf", "Block") or not all(c in one for c in node.children):
            return None
        return self.builder.term(node, [one[c] for c in node.children])

    def _compare(self, pairs: Sequence[tuple[int, int]]) -> Iterator[Difference | None]:
        program = self.program
        args = values_of(program, self.numbers, KINDS)
        values = _evaluate(program, args, [t for pair in pairs for t in pair])
        for left, right in pairs:
            what = self._dtypes_differ(left, right) or self._judge(left, right, values)
            if what is None:
                yield None
            else:
                text, sample = what
                yield Difference(text, program, left, right, tuple(a[sample] for a in args))

    def _dtypes_differ(self, left: int, right: int) -> tuple[str, int] | None:
        dtypes = [self.program.terms[t].dtype for t in (left, right)]
        return None if dtypes[0] == dtypes[1] else (f"the left side is {dtypes[0]}, the right side {dtypes[1]}", 0)

    def _judge(self, left: int, right: int, values: _Values) -> tuple[str, int] | None:
        """Both sides over the indices of either: a side may depend on an index along which it is constant."""
        claim = "fact" if self.states_facts and not (self.classes.levels or self.classes.means) else self.claim
        free = [self.program.free[t] for t in (left, right)]
        sides = [_broadcast(self.program, values.of[t], have, free[0] | free[1]) for t, have in zip((left, right), free)]
        scale = np.maximum(values.scale[left], values.scale[right])
        return first_difference(claim, sides[0], sides[1], scale, values.finite[left] & values.finite[right])

    def _pieces(self) -> Iterator[Difference | None]:
        """What splitting rules state, done: slices and chunks instead of the whole."""
        facts = self.classes.facts
        if not any(facts.values()):
            return
        args = values_of(self.program, self.numbers, KINDS)
        done = 0
        for key, t in self.terms.items():
            c = self.classes.class_of[key]
            stated = {name: table[c] for name, table in facts.items() if c in table}
            if stated and children(self.program.terms[t]) and done < ENOUGH * 2:
                done += 1
                values = {} if isinstance(self.program.terms[t], ir.Block) else _evaluate(self.program, args, [t]).of
                what = wrong_piece(self.program, t, stated, values, self.rule.sound)
                yield None if what is None else Difference(what[0], self.program, t, None, tuple(a[what[1]] for a in args))

    def _rescaled(self) -> Iterator[Difference | None]:
        """What is shrunk by a level, as the stage after extraction uses it: with a higher level it is less by an exponential.

        By an extreme: with one that no element is, it is nothing.
        """
        program, term_of = self.program, self._written()
        classes = {t: self.classes.class_of[key] for key, t in self.terms.items()}
        levels = {t: [term_of[r] for r in self.classes.levels.get(c, ()) if r in term_of] for t, c in classes.items()}
        for t, level in [(t, level) for t, some in levels.items() for level in some][:ENOUGH]:
            known = chain(program, t, level, levels)
            dtype = program.terms[t].dtype
            if known is None or dtype != program.terms[level].dtype or dtype == np.bool_:
                continue
            if known.extreme:
                extreme = program.terms[level]
                assert isinstance(extreme, ir.Fold)
                beyond = with_higher_level(program, t, known, 1.0 if extreme.monoid == "max" else -1.0)
                zero = program.add(ir.Literal.of(dtype.type(0), dtype))
                yield from self._compare([(program.add(ir.Map(dtype, "mul", (t, zero))), beyond)])
                continue
            lower = program.add(ir.Literal.of(dtype.type(np.exp(0.5)), dtype))
            other = program.add(ir.Map(dtype, "mul", (with_higher_level(program, t, known, 0.5), lower)))
            yield from self._compare([(t, other)])

    def _about_means(self) -> Iterator[Difference | None]:
        """Squares about a mean, as the same stage uses them: from another number they are more, by its square for each of them."""
        program, term_of = self.program, self._written()
        stated = (
            (t, term_of[m]) for key, t in self.terms.items() for m in self.classes.means.get(self.classes.class_of[key], ()) if m in term_of
        )
        for t, mean in list(stated)[:ENOUGH]:
            known = squares(program, t, mean)
            if known is None:
                continue
            dtype = program.terms[t].dtype
            more = program.add(ir.Literal.of(dtype.type(0.25 * program.extent(known.mean_over)), dtype))
            yield from self._compare([(program.add(ir.Map(dtype, "add", (t, more))), with_higher_level(program, t, known, 0.5))])


@dataclass(frozen=True)
class _Values:
    """By term: its values, samples first; per sample the largest number met on the way to it, and whether none was infinite."""

    of: dict[int, np.ndarray]
    scale: dict[int, np.ndarray]
    finite: dict[int, np.ndarray]


def _evaluate(program: Program, args: Sequence[np.ndarray], wanted: Sequence[int]) -> _Values:
    """All terms that ``wanted`` need, for many samples at once: an index more, along which everything is pointwise."""
    many = program.empty_like()
    sample = many.new_index("sample", len(KINDS))
    many.inputs = [ir.Buffer(b.name, np.shape(a), b.dtype) for b, a in zip(program.inputs, args)]
    program.outputs = [_output(program, t) for t in wanted]

    def sampled(_: Program, t: int, ids: Mapping[int, int]) -> ir.Term | None:
        term = program.on(t, ids)
        if isinstance(term, ir.Input):
            return ir.Input(term.dtype, term.slot, ((sample,), *term.axes))
        if isinstance(term, ir.Block) and (own := operation_of(term.call.params)) is not None:
            named = tuple(named_axes(own, term.call).values())
            return ir.Block(term.dtype, call_on(own, named, [many.free[a] for a in term.args], term.dtype), term.args, 0)
        return None

    order = program.reachable()
    _, ids = program.rewritten(sampled, order, many)
    many.outputs = [ir.Output(ids[t], ((sample,), *((i,) for i in bits(program.free[t])))) for t in order]
    with np.errstate(all="ignore"):
        values = {t: np.asarray(v) for t, v in zip(order, evaluate(many, args, Sequential()))}
    scale: dict[int, np.ndarray] = {}
    finite: dict[int, np.ndarray] = {}
    for t in order:
        met = np.abs(values[t].astype(np.float64)).reshape(len(values[t]), -1)
        below = children(program.terms[t])
        usual = np.where(np.isfinite(met), met, 0.0).max(1, initial=0.0)
        scale[t] = np.max([usual, *(scale[c] for c in below)], axis=0)
        finite[t] = np.all([~np.isinf(met).any(1), *(finite[c] for c in below)], axis=0)
    return _Values(values, scale, finite)


def _broadcast(program: Program, values: np.ndarray, have: int, want: int) -> np.ndarray:
    """Samples over the indices ``have``, repeated along those of ``want``."""
    shape = [program.indices[i].extent for i in bits(want)]
    kept = [n if have >> i & 1 else 1 for i, n in zip(bits(want), shape)]
    return np.broadcast_to(values.reshape([len(values), *kept]), [len(values), *shape])


def _output(program: Program, t: int) -> ir.Output:
    return ir.Output(t, tuple((i,) for i in bits(program.free[t])))


def _encoder(extents: Sequence[int], own: Own) -> Encoder:
    """The bits that indices have in an e-graph of terms over all of them."""
    program = Program([ir.Index("ijklm"[k], n) for k, n in enumerate(extents)])
    axes = tuple((i,) for i in range(len(extents)))
    program.inputs.append(ir.Buffer("x", program.shape(axes), np.dtype("float32")))
    program.outputs = [_output(program, program.add(ir.Input(np.dtype("float32"), 0, axes)))]
    return Encoder(program, own)
