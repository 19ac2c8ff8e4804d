"""Elements of what is computed elementwise, each from elements: ``(x - y)[..., 0]`` is ``x[..., 0] - y[..., 0]``.

Coordinates of pairs are often computed together and read one by one: corners of boxes, components of differences. XLA writes all of them
to memory, as several slices read them, and reads each with a stride. Where nothing else reads such a value, its elements are computed
apart, from slices of what it is made of: of arguments and constants, and of what is smaller, such as the points that pairs are made of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import jax

from eqsat_mem.frontend.apart import Apart, cut_axes, has_steps, nbytes, operand_axis, single
from eqsat_mem.frontend.flat_jaxpr import Equation, Flat
from eqsat_mem.ir import ops
from eqsat_mem.passes import ELEMENTS

MOST = 16
"""The most positions along an axis whose elements are computed apart: each has operations of its own."""
LEAST_BYTES = 2**14
"""Smaller values stay as they are: whatever way they are computed takes no time."""
MOST_MORE = 100
"""A program may get so many operations more, and half of those that it has; one that would get more stays as it is."""
SMALLER = 2
"""What elements are made of is smaller than all of them by this factor, or an argument: nothing more is held."""


def with_elements(flat: Flat) -> list[Equation] | None:
    """The equations with values that are read one position of an axis at a time computed so; ``None`` where there are none."""
    along, positions = _positions_read(flat)
    few = sum(len(positions[v]) for v in along) <= MOST_MORE + len(flat.equations) // 2
    return Apart(flat, along, positions, ELEMENTS).run() if along and few else None


def _positions_read(flat: Flat) -> tuple[dict[int, int], dict[int, set[int]]]:
    """The values that are read one position at a time, with the axis of these positions, and the positions that are read."""
    readers = readers_of(flat)
    able = able_values(flat).difference(flat.outputs)
    along, positions = dict[int, int](), defaultdict[int, set[int]](set)
    for eqn in reversed(flat.equations):
        v = eqn.outs[0] if eqn.outs else -1
        if v not in able:
            continue
        axes = {_axis_read(flat, reader, v, along) for reader in readers[v]}
        if len(axes) != 1 or None in axes:
            continue
        (axis,) = axes
        assert axis is not None
        if flat.shapes[v][axis] > MOST or (eqn.prim.name == "slice" and cut_axes(flat, eqn) != [axis]):
            continue
        along[v] = axis
        for reader in readers[v]:
            start = reader.params["start_indices"][axis] if reader.prim.name == "slice" else 0
            positions[v] |= {start + p for p in positions[reader.outs[0]]} if reader.outs[0] in along else {start}
    read = {v for v in along for reader in readers[v] if reader.outs[0] not in along}
    return (along, positions) if read else ({}, {})


def readers_of(flat: Flat) -> Mapping[int, list[Equation]]:
    """The operations that read each value."""
    readers = defaultdict[int, list[Equation]](list)
    for eqn in flat.equations:
        for v in set(eqn.ins):
            readers[v].append(eqn)
    return readers


def able_values(flat: Flat, moving: Collection[str] = ("broadcast_in_dim", "slice")) -> set[int]:
    """The values that are elementwise, broadcast or cut, and made of arguments and smaller values in the end.

    ``moving`` are the operations that are no arithmetic.
    """
    given, able = {*flat.inputs, *flat.consts, *flat.literals}, set[int]()
    for eqn in flat.equations:
        if len(eqn.outs) != 1 or eqn.effects or (not _is_arithmetic(eqn) and eqn.prim.name not in moving):
            continue
        v = eqn.outs[0]
        if nbytes(flat, v) < LEAST_BYTES or (eqn.prim.name == "slice" and has_steps(eqn)):
            continue
        if any(jax.dtypes.issubdtype(flat.dtypes[u], jax.dtypes.extended) for u in (*eqn.ins, v)):
            continue
        small, read = nbytes(flat, v) / SMALLER, [u for u in eqn.ins if flat.shapes[u]]
        alike = not _is_arithmetic(eqn) or all(len(flat.shapes[u]) == len(flat.shapes[v]) for u in read)  # no cast to several
        if alike and all(u in given or u in able or nbytes(flat, u) <= small for u in read):
            able.add(v)
    return able


def _axis_read(flat: Flat, reader: Equation, v: int, along: Mapping[int, int]) -> int | None:
    """The axis of a value of which an operation reads one position, or each of several apart."""
    out = reader.outs[0] if len(reader.outs) == 1 else -1
    if out in along:
        return operand_axis(flat, reader, v, along[out])
    return single(flat, reader)


def _is_arithmetic(eqn: Equation) -> bool:
    return eqn.prim.name in ops.MAPS or eqn.prim.name in ops.ALIASES
