"""Roles of one axis of a program's arguments: some results have it row by row, others are sums over its rows.

A loop whose body acts on each row of an axis on its own is the same loop of a chunk of rows. The roles of the axis follow from the terms of
the body, each of which says along which indices it is pointwise and what it folds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import numpy as np
from jax.dtypes import issubdtype

from eqsat_mem.ir.inside import Inside
from eqsat_mem.ir.ops import block_op
from eqsat_mem.ir.program import Program
from eqsat_mem.ir.row_ends import ends_row_by_row, unchanged
from eqsat_mem.ir.terms import Axes, Block, Const, Dot, Fold, Input, Iota, Literal, Map, Rename, Term, axes_mask, children, folded


class Role(Enum):
    """The dependence of a value on the rows of an axis."""

    ZERO = 0
    """It is zero, whatever the rows are."""
    SAME = 1
    """It does not depend on them."""
    SUM = 2
    """It is a sum over them, so that those of chunks add up."""
    ROWS = 3
    """It has the axis, and each of its rows depends on the same row only."""
    OTHER = 4


def joined(one: Role, other: Role) -> Role:
    """The role of a value that is one or the other."""
    if one is other or other is Role.ZERO:
        return one
    return other if one is Role.ZERO else Role.OTHER


def result_roles(program: Program, index: int, given: Sequence[Role]) -> list[Role]:
    """The roles of a program's results for the axis ``index`` (-1: none of its own), with ``given`` those of its arguments."""
    found = term_roles(program, index, given)
    roles = []
    for o in program.outputs:
        role, has = found[o.term], any(index in axis for axis in o.axes)
        if has:
            whole_axis = place_of(o.axes, index) is not None
            role = Role.ROWS if whole_axis and role in (Role.ROWS, Role.SAME, Role.ZERO) else Role.OTHER
        roles.append(Role.OTHER if role is Role.ROWS and not has else role)
    return roles


def term_roles(program: Program, index: int, given: Sequence[Role]) -> dict[int, Role]:
    """The roles of all terms that the results need."""
    found: dict[int, Role] = {}
    for t in program.reachable():
        found[t] = _role(program, t, index, found, given)
    return found


def carried_roles(inside: Inside, index: int, given: Sequence[Role]) -> list[Role]:
    """The roles of the results of a loop for the axis that its body calls ``index``, with ``given`` those of its operands."""
    program, first, carries = inside.program, inside.consts, inside.carries
    axes = list(inside.body_axes())[first : first + carries]
    turned = [place_of(a, index) != place_of(o.axes, index) for a, o in zip(axes, program.outputs)]
    roles = list(given)
    while True:
        made = result_roles(program, index, roles)
        made[:carries] = [Role.OTHER if other else role for other, role in zip(turned, made)]
        entering = roles[first : first + carries]
        left = [joined(before, after) for before, after in zip(entering, made)]
        if left == entering:
            if inside.goes_on is not None:
                return _as_steps_end(inside, index, roles, left, made[inside.goes_on])
            return [*left, *made[carries : inside.results]]
        roles[first : first + carries] = left


def _as_steps_end(inside: Inside, index: int, given: Sequence[Role], left: Sequence[Role], goes_on: Role) -> list[Role]:
    """The roles of the results of a ``while`` loop, of whose body they would be these in any number of steps."""
    if goes_on in (Role.SAME, Role.ZERO):
        return list(left)  # chunks take as many steps as the whole
    program, found = inside.program, term_roles(inside.program, index, given)
    alike = {t for t, role in found.items() if role in (Role.SAME, Role.ZERO)}
    by_row = {t for t, role in found.items() if role is Role.ROWS}
    rows = [k for k, role in enumerate(left) if role is Role.ROWS]
    if not ends_row_by_row(inside, index, alike, by_row, rows):
        return [Role.OTHER] * len(left)
    alone = [o.term == t for o, t in zip(program.outputs, unchanged(inside))]
    return [role if role is Role.ROWS or same else Role.OTHER for role, same in zip(left, alone, strict=True)]


def _role(program: Program, t: int, index: int, found: Mapping[int, Role], given: Sequence[Role]) -> Role:
    term, has = program.terms[t], index >= 0 and bool(program.free[t] >> index & 1)
    match term:
        case Input():
            return _of_input(program, term, index, given[term.slot])
        case Const() | Iota():
            return Role.OTHER if has else Role.SAME
        case Literal():
            return Role.ZERO if not issubdtype(term.dtype, np.bool_) and term.value == 0 else Role.SAME
    read = [found[c] for c in children(term)]
    if Role.OTHER in read:
        return Role.OTHER
    if isinstance(term, Block):
        return _of_block(program, term, index, has, read)
    if isinstance(term, Rename) and any(index in pair for pair in term.pairs):
        return Role.OTHER
    if isinstance(term, Fold | Dot) and index >= 0 and term.over >> index & 1:
        return _folded(term, read)
    if Role.SUM in read:
        return Role.SUM if not has and _is_linear(program, term, read) else Role.OTHER
    if has:
        return Role.ROWS
    if Role.ROWS in read:
        return Role.OTHER  # some of the rows
    return Role.ZERO if _stays_zero(term, read) else Role.SAME


def _of_input(program: Program, term: Input, index: int, given: Role) -> Role:
    """A read of an argument, which may have other names for its axes than the first one."""
    has, first = place_of(term.axes, index), next(t.axes for t in program.terms if isinstance(t, Input) and t.slot == term.slot)
    if given is Role.ROWS:
        return Role.ROWS if has is not None and has == place_of(first, index) else Role.OTHER
    return given if not any(index in axis for axis in (*term.axes, *first)) else Role.OTHER


def place_of(axes: Axes, index: int) -> int | None:
    """The axis that is an index; None if there is none, or several axes are made of it."""
    found = [a for a, axis in enumerate(axes) if index in axis]
    return found[0] if len(found) == 1 and axes[found[0]] == (index,) else None


def _folded(term: Fold | Dot, read: Sequence[Role]) -> Role:
    """A fold or contraction over the axis."""
    if Role.SUM in read:
        return Role.OTHER
    if isinstance(term, Fold) and term.monoid != "add":
        return read[0] if read[0] is Role.SAME and term.monoid in _IDEMPOTENT else Role.OTHER
    return Role.SUM


_IDEMPOTENT = ("max", "min", "and", "or")
_ADDED = frozenset({"add", "sub", "neg", "real", "imag", "conj", "complex"})
"""Elementwise operations that are linear in all operands together."""


def _stays_zero(term: Term, read: Sequence[Role]) -> bool:
    """Whether a term of what does not depend on the axis is zero where its operands are."""
    plain = (isinstance(term, Map) and term.op in {*_ADDED, "convert_element_type"}) or isinstance(term, Rename)
    return plain and all(role is Role.ZERO for role in read)


def _is_linear(program: Program, term: Term, read: Sequence[Role]) -> bool:
    """Whether a term of sums over the axis is such a sum: it is linear in them, and does not depend on the axis otherwise."""
    fixed = [role in (Role.SAME, Role.ZERO) for role in read]
    summed = [role in (Role.SUM, Role.ZERO) for role in read]
    match term:
        case Rename():
            return True
        case Fold():
            return term.monoid == "add"
        case Dot():
            return any(fixed)
        case Map():
            inexact = issubdtype(term.dtype, np.inexact)
            if term.op == "convert_element_type":
                return inexact and issubdtype(program.terms[term.args[0]].dtype, np.inexact)
            if term.op == "mul":
                return any(fixed)
            if term.op == "div":
                return inexact and fixed[1]
            if term.op == "select_n":
                return fixed[0] and all(summed[1:])
            return term.op in _ADDED and all(summed)
    return False


def _of_block(program: Program, term: Block, index: int, has: bool, read: Sequence[Role]) -> Role:
    call, bit = term.call, 1 << index if index >= 0 else 0
    if call.inside is not None:
        return _of_loop(term, index, has, read)
    bound = axes_mask(sum(call.in_axes, ())) & ~(call.pointwise | call.folds)
    if bound & bit:
        return Role.OTHER
    if Role.SUM in read:
        return Role.SUM if not has and _is_linear_block(term, read) else Role.OTHER
    if folded(term) & bit:
        return Role.SUM if block_op(call.prim.name).monoid == "add" else Role.OTHER
    if has:
        return Role.ROWS if call.pointwise & bit and not call.effects else Role.OTHER
    return Role.OTHER if Role.ROWS in read or call.effects else Role.SAME


def _is_linear_block(term: Block, read: Sequence[Role]) -> bool:
    """Whether a block is linear in some operands together, these are sums, or zero, and the others do not depend on the axis."""
    linear = block_op(term.call.prim.name).linear
    if linear is None:
        return False
    values = range(len(read))[linear]
    return all(role in ((Role.SUM, Role.ZERO) if k in values else (Role.SAME, Role.ZERO)) for k, role in enumerate(read))


def _of_loop(term: Block, index: int, has: bool, read: Sequence[Role]) -> Role:
    """One result of a loop, whose body may have another name for the axis."""
    call, inside = term.call, term.call.inside
    own, given = set[int | None](), list(read)
    for slot, (axes, named) in enumerate(zip(call.in_axes, inside.body_axes())):
        for axis, name in zip(axes, ((), *named) if inside.is_stepped(slot) else named):
            if index in axis:
                own.add(name[0] if axis == (index,) and len(name) == 1 else None)
                given[slot] = Role.OTHER if read[slot] is Role.SUM else Role.ROWS  # what lacks the axis is broadcast along it
    if len(own) > 1 or None in own:
        return Role.OTHER
    inner = next(iter(own), -1)
    assert inner is not None
    key = inner, tuple(given)
    if key not in inside.known:
        inside.known[key] = carried_roles(inside, inner, given)
    role = inside.known[key][term.out]
    return Role.OTHER if has is not (role is Role.ROWS) else role
