"""Loops that only add to what they carry: each device may then add to a part of its own, and the sum is made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax.extend.core import ClosedJaxpr

from eqsat_mem.ir import Axes, Block, Call, Input, Map, Program
from eqsat_mem.ir.jaxprs import consts_and_carries
from eqsat_mem.transforms.plan_bodies import BODIES, bodies

Load = Callable[[ClosedJaxpr], Program]
"""Loads the body of a loop as a program."""
LINEAR = frozenset({"add", "sub", "neg"})
"""Elementwise operations of which the parts of a result are those of their operands' parts."""


def carried(call: Call) -> tuple[int, int]:
    """The position of the first carry of a loop among its operands, and the number of carries; a branch has none."""
    if call.prim.name == "scan":
        return consts_and_carries(call.params)
    first = call.params["cond_nconsts"] + call.params["body_nconsts"] if call.prim.name == "while" else len(call.in_axes)
    return first, len(call.in_axes) - first


def addition(call: Call, j: int, load: Load | None) -> int | None:
    """The argument of a loop's body that a carry is, if the turns add to that and read it for nothing else, nor its condition."""
    before, carries = carried(call)
    if not 0 <= j < carries or load is None:
        return None
    *conditions, body = map(load, bodies(call))
    for condition in conditions:
        if any(isinstance(t, Input) and t.slot == call.params["cond_nconsts"] + j for t in condition.terms):
            return None
    slot: int = call.params.get("body_nconsts", before) + j
    return slot if way_to_argument(body, j, slot, load) else None


def way_to_argument(program: Program, k: int, slot: int, load: Load | None) -> list[int]:
    """The terms from a result down to an argument that is added to it, each read by the one before alone; none if there is no such way.

    Loops may lie on it whose turns add to a carry that begins with the term below.
    """
    o, terms, roots = program.outputs[k], program.terms, program.roots()
    reads = [(t, term.axes) for t in program.reachable() if isinstance(term := terms[t], Input) and term.slot == slot]
    if len(reads) != 1 or roots.count(o.term) > 1 or program.readers(o.term):
        return []
    (t, axes), way = reads[0], [reads[0][0]]
    while t != o.term:
        readers = [] if t in roots else program.readers(t)
        if len(readers) == 1 and isinstance(reader := terms[readers[0]], Map) and reader.op in LINEAR:
            t = readers[0]
        elif (above := _going_on(program, t, readers, axes, load)) is not None:
            t, axes = above
        else:
            return []
        way.append(t)
    return way[::-1] if len(way) > 1 and axes == o.axes else []


def _going_on(program: Program, t: int, readers: Sequence[int], axes: Axes, load: Load | None) -> tuple[int, Axes] | None:
    """The result of a loop that adds to a term with these axes, and its axes, where that loop alone reads the term: once, as what a carry
    begins with."""
    loops = {u: term for u in readers if isinstance(term := program.terms[u], Block) and term.call.prim.name in BODIES}
    if not loops or len(loops) < len(readers) or len({(id(term.call), term.args) for term in loops.values()}) > 1:
        return None
    first = next(iter(loops.values()))
    call, position = first.call, first.args.index(t)
    j = position - carried(call)[0]
    if first.args.count(t) > 1 or call.in_axes[position] != axes or addition(call, j, load) is None:
        return None
    return next(((u, call.out_axes[j]) for u, term in loops.items() if term.out == j), None)
