"""Sums that are added to a contraction, as columns of its operands.

``sum_k (a b + u + w)``, where ``u`` has the indices of ``a`` and ``w`` those of ``b``, is one contraction of ``[a, sum_k u, 1]`` with
``[b, 1, sum_k w]`` over a longer index. A squared distance, expanded, is of this form, and of the two additions for each of its elements
none is left. Where ``k`` has many elements, each part of it is followed by its own sums: partial sums then stay near half the squared
distance, where those of the products alone grow to the squared norms and round as these do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from eqsat_mem.egraph.lowering import Lower, Lowering
from eqsat_mem.ir import Block, Call, Dot, DotPlus, Program, bits
from eqsat_mem.ir.ops import longer, parts_of, with_sums_p
from eqsat_mem.ir.precision import of_rules


def augmented_contractions(program: Program, rounds_operands: bool) -> dict[int, Lower]:
    """The lowering of each augmented contraction to a contraction of operands with sums.

    Where a device ``rounds_operands``, it asks for full precision, or the sums would be rounded with its operands.
    """
    lower = partial(_contraction, rounds_operands)
    return {t: partial(lower, term) for t, term in enumerate(program.terms) if isinstance(term, DotPlus)}


def _contraction(rounds_operands: bool, term: DotPlus, into: Lowering, t: int, ids: Mapping[int, int]) -> int:
    """The contraction of operands with sums; each may be sliced where the whole may."""
    new, may = into.new, into.before.splits.get(t, 0)
    (k,) = bits(term.over)
    extent = new.indices[k].extent
    index = new.new_index(new.indices[k].name, longer(extent))
    sides = ((term.lhs, term.left, True), (term.rhs, term.right, False))
    lhs, rhs = (_with_sums(into, ids[x], ids[s], k, index, {"parts": parts_of(extent), "first": first}, may) for x, s, first in sides)
    dot = into.sliced(Dot(term.dtype, 1 << index, lhs, rhs, of_rules(term.dtype, rounds_operands)), may)
    if t in into.old.source:
        new.source.setdefault(dot, into.old.source[t])
    return dot


def _with_sums(into: Lowering, x: int, summed: int, k: int, index: int, params: dict[str, object], may: int) -> int:
    """An operand with the sums of another over ``k``, over ``index``, which is longer."""
    new = into.new
    own = (new.free[x] | new.free[summed]) & ~(1 << k)
    axes = tuple((i,) for i in bits(own))
    dtype = new.terms[x].dtype
    call = Call(with_sums_p, params, ((*axes, (k,)),) * 2, ((*axes, (index,)),), (dtype,), own)
    return into.sliced(Block(dtype, call, (x, summed), 0), may)
