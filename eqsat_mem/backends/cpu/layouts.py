"""Shapes of the buffers in which XLA:CPU writes contractions, and what only they read.

XLA contracts matrices, or batches of them: it merges all rows into one axis, all columns, and all contracted axes, leaves axes of extent
one away, and gives an elementwise value that only contractions read the shape in which they read it. A result may be written over an
operand that dies with it if both have one shape, so ``exp(x @ y)`` of matrices takes no memory of its own, and of three axes it does
(jaxlib 0.10.2: 16 and 32 MiB for an exponential of 16 that is contracted). An argument is there in the order of its axes, and so is an
array into which rows were written: where these do not merge, XLA contracts a copy of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from eqsat_mem.ir import Block, Const, Dot, Fold, Input, Map, Program, Term, bits, children
from eqsat_mem.schedule import copies

UPDATES = frozenset({"dynamic_update_slice", "scatter"})
"""The operations that write into an array, which keeps the order of its axes."""

Merged = frozenset[int]
"""The axes, of more than one element, that are merged into one: a set of them each."""


def is_written_into(program: Program, t: int, step: int, extents: Sequence[int]) -> bool:
    """Whether the elementwise result ``step`` is written over ``t``, of its size, which dies there; where it is not certain, it is.

    The library computes a contraction, elementwise functions of it, and a fold of these in one kernel, whose result has all axes.
    """
    made = program.terms[t]
    if isinstance(made, Dot) and any(extents[i] == 1 for i in bits(program.free[t])):
        return False
    before = _of_result(program, made, extents) if isinstance(made, Dot) else Merged()
    after = _as_read(program, step, extents)
    if before == after:
        return not before or _is_merged(program, step, before, extents)
    return not after and any(isinstance(program.terms[r], Fold) for of in (t, step) for r in program.readers(of))


def is_turned(program: Program, dot: Dot, operand: int) -> bool:
    """Whether an operand of a contraction is an argument, or one with updates, that XLA copies into another order: axes of both operands do
    not stand first, or among the others those that are contracted stand between those that are not."""
    read = program.terms[program.source_of(operand)]
    other = program.free[dot.rhs if operand == dot.lhs else dot.lhs]
    if not _has_order(read) or not ((program.free[operand] ^ other) & ~dot.over):  # not a product of matrices
        return False
    axes = [1 << i for i in copies.order(program, operand)]
    groups = [0 if axis & other & ~dot.over else 1 if axis & dot.over else 2 for axis in axes]
    runs = [group for group, _ in itertools.groupby(groups)]
    return len(runs) > len(set(runs)) or 0 in runs[1:]


def _has_order(term: Term) -> bool:
    """Whether a value is in memory in the order of its axes, whoever reads it."""
    return isinstance(term, Input | Const) or (isinstance(term, Block) and term.call.prim.name in UPDATES)


def _of_result(program: Program, dot: Dot, extents: Sequence[int]) -> Merged:
    left, right = program.free[dot.lhs], program.free[dot.rhs]
    return _merged((left & ~right & ~dot.over, right & ~left & ~dot.over), extents)


def _as_read(program: Program, step: int, extents: Sequence[int]) -> Merged:
    """The axes that are merged in a value since all of its readers are contractions that read it so."""
    readers = [program.terms[r] for r in program.readers(step)]
    if any(o.term == step for o in program.outputs) or not all(isinstance(reader, Dot) for reader in readers):
        return Merged()
    ways = {_of_operand(program, reader, step, extents) for reader in readers if isinstance(reader, Dot)}
    return ways.pop() if len(ways) == 1 else Merged()


def _of_operand(program: Program, dot: Dot, operand: int, extents: Sequence[int]) -> Merged:
    own = program.free[operand]
    other = program.free[dot.rhs if program.source_of(dot.lhs) == operand else dot.lhs]
    return _merged((own & ~other & ~dot.over, own & dot.over), extents)


def _merged(groups: Sequence[int], extents: Sequence[int]) -> Merged:
    long = (sum(1 << i for i in bits(group) if extents[i] > 1) for group in groups)
    return Merged(group for group in long if group.bit_count() > 1)


def _is_merged(program: Program, step: int, axes: Merged, extents: Sequence[int]) -> bool:
    """Whether an elementwise value is computed with these axes merged: XLA moves a change of shape past elementwise operations if all
    of their operands have it."""
    seen, waiting = {step}, [step]
    while waiting:
        for c in children(program.terms[waiting.pop()]):
            term = program.terms[c]
            if isinstance(term, Map):
                waiting += {c} - seen
                seen.add(c)
            elif program.free[c] and not (isinstance(term, Dot) and _of_result(program, term, extents) == axes):
                return False
    return True
