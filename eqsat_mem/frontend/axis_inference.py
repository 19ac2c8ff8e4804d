"""The first pass of loading: infer the axes of every value, and how each equation is translated to terms.

Axes become the same index according to their roles alone: elementwise operands align, contracted and batch axes are paired, and
pointwise axes of a block share one index. Transposes, broadcasts and reshapes only change the positions of axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jax.dtypes import extended, issubdtype

from eqsat_mem.frontend.axis_unification import AxisTable, Variables
from eqsat_mem.frontend.flat_jaxpr import Equation, Flat
from eqsat_mem.frontend.loop_roles import LoadBody, LoopAxes, loop_axes
from eqsat_mem.frontend.same_results import SameResults
from eqsat_mem.ir import ops
from eqsat_mem.ir.inside import Inside
from eqsat_mem.ir.ops.control import LOOPS


@dataclass
class Translation:
    """The translation of one equation to terms: its kind, and the axes under which it reads its operands.

    Attributes:
        kind: the kind of equation, such as ``map`` or ``block``.
        reads: for each operand, the axes under which it is read.
        over: the variables that it folds.
        groups: the pointwise axes of a block.
        summed: the axes over which some results of a loop are sums.
        inside: the body of a loop that has such axes.
        same: the loop that computes those of its results that are the same along all of them.
    """

    kind: str
    reads: list[list[Variables]] = field(default_factory=list)
    over: Variables = field(default_factory=list)
    groups: list[Variables] = field(default_factory=list)
    summed: list[Variables] = field(default_factory=list)
    inside: Inside | None = None
    same: SameResults | None = None


class Inference:
    """Inference of the axes of every value and of a translation for every equation; :meth:`run` computes both.

    Args:
        flat: the equations.
        load_body: loads the body of a loop.
    """

    def __init__(self, flat: Flat, load_body: LoadBody):
        self.flat, self.load_body = flat, load_body
        self.used = {v for eqn in flat.equations for v in eqn.ins}.union(flat.outputs)
        self.turned = {eqn.ins[0]: eqn.params["permutation"] for eqn in flat.equations if eqn.prim.name == "transpose"}
        self.zeros = {v for v, value in flat.literals.items() if value == 0}
        self.table = AxisTable()
        self.axes: list[list[Variables] | None] = [None] * len(flat.shapes)
        self.translations: list[Translation] = []
        self._owner = len(flat.shapes)

    def run(self, alike: Iterable[tuple[tuple[int, int], tuple[int, int]]] = ()) -> Inference:
        """Infer all axes; ``alike`` are pairs of axes of values, each ``(value, axis)``, that are one index if nothing keeps them apart."""
        for v in [*self.flat.inputs, *self.flat.consts, *self.flat.literals]:
            self.fresh_value(v)
        for eqn in self.flat.equations:
            self.translations.append(self.translation(eqn))
        for (v, a), (w, b) in alike:
            one, other = self.of(v)[a], self.of(w)[b]
            if len(self.table.leaves(one)) == len(self.table.leaves(other)) == 1:
                self.table.unify(one, other)
        self.table.settle()
        return self

    def translation(self, eqn: Equation) -> Translation:
        name = eqn.prim.name
        if all(0 in self.flat.shapes[v] for v in eqn.outs) and eqn.outs and not eqn.effects and self.numbers(eqn):
            return self.empty(eqn)
        if name in VIEWS:
            axes = VIEWS[name](self, eqn)
            if axes is not None:
                self.axes[eqn.outs[0]] = axes
                self.zeros |= set(eqn.outs) if eqn.ins[0] in self.zeros else set()
                return Translation("view", [axes])
        if self.elementwise(eqn):
            return self.map(eqn)
        if name in ops.REDUCTIONS and ops.foldable(ops.REDUCTIONS[name], self.flat.dtypes[eqn.ins[0]]):
            return self.fold(eqn)
        if name == "dot_general":
            return self.dot(eqn)
        if name in ("iota", "zeros_like"):
            self.zeros |= set(eqn.outs) if name == "zeros_like" else set()
            self.fresh_value(eqn.outs[0])
            return Translation(name)
        return self.block(eqn)

    def elementwise(self, eqn: Equation) -> bool:
        """Whether an equation is elementwise. A bitcast to another width is not: it splits or joins elements."""
        name = eqn.prim.name
        same_width = name != "bitcast_convert_type" or self.flat.shapes[eqn.ins[0]] == self.flat.shapes[eqn.outs[0]]
        return same_width and ops.is_elementwise(eqn.prim, eqn.params)

    def numbers(self, eqn: Equation) -> bool:
        return not any(issubdtype(self.flat.dtypes[v], extended) for v in eqn.outs)

    def empty(self, eqn: Equation) -> Translation:
        """The translation of a value without elements, which is translated to a literal that is broadcast along its axes."""
        for v in eqn.outs:
            self.fresh_value(v)
        return Translation("empty")

    def fresh_value(self, v: int) -> None:
        self.axes[v] = [self.table.fresh(n) for n in self.flat.shapes[v]]
        self.table.own(v, self.axes[v] or [])

    def new_owner(self) -> int:
        self._owner += 1
        return self._owner

    def of(self, v: int) -> list[Variables]:
        """Return the axes of a value that has been inferred already."""
        axes = self.axes[v]
        assert axes is not None, "a value is used before it is computed"
        return axes

    def biggest_first(self, eqn: Equation) -> list[int]:
        """Return the positions of operands from the largest to the smallest, so that larger values keep the names of their axes."""
        return sorted(range(len(eqn.ins)), key=lambda k: -math.prod(self.flat.shapes[eqn.ins[k]]))

    # elementwise

    def map(self, eqn: Equation) -> Translation:
        out = eqn.outs[0]
        shape = self.flat.shapes[out]
        order = self.biggest_first(eqn)
        first = next((k for k in order if self.flat.shapes[eqn.ins[k]] == shape), None)
        if first is None:
            self.fresh_value(out)
        else:
            self.axes[out] = self.of(eqn.ins[first])
        self.table.own(out, self.of(out))
        reads: list[list[Variables]] = [[] for _ in eqn.ins]
        for k in order:
            shape_k = self.flat.shapes[eqn.ins[k]]
            reads[k] = [self.of(out)[a] if n != 1 else [] for a, n in zip(ops.result_axes(eqn.params, k, len(shape_k)), shape_k)]
            for mine, wanted in zip(self.of(eqn.ins[k]), reads[k]):
                self.table.unify(wanted, mine)
        return Translation("map", reads)

    # folds and contractions

    def fold(self, eqn: Equation) -> Translation:
        axes, reduced = self.of(eqn.ins[0]), {int(a) for a in eqn.params["axes"]}
        self.axes[eqn.outs[0]] = [axis for a, axis in enumerate(axes) if a not in reduced]
        return Translation("fold", [axes], [v for a in sorted(reduced) for v in axes[a]])

    def dot(self, eqn: Equation) -> Translation:
        """The translation of a contraction. Where both operands have an axis of one name, as in ``x @ x.T``, the larger one keeps it, or
        that whose axes stay where they are: the result is then aligned with what has the operand's axes in its order, such as the operand.
        """
        (contract, batch), shapes = eqn.params["dimension_numbers"], [self.flat.shapes[v] for v in eqn.ins]
        reads: list[dict[int, Variables]] = [{}, {}]
        for pairs in (batch, contract):
            for a, b in zip(*pairs):
                reads[0][int(a)] = reads[1][int(b)] = self.table.fresh(shapes[0][int(a)])
        shared = [reads[0][int(a)] for a in batch[0]]
        over = [v for a in contract[0] for v in reads[0][int(a)]]
        free: list[Variables] = []
        kept = [0, 0]
        for side in (0, 1):
            for a, n in enumerate(shapes[side]):
                if a not in reads[side]:
                    reads[side][a] = self.table.fresh(n)
                    free.append(reads[side][a])
                    kept[side] += a == self.as_turned(eqn.outs[0], len(shared) + len(free) - 1)
        self.axes[eqn.outs[0]] = [*shared, *free]
        self.table.own(eqn.outs[0], self.of(eqn.outs[0]))
        self.table.own(self.new_owner(), [*reads[0].values(), *free])
        for side in sorted(self.biggest_first(eqn), key=lambda side: (-math.prod(shapes[side]), -kept[side])):
            for a, mine in enumerate(self.of(eqn.ins[side])):
                self.table.unify(reads[side][a], mine)
        return Translation("dot", [[side[a] for a in range(len(side))] for side in reads], over)

    def as_turned(self, v: int, axis: int) -> int:
        """Return the position of an axis of a value in its transpose, if it has one."""
        return self.turned[v].index(axis) if v in self.turned else axis

    # blocks

    def block(self, eqn: Equation) -> Translation:
        """The translation of a block: pointwise axes share one index; bound axes keep the names of their operand, distinct from those."""
        ins, outs = [self.flat.shapes[v] for v in eqn.ins], [self.flat.shapes[v] for v in eqn.outs]
        row, loop = ops.block_op(eqn.prim.name), self.loop(eqn)
        places = _BlockAxes(self.table, {"in": ins, "out": outs})
        groups = places.numbered(row.parts(ins, outs, eqn.params))
        groups += places.shared(row.pointwise(ins, outs, eqn.params) if loop is None else loop.groups)
        places.shared(row.shared(ins, outs, eqn.params))
        reads = [[places.axis(("in", k, a)) for a in range(len(shape))] for k, shape in enumerate(ins)]
        for axes in reads:
            self.table.own(self.new_owner(), [*axes, *groups])
        for k, v in enumerate(eqn.outs):
            self.axes[v] = [places.axis(("out", k, a)) for a in range(len(outs[k]))]
            self.table.own(v, self.of(v))
            if loop is not None:  # what is a sum over an axis has it under no other name
                self.table.own(self.new_owner(), [*self.of(v), *groups])
        for k in self.biggest_first(eqn):
            for wanted, mine in zip(reads[k], self.of(eqn.ins[k])):
                self.table.unify(wanted, mine)
        if loop is None:
            return Translation("block", reads, groups=groups)
        summed = [places.axes[group[0]] for group, is_summed in zip(loop.groups, loop.summed) if is_summed]
        return Translation("block", reads, groups=groups, summed=summed, inside=loop.inside, same=loop.same)

    def loop(self, eqn: Equation) -> LoopAxes | None:
        """The axes along which a scan, a ``while`` loop or a choice may be split."""
        if eqn.prim.name not in LOOPS or eqn.effects:
            return None
        leaves = [[self.table.leaves(axis) for axis in self.of(v)] for v in eqn.ins]
        names = [[own[0] if len(own) == 1 else None for own in axes] for axes in leaves]
        zeros = [k for k, v in enumerate(eqn.ins) if v in self.zeros]
        same = [eqn.ins.index(v) for v in eqn.ins]
        return loop_axes(eqn.params, names, zeros, same, [k for k, v in enumerate(eqn.outs) if v in self.used], self.load_body)

    # views

    def transpose(self, eqn: Equation) -> list[Variables]:
        axes = self.of(eqn.ins[0])
        return [axes[a] for a in eqn.params["permutation"]]

    def squeeze(self, eqn: Equation) -> list[Variables]:
        gone = {int(a) for a in eqn.params["dimensions"]}
        return [axis for a, axis in enumerate(self.of(eqn.ins[0])) if a not in gone]

    def expand_dims(self, eqn: Equation) -> list[Variables]:
        axes = iter(self.of(eqn.ins[0]))
        new = {int(a) for a in eqn.params["dimensions"]}
        return [[] if a in new else next(axes) for a in range(len(self.flat.shapes[eqn.outs[0]]))]

    def broadcast(self, eqn: Equation) -> list[Variables]:
        shape, have = self.flat.shapes[eqn.outs[0]], self.flat.shapes[eqn.ins[0]]
        places = dict(zip(map(int, eqn.params["broadcast_dimensions"]), range(len(have))))
        mine = self.of(eqn.ins[0])
        axes = [mine[places[a]] if a in places and have[places[a]] == n else self.table.fresh(n) for a, n in enumerate(shape)]
        self.table.own(eqn.outs[0], axes)
        return axes

    def tile(self, eqn: Equation) -> list[Variables]:
        axes = [self.table.fresh(int(n)) + axis for n, axis in zip(eqn.params["reps"], self.of(eqn.ins[0]))]
        self.table.own(eqn.outs[0], axes)
        return axes

    def reshape(self, eqn: Equation) -> list[Variables] | None:
        if eqn.params["dimensions"] is not None:
            return None
        axes = [self.table.fresh(n) for n in self.flat.shapes[eqn.outs[0]]]
        self.table.own(eqn.outs[0], axes)
        self.table.unify([v for axis in self.of(eqn.ins[0]) for v in axis], [v for axis in axes for v in axis])
        return axes


@dataclass
class _BlockAxes:
    """The axes of the operands and results of a block, some of which are one: those at places that have been named, of a part each."""

    table: AxisTable
    shapes: Mapping[str, ops.Shapes]
    axes: dict[ops.Place, Variables] = field(default_factory=dict)
    parts: dict[ops.Place, tuple[int, Variables]] = field(default_factory=dict)

    def numbered(self, parts: Iterable[tuple[int, ops.Group]]) -> list[Variables]:
        """Return the axes that number the parts of others."""
        found = [(count, self.table.fresh(count), group) for count, group in parts]
        self.parts.update((place, (count, number)) for count, number, group in found for place in group)
        return [number for _, number, _ in found]

    def shared(self, groups: Iterable[ops.Group]) -> list[Variables]:
        """Return an axis for each of the groups whose places have one extent and no axis so far."""
        found: list[Variables] = []
        for group in groups:
            sizes = {self._extent(place) for place in group}
            if len(sizes) == 1 and not any(place in self.axes for place in group):
                found.append(self.table.fresh(sizes.pop()))
                self.axes.update((place, found[-1]) for place in group)
        return found

    def axis(self, place: ops.Place) -> Variables:
        """Return the axis at a place."""
        _, number = self.parts.get(place, (1, []))
        return [*number, *(self.axes.get(place) or self.table.fresh(self._extent(place)))]

    def _extent(self, place: ops.Place) -> int:
        side, k, a = place
        count, _ = self.parts.get(place, (1, []))
        return self.shapes[side][k][a] // count


VIEWS = {
    "transpose": Inference.transpose,
    "squeeze": Inference.squeeze,
    "expand_dims": Inference.expand_dims,
    "broadcast_in_dim": Inference.broadcast,
    "tile": Inference.tile,
    "reshape": Inference.reshape,
}
"""Changes of axes, which are no terms, by the primitive: the axes of the result, or None where they cannot be told."""
