"""Convolutions and pooling along an axis that is dealt out: each device has the rows that its windows reach, its neighbours' among them.

What lies outside of the whole array is padding, as before. Devices have as many windows each as they have whole steps in their share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from eqsat_mem.ir import Block, Call, Iota, Program, Term, mask_of
from eqsat_mem.ir.ops import MONOIDS, Window, block_op
from eqsat_mem.mesh.local import PLACES
from eqsat_mem.mesh.neighbours import is_shared, put_together
from eqsat_mem.transforms.tile_families import axes_of, windows

if TYPE_CHECKING:
    from eqsat_mem.mesh.localise import Localiser


def linked_by_windows(program: Program) -> list[tuple[int, int]]:
    """The indices of which one has windows along the other, one for every so many of its positions."""
    terms = (term for t in program.reachable() if isinstance(term := program.terms[t], Block))
    return list(dict.fromkeys((i, o) for term in terms for i, o, _ in steady_windows(program, term) if i != o))


def slid(at: Localiser, term: Term) -> int:
    """The indices along which an operation may be computed for shares of its windows."""
    found = 0
    for i, o, _ in steady_windows(at.old, term):
        if i in at.divided and at.divided[i] == at.divided.get(o) and at.old.free[_operand(term)] >> i & 1:
            found |= 1 << o
    return found


def from_neighbours(at: Localiser, t: int, computed: int) -> int | None:
    """A term that takes rows of neighbours along one of the indices of which it is computed in shares; None for other terms."""
    term = at.old.terms[t]
    if is_shared(term, computed):
        return put_together(at, t, computed)
    return with_rows_around(at, t, computed) if slid(at, term) & computed else None


def slid_over(at: Localiser, term: Term) -> int:
    """The indices over which an operation sums, for each place in its windows: those of a convolution in the gradient of its kernel."""
    return mask_of(o for _, o, window in steady_windows(at.old, term) if window.other[0] == "in")


def with_rows_around(at: Localiser, t: int, computed: int) -> int:
    """An operation on the windows of a device's share."""
    term, local, source = at.old.terms[t], at.local, at.old.source.get(t)
    assert isinstance(term, Block)
    along = slid(at, term) & computed
    moving = [(i, o, window) for i, o, window in steady_windows(at.old, term) if along >> o & 1]
    free = at.old.free[term.args[0]]
    value = at.value(term.args[0], computed & free & ~along | mask_of(i for i, _, _ in moving))
    call = at.local_call(term.call, computed)
    row = block_op(call.prim.name).windows
    assert row is not None
    for i, o, window in moving:
        share = local.share_extent(i)
        start, stop = -window.before, (local.share_extent(o) - 1) * window.step - window.before + window.span
        index = local.share[i]
        if (start, stop) != (0, share):
            value, index = local.with_neighbours(value, index, (start, stop), at.divided[i], source)
            value = _padded(at, value, (i, index), (start, stop), row.monoid or "add")
        axes = (*call.in_axes[0][: window.operand], (index,), *call.in_axes[0][window.operand + 1 :])
        folds = 0 if window.other[0] == "out" else 1 << local.share[o]  # of a kernel's gradient each device has its part
        params = row.padded(call.params, window.number, 0, 0, stop - start)
        call = replace(call, params=params, in_axes=(axes, *call.in_axes[1:]), folds=call.folds | folds)
    others = tuple(at.value(c, computed & at.old.free[c]) for c in term.args[1:])
    return _added(at, t, call, (value, *others), computed)


def _added(at: Localiser, t: int, call: Call, args: tuple[int, ...], computed: int) -> int:
    """An operation of its own, once for all its results."""
    term = at.old.terms[t]
    assert isinstance(term, Block)
    joint: Call = at.joint_calls.setdefault(("slides", id(term.call), computed, args), call)
    u = at.local.program.add(Block(term.dtype, joint, args, term.out), at.old.source.get(t))
    at.origin.setdefault(u, t)
    at.local.state(at.ex, t, u, computed)
    return u


def _padded(at: Localiser, rows: int, indices: tuple[int, int], ends: tuple[int, int], monoid: str) -> int:
    """Rows of which those outside of the whole array are nothing."""
    local, (i, index), (start, stop) = at.local, indices, ends
    share, boolean = local.share_extent(i), np.dtype(bool)
    if start >= 0 and stop <= share:
        return rows
    first = local.map("mul", local.device_number(at.divided[i]), local.number(share, PLACES))
    place = local.map("add", local.map("add", local.program.add(Iota(PLACES, index)), first), local.number(start, PLACES))
    ends_here = [("lt", 0)] if start < 0 else []
    ends_here += [("ge", at.old.indices[i].extent)] if stop > share else []
    outside = [local.map(op, place, local.number(n, PLACES), dtype=boolean) for op, n in ends_here]
    beyond = outside[0] if len(outside) == 1 else local.map("or", *outside)
    dtype = local.program.terms[rows].dtype
    return local.map("select_n", beyond, rows, local.number(MONOIDS[monoid].identity(dtype), dtype), dtype=dtype)


def _operand(term: Term) -> int:
    assert isinstance(term, Block)
    return term.args[0]


def steady_windows(program: Program, term: Term) -> Iterator[tuple[int, int, Window]]:
    """The windows along single indices, as many for each share as it has steps: the index that they read, and that of the windows."""
    if not isinstance(term, Block) or (row := block_op(term.call.prim.name).windows) is None or row.cuts or row.aligned:
        return
    for window in windows(program, term):
        before, after = axes_of(term, window)
        if window.gap != 1 or len(before) != 1 or len(after) != 1 or row.monoid is None:
            continue
        n, m = (program.indices[axis[0]].extent for axis in (before, after))
        if n == m * window.step and sum(before[0] in axis for axis in term.call.in_axes[0]) == 1:
            yield before[0], after[0], window
