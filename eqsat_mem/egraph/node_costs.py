"""The cost of each node of an e-graph: seconds of its operation, and a price per byte of what choosing it puts into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eqsat_mem import ir
from eqsat_mem.egraph.encode import Node
from eqsat_mem.egraph.graph import View
from eqsat_mem.ir import Program
from eqsat_mem.ir.ops import searched

Seconds = Callable[[Program, int, bool], float]
"""Seconds of a term of a program; the flag says whether it is a fold that is written out element by element."""
TOLL = 1.15
"""The factor on the cost of terms that rules made: they replace terms as written, which are as accurate as their author expects, for a
gain only."""
HELD = ir.Dot | ir.DotPlus | ir.Block | ir.Rename
"""Terms whose bytes have a price: other values may be computed on the way to a reader; a rename reads one that is not."""


@dataclass
class Costs:
    """The cost of each node in ``View.nodes``' order; infinite for a node that no program can be built from."""

    of: list[list[float]]


def node_costs(view: View, seconds: Seconds, memory_price: float) -> Costs:
    """The costs of nodes at one price of memory: see :func:`priced`."""
    return priced(view, seconds, (memory_price,))[0]


def priced(view: View, seconds: Seconds, memory_prices: Sequence[float]) -> list[Costs]:
    """Costs of nodes, for each price of memory, on some operands of their classes; all operands of a class have the same shape.

    A node that depends on more indices than another of its class is constant along them, and is not used. Nor is what
    rules make of such a node where they change names or take rows in it: see :func:`_is_ill_formed`.
    """
    order, made = _bottom_up(view), _Made(view)
    known, scratch = _fewest_indices(made, order), made.program
    original = {(view.class_of[t], node) for t, node in view.original.items()}
    costs = [Costs([[math.inf] * len(nodes) for nodes in view.nodes]) for _ in memory_prices]
    for c, k in order:
        node = view.nodes[c][k]
        if _is_ill_formed(view, scratch, node, [known[a] for a in node.children]):
            continue
        t = made.term(c, k, known)
        if scratch.free[t] != scratch.free[known[c]]:
            continue
        term = scratch.terms[t]
        along = elements(term) if isinstance(term, ir.Fold | ir.Block) else 0
        unrolled = along != 0 and not along & ~view.facts["unrolls"].get(c, 0)
        written = (c, node) in original
        held = _held_bytes(scratch, t)
        work = seconds(scratch, t, unrolled) * (1.0 if written else TOLL)
        for at_price, price in zip(costs, memory_prices, strict=True):
            at_price.of[c][k] = work + price * held + (1e-12 if written else 2e-12)
    return costs


def _is_ill_formed(view: View, program: Program, node: Node, args: Sequence[int]) -> bool:
    """Whether a new name, or an index of positions, is one of the operand's already, or rows are taken along an index that it lacks."""
    free = [program.free[a] for a in args]
    if node.constructor == "Ren":
        return bool(free[0] & view.encoder.indices_of(node.payload[1]))
    if node.constructor != "Take":
        return False
    positions, operand = free
    index = view.encoder.indices_of(node.payload[0])
    return not operand & index or bool(operand & positions & ~index)


def _held_bytes(program: Program, t: int) -> int:
    """The bytes that choosing a term puts into memory: its value's, and those of a computed value that rows are taken of."""
    term = program.terms[t]
    read = _read_rows(program, term) if isinstance(term, ir.Take) else None
    return (program.nbytes(t) if isinstance(term, HELD) else 0) + (0 if read is None else program.nbytes(read))


def _read_rows(program: Program, take: ir.Take) -> int | None:
    """The computed value that a take reads whole, if it reads one.

    Columns of rows of an argument are taken in chunks of rows, rows of its columns are not: such takes are all in one order.
    """
    t, along = take.arg, [take.index]
    while isinstance(term := program.terms[t], ir.Take) and not program.free[term.positions] >> take.index & 1:
        t, along = term.arg, [*along, term.index]
    if not ir.is_leaf(term):
        return t
    axes = sum(term.axes, ()) if isinstance(term, ir.Input | ir.Const) else ()
    places = [axes.index(i) for i in along if i in axes]
    return take.arg if places != sorted(places, reverse=True) else None


class _Made:
    """The terms of nodes on operands of their classes, in one program: each is made once for the same operands."""

    def __init__(self, view: View) -> None:
        self.view, self.program = view, view.empty_program()
        self._last: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}

    def term(self, c: int, k: int, known: Mapping[int, int]) -> int:
        """The term of node ``k`` of class ``c`` on the terms that are ``known`` of its operands."""
        node = self.view.nodes[c][k]
        args = tuple([known[a] for a in node.children])
        before = self._last.get((c, k))
        if before is not None and before[0] == args:
            return before[1]
        t = self.view.add(self.program, c, node, args)
        self._last[c, k] = args, t
        return t


def _fewest_indices(made: _Made, order: Sequence[tuple[int, int]]) -> dict[int, int]:
    """A term of each class that depends on as few indices as any found: ``sum_j [i == j]`` and ``1`` may be one class."""
    known: dict[int, int] = {}
    free = made.program.free
    changed = True
    while changed:
        changed = False
        for c, k in order:
            t = made.term(c, k, known)
            if c not in known:
                known[c] = t
            elif free[t].bit_count() < free[known[c]].bit_count():
                known[c], changed = t, True
    return known


def _bottom_up(view: View) -> list[tuple[int, int]]:
    """All nodes that a program can be built from, each after some node of each of its operands."""
    waiting = [list(counts) for counts in view.operand_counts]
    order: list[tuple[int, int]] = []
    ready = [(c, k) for c, nodes in enumerate(view.nodes) for k, node in enumerate(nodes) if not node.children]
    done: set[int] = set()
    while ready:
        following: list[tuple[int, int]] = []
        for c, k in ready:
            order.append((c, k))
            if c in done:
                continue
            done.add(c)
            for p, j in view.parents[c]:
                waiting[p][j] -= 1
                if waiting[p][j] == 0:
                    following.append((p, j))
        ready = following
    return order


def elements(term: ir.Term) -> int:
    """The indices along which a term may be written out element by element, should rules say so."""
    return searched(term.call) if isinstance(term, ir.Block) else ir.folded(term)
