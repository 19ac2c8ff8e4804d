"""Indices and terms: tensors as functions of named indices.

A term's value depends on its set of *free* indices and has no axis order of its own; its size is the
product of their extents. An axis of an array is a product of indices, outermost first: ``()`` is an
axis of extent one, ``(n,)`` an ordinary axis, ``(b, t)`` two axes merged by a reshape. Sets of indices
are integer bitmasks: bit ``i`` stands for ``program.indices[i]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from jax.dtypes import issubdtype

Axis = tuple[int, ...]
Axes = tuple[Axis, ...]
Params = tuple[tuple[str, Any], ...]


@lru_cache(1 << 16)
def bits(mask: int) -> tuple[int, ...]:
    """The members of an index set, ascending. The same few sets are asked for again and again."""
    members = []
    while mask:
        low = mask & -mask
        members.append(low.bit_length() - 1)
        mask ^= low
    return tuple(members)


def mask_of(indices: Iterable[int]) -> int:
    """The index set with these members."""
    out = 0
    for i in indices:
        out |= 1 << i
    return out


def axes_mask(axes: Axes) -> int:
    """The index set that occurs in an array's axes."""
    return mask_of(i for axis in axes for i in axis)


@dataclass(frozen=True)
class Index:
    """A named axis with an extent, at least two except for axes of extent zero or one that must stay."""

    name: str
    extent: int


# --- terms ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """The base of all terms, with the dtype of the value (a numpy or JAX extended dtype)."""

    dtype: Any


@dataclass(frozen=True)
class Input(Term):
    """A read of argument ``slot``, each axis of the array named by ``axes``."""

    slot: int
    axes: Axes


@dataclass(frozen=True)
class Const(Term):
    """A read of the closed-over array ``program.consts[slot]``, named by ``axes``."""

    slot: int
    axes: Axes


@dataclass(frozen=True)
class Literal(Term):
    """A scalar. ``value`` is a Python number; equal numbers of different type or sign are kept apart by ``key``."""

    value: Any
    key: str

    @staticmethod
    def of(value: Any, dtype: Any) -> Literal:
        exact = np.asarray(value)
        value = int(exact) if issubdtype(exact.dtype, np.integer) else exact.item()  # NumPy has no item of narrow integers
        return Literal(dtype, value, f"{type(value).__name__}:{value!r}")


def shortest(number: Any, dtype: Any = None) -> Any:
    """A number, of a dtype or of its own, as one of Python's: of ``float32`` the one with the fewest digits that rounds to it."""
    exact = np.asarray(np.float32(number) if dtype == np.float32 else number)
    if exact.dtype == np.float32 and np.float32(short := float(str(exact[()]))) == exact:
        return short
    return exact.item()


@dataclass(frozen=True)
class Iota(Term):
    """The position along ``index``: 0, 1, ... extent - 1."""

    index: int


@dataclass(frozen=True)
class Map(Term):
    """An elementwise operation; free indices of the operands broadcast against each other by name."""

    op: str
    args: tuple[int, ...]
    params: Params = ()


@dataclass(frozen=True)
class Fold(Term):
    """A monoid folded over the index set ``over``; an index that ``arg`` does not depend on counts all the same."""

    monoid: str
    over: int
    arg: int


@dataclass(frozen=True)
class Dot(Term):
    """The contraction ``sum_over lhs * rhs``, which is what a matrix unit runs."""

    over: int
    lhs: int
    rhs: int
    precision: Any = None


@dataclass(frozen=True)
class DotPlus(Term):
    """The augmented contraction ``sum_over (lhs * rhs + left + right)``, where ``left`` has the indices of ``lhs`` and ``right`` those of
    ``rhs``: sums that are added to a contraction as part of it.

    It stands in the e-graph; programs that are scheduled have it as a contraction (:mod:`eqsat_mem.egraph.augmented_lowering`).
    """

    over: int
    lhs: int
    rhs: int
    left: int
    right: int


@dataclass(frozen=True)
class Rename(Term):
    """``arg`` read under other index names: ``pairs`` (source, destination), all at once, destinations not free in ``arg`` unless
    renamed away."""

    pairs: tuple[tuple[int, int], ...]
    arg: int


@dataclass(frozen=True)
class Take(Term):
    """``arg`` with ``index`` at ``positions``, integers of at least 32 bits, whose indices the result has in place of ``index``: a gather,
    or a slice where positions count. A position outside stands for the nearest inside.

    It stands in the e-graph; programs that are scheduled have it as a block (:mod:`eqsat_mem.egraph.take_lowering`).
    """

    index: int
    positions: int
    arg: int


@dataclass(frozen=True, eq=False)
class Call:
    """One equation that binds some axes of its operands: a JAX primitive with its parameters.

    Operand ``a`` is laid out as ``in_axes[a]``, output ``k`` comes as ``out_axes[k]``. The operation is pointwise in
    the indices of ``pointwise`` (single-index axes of the output, and of every operand that they occur in); all other
    operand axes are bound, those of ``folds`` such that results for chunks of them combine (see :class:`eqsat_mem.ir.ops.Selection`). A
    loop may be pointwise in an index in some of its results, and fold it in others.
    ``scratch_bytes`` is what it holds inside while it runs; ``bodies`` are the plans (``None``: none) of the functions that a loop or
    branch runs, in the order of its parameters, and ``bodies_s`` the seconds that each takes (0: not known). They ``fit`` if each
    keeps to the room that it has: one that does not is as written, and the least that any plan of it holds is counted. ``inside`` is the
    body of a loop that is pointwise in some indices, or sums over them (:class:`eqsat_mem.ir.inside.Inside`). Calls compare by identity,
    so equations with effects are never merged.
    """

    prim: Any
    params: dict[str, Any]
    in_axes: tuple[Axes, ...]
    out_axes: tuple[Axes, ...]
    out_dtypes: tuple[Any, ...]
    pointwise: int = 0
    folds: int = 0
    effects: bool = False
    scratch_bytes: int = 0
    bodies: tuple[Any, ...] = ()
    bodies_s: tuple[float, ...] = ()
    fit: bool = True
    inside: Any = None


@dataclass(frozen=True)
class Block(Term):
    """Output ``out`` of a :class:`Call` on ``args``."""

    call: Call
    args: tuple[int, ...]
    out: int


def is_leaf(term: Term) -> bool:
    """Leaves are read where they are used; they are never steps."""
    return isinstance(term, (Input, Const, Literal, Iota))


def children(term: Term) -> tuple[int, ...]:
    """The operands of a term."""
    match term:
        case Map() | Block():
            return term.args
        case Fold() | Rename():
            return (term.arg,)
        case Dot():
            return (term.lhs, term.rhs)
        case DotPlus():
            return (term.lhs, term.rhs, term.left, term.right)
        case Take():
            return (term.positions, term.arg)
        case _:
            return ()


def folded(term: Term) -> int:
    """The index set that a term folds."""
    match term:
        case Fold() | Dot():
            return term.over
        case Block():
            return term.call.folds & ~axes_mask(term.call.out_axes[term.out])
        case _:
            return 0


def with_children(term: Term, new: tuple[int, ...]) -> Term:
    """The same operation on other operands."""
    match term:
        case Map():
            return Map(term.dtype, term.op, new, term.params)
        case Block():
            return Block(term.dtype, term.call, new, term.out)
        case Fold():
            return Fold(term.dtype, term.monoid, term.over, new[0])
        case Rename():
            return Rename(term.dtype, term.pairs, new[0])
        case Dot():
            return Dot(term.dtype, term.over, new[0], new[1], term.precision)
        case DotPlus():
            return DotPlus(term.dtype, term.over, *new)
        case Take():
            return Take(term.dtype, term.index, *new)
        case _:
            return term


def axes_with_indices(axes: Axes, to: Mapping[int, Axis]) -> Axes:
    """Axes with other indices: in place of each those that stand for it, outermost first."""
    return tuple(tuple(j for i in axis for j in to.get(i, (i,))) for axis in axes)


def with_indices(term: Term, to: Mapping[int, Axis]) -> Term:
    """The same operation with other indices (:func:`axes_with_indices`).

    Where an operation has an index by itself, along which it counts, reads at positions or is called otherwise, one index stands for it.
    """

    def mask(before: int) -> int:
        return axes_mask(axes_with_indices((bits(before),), to))

    def one(before: int) -> int:
        (after,) = to.get(before, (before,))
        return after

    match term:
        case Input() | Const():
            return type(term)(term.dtype, term.slot, axes_with_indices(term.axes, to))
        case Iota():
            return Iota(term.dtype, one(term.index))
        case Fold():
            return Fold(term.dtype, term.monoid, mask(term.over), term.arg)
        case Dot():
            return Dot(term.dtype, mask(term.over), term.lhs, term.rhs, term.precision)
        case DotPlus():
            return DotPlus(term.dtype, mask(term.over), term.lhs, term.rhs, term.left, term.right)
        case Rename():
            return Rename(term.dtype, tuple((one(i), one(j)) for i, j in term.pairs), term.arg)
        case Take():
            return Take(term.dtype, one(term.index), term.positions, term.arg)
        case _:
            return term


def call_with_indices(call: Call, to: Mapping[int, Axis]) -> Call:
    """The same operation on arrays whose axes have other indices (:func:`axes_with_indices`)."""
    ins, outs = (tuple(axes_with_indices(axes, to) for axes in arrays) for arrays in (call.in_axes, call.out_axes))
    pointwise, folds = (axes_mask(axes_with_indices((bits(mask),), to)) for mask in (call.pointwise, call.folds))
    return replace(call, in_axes=ins, out_axes=outs, pointwise=pointwise, folds=folds)
