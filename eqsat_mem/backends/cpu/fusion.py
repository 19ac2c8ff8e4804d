"""A model of how XLA:CPU fuses operations into kernels, and in which order these run.

XLA:CPU passes folds and contractions, with the elementwise operations around them, to a kernel library (YNNPACK). The library
folds and contracts float32 and float64; it computes the operations that it supports inside a fold, and materialises the operands
of all others. The facts come from optimised HLO and from measured resident memory, with jaxlib 0.10 on x86.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from eqsat_mem.backends.cpu.kernel_library import folds_in_library, is_narrow, is_wide, takes, widens
from eqsat_mem.backends.cpu.layouts import is_turned
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Block, Dot, Fold, Literal, Map, Program, Rename, Term, axes_mask, bits, children
from eqsat_mem.ir.loop_tree import Seq, made
from eqsat_mem.schedule.fusion import Copy, Fused
from eqsat_mem.schedule.kernel import moves
from eqsat_mem.schedule.whole_terms import has_effects

LONG = 2**15
"""The extent of a fold's result along some index above which the fold takes ten times as long if the elementwise operations that
read it are in its fusion: the kernel library then copies an operand. Only folds of values that are not materialised, such as all
pairwise differences, become slower. Sweep: benchmarks/calibration/long_folds.py."""

REPEATED = 8
"""The most elements that readers may have for each of a fold that is written out. For more it is kept: to compute it for each takes longer
(distances of 200 points, 16 coordinates each, in a loss of all triplets: 48 ms written out, 2.4 kept). Sweep:
benchmarks/calibration/repeated_folds.py, where one kernel reads the fold; forces between points are faster written out up to 8."""

MET = 2**12
"""The least number of results of folds that meet in one operation for which the library has all in one fusion, where what they repeat is
no array. Sweep: benchmarks/calibration/meeting_folds.py."""

IN_PLACE = frozenset({"sort"})
"""The operations that write their results over copies of their operands."""


# --- rows streamed from kernel to kernel --------------------------------------------------------------


def streamed(ex: Extraction, fused: Fused, escapes: Collection[int], apart: Collection[int]) -> frozenset[int]:
    """Return the values that the kernel library streams row by row instead of materialising them.

    Such a value is folded along its rows and read again together with the result of the fold, as in a softmax or a variance, and only
    by kernels of the library. The library runs these kernels together, as one with a single result. It does not do so by columns.

    Args:
        ex: the program.
        fused: the kernels of a region.
        escapes: the values that are needed as arrays: after the region, in its loops and nested sequences, or under renamed indices.
        apart: the values that a fence keeps out of the library.
    """
    readers: dict[int, list[int]] = {}
    for kernel, read in zip(fused.kept, fused.operands, strict=True):
        for t in read:
            readers.setdefault(t, []).append(kernel if isinstance(kernel, int) else -1)
    terms = ex.program.terms
    members = {kernel: own for kernel, own in zip(fused.kept, fused.members, strict=True) if isinstance(kernel, int)}
    known = {u for u, own in members.items() if all(takes(ex.program, m) for m in own if isinstance(terms[m], Map))}
    found: set[int] = set()
    for t in reversed(members):
        users = readers.get(t, [])
        if not users or t in escapes or t in ex.exact or t in apart or not all(u in known and _runs_rows(ex, u, t) for u in users):
            continue
        folded_in = any(isinstance(ex.program.terms[u], Fold) for u in users)
        inside = all(u not in escapes and set(readers.get(u, ())) <= set(users) for u in users[:-1])
        term = ex.program.terms[t]
        comes_back = takes(ex.program, t) and folded_in and inside
        goes_on = isinstance(term, Dot) and not _is_batched(ex, term) and len(users) == 1 and (folded_in or users[0] in found)
        if comes_back or goes_on:
            found.add(t)
    return frozenset(found)


def _runs_rows(ex: Extraction, kernel: int, t: int) -> bool:
    """Whether the library, which supports all operations of a kernel, runs it, and along the rows of value ``t`` if it is a fold."""
    program, root = ex.program, ex.program.terms[kernel]
    row = program.free[t].bit_length() - 1
    along = isinstance(root, Fold) and row >= 0 and root.over >> row & 1 and not ex.unrolls.get(kernel)
    return bool(isinstance(root, Map) or along)


def _is_batched(ex: Extraction, term: Dot) -> bool:
    return bool(ex.program.free[term.lhs] & ex.program.free[term.rhs] & ~term.over)


# --- the order of kernels, and copies -----------------------------------------------------------------


def as_run(ex: Extraction, kernels: Fused, emitted: bool) -> Fused:
    """Return the kernels in the order in which XLA:CPU runs them: in the order in which their operands become available.

    The result includes the copies that XLA:CPU materialises, with the positions of the kernels between which they are live; those of values
    that several kernels repeat are fewer where the program is ``emitted``.
    """
    steps, count = kernels.kept, len(kernels.kept)
    maker = {t: k for k, step in enumerate(steps) for t in made(step)}
    waits = [{maker[t] for t in operands if t in maker} for operands in kernels.operands]
    effects = [k for k, step in enumerate(steps) if isinstance(step, int) and has_effects(ex.program.terms[step])]
    for before, after in itertools.pairwise(effects):
        waits[after].add(before)
    copies = list(_copies(ex, kernels, emitted))
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
    """Return the nodes in the order in which they become ready.

    Args:
        waits: for each node, the nodes for which it waits.
        first: of the nodes that wait for none, those that precede the others.
    """
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


def _copies(ex: Extraction, kernels: Fused, emitted: bool) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the copies that XLA:CPU materialises in addition to the program's own values.

    Narrow floating-point numbers are widened for contractions and sums. Contractions read arguments whose axes do not merge from copies
    in another order. A scalar or small array that several operations read broadcast
    to the same larger shape, one of them in a fold by the kernel library, is broadcast in memory once for all of them: the library
    could broadcast it inside its fusion only if no other kernel needed it, as none does where emitted source makes it anew for each.

    Yields:
        The copied term, the indices of the copy's shape as bits, and the positions of the kernels that read the copy.
    """
    program = ex.program
    widening = [(k, t) for k, t in enumerate(kernels.kept) if isinstance(t, int) and widens(program.terms[t])]
    for c in sorted({c for _, t in widening for c in program.operands(t) if is_narrow(program, c)}.difference(kernels.kept)):
        yield c, program.free[c], [k for k, t in widening if c in program.operands(t)]
    yield from _turned(program, kernels)
    yield from _repeated(program, kernels)
    for repeat in _repeats(ex, kernels):
        if not (repeat.apart if emitted else _meet(ex, kernels, repeat)):
            yield repeat.term, repeat.over, [k for k in repeat.kernels if folds_in_library(ex, kernels.kept[k])]


@dataclass(frozen=True)
class _Repeat:
    """A value that elementwise operations of several kernels, one of them a fold of the library, repeat along the same other axes.

    Attributes:
        term: the value.
        over: the indices of the shape to which it is repeated, as bits.
        readers: the operations.
        kernels: the positions of the kernels that compute them, ascending.
        apart: whether each operation is computed in one kernel only, and the value is no number: compilers compute otherwise with those
            that they know.
    """

    term: int
    over: int
    readers: frozenset[int]
    kernels: tuple[int, ...]
    apart: bool


def _repeats(ex: Extraction, kernels: Fused) -> Iterator[_Repeat]:
    """Yield the values that several kernels repeat, if one of these is a fold of the library. Shapes of different indices with the same
    extents count as one, as for the distances of ``x`` to equally many ``y`` and to ``x`` itself."""
    program = ex.program
    computed_in: dict[int, list[int]] = {}
    for k, group in enumerate(kernels.members):
        for t in group:
            computed_in.setdefault(t, []).append(k)
    readers: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    for t in sorted(computed_in):
        if isinstance(program.terms[t], Map):
            for c in program.operands(t):
                if program.free[c] != program.free[t]:
                    key = c, tuple(sorted(program.indices[i].extent for i in bits(program.free[t] & ~program.free[c])))
                    readers.setdefault(key, set()).add(t)
    for (c, _), users in readers.items():
        reading = sorted({k for u in users for k in computed_in[u]})
        folds = [k for k in reading if folds_in_library(ex, kernels.kept[k])]
        if folds and not users.issubset(kernels.members[folds[0]]):
            apart = not isinstance(program.terms[c], Literal) and all(len(computed_in[u]) == 1 for u in users)
            yield _Repeat(c, program.free[min(users)], frozenset(users), tuple(reading), apart)


def repeated_apart(ex: Extraction, kernels: Fused) -> dict[tuple[int, int], int]:
    """The reads of values that several kernels repeat (the operation, the value), except those in the first, each with its kernel."""
    place = {t: k for k, group in enumerate(kernels.members) for t in group}
    found: dict[tuple[int, int], int] = {}
    for repeat in _repeats(ex, kernels):
        if repeat.apart:
            found |= {(t, repeat.term): place[t] for t in repeat.readers if place[t] != repeat.kernels[0]}
    return found


def _meet(ex: Extraction, kernels: Fused, repeat: _Repeat) -> bool:
    """Whether the library computes all kernels that repeat a value in one fusion: folds whose results meet, elementwise, in one kernel
    that it computes."""
    program, steps = ex.program, [kernels.kept[k] for k in repeat.kernels]
    folds = {t for t in steps if isinstance(t, int) and folds_in_library(ex, t)}
    users = [members for operands, members in zip(kernels.operands, kernels.members, strict=True) if operands & folds]
    if len(folds) < len(steps) or len(users) != 1 or any(program.extent(program.free[t]) < MET for t in folds):
        return False
    joining = [t for t in users[0] if folds.intersection(program.operands(t))]
    return all(
        isinstance(program.terms[t], Map) and takes(program, t) and all(program.free[t] == program.free[f] for f in folds) for t in joining
    )


def _turned(program: Program, kernels: Fused) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the copies of arguments whose axes do not merge into those of a matrix for the contraction that reads them."""
    for k, t in enumerate(kernels.kept):
        if isinstance(t, int) and isinstance(dot := program.terms[t], Dot) and is_wide(dot.dtype):
            for c in sorted({dot.lhs, dot.rhs}):
                if is_turned(program, dot, c):
                    yield c, program.free[c], [k]


def _repeated(program: Program, kernels: Fused) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the values that are repeated along axes for an operation that is no elementwise code, and so does not compute them."""
    for k, t in enumerate(kernels.kept):
        if isinstance(t, int) and isinstance(term := program.terms[t], Block) and not (moves(term) or term.call.prim.name in IN_PLACE):
            for c, axes in {*zip(term.args, term.call.in_axes, strict=True)}:
                if axes_mask(axes) & ~program.free[c]:
                    yield c, program.free[c] | axes_mask(axes), [k]


# --- folds that continue, or stall --------------------------------------------------------------------


def lone_operands(ex: Extraction, fused: Fused, escapes: Collection[int]) -> frozenset[int]:
    """The kept operands of folds that the kernel library would compute inside its fusion: it knows them, and nothing else reads them."""
    terms = ex.program.terms
    reading = Counter(t for operands in fused.operands for t in operands)
    folds = (t for t in fused.kept if isinstance(t, int) and folds_in_library(ex, t))
    args = {term.arg for t in folds if isinstance(term := terms[t], Fold)}
    alone = (t for t in args.intersection(fused.kept) if reading[t] == 1 and t not in escapes)
    return frozenset(t for t in alone if ex.unrolls.get(t) or takes(ex.program, t))


def repeated_folds(ex: Extraction, is_cheap: Callable[[Program, int], bool]) -> frozenset[int]:
    """The folds written out whose elements, or cheap values of these, elementwise operations repeat along long other indices."""
    program = ex.program
    if not any(isinstance(program.terms[t], Fold) for t in ex.unrolls):
        return frozenset()
    along = [0] * len(program.terms)
    for t in program.reachable()[::-1]:  # readers first
        term = program.terms[t]
        if isinstance(term, Map):
            beyond = program.free[t] | (along[t] if is_cheap(program, t) else 0)
        elif isinstance(term, Rename):
            beyond = along[t] & ~program.free[t]
        else:
            continue
        for a in children(term):
            along[a] |= beyond
    folds = (t for t in ex.unrolls if isinstance(program.terms[t], Fold))
    return frozenset(t for t in folds if program.extent(along[t] & ~program.free[t]) > REPEATED)


def held_once(ex: Extraction, fused: Fused, is_cheap: Callable[[Program, int], bool]) -> frozenset[int]:
    """The elementwise values that several kernels read from one array, as they are not cheap.

    A fence is cheap: each kernel would compute it again, into an array of its own.
    """
    reading = Counter(t for operands in fused.operands for t in operands)
    maps = (t for t in fused.kept if isinstance(t, int) and isinstance(ex.program.terms[t], Map))
    return frozenset(t for t in maps if reading[t] > 1 and not is_cheap(ex.program, t))


def ends(ex: Extraction, seq: Seq, fused: Fused) -> frozenset[int]:
    """Return the folds and contractions of a region after which a fence must end the fusion of XLA:CPU's kernel library.

    The library fuses the readers of a fold's result, broadcasts included, into the fold's own fusion up to an operation that it does
    not support. The value computed so far is then materialised, even a vector broadcast to a matrix; and the library may copy an operand
    of the fold. Streamed rows are left to the library unless they come from a contraction, for which it would allocate memory that XLA
    does not report. A fold also takes into its fusion a contraction with what nothing else reads, up to a whole layer of a network, and the
    numbers in that, such as those of a GELU, become arrays of its shape.

    Args:
        ex: the program.
        seq: the region.
        fused: the kernels of the region.
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
                wide = isinstance(program.terms[c], Dot) and is_wide(program.terms[c].dtype)
                if folds_in_library(ex, c) or (wide and program.free[s] & ~program.free[c]):
                    found.add(c)
    own = _with_own_operands(ex, seq, read) - fused.streamed
    found |= {c for s, operands in read.items() if folds_in_library(ex, s) for c in operands & own}
    return frozenset(t for t in found.intersection(read) if not streams(t))


def _with_own_operands(ex: Extraction, seq: Seq, read: Mapping[int, Collection[int]]) -> frozenset[int]:
    """Return the contractions whose kernels read (``read``, by kernel) a value that nothing else reads and that the library can compute."""
    terms = ex.program.terms
    alone = {t for t, times in Counter(itertools.chain.from_iterable(read.values())).items() if times == 1} - seq.outs
    own = {t for t in alone if takes(ex.program, t)}
    contractions = (t for t in read if isinstance(terms[t], Dot) and is_wide(terms[t].dtype))
    return frozenset(t for t in contractions if not own.isdisjoint(read[t]))


def stalls(ex: Extraction, t: int, extents: Sequence[int], readers: Iterable[Term]) -> bool:
    """Whether a value would be a slow fold (see :data:`LONG`) without a fence between it and its readers.

    Args:
        ex: the program.
        t: the value.
        extents: the extent of each index of the program at this place, that of a chunk inside a loop.
        readers: the terms that read the value.
    """
    program, term = ex.program, ex.program.terms[t]
    if not isinstance(term, Fold) or ex.unrolls.get(t) or not is_wide(term.dtype):
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
