"""The programs of one device that are worth a search: each candidate spread in the ways that are fastest without loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from jax.extend.core import ClosedJaxpr

from eqsat_mem.deadline import NEVER, Deadline
from eqsat_mem.egraph.encode import pointwise
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Block, Dot, Fold, Input, Program, folded
from eqsat_mem.ir.mesh import Names, Placement, Spec, Spreading
from eqsat_mem.mesh.bodies import Bodies, Left
from eqsat_mem.mesh.fourier import one_axis_at_a_time
from eqsat_mem.mesh.invariant import check
from eqsat_mem.mesh.localise import localise, walked
from eqsat_mem.mesh.padding import padded
from eqsat_mem.mesh.parts import carried_sums
from eqsat_mem.mesh.pieces import with_pieces
from eqsat_mem.mesh.row_slices import rows_of_slices
from eqsat_mem.mesh.spreading import spreadings
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.cost_model import exchange_s
from eqsat_mem.schedule.search import straight
from eqsat_mem.transforms.plan_bodies import calls

SEARCHED = 4
"""The number of programs of one device that are searched at a time."""
LARGE = 300
"""Terms from which on only one candidate is spread in all ways, and the others as is best for it."""


@dataclass(frozen=True, eq=False)
class Spread:
    """A program of one device, the program of all that it comes from, and its seconds without loops."""

    local: Extraction
    of: Extraction
    spreading: Spreading
    seconds: float


def spread(
    every: Sequence[Extraction], placement: Placement, backend: Backend, loops: Bodies | None = None, deadline: Deadline = NEVER
) -> Iterator[list[Spread]]:
    """Programs of one device in groups, the fastest first: those along what lies in shares, then along further mesh axes too, each with
    the bodies of its loops planned, then with loops that may run on chunks.

    The first of ``every`` is the program as written; of its programs the fastest is in the first group.
    """
    specs = (*placement.arguments, *placement.results)
    given = None not in specs and any(names for spec in specs for names in spec or ())
    seen: dict[str, float] = {}
    alike: set[Spreading] = set()
    written = every[0].program
    may_be_chunked = loops is not None and any(call.pointwise and loops.are_large(call, written) for call in calls(written))
    chunked = [replace(loops, in_chunks=True)] if loops is not None and may_be_chunked else []
    for idle, bodies in product((False, True) if given else (True,), (loops, *chunked)):
        found = list(_ways(every, placement, backend, bodies, idle, deadline, seen, alike))
        found.sort(key=lambda s: s.seconds)
        groups = [found[k : k + SEARCHED] for k in range(0, len(found), SEARCHED)]
        if groups and not any(s.of is every[0] for s in groups[0]) and len(seen) == len(found):
            groups[0].append(next(s for s in found if s.of is every[0]))
        for group in groups:
            for s in group:
                check(s.local.program)
            yield group


def _ways(
    every: Sequence[Extraction],
    placement: Placement,
    backend: Backend,
    loops: Bodies | None,
    idle: bool,
    deadline: Deadline,
    seen: dict[str, float],
    alike: set[Spreading],
) -> Iterator[Spread]:
    """Programs of one device that are not among those ``seen``, which have their seconds without loops; ways that spread the program as
    written ``alike`` spread the others alike, and only the first is tried for these."""
    large = len(every[0].program.terms) > LARGE
    kept: list[Spreading] = []
    for ex in every:
        tried: dict[str, Spread] = {}
        apart = one_axis_at_a_time(ex, placement)
        for way, divided in spreadings(apart, placement, idle, loops):
            if way in alike or (large and kept and way not in kept):
                continue
            if (tried or kept) and deadline.passed():
                break
            local = _local(apart, placement, divided, way, backend, loops)
            text = _text(local.program)
            if text in tried:
                alike.update([way] if ex is every[0] else [])
                continue
            is_new = text not in seen
            if is_new:
                seen[text] = straight(local, backend).seconds
            tried[text] = Spread(local, ex, way, seen[text])
            if is_new:
                yield tried[text]
        if not kept:
            kept = [s.spreading for s in sorted(tried.values(), key=lambda s: s.seconds)[:2]]


def _text(program: Program) -> str:
    """A program as text, with what its loops may be split along: their bodies, planned or not, are not in it."""
    return "\n".join([str(program), *(f"{call.pointwise} {call.folds}" for call in calls(program))])


def as_it_lies(ex: Extraction, placement: Placement, backend: Backend, loops: Bodies | None = None) -> Extraction:
    """The program of one device that computes along what lies in shares."""
    ex = one_axis_at_a_time(ex, placement)
    way, divided = next(spreadings(ex, placement, idle=False, loops=loops))
    return _local(ex, placement, divided, way, backend, loops)


def _local(
    ex: Extraction, placement: Placement, divided: Mapping[int, Names], way: Spreading, backend: Backend, loops: Bodies | None
) -> Extraction:
    whole, dealt, order = _readied(ex, placement, divided, way)
    return localise(whole, placement, dealt, order, backend, loops)


def _readied(
    ex: Extraction, placement: Placement, divided: Mapping[int, Names], way: Spreading
) -> tuple[Extraction, Mapping[int, Names], Spreading]:
    """A program in whose terms devices can take shares: of pieces, of rows, padded."""
    return padded(with_pieces(rows_of_slices(ex, divided), divided), divided, way, placement.devices)


def left_as(program: Program, placement: Placement, backend: Backend, carried: Mapping[int, int], loops: Bodies | None = None) -> Left:
    """The specs of results that nobody has placed, which lie as they are computed, if every operation may be sliced and folded as it is.

    ``carried`` has for results the arguments that they may be sums with (:func:`eqsat_mem.mesh.parts.carried_sums`). ``loops`` inside are
    asked the same.

    Nothing is saturated, so that loops may be asked how they leave what they carry before they are planned.
    """
    terms = program.terms
    splits = {t: pointwise(program, t) for t in range(len(terms))}
    accumulates = {t: folded(term) for t, term in enumerate(terms) if isinstance(term, Dot | Fold)}
    ex = one_axis_at_a_time(Extraction(program, splits, accumulates), placement)
    way, divided = next(spreadings(ex, placement, idle=False, loops=loops))
    whole, dealt, order = _readied(ex, placement, divided, way)
    walk, found = walked(whole, placement, dealt, order, backend, loops)
    local = found.program
    assert local.shares is not None
    gathers = (term for term in local.terms if isinstance(term, Block) and term.call.prim.name == "gather_shares")
    read = (local.terms[term.args[0]] for term in gathers)
    results, gathered = local.shares.results, frozenset(term.slot for term in read if isinstance(term, Input))
    sums = carried_sums(walk, carried)
    if sums:
        walk, found = walked(whole, replace(placement, sums=sums), dealt, order, backend, loops)
        local = found.program
    extents = [index.extent for index in local.indices]
    inside = sum(flow.exchanged_s for flow in walk.flows.values() if flow is not None)
    return Left(results, gathered, sums, inside + sum(exchange_s(local, t, extents, backend) for t in local.reachable()))


def asking(placement: Placement, backend: Backend, limit: int, load: Callable[[ClosedJaxpr], Program]) -> Bodies:
    """Bodies of loops that are asked how they leave what they carry, and are not planned, under a limit in bytes; each is asked once."""
    known: dict[object, Left] = {}

    def left(program: Program, ins: Sequence[Spec], carried: Mapping[int, int]) -> Left:
        key = id(program), tuple(ins), frozenset(carried.items())
        if key not in known:
            known[key] = left_as(program, placement.of(ins, (None,) * len(program.outputs)), backend, carried, own)
        return known[key]

    own = Bodies(limit, lambda body, lies, room: (None, 0), load, left)
    return own
