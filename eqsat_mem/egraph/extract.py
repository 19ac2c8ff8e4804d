"""One node per class: the program that an e-graph holds at the least cost.

The cost of a choice is that of its DAG, each class paid once: seconds of its operation, and a price per byte of its value. A bottom-up
search finds well-founded choices by tree cost, where shared classes count as often as they are used. It is then restarted with the
classes in use as paid, and a local search changes single choices by exact cost.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

from eqsat_mem import ir
from eqsat_mem.deadline import NEVER, Deadline
from eqsat_mem.egraph.augmented_lowering import augmented_contractions
from eqsat_mem.egraph.encode import Node, contracting, pointwise
from eqsat_mem.egraph.graph import View
from eqsat_mem.egraph.lowering import Allowed, Lowering
from eqsat_mem.egraph.monoid_lowering import monoid_folds
from eqsat_mem.egraph.node_costs import Costs, Seconds, elements, priced
from eqsat_mem.egraph.online_folds import Rescaled, rescaled_sums
from eqsat_mem.egraph.rule_files import RuleSet, load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.egraph.take_lowering import takes
from eqsat_mem.errors import RuleError
from eqsat_mem.ir import Program
from eqsat_mem.ir.bitwise import compared, selected_by_element, uncontracted
from eqsat_mem.ir.ops import joins

Choice = dict[int, Node]

RESTARTS = 4
"""The bottom-up search is restarted at most so many times with the classes in use as paid."""
ROUNDS = 6
"""The local search goes at most so many times through all classes."""
FORCED_NODES = 6_000
"""Nodes that may be visited by further starts, each of which forces one node that is not chosen: all of them in a small e-graph."""


@dataclass(frozen=True, eq=False)
class Extraction:
    """A program, and what its terms allow, as rules stated it: index sets by term; a term that is missing allows nothing.

    Attributes:
        splits: indices along which a term may be computed slice by slice.
        accumulates: indices over which a fold or a contraction may be accumulated chunk by chunk.
        unrolls: indices over which a fold or a contraction, or along which a search, may be written out element by element.
        rescales: sums that hold the factor exp(-r) of a level r, or of squares less a mean: chunks of them may have levels of their own.
        origin: where terms were put together since, the program that was extracted, and its term for each here that it has.
    """

    program: Program
    splits: Mapping[int, int] = field(default_factory=dict)
    accumulates: Mapping[int, int] = field(default_factory=dict)
    unrolls: Mapping[int, int] = field(default_factory=dict)
    rescales: Mapping[int, Rescaled] = field(default_factory=dict)
    origin: tuple[Program, Mapping[int, int]] | None = None

    def onto(self, program: Program, ids: Mapping[int, int], made: Mapping[int, int]) -> Extraction:
        """The same of a program written anew, of whose terms ``ids`` has the numbers; terms ``made`` for it have the splits given there."""
        tables = (self.splits, self.accumulates, self.unrolls)
        splits, accumulates, unrolls = ({ids[t]: m for t, m in table.items() if t in ids and ids[t] not in made} for table in tables)
        rescales = {ids[t]: known.renumbered(ids) for t, known in self.rescales.items() if t in ids}
        return Extraction(program, splits | dict(made), accumulates, unrolls, rescales)

    @cached_property
    def compared(self) -> Mapping[int, frozenset[int]]:
        """The comparisons that need their operands bit for bit, with these operands: see :mod:`eqsat_mem.ir.bitwise`."""
        return compared(self.program)

    @cached_property
    def exact(self) -> frozenset[int]:
        """All operands that some comparison needs bit for bit."""
        return frozenset().union(*self.compared.values())

    @cached_property
    def selected_by_element(self) -> Mapping[int, frozenset[int]]:
        """Those from which elementwise operations alone select what they are compared with, and these: see :mod:`eqsat_mem.ir.bitwise`."""
        return selected_by_element(self.program, self.compared)

    @cached_property
    def uncontracted(self) -> frozenset[int]:
        """The values to keep from contraction, so that these have the same bits in all kernels: see :mod:`eqsat_mem.ir.bitwise`."""
        return uncontracted(self.program, self.exact, self.unrolls.keys())


def extract(view: View, seconds: Seconds, memory_price: float) -> Extraction:
    """The cheapest program found: ``seconds`` of each term, and ``memory_price`` per byte of contractions, blocks and renamed values."""
    return extractions(view, seconds, (memory_price,))[0]  # nothing stops it before there is one


def extractions(view: View, seconds: Seconds, memory_prices: Sequence[float], deadline: Deadline = NEVER) -> list[Extraction]:
    """The cheapest program found at each price of memory, as far as time allows."""
    every = takewhile(lambda _: not deadline.passed(), priced(view, seconds, memory_prices))
    return [build(view, search(view, costs, deadline)) for costs in every]


def as_written(view: View) -> Extraction:
    """The program that was loaded, with what rules allow for its terms."""
    return _with_facts(view, view.program, dict(view.class_of))


def original(program: Program, rules: RuleSet | None = None) -> Extraction:
    """A program as it is, with what the rules of ``rules/splitting.egg`` (or of ``rules``) allow for its terms."""
    return as_written(saturate(program, rules or load_rules(only=("splitting",)), Limits(max_iterations=0)))


def run_as_is(program: Program, extracted: Callable[[Program], Extraction]) -> Extraction:
    """A program to be run as it is, never split: with what rules allow to write out, for which terms that combine few elements have to be
    ``extracted``, apart from what makes their operands."""
    few = [t for t in program.reachable() if _combines_few(program, t)]
    if not few:
        return Extraction(program)
    apart = program.empty_like()
    ids: dict[int, int] = {}
    for t in few:
        for c in ir.children(program.terms[t]):
            if c not in ids:
                ids[c] = _read_whole(apart, program, c)
        ids[t] = apart.add(program.on(t, ids))
        apart.outputs.append(ir.Output(ids[t], _axes(program.free[t])))
    unrolls = extracted(apart).unrolls
    return Extraction(program, unrolls={t: unrolls[ids[t]] for t in few if ids[t] in unrolls})


def _combines_few(program: Program, t: int) -> bool:
    """Whether a term combines so few elements that they may be written out, and is large enough for that."""
    over = elements(program.terms[t])
    few = over != 0 and program.extent(over) <= Limits.unrolled_elements
    return few and program.extent(over | program.free[t]) > Limits.large_elements


def _read_whole(new: Program, program: Program, t: int) -> int:
    """A term of another program as one more argument of a new one."""
    axes, dtype = _axes(program.free[t]), program.terms[t].dtype
    new.inputs.append(ir.Buffer(f"x{len(new.inputs)}", new.shape(axes), dtype))
    return new.add(ir.Input(dtype, len(new.inputs) - 1, axes))


def _axes(free: int) -> ir.Axes:
    return tuple((i,) for i in ir.bits(free))


def build(view: View, choice: Choice) -> Extraction:
    """The program of a choice, with the original's arguments, outputs, effects and source lines."""
    program = view.empty_program()
    known: dict[int, int] = {}
    sources = {view.class_of[t]: source for t, source in reversed(view.program.source.items()) if t in view.class_of}
    class_of: dict[int, int] = {}
    order = _topological(view, choice)
    precisions = view.precisions_in(choice, order)
    for c in order:
        args = tuple(known[a] for a in choice[c].children)
        term = view.encoder.decode(choice[c], args, view.dtypes[c], program, precisions.get(c))
        known[c] = program.add(term, sources.get(c))
        class_of.setdefault(known[c], c)
        picked_with(program, known[c])
    program.take_roots(view.program, lambda t: known[view.class_of[t]])
    ir.check(program)
    return _with_facts(view, program, class_of)


def picked_with(program: Program, t: int) -> list[int]:
    """The other results of an operation that picks elements: chunks combine all of them."""
    term = program.terms[t]
    if not isinstance(term, ir.Block) or not joins(term.call):
        return []
    return [program.add(ir.Block(dtype, term.call, term.args, k)) for k, dtype in enumerate(term.call.out_dtypes) if k != term.out]


def _with_facts(view: View, program: Program, class_of: dict[int, int]) -> Extraction:
    """Give terms the facts that rules stated of their classes, as far as a term's operation can do what they say."""
    for t, c in list(class_of.items()):
        class_of |= {other: c for other in picked_with(program, t) if other not in class_of}

    def table(fact: str, able: Callable[[int], int]) -> dict[int, int]:
        found = {t: view.facts[fact].get(c, 0) & able(t) for t, c in class_of.items()}
        return {t: mask for t, mask in found.items() if mask}

    def sliced(t: int, dots: bool) -> int:
        return pointwise(program, t) if contracting(program.terms[t]) is dots else 0

    allowed = Allowed(
        table("splits", lambda t: sliced(t, dots=False)) | table("splits-dot", lambda t: sliced(t, dots=True)),
        table("accumulates", lambda t: ir.folded(program.terms[t])),
        table("unrolls", lambda t: elements(program.terms[t])),
    )
    lowered, allowed, ids = written_out(program, allowed, view.rounds_operands)
    rescales = {ids[t]: rescaled.renumbered(ids) for t, rescaled in rescaled_sums(view, program, class_of).items()}
    origin = None if lowered is program else (program, {new: t for t, new in ids.items()})
    return Extraction(lowered, allowed.splits, allowed.accumulates, allowed.unrolls, rescales, origin)


def written_out(program: Program, allowed: Allowed, rounds_operands: bool) -> tuple[Program, Allowed, Mapping[int, int]]:
    """A program whose terms that stand for several plain ones are those, what may be done with it, and the new number of each term."""
    lowerings = monoid_folds(program) | augmented_contractions(program, rounds_operands) | takes(program)
    return Lowering(program, allowed).run(lowerings)


# --- search -----------------------------------------------------------------------------------------


def search(view: View, costs: Costs, deadline: Deadline = NEVER) -> Choice:
    """The cheapest choice found, deterministically unless time is up."""
    roots = [view.class_of[t] for t in view.program.roots()]

    def start(paid: Mapping[int, int], forced: tuple[int, int] | None = None) -> Dag | None:
        chosen = greedy(view, costs, paid, forced)
        if any(chosen[root] < 0 for root in roots):
            return None
        dag = Dag(view, costs, chosen, roots)
        dag.improve()
        return dag

    best = start({})
    if best is None:
        raise RuleError(
            "no program can be built from the e-graph: a rule made values equal that depend on different indices; "
            "eqsat-mem check-rules tells which."
        )
    for _ in range(RESTARTS):
        paid = None if deadline.passed() else start(best.count)
        if paid is None or not paid.cheaper(best):
            break
        best = paid
    for forced in _alternatives(best)[: FORCED_NODES // max(sum(map(len, view.nodes)), 1)]:
        if deadline.passed():
            break
        other = start(best.count, forced)
        if other is not None and other.cheaper(best):
            best = other
    return best.choice()


def _alternatives(dag: Dag) -> list[tuple[int, int]]:
    """Nodes that are not chosen, of classes in use: those of the dearest classes first."""
    classes = sorted(dag.count, key=lambda c: (-dag.costs.of[c][dag.chosen[c]], c))
    return [(c, k) for c in classes for k, cost in enumerate(dag.costs.of[c]) if k != dag.chosen[c] and cost < math.inf]


def greedy(
    view: View,
    costs: Costs,
    paid: Mapping[int, int] | None = None,
    forced: tuple[int, int] | None = None,
) -> list[int]:
    """The node of each class with the least tree cost, -1 where there is none.

    A class of ``paid`` adds nothing to its users. ``forced`` is a class and the only node that it may have.

    Knuth's generalisation of Dijkstra's algorithm: classes are settled in the order of their costs, so every choice is well-founded.
    """
    paid = paid or {}
    chosen = [-1] * len(view.nodes)
    waiting, value = [list(counts) for counts in view.operand_counts], [list(row) for row in costs.of]
    heap = [(value[c][k], c, k) for c, counts in enumerate(view.operand_counts) for k, count in enumerate(counts) if not count]
    heapq.heapify(heap)
    while heap:
        total, c, k = heapq.heappop(heap)
        if chosen[c] >= 0 or total == math.inf or (forced is not None and c == forced[0] and k != forced[1]):
            continue
        chosen[c] = k
        share = 0.0 if c in paid else total
        for p, j in view.parents[c]:
            if chosen[p] >= 0:
                continue
            value[p][j] += share
            waiting[p][j] -= 1
            if waiting[p][j] == 0:
                heapq.heappush(heap, (value[p][j], p, j))
    return chosen


class Dag:
    """A choice with the exact cost of its DAG, kept up to date by counting the users of each class."""

    def __init__(self, view: View, costs: Costs, chosen: list[int], roots: Sequence[int]) -> None:
        self.view, self.costs, self.chosen = view, costs, chosen
        self.count: dict[int, int] = {}
        self.total = 0.0
        for root in roots:
            self._use(root)

    def choice(self) -> Choice:
        return {c: self.view.nodes[c][self.chosen[c]] for c in self.count}

    def cheaper(self, other: Dag) -> bool:
        return self.total < other.total * (1 - 1e-9)

    def improve(self) -> None:
        """Take the best other node of each class, one class after the other, while that makes the DAG cheaper."""
        for _ in range(ROUNDS):
            before = self.total
            for c in sorted(self.count):
                if c in self.count and len(self.view.nodes[c]) > 1:
                    self._improve_class(c)
            if self.total >= before * (1 - 1e-9):
                break

    def _improve_class(self, c: int) -> None:
        """Take the best node of a class: what the one at hand needs alone is compared with what another needs besides."""
        nodes, costs, first, before = self.view.nodes[c], self.costs.of[c], self.chosen[c], self.total
        for a in nodes[first].children:
            self._drop(a)
        best, rest = first, self.total - costs[first]
        least = before - rest
        for k, cost in enumerate(costs):
            if k == first or cost >= least:
                continue
            cost += self._added(nodes[k].children, least - cost)
            if rest + cost < (rest + least) * (1 - 1e-12) and self.buildable(c, k):  # few choices are cheaper: asked last
                best, least = k, cost
        self.chosen[c] = best
        for a in nodes[best].children:
            self._use(a)
        self.total = rest + least

    def _added(self, children: Sequence[int], most: float) -> float:
        """The cost of classes that are not in use and that some need, themselves included; infinite from ``most`` on."""
        added, stack, seen = 0.0, list(children), set[int]()
        while stack:
            a = stack.pop()
            if a in self.count or a in seen:
                continue
            if self.chosen[a] < 0:
                return math.inf
            added += self.costs.of[a][self.chosen[a]]
            if added >= most:
                return math.inf
            seen.add(a)
            stack += self.view.nodes[a][self.chosen[a]].children
        return added

    def _use(self, c: int) -> None:
        stack = [c]
        while stack:
            a = stack.pop()
            self.count[a] = self.count.get(a, 0) + 1
            if self.count[a] == 1:
                self.total += self.costs.of[a][self.chosen[a]]
                stack.extend(self.view.nodes[a][self.chosen[a]].children)

    def _drop(self, c: int) -> None:
        stack = [c]
        while stack:
            a = stack.pop()
            self.count[a] -= 1
            if self.count[a] == 0:
                del self.count[a]
                self.total -= self.costs.of[a][self.chosen[a]]
                stack.extend(self.view.nodes[a][self.chosen[a]].children)

    def buildable(self, c: int, k: int) -> bool:
        """Whether no chosen operand below node ``k`` of class ``c`` leads back to ``c``."""
        stack, seen = list(self.view.nodes[c][k].children), set()
        while stack:
            a = stack.pop()
            if a == c or self.chosen[a] < 0:
                return False
            if a not in seen:
                seen.add(a)
                stack.extend(self.view.nodes[a][self.chosen[a]].children)
        return True


def _topological(view: View, choice: Choice) -> list[int]:
    """The classes of a choice that outputs and effects need, operands first, in the order of the original where it has one."""
    order: list[int] = []
    done: set[int] = set()
    stack = [(view.class_of[t], False) for t in reversed(view.program.roots())]
    while stack:
        c, expanded = stack.pop()
        if expanded:
            if c not in done:
                done.add(c)
                order.append(c)
        elif c not in done:
            stack.append((c, True))
            stack.extend((a, False) for a in reversed(choice[c].children) if a not in done)
    return order
