"""Elements of stacks as operands of equal operations: the updates of layers, whose gradients a loop over layers has stacked.

A slice is fused into its readers. At a position that the compiler knows, each reader is another kernel, and a compiler that compiles
equal kernels once (:attr:`eqsat_mem.schedule.idioms.Idioms.compiles_equal_kernels_once`) compiles every one of them: 3 to 7 ms each.
"""

from __future__ import annotations

from collections import defaultdict

from eqsat_mem.codegen.source import shape_of
from eqsat_mem.ir import Block, Map, Program, Rename, children
from eqsat_mem.ir.ops import operation_of

LEAST, MOST = 8, 256
"""Elements of fewer slices of an array, or at more positions, are read at the positions as they are: unknown numbers take time, too."""


def unstacked(program: Program) -> dict[int, int]:
    """The slices of one element along the first axis of their arrays, with its position, that operations read.

    Elementwise operations of JAX's may stand between: gradients are scaled, say.
    """
    read = _read_by_operations(program)
    groups: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for t in read:
        term = program.terms[t]
        if isinstance(term, Block) and (position := _element(program, term)) is not None:
            groups[term.args[0]][t] = position
    found: dict[int, int] = {}
    for group in groups.values():
        if len(group) >= LEAST and len({*found.values(), *group.values()}) <= MOST:
            found |= group
    return found


def _read_by_operations(program: Program) -> list[int]:
    """The terms that operations read, as they are or after elementwise operations of JAX's, in order."""
    read: set[int] = set()
    for t in reversed(program.reachable()):
        term = program.terms[t]
        if isinstance(term, Map | Rename) and (t in read or (isinstance(term, Map) and operation_of(dict(term.params)) is not None)):
            read.update(children(term))
    return sorted(read)


def _element(program: Program, term: Block) -> int | None:
    """The position along the first axis at which a slice takes one element of its array."""
    call = term.call
    if call.prim.name != "slice" or any(step != 1 for step in call.params["strides"] or ()):
        return None
    starts, limits = call.params["start_indices"], call.params["limit_indices"]
    shape = shape_of([i.extent for i in program.indices], call.in_axes[0])
    whole = shape[1:] == tuple(limits[1:]) and not any(starts[1:])
    return int(starts[0]) if whole and limits[0] == starts[0] + 1 else None
