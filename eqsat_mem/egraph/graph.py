"""A program as an e-graph, and the e-graph read back as classes and nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from typing import Any

from eqsat_mem import ir
from eqsat_mem.egraph import language
from eqsat_mem.egraph.encode import Encoder, Node, called
from eqsat_mem.egraph.engine import Command, CopiedSession, Expression, Failure, Overrun, Panic, Row, Session
from eqsat_mem.egraph.sexpr import read_forms
from eqsat_mem.errors import RuleError
from eqsat_mem.ir import Program
from eqsat_mem.ir.precision import is_graded, of_rules, rounds, stricter


class EgglogPanic(RuleError):
    """egglog met an error of its own; the e-graph is of no more use."""


class RuleOverrun(RuleError):
    """Rules that nobody has tried yet took more time or memory than they may; the e-graph is gone."""


@dataclass(frozen=True)
class Classes:
    """The classes of an e-graph as it stands, numbered from zero.

    Their nodes, facts, levels and dtypes, the class of each key, and the rows of relations that were asked for.
    """

    nodes: list[list[Node]]
    class_of: dict[int, int]
    facts: dict[str, dict[int, int]]
    dtypes: dict[int, str]
    levels: dict[int, frozenset[int]]
    means: dict[int, frozenset[int]]
    places: dict[int, frozenset[int]]
    encoder: Encoder = field(repr=False)
    told: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)


@dataclass
class View:
    """The classes of a saturated e-graph, numbered from zero.

    Attributes:
        program: the program that was loaded.
        nodes: the nodes of each class, in an order that depends on the program and the rules only.
        class_of: the class of each reachable term of the program.
        original: the node of each of these terms.
        facts: for each of ``vocabulary.FACTS`` an index set per class, as rules stated it.
        levels: the classes r of each class that is something else times exp(-r), or where elements are the extreme r, as rules stated it.
        means: the class of the mean for each class of sums of squared differences from it, likewise.
        places: the class of the extreme for each class of places where elements are it, likewise.
        matches: how often each rule matched, in all.
        seconds: how long each rule took, in all, to a millisecond.
        rows: the size of the e-graph, which is what its time and memory grow with.
        iterations: how often the rules that explore were applied.
        stopped: why saturation ended.
        rounds_operands: whether the device rounds operands of contractions that do not ask for full precision.
    """

    program: Program
    nodes: list[list[Node]]
    class_of: dict[int, int]
    original: dict[int, Node]
    facts: dict[str, dict[int, int]]
    dtypes: dict[int, str]
    encoder: Encoder = field(repr=False)
    levels: dict[int, frozenset[int]] = field(default_factory=dict)
    means: dict[int, frozenset[int]] = field(default_factory=dict)
    places: dict[int, frozenset[int]] = field(default_factory=dict)
    matches: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    rows: int = 0
    iterations: int = 0
    stopped: str = ""
    rounds_operands: bool = False

    @cached_property
    def parents(self) -> list[list[tuple[int, int]]]:
        """The nodes that use each class, by their class and position."""
        out: list[list[tuple[int, int]]] = [[] for _ in self.nodes]
        for c, nodes in enumerate(self.nodes):
            for k, node in enumerate(nodes):
                for a in sorted(set(node.children)):
                    out[a].append((c, k))
        return out

    @cached_property
    def operand_counts(self) -> list[list[int]]:
        """The number of different classes that each node uses."""
        return [[len(set(node.children)) for node in nodes] for nodes in self.nodes]

    def with_calls(self, program: Program) -> View | None:
        """The same e-graph for another program, if that differs in nothing but the plans of the bodies of its loops and branches."""
        own, terms = self.program.terms, program.terms
        new = {a.call: b.call for a, b in zip(own, terms) if isinstance(a, ir.Block) and isinstance(b, ir.Block)}
        if _around_terms(self.program) != _around_terms(program) or any(a.params is not b.params for a, b in new.items()):
            return None
        if len(own) < len(terms) or any(called(a, new) != b for a, b in zip(own, terms)):
            return None
        for term in own[len(terms) :]:  # those that encoding has added
            program.add(called(term, new))
        return replace(self, program=program, encoder=self.encoder.with_calls(program, new))

    def add(self, program: Program, home: int, node: Node, args: tuple[int, ...], source: ir.Source | None = None) -> int:
        """The term of a node of class ``home`` on operands ``args``, added to ``program``."""
        return program.add(self.encoder.decode(node, args, self.dtypes[home], program, self.precision(home)), source)

    def precision(self, c: int) -> Any:
        """That of the contractions of a class: as written, the strictest where there are several, or that of contractions by rules."""
        return self.precisions[c] if c in self.precisions else of_rules(self.dtypes[c], self.rounds_operands)

    @cached_property
    def precisions(self) -> dict[int, Any]:
        """The precision of contractions that were written, by class."""
        found: dict[int, Any] = {}
        for t, c in self.class_of.items():
            term = self.program.terms[t]
            if isinstance(term, ir.Dot) and is_graded(term.precision):
                found[c] = stricter(found[c], term.precision) if c in found else term.precision
        return found

    def precisions_in(self, choice: Mapping[int, Node], order: Sequence[int]) -> dict[int, Any]:
        """The precision of each contraction of a choice, whose classes are in ``order``, operands first.

        What only contractions read that round it need be no more precise than they are, if rules made it. Sums that are part of a
        contraction would be rounded with its operands, so such a contraction is precise.
        """
        roots = {self.class_of[t] for t in self.program.roots()}
        readers: dict[int, list[int]] = {c: [] for c in order}
        found: dict[int, Any] = {}
        for c in reversed(order):
            if choice[c].constructor == "DotPlus":
                found[c] = of_rules(self.dtypes[c], self.rounds_operands)
            elif choice[c].constructor == "Dot":
                found[c] = self.precision(c)
                made = c not in self.precisions and c not in roots
                if made and self.rounds_operands and all(r in found and rounds(self.dtypes[c], found[r]) for r in readers[c]):
                    found[c] = reduce(stricter, [found[r] for r in readers[c]])
            for a in choice[c].children:
                readers[a].append(c)
        return found

    def empty_program(self) -> Program:
        """No terms yet; the indices are the program's and those that swaps of names need besides."""
        out = self.program.empty_like()
        out.indices = list(self.encoder.indices())
        return out


def _around_terms(program: Program) -> Any:
    """All that a program has besides its terms."""
    return program.indices, program.inputs, list(map(id, program.consts)), program.outputs, program.effects, program.shares


class EGraph:
    """One e-graph that holds one program and the rules for it, with the arity of each elementwise constructor that they name (``maps``).

    ``large_elements`` is the size of an index set above which it is `large`, ``unrolled_elements`` the size up to which folds over it may
    be written out (`unrollable`); ``session`` is where it stands: in this process unless given. Other e-graphs may begin with the same
    ``rules``; ``further`` texts are for this one.
    """

    def __init__(
        self,
        program: Program,
        rules: Sequence[tuple[str, str]],
        maps: dict[str, int],
        large_elements: float,
        unrolled_elements: float,
        own: language.Own = language.NOTHING,
        session: Session | None = None,
        further: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._session: Session = session or CopiedSession()
        self.seconds: dict[str, float] = {}
        self._encoder = Encoder(program, own)
        self._encoded = self._encoder.encode()
        used = {e.node.constructor: len(e.node.children) for e in self._encoded.values() if e.node.constructor in language.primitive_of()}
        words = [(name, _forms(text, name)) for name, text in language.language(maps, own)]
        beside = language.elementwise({name: arity for name, arity in used.items() if name not in maps})
        with _explained("the text of"):
            self._session.declare([*words, *((name, (text,)) for name, text in rules)])  # which further programs have too
            self._session.declare([(name, _forms(text, name)) for name, text in (*beside, *further)])
        with _explained("loading"):
            self._load(large_elements, unrolled_elements)

    def step(self, ruleset: str, times: int = 1) -> tuple[bool, dict[str, int]]:
        """Iterations of a ruleset until nothing changes: whether anything did, and the matches of each rule."""
        with _explained(f"a step of {ruleset}"):
            updated, matches, seconds = self._session.step(ruleset, times)
        for name, spent in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
        return updated, matches

    def rows(self) -> int:
        """Rows of all tables."""
        with _explained("counting"):
            return self._session.rows()

    def add(self, nodes: Mapping[Node, int]) -> None:
        """Further nodes and their keys; operands are keys of terms or of nodes before them. Their facts follow from those of operands."""
        with _explained("loading"):
            self._session.load(*_loaded((key, node) for node, key in nodes.items()))

    def close(self) -> None:
        """The e-graph is needed no longer."""
        self._session.close()

    def classes(self, told: Collection[str] = ()) -> Classes:
        """Every class with all its nodes, those too that stand for a value in rules only; and the rows of some relations."""
        read = {*language.FACTS, "dtype", language.LEVELS, language.MEANS, language.PLACES, *told}
        with _explained("reading"):
            tables = self._session.tables("T", read)
        number: dict[int, int] = {}
        keys = sorted((inputs[0], output) for inputs, output in tables["Node"][2])
        class_of = {t: number.setdefault(value, len(number)) for t, value in keys}
        nodes: dict[int, list[Node]] = {}
        for name in sorted(tables):
            sorts, output_sort, rows = tables[name]
            if output_sort == "T" and name != "Node":
                for inputs, output in rows:
                    home = number.setdefault(output, len(number))
                    nodes.setdefault(home, []).append(Node(name, *_arguments(sorts, inputs, number)))

        def facts(name: str) -> dict[int, Any]:
            return {number[inputs[0]]: output for inputs, output in tables[name][2] if inputs[0] in number}

        def pairs(name: str) -> dict[int, frozenset[int]]:
            found: dict[int, set[int]] = {}
            for inputs, _ in tables[name][2] if name in tables else ():
                if all(value in number for value in inputs):
                    found.setdefault(number[inputs[0]], set()).add(number[inputs[1]])
            return {c: frozenset(others) for c, others in found.items()}

        def rows_of(name: str) -> list[tuple[Any, ...]]:
            sorts, _, rows = tables[name]
            return [tuple(number.setdefault(v, len(number)) if s == "T" else v for s, v in zip(sorts, inputs)) for inputs, _ in rows]

        index_sets = self._encoder.indices_of
        return Classes(
            nodes=[nodes.get(c, []) for c in range(len(number))],
            class_of=class_of,
            facts={name: {c: index_sets(v) for c, v in facts(name).items()} for name in language.FACTS},
            dtypes=facts("dtype"),
            levels=pairs(language.LEVELS),
            means=pairs(language.MEANS),
            places=pairs(language.PLACES),
            encoder=self._encoder,
            told={name: rows_of(name) for name in told if name in tables},
        )

    def read(self) -> View:
        """Read the classes, nodes and facts from which programs may be built."""
        every = self.classes()
        original = {t: replace(e.node, children=tuple(every.class_of[c] for c in e.node.children)) for t, e in self._encoded.items()}
        written = set(original.values())
        return View(
            program=self._encoder.program,
            nodes=[
                _without_mirrors(list(filter(_is_buildable, nodes)), written) if c in every.dtypes else []
                for c, nodes in enumerate(every.nodes)
            ],
            class_of={t: c for t, c in every.class_of.items() if t >= 0},
            original={t: node for t, node in original.items() if t >= 0},
            facts=every.facts,
            dtypes=every.dtypes,
            encoder=self._encoder,
            levels=every.levels,
            means=every.means,
            places=every.places,
        )

    def _load(self, large_elements: float, unrolled_elements: float) -> None:
        """Load each term with what is known of it, and the extents of indices."""
        tables, commands = _loaded((t, term.node) for t, term in self._encoded.items())
        tables[language.table_of("free-dtype")] = [(t, term.free, term.dtype) for t, term in self._encoded.items()]
        for fact in language.GIVEN:
            known = ((t, getattr(term, fact)) for t, term in self._encoded.items())
            rows: list[Row] = [(t, mask) for t, mask in known if mask or (fact == "summed" and mask is not None)]
            if rows:
                tables[language.table_of(fact)] = rows
        commands += [("set", "extent", (bit,), float(extent)) for bit, extent in self._encoder.extents()]
        commands += [("set", "threshold", (), float(large_elements)), ("set", "unrollable", (), float(unrolled_elements))]
        commands += [("union", ("Node", (t,)), _expression(node)) for t, node in self._encoder.others()]
        self._session.load(tables, commands)


def _loaded(nodes: Iterable[tuple[int, Node]]) -> tuple[dict[str, list[Row]], list[Command]]:
    """Nodes with their keys as rows of tables, and as commands where they have none."""
    tables: dict[str, list[Row]] = {}
    commands: list[Command] = []
    for key, node in nodes:
        if node.constructor in language.UNTABLED:
            commands.append(("union", ("Node", (key,)), _expression(node)))
        else:
            tables.setdefault(language.table_of(node.constructor), []).append((key, *node.payload, *node.children))
    return tables, commands


def _expression(node: Node) -> Expression:
    """A node whose operands are known by their keys."""
    children = tuple(("Node", (c,)) for c in node.children)
    return node.constructor, (*node.payload, *((("vec-of", children),) if node.constructor == "Block" else children))


def _arguments(sorts: Sequence[str], values: Sequence[Any], number: dict[int, int]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The literal arguments of a row and the classes of its operands."""
    payload: list[Any] = []
    children: list[int] = []
    for sort, value in zip(sorts, values, strict=True):
        if sort not in ("T", "Ts"):
            payload.append(value)
        else:
            children += [number.setdefault(v, len(number)) for v in (value if sort == "Ts" else (value,))]
    return tuple(payload), tuple(children)


@cache
def _forms(text: str, name: str) -> tuple[str, ...]:
    """The forms of a text, of which each is parsed by itself."""
    return tuple(form.text for form in read_forms(text, name))


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn a refusal by egglog into an error that says what is wrong with rules."""
    try:
        yield
    except Panic as error:
        raise EgglogPanic(f"egglog failed at {error}") from error
    except Overrun as error:
        raise RuleOverrun(f"{name} {error}.") from error
    except Failure as error:
        raise RuleError(f"egglog refuses a rule: {error}") from error


def _is_buildable(node: Node) -> bool:
    """Whether programs may hold the node: it has a term, and is no product written as a contraction, which stands in the class as such."""
    return node.constructor not in language.UNREADABLE and not (node.constructor == "Dot" and node.payload == (0,))


def _without_mirrors(nodes: list[Node], original: set[Node]) -> list[Node]:
    """One of a b and b a: that of the program, if it is one of the program's."""
    kept: dict[Any, Node] = {}
    for node in sorted(nodes, key=lambda node: node not in original):
        same = frozenset(node.children) if node.constructor in language.COMMUTATIVE else node.children
        kept.setdefault((node.constructor, node.payload, same), node)
    return list(kept.values())
