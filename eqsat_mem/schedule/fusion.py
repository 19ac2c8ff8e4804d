"""The choice of the values of a straight region that are materialised; others are computed inside the kernels that read them.

XLA fuses elementwise operations and reductions into their consumer, so that such values are never in memory. Results of
contractions, block operations and loops are materialised, as are their operands, and values of several consumers that cost
too much to compute twice. What a compiler does differently, its backend says (:class:`eqsat_mem.schedule.backend.Backend`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Block, Dot, Fold, Map, Program, Rename, Term, bits, children, folded
from eqsat_mem.ir.loop_tree import Loop, Seq, Step
from eqsat_mem.ir.ops import accumulator, block_op
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.kernel import moves
from eqsat_mem.schedule.whole_terms import has_effects


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
    ``streamed`` are kept values that a backend, where they are large, passes from kernel to kernel row by row. ``together`` are folds side
    by side that are one tile kernel, where there is one, by the first of them. ``arrays`` are values that are parts of one array: all of
    it is there until none of them is read.
    """

    kept: tuple[int | Loop | Seq, ...]
    operands: tuple[frozenset[int], ...]
    members: tuple[tuple[int, ...], ...]
    unrolled: frozenset[int] = field(default=frozenset())
    spread: frozenset[int] = field(default=frozenset())
    streamed: frozenset[int] = field(default=frozenset())
    copies: tuple[Copy, ...] = ()
    together: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    arrays: tuple[frozenset[int], ...] = ()

    def members_at(self, ex: Extraction, extents: Sequence[int], backend: Backend) -> Sequence[tuple[int, ...]]:
        """The terms that each kernel computes at these extents: those of folds together where one tile kernel computes them."""
        if not self.together:
            return self.members
        found, place = list(self.members), {step: k for k, step in enumerate(self.kept)}
        for first, steps in self.together.items():
            every = tuple(sorted(set[int]().union(*(self.members[place[t]] for t in steps))))
            if backend.tile(ex, first, every, extents) is not None:
                for t in steps:
                    found[place[t]] = every if t == first else ()
        return found

    def folding(self, ex: Extraction, cut: Collection[int]) -> Fused:
        """These kernels where the folds ``cut`` are not written out: a loop runs over the elements."""
        return replace(self, unrolled=self.unrolled.difference(cut), spread=_spread(ex, self.members, cut))

    @cached_property
    def straight(self) -> tuple[int, ...]:
        """The positions of the kernels that are no loops or stretches."""
        return tuple(p for p, step in enumerate(self.kept) if isinstance(step, int))

    @cached_property
    def nested(self) -> tuple[tuple[int, Loop | Seq], ...]:
        """The loops and stretches, with their positions."""
        return tuple((p, step) for p, step in enumerate(self.kept) if not isinstance(step, int))

    def looped(self, inside: bool) -> list[Seq]:
        """The regions in this one that are in a loop, as it is itself if it is ``inside`` one."""
        return [step.body if isinstance(step, Loop) else step for _, step in self.nested if inside or isinstance(step, Loop)]

    @cached_property
    def last_use(self) -> dict[int, int]:
        """For every value that some step reads: the position of the last such step, or of the last that reads a part of the same array."""
        found = {t: p for p, operands in enumerate(self.operands) for t in operands}
        for array in self.arrays:
            read = array & found.keys()
            found |= dict.fromkeys(read, max((found[t] for t in read), default=0))
        return found

    @cached_property
    def read_last(self) -> tuple[tuple[int, ...], ...]:
        """For every step, the values that no later one reads, nor others of their arrays."""
        found = [[t for t in operands if self.last_use[t] == p] for p, operands in enumerate(self.operands)]
        for t in frozenset().union(*self.arrays) & self.last_use.keys():
            if t not in found[p := self.last_use[t]]:
                found[p].append(t)
        return tuple(map(tuple, found))


Inside = dict[tuple[tuple[Step, ...], frozenset[int], bool], set[int]]
"""The terms that are computed inside the kernels of others, by steps and results of their region and whether it is in no loop."""


def fuse(ex: Extraction, seq: Seq, backend: Backend, as_run: bool = True, is_whole: bool = True, known: Inside | None = None) -> Fused:
    """Group the terms of one region into kernels, as a backend's compiler does; ``is_whole`` unless it is in a loop.

    The kernels come in the order in which they run, unless they are to stay in the region's own (``as_run=False``). What is ``known``
    does not depend on that, and is added to.
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
        views = {term.arg for c in children(program.terms[s]) if isinstance(term := program.terms[c], Rename)}
        escapes |= {t for t in views if not (backend.compares_inside and isinstance(program.terms[t], Map))}  # others are of arrays
    known, region = {} if known is None else known, (seq.steps, seq.outs, is_whole)
    if region not in known:
        known[region] = _virtual(ex, terms, escapes, users, backend, is_whole)
    virtual = known[region]
    kept: list[int | Loop | Seq] = []
    read: list[frozenset[int]] = []
    members: list[tuple[int, ...]] = []
    place: dict[int, int] = {}
    for s in seq.steps:
        if isinstance(s, int):
            if s in virtual:
                continue
            group = _group(ex, s, virtual)
            own = frozenset(c for t in group for c in program.operands(t) if c not in group)
            if _rereads(program.terms[s], backend):  # virtual values that make its operands are computed in its kernels once more
                own = own.union(*(r for k, r in zip(kept, read, strict=True) if k in own and isinstance(k, int)))
            elif as_run and isinstance(program.terms[s], Map):
                again = [place[t] for t in own if t in place and backend.recomputes(program, members[place[t]])]
                own = own.difference(kept[k] for k in again).union(*(read[k] for k in again))
            read.append(own)
            members.append(tuple(group))
            place[s] = len(kept)
        else:
            read.append(_reads(s))
            members.append(())
        kept.append(s)
    kernels = Fused(tuple(kept), tuple(read), tuple(members), frozenset(t for t in terms if ex.unrolls.get(t)), _spread(ex, members))
    return backend.as_run(ex, kernels, escapes, is_whole) if as_run else kernels


def _spread(ex: Extraction, kernels: Iterable[tuple[int, ...]], cut: Collection[int] = ()) -> frozenset[int]:
    """The terms that kernels compute once for each element of an unrolled fold that is none of ``cut``, and these folds."""
    found: set[int] = set()
    for members in kernels:
        written_out = 0
        for t in reversed(members):  # users first
            unrolled = 0 if t in cut else ex.unrolls.get(t, 0)
            written_out |= unrolled
            if unrolled or ex.program.free[t] & written_out:
                found.add(t)
    return frozenset(found)


def taken_apart(ex: Extraction, kernels: Fused, outs: Collection[int]) -> frozenset[int]:
    """The kept values of operations that only move elements, which one kernel reads for the elements of an unrolled fold.

    Each element is moved on its own there, from where it lies: XLA slices what it moves in ten times the time.
    """
    program, readers = ex.program, Counter(t for operands in kernels.operands for t in operands)
    found: set[int] = set()
    for operands, members in zip(kernels.operands, kernels.members, strict=True):
        along = 0
        for t in members:
            along |= ex.unrolls.get(t, 0)
        for t in operands if along else ():
            if readers[t] > 1 or t in outs or not moves(program.terms[t]):
                continue
            alone = all(reader in kernels.spread for reader in members if t in program.operands(reader))
            if alone and program.free[t] & along and not program.free[t] & along & ~ex.splits.get(t, 0):
                found.add(t)
    return frozenset(found)


def reads_others(program: Program, step: int, members: Iterable[int], t: int, extents: Sequence[int]) -> bool:
    """Whether a kernel of these members, for one element of its result, reads several elements of the array of ``t``, or another one: folds
    are inside, or slices and the like."""
    if any(isinstance(program.terms[member], Block) and t in program.operands(member) for member in members):
        return True
    read = (c for member in members for c in children(program.terms[member]) if program.source_of(c) == t)
    return any(extents[i] > 1 for c in read for i in bits(program.free[c] & ~program.free[step]))


def _reads(step: Loop | Seq) -> frozenset[int]:
    return step.body.reads if isinstance(step, Loop) else step.reads


def _virtual(
    ex: Extraction, terms: list[int], escapes: Collection[int], users: dict[int, list[int]], backend: Backend, is_whole: bool
) -> set[int]:
    """The terms that are computed inside other kernels and never materialised; those that escape are not among them.

    An elementwise value with several users is computed in each of them if it is cheap, unless one of them ends in a fold and the
    backend keeps operands of folds. Where kernels compute such a kept value again, they need what it is made of, as its own kernel does.
    One that is read element by element only is none of the operands of folds. A fold that is written out inside others is computed inside
    them while all are as few terms as one may have: each of these folds multiplies what is written, and done, for an element of the result.
    """
    virtual: set[int] = set()
    elements: dict[int, int] = {}
    apart_along: dict[int, int] = {}
    ends: dict[int, frozenset[int]] = {}
    read_into: dict[int, frozenset[int]] = {}
    again = {t for t in terms if any(_rereads(ex.program.terms[u], backend) for u in users[t])}
    kernels = _kernels(ex.program, users)
    for t in reversed(terms):
        read_by = [*dict.fromkeys(kernels[u] for u in users[t])]
        into = frozenset().union(*(ends.get(u, frozenset([u])) for u in read_by))
        first = frozenset().union(*(read_into.get(u, frozenset([u])) for u in read_by))
        rounds = t in ex.exact and len(into) > 1  # two kernels may round it differently
        if rounds and backend.compares_inside:
            rounds = not virtual.issuperset(ex.selected_by_element.get(t, (t,)))
        elements[t] = _read_by_element(ex, t, users[t], virtual, elements) if ex.unrolls else 0
        apart_along[t] = _written_apart_along(ex, t, users[t], virtual, apart_along) if ex.unrolls else 0
        apart = elements[t] and isinstance(ex.program.terms[t], Map) and backend.recomputes(ex.program, (t,))
        is_kept = t in escapes or rounds or _is_too_long(ex, t, apart_along[t], backend)
        if is_kept or not (apart or _is_virtual(ex, t, read_by, into, first, again, backend, is_whole)):
            computed_in = [step for step in into if isinstance(ex.program.terms[step], Map)]
            if computed_in and backend.recomputes(ex.program, (t,)):
                ends[t] = frozenset((t, *computed_in))
        else:
            virtual.add(t)
            ends[t] = into
            if not isinstance(ex.program.terms[t], Fold) or ex.unrolls.get(t):
                read_into[t] = first
    return virtual


def _read_by_element(ex: Extraction, t: int, users: Iterable[int], virtual: Collection[int], elements: Mapping[int, int]) -> int:
    """The indices of a value whose elements are read apart only: by folds that are written out, and by values inside these."""
    found = ex.program.free[t]
    for u in users:
        inside = ex.unrolls.get(u, 0) | (elements[u] if u in virtual else 0)
        found &= inside if t in children(ex.program.terms[u]) else 0
    return found if users else 0


def adds_to_sum(program: Program, t: int, along: int, seq: Seq, fused: Fused) -> bool:
    """Whether a chunk of what a loop along an index sums is never there: a scatter that nothing else reads writes into the sum so far."""
    term = program.terms[t]
    if not isinstance(term, Block) or not term.call.folds >> along & 1 or t not in seq.outs or t in fused.last_use:
        return False
    row = block_op(term.call.prim.name)
    same = row.writes_into and row.monoid is not None and accumulator(row.monoid, term.dtype) == term.dtype
    return same and t in seq.steps  # rather than in a loop inside, whose sum is added to that of the one around


def added_apart(program: Program, seq: Seq, along: int, fused: Fused) -> frozenset[int]:
    """The chunks of what a loop along an index sums, in its body, that nothing else reads there."""
    return frozenset(t for t in seq.outs if t not in fused.last_use and folded(program.terms[t]) >> along & 1)


def _written_apart_along(ex: Extraction, t: int, users: Iterable[int], virtual: Collection[int], known: Mapping[int, int]) -> int:
    """The indices for each of whose elements a value is written by itself if its users compute it, where folds are written out."""
    along = 0
    for u in users:
        along |= ex.unrolls.get(u, 0) | (known[u] if u in virtual else 0)
    return along & ex.program.free[t]


def _is_too_long(ex: Extraction, t: int, along: int, backend: Backend) -> bool:
    """Whether a fold that is written out has more terms in all than folds may have, being written for each element ``along`` indices."""
    own = ex.unrolls.get(t, 0)
    return bool(own and along) and ex.program.extent(own | along) > backend.unrolled_elements


def _kernels(program: Program, terms: Iterable[int]) -> dict[int, int]:
    """The first result of the kernel of each term: a call with several results is one."""
    of_call: dict[tuple[int, tuple[int, ...]], int] = {}
    calls = ((t, program.terms[t]) for t in terms)
    return {t: of_call.setdefault((id(term.call), term.args), t) if isinstance(term, Block) else t for t, term in calls}


def _is_virtual(
    ex: Extraction,
    t: int,
    users: list[int],
    ends: frozenset[int],
    first: frozenset[int],
    again: set[int],
    backend: Backend,
    is_whole: bool,
) -> bool:
    """Whether ``t`` is not materialised; ``ends`` are the kernels that compute it if so, ``again`` those that run more than once.

    ``first`` are the folds and kernels that values made of it reach first. All of them are in a region that ``is_whole``, or in a loop.
    """
    program, term = ex.program, ex.program.terms[t]
    if not users:
        return not has_effects(term)
    if not all(backend.takes_in(program, u) for u in users):
        return False
    if isinstance(term, Map) and not backend.is_cheap(program, t) and ends & again:
        return False
    alone = len(ends) == 1 and not (len(users) > 1 and isinstance(term, Fold))
    folds = [fold for e in first if isinstance(fold := program.terms[e], Fold) and not ex.unrolls.get(e)]
    match term:
        case Map() | Fold() if folds and (isinstance(term, Map) or ex.unrolls.get(t)):
            is_repeated = backend.computes_again(ex, t, ends, len(folds) == len(first), is_whole)
            return is_repeated and backend.fuses_into_fold(ex, t, folds[0], alone)
        case Map():
            is_inside = alone or backend.is_cheap(program, t) or backend.are_one(ex, (t, *ends))
            return is_inside and backend.computes_spread(program, t)
        case Fold() | Dot() if not ex.unrolls.get(t) and backend.computes_in_tiles(ex, program.extent(term.over), ends):
            return True
        case Fold():
            if ex.unrolls.get(t):
                return alone
            few = backend.compute_fold_again(ex, t, first, is_whole)
            return few and all(backend.fuses_fold(ex, t, program.extent(term.over), reader, alone) for reader in first)
        case Block():
            return backend.fuses_block(ex, t, ends, alone or backend.are_one(ex, (t, *ends)))
    return False


def _rereads(term: Term, backend: Backend) -> bool:
    return isinstance(term, Block) and term.call.prim.name in backend.rereads


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
