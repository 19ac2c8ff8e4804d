"""Source of the expressions of single terms."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from eqsat_mem.codegen.calls import CallWriter
from eqsat_mem.codegen.reads import Reader
from eqsat_mem.codegen.source import Fixed, Layout, Region, Scope, Value, identifier, number, wrap
from eqsat_mem.codegen.unknown import unknown
from eqsat_mem.ir import Block, Dot, Fold, Iota, Literal, Map, Rename, Term, bits, itemsize, mask_of
from eqsat_mem.ir.ops import (
    MONOIDS,
    RESCALING,
    MonoidOp,
    block_op,
    map_row,
    map_text,
    of_one_rank,
    operation_of,
    param_text,
    primitive_text,
)
from eqsat_mem.schedule.kernel import moves

INLINE = 60
"""Expressions of fewer characters that are used once are written inline in their user."""


class ExpressionWriter:
    """A writer of the expression of each kind of term; ``elements`` are slices that it reads at positions that XLA does not know."""

    def __init__(self, reads: Reader, calls: CallWriter, elements: Mapping[int, int] = MappingProxyType({})):
        self.reads = reads
        self.calls = calls
        self.elements = elements
        self.positions = sorted(set(elements.values()))
        self.unknown = ""

    def value(self, t: int, scope: Scope, region: Region, fixed: Fixed = ()) -> Value:
        """Return the value of a term, writing its computation if this region computes it.

        Args:
            t: the term.
            scope: the scope to which lines are added.
            region: the region being written.
            fixed: positions of unrolled indices at which the value is wanted.
        """
        fixed = tuple((i, p) for i, p in fixed if self.reads.program.free[t] >> i & 1)
        key = (t, fixed) if fixed else t
        known = scope.values.get(key)
        if known is not None:
            return known
        term = self.reads.program.terms[t]
        if isinstance(term, Rename) and term.arg in region.terms:
            self.value(term.arg, scope, region)
        if t not in region.terms:
            return self.reads.outer(t, scope, fixed)
        if fixed and (t in region.kept or isinstance(term, Block)) and t not in region.apart:
            return self.reads.pinned(self.value(t, scope, region), fixed)
        text, layout = self.compute(t, scope, region, fixed)
        if t in region.ends:
            around = region.ends[t]
            text = around.format(text if around.count("{0}") == 1 else self.reads.assign(text, layout, scope, self.reads.word(t)).text)
        on_the_way = t not in region.outs and t not in region.kept and not isinstance(term, Block)
        inline = on_the_way and region.users[t] == 1 and len(text) < INLINE
        if text.isidentifier():
            value = Value(text, layout)
        elif inline:
            value = Value(text, layout, atom=False)
        else:
            self.reads.where(t, scope)
            value = self.reads.assign(text, layout, scope, self.reads.word(t))
        scope.values[key] = value
        return value

    def compute(self, t: int, scope: Scope, region: Region, fixed: Fixed) -> tuple[str, Layout]:
        term = self.reads.program.terms[t]
        match term:
            case Map():
                return self.map(t, term, scope, region, fixed)
            case Fold():
                return self.fold(t, term, scope, region, fixed)
            case Dot():
                return self.dot(t, term, scope, region)
            case Block():
                return self.block(t, term, scope, region, fixed)
        raise TypeError(f"cannot emit {term}")

    def map(self, t: int, term: Map, scope: Scope, region: Region, fixed: Fixed) -> tuple[str, Layout]:
        layout = tuple(i for i in self.reads.layout(t) if i not in dict(fixed))
        operands = [self.reads.program.terms[a] for a in term.args]
        all_literal = all(isinstance(o, Literal) for o in operands)
        whole = of_one_rank(term.op, term.params, len(operands), term.dtype)
        values = []
        for a, operand in zip(term.args, operands):
            if isinstance(operand, Literal) and (over := self.averaged(t, scope)):
                values.append(Value(self.reads.count(over, scope), ()))
            elif isinstance(operand, Literal):
                typed = all_literal or not self.weak_literal(term, operand, operands)
                values.append(Value(self.reads.typed(operand) if typed else self.reads.literal(operand), (), False))
            else:
                value = self.value(a, scope, region, fixed)
                if any(holder.shifts.get(t) == a for holder in scope.around()):
                    value = Value(self.with_helpers(f"proper({value.text})"), value.layout)
                value = self.reads.apart(value, layout)
                if (t, a) in region.hidden and not fixed:
                    value = self.reads.hidden(a, value, region.hidden[t, a], scope)
                values.append(self.reads.aligned(value, layout, whole))
        text = map_text(term.op, term.params, [v.text for v in values], term.dtype)
        if text is None:
            text = self.primitive_map(term, [
                self.reads.typed(o) if isinstance(o, Literal) else v.text for o, v in zip(operands, values)
            ])  # fmt: skip
        return text, layout

    def averaged(self, t: int, scope: Scope) -> int:
        """Return the indices over which a term is the mean of a chunk in an enclosing loop; 0 if it is not such a mean."""
        return next((holder.means[t] for holder in scope.around() if t in holder.means), 0)

    def with_helpers(self, text: str) -> str:
        """Return ``text``, after adding to the source the rescaling helpers that it calls."""
        self.calls.carry_helpers(RESCALING, text)
        return text

    def weak_literal(self, term: Map, literal: Literal, operands: Sequence[Term]) -> bool:
        """Whether a literal may be written as a bare number, because another operand has its dtype; JAX reads those as 32-bit integers."""
        if np.dtype(literal.dtype).kind in "iu" and not -(2**31) <= literal.value < 2**31:
            return False
        return any(not isinstance(o, Literal) and o.dtype == literal.dtype for o in operands)

    def primitive_map(self, term: Map, args: Sequence[str]) -> str:
        """Return source of an operation by the name of its primitive, or of a named function if the primitive has no source."""
        row, params = map_row(term), dict(term.params)
        own = operation_of(params)
        if own is not None:
            dtypes = tuple(self.reads.program.terms[a].dtype for a in term.args)
            return f"{self.calls.functions.of_user(own, ((),) * len(args), dtypes)}({', '.join(args)})"
        same_shape = args if len(args) == 1 else [f"*jnp.broadcast_arrays({', '.join(args)})"]
        text = primitive_text(row.prim, {**row.defaults, **params}, same_shape)
        if text is not None:
            return text

        def run(*arrays: Any) -> Any:
            shape = jnp.broadcast_shapes(*(jnp.shape(a) for a in arrays))
            return row.bind(*(jnp.broadcast_to(a, shape) for a in arrays), **params)

        return f"{self.reads.bind(term.op, run)}({', '.join(args)})"

    def fold(self, t: int, term: Fold, scope: Scope, region: Region, fixed: Fixed) -> tuple[str, Layout]:
        program, monoid = self.reads.program, MONOIDS[term.monoid]
        present = [i for i in bits(term.over) if program.free[term.arg] >> i & 1]
        absent = [i for i in bits(term.over) if i not in present]
        if present and all(self.is_unrolled(t, i, scope) for i in present):
            text, layout = self.unrolled(t, term, present, scope, region, fixed)
        else:
            value = self.value(term.arg, scope, region, fixed)
            layout = tuple(i for i in value.layout if i not in present)
            sums = self.reads.idioms.sums_lone_axes and term.monoid == "add" and present
            alone = [i for i in layout if self.reads.single(i, scope)] if sums else []
            axes = tuple(sorted(value.layout.index(i) for i in (*present, *alone)))
            reduce_text = "jnp.sum({0}, {1})" if self.reads.idioms.sums_wide(term) else monoid.reduce_text
            text = reduce_text.format(value.text, axes) if present else value.text
            if alone:
                text = f"lax.expand_dims({text}, {tuple(layout.index(i) for i in alone)})"
        for i in absent:
            text = self.repeated(monoid, text, term.dtype, i, scope)
        return text, layout

    def is_unrolled(self, t: int, i: int, scope: Scope) -> bool:
        """Whether a fold is written out along an index; one of no elements has nothing to write."""
        is_allowed = bool(self.reads.ex.unrolls.get(t, 0) >> i & 1)
        return is_allowed and not self.reads.looped(i, scope) and self.reads.program.indices[i].extent > 0

    def repeated(self, monoid: MonoidOp, text: str, dtype: Any, i: int, scope: Scope) -> str:
        """Return source of a value folded with itself: a fold over an index on which it does not depend, of extent zero perhaps."""
        if self.reads.program.indices[i].extent == 0:
            return f"jnp.full_like({text}, {number(monoid.identity(dtype))}, {self.reads.dtype(dtype)})"
        if monoid.idempotent:
            return text
        return monoid.repeat_text.format(wrap(Value(text, (), False)), self.reads.extent(i, scope))

    def unrolled(self, t: int, term: Fold, present: list[int], scope: Scope, region: Region, fixed: Fixed) -> tuple[str, Layout]:
        """Return the fold unrolled into one expression per position."""
        layout = tuple(i for i in self.reads.layout(t) if i not in dict(fixed))
        points: list[Fixed] = [fixed]
        for i in present:
            points = [(*p, (i, position)) for p in points for position in range(self.reads.program.indices[i].extent)]
        combine = MONOIDS[term.monoid].combine_text
        text = ""
        for point in points:
            value = self.reads.aligned(self.value(term.arg, scope, region, point), layout)
            text = combine.format(text, wrap(value)) if text else wrap(value)
        return text, layout

    def widened(self, t: int, value: Value, wide: Any) -> Value:
        """The value of a term in a dtype that is no narrower."""
        if self.reads.program.terms[t].dtype == wide:
            return value
        return Value(f"lax.convert_element_type({value.text}, {self.reads.dtype(wide)})", value.layout)

    def dot(self, t: int, term: Dot, scope: Scope, region: Region) -> tuple[str, Layout]:
        program = self.reads.program
        left, right = (self.value(a, scope, region) for a in (term.lhs, term.rhs))
        if term.over & (program.free[term.lhs] ^ program.free[term.rhs]):  # einsum sums an axis of one operand before it multiplies
            wide = max((term.dtype, *(program.terms[a].dtype for a in (term.lhs, term.rhs))), key=itemsize)
            left, right = (self.widened(a, value, wide) for a, value in ((term.lhs, left), (term.rhs, right)))
        layout = self.reads.layout(t)
        batch = [i for i in layout if i in left.layout and i in right.layout]
        own = [[i for i in side.layout if i in layout and i not in batch] for side in (left, right)]
        if (*batch, *own[0], *own[1]) != layout:
            left, right, own = right, left, own[::-1]
        contracted = [i for i in bits(term.over) if i in left.layout and i in right.layout]
        if contracted and own[1] and self.swaps(left.layout, own, contracted, scope):
            left, right, layout = right, left, (*batch, *own[1], *own[0])
        absent = [i for i in bits(term.over) if i not in left.layout and i not in right.layout]
        heavier = max((left, right), key=lambda side: program.extent(mask_of(side.layout)))  # einsum contracts in the order of the alphabet
        in_order = tuple(i for i in heavier.layout if i in contracted)  # and XLA copies an operand that has its axes in another
        joined = self.joined(left.layout, right.layout, layout)
        names = (tuple(i for i in known if i not in joined) for known in (left.layout, right.layout, layout))
        spec = '"{},{}->{}"'.format(*self.reads.spell(*names, ascending=tuple(i for i in in_order if i not in joined)))
        options = (
            "" if term.precision is None else f", precision={param_text(term.precision) or self.reads.bind('precision', term.precision)}"
        )
        if program.terms[term.lhs].dtype != term.dtype or program.terms[term.rhs].dtype != term.dtype:
            options += f", preferred_element_type={self.reads.dtype(term.dtype)}"
        operands = (self.with_joined(side, joined, scope) for side in (left, right))
        text = f"jnp.einsum({spec}, {', '.join(operands)}{options})"
        if joined.intersection(layout):
            text = f"{text}.reshape({self.reads.shape(layout, scope)})"
        for i in absent:
            text = self.repeated(MONOIDS["add"], text, term.dtype, i, scope)
        return text, layout

    def joined(self, *layouts: Layout) -> frozenset[int]:
        """The indices that count devices and stand before those of their shares in all arrays of a contraction.

        The two are one axis there: XLA copies operands that have more axes than a matrix into another order.
        """
        shares = self.reads.program.shares
        pairs = {} if shares is None else {across: share for share, across in shares.across.items()}
        return frozenset(
            across
            for across, share in pairs.items()
            if all((across, share) in pairwise(known) for known in layouts if {across, share} & {*known})
        )

    def with_joined(self, value: Value, joined: frozenset[int], scope: Scope) -> str:
        """Source of a value some of whose axes are one with the next."""
        if not joined.intersection(value.layout):
            return value.text
        axes: list[tuple[int, ...]] = []
        for k, i in enumerate(value.layout):
            axes[-1:] = [(*axes[-1], i)] if k and value.layout[k - 1] in joined else [*axes[-1:], (i,)]
        return f"{wrap(value)}.reshape(({', '.join(self.reads.product(axis, scope) for axis in axes)}{',' if len(axes) == 1 else ''}))"

    def swaps(self, left: Layout, own: Sequence[Sequence[int]], contracted: Sequence[int], scope: Scope) -> bool:
        """Whether the backend prefers the operands of a contraction exchanged."""
        rows, columns, depth = (self.reads.positions(indices, scope) for indices in (*own, contracted))
        return self.reads.idioms.swaps_operands(left[-1] in contracted, rows, columns, depth)

    def block(self, t: int, term: Block, scope: Scope, region: Region, fixed: Fixed) -> tuple[str, Layout]:
        """Return one result of a call; the call itself is written once per scope, and for each element of an unrolled fold."""
        if along := self.reads.ex.unrolls.get(t):
            picked = self.result(term, self.searched(term, along.bit_length() - 1, scope, region), scope)
            return picked.text, picked.layout
        call = term.call
        made = (id(call), term.args, fixed) if fixed else (id(call), term.args)
        known, at = scope.calls.get(made), scope
        if fixed:
            at = Scope(scope, indent=scope.indent, lines=scope.lines, at=frozenset(i for i, _ in fixed))
        if known is None:
            values = [self.operand(a, term, scope, region, fixed) for a in term.args]
            args = [self.reads.in_axes(value, axes, at).text for value, axes in zip(values, call.in_axes)]
            args[:1] = [region.sums[t]] if t in region.sums else args[:1]
            self.reads.where(t, scope)
            own = operation_of(call.params)
            single = len(call.out_axes) == 1 and not call.prim.multiple_results
            in_order = all(value.layout == sum(axes, ()) and () not in axes for value, axes in zip(values, call.in_axes))
            if own is not None:
                dtypes = tuple(self.reads.program.terms[a].dtype for a in term.args)
                known = [self.calls.vectorized(own, call, args, dtypes)]
            elif t in self.elements and at.parent is None:
                known = [f"lax.dynamic_slice_in_dim({args[0]}, {self.position(self.elements[t], at)}, 1, 0)"]
            else:
                known = [self.calls.call_text(call, args, at, in_order)] if single else self.calls.results(call, args, at, in_order)
            scope.calls[made] = known
        value = self.reads.pinned(self.result(term, known[term.out], at), tuple((i, 0) for i, _ in fixed))
        return value.text, value.layout

    def operand(self, t: int, of: Block, scope: Scope, region: Region, fixed: Fixed) -> Value:
        """The value of an operand of a block. What moves elements of a value that no loop slices reads them from where they lie: columns
        made outside of the loop would be a copy of all of it."""
        is_outside = bool(fixed) and moves(of) and t not in region.terms and not isinstance(self.reads.program.terms[t], Iota)
        loop = next((around.index for around in scope.around() if around.index is not None), None)
        if not is_outside or loop is None or self.reads.program.free[t] >> loop & 1:
            return self.value(t, scope, region, fixed)
        return self.reads.pinned(self.reads.read(t, scope), fixed)

    def position(self, known: int, scope: Scope) -> str:
        """Return source of a position as a number that XLA does not know; the first time, write where these come from."""
        if not self.unknown:
            first, last = self.positions[0], self.positions[-1]
            every = f"*range({first}, {last + 1})" if last - first + 1 == len(self.positions) else ", ".join(map(str, self.positions))
            text = f"unknown({every})"
            self.calls.carry_helpers((unknown,), text)
            self.unknown = identifier("positions", self.reads.taken)
            self.reads.line(scope, f"{self.unknown} = {text}")
        return f"{self.unknown}[{bisect_left(self.positions, known)}]"

    def searched(self, term: Block, along: int, scope: Scope, region: Region) -> str:
        """Return source of an unrolled search, with one operand per position."""
        call, (arg,) = term.call, term.args
        points = range(self.reads.program.indices[along].extent)
        elements = [self.reads.in_axes(self.value(arg, scope, region, ((along, p),)), call.out_axes[0], scope).text for p in points]
        row = block_op(call.prim.name)
        assert row.written_out is not None
        text = row.written_out(call.params, elements)
        self.calls.carry_helpers(row.helpers, text)
        return text

    def result(self, term: Block, name: str, scope: Scope) -> Value:
        """Return one result of a call, an array with the call's axes, reshaped to one axis per index."""
        axes = term.call.out_axes[term.out]
        flat = tuple(i for axis in axes for i in axis)
        split = any(len(axis) != 1 for axis in axes)
        return Value(f"{name}.reshape({self.reads.shape(flat, scope)})" if split else name, flat)
