"""A JAX function as a program over named indices.

Pass one decides which axes are the same index (:mod:`eqsat_mem.axes`); pass two builds terms bottom up. Transposes,
broadcasts, squeezes and reshapes are no term at all: they only say under which names the axes of a value stand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, primitives

from . import ops
from .axes import AxisTable, Variables
from .flatten import Equation, Flat, flatten
from .ir import Axes, Axis, Block, Buffer, Call, Const, Dot, Fold, Index, Input, Iota, Literal, Map, Output, Program, Rename, Source, mask_of
from .naming import index_names, index_order


def load(closed: ClosedJaxpr, arg_names: Sequence[str]) -> Program:
    """The program of a closed jaxpr, whose arguments are called ``arg_names``.

    Every jaxpr loads: a primitive without a row in the operation table becomes an opaque call.
    """
    flat = flatten(closed)
    inference = _Inference(flat)
    inference.run()
    return _Builder(flat, inference, arg_names).build()


# --- pass one: axes ---------------------------------------------------------------------------------


@dataclass
class _Plan:
    """How one equation becomes terms: its kind, and the axes that its operands are read under."""

    kind: str
    reads: list[list[Variables]] = field(default_factory=list)
    over: Variables = field(default_factory=list)
    groups: list[Variables] = field(default_factory=list)


class _Inference:
    """Axes of every value, and a plan for every equation."""

    def __init__(self, flat: Flat):
        self.flat = flat
        self.table = AxisTable()
        self.axes: list[list[Variables] | None] = [None] * len(flat.shapes)
        self.plans: list[_Plan] = []
        self._owner = len(flat.shapes)

    def run(self) -> None:
        for v in [*self.flat.inputs, *self.flat.consts, *self.flat.literals]:
            self.fresh_value(v)
        for eqn in self.flat.equations:
            self.plans.append(self.plan(eqn))
        self.table.settle()

    def plan(self, eqn: Equation) -> _Plan:
        name = eqn.prim.name
        if all(0 in self.flat.shapes[v] for v in eqn.outs) and eqn.outs and not eqn.effects and self.plain(eqn):
            return self.empty(eqn)
        if name in _VIEWS:
            axes = _VIEWS[name](self, eqn)
            if axes is not None:
                self.axes[eqn.outs[0]] = axes
                return _Plan("view", [axes])
        if name in ops.MAPS or name in ops.ALIASES:
            if name != "bitcast_convert_type" or self.flat.shapes[eqn.ins[0]] == self.flat.shapes[eqn.outs[0]]:
                return self.map(eqn)
        if name in ops.REDUCTIONS:
            return self.fold(eqn)
        if name == "dot_general":
            return self.dot(eqn)
        if name in ("iota", "zeros_like"):
            self.fresh_value(eqn.outs[0])
            return _Plan(name)
        return self.block(eqn)

    def plain(self, eqn: Equation) -> bool:
        return all(ops.foldable(self.flat.dtypes[v]) for v in eqn.outs)

    def empty(self, eqn: Equation) -> _Plan:
        """A value without elements is a literal that is read along its axes."""
        for v in eqn.outs:
            self.fresh_value(v)
        return _Plan("empty")

    def fresh_value(self, v: int) -> None:
        self.axes[v] = [self.table.fresh(n) for n in self.flat.shapes[v]]
        self.table.own(v, self.axes[v] or [])

    def new_owner(self) -> int:
        self._owner += 1
        return self._owner

    def of(self, v: int) -> list[Variables]:
        axes = self.axes[v]
        assert axes is not None, "a value is used before it is computed"
        return axes

    def biggest_first(self, eqn: Equation) -> list[int]:
        """Operand positions by size: the larger value keeps its own names."""
        return sorted(range(len(eqn.ins)), key=lambda k: -math.prod(self.flat.shapes[eqn.ins[k]]))

    # elementwise

    def map(self, eqn: Equation) -> _Plan:
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
            reads[k] = [self.of(out)[a] if n != 1 else [] for a, n in enumerate(shape_k)]
            for mine, wanted in zip(self.of(eqn.ins[k]), reads[k]):
                self.table.unify(wanted, mine)
        return _Plan("map", reads)

    # folds and contractions

    def fold(self, eqn: Equation) -> _Plan:
        axes, reduced = self.of(eqn.ins[0]), {int(a) for a in eqn.params["axes"]}
        self.axes[eqn.outs[0]] = [axis for a, axis in enumerate(axes) if a not in reduced]
        return _Plan("fold", [axes], [v for a in sorted(reduced) for v in axes[a]])

    def dot(self, eqn: Equation) -> _Plan:
        (contract, batch), shapes = eqn.params["dimension_numbers"], [self.flat.shapes[v] for v in eqn.ins]
        reads: list[dict[int, Variables]] = [{}, {}]
        for pairs in (batch, contract):
            for a, b in zip(*pairs):
                reads[0][int(a)] = reads[1][int(b)] = self.table.fresh(shapes[0][int(a)])
        shared = [reads[0][int(a)] for a in batch[0]]
        over = [v for a in contract[0] for v in reads[0][int(a)]]
        free: list[Variables] = []
        for side in (0, 1):
            for a, n in enumerate(shapes[side]):
                if a not in reads[side]:
                    reads[side][a] = self.table.fresh(n)
                    free.append(reads[side][a])
        self.axes[eqn.outs[0]] = [*shared, *free]
        self.table.own(eqn.outs[0], self.of(eqn.outs[0]))
        self.table.own(self.new_owner(), [*reads[0].values(), *free])
        for side in self.biggest_first(eqn):
            for a, mine in enumerate(self.of(eqn.ins[side])):
                self.table.unify(reads[side][a], mine)
        return _Plan("dot", [[side[a] for a in range(len(side))] for side in reads], over)

    # blocks

    def block(self, eqn: Equation) -> _Plan:
        """Pointwise axes share one index; bound axes keep their operand's names, apart from the pointwise ones."""
        ins, outs = [self.flat.shapes[v] for v in eqn.ins], [self.flat.shapes[v] for v in eqn.outs]
        stands: dict[tuple[str, int, int], Variables] = {}
        groups: list[Variables] = []
        for group in ops.block_op(eqn.prim.name).pointwise(ins, outs, eqn.params):
            sizes = {(ins if side == "in" else outs)[k][a] for side, k, a in group}
            if len(sizes) == 1 and not any(place in stands for place in group):
                groups.append(self.table.fresh(sizes.pop()))
                stands.update((place, groups[-1]) for place in group)
        reads = [[stands.get(("in", k, a)) or self.table.fresh(n) for a, n in enumerate(shape)] for k, shape in enumerate(ins)]
        for k, axes in enumerate(reads):
            self.table.own(self.new_owner(), [*axes, *groups])
        for k, v in enumerate(eqn.outs):
            self.axes[v] = [stands.get(("out", k, a)) or self.table.fresh(n) for a, n in enumerate(outs[k])]
            self.table.own(v, self.of(v))
        for k in self.biggest_first(eqn):
            for wanted, mine in zip(reads[k], self.of(eqn.ins[k])):
                self.table.unify(wanted, mine)
        return _Plan("block", reads, groups=groups)

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


_VIEWS = {
    "transpose": _Inference.transpose,
    "squeeze": _Inference.squeeze,
    "expand_dims": _Inference.expand_dims,
    "broadcast_in_dim": _Inference.broadcast,
    "tile": _Inference.tile,
    "reshape": _Inference.reshape,
}


# --- pass two: terms --------------------------------------------------------------------------------


class _Builder:
    """Terms of every value, under the index names that pass one settled."""

    def __init__(self, flat: Flat, inference: _Inference, arg_names: Sequence[str]):
        self.flat, self.inference, self.table = flat, inference, inference.table
        self.term: list[int] = [-1] * len(flat.shapes)
        self.program = Program()
        self.program.inputs = [Buffer(name, flat.shapes[v], flat.dtypes[v]) for name, v in zip(arg_names, flat.inputs, strict=True)]
        self.program.consts = list(flat.consts.values())
        self.number = self.number_indices()

    def number_indices(self) -> dict[int, int]:
        """The final number of each index; the program's list of indices is made on the way."""
        table, inference = self.table, self.inference
        layouts: list[tuple[int, list[int]]] = []
        for v, axes in enumerate(inference.axes):
            if axes is not None:
                chain = [leaf for axis in axes for leaf in table.leaves(axis)]
                layouts.append((math.prod(self.flat.shapes[v]) * np.dtype(np.int32).itemsize, chain))
        reads = [leaf for plan in inference.plans for read in plan.reads for axis in read for leaf in table.leaves(axis)]
        seen = list(dict.fromkeys([leaf for _, chain in layouts for leaf in chain] + reads))
        order = index_order(seen, layouts)
        names = dict(zip(seen, index_names(len(seen))))
        self.program.indices = [Index(names[leaf], table.extent[leaf]) for leaf in order]
        return {leaf: k for k, leaf in enumerate(order)}

    def build(self) -> Program:
        program, flat = self.program, self.flat
        for slot, v in enumerate(flat.inputs):
            self.term[v] = program.add(Input(flat.dtypes[v], slot, self.axes_of(v)))
        for slot, v in enumerate(flat.consts):
            self.term[v] = program.add(Const(flat.dtypes[v], slot, self.axes_of(v)))
        for v, value in flat.literals.items():
            self.term[v] = program.add(Literal.of(value, flat.dtypes[v]))
        for eqn, plan in zip(flat.equations, self.inference.plans):
            _BUILDERS[plan.kind](self, eqn, plan)
        program.outputs = [Output(self.term[v], self.axes_of(v), weak) for v, weak in zip(flat.outputs, flat.weak)]
        return program

    # axes and reads

    def axis(self, variables: Iterable[int]) -> Axis:
        return tuple(self.number[leaf] for leaf in self.table.leaves(variables))

    def axes(self, axes: Iterable[Variables]) -> Axes:
        return tuple(self.axis(axis) for axis in axes)

    def axes_of(self, v: int) -> Axes:
        return self.axes(self.inference.of(v))

    def read(self, v: int, wanted: Axes, source: Source | None) -> int:
        """The term of value ``v`` with its axes called ``wanted``: itself, renamed, or reshaped where factors do not fit."""
        have, term = self.axes_of(v), self.term[v]
        if have == wanted:
            return term
        before, after = [i for axis in have for i in axis], [i for axis in wanted for i in axis]
        if before == after:
            return term
        extent = [index.extent for index in self.program.indices]
        if [extent[i] for i in before] == [extent[i] for i in after]:
            return self.program.add(Rename(self.program.terms[term].dtype, tuple(zip(before, after)), term), source)
        return self.reshaped(term, have, wanted, source)

    def reshaped(self, term: int, have: Axes, wanted: Axes, source: Source | None) -> int:
        shapes = [self.program.shape(have)], [self.program.shape(wanted)]
        params = {"new_sizes": shapes[1][0], "dimensions": None, "sharding": None}
        dtype = self.program.terms[term].dtype
        pointwise = 0
        for (_, _, a), (_, _, b) in ops.block_op("reshape").pointwise(*shapes, params):
            if have[a] == wanted[b] and len(have[a]) == 1:
                pointwise |= 1 << have[a][0]
        call = Call(primitives.reshape_p, params, (have,), (wanted,), (dtype,), pointwise)
        return self.program.add(Block(dtype, call, (term,), 0), source)

    def reads(self, eqn: Equation, plan: _Plan) -> tuple[int, ...]:
        return tuple(self.read(v, self.axes(axes), eqn.source) for v, axes in zip(eqn.ins, plan.reads))

    # one builder for each kind of equation

    def view(self, eqn: Equation, plan: _Plan) -> None:
        have, wanted = ([i for axis in axes for i in axis] for axes in (self.axes_of(eqn.ins[0]), self.axes(plan.reads[0])))
        same = eqn.prim.name != "reshape" or have == wanted
        self.term[eqn.outs[0]] = self.term[eqn.ins[0]] if same else self.read(eqn.ins[0], self.axes(plan.reads[0]), eqn.source)

    def map(self, eqn: Equation, plan: _Plan) -> None:
        name = ops.ALIASES.get(eqn.prim.name, eqn.prim.name)
        out = eqn.outs[0]
        term = Map(self.flat.dtypes[out], name, self.reads(eqn, plan), ops.map_params(name, eqn.params))
        self.term[out] = self.program.add(term, eqn.source)

    def fold(self, eqn: Equation, plan: _Plan) -> None:
        (arg,), out, over = self.reads(eqn, plan), eqn.outs[0], mask_of(self.axis(plan.over))
        monoid = ops.REDUCTIONS[eqn.prim.name]
        self.term[out] = self.program.add(Fold(self.flat.dtypes[out], monoid, over, arg), eqn.source) if over else arg

    def dot(self, eqn: Equation, plan: _Plan) -> None:
        lhs, rhs = self.reads(eqn, plan)
        dtype, over = self.flat.dtypes[eqn.outs[0]], mask_of(self.axis(plan.over))
        if not over and all(self.flat.dtypes[v] == dtype for v in eqn.ins) and dtype != bool:
            term: Map | Dot = Map(dtype, "mul", (lhs, rhs))
        else:
            term = Dot(dtype, over, lhs, rhs, eqn.params["precision"])
        self.term[eqn.outs[0]] = self.program.add(term, eqn.source)

    def iota(self, eqn: Equation, plan: _Plan) -> None:
        """An iota over a product of indices is the sum of theirs, each times its stride."""
        dtype = self.flat.dtypes[eqn.outs[0]]
        axis = self.axes_of(eqn.outs[0])[eqn.params["dimension"]]
        if len(axis) == 1:
            self.term[eqn.outs[0]] = self.program.add(Iota(dtype, axis[0]), eqn.source)
            return
        whole, position, stride = np.dtype(np.int32), None, 1
        for index in reversed(axis):
            here = self.program.add(Iota(whole, index), eqn.source)
            step = self.program.add(Literal.of(stride, whole))
            here = here if stride == 1 else self.program.add(Map(whole, "mul", (here, step)), eqn.source)
            position = here if position is None else self.program.add(Map(whole, "add", (here, position)), eqn.source)
            stride *= self.program.indices[index].extent
        if position is None:
            position = self.program.add(Literal.of(0, whole))
        if dtype != whole:
            position = self.program.add(Map(dtype, "convert_element_type", (position,), (("new_dtype", dtype),)), eqn.source)
        self.term[eqn.outs[0]] = position

    def zero(self, eqn: Equation, plan: _Plan) -> None:
        for v in eqn.outs:
            self.term[v] = self.program.add(Literal.of(0, self.flat.dtypes[v]), eqn.source)

    def block(self, eqn: Equation, plan: _Plan) -> None:
        pointwise = mask_of(axis[0] for axis in self.axes(plan.groups) if len(axis) == 1)
        in_axes = tuple(self.axes(axes) for axes in plan.reads)
        out_axes = tuple(self.axes_of(v) for v in eqn.outs)
        dtypes = tuple(self.flat.dtypes[v] for v in eqn.outs)
        if not eqn.outs:
            out_axes, dtypes = ((),), (np.dtype(bool),)
        call = Call(eqn.prim, dict(eqn.params), in_axes, out_axes, dtypes, pointwise, eqn.effects)
        args = self.reads(eqn, plan)
        terms = [self.program.add(Block(dtype, call, args, k), eqn.source) for k, dtype in enumerate(dtypes)]
        for v, term in zip(eqn.outs, terms):
            self.term[v] = term
        if eqn.effects:
            self.program.effects.append(terms[0])


_BUILDERS = {
    "view": _Builder.view,
    "map": _Builder.map,
    "fold": _Builder.fold,
    "dot": _Builder.dot,
    "iota": _Builder.iota,
    "zeros_like": _Builder.zero,
    "empty": _Builder.zero,
    "block": _Builder.block,
}
