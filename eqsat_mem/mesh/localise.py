"""A program for all devices as the program of one: which terms are computed in shares, and what is exchanged between them.

A term is computed in shares along the first index that devices may take shares of and that it can be sliced along, or can fold piece by
piece (the facts that loops go by). What it folds so is a part of the result: the devices' parts are combined where somebody reads it. What
needs a value whole gets it gathered, or computed once more from operands that are whole anyway; what has it whole takes its share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eqsat_mem.egraph.extract import Extraction, picked_with
from eqsat_mem.ir import (
    Block,
    Call,
    Const,
    Dot,
    Fold,
    Input,
    Iota,
    Literal,
    Output,
    Rename,
    Term,
    axes_mask,
    bits,
    children,
    folded,
    mask_of,
    with_children,
)
from eqsat_mem.ir.mesh import Names, Placement, Spec, Spreading
from eqsat_mem.ir.ops import picks
from eqsat_mem.mesh.again import is_made_again, once_more
from eqsat_mem.mesh.bodies import Bodies, Flow, flow_of
from eqsat_mem.mesh.local import PLACES, Local
from eqsat_mem.mesh.neighbours import with_neighbours
from eqsat_mem.mesh.parts import Part, combined, folded_whole, met, own_part, part_of, rescaled
from eqsat_mem.mesh.rows import local_args, local_call, with_rows, written
from eqsat_mem.mesh.sliding import from_neighbours, slid
from eqsat_mem.mesh.sums import summed, unsummed
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.split import selection_of


def localise(
    ex: Extraction, placement: Placement, divided: Mapping[int, Names], spreading: Spreading, backend: Backend, loops: Bodies | None = None
) -> Extraction:
    """The program that each device runs, and the splits that are allowed for its terms.

    Args:
        ex: the program of all devices.
        placement: the specs of its arguments and results.
        divided: the mesh axes of each index that is dealt out anywhere.
        spreading: the indices that terms are computed in shares of.
        backend: its model tells whether gathering a value or computing it again is faster.
        loops: the planner of bodies of loops and branches; without it they run whole on every device.
    """
    return walked(ex, placement, divided, spreading, backend, loops)[1]


def walked(
    ex: Extraction, placement: Placement, divided: Mapping[int, Names], spreading: Spreading, backend: Backend, loops: Bodies | None = None
) -> tuple[Localiser, Extraction]:
    """:func:`localise`, with the walk that has written the program."""
    first = Localiser(ex, placement, divided, spreading, backend, loops=loops)
    found, placed = first.run(), replace(placement, arguments=first.placed())
    if not first.gathered and placed.arguments == first.local.specs:
        return first, found
    last = Localiser(ex, placed, divided, spreading, backend, frozenset(first.gathered), loops)
    return last, last.run()


class Localiser:
    """One walk over a program, from its results to its arguments.

    ``given`` are values that are there whole, as a walk before has found.
    """

    def __init__(
        self,
        ex: Extraction,
        placement: Placement,
        divided: Mapping[int, Names],
        spreading: Spreading,
        backend: Backend,
        given: frozenset[tuple[int, int]] = frozenset(),
        loops: Bodies | None = None,
    ) -> None:
        self.ex, self.old, self.placement, self.spreading, self.backend = ex, ex.program, placement, spreading, backend
        self.local = Local(ex.program, placement, divided)
        self.divided, self.given = divided, given
        self.gathered: set[tuple[int, int]] = set()
        self.values: dict[tuple[int, int], int] = {}
        self._parts: dict[tuple[int, int], Part] = {}
        self.origin: dict[int, int] = {}
        self._ops: dict[object, int] = {}
        self._calls: dict[tuple[int, int], Call] = {}
        self.joint_calls: dict[object, Call] = {}
        self.arrays: dict[int, int] = {}
        self._wishes: dict[int, set[Spec]] = {}
        self.met: dict[tuple[int, int], int] = {}
        self.bodies, self.flows = loops, dict[tuple[int, tuple[int, ...]], Flow | None]()

    def placed(self) -> tuple[Spec, ...]:
        """The specs of arguments: as given, else the shares in which all readers take them, else whole."""
        return tuple(
            next(iter(wishes)) if given is None and len(wishes := self._wishes.get(slot, set())) == 1 else spec
            for slot, (given, spec) in enumerate(zip(self.placement.arguments, self.local.specs, strict=True))
        )

    def run(self) -> Extraction:
        local, outputs, specs = self.local, [], []
        for k, o in enumerate(self.old.outputs):
            output, spec = self.output(k, o)
            outputs.append(output)
            specs.append(spec)
        program = local.program
        program.outputs = outputs
        program.shares = local.shares(specs, dict(self.spreading.padded), self.placement.sums)
        for t in range(len(program.terms)):
            for other in picked_with(program, t):
                for table in (local.splits, local.accumulates):
                    if t in table:
                        table.setdefault(other, table[t])
        return Extraction(program, local.splits, local.accumulates, local.unrolls, local.rescales)

    # results

    def output(self, k: int, o: Output) -> tuple[Output, Spec]:
        """A result as it shall lie, or where nobody minds, as it is computed."""
        given = self.placement.results[k]
        wanted = tuple(self._names_of(axis, self.natural(o.term)) for axis in o.axes) if given is None else given
        fitting = [self.deals(axis, names) for axis, names in zip(o.axes, wanted, strict=True)]
        shares = mask_of(axis[0] for axis, fits, names in zip(o.axes, fitting, wanted, strict=True) if fits and names)
        sums = next((s.names for s in self.placement.sums if s.result == k), ())
        t = self.begun(o.term, shares & self.old.free[o.term], sums)
        axes = self.local.axes(o.axes, shares)
        for a, (names, fits) in enumerate(zip(wanted, fitting, strict=True)):
            if not fits:
                t, axes = self.local.left(k, t, axes, a, names)
        return Output(t, axes, o.weak_type), wanted

    def _names_of(self, axis: Sequence[int], shares: int) -> Names:
        """The mesh axes that deal out an axis of a result whose term is in these shares."""
        return self.divided[axis[0]] if axis and shares >> axis[0] & 1 else ()

    def deals(self, axis: Sequence[int], names: Names) -> bool:
        """Whether an axis of an array is dealt out by mesh axes just as its first index is."""
        return not names or (bool(axis) and self.divided.get(axis[0]) == names)

    # which terms are in shares

    def natural(self, t: int) -> int:
        """The indices of which a term has shares where it is made."""
        term = self.old.terms[t]
        match term:
            case Input():
                return self.arriving(term)
            case Rename():
                to = dict(term.pairs)
                kept = {i: to.get(i, i) for i in bits(self.natural(term.arg))}
                return mask_of(j for i, j in kept.items() if self.divided.get(i) == self.divided.get(j))
            case Literal() | Iota() | Const():
                return 0
            case Block() if (flow := flow_of(self, term)) is not None:
                return flow.shares[term.out]
        return self.computed(t) & self.old.free[t]

    def arriving(self, term: Input) -> int:
        """The indices of which an argument has shares when it arrives; one that it names twice, as a diagonal does, is gathered."""
        axes, every = zip(term.axes, self.local.specs[term.slot], strict=True), sum(term.axes, ())
        return mask_of(axis[0] for axis, names in axes if names and self.deals(axis, names) and every.count(axis[0]) == 1)

    def computed(self, t: int) -> int:
        """The indices of which a term is computed in shares, those that it folds among them."""
        term = self.old.terms[t]
        key = (id(term.call), term.args) if isinstance(term, Block) else t
        if key not in self._ops:
            able, taken, shares = self.able(t), set[str](), 0
            for i, names in self.spreading.order:
                if able >> i & 1 and not taken.intersection(names):
                    taken.update(names)
                    shares |= 1 << i
            self._ops[key] = with_neighbours(self, t, with_rows(self, t, shares))
        return self._ops[key]

    def able(self, t: int) -> int:
        """The indices along which a term may be sliced, and those that it may fold piece by piece."""
        term, free = self.old.terms[t], self.old.free
        read = mask_of(i for c in children(term) for i in bits(free[c]))
        able = (self.ex.splits.get(t, 0) & free[t]) | (self.ex.accumulates.get(t, 0) & folded(term) & read & ~free[t])
        if isinstance(term, Block):
            able &= mask_of(i for i in bits(able) if all((axes_mask(axes) | folded(term)) >> i & 1 for axes in term.call.out_axes))
            able |= written(self, term) | slid(self, term)
            if picks(term.call):
                least = selection_of(term.call).least(term.call.params)
                able &= ~mask_of(i for i in bits(able & folded(term)) if self.local.share_extent(i) < least)
        return able

    # values

    def value(self, t: int, shares: int) -> int:
        """The local term of a value of which a device has these shares."""
        key = t, shares
        if key not in self.values:
            self.values[key] = self._value(t, shares)
        return self.values[key]

    def begun(self, t: int, shares: int, names: Names) -> int:
        """The same; where mesh axes are named, the device's part of a sum over these that is the value."""
        return own_part(self, t, shares, names) if names else self.value(t, shares)

    def _value(self, t: int, shares: int) -> int:
        local, term = self.local, self.old.terms[t]
        match term:
            case Literal():
                return local.program.add(term, self.old.source.get(t))
            case Const():
                whole = local.program.add(replace(term, axes=local.axes(term.axes, 0)), self.old.source.get(t))
                return self.converted(whole, t, 0, shares)
            case Iota():
                return self.position(term, shares)
            case Input():
                return self.argument(t, term, shares)
            case Rename():
                return self.renamed(t, term, shares)
            case Block() if (flow := flow_of(self, term)) is not None:
                result, have = summed(self, unsummed(self, t), t, flow.shares[term.out], shares)
                return self.converted(result, t, have, shares)
        computed, have = self.computed(t), self.natural(t)
        if have & ~shares and is_made_again(self, t, shares):
            computed = once_more(self, t, shares)
            have = computed & self.old.free[t]
        elif (dealt := self.dealt_out(t, computed & folded(term), shares & ~have)) is not None:
            return self.converted(self.sum_dealt_out(t, computed, *dealt), t, have | 1 << dealt[1], shares)
        return self.converted(self.joint(t, computed), t, have, shares)

    def converted(self, u: int, t: int, have: int, want: int) -> int:
        """A value of which a device has some shares, with others: exchanged, taken from what is whole, or gathered."""
        local, source = self.local, self.old.source.get(t)
        for i in bits(have & ~want):
            other = next((j for j in bits(want & ~have) if self.divided[j] == self.divided[i]), None)
            if other is not None:
                u = local.exchanged(u, local.across[other], local.across[i], self.divided[i], source)
                have |= 1 << other
                want |= 1 << i
        taken = {name for i in bits(want & ~have) for name in self.divided[i]}
        met = mask_of(i for i in bits(have & ~want) if taken.intersection(self.divided[i]))  # one takes one's share of what is whole
        for some, move in ((met, local.gathered), (want & ~have, local.owned), (have & ~want & ~met, local.gathered)):
            for i in bits(some):
                u = move(u, local.across[i], self.divided[i], source)
        if have & ~want:
            self.gathered.add((t, want))
        return u

    def position(self, term: Iota, shares: int) -> int:
        """The positions along an index: where the share of a device begins, and the positions in it."""
        local, i = self.local, term.index
        if i not in self.divided:
            return local.program.add(replace(term, index=local.plain[i]))
        in_share = local.program.add(replace(term, index=local.share[i]))
        own = local.device_number(self.divided[i]) if shares >> i & 1 else local.program.add(Iota(PLACES, local.across[i]))
        first = local.map("mul", own, local.number(local.program.indices[local.share[i]].extent, PLACES))
        return local.map("add", local.convert(first, term.dtype), in_share)

    def renamed(self, t: int, term: Rename, shares: int) -> int:
        """A value under other names; where these are dealt out otherwise, it is whole before."""
        local, to = self.local, dict(term.pairs)
        names = {i: to.get(i, i) for i in bits(self.old.free[term.arg])}
        alike = {i for i, j in names.items() if self.divided.get(i) == self.divided.get(j)}
        kept = alike if len(alike) == len(names) else {i for i in alike if names[i] == i}  # what is laid out anew is not renamed in shares
        before = mask_of(i for i in kept if shares >> names[i] & 1)
        after = mask_of(names[i] for i in bits(before))
        u = self.value(term.arg, before)
        if len(alike) < len(names):
            have, wanted = (tuple(local.form(i, form) for i in some) for some, form in ((names, before), (names.values(), after)))
            u = local.reshaped(u, have, wanted, self.old.source.get(t))
        else:
            u = local.renamed(u, term, self.old.free[term.arg], before, self.old.source.get(t))
        return self.converted(u, t, after, shares)

    # arguments

    def argument(self, t: int, term: Input, shares: int) -> int:
        """An argument as it arrives, exchanged where that is not how it is read. Under several names it is gathered under the first."""
        arriving = self.arriving(term)
        self._wishes.setdefault(term.slot, set()).add(tuple(self._names_of(axis, shares) for axis in term.axes))
        first = self.first_read(t, term)
        if first is None or not arriving & ~shares:
            u, have = summed(self, self.arrived(t, term, arriving), t, arriving, shares)
            return self.converted(u, t, have, shares)
        other = self.old.terms[first]
        assert isinstance(other, Input)
        there = mask_of(i for i, j in zip(sum(other.axes, ()), sum(term.axes, ())) if shares >> j & 1)
        pairs = tuple(zip(sum(self.local.axes(other.axes, there), ()), sum(self.local.axes(term.axes, shares), ()), strict=True))
        return self.local.program.add(Rename(term.dtype, pairs, self.value(first, there)), self.old.source.get(t))

    def first_read(self, t: int, term: Input) -> int | None:
        """The first read of the same argument, if it is another under names that are dealt out alike."""
        first = self.arrays.setdefault(term.slot, t)
        other = self.old.terms[first]
        assert isinstance(other, Input)
        pairs = list(zip(sum(other.axes, ()), sum(term.axes, ())))
        alike = [*map(len, other.axes)] == [*map(len, term.axes)] and all(self.divided.get(i) == self.divided.get(j) for i, j in pairs)
        once = all(len({pair[k] for pair in pairs}) == len(pairs) for k in (0, 1))
        return first if first != t and alike and once else None

    def arrived(self, t: int, term: Input, shares: int) -> int:
        """A read of an argument; axes that are dealt out as no index of the program is are gathered, and then read."""
        local, specs = self.local, self.local.specs[term.slot]
        axes = local.axes(term.axes, shares)
        arriving = self.arriving(term)
        odd = [a for a, (axis, names) in enumerate(zip(term.axes, specs, strict=True)) if names and not arriving & mask_of(axis[:1])]
        if not odd:
            return local.program.add(replace(term, axes=axes), self.old.source.get(t))
        pairs = {a: local.pair(("argument", term.slot, a), self.old.inputs[term.slot].shape[a], specs[a], "arriving") for a in odd}
        u = local.program.add(replace(term, axes=tuple((pairs[a][1],) if a in pairs else axis for a, axis in enumerate(axes))))
        for a in odd:
            u = local.gathered(u, pairs[a][0], specs[a], self.old.source.get(t))
        return local.reshaped(u, tuple(pairs.get(a, axis) for a, axis in enumerate(axes)), axes)

    # computed terms

    def joint(self, t: int, computed: int) -> int:
        """A term computed in shares of some indices, the parts of what it folds combined."""
        if not met(self, t, computed):
            return self.built(t, computed)
        part = self.part(t, computed)
        return part.finished(self, combined(self, t, part), computed & self.old.free[t])

    def part(self, t: int, computed: int) -> Part:
        """The part of a fold that a device computes."""
        if (key := (t, computed)) not in self._parts:
            self._parts[key] = part_of(self, t, computed)
        return self._parts[key]

    def dealt_out(self, t: int, met: int, wanted: int) -> tuple[int, int] | None:
        """A folded index and one of the result that the same mesh axes deal out: each device then needs its share of the sum only."""
        term = self.old.terms[t]
        if t in self.ex.exact or not (isinstance(term, Dot) or (isinstance(term, Fold) and term.monoid == "add")):
            return None
        far = frozenset[str]() if self.backend.scatters_far else self.local.devices.far
        pairs = ((i, j) for i in bits(met) for j in bits(wanted) if self.divided[i] == self.divided[j])
        return next(((i, j) for i, j in pairs if not far.intersection(self.divided[i])), None)

    def sum_dealt_out(self, t: int, computed: int, i: int, j: int) -> int:
        """A sum of which each device gets its share along ``j`` from what all have folded along ``i``."""
        local, source = self.local, self.old.source.get(t)
        part = self.part(t, computed)
        rest = [name for k in bits(part.met & ~(1 << i)) for name in self.divided[k]]
        u = local.scattered(local.widened(part.summand), local.across[j], self.divided[i], source)
        if rest:
            u = local.reduced(u, "add", local.devices.ordered(rest), source)
        return part.finished(self, local.convert(u, self.old.terms[t].dtype), computed & self.old.free[t] | 1 << j)

    def built(self, t: int, computed: int, args: Sequence[int] | None = None) -> int:
        """A term on local operands (values in the shares that it is computed in, unless others are given), with facts about it."""
        local, term, free = self.local, self.old.terms[t], self.old.free
        if (found := from_neighbours(self, t, computed)) is not None:
            return found
        given = args is not None
        args = tuple(self.value(c, computed & free[c]) for c in children(term)) if args is None else tuple(args)
        made = self.local_term(term, computed, args)
        u = local.program.add(made, self.old.source.get(t))
        self.origin.setdefault(u, t)
        local.state(self.ex, t, u, computed)
        if t in self.ex.rescales and not given and (known := rescaled(self, t, u, computed)) is not None:
            local.rescales[u] = known
        return u

    def local_term(self, term: Term, computed: int, args: tuple[int, ...]) -> Term:
        """An operation on local operands, of which the indices ``computed`` are in shares."""
        local = self.local
        match term:
            case Fold() | Dot():
                return with_children(replace(term, over=local.mask(term.over, computed)), args)
            case Block():
                return replace(term, call=self.local_call(term.call, computed), args=local_args(self, term, computed, args))
        return with_children(term, args)

    def local_call(self, call: Call, computed: int) -> Call:
        key = id(call), computed
        if key not in self._calls:
            local = self.local
            ins, outs = (tuple(local.axes(axes, computed) for axes in side) for side in (call.in_axes, call.out_axes))
            folds = 0 if folded_whole(call, computed, self.divided) else local.mask(call.folds, computed)
            new = replace(call, in_axes=ins, out_axes=outs, pointwise=local.mask(call.pointwise, computed), folds=folds)
            self._calls[key] = local_call(call, computed, new)
        return self._calls[key]
