"""Operations that move elements or make random bits, and the kernels that compute them inside: all read from compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Collection

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Block, Fold, Map, Program
from eqsat_mem.ir.ops import block_op

READ_IN_PLACE = frozenset({"slice", "slice_at", "shift_to", "dynamic_slice", "gather", "pad", "rev"})
"""Operations that are computed inside the elementwise kernels, folds and scatters that read them: read from compiled programs."""
BITS = "threefry2x32"
"""The operation that makes random bits, inside the kernel that reads them if that is one: read from compiled programs."""
JOINED = "concatenate"
"""The operation that an elementwise kernel computes inside if no other reads its result: read from compiled programs."""


def is_inside(ex: Extraction, t: int, ends: Collection[int], is_one: bool, is_cheap: Callable[[Program, int], bool]) -> bool:
    """Whether a block operation is computed inside the kernels that read it, which end in ``ends``; ``is_one`` if they are one."""
    program, term = ex.program, ex.program.terms[t]
    assert isinstance(term, Block)
    readers = [program.terms[e] for e in ends]
    if term.call.prim.name == JOINED:
        return is_one and all(isinstance(reader, Map) for reader in readers)
    if term.call.prim.name == BITS:
        return is_one
    if term.call.prim.name not in READ_IN_PLACE:
        return False
    tables = {program.source_of(c) for c in term.args[:1]}
    scatters = [reader for reader in readers if not isinstance(reader, Map | Fold)]
    return not scatters or (all(_writes_elsewhere(program, s, tables) for s in scatters) and not _feeds_heavy(program, t, is_cheap))


def takes_in(term: object) -> bool:
    """Whether an operation computes elementwise operands inside itself: a scatter, and what may itself be computed inside."""
    return isinstance(term, Block) and (term.call.prim.name in (JOINED, BITS) or _writes_into(term))


def _writes_into(term: Block) -> bool:
    return block_op(term.call.prim.name).writes_into


def _writes_elsewhere(program: Program, reader: object, tables: Collection[int]) -> bool:
    """Whether a kernel is a scatter into something else than these tables, of which it would read what it has written."""
    return isinstance(reader, Block) and _writes_into(reader) and program.source_of(reader.args[0]) not in tables


def _feeds_heavy(program: Program, t: int, is_cheap: Callable[[Program, int], bool]) -> bool:
    """Whether a function that takes long is made of a value element by element, and read more than once: XLA writes that out."""
    pending, seen = [t], {t}
    while pending:
        for reader in program.readers(pending.pop()):
            if isinstance(program.terms[reader], Map) and reader not in seen:
                if len(program.readers(reader)) > 1 and not is_cheap(program, reader):
                    return True
                seen.add(reader)
                pending.append(reader)
    return False
