"""Prefix sums by blocks: of the positions of a block, a product with a triangle of ones, and of all blocks before it, the sum of theirs.

A prefix sum is an operation that no rule looks into. Where what it sums is a product, ``k[s, d] v[s, e]``, and what reads it contracts,
``sum_d q[t, d] sum_{s <= t} k[s, d] v[s, e]``, it holds and moves an array that neither operands nor results are as large as: causal linear
attention and its gradients are so. With positions in blocks, a prefix sum is a contraction within each block, which associates with the
others, ``sum_s [s <= t] (sum_d q[t, d] k[s, d]) v[s, e]``, and a prefix sum over blocks of their sums (Hua, Dai, Liu and Le, 2022).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from eqsat_mem.frontend.inline import lines_of
from eqsat_mem.ir import Block, Const, Dot, Fold, Input, Map, Program, bits, children, folded, mask_of
from eqsat_mem.ir.interpreter import evaluate_term, expand, from_axes, to_axes
from eqsat_mem.ir.ops import MONOIDS, map_row
from eqsat_mem.passes import EVERY, PREFIXES, Pass
from eqsat_mem.transforms.retraced import retraced

Array = Any

LEAST = 2**14
"""Prefix sums of fewer elements are no reason to write a program so."""
LENGTH = 64
"""Positions of a block. Measured on a CPU, causal linear attention over 8,192 positions: of lengths from 16 to 256, one of 64 takes least
for 16 and 32 features, and for 64 and 128 at most 1.4 times as long as the best, gradients included."""
MULTIPLES = ("mul", "div", "neg", "convert_element_type", "reduce_precision")
"""Elementwise operations whose result is a product of factors, one of them possibly inverted, or a multiple of one operand."""
SUMS = ("add", "sub")
"""Elementwise operations whose prefix sum is that of their operands."""


def with_prefix_blocks(program: Program, passes: Collection[Pass] = EVERY) -> Program | None:
    """The program with its prefix sums by blocks; None where none of them is a large one of products."""
    if PREFIXES not in passes or program.effects:  # effects have an order
        return None
    sums = dict(_prefix_sums(program))
    extents = {program.indices[i].extent for t, i in sums.items() if _sums_products(program, t)} - _unpadded(program)
    sums = {t: i for t, i in sums.items() if program.indices[i].extent in extents}
    if not sums:
        return None
    new = retraced(program, lambda args, consts: _InBlocks(replace(program, consts=list(consts)), sums, args).outputs(), passes)
    new.passes |= {PREFIXES.name}
    return new


def _prefix_sums(program: Program) -> Iterator[tuple[int, int]]:
    """The prefix sums along an axis of several blocks which is one index of the operand, with that index."""
    for t in program.reachable():
        term = program.terms[t]
        if isinstance(term, Block) and term.call.prim is primitives.cumsum_p and jnp.issubdtype(term.dtype, np.inexact):
            axis = term.call.in_axes[0][term.call.params["axis"]]
            if len(axis) == 1 and program.free[term.args[0]] >> axis[0] & 1 and program.indices[axis[0]].extent > 2 * LENGTH:
                yield t, axis[0]


def _unpadded(program: Program) -> set[int]:
    """The extents of values that have no zeros, such as keys of random numbers."""
    keys = (t for t, term in enumerate(program.terms) if jax.dtypes.issubdtype(term.dtype, jax.dtypes.extended))
    return {program.indices[i].extent for t in keys for i in bits(program.free[t])}


def _sums_products(program: Program, t: int) -> bool:
    """Whether a prefix sum is large, and sums a product whose factors have fewer elements, a multiple of one, or a sum with one."""
    extent, seen, stack = program.extent(program.free[t]), set[int](), list(children(program.terms[t]))
    while stack and extent >= LEAST:
        u = stack.pop()
        term = program.terms[u]
        if u in seen or program.extent(program.free[u]) < extent or not isinstance(term, Map | Dot):
            continue
        seen.add(u)
        largest, op = max(program.extent(program.free[c]) for c in children(term)), term.op if isinstance(term, Map) else ""
        if op in (*MULTIPLES, *SUMS) and largest == extent:
            stack += children(term)
        elif (op in MULTIPLES or not op) and largest < extent:
            return True
    return False


class _InBlocks:
    """A program while it is traced with prefix sums by blocks.

    Indices along which there are such sums, and others of the same extents, have as many positions as blocks have: values may be anything
    at those beyond the last, where sums take nothing.
    """

    def __init__(self, program: Program, sums: Mapping[int, int], args: Sequence[Array]) -> None:
        self.old, self.sums, self.args = program, sums, args
        extents = {program.indices[i].extent for i in sums.values()}
        self.new = replace(program, indices=[replace(i, extent=_filled(i.extent)) if i.extent in extents else i for i in program.indices])
        self.wide = mask_of(k for k, i in enumerate(program.indices) if i.extent in extents)
        self.values: dict[int, Array] = {}
        self.cuts: dict[tuple[int, int, str], Array] = {}
        self.calls: dict[Any, list[Array]] = {}

    def outputs(self) -> list[Array]:
        """The outputs of the program."""
        for t in self.old.reachable():
            with lines_of(self.old.source.get(t)):
                self.values[t] = self._value(t)
        return [to_axes(self.old, self._own(o.term), self.old.free[o.term], o.axes) for o in self.old.outputs]

    def _value(self, t: int) -> Array:
        """A value with its wide indices filled up."""
        term = self.old.terms[t]
        if t in self.sums:
            return self._prefix_sum(t)
        over, monoid = folded(term) & self.wide, term.monoid if isinstance(term, Fold) else "add"
        if isinstance(term, Input | Const | Block) or over & ~self._any(children(term)):
            operands = {c: self._own(c) for c in children(term)}
            return self._filled(t, evaluate_term(self.old, t, self.args, operands, self.calls))
        operands = {c: self._cut(c, over & self.old.free[c], monoid) for c in children(term)}
        return evaluate_term(self.new, t, self.args, operands, self.calls)

    def _any(self, terms: Sequence[int]) -> int:
        """The indices that some of these terms have."""
        return mask_of(i for t in terms for i in bits(self.old.free[t]))

    def _own(self, t: int) -> Array:
        """A value at its own positions."""
        value, shape = self.values[t], tuple(self.old.indices[i].extent for i in bits(self.old.free[t]))
        return value if value.shape == shape else lax.slice(value, [0] * value.ndim, shape)

    def _filled(self, t: int, value: Array) -> Array:
        """A value at its own positions with zeros beyond."""
        more = [self.new.indices[i].extent - self.old.indices[i].extent for i in bits(self.old.free[t])]
        return lax.pad(value, np.zeros((), value.dtype), [(0, n, 0) for n in more]) if any(more) else value

    def _cut(self, t: int, over: int, monoid: str = "add") -> Array:
        """A value that is the identity of a monoid beyond the last positions; a product of which each factor is, if these are sums."""
        if (t, over, monoid) not in self.cuts:
            self.cuts[t, over, monoid] = self._made_cut(t, over, monoid)
        return self.cuts[t, over, monoid]

    def _made_cut(self, t: int, over: int, monoid: str) -> Array:
        term, free = self.old.terms[t], self.old.free[t]
        uneven = [i for i in bits(over) if self.old.indices[i].extent < self.new.indices[i].extent]
        if not uneven:
            return self.values[t]
        if isinstance(term, Map) and term.op == "mul" and monoid == "add":
            return evaluate_term(self.new, t, self.args, {c: self._cut(c, over & self.old.free[c]) for c in term.args}, self.calls)
        value, nothing = self.values[t], MONOIDS[monoid].identity(term.dtype)
        for i in uneven:
            inside = lax.iota(np.int32, self.new.indices[i].extent) < self.old.indices[i].extent
            value = jnp.where(expand(self.new, inside, 1 << i, free), value, nothing)
        return value

    def _prefix_sum(self, t: int) -> Array:
        """A prefix sum by blocks; of a sum those of its addends."""
        term, own = self.old.terms[t], 1 << self.sums[t]
        assert isinstance(term, Block)
        call = term.call

        @cache
        def of(c: int) -> Array:
            addend = self.old.terms[c]
            if isinstance(addend, Map) and addend.op in SUMS and all(self.old.free[a] & own for a in addend.args):
                return map_row(addend).bind(*map(of, addend.args), **dict(addend.params))
            rows = to_axes(self.new, self._cut(c, own), self.old.free[c], call.in_axes[0])
            return prefix_sum(rows, call.params["axis"], call.params["reverse"])

        return from_axes(self.new, of(term.args[0]), call.out_axes[0])


def prefix_sum(x: Array, axis: int, reverse: bool, strictly: bool = False) -> Array:
    """The cumulative sum along an axis, at each position with or without what stands there: in blocks, and over blocks of their sums."""
    extent = x.shape[axis]
    if extent <= 2 * LENGTH:
        return _triangle(x, axis, reverse, strictly)
    more = _filled(extent) - extent
    rows = lax.pad(x, np.zeros((), x.dtype), [(0, more if k == axis else 0, 0) for k in range(x.ndim)]) if more else x
    blocks = rows.reshape(*x.shape[:axis], -1, LENGTH, *x.shape[axis + 1 :])
    before = prefix_sum(lax.reduce_sum(blocks, (axis + 1,)), axis, reverse, strictly=True)
    sums = (_triangle(blocks, axis + 1, reverse, strictly) + jnp.expand_dims(before, axis + 1)).reshape(rows.shape)
    return lax.slice_in_dim(sums, 0, extent, axis=axis) if more else sums


def _triangle(x: Array, axis: int, reverse: bool, strictly: bool) -> Array:
    """The cumulative sum along an axis as a product with a triangle of ones."""
    place = lax.iota(np.int32, x.shape[axis])
    earlier = (place[:, None] < place if strictly else place[:, None] <= place).astype(x.dtype)
    along = ((axis,), (1 if reverse else 0,)), ((), ())
    sums = lax.dot_general(x, earlier, along, precision=lax.Precision.HIGHEST, preferred_element_type=x.dtype)
    return jnp.moveaxis(sums, -1, axis)


def _filled(extent: int) -> int:
    """The positions of as many blocks as have so many."""
    return -(-extent // LENGTH) * LENGTH
