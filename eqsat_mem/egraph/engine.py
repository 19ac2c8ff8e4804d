"""A program in egglog, and the e-graph read back as classes and nodes: the only module that knows egglog."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from pathlib import Path
from typing import Any

from eqsat_mem import ir
from eqsat_mem.egraph import language
from eqsat_mem.egraph.encode import Encoder, Node
from eqsat_mem.egraph.sexpr import read_forms
from eqsat_mem.errors import RuleError
from eqsat_mem.ir import Program
from eqsat_mem.ir.precision import is_graded, of_rules, rounds, stricter

_PARSED: dict[tuple[str, str], list[Any]] = {}
"""The commands of each text parsed so far, with the name that its messages have: any e-graph can run them."""

MILLI = 1000
"""egglog 13 reports milliseconds as microseconds."""


class EgglogPanic(RuleError):
    """egglog met an error of its own; the e-graph is of no more use."""


@dataclass(frozen=True)
class Classes:
    """The classes of an e-graph as it stands, numbered from zero: their nodes, facts, levels and dtypes, and the class of each key."""

    nodes: list[list[Node]]
    class_of: dict[int, int]
    facts: dict[str, dict[int, int]]
    dtypes: dict[int, str]
    levels: dict[int, frozenset[int]]
    means: dict[int, frozenset[int]]
    places: dict[int, frozenset[int]]
    encoder: Encoder = field(repr=False)


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


class EGraph:
    """One egglog e-graph that holds one program and the rules for it.

    ``large_elements`` is the size of an index set above which it is `large`, ``unrolled_elements`` the size up to which folds over it may
    be written out (`unrollable`).
    """

    def __init__(
        self,
        program: Program,
        rules: Sequence[tuple[str, str]],
        maps: dict[str, int],
        large_elements: float,
        unrolled_elements: float,
        own: language.Own = language.NOTHING,
    ) -> None:
        self._egg = bindings()
        self._span = self._egg.PanicSpan()
        self._graph, self._parser = self._egg.EGraph(), self._egg.EGraph()
        self.seconds: dict[str, float] = {}
        self._encoder = Encoder(program, own)
        self._encoded = self._encoder.encode()
        used = {e.node.constructor: len(e.node.children) for e in self._encoded.values() if e.node.constructor in language.primitive_of()}
        for name, text in (*language.language(maps | used, own), *rules):
            self._run(text, name)
        self._load(large_elements, unrolled_elements)

    def step(self, ruleset: str, times: int = 1) -> tuple[bool, dict[str, int]]:
        """Iterations of a ruleset until nothing changes: whether anything did, and the matches of each rule."""
        report = self._run(f"(run {ruleset} {times})", "step")[0].report
        for name, spent in report.search_and_apply_time_per_rule.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + MILLI * spent.total_seconds()
        return report.updated, report.num_matches_per_rule

    def rows(self) -> int:
        """Rows of all tables."""
        return sum(count for _, count in self._run("(print-size)", "size")[0].sizes)

    def add(self, key: int, node: Node) -> None:
        """A further node, whose operands are keys of terms or of nodes added before; its facts follow from theirs."""
        self._graph.run_program(self._set("Node", [self._lit(key)], self._expression(node)))

    def classes(self) -> Classes:
        """Every class with all its nodes, those too that stand for a value in rules only."""
        graph, tables = self._graph, self._tables()
        number: dict[Any, int] = {}
        keys = sorted((graph.value_to_i64(row.inputs[0]), row.output) for row in tables["Node"][2])
        class_of = {t: number.setdefault(value, len(number)) for t, value in keys}
        nodes: dict[int, list[Node]] = {}
        for name in sorted(tables):
            sorts, output_sort, rows = tables[name]
            if output_sort == "T" and name != "Node":
                for row in rows:
                    home = number.setdefault(row.output, len(number))
                    nodes.setdefault(home, []).append(Node(name, *self._inputs(sorts, row.inputs, number)))

        def facts(name: str) -> dict[int, Any]:
            return {number[row.inputs[0]]: row.output for row in tables[name][2] if row.inputs[0] in number}

        def pairs(name: str) -> dict[int, frozenset[int]]:
            found: dict[int, set[int]] = {}
            for row in tables[name][2] if name in tables else ():
                if all(value in number for value in row.inputs):
                    found.setdefault(number[row.inputs[0]], set()).add(number[row.inputs[1]])
            return {c: frozenset(others) for c, others in found.items()}

        index_sets = self._encoder.indices_of
        return Classes(
            nodes=[nodes.get(c, []) for c in range(len(number))],
            class_of=class_of,
            facts={name: {c: index_sets(graph.value_to_i64(v)) for c, v in facts(name).items()} for name in language.FACTS},
            dtypes={c: graph.value_to_string(v) for c, v in facts("dtype").items()},
            levels=pairs(language.LEVELS),
            means=pairs(language.MEANS),
            places=pairs(language.PLACES),
            encoder=self._encoder,
        )

    def read(self) -> View:
        """What programs may be built from: classes, nodes and facts."""
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

    def _tables(self) -> dict[str, tuple[Any, str, Any]]:
        """The rows of every function, with the sorts of its arguments and of its value."""
        functions = self._graph.freeze().functions
        return {name: (table.input_sorts, table.output_sort, table.rows) for name, table in functions.items()}

    def _inputs(self, sorts: Sequence[str], values: Sequence[Any], number: dict[Any, int]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """The literal arguments of a row and the classes of its operands."""
        graph = self._graph
        read = {"i64": graph.value_to_i64, "f64": graph.value_to_f64, "String": graph.value_to_string}
        payload: list[Any] = []
        children: list[int] = []
        for sort, value in zip(sorts, values, strict=True):
            if sort in read:
                payload.append(read[sort](value))
            else:
                operands = graph.value_to_vec(value) if sort == "Ts" else [value]
                children += [number.setdefault(v, len(number)) for v in operands]
        return tuple(payload), tuple(children)

    def _load(self, large_elements: float, unrolled_elements: float) -> None:
        """Each term and what is known of it, as syntax trees: text would take several times as long."""
        commands = [self._set("extent", [self._lit(bit)], self._lit(float(extent))) for bit, extent in self._encoder.extents()]
        commands.append(self._set("threshold", [], self._lit(float(large_elements))))
        commands.append(self._set("unrollable", [], self._lit(float(unrolled_elements))))
        for t, term in self._encoded.items():
            read = self._call("Node", [self._lit(t)])
            commands.append(self._set("Node", [self._lit(t)], self._expression(term.node)))
            commands.append(self._set("free", [read], self._lit(term.free)))
            commands.append(self._set("dtype", [read], self._lit(term.dtype)))
            if term.summed is not None:
                commands.append(self._set("summed", [read], self._lit(term.summed)))
            masks = ((fact, getattr(term, fact)) for fact in ("pointwise", "selected", "combined", "searched"))
            commands += [self._set(fact, [read], self._lit(mask)) for fact, mask in masks if mask]
        for t, node in self._encoder.other_reads():
            same = self._egg.Union(self._span, self._call("Node", [self._lit(t)]), self._expression(node))
            commands.append(self._egg.ActionCommand(same))
        self._graph.run_program(*commands)

    def _expression(self, node: Node) -> Any:
        payload = [self._lit(p) for p in node.payload]
        children = [self._call("Node", [self._lit(c)]) for c in node.children]
        if node.constructor == "Block":
            children = [self._call("vec-of", children)]
        return self._call(node.constructor, payload + children)

    def _call(self, name: str, args: list[Any]) -> Any:
        return self._egg.Call(self._span, name, args)

    def _set(self, name: str, args: list[Any], value: Any) -> Any:
        return self._egg.ActionCommand(self._egg.Set(self._span, name, args, value))

    def _lit(self, value: float | str) -> Any:
        kinds = {int: self._egg.Int, float: self._egg.Float, str: self._egg.String}
        return self._egg.Lit(self._span, kinds[type(value)](value))

    def _parsed(self, text: str, name: str) -> list[Any]:
        """The commands of a text. egglog parses long texts in quadratic time, so each form apart."""
        known = _PARSED.get((text, name))
        if known is None:
            parsed = (self._parser.parse_program(form.text, name) for form in read_forms(text, name))
            known = _PARSED[text, name] = [command for commands in parsed for command in commands]
        return known

    def _run(self, text: str, name: str) -> list[Any]:
        try:
            return self._graph.run_program(*self._parsed(text, name))
        except self._egg.EggSmolError as error:
            raise RuleError(f"egglog refuses a rule: {error}") from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # what a panic of egglog is in Python; it is no Exception
                raise
            raise EgglogPanic(f"egglog failed at {name}: {error}") from error


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


@cache
def bindings() -> Any:
    """egglog's compiled bindings without the rest of its package, whose import takes several times as long."""
    known = sys.modules.get("egglog.bindings")
    if known is not None:
        return known
    package = importlib.util.find_spec("egglog")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("eqsat_mem needs the package egglog (>=13.2,<14)", name="egglog")
    folder = Path(package.submodule_search_locations[0])
    path = next(p for suffix in importlib.machinery.EXTENSION_SUFFIXES if (p := folder / f"bindings{suffix}").exists())
    spec = importlib.util.spec_from_file_location("egglog.bindings", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
