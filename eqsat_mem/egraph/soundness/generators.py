"""Left sides of rules filled in at random: indices, dtypes and constants for variables, leaves for terms of which nothing is said.

One left side is drawn in every dtype, by the same random numbers, and kept where its guards are met.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import jax.numpy as jnp
import numpy as np

from eqsat_mem import ir
from eqsat_mem.egraph import language
from eqsat_mem.egraph.encode import Node
from eqsat_mem.egraph.language import COMPARISONS, primitive_of, roles
from eqsat_mem.egraph.rule_files import Rule, RuleSet
from eqsat_mem.egraph.soundness import guards, opaque_leaves, patterns
from eqsat_mem.egraph.soundness.builder import Builder, IllFormed, dtype_name, folds, takes_one_dtype
from eqsat_mem.egraph.soundness.instrument import stated_heads
from eqsat_mem.egraph.soundness.patterns import App, Shape
from eqsat_mem.egraph.soundness.values import kind
from eqsat_mem.errors import RuleError
from eqsat_mem.ir import mask_of
from eqsat_mem.ir.ops import MONOIDS

FLOATS = ("float32", "float64", "bfloat16", "float16")
SOME_DTYPES = (
    (*FLOATS, "int32", "uint8", "bool", "int8", "uint32", "complex64"),
    (*FLOATS, "int8", "uint32", "bool", "int64", "uint8", "complex64"),
    (*FLOATS, "int32", "uint16", "bool", "int16", "uint64", "complex128"),
)
"""Dtypes of left sides, by turns: all floats, and integers of several widths."""
NARROW = ("bfloat16", "uint8", "int8", "bool", "float32")
"""Dtypes that cannot count far, for long indices."""
NUMBERS = (0.0, 1.0, 2.0, -1.0, 0.5, -3.0, 3.0, 0.1)
MOST_ELEMENTS = 70_000
"""Of anything that a left side computes."""
DEEPEST, CHOSEN = 12, 2
"""Terms inside each other, and the operand of a selection that is taken where its condition holds."""
SHAPES = 12
"""Ways of tracing the premises of a rule back to terms."""
TRIES = 80
"""Left sides tried for each that is wanted, in vain; a rule whose guards are hardly ever met is tried as often in all as it has to."""
MISSES = 160
"""Left sides tried in a row, in vain, before a group of indices is given up."""
HOPELESS = 16
"""Left sides tried in one dtype, in vain, before others are tried first; what is found in those is drawn in that dtype too."""
KEYS = 1_000_000
"""The first key of nodes that are no terms of the program."""
SMALL = {"Neg", "Mul", "Max"}
"""Constructors of the terms that stand for anything, besides folds and contractions."""


@dataclass
class Drawn:
    """All left sides of one e-graph: nodes by key, the terms of nodes, and which group of indices and dtype each was drawn for."""

    builder: Builder
    nodes: dict[Node, int] = field(default_factory=dict)
    terms: dict[int, int] = field(default_factory=dict)
    groups: dict[int, str] = field(default_factory=dict)

    def add(self, draw: Draw, group: str) -> None:
        """Take a left side in."""
        self.nodes |= draw.nodes
        self.terms |= draw.terms
        self.groups |= {key: group for key in draw.terms if key not in self.groups}


class Generator:
    """A generator of left sides of one rule."""

    def __init__(self, rule: Rule, rules: RuleSet, drawn: Drawn, seed: int, corners: bool) -> None:
        self.drawn, self.seed, self.corners = drawn, seed, corners
        self.places = language.PLACES in stated_heads(rule)
        self.tries: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        rng = random.Random(seed)
        shapes = (patterns.shape(rule, rules, rng) for _ in range(TRIES))
        self.shapes = list(islice((shape for shape in shapes if shape is not None), SHAPES))
        own = drawn.builder.encoder.own
        self.folds = any("set" in roles(term.head, 0, own) for shape in self.shapes for term in shape.terms)

    def fill(self, group: str, universe: Sequence[int], wanted: int, dtypes: Sequence[Sequence[str]], about: range) -> None:
        """Draw so many left sides over some indices, each in every dtype that its operations and guards allow.

        Where left sides name index sets, one of these has an extent in ``about``.
        """
        found = missed = 0
        for attempt in range(TRIES * wanted):
            if found == wanted or missed == MISSES or not self.shapes:
                break
            missed += 1
            seed = f"{self.seed} {group} {attempt}"
            allowed = dtypes[found % len(dtypes)]
            hopeful = [dtype for dtype in allowed if self.hits[dtype] or self.tries[dtype] < HOPELESS] or allowed
            dtype = hopeful[attempt % len(hopeful)]
            self.tries[dtype] += 1
            first = self._draw(seed, universe, dtype, about)
            if first is None or not first.fits():
                continue
            found, missed = found + 1, 0
            self.hits[dtype] += 1
            for dtype in allowed:
                draw = self._draw(seed, universe, dtype, about)
                if draw is not None:
                    self.drawn.add(draw, group)

    def _draw(self, seed: str, universe: Sequence[int], dtype: str, about: range) -> Draw | None:
        rng = random.Random(seed)
        draw = Draw(self.shapes[int(rng.random() * len(self.shapes))], self.drawn, rng, dtype, universe, about, self.corners)
        draw.places = self.places or language.PLACES in draw.shape.functions
        try:
            draw.fill()
        except IllFormed:
            return None
        return draw if guards.met(draw.shape, draw) else None


class Draw:
    """One left side in the making: the values of its variables, and the nodes that it needs besides those that are there."""

    def __init__(
        self, shape: Shape, drawn: Drawn, rng: random.Random, dtype: str, universe: Sequence[int], about: range, corners: bool
    ) -> None:
        self.shape, self.drawn, self.rng, self.dtype, self.universe, self.corners = shape, drawn, rng, dtype, universe, corners
        self.builder, self.program = drawn.builder, drawn.builder.program
        self.about = about
        self.usual = [i for i in universe if self.program.indices[i].extent in about]
        self.nodes: dict[Node, int] = {}
        self.terms: dict[int, int] = {}
        self.values: dict[Any, Any] = {}
        self.made: dict[int, int] = {}
        self.leaves: list[tuple[str, int]] = []
        self.extents: set[int] = set()
        self.roots: list[int] = []
        self.free = {shape.resolve(term): shape.resolve(name) for name, term in shape.free}
        self.dtypes = {shape.resolve(term): name for term, name in shape.dtypes}
        self.sets: dict[Any, int] = {}
        self.places = False
        self.last = self._pick(universe)
        self.density = self._pick((0.25, 0.45, 0.65, 0.85))

    def fill(self) -> None:
        """Make the terms that must be there.

        Raises:
            IllFormed: if this draw has no meaning.
        """
        self.roots = [self._term(root, self.dtype, 0) for root in self.shape.roots or [("e", 0)]]

    def fits(self) -> bool:
        """Whether an index set that is named, if there is one, has one of the extents asked for, and there is anything to compare."""
        elements = max(self.program.extent(self.program.free[self._term_of(root)]) for root in self.roots)
        return elements > 0 and (not self.extents or not self.extents.isdisjoint(self.about))

    # what guards ask (guards.Terms)

    def bound(self, variable: Any) -> Any:
        found = self.shape.resolve(variable)
        if isinstance(found, App):
            return self.made.get(id(found), guards.UNKNOWN)
        return guards.value(found, 0, self) if isinstance(found, str) else self.values.get(found, guards.UNKNOWN)

    def bind(self, variable: Any, value: Any) -> None:
        self.values.setdefault(self.shape.resolve(variable), value)

    def property(self, name: str, term: Any) -> Any:
        t = self.terms.get(term, self.drawn.terms.get(term, term))
        if not 0 <= t < len(self.program.terms):
            return guards.UNKNOWN
        return self.builder.encoder.bits_of(self.program.free[t]) if name == "free" else dtype_name(self.program.terms[t].dtype)

    def extent(self, mask: int) -> float:
        try:
            return float(self.program.extent(self.builder.encoder.indices_of(mask)))
        except RuleError:
            return 0.0

    # terms

    def _pick(self, options: Sequence[Any]) -> Any:
        """One of several; as many random numbers are used up whatever they are."""
        return options[int(self.rng.random() * len(options))]

    def _term(self, term: Any, dtype: str, depth: int) -> int:
        term = self.shape.resolve(term)
        if not isinstance(term, App):
            if term not in self.values:
                self.values[term] = self._anything(dtype) if term not in self.free else self._with_indices(self.free[term], dtype)
            return int(self.values[term])
        if depth > DEEPEST:
            raise IllFormed("a term that contains itself")
        arguments = [self._argument(term, k, role, dtype, depth) for k, role in enumerate(self._roles(term.head, len(term.args)))]
        self.made[id(term)] = self._node(term.head, arguments)
        return self.made[id(term)]

    def _node(self, head: str, args: Sequence[Any]) -> int:
        meanings = self._roles(head, len(args))
        payload = tuple(a for a, role in zip(args, meanings) if role != "T")
        operands = tuple(a for a, role in zip(args, meanings) if role == "T")
        node = Node(head, payload, operands)
        self.extents |= {int(self.extent(mask)) for mask, role in zip(args, meanings) if role in ("set", "index")}
        known = self.nodes.get(node, self.drawn.nodes.get(node))
        if known is not None:
            return known
        term = self.builder.term(node, [self._term_of(c) for c in operands])
        if self.program.extent(self._spans(term)) > MOST_ELEMENTS:
            raise IllFormed("more elements than can be judged")
        key = KEYS + len(self.drawn.nodes) + len(self.nodes)
        self.nodes[node], self.terms[key] = key, term
        return key

    def _term_of(self, key: int) -> int:
        return self.terms[key] if key in self.terms else self.drawn.terms[key]

    def _spans(self, t: int) -> int:
        """The indices over which a term is computed."""
        term = self.program.terms[t]
        over = ir.folded(term)
        for c in ir.children(term):
            over |= self.program.free[c]
        return over | self.program.free[t]

    def _roles(self, head: str, arity: int) -> tuple[str, ...]:
        return roles(head, arity, self.builder.encoder.own)

    def _argument(self, app: App, k: int, role: str, dtype: str, depth: int) -> Any:
        arg = self.shape.resolve(app.args[k])
        if role == "T":
            if self.places and app.head == "Select" and k == CHOSEN and isinstance(arg, tuple) and arg not in self.values:
                self.values[arg] = self._place(dtype)
            return self._term(arg, self._operand_dtype(app, k, dtype), depth + 1)
        if isinstance(arg, str):
            return _atom(arg, role)
        if arg not in self.values:
            role = "index" if arg in self.shape.single(self.builder.encoder.own) else role
            defined = self._defined(arg)
            self.values[arg] = self._constant(role, dtype) if defined is guards.UNKNOWN else defined
        return self.values[arg]

    def _defined(self, variable: Any) -> Any:
        """The constant that a premise defines, as far as it can be computed by now."""
        for name, tree, use in self.shape.definitions:
            if self.shape.resolve(name) == variable:
                found = guards.value(tree, use, self)
                if found is not guards.UNKNOWN:
                    return found
        return guards.UNKNOWN

    def _operand_dtype(self, app: App, k: int, dtype: str) -> str:
        """The dtype that an operand is to have for its operation to have ``dtype``."""
        key = "operands of", id(app)
        if app.head == "Select" and k == 0:
            return "bool"
        if app.head == "Take" and k == 1:
            return "int32"
        if app.head in COMPARISONS:
            other = self._pick((self.dtype, self.dtype, "float32", "int32"))
            return str(self.values.setdefault(key, "float32" if dtype == "bool" == other and app.head == "IsFinite" else other))
        if app.head == "Convert":
            some = self._pick([d for some in SOME_DTYPES for d in some])
            return str(self.values.setdefault(key, self.dtypes.get(self.shape.resolve(app.args[k]), some)))
        if app.head in ("Real", "Imag"):
            return "complex128" if dtype == "float64" else "complex64"
        if app.head == "Complex":
            return "float64" if dtype == "complex128" else "float32"
        operation = self.builder.encoder.own.get(app.head)
        if operation is not None and k - len(operation.dimensions) != operation.dtype and not takes_one_dtype(operation, dtype):
            return str(self._pick(SOME_DTYPES[0]))
        return dtype

    def _constant(self, role: str, dtype: str) -> Any:
        match role:
            case "set":
                size = self._pick((0, 1, 1, 1, 1, 2, 2, 3))
                unusual = 0.0 if self.rng.random() < 0.3 else 1.0
                shuffled = sorted(self.universe, key=lambda i: self.rng.random() + unusual * (i not in self.usual))
                return self.builder.encoder.bits_of(mask_of(shuffled[:size]))
            case "index":
                alike = self.rng.random() < 0.8
                self.last = self._pick(self._alike() if alike else self.usual if self.rng.random() < 0.5 else self.universe)
                return self.builder.encoder.bits_of(1 << self.last)
            case "monoid":
                names = sorted(MONOIDS, key=lambda name: self.rng.random())
                return next(name for name in names if folds(name, dtype))
            case "number":
                return self._number(dtype)
            case "power":
                return self._pick((-2, -1, 0, 1, 2, 3, 4))
            case "position":
                return self._pick(("int32", dtype if dtype != "bool" else "int32"))
        return dtype

    def _number(self, dtype: str) -> float:
        """A literal as a program may hold it: a number of its dtype."""
        shuffled, corner, far = sorted(NUMBERS, key=lambda _: self.rng.random()), self.rng.random() < 0.2, self.rng.random()
        of = kind(dtype)
        if self.places and far < 0.8 and of in "if":
            return 100.0  # no place among so few elements
        if of == "c":
            raise IllFormed("rules see no complex numbers")
        if of == "f":
            ends = [float(x) for x in (jnp.finfo(dtype).max, jnp.finfo(dtype).tiny, np.inf, -np.inf)]
            return ends[int(far * len(ends))] if corner and self.corners else float(np.dtype(dtype).type(shuffled[0]))
        if of == "b":
            return float(shuffled[0] > 0)
        info = np.iinfo(dtype)
        return next(n for n in shuffled if n == int(n) and info.min <= n <= info.max)

    def _alike(self) -> Sequence[int]:
        """The indices of the extent of the one drawn last, for constructors that take two of one extent."""
        indices = self.program.indices
        return [i for i in self.universe if i != self.last and indices[i].extent == indices[self.last].extent] or self.universe

    def _anything(self, dtype: str) -> int:
        """A leaf, or a small term of leaves; now and then one that stands there already."""
        again, small, which = (self.rng.random() for _ in range(3))
        alike = [leaf for of, leaf in self.leaves if of == dtype]
        if alike and again < 0.12:
            return alike[int(which * len(alike))]
        if small > 0.96 and kind(dtype) in "iuf":
            return self._node("Iota", [self._constant("index", dtype), dtype])
        if small < 0.2:
            head = ("Neg", "Mul", "Max", "Fold", "Dot")[int(which * 5)]
            constants = [self._constant(role, dtype) for role in {"Fold": ["monoid", "set"], "Dot": ["set"]}.get(head, [])]
            return self._node(head, [*constants, *(self._leaf(dtype) for _ in range(1 if head in ("Neg", "Fold") else 2))])
        return self._leaf(dtype)

    def _place(self, dtype: str) -> int:
        """Positions; or a number before all of them, as of what is not a number."""
        if kind(dtype) not in "if":
            raise IllFormed("no places")
        if self.rng.random() < 0.3:
            return self._node("Lit", [-3.0, dtype])
        return self._node("Iota", [self._constant("index", dtype), dtype])

    def _with_indices(self, name: Any, dtype: str) -> int:
        """A term that depends on the indices that premises have a name for: the same wherever they use it."""
        if name in self.sets:
            return self._leaf(dtype, self.sets[name])
        new = self._anything(dtype)
        self.sets[name] = self.program.free[self._term_of(new)]
        return new

    def _leaf(self, dtype: str, free: int | None = None) -> int:
        if free is None:
            free = mask_of(i for i in self.universe if self.rng.random() < (0.85 if self.places else self.density))
        if self.program.extent(free) > MOST_ELEMENTS:
            raise IllFormed("more elements than can be judged")
        asked, leaf = self.shape.functions, self.builder.leaf(free, dtype)
        if "summed" in asked and dtype in ("float64", "float32"):
            leaf = opaque_leaves.contraction(self.builder, free, "float32" if dtype == "float64" else "bfloat16", dtype)
        if "combined" in asked and dtype in FLOATS and free:
            leaf = opaque_leaves.combination(self.builder, leaf, free, dtype)
        if "selected" in asked and dtype in FLOATS and free:
            leaf = opaque_leaves.selection(self.builder, leaf, free, dtype)
        if "searched" in asked and dtype == "int32" and free:
            leaf = opaque_leaves.search(self.builder, free)
        self.terms[leaf] = leaf
        self.leaves.append((dtype, leaf))
        return leaf


def _atom(text: str, role: str) -> Any:
    if role in ("monoid", "dtype", "position"):
        return text.strip('"')
    return float(text) if role == "number" else int(text)


def arities() -> dict[str, int]:
    """The elementwise constructors that stand for anything, with their arities."""
    return {name: 1 if name == "Neg" else 2 for name in sorted(SMALL) if name in primitive_of()}
