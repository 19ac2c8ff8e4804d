"""Folds of pairs as tile kernels: which indices are rows and columns, what is read, and in which order of axes.

A fold over one index of what is computed elementwise for all pairs of it and another is one kernel that holds nothing but operands
and results: a block of threads keeps the partial results of some rows while blocks of columns pass by. A partial result may be several
numbers: a search keeps an extreme and its place, ``top_k`` the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Block, Dot, Fold, Iota, Literal, Map, Program, bits, children, mask_of
from eqsat_mem.ir.ops import block_op, picks


@dataclass(frozen=True)
class Read:
    """A value that a tile kernel reads: a term, the index of each axis of its array, and whether that array is a copy in this order."""

    term: int
    layout: tuple[int, ...]
    copied: bool


@dataclass(frozen=True)
class Folding:
    """The way in which a term folds.

    Attributes:
        elements: the values that it combines; each element of a fold is one number of each.
        over: the indices that it folds.
        rest: the indices of its results for each of which it folds elements of its own.
    """

    elements: tuple[int, ...]
    over: int
    rest: int


def folding(program: Program, t: int) -> Folding | None:
    """The way in which a fold, or a reduction or selection along one axis, folds; None for any other term."""
    term = program.terms[t]
    if isinstance(term, Fold):
        over = program.free[term.arg] & term.over
        return Folding((term.arg,), over, program.free[t]) if over == term.over else None
    selection = block_op(term.call.prim.name).selection if isinstance(term, Block) else None
    if not isinstance(term, Block) or selection is None:
        return None
    call = term.call
    elements = term.args[:1] if picks(call) else term.args[: len(term.args) // 2]
    axis = call.in_axes[0][selection.axis(call.params, len(call.in_axes[0]))]
    bound = _union([program.free[c] for c in elements]) & ~call.pointwise
    rest = program.free[t] & call.pointwise
    if len(axis) != 1 or bound != 1 << axis[0] or not all(isinstance(program.terms[a], Literal) for a in term.args[len(elements) :]):
        return None
    return Folding(elements, bound, rest)


@dataclass(frozen=True)
class Pairs:
    """A fold of pairs.

    Attributes:
        step: the fold, or one of the results of one.
        folded: the values that it combines.
        members: the fold, and all terms that it computes for each pair, ascending. What depends on rows or on columns alone is computed
            ahead, as arrays.
        rows: the index of the results that is cut into blocks.
        columns: the index that is folded.
        batch: the other indices of the results.
        written_out: indices of short folds and contractions inside, and further ones that the fold itself folds: computed element by
            element.
        reads: the values that the kernel reads.
    """

    step: int
    folded: tuple[int, ...]
    members: tuple[int, ...]
    rows: int
    columns: int
    batch: tuple[int, ...]
    written_out: tuple[int, ...]
    reads: tuple[Read, ...]

    @property
    def elements(self) -> int:
        """The set of the indices that are written out."""
        return mask_of(self.written_out)

    @property
    def result(self) -> tuple[int, ...]:
        """The index of each axis of the kernel's results, but for the selected ones."""
        return (*self.batch, self.rows)


@dataclass(frozen=True)
class Tile:
    """A fold of pairs as a kernel with blocks of so many rows and columns.

    Attributes:
        pairs: the fold that it computes.
        block: rows and columns of a block.
        seconds: those of its arithmetic.
        approximate: whether functions are the device's own approximations.
        helpers: the function that source calls, and those that it calls: source then defines them.
        platform: where the kernel runs, as ``jax.lax.platform_dependent`` calls it; elsewhere the fold is computed as usual.
    """

    pairs: Pairs
    block: tuple[int, int]
    seconds: float
    approximate: bool
    helpers: tuple[Callable[..., object], ...]
    platform: str


MOST_WRITTEN_OUT = 16
"""Elements of the folds inside that are written out."""

Order = Callable[[Program, int], "tuple[int, ...] | None"]


def pairs_of(ex: Extraction, step: int, members: Sequence[int], extents: Sequence[int], order: Order) -> Pairs | None:
    """A kernel as a fold of pairs, if it is one.

    Args:
        ex: the program with what rules allow.
        step: the term that the kernel keeps.
        members: the terms that it computes.
        extents: the extents of all indices where it runs.
        order: tells the indices of an array in the order of its axes; None for what is no array.
    """
    program, inside = ex.program, set(members)
    how = None if ex.unrolls.get(step) or not ex.exact.isdisjoint(inside) else folding(program, step)
    if how is None or not how.over or not how.rest:
        return None
    columns, rows = (max(bits(mask), key=lambda i: (extents[i], i)) for mask in (how.over, how.rest))
    pair = 1 << rows | 1 << columns
    if not all(program.free[c] & pair for c in how.elements):
        return None
    inside = {step, *(t for t in inside if program.free[t] & pair == pair)}
    if not all(_is_elementwise(program, t) for t in inside - {step}):
        return None
    inner = [t.over for m in inside - {step} if isinstance(t := program.terms[m], Fold | Dot)]
    written_out = _union(inner) | how.over & ~(1 << columns)
    known = how.rest | 1 << columns | written_out
    operands = {c for m in inside for c in (how.elements if m == step else children(program.terms[m]))} - inside
    read = {c for c in operands if not isinstance(program.terms[c], Literal) and not is_place(program, c, columns)}
    if written_out & (how.rest | 1 << columns) or any(program.free[c] & ~known for c in read):
        return None
    if math.prod(extents[i] for i in bits(written_out)) > MOST_WRITTEN_OUT:
        return None
    if any(program.indices[i].extent % extents[i] for i in bits(known)):  # a loop has a last turn of another size
        return None
    reads = [_read(program, c, rows, columns, extents, None if c in members else order(program, c)) for c in sorted(read)]
    found = tuple(r for r in reads if r is not None)
    batch = tuple(i for i in bits(how.rest) if i != rows)
    if len(found) < len(reads):
        return None
    return Pairs(step, how.elements, tuple(sorted(inside)), rows, columns, batch, tuple(bits(written_out)), found)


def is_place(program: Program, t: int, columns: int) -> bool:
    """Whether a term is the number of each column, which a kernel counts."""
    term = program.terms[t]
    return isinstance(term, Iota) and term.index == columns and str(term.dtype) == "int32"


def _is_elementwise(program: Program, t: int) -> bool:
    """Whether a term inside a kernel is computed for each pair by itself."""
    term = program.terms[t]
    return isinstance(term, Map) or (isinstance(term, Fold | Dot) and not any(term.over & ~program.free[c] for c in children(term)))


def _read(program: Program, t: int, rows: int, columns: int, extents: Sequence[int], stored: tuple[int, ...] | None) -> Read | None:
    """A read of a value: along rows or columns its array must be contiguous, if need be by a copy.

    None for one of all pairs, with which memory sets the pace, whatever computes.
    """
    along = [i for i in (rows, columns) if program.free[t] >> i & 1]
    if len(along) == 2:
        return None
    layout = tuple(bits(program.free[t])) if stored is None else tuple(dict.fromkeys(stored))
    is_array = layout == stored and all(extents[i] == program.indices[i].extent for i in layout)
    if along and layout[-1] != along[-1]:
        layout, is_array = (*(i for i in layout if i != along[-1]), along[-1]), False
    return Read(t, layout, not is_array)


def _union(masks: Sequence[int]) -> int:
    out = 0
    for mask in masks:
        out |= mask
    return out
