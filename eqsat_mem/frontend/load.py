"""A JAX function as a program over named indices.

Pass one (:mod:`eqsat_mem.frontend.axis_inference`) decides which axes are the same index; pass two, here, builds terms bottom up.
Transposes, broadcasts, squeezes and reshapes are no term at all: they only say under which names the axes of a value stand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from jax.dtypes import issubdtype
from jax.extend.core import ClosedJaxpr, primitives
from jax.numpy import finfo

from eqsat_mem.frontend.axis_inference import Inference, Translation
from eqsat_mem.frontend.axis_unification import Variables, index_names, index_order
from eqsat_mem.frontend.diagonal_masks import with_own_masks
from eqsat_mem.frontend.flat_jaxpr import Equation, Flat
from eqsat_mem.frontend.inline import flatten, source_of
from eqsat_mem.frontend.known_numbers import number_of
from eqsat_mem.frontend.loop_roles import Alike
from eqsat_mem.frontend.preferences import PLAIN, Preferences
from eqsat_mem.frontend.same_results import SameResults
from eqsat_mem.ir import (
    Axes,
    Axis,
    Block,
    Buffer,
    Call,
    Const,
    Dot,
    Fold,
    Index,
    Input,
    Iota,
    Literal,
    Map,
    Output,
    Program,
    Rename,
    Source,
    axes_mask,
    itemsize,
    mask_of,
    ops,
)
from eqsat_mem.ir.jaxprs import combination_of, leaves_alone, stacked_by
from eqsat_mem.passes import EVERY, Pass

SELECTION_CHUNKS = 4
"""An operation that picks elements from its axis is taken apart if the axis has at least so many of the smallest chunks that it can
take."""


def load(closed: ClosedJaxpr, arg_names: Sequence[str], preferences: Preferences = PLAIN, passes: Collection[Pass] = EVERY) -> Program:
    """The program of a closed jaxpr, whose arguments are called ``arg_names``, as a backend prefers it; ``passes`` may change it.

    Every jaxpr loads: a primitive without a row in the operation table becomes an opaque call. Raises ``ValueError`` if the
    number of names is not that of the arguments.
    """
    return load_with_variables(closed, arg_names, preferences, passes)[0]


def load_with_variables(
    closed: ClosedJaxpr, arg_names: Sequence[str], preferences: Preferences = PLAIN, passes: Collection[Pass] = EVERY
) -> tuple[Program, dict[Any, int]]:
    """:func:`load`, and the term of each variable of the jaxpr whose value the program has."""
    builder = _builder(closed, arg_names, preferences, passes)
    program = builder.build()
    terms = {variable: builder.term[v] for variable, v in builder.flat.variables.items() if v >= 0}
    return program, {variable: t for variable, t in terms.items() if t >= 0}


def _builder(
    closed: ClosedJaxpr,
    names: Sequence[str],
    preferences: Preferences,
    passes: Collection[Pass],
    alike: Alike = (),
    first: int = 0,
    carries: int = 0,
) -> _Builder:
    """The builder of the program of a jaxpr; of a loop's body axes may be ``alike``, as those of its carries are, of which ``first`` is the
    first argument."""
    flat = flatten(closed, preferences, passes)
    with_own_masks(flat)

    def load_body(body: ClosedJaxpr, *more: Any) -> Program:
        return _builder(body, [f"x{k}" for k in range(len(body.in_avals))], preferences, passes, *more).build()

    same = [((flat.inputs[k], a), (flat.inputs[j], b)) for (k, a), (j, b) in alike]
    for before, after in zip(flat.inputs[first : first + carries], flat.outputs):
        same += [((before, a), (after, a)) for a in range(len(flat.shapes[before]))]
    return _Builder(flat, Inference(flat, load_body).run(same), names)


class _Builder:
    """Terms of every value, under the index names that pass one settled."""

    def __init__(self, flat: Flat, inference: Inference, arg_names: Sequence[str]):
        self.flat, self.inference, self.table = flat, inference, inference.table
        self.term: list[int] = [-1] * len(flat.shapes)
        self.program = Program(passes=frozenset().union(*(eqn.passes for eqn in flat.equations)))
        self.program.inputs = [Buffer(name, flat.shapes[v], flat.dtypes[v]) for name, v in zip(arg_names, flat.inputs, strict=True)]
        self.program.consts = list(flat.consts.values())
        self.known_leaves: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.number = self.number_indices()
        self.known_axes: dict[int, Axes] = {}

    def number_indices(self) -> dict[int, int]:
        """The final number of each index; the program's list of indices is made on the way."""
        table, inference = self.table, self.inference
        layouts = [(self.nbytes(v), self.leaves(axes)) for v, axes in enumerate(inference.axes) if axes is not None]
        reads = [leaf for how in inference.translations for read in how.reads for leaf in self.leaves(read)]
        seen = list(dict.fromkeys([leaf for _, chain in layouts for leaf in chain] + reads))
        order = index_order(seen, self.batches(), layouts)
        names = dict(zip(seen, index_names(len(seen))))
        self.program.indices = [Index(names[leaf], table.extent[leaf]) for leaf in order]
        return {leaf: k for k, leaf in enumerate(order)}

    def batches(self) -> list[tuple[int, list[int]]]:
        """The order of a batch axis of contractions and any other of their axes, with the bytes of the operands and results that have both:
        libraries take batches one after the other, and what lies otherwise is copied. No such order is one that what is given in
        memory has the other way round: arguments, outputs and what blocks read and make."""
        flat, every = self.flat, list(zip(self.flat.equations, self.inference.translations))
        given = [self.leaves(self.inference.of(v)) for v in [*flat.inputs, *flat.consts, *flat.outputs]]
        for eqn, how in every:
            if how.kind == "block":
                given += [self.leaves(axes) for axes in [*how.reads, *map(self.inference.of, eqn.outs)]]
        fixed = {pair for chain in given for pair in itertools.combinations(chain, 2)}
        found: list[tuple[int, list[int]]] = []
        for eqn, how in every:
            if how.kind == "dot":
                own = how.reads[0]
                batch = self.leaves(own[int(a)] for a in eqn.params["dimension_numbers"][1][0])
                for v, axes in [*zip(eqn.ins, how.reads), (eqn.outs[0], self.inference.of(eqn.outs[0]))]:
                    others = [leaf for leaf in self.leaves(axes) if leaf not in batch]
                    found += [(self.nbytes(v), [b, leaf]) for b in batch for leaf in others if (leaf, b) not in fixed]
        return found

    def nbytes(self, v: int) -> int:
        return math.prod(self.flat.shapes[v]) * itemsize(self.flat.dtypes[v])

    def leaves(self, axes: Iterable[Variables]) -> list[int]:
        return [leaf for axis in axes for leaf in self.leaves_of(axis)]

    def leaves_of(self, variables: Sequence[int]) -> tuple[int, ...]:
        """The indices whose product is an axis, none of which changes any more."""
        key = tuple(variables)
        known = self.known_leaves.get(key)
        if known is None:
            known = self.known_leaves[key] = self.table.leaves(variables)
        return known

    def build(self) -> Program:
        program, flat = self.program, self.flat
        for slot, v in enumerate(flat.inputs):
            self.term[v] = program.add(Input(flat.dtypes[v], slot, self.axes_of(v)))
        for slot, v in enumerate(flat.consts):
            self.term[v] = program.add(Const(flat.dtypes[v], slot, self.axes_of(v)))
        for v, value in flat.literals.items():
            self.term[v] = program.add(Literal.of(value, flat.dtypes[v]))
        for eqn, how in zip(flat.equations, self.inference.translations):
            _BUILDERS[how.kind](self, eqn, how)
        program.outputs = [Output(self.term[v], self.axes_of(v), weak) for v, weak in zip(flat.outputs, flat.weak)]
        return program

    # axes and reads

    def axis(self, variables: Sequence[int]) -> Axis:
        return tuple([self.number[leaf] for leaf in self.leaves_of(variables)])

    def axes(self, axes: Iterable[Variables]) -> Axes:
        return tuple(self.axis(axis) for axis in axes)

    def axes_of(self, v: int) -> Axes:
        known = self.known_axes.get(v)
        if known is None:
            known = self.known_axes[v] = self.axes(self.inference.of(v))
        return known

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

    def reads(self, eqn: Equation, how: Translation) -> tuple[int, ...]:
        return tuple(self.read(v, self.axes(axes), eqn.source) for v, axes in zip(eqn.ins, how.reads))

    # one builder for each kind of equation

    def view(self, eqn: Equation, how: Translation) -> None:
        have, wanted = ([i for axis in axes for i in axis] for axes in (self.axes_of(eqn.ins[0]), self.axes(how.reads[0])))
        same = eqn.prim.name != "reshape" or have == wanted
        self.term[eqn.outs[0]] = self.term[eqn.ins[0]] if same else self.read(eqn.ins[0], self.axes(how.reads[0]), eqn.source)

    def map(self, eqn: Equation, how: Translation) -> None:
        out = eqn.outs[0]
        name, params = ops.map_of(eqn.prim, eqn.params)
        args, dtype = self.reads(eqn, how), self.flat.dtypes[out]
        known = self.known(eqn, args)
        self.term[out] = self.program.add(Map(dtype, name, args, params) if known is None else Literal.of(known, dtype), eqn.source)

    def known(self, eqn: Equation, args: Sequence[int]) -> Any:
        """The number that all elements of an elementwise result are, where those of its operands are known."""
        terms = [self.program.terms[t] for t in args]
        given = [np.asarray(term.value).astype(term.dtype) for term in terms if isinstance(term, Literal)]
        return number_of(eqn.prim.name, eqn.params, given, self.flat.dtypes[eqn.outs[0]]) if len(given) == len(terms) > 0 else None

    def fold(self, eqn: Equation, how: Translation) -> None:
        (arg,), out, over = self.reads(eqn, how), eqn.outs[0], mask_of(self.axis(how.over))
        monoid = ops.REDUCTIONS[eqn.prim.name]
        if self.program.extent(over) == 0:  # of no elements, whatever literal stands for them
            self.term[out] = self.program.add(Literal.of(ops.MONOIDS[monoid].identity(self.flat.dtypes[out]), self.flat.dtypes[out]))
            return
        self.term[out] = self.program.add(Fold(self.flat.dtypes[out], monoid, over, arg), eqn.source) if over else arg

    def dot(self, eqn: Equation, how: Translation) -> None:
        lhs, rhs = self.reads(eqn, how)
        dtype, over = self.flat.dtypes[eqn.outs[0]], mask_of(self.axis(how.over))
        if not over and all(self.flat.dtypes[v] == dtype for v in eqn.ins) and not issubdtype(dtype, np.bool_):
            term: Map | Dot = Map(dtype, "mul", (lhs, rhs))
        else:
            term = Dot(dtype, over, lhs, rhs, eqn.params["precision"])
        self.term[eqn.outs[0]] = t = self.program.add(term, eqn.source)
        repeated = axes_mask(self.axes_of(eqn.outs[0])) & ~self.program.free[t]
        if repeated:
            self.program.repeated[t] = self.program.repeated.get(t, 0) | repeated

    def iota(self, eqn: Equation, how: Translation) -> None:
        """An iota over a product of indices is the sum of theirs, each times its stride.

        Positions are counted in integers where not all of them are numbers of the dtype, so that those of a chunk are rounded once.
        """
        dtype = self.flat.dtypes[eqn.outs[0]]
        axis = self.axes_of(eqn.outs[0])[eqn.params["dimension"]]
        if len(axis) == 1 and not (issubdtype(dtype, np.inexact) and self.program.extent(mask_of(axis)) > 2 ** (finfo(dtype).nmant + 1)):
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

    def zero(self, eqn: Equation, how: Translation) -> None:
        for v in eqn.outs:
            self.term[v] = self.program.add(Literal.of(0, self.flat.dtypes[v]), eqn.source)

    def block(self, eqn: Equation, how: Translation) -> None:
        pointwise = axes_mask(self.axes(how.groups))
        in_axes = tuple(self.axes(axes) for axes in how.reads)
        out_axes = tuple(self.axes_of(v) for v in eqn.outs)
        dtypes = tuple(self.flat.dtypes[v] for v in eqn.outs)
        if not eqn.outs:
            out_axes, dtypes = ((),), (np.dtype(bool),)
        args = self.reads(eqn, how)
        folds = mask_of(self._folded_axis(eqn, in_axes)) | self._meeting(eqn, in_axes, out_axes, args) | axes_mask(self.axes(how.summed))
        held = ops.held_inside(eqn.params)
        call = Call(eqn.prim, dict(eqn.params), in_axes, out_axes, dtypes, pointwise, folds, eqn.effects, held, inside=how.inside)
        if how.inside is not None:
            self.program.passes |= how.inside.program.passes
        inside = [map(source_of, reversed(stacked_by(eqn.prim, eqn.params, k))) for k in range(len(dtypes))]
        sources = [next(filter(None, of), eqn.source) for of in inside]
        made = enumerate(zip(dtypes, sources, strict=True))
        terms = [self.program.add(Block(dtype, call, args, k), source) for k, (dtype, source) in made]
        for v, term in zip(eqn.outs, terms):
            self.term[v] = term
        if how.same is not None:
            self.same(how.same, eqn, call, args)
        if eqn.effects:
            self.program.effects.append(terms[0])

    def same(self, loop: SameResults, eqn: Equation, whole: Call, args: Sequence[int]) -> None:
        """Results that are the same for all rows of a loop, by a loop of their own."""
        in_axes, out_axes = (
            tuple(axes[k] for k in among) for axes, among in ((whole.in_axes, loop.operands), (whole.out_axes, loop.results))
        )
        dtypes = tuple(whole.out_dtypes[k] for k in loop.results)
        call = Call(loop.prim, loop.params, in_axes, out_axes, dtypes, 0, 0, False, ops.held_inside(loop.params))
        for k, result in enumerate(loop.results):
            block = Block(dtypes[k], call, tuple(args[operand] for operand in loop.operands), k)
            self.term[eqn.outs[result]] = self.program.add(block, eqn.source)

    def _folded_axis(self, eqn: Equation, in_axes: Sequence[Axes]) -> Axis:
        """The index that a block operation folds: none if it is a product of indices, or too short to be worth chunks."""
        own = ops.operation_of(eqn.params)
        if own is not None:
            return in_axes[0][-1] if own.monoid is not None else ()
        selection = ops.block_op(eqn.prim.name).selection
        if selection is None or (selection.text is None and not self._begins_with_nothing(eqn)):
            return ()
        axis = in_axes[0][selection.axis(eqn.params, len(in_axes[0]))]
        long = self.program.extent(mask_of(axis)) >= SELECTION_CHUNKS * selection.least(eqn.params)
        return axis if len(axis) == 1 and long else ()

    def _begins_with_nothing(self, eqn: Equation) -> bool:
        """Whether what a reduction by a function begins with changes nothing, so that every chunk may begin with it."""
        start = [self.flat.literals.get(v) for v in eqn.ins[len(eqn.ins) // 2 :]]
        is_known = all(value is not None and issubdtype(value.dtype, np.number) for value in start)
        return is_known and leaves_alone(combination_of(eqn.params), start)

    def _meeting(self, eqn: Equation, in_axes: Sequence[Axes], out_axes: Sequence[Axes], args: Sequence[int]) -> int:
        """The indices whose elements an operation combines: none if what it writes them into would count once per chunk."""
        row = ops.block_op(eqn.prim.name)
        if row.monoid is None or not eqn.outs or not ops.foldable(row.monoid, self.flat.dtypes[eqn.outs[0]]):
            return 0
        if row.writes_into:
            into, monoid = self.program.terms[args[0]], ops.MONOIDS[row.monoid]
            if not isinstance(into, Literal) or not (monoid.idempotent or into.value == monoid.identity(into.dtype)):
                return 0
        groups = row.shared([self.flat.shapes[v] for v in eqn.ins], [self.flat.shapes[v] for v in eqn.outs], eqn.params)
        met = mask_of(i for group in groups for _, k, a in group for i in in_axes[k][a])
        return met & ~axes_mask(out_axes[0]) & ~(axes_mask(in_axes[0]) if row.writes_into else 0)


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
