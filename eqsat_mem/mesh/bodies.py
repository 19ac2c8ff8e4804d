"""Loops and branches on a mesh: their bodies are planned as programs of their own, whose arguments lie as the operands do.

A carry lies as its first value does where that is made in shares, else in those in which the body takes and leaves it; other results lie as
the body leaves them. Bodies exchange what they need from turn to turn, so that all devices take the same turns and the same branch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from jax.extend.core import ClosedJaxpr

from eqsat_mem.ir import (
    Axes,
    Block,
    Call,
    Input,
    Program,
    Rename,
    argument_bytes,
    axes_mask,
    bits,
    children,
    is_leaf,
    itemsize,
    mask_of,
)
from eqsat_mem.ir.jaxprs import largest_value
from eqsat_mem.ir.mesh import Names, Spec, Sum, whole
from eqsat_mem.mesh import rows
from eqsat_mem.mesh.additions import addition, carried
from eqsat_mem.mesh.pieces import is_pieces
from eqsat_mem.schedule.weights import trips
from eqsat_mem.transforms.plan_bodies import BODIES, SMALL_BYTES, bodies

if TYPE_CHECKING:
    from eqsat_mem.mesh.localise import Localiser

Specs = tuple[Spec, ...]
Links = list[tuple[int, int]]
"""Pairs of indices that name the same positions."""
HELD_WHOLE = 4
"""What a loop gathers in every turn is gathered before it, and sums that it carries are whole on each device, if these take no more than
such a part of the room."""


@dataclass(frozen=True)
class BodySpecs:
    """The specs of the arguments and results of a body, and those that are sums in parts."""

    ins: Specs
    outs: Specs
    sums: tuple[Sum, ...] = ()


@dataclass(frozen=True)
class Left:
    """The specs of the results that a body leaves, the positions of the arguments that it gathers, the sums that it carries, and the
    seconds for which it exchanges values, in loops inside of it too."""

    specs: Specs
    gathered: frozenset[int]
    sums: tuple[Sum, ...]
    exchanged_s: float


BodyPlanner = Callable[[ClosedJaxpr, BodySpecs, int], tuple[Any, int]]
"""Plans a body whose arguments and results lie as given: its schedule, and the bytes that it holds besides its arguments, of which there
should be no more than the last argument says."""


@dataclass
class Bodies:
    """The bodies of a program under a limit, each planned once for each way in which its arguments lie.

    Attributes:
        limit: bytes on each device.
        planner: plans one.
        load: a body as a program, the same object each time.
        left: how the results of a loaded body lie, given how its arguments do and which of these it may carry.
        in_chunks: whether loops that exchange nothing are left as they are, so that they may run on chunks of their operands.
    """

    limit: int
    planner: BodyPlanner
    load: Callable[[ClosedJaxpr], Program]
    left: Callable[[Program, Specs, Mapping[int, int]], Left]
    known: dict[Any, tuple[Any, int]] = field(default_factory=dict)
    in_chunks: bool = False

    def are_large(self, call: Call, program: Program) -> bool:
        """Whether anything in a loop or branch of a program, or anything that it takes or leaves, is worth a plan."""
        if call.prim.name not in BODIES or call.effects:
            return False
        small = min(SMALL_BYTES, self.limit // 16)
        around = max((program.extent(axes_mask(axes)) for axes in (*call.in_axes, *call.out_axes)), default=0)
        widest = max((itemsize(v.dtype) for body in bodies(call) for v in (*body.in_avals, *body.out_avals)), default=1)
        return around * widest >= small or any(largest_value(body) >= small for body in bodies(call))

    def plan(self, body: ClosedJaxpr, lies: BodySpecs, room: int) -> tuple[Any, int]:
        key = id(body), lies, room
        if key not in self.known:
            self.known[key] = self.planner(body, lies, room)
        return self.known[key]

    def links(self, program: Program) -> Links:
        """The indices of operands and results of a program's loops and branches that the bodies have under one name, in pairs."""
        found: Links = []
        for call in {term.call: None for term in map(program.terms.__getitem__, program.reachable()) if isinstance(term, Block)}:
            if self.are_large(call, program):
                found += self._links(call)
        return [(i, j) for i, j in found if i != j and program.indices[i].extent == program.indices[j].extent]

    def _links(self, call: Call) -> Iterator[tuple[int, int]]:
        consts, carries = carried(call)
        for j in range(carries):
            yield from zip(_outermost(call.in_axes[consts + j]), _outermost(call.out_axes[j]), strict=True)
        ins, outs = _stepped(call)
        for body, (given, left) in zip(bodies(call), _divided_up(call, ins, outs), strict=True):
            program = self.load(body)
            names: dict[int, int] = {}
            alike = _firsts(self.links(program))
            reads = ((term.axes, given[term.slot]) for term in program.terms if isinstance(term, Input))
            for inside, around in (*reads, *zip((o.axes for o in program.outputs), left)):
                for i, j in zip(_outermost(inside), _outermost(around), strict=True):
                    if i >= 0 and j >= 0:
                        yield names.setdefault(alike.get(i, i), j), j


def _firsts(links: Links) -> dict[int, int]:
    """One of all indices that links join, for each of them."""
    found: dict[int, int] = {}
    for pair in links:
        one, other = (found.get(i, i) for i in pair)
        found.update({i: one for i, first in found.items() if first == other} | {pair[0]: one, pair[1]: one, other: one})
    return found


@dataclass(frozen=True, eq=False)
class Flow:
    """The loop or branch that a device runs: its call, operands, the indices that each result has shares of, the mesh axes along
    which it is a sum in parts, and the seconds for which its turns exchange values."""

    call: Call
    args: tuple[int, ...]
    shares: tuple[int, ...]
    parts: tuple[Names, ...]
    exchanged_s: float


def flow_of(at: Localiser, term: Block) -> Flow | None:
    """A loop or branch whose bodies are planned for shares; None if they are left as they are."""
    key = id(term.call), term.args
    if key not in at.flows:
        at.flows[key] = _planned(at, term) if at.bodies is not None and _is_planned(at, at.bodies, term) else None
    return at.flows[key]


def _is_planned(at: Localiser, own: Bodies, term: Block) -> bool:
    """Whether the bodies of a call are planned: not if it may run on chunks, as each device computes its share of the results from the
    same shares of the operands, and from others that are whole, or are gathered before it and take little room."""
    call, dealt = term.call, mask_of(at.divided) & ~term.call.pointwise
    if not own.are_large(call, at.old):
        return False
    most = (own.limit - argument_bytes(at.local.program)) // HELD_WHOLE if call.pointwise & mask_of(at.divided) else 0
    exchanged = [axes for a, axes in zip(term.args, call.in_axes, strict=True) if at.old.nbytes(a) > most]
    return not own.in_chunks or any(axes_mask(axes) & dealt for axes in (*exchanged, *call.out_axes))


def _planned(at: Localiser, term: Block) -> Flow:
    call, local = term.call, at.local
    assert at.bodies is not None
    shares, results, left = _shares(at, term)
    sums = left.sums
    begun = {carried(call)[0] + s.result: s.names for s in sums}
    args = tuple(at.begun(a, own & at.old.free[a], begun.get(c, ())) for c, (a, own) in enumerate(zip(term.args, shares, strict=True)))
    ins = tuple(tuple(local.axes(axes, own)) for axes, own in zip(call.in_axes, shares, strict=True))
    outs = tuple(tuple(local.axes(axes, own)) for axes, own in zip(call.out_axes, results, strict=True))
    new = replace(call, in_axes=ins, out_axes=outs, **_chunks(at, call, any((*shares, *results))))
    room = at.bodies.limit - argument_bytes(local.program) - _live(at, args, new)
    *before, last = _specs(at, call, shares, results)
    lies = *(BodySpecs(*specs) for specs in before), BodySpecs(*last, sums)
    made = [at.bodies.plan(body, own, max(room, 0)) for body, own in zip(bodies(call), lies, strict=True)]
    schedules = tuple(s for s, _ in made)
    seconds = tuple(0.0 if s is None else s.seconds for s in schedules)
    planned = replace(new, bodies=schedules, bodies_s=seconds, scratch_bytes=max(held for _, held in made))
    parts = {s.result: s.names for s in sums}
    return Flow(planned, args, results, tuple(parts.get(k, ()) for k in range(len(results))), trips(call) * left.exchanged_s)


def _chunks(at: Localiser, call: Call, dealt: bool) -> dict[str, Any]:
    """The chunks that a loop may run on: none where its body is one of shares, whose extents its operands alone do not tell."""
    if dealt:
        return {"pointwise": 0, "folds": 0, "inside": None}
    plain = at.local.plain
    able = {
        kind: mask_of(plain[i] for i in bits(mask) if i in plain) for kind, mask in (("pointwise", call.pointwise), ("folds", call.folds))
    }
    return able if any(able.values()) else _chunks(at, call, dealt=True)


def _shares(at: Localiser, term: Block) -> tuple[list[int], tuple[int, ...], Left]:
    """The indices of which a loop or branch takes shares of each operand, and of which it leaves shares of each result; how its bodies
    then leave what they make."""
    call = term.call
    assert at.bodies is not None
    consts, carries = carried(call)
    axes_of, left_of = _stepped(call)
    shares = [_lying(at, axes, at.natural(a)) for a, axes in zip(term.args, axes_of, strict=True)]
    for j in range(carries):
        c = consts + j
        names = _names(at, axes_of[c], shares[c])
        shares[c] *= all(at.deals(axis, own) for axis, own in zip(left_of[j], names, strict=True))
    proposed = [j for j in range(carries) if not shares[consts + j]]
    for j in proposed:
        both = zip(axes_of[consts + j], left_of[j], strict=True)
        alike = mask_of(one[0] for one, other in both if one and other and at.divided.get(one[0]) == at.divided.get(other[0]))
        shares[consts + j] = _lying(at, axes_of[consts + j], alike & mask_of(at.divided))
    added = _added_to(at, term)
    while True:
        found = _left(at, call, shares, added)
        refused = [j for j in proposed if shares[consts + j] and found.specs[j] != _names(at, axes_of[consts + j], shares[consts + j])]
        if not refused:
            break
        for j in refused:
            shares[consts + j] = 0
    most = (at.bodies.limit - argument_bytes(at.local.program)) // HELD_WHOLE
    shares, found = _with_sums(at, call, shares, found, added, most)
    left = found.specs
    if carries:  # what the turns would gather each is gathered before them
        early = (c for c in found.gathered if c < consts and at.old.nbytes(term.args[c]) <= most)
        for c in early:
            shares[c] = 0
    given = [_names(at, axes_of[consts + j], shares[consts + j]) for j in range(carries)]
    wanted = _wanted(at, term)
    for j in range(carries, len(left_of)):
        if not any(left[j]):  # what the bodies sum over devices each gets its share of
            left = (*left[:j], _names(at, left_of[j], _lying(at, left_of[j], wanted.get(j, 0))), *left[j + 1 :])
    results = (
        mask_of(axis[0] for axis, own in zip(axes, spec, strict=True) if own and at.deals(axis, own))
        for axes, spec in zip(left_of, (*given, *left[carries:]), strict=True)
    )
    return shares, tuple(results), found


def _with_sums(at: Localiser, call: Call, shares: list[int], found: Left, added: Mapping[int, int], most: int) -> tuple[list[int], Left]:
    """The shares of operands, and what the body then leaves, with sums whole that might be in shares, so that each device has its part.

    No turn exchanges anything for such a sum, but each device has all of its positions: together they take no more than ``most`` bytes, and
    they are whole only if turns exchange no longer for the rest.
    """
    first = carried(call)[0]
    there, apart = {s.result for s in found.sums}, list[int]()
    for j in (j for j in added if j not in there and shares[first + j]):
        most -= at.old.extent(axes_mask(call.out_axes[j])) * itemsize(call.out_dtypes[j])
        apart += [j] if most >= 0 else []
    while apart:
        wholly = [0 if c - first in apart else own for c, own in enumerate(shares)]
        tried = _left(at, call, wholly, added)
        kept = [j for j in apart if j in {s.result for s in tried.sums}]
        if kept == apart:
            return (wholly, tried) if tried.exchanged_s <= found.exchanged_s else (shares, found)
        apart = kept
    return shares, found


def _added_to(at: Localiser, term: Block) -> dict[int, int]:
    """The carries of a loop to which the turns add, and which they do not read otherwise, that begin with zeros or with what each device
    has whole: the argument of each."""
    assert at.bodies is not None
    before, carries = carried(term.call)
    whole = (j for j in range(carries) if not at.natural(term.args[before + j]))
    return {j: slot for j in whole if (slot := addition(term.call, j, at.bodies.load)) is not None}


def _is_found_in(at: Localiser, t: int, reader: int) -> bool:
    """Whether a term reads a value under another name, or rows of it wherever they lie."""
    term = at.old.terms[reader]
    return t not in children(term) or (bool(rows.read(term)) and children(term)[0] == t)


def _taken(at: Localiser, t: int, reader: int) -> int:
    """The indices of which a term takes shares of a value; pieces of it are read wherever it lies."""
    if _is_found_in(at, t, reader):
        return 0
    return mask_of(i for i, _ in at.spreading.order) if is_pieces(at.old.terms[reader]) else at.computed(reader)


def _wanted(at: Localiser, term: Block) -> dict[int, int]:
    """The indices of which all that read a result of a loop or branch take shares, for each of its results."""
    old, found = at.old, dict[int, int]()
    for t in old.reachable():
        other = old.terms[t]
        if not isinstance(other, Block) or other.call is not term.call or other.args != term.args:
            continue
        reads = [_taken(at, t, u) for u in old.readers(t) if not isinstance(old.terms[u], Rename)]
        for o, spec in zip(old.outputs, at.placement.results, strict=True):
            if old.source_of(o.term) == t:
                own = zip(o.axes, spec or (), strict=spec is not None)
                reads.append(mask_of(axis[0] for axis, names in own if names and at.deals(axis, names)) if o.term == t else 0)
        found[other.out] = reduce(operator.and_, reads, old.free[t] & mask_of(at.divided))
    return found


def _left(at: Localiser, call: Call, shares: Sequence[int], added: Mapping[int, int]) -> Left:
    """The specs of the results of a loop or branch that takes such shares of its operands, the operands that it gathers, and its sums.

    Results lie as all bodies that make them leave them, else they are whole.
    """
    assert at.bodies is not None
    specs = _specs(at, call, shares, (0,) * len(call.out_axes))
    of = [ins for ins, _ in _divided_up(call, list(range(len(shares))), [])]
    made, gathered = list[Left](), set[int]()
    for k, (body, (ins, _), operands) in enumerate(zip(bodies(call), specs, of, strict=True), 1):
        made.append(at.bodies.left(at.bodies.load(body), ins, added if k == len(of) else {}))
        gathered.update(operands[slot] for slot in made[-1].gathered)
    leaving = (found.specs for found in (made[1:] if call.prim.name == "while" else made))
    results = (spec if all(other == spec for other in others) else whole(len(spec)) for spec, *others in zip(*leaving, strict=True))
    return Left(tuple(results), frozenset(gathered), made[-1].sums, sum(one.exchanged_s for one in made))


def _stepped(call: Call) -> tuple[list[Axes], list[Axes]]:
    """The axes of operands and results as the bodies have them: without those of a scan's steps."""
    consts, carries = carried(call)
    if call.prim.name != "scan":
        return list(call.in_axes), list(call.out_axes)
    ins, outs = ((*axes[:n], *(a[1:] for a in axes[n:])) for axes, n in ((call.in_axes, consts + carries), (call.out_axes, carries)))
    return list(ins), list(outs)


def _outermost(axes: Axes) -> list[int]:
    """The index that an axis of an array is dealt out by, for each of them; -1 where there is none."""
    return [axis[0] if axis else -1 for axis in axes]


def _lying(at: Localiser, axes: Axes, wanted: int) -> int:
    """The indices of which a body gets shares of an operand, of those wanted; each mesh axis deals out one."""
    taken, shares = set[str](), 0
    for i in _outermost(axes):
        if i >= 0 and wanted >> i & 1 and not taken.intersection(at.divided[i]):
            taken.update(at.divided[i])
            shares |= 1 << i
    return shares


def _names(at: Localiser, axes: Axes, shares: int) -> Spec:
    return tuple(at.divided[i] if i >= 0 and shares >> i & 1 else () for i in _outermost(axes))


def _specs(at: Localiser, call: Call, shares: Sequence[int], results: Sequence[int]) -> list[tuple[Specs, Specs]]:
    """The specs of arguments and results of each body, given the shares of operands and results of the call."""
    ins, outs = ([_names(at, axes, own) for axes, own in zip(side, of, strict=True)] for side, of in zip(_stepped(call), (shares, results)))
    return [(tuple(given), tuple(left)) for given, left in _divided_up(call, ins, outs)]


def _divided_up(call: Call, ins: list[Any], outs: list[Any]) -> list[tuple[list[Any], list[Any]]]:
    """Divide a list for operands and one for results of a call up among its bodies."""
    if call.prim.name == "scan":
        return [(ins, outs)]
    if call.prim.name == "cond":
        return [(ins[1:], outs)] * len(bodies(call))
    first, second = call.params["cond_nconsts"], call.params["cond_nconsts"] + call.params["body_nconsts"]
    return [([*ins[:first], *ins[second:]], [()]), (ins[first:], outs)]


def _live(at: Localiser, args: Sequence[int], call: Call) -> int:
    """Bytes of the operands of a loop or branch that are computed, and of its results."""
    program = at.local.program
    made = sum(map(program.nbytes, {u for u in map(program.source_of, args) if not is_leaf(program.terms[u])}))
    sizes = (program.extent(axes_mask(axes)) * itemsize(dtype) for axes, dtype in zip(call.out_axes, call.out_dtypes, strict=True))
    return made + sum(sizes)
