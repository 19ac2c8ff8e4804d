"""Copies that XLA makes of what programs and the user's loops take and leave, because it has another order of axes or is there already."""

from __future__ import annotations

from collections.abc import Iterator

from eqsat_mem.ir import Axes, Block, Call, Const, Input, Program, Rename, bits, is_leaf, output_sizes
from eqsat_mem.ir.jaxprs import consts_and_carries
from eqsat_mem.schedule.backend import Backend


def turned_operands(call: Call, args: tuple[int, ...], program: Program, backend: Backend) -> Iterator[int]:
    """The operands of which a scan takes a slice in each step along an axis that is not their first: it steps along a copy in its order."""
    if call.prim.name != "scan":
        return
    for k in range(sum(consts_and_carries(call.params)), len(args)):
        has_order = backend.turns_computed or isinstance(program.terms[program.source_of(args[k])], Input | Const)
        if has_order and order(program, args[k]) != _long(program, call.in_axes[k]):
            yield k


def turned_results(program: Program) -> dict[int, int]:
    """The bytes of a copy of each stack of a scan that the program returns in another order, by term."""
    found: dict[int, int] = {}
    for o, size in zip(program.outputs, output_sizes(program), strict=True):
        term = program.terms[o.term]
        if isinstance(term, Block) and term.call.prim.name == "scan" and order(program, o.term) != _long(program, o.axes):
            found[o.term] = size
    return found


def output_copies(program: Program) -> int:
    """Outputs that are plain reads, or that are returned twice, are copies of their own: their bytes."""
    extra = 0
    seen: set[int] = set()
    for o, size in zip(program.outputs, output_sizes(program), strict=True):
        if is_leaf(program.terms[o.term]) or o.term in seen or size != program.nbytes(o.term):
            extra += size
        seen.add(o.term)
    return extra


def order(program: Program, t: int) -> tuple[int, ...]:
    """The indices of a value, of more than one position, in the order in which it has them."""
    term, read = program.terms[t], program.terms[program.source_of(t)]
    names = dict(term.pairs) if isinstance(term, Rename) else {}
    axes: Axes = tuple((i,) for i in bits(program.free[program.source_of(t)]))
    if isinstance(read, Input | Const | Block):
        axes = read.call.out_axes[read.out] if isinstance(read, Block) else read.axes
    return tuple(names.get(i, i) for i in _long(program, axes))


def _long(program: Program, axes: Axes) -> tuple[int, ...]:
    """The indices of more than one position along axes, in order."""
    return tuple(i for axis in axes for i in axis if program.indices[i].extent > 1)
