"""Which values of a straight region a compiler keeps, and which it only computes on the way.

XLA fuses elementwise operations and reductions into their consumer, so that such values are never in memory. What is kept: results of
contractions, block operations and loops, whatever those read, and values that several consumers need and that are too dear to compute
twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Block, Dot, Fold, Map, Program, Rename, Term, bits, children
from eqsat_mem.ir.loop_tree import Loop, Seq, made
from eqsat_mem.ir.ops import MONOIDS, block_op, map_row
from eqsat_mem.schedule.cost_model import Folds
from eqsat_mem.schedule.split import has_effects

INVERTED = ("sqrt", "rsqrt", "exp", "pow")
"""Operations by whose inverse XLA multiplies rather than divide by their result."""
WIDE = ("float32", "float64")
"""The dtypes that the kernel library folds, and computes with."""
NARROW = ("bfloat16", "float16")
"""Floating-point dtypes that are widened for contractions."""
SMALL_FOLD = 64
"""A fold over at most so many elements is computed inside its consumer where folds are not left to a library."""

LONG = 2**15
"""A fold over what no array holds, as of all differences, with a result longer than this along some index, takes ten times as long where
XLA:CPU runs the elementwise operations that read it with it: the kernel library then copies an operand apart."""


@dataclass(frozen=True)
class Copy:
    """A value written out along the indices ``over`` for kernels ``first`` to ``last``."""

    term: int
    over: int
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Fused:
    """A region with the values it keeps, in the order in which kernels run, each with the kept values and outer values it reads.

    ``unrolled`` folds are written out element by element, and with them the terms that are ``spread`` over these elements.
    ``streamed`` are kept values that XLA:CPU, where they are large, passes from kernel to kernel row by row: see :func:`_streamed`.
    """

    kept: tuple[int | Loop | Seq, ...]
    operands: tuple[frozenset[int], ...]
    members: tuple[tuple[int, ...], ...]
    unrolled: frozenset[int] = field(default=frozenset())
    spread: frozenset[int] = field(default=frozenset())
    streamed: frozenset[int] = field(default=frozenset())
    copies: tuple[Copy, ...] = ()

    @cached_property
    def last_use(self) -> dict[int, int]:
        """For every value that some step reads: the position of the last such step."""
        return {t: p for p, operands in enumerate(self.operands) for t in operands}


def fuse(ex: Extraction, seq: Seq, folds: Folds = Folds.LIBRARY, as_run: bool = True) -> Fused:
    """Group the terms of one region into kernels, as a device does that folds so.

    The kernels come in the order in which XLA:CPU runs them unless they are to stay in the region's own.
    """
    program = ex.program
    terms = [s for s in seq.steps if isinstance(s, int)]
    inside = set(terms)
    users: dict[int, list[int]] = {t: [] for t in terms}
    escapes = set(seq.outs)
    for s in seq.steps:
        if not isinstance(s, int):
            escapes |= _reads(s) & inside
            continue
        for c in set(program.operands(s)) & inside:
            users[c].append(s)
        escapes |= {term.arg for c in children(program.terms[s]) if isinstance(term := program.terms[c], Rename)}  # views are of arrays
    virtual = _virtual(ex, [t for t in terms if t not in escapes], users, folds)
    kept: list[int | Loop | Seq] = []
    read: list[frozenset[int]] = []
    members: list[tuple[int, ...]] = []
    for s in seq.steps:
        if isinstance(s, int):
            if s in virtual:
                continue
            group = _group(ex, s, virtual)
            own = frozenset(c for t in group for c in program.operands(t) if c not in group)
            if _rereads(program.terms[s]):  # what makes its operands is computed in its kernels once more
                own = own.union(*(r for k, r in zip(kept, read, strict=True) if k in own and isinstance(k, int)))
            elif folds.by_library and as_run and isinstance(program.terms[s], Map):  # what is cheap is rather computed again than read
                again = [k for k, t in enumerate(kept) if t in own and members[k] and all(_cheap(program, u) for u in members[k])]
                own = own.difference(kept[k] for k in again).union(*(read[k] for k in again))
            read.append(own)
            members.append(tuple(group))
        else:
            read.append(_reads(s))
            members.append(())
        kept.append(s)
    kernels = Fused(tuple(kept), tuple(read), tuple(members), frozenset(t for t in terms if ex.unrolls.get(t)), _spread(ex, members))
    return _as_run(ex, replace(kernels, streamed=_streamed(ex, kernels, escapes))) if folds.by_library and as_run else kernels


def _spread(ex: Extraction, kernels: Iterable[tuple[int, ...]]) -> frozenset[int]:
    """The terms that kernels compute once for each element of an unrolled fold, and these folds."""
    found: set[int] = set()
    for members in kernels:
        written_out = 0
        for t in reversed(members):  # users first
            unrolled = ex.unrolls.get(t, 0)
            written_out |= unrolled
            if unrolled or ex.program.free[t] & written_out:
                found.add(t)
    return frozenset(found)


def _streamed(ex: Extraction, fused: Fused, escapes: set[int]) -> frozenset[int]:
    """Values that are folded along their rows and used again with what came of that, as in a softmax or a variance, by the library alone.

    The library runs such kernels together, as one with a single result, row by row; in columns it does not.
    """
    readers: dict[int, list[int]] = {}
    for kernel, read in zip(fused.kept, fused.operands, strict=True):
        for t in read:
            readers.setdefault(t, []).append(kernel if isinstance(kernel, int) else -1)
    terms = ex.program.terms
    members = {kernel: own for kernel, own in zip(fused.kept, fused.members, strict=True) if isinstance(kernel, int)}
    known = {u for u, own in members.items() if all(_known(term) for m in own if isinstance(term := terms[m], Map))}
    found: set[int] = set()
    for t in reversed(members):
        users = readers.get(t, [])
        if not users or t in escapes or t in ex.exact or not all(u in known and _runs_rows(ex, u, t) for u in users):
            continue
        folded_in = any(isinstance(ex.program.terms[u], Fold) for u in users)
        inside = all(u not in escapes and set(readers.get(u, ())) <= set(users) for u in users[:-1])
        term = ex.program.terms[t]
        comes_back = isinstance(term, Map) and _known(term) and folded_in and inside
        goes_on = isinstance(term, Dot) and not _is_batched(ex, term) and len(users) == 1 and (folded_in or users[0] in found)
        if comes_back or goes_on:
            found.add(t)
    return frozenset(found)


def _runs_rows(ex: Extraction, kernel: int, t: int) -> bool:
    """Does the library, if it knows all operations of this kernel, run it, and along the rows of value ``t`` if it is a fold?"""
    program, root = ex.program, ex.program.terms[kernel]
    row = program.free[t].bit_length() - 1
    along = isinstance(root, Fold) and row >= 0 and root.over >> row & 1 and not ex.unrolls.get(kernel)
    return bool(isinstance(root, Map) or along)


def _is_batched(ex: Extraction, term: Dot) -> bool:
    return bool(ex.program.free[term.lhs] & ex.program.free[term.rhs] & ~term.over)


def stalls(ex: Extraction, t: int, extents: Sequence[int], readers: Iterable[Term]) -> bool:
    """Would a value of these extents be such a fold (see ``LONG``), if it were not kept apart from its readers?"""
    program, term = ex.program, ex.program.terms[t]
    if not isinstance(term, Fold) or ex.unrolls.get(t) or not _is_wide(term.dtype):
        return False
    if max((extents[i] for i in bits(program.free[t])), default=0) <= LONG:
        return False
    stack, joint = [term.arg], program.free[term.arg]
    while stack:
        c = stack.pop()
        if not isinstance(inner := program.terms[c], Map):
            if program.free[c] == joint:
                return False
        else:
            stack.extend(children(inner))
    return any(isinstance(u, Map) for u in readers)


def _as_run(ex: Extraction, kernels: Fused) -> Fused:
    """The kernels as XLA:CPU runs them: each as soon as what it reads is there, those that were ready first before others."""
    steps, count = kernels.kept, len(kernels.kept)
    maker = {t: k for k, step in enumerate(steps) for t in made(step)}
    waits = [{maker[t] for t in operands if t in maker} for operands in kernels.operands]
    effects = [k for k, step in enumerate(steps) if isinstance(step, int) and has_effects(ex.program.terms[step])]
    for before, after in itertools.pairwise(effects):
        waits[after].add(before)
    copies = list(_copies(ex, kernels))
    for copy, (c, _, folds) in enumerate(copies, count):
        waits.append({maker[c]} if c in maker else set())
        for fold in folds:
            waits[fold].add(copy)
    order = _breadth_first(waits, first=range(count, len(waits)))
    place = {k: n for n, k in enumerate(k for k in order if k < count)}
    run_before = dict(zip(order, itertools.accumulate((k < count for k in order), initial=0)))
    return Fused(
        tuple(steps[k] for k in place),
        tuple(kernels.operands[k] for k in place),
        tuple(kernels.members[k] for k in place),
        kernels.unrolled,
        kernels.spread,
        kernels.streamed,
        tuple(Copy(c, over, run_before[k], max(place[k] for k in folds)) for k, (c, over, folds) in enumerate(copies, count)),
    )


def _breadth_first(waits: Sequence[set[int]], first: range) -> list[int]:
    """Nodes in the order in which they become ready; of those that wait for nothing, ``first`` come first."""
    users: list[list[int]] = [[] for _ in waits]
    for k, needed in enumerate(waits):
        for before in needed:
            users[before].append(k)
    missing = [len(needed) for needed in waits]
    order = [k for k in (*first, *range(first.start)) if not missing[k]]
    for before in order:  # grows meanwhile
        for k in users[before]:
            missing[k] -= 1
            if not missing[k]:
                order.append(k)
    return order


def _copies(ex: Extraction, kernels: Fused) -> Iterator[tuple[int, int, list[int]]]:
    """What XLA:CPU writes out beside the program's own values, with the indices of its shape and the kernels (positions) that need it so.

    Narrow floating-point numbers are widened for contractions and sums. Numbers and small arrays that several operations read at the
    same larger shape, one of them in a fold by the kernel library, are written out once for all, since the library could write them out
    inside its fusion only if nothing else needed them. Shapes of other indices with the same extents are one shape: distances of ``x`` to
    as many ``y``, and to ``x`` itself.
    """
    program = ex.program
    readers: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    shape: dict[tuple[int, tuple[int, ...]], int] = {}
    for t in sorted({t for group in kernels.members for t in group}):
        if isinstance(program.terms[t], Map):
            for c in program.operands(t):
                if program.free[c] != program.free[t]:
                    key = c, tuple(sorted(program.indices[i].extent for i in bits(program.free[t] & ~program.free[c])))
                    readers.setdefault(key, set()).add(t)
                    shape.setdefault(key, program.free[t])
    widening = [(k, t) for k, t in enumerate(kernels.kept) if isinstance(t, int) and _widens(program.terms[t])]
    for c in sorted({c for _, t in widening for c in program.operands(t) if is_narrow(program, c)}.difference(kernels.kept)):
        yield c, program.free[c], [k for k, t in widening if c in program.operands(t)]
    computed_in: dict[int, list[int]] = {}
    for k, group in enumerate(kernels.members):
        for t in group:
            computed_in.setdefault(t, []).append(k)
    for key, users in readers.items():
        c, over = key[0], shape[key]
        reading = sorted({k for u in users for k in computed_in[u]})
        folds = [k for k in reading if _by_library(ex, kernels.kept[k])]
        if folds and not users.issubset(kernels.members[folds[0]]):
            yield c, over, folds


def is_narrow(program: Program, t: int) -> bool:
    """Is a value made of floating-point numbers that XLA:CPU contracts in float32?"""
    return _is_narrow(program.terms[t].dtype)


def _widens(term: Term) -> bool:
    """Does an operation read narrow floating-point numbers from a copy in float32?"""
    return isinstance(term, Dot) or (isinstance(term, Fold) and term.monoid == "add" and str(term.dtype) == "bfloat16")


def _by_library(ex: Extraction, step: int | Loop | Seq) -> bool:
    """Is a step a fold that XLA:CPU leaves to its kernel library?"""
    if not isinstance(step, int) or ex.unrolls.get(step):
        return False
    term = ex.program.terms[step]
    return isinstance(term, Fold) and MONOIDS[term.monoid].library and _is_wide(term.dtype)


def ends(ex: Extraction, seq: Seq, fused: Fused) -> frozenset[int]:
    """The folds and contractions of a region after which XLA:CPU's kernel library would go on where the region does not.

    It takes what reads the result into the fold's own fusion, broadcasts included, until it meets an operation that it does not know. What
    it has made by then is held, be it a vector written out as a matrix; and it may copy an operand of the fold for itself. Rows that are
    streamed are left to it, unless they come from a contraction, for which it would allocate room that nobody is told of.
    """
    read = {step: operands for step, operands in zip(fused.kept, fused.operands) if isinstance(step, int)}

    def streams(t: int) -> bool:
        made_of = (c for c in read[t] & fused.streamed for c in (c, *read[c]) if c in read)
        rows = [isinstance(ex.program.terms[c], Dot) for c in made_of]
        return bool(rows) and not any(rows)

    program, found = ex.program, set()
    for s in seq.steps:
        if isinstance(s, int) and isinstance(program.terms[s], Map):
            for c in program.operands(s):
                wide = isinstance(program.terms[c], Dot) and _is_wide(program.terms[c].dtype)
                if _by_library(ex, c) or (wide and program.free[s] & ~program.free[c]):
                    found.add(c)
    return frozenset(t for t in found.intersection(read) if not streams(t))


def _reads(step: Loop | Seq) -> frozenset[int]:
    return step.body.reads if isinstance(step, Loop) else step.reads


def _takes_in(term: Term) -> bool:
    """Does XLA compute elementwise operands inside this operation?"""
    return isinstance(term, (Map, Fold)) or (isinstance(term, Block) and block_op(term.call.prim.name).fuses)


def _rereads(term: Term) -> bool:
    return isinstance(term, Block) and block_op(term.call.prim.name).rereads


def _virtual(ex: Extraction, terms: list[int], users: dict[int, list[int]], style: Folds) -> set[int]:
    """The terms that are computed on the way to others.

    An elementwise value with several users is computed in each of them if it is cheap, unless one of them ends in a fold: XLA:CPU hands
    folds to a kernel library, does not repeat work there, and keeps the operands of what the library does not know.
    """
    virtual: set[int] = set()
    ends: dict[int, frozenset[int]] = {}
    again = {t for t in terms if any(_rereads(ex.program.terms[u]) for u in users[t])}
    for t in reversed(terms):
        into = frozenset().union(*(ends.get(u, frozenset([u])) for u in users[t]))
        if _computed_on_the_way(ex, t, users[t], into, again, style):
            virtual.add(t)
            ends[t] = into
    return virtual


def _computed_on_the_way(ex: Extraction, t: int, users: list[int], ends: frozenset[int], again: set[int], style: Folds) -> bool:
    """Is ``t`` not held? ``ends`` are the kernels that it is computed in if so, ``again`` those that are computed more than once."""
    program, term = ex.program, ex.program.terms[t]
    if not users:
        return not has_effects(term)
    if t in ex.exact and len(ends) > 1:  # two kernels may round it differently
        return False
    if not all(_takes_in(program.terms[u]) for u in users):
        return False
    if isinstance(term, Map) and not _cheap(program, t) and ends & again:
        return False
    alone = len(ends) == 1 and not (len(users) > 1 and isinstance(term, Fold))
    folds = [e for e in ends if isinstance(program.terms[e], Fold) and not ex.unrolls.get(e)]
    match term:
        case Map() if style.by_library and folds:
            return style is Folds.LIBRARY and alone and _in_library(program, term, program.terms[folds[0]])
        case Map():
            return alone or _cheap(program, t)
        case Fold():
            return alone and (bool(ex.unrolls.get(t)) or (style is Folds.FUSED and program.extent(term.over) <= SMALL_FOLD))
        case Block():
            return term.call.prim.name == "slice" and not folds and all(isinstance(program.terms[e], Map) for e in ends)
    return False


def _cheap(program: Program, t: int) -> bool:
    """Does XLA compute an operation again for each reader? Among others a division that it turns into a product with what is held."""
    term = program.terms[t]
    if not isinstance(term, Map) or term.op != "div":
        return isinstance(term, Map) and map_row(term).cheap
    below = program.terms[term.args[1]]
    return program.free[term.args[1]] != program.free[t] or (isinstance(below, Map) and below.op in INVERTED)


def _in_library(program: Program, term: Map, fold: Term) -> bool:
    """Can XLA:CPU's kernel library compute this operation inside this fold?"""
    assert isinstance(fold, Fold)
    if not MONOIDS[fold.monoid].library or _widens(fold):
        return False
    if term.op == "convert_element_type":
        wider, narrow = term, program.terms[term.args[0]]
        computed_wide = isinstance(narrow, Map) and not map_row(narrow).library
        return str(wider.dtype) == "float32" and str(narrow.dtype) == "bfloat16" and not computed_wide
    return _known(term) or (str(term.dtype) == "bfloat16" and map_row(term).library)


def _known(term: Map) -> bool:
    """Is this operation in XLA:CPU's kernel library?"""
    return _is_wide(term.dtype) and map_row(term).library


@cache
def _is_wide(dtype: Any) -> bool:
    return str(dtype) in WIDE


@cache
def _is_narrow(dtype: Any) -> bool:
    return str(dtype) in NARROW


def _group(ex: Extraction, root: int, virtual: set[int]) -> list[int]:
    """``root`` with all virtual terms that it computes on the way, ascending."""
    seen = {root}
    stack = [root]
    while stack:
        for c in ex.program.operands(stack.pop()):
            if c in virtual and c not in seen:
                seen.add(c)
                stack.append(c)
    return sorted(seen)
