"""Folds of pairs as tile kernels: which indices are rows and columns, what is read, and in which order of axes.

A fold over one index of what is computed elementwise for all pairs of it and another is one kernel that holds nothing but operands
and results: a block of threads keeps the partial results of some rows while blocks of columns pass by. A partial result may be several
numbers: a search keeps an extreme and its place, ``top_k`` the first of them.

Several folds of the same pairs may be one kernel (:func:`joined`). Where one is a maximum, sums of exponentials less a level that is made
of it (:class:`eqsat_mem.egraph.online_folds.Rescaled`) are such folds, too: they are taken less the largest number so far, and adjusted to
the level in the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.egraph.online_folds import Rescaled
from eqsat_mem.ir import Block, Dot, Fold, Iota, Literal, Map, Program, bits, children, folded, mask_of
from eqsat_mem.ir.loop_tree import Step
from eqsat_mem.ir.ops import block_op, picks
from eqsat_mem.schedule.fusion import Fused


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
        step: the fold, or one of the results of one; the first of several.
        steps: all folds that the kernel keeps.
        folded: the values that they combine.
        streamed: of the folds that are sums of exponentials less a level, that level; the first fold is then the maximum that it is
            made of.
        members: the folds, and all terms that they compute for each pair, ascending. What depends on rows or on columns alone is computed
            ahead, as arrays.
        rows: the index of the results that is cut into blocks.
        columns: the index that is folded.
        batch: the other indices of the results.
        written_out: indices of short folds and contractions inside, and further ones that the fold itself folds: computed element by
            element.
        reads: the values that the kernel reads.
    """

    step: int
    steps: tuple[int, ...]
    folded: tuple[int, ...]
    streamed: tuple[Rescaled, ...]
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

    def on_the_way(self, program: Program) -> frozenset[int]:
        """The folds, what they compute, and the levels with what is computed of the folds for them."""
        return frozenset(self.members).union(_made_of(program, {known.level for known in self.streamed}, self.step))


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
    if step not in inside or not ex.exact.isdisjoint(inside):
        return None
    how = None if ex.unrolls.get(step) else folding(program, step)
    if how is None or not how.over or not how.rest:
        return None
    steps = (step, *(t for t in members if t != step and is_alike(program, step, t)))
    elements = (*how.elements, *(c for t in steps[1:] for c in children(program.terms[t])))
    streamed = tuple(way for t in steps[1:] if (way := streams(ex, t, steps)) is not None)
    columns, rows = (max(bits(mask), key=lambda i: (extents[i], i)) for mask in (how.over, how.rest))
    pair = 1 << rows | 1 << columns
    if not all(program.free[c] & pair for c in elements):
        return None
    inside = {*steps, *(t for t in inside if program.free[t] & pair == pair)}
    if not all(_is_elementwise(program, t) for t in inside.difference(steps)):
        return None
    inner = [t.over for m in inside.difference(steps) if isinstance(t := program.terms[m], Fold | Dot)]
    written_out = _union(inner) | how.over & ~(1 << columns)
    known = how.rest | 1 << columns | written_out
    operands = {*elements, *(c for m in inside.difference(steps) for c in children(program.terms[m]))} - inside
    operands -= {r.level for r in streamed}
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
    return Pairs(step, steps, elements, streamed, tuple(sorted(inside)), rows, columns, batch, tuple(bits(written_out)), found)


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


# --- several folds of the same pairs ------------------------------------------------------------------------


def is_alike(program: Program, one: int, other: int) -> bool:
    """Whether two terms are folds of the same indices for the same results."""
    first, second = program.terms[one], program.terms[other]
    if not (isinstance(first, Fold) and isinstance(second, Fold)):
        return False
    return first.over == second.over and program.free[one] == program.free[other] and program.free[first.arg] == program.free[second.arg]


def computed_for(program: Program, step: int, members: Collection[int]) -> list[int]:
    """The terms among those of a kernel that one of its folds needs, ascending; other folds it reads."""
    needed, waiting = {step}, [step]
    while waiting:
        new = {c for c in children(program.terms[waiting.pop()]) if c in members and not is_alike(program, step, c)} - needed
        needed |= new
        waiting += new
    return sorted(needed)


def streams(ex: Extraction, t: int, steps: Sequence[int]) -> Rescaled | None:
    """The dependence of a sum on a level that is made of the first of these folds, a maximum; None if there is no such one."""
    known, first = ex.rescales.get(t), ex.program.terms[steps[0]]
    if known is None or not known.exponential or not isinstance(first, Fold) or first.monoid != "max":
        return None
    return known if steps[0] in _made_of(ex.program, [known.level], steps[0]) else None


def joined(ex: Extraction, kernels: Fused, suits: Callable[[int], bool], is_faster: Callable[[Sequence[Sequence[int]]], bool]) -> Fused:
    """The kernels of a region with the folds side by side that one tile kernel may compute.

    Args:
        ex: the program with what rules allow.
        kernels: the kernels.
        suits: tells of a term whether it may be a tile kernel.
        is_faster: tells of the members of several, those of the first fold first, whether they had better be one kernel.
    """
    program = ex.program
    place = {step: k for k, step in enumerate(kernels.kept)}
    folds = [t for t in kernels.kept if isinstance(t, int) and isinstance(program.terms[t], Fold) and suits(t)]
    groups: list[list[int]] = []
    for t in folds:
        for found in groups:
            if _may_join(ex, kernels, place, found, t) and is_faster([kernels.members[place[u]] for u in (*found, t)]):
                found.append(t)
                break
        else:
            groups.append([t])
    together = {group[0]: tuple(group) for group in groups if len(group) > 1}
    if not together:
        return kernels
    later = {t for group in together.values() for t in group[1:]}
    order: list[int] = [place[u] for t in kernels.kept if t not in later for u in (together.get(t, (t,)) if isinstance(t, int) else (t,))]
    read = list(kernels.operands)
    for group in together.values():
        everything = frozenset().union(*(read[place[t]] for t in group))
        levels = {known.level for t in group[1:] if (known := streams(ex, t, group)) is not None}
        made = _made_of(program, levels, group[0]) - {group[0]}
        for t in group:
            read[place[t]] = everything.difference(group, made) if t in (group[0], group[-1]) else frozenset()
    return replace(
        kernels,
        kept=tuple(kernels.kept[k] for k in order),
        operands=tuple(read[k] for k in order),
        members=tuple(kernels.members[k] for k in order),
        together=together,
    )


def _may_join(ex: Extraction, kernels: Fused, place: Mapping[Step, int], group: Sequence[int], t: int) -> bool:
    """Whether a fold computes some of what others do and may be computed with them, where the first of them is: all that it reads is there,
    but for a level."""
    program, over = ex.program, folded(ex.program.terms[t])
    if not is_alike(program, group[0], t):
        return False
    pairs = [m for m in kernels.members[place[t]] if m == t or (program.free[m] & over and program.free[m] & program.free[t])]
    if not set(pairs).intersection(*(kernels.members[place[u]] for u in group)):
        return False
    streamed = streams(ex, t, (*group, t))
    if any(streams(ex, u, group) is None for u in group[1:]) != (streamed is None and len(group) > 1):
        return False
    others = mask_of(group)
    for m in pairs:
        for c in children(program.terms[m]):
            is_level = streamed is not None and m == streamed.shift and c == streamed.level
            if (program.made_of(c) | 1 << c) & others and c not in pairs and not is_level:
                return False
    level = set() if streamed is None else _made_of(program, [streamed.level], group[0])
    if not all(c in group or isinstance(program.terms[c], Map) for c in level):
        return False
    of_level = {c for u in level.difference(group) for c in children(program.terms[u])}
    waits = [place[c] for c in (*kernels.operands[place[t]], *of_level) if c in place and c not in level]
    return all(k < place[group[0]] for k in waits)


def _made_of(program: Program, levels: Collection[int], first: int) -> set[int]:
    """The terms on the way from a term to levels, with both; nothing if there is none."""

    def is_on_the_way(t: int) -> bool:
        return t == first or bool(program.made_of(t) >> first & 1)

    found, waiting = set[int](), [*filter(is_on_the_way, levels)]
    while waiting:
        t = waiting.pop()
        found.add(t)
        waiting += [c for c in children(program.terms[t]) if c not in found and is_on_the_way(c)]
    return found
