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


def additions(call: Call, load: Load | None) -> dict[int, int]:
    """The carries of a loop to which the turns add, and which they do not read otherwise: the argument of the body that each is."""
    before, carries = carried(call)
    if not carries or load is None:
        return {}
    *conditions, body = map(load, bodies(call))
    first = call.params.get("body_nconsts", before)
    read = {t.slot - call.params["cond_nconsts"] for condition in conditions for t in condition.terms if isinstance(t, Input)}
    return {j: first + j for j in range(carries) if j not in read and way_to_argument(body, j, first + j, load)}


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
        above = _result_of(program, t, readers)
        if len(readers) == 1 and isinstance(reader := terms[readers[0]], Map) and reader.op in LINEAR:
            t = readers[0]
        elif above is None or above.out not in additions(above.call, load) or _begins(above) != axes:
            return []
        else:
            t, axes = next(u for u in readers if terms[u] == above), above.call.out_axes[above.out]
        way.append(t)
    return way[::-1] if len(way) > 1 and axes == o.axes else []


def _result_of(program: Program, t: int, readers: Sequence[int]) -> Block | None:
    """The result of a loop that goes on from a term, where that loop alone reads it, once, as what a carry begins with."""
    loops = [term for u in readers if isinstance(term := program.terms[u], Block) and term.call.prim.name in BODIES]
    if not loops or len(loops) < len(readers) or any((o.call, o.args) != (loops[0].call, loops[0].args) for o in loops):
        return None
    j = loops[0].args.index(t) - carried(loops[0].call)[0]
    return next((o for o in loops if o.out == j), None) if loops[0].args.count(t) == 1 else None


def _begins(result: Block) -> Axes:
    """The axes of what the carry begins with that a loop leaves as this result."""
    return result.call.in_axes[carried(result.call)[0] + result.out]
