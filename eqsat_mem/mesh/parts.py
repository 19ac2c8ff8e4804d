"""Folds that devices compute in parts, each over its share, and the combination of the parts of all devices.

A part is combined by the monoid of its fold. Sums of exponentials less a level have the level of the share alone, so that levels and sums
are folded in one loop and joined in one round: the level of all, and then the sums brought to it. Squares about a mean, and sums and places
of what stands at an extreme, likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from eqsat_mem.egraph.online_folds import Rescaled
from eqsat_mem.ir import Block, Call, Dot, Fold, Literal, Map, Rename, Term, bits, children, folded, mask_of
from eqsat_mem.ir.mesh import Names, Sum
from eqsat_mem.ir.ops import MONOIDS, block_op, picks
from eqsat_mem.mesh.additions import LINEAR, way_to_argument
from eqsat_mem.mesh.local import PLACES, Local
from eqsat_mem.mesh.rows import all_rows, own_rows, read
from eqsat_mem.mesh.sliding import slid_over
from eqsat_mem.mesh.sums import in_parts, unsummed

if TYPE_CHECKING:
    from eqsat_mem.mesh.localise import Localiser


@dataclass(frozen=True)
class Part:
    """The part of a fold that one device has.

    Attributes:
        own: the fold over its share, as if there were nothing else.
        summand: the same as the other devices can take it.
        met: the indices that are folded in shares.
        streamed: how it depends on a level, where that is the share's own.
    """

    own: int
    summand: int
    met: int
    streamed: Rescaled | None = None

    def finished(self, at: Localiser, total: int, shares: int) -> int:
        """The combination of the parts of all devices: NaN where there is no element, as without a level of its own."""
        if self.streamed is None or not self.streamed.exponential:
            return total
        level, local = self.streamed.level, at.local
        dtype = local.program.terms[total].dtype
        joint = at.value(level, shares & at.old.free[level])
        empty = local.map("eq", joint, local.number(-np.inf, local.program.terms[joint].dtype), dtype=np.dtype(bool))
        return local.map("select_n", empty, total, local.number(np.nan, dtype), dtype=dtype)


def met(at: Localiser, t: int, computed: int) -> int:
    """The indices that a term folds in shares; of a sum of such folds that nobody else reads those that they fold: it is one exchange."""
    key, term = (t, computed), at.old.terms[t]
    if key not in at.met:
        at.met[key] = computed & (folded(term) | read(term) | slid_over(at, term))
        if isinstance(term, Map) and term.op in LINEAR and t not in at.ex.exact:
            found = [waiting(at, c, computed) for c in term.args]
            if all(found) and len({at.local.dealing(own) for own in found}) == 1:
                at.met[key] = found[0]
    return at.met[key]


def carried_sums(at: Localiser, carried: Mapping[int, int]) -> tuple[Sum, ...]:
    """Results that are an argument to which the program only adds what devices sum, or subtracts it: each device may have its part of both.

    ``carried`` has the argument for each result that may be one.
    """
    old, found = at.old, list[Sum]()
    for k, slot in carried.items():
        way = way_to_argument(old, k, slot, None if at.bodies is None else at.bodies.load)
        if not way or any(at.natural(t) != at.natural(way[-1]) for t in way[:-1]):
            continue
        names = {names for t, below in pairwise(way) for names in _added(at, t, below)}
        if len(names) == 1 and all(names) and not at.ex.exact.intersection(way):
            found.append(Sum(slot, k, *names))
    return tuple(found)


def _added(at: Localiser, t: int, below: int) -> set[Names]:
    """The mesh axes over which devices sum what a term adds to the one below: a loop in its turns, others as their operands."""
    if isinstance(at.old.terms[t], Block):
        return {in_parts(at, t)}
    return {at.local.dealing(waiting(at, c, at.computed(t))) for c in children(at.old.terms[t]) if c != below}


def own_part(at: Localiser, t: int, shares: int, names: Names) -> int:
    """The part of a value that a device has, where the sum over devices along these mesh axes is the value.

    What is not made of such parts is that of the first device, and nothing on others.
    """
    computed, local, term = at.computed(t), at.local, at.old.terms[t]
    if isinstance(term, Literal) and term.value == 0:
        return at.value(t, shares)
    if in_parts(at, t) == names:
        return at.converted(unsummed(at, t), t, at.natural(t), shares)
    if local.dealing(met(at, t, computed)) == names:
        return at.converted(at.part(t, computed).summand, t, at.natural(t), shares)
    u = at.value(t, shares)
    dtype = local.program.terms[u].dtype
    is_first = local.map("eq", local.device_number(names), local.number(0, PLACES), dtype=np.dtype(bool))
    return local.map("select_n", is_first, local.number(0, dtype), u, dtype=dtype)


def waiting(at: Localiser, c: int, computed: int) -> int:
    """The indices that an operand of a sum folds in shares, if its parts may be added to others before they are combined."""
    old, t, to = at.old, at.old.source_of(c), _names(at.old.terms[c])
    term, arrives = old.terms[t], _dealt_out_by(at, in_parts(at, t))
    own = at.natural(t) if arrives else at.computed(t)
    adds = arrives or isinstance(term, Dot | Map) or (isinstance(term, Fold) and term.monoid == "add")
    if not adds or t in at.ex.rescales or t in at.ex.exact or not {t, c}.isdisjoint(old.roots()):
        return 0
    if sum(not isinstance(old.terms[u], Rename) for u in old.readers(t)) > 1:
        return 0
    lying = mask_of(to.get(i, i) for i in bits(own & old.free[t]))
    alike = all(at.divided.get(i) == at.divided.get(j) for i, j in to.items())
    return (arrives or met(at, t, own)) if alike and lying == computed & old.free[c] else 0


def _dealt_out_by(at: Localiser, names: Names) -> int:
    """Indices that together are dealt out by these mesh axes, one where there is such; none where there are no such."""
    found, left = 0, set(names)
    for i, own in sorted(at.divided.items(), key=lambda item: -len(item[1])):
        if left.issuperset(own):
            left.difference_update(own)
            found |= 1 << i
    return 0 if left else found


def _names(term: Term) -> dict[int, int]:
    """The names under which a term reads the indices of its operand, where it does nothing else."""
    return dict(term.pairs) if isinstance(term, Rename) else {}


def _summand(at: Localiser, c: int) -> int:
    """The part that a device adds of an operand of a sum."""
    t, term = at.old.source_of(c), at.old.terms[c]
    part, own = (unsummed(at, t), at.natural(t)) if in_parts(at, t) else (at.part(t, at.computed(t)).summand, at.computed(t))
    return at.local.renamed(part, term, at.old.free[t], own) if isinstance(term, Rename) else part


def part_of(at: Localiser, t: int, computed: int) -> Part:
    """The part that a device adds of a fold computed in shares, or of a sum of such folds."""
    met_here, term = met(at, t, computed), at.old.terms[t]
    if isinstance(term, Map):
        own = at.built(t, computed, [_summand(at, c) for c in term.args])
        return Part(own, own, met_here)
    if met_here & read(term):
        own = own_rows(at, t, computed, at.built(t, computed))
        return Part(own, own, met_here)
    streamed = _streamed(at, t, computed, met_here)
    if streamed is not None:
        return streamed
    own = at.built(t, computed)
    return Part(own, own, met_here)


def combined(at: Localiser, t: int, part: Part) -> int:
    """The parts of all devices as one."""
    term, local, source = at.old.terms[t], at.local, at.old.source.get(t)
    names = local.dealing(part.met)
    if isinstance(term, Block) and picks(term.call):
        return _picked(at, term, part, names)
    if read(term):
        return all_rows(local, part.summand, term.dtype, names, source)
    if isinstance(term, Block) and block_op(term.call.prim.name).monoid is None:
        return _reduced(at, term, part)
    if isinstance(term, Block):
        monoid = str(block_op(term.call.prim.name).monoid)
    else:
        monoid = term.monoid if isinstance(term, Fold) else "add"
    (first, *more) = bits(part.met)
    if not more:
        return local.convert(local.combined(part.summand, monoid, local.across[first], names, source), term.dtype)
    total = part.summand
    for i in bits(part.met):
        total = local.combined(total, monoid, local.across[i], at.divided[i], source)
    return local.convert(total, term.dtype)


def _picked(at: Localiser, term: Block, part: Part, names: tuple[str, ...]) -> int:
    """The first of what all devices have picked from their shares, in the order of the devices."""
    (i,) = bits(part.met)
    results = [at.local.program.terms[part.own]]
    found = results[0]
    assert isinstance(found, Block)
    every = [at.local.program.add(Block(dtype, found.call, found.args, k)) for k, dtype in enumerate(found.call.out_dtypes)]
    return at.local.merged(every, found.call, at.local.share_extent(i), names, None)[term.out]


def _reduced(at: Localiser, term: Block, part: Part) -> int:
    """States that devices have reduced by a function of the user's, reduced by the same function: gathered first."""
    local, found = at.local, at.local.program.terms[part.own]
    assert isinstance(found, Block)
    call, states = found.call, len(found.call.out_dtypes)
    totals = [local.program.add(Block(dtype, call, found.args, k)) for k, dtype in enumerate(call.out_dtypes)]
    for i in bits(part.met):
        every = [local.gathered(u, local.across[i], at.divided[i]) for u in totals]
        axes = ((local.across[i],), *((k,) for k in local.layout(totals[0])))
        key = "reduce", tuple(every)
        if key not in at.joint_calls:
            params = {**call.params, "dimensions": (0,)}
            at.joint_calls[key] = replace(
                call, params=params, in_axes=(axes,) * states + ((),) * states, out_axes=(axes[1:],) * states, folds=0, pointwise=0
            )
        joint: Call = at.joint_calls[key]
        totals = [local.program.add(Block(d, joint, (*every, *found.args[states:]), k)) for k, d in enumerate(call.out_dtypes)]
    return totals[term.out]


# --- shares with a level of their own -------------------------------------------------------------------


def rescaled(at: Localiser, t: int, u: int, computed: int) -> Rescaled | None:
    """The dependence of a local sum on its level, where each term between the two is the local one of the term that was there."""
    known, program = at.ex.rescales[t], at.local.program
    chain, inside = [u], known.chain | {known.shift}
    while at.origin.get(chain[-1]) in known.chain:
        chain.append(next((c for c in children(program.terms[chain[-1]]) if at.origin.get(c) in inside), -1))
    shift = chain[-1]
    if shift < 0:
        return None
    level = children(program.terms[shift])[children(at.old.terms[known.shift]).index(known.level)]
    return Rescaled(level, shift, frozenset(chain[:-1]), at.local.mask(known.mean_over, computed), known.extreme)


def _streamed(at: Localiser, t: int, computed: int, met: int) -> Part | None:
    """A sum with the level of the share alone, brought to that of all; None where the level is not made of folds over the same shares."""
    known = at.ex.rescales.get(t)
    if known is None:
        return None
    own = _Own(at, computed, met, known)
    level = own.level(known.level)
    if level is None or not own.met_folds:
        return None
    local = at.local
    if known.exponential:
        level = _proper(local, level)
    terms = own.chain(t, level)
    if terms is None:
        return None
    local.rescales[terms[t]] = Rescaled(
        level, terms[known.shift], frozenset(terms[u] for u in known.chain), local.mask(known.mean_over, computed), known.extreme
    )
    joint = at.value(known.level, computed & at.old.free[t] & at.old.free[known.level])
    return Part(terms[t], _brought(at, t, known, local.widened(terms[t]), (level, joint), computed), met, known)


class _Own:
    """Terms on the way from a sum down to its level, where the level is that of the share alone."""

    def __init__(self, at: Localiser, computed: int, met: int, known: Rescaled) -> None:
        self.at, self.computed, self.met, self.known = at, computed, met, known
        self.met_folds: set[int] = set()

    def level(self, u: int) -> int | None:
        """The level as the share alone has it, None if it is made of something else than folds over the same shares."""
        at, term = self.at, self.at.old.terms[u]
        if isinstance(term, Literal):
            value = term.value / at.local.devices.count([n for i in bits(self.met) for n in at.divided[i]])
            is_count = self.known.mean_over and u in children(at.old.terms[self.known.level])
            return at.local.number(value, term.dtype) if is_count else at.value(u, 0)
        folds = at.computed(u) & folded(term) if isinstance(term, Dot | Fold) else 0
        if folds:
            if folds != self.met or at.natural(u) != self.computed & at.old.free[u]:
                return None
            self.met_folds.add(u)
            return at.part(u, at.computed(u)).own
        if not isinstance(term, Map):
            return None
        args = [self.level(c) for c in children(term)]
        shares = self.computed & at.old.free[u]
        if any(a is None for a in args) or shares & ~at.able(u):
            return None
        return at.built(u, shares, [a for a in args if a is not None])

    def chain(self, t: int, level: int) -> dict[int, int] | None:
        """The local terms of the way, by those of the program."""
        at, made = self.at, dict[int, int]()
        for u in sorted({*self.known.chain, self.known.shift}):
            term = at.old.terms[u]
            shares = self.computed & (at.old.free[u] | folded(term))
            if shares & ~at.able(u) or (u != t and shares & folded(term)):
                return None
            args = [made[c] if c in made else level if c == self.known.level else at.value(c, shares & at.old.free[c])
                    for c in children(term)]  # fmt: skip
            made[u] = at.built(u, shares, args)
        return made


def _brought(at: Localiser, t: int, known: Rescaled, own: int, levels: tuple[int, int], computed: int) -> int:
    """The summand that a device adds to a sum, from its own sum and from two levels: that of its share, and that of all."""
    local, (here, joint) = at.local, levels
    dtype = local.program.terms[own].dtype
    if known.mean_over:
        dealt = [name for i in bits(known.mean_over & computed) for name in at.divided[i]]
        count = at.old.extent(known.mean_over) // local.devices.count(dealt)
        gap = local.map("sub", here, joint)
        squares = local.map("mul", local.map("mul", gap, gap), local.number(count, np.dtype(local.program.terms[gap].dtype)))
        return local.map("add", own, local.convert(squares, dtype))
    if known.exponential:
        fall = local.map("sub", here, _proper(local, joint))
        factor = local.map("exp", local.map("min", fall, local.number(0, local.program.terms[fall].dtype)))
        return local.map("mul", own, local.convert(factor, dtype))
    term = at.old.terms[t]
    monoid = MONOIDS[term.monoid if isinstance(term, Fold) else "add"]
    stays = local.map("or", _is(local, "eq", here, joint), _is(local, "ne", here, here))
    if monoid.name == "min":
        stays = local.map("or", stays, _is(local, "lt", own, local.number(0, dtype)))
    return local.map("select_n", stays, local.number(monoid.identity(dtype), dtype), own, dtype=dtype)


def _is(local: Local, comparison: str, one: int, other: int) -> int:
    return local.map(comparison, one, other, dtype=np.dtype(bool))


def _proper(local: Local, level: int) -> int:
    """The number that is subtracted for a level: zero where there is no element, so that exponentials of ``-inf`` are zero."""
    dtype = local.program.terms[level].dtype
    return local.map("select_n", _is(local, "eq", level, local.number(-np.inf, dtype)), level, local.number(0, dtype), dtype=dtype)


def folded_whole(call: Call, computed: int, divided: Mapping[int, Names]) -> int:
    """The dealt out indices that an operation picks along and has whole: they come in an order, which chunks of all shares lack."""
    return call.folds & mask_of(divided) & ~computed if picks(call) else 0
