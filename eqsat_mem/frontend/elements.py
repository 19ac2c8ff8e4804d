"""Elements of what is computed elementwise, each from elements: ``(x - y)[..., 0]`` is ``x[..., 0] - y[..., 0]``.

Coordinates of pairs are often computed together and read one by one: corners of boxes, components of differences. XLA writes all of them
to memory, as several slices read them, and reads each with a stride. Where nothing else reads such a value, its elements are computed
apart, from slices of what it is made of: of arguments and constants, and of what is smaller, such as the points that pairs are made of.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import primitives

from eqsat_mem.frontend.flat_jaxpr import Equation, Flat, Shape
from eqsat_mem.ir import itemsize, ops
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
    return _Apart(flat, along, positions).run() if along and few else None


def _positions_read(flat: Flat) -> tuple[dict[int, int], dict[int, set[int]]]:
    """The values that are read one position at a time, with the axis of these positions, and the positions that are read."""
    readers = defaultdict[int, list[Equation]](list)
    for eqn in flat.equations:
        for v in set(eqn.ins):
            readers[v].append(eqn)
    able = _able(flat).difference(flat.outputs)
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
        if flat.shapes[v][axis] > MOST or (eqn.prim.name == "slice" and _cut(flat, eqn) != [axis]):
            continue
        along[v] = axis
        for reader in readers[v]:
            start = reader.params["start_indices"][axis] if reader.prim.name == "slice" else 0
            positions[v] |= {start + p for p in positions[reader.outs[0]]} if reader.outs[0] in along else {start}
    read = {v for v in along for reader in readers[v] if reader.outs[0] not in along}
    return (along, positions) if read else ({}, {})


def _able(flat: Flat) -> set[int]:
    """The values that are elementwise, broadcast or cut, and made of arguments and smaller values in the end."""
    given, able = {*flat.inputs, *flat.consts, *flat.literals}, set[int]()
    for eqn in flat.equations:
        if len(eqn.outs) != 1 or eqn.effects or (eqn.prim.name not in ops.MAPS and eqn.prim.name not in ("broadcast_in_dim", "slice")):
            continue
        v = eqn.outs[0]
        if _nbytes(flat, v) < LEAST_BYTES or (eqn.prim.name == "slice" and eqn.params["strides"] is not None):
            continue
        if any(jax.dtypes.issubdtype(flat.dtypes[u], jax.dtypes.extended) for u in (*eqn.ins, v)):
            continue
        small, read = _nbytes(flat, v) / SMALLER, [u for u in eqn.ins if flat.shapes[u]]
        alike = eqn.prim.name not in ops.MAPS or all(len(flat.shapes[u]) == len(flat.shapes[v]) for u in read)  # no cast to several
        if alike and all(u in given or u in able or _nbytes(flat, u) <= small for u in read):
            able.add(v)
    return able


def _nbytes(flat: Flat, v: int) -> int:
    return math.prod(flat.shapes[v]) * itemsize(flat.dtypes[v])


def _cut(flat: Flat, eqn: Equation) -> list[int]:
    """The axes that a slice cuts."""
    pairs = zip(flat.shapes[eqn.ins[0]], flat.shapes[eqn.outs[0]], strict=True)
    return [a for a, (before, after) in enumerate(pairs) if before != after]


def _axis_read(flat: Flat, reader: Equation, v: int, along: Mapping[int, int]) -> int | None:
    """The axis of a value of which an operation reads one position, or each of several apart."""
    out = reader.outs[0] if len(reader.outs) == 1 else -1
    if out in along:
        return _axis_of(flat, reader, v, along[out])
    if reader.prim.name != "slice" or reader.params["strides"] is not None:
        return None
    cut = _cut(flat, reader)
    return cut[0] if len(cut) == 1 and flat.shapes[out][cut[0]] == 1 else None


def _axis_of(flat: Flat, eqn: Equation, v: int, axis: int) -> int | None:
    """The axis of an operand that is an axis of the result; ``None`` where each position of the result reads all of the operand."""
    if eqn.prim.name == "slice":
        return axis
    dims = tuple(eqn.params["broadcast_dimensions"] if eqn.prim.name == "broadcast_in_dim" else range(len(flat.shapes[v])))
    a = dims.index(axis) if axis in dims else None
    return a if a is not None and flat.shapes[v][a] == flat.shapes[eqn.outs[0]][axis] else None


class _Apart:
    """The equations while they are written; ``elements`` are the values that have one position of an axis of another."""

    def __init__(self, flat: Flat, along: Mapping[int, int], positions: Mapping[int, set[int]]):
        self.flat, self.along, self.positions = flat, along, positions
        self.elements: dict[tuple[int, int, int], int] = {}
        self.equations: list[Equation] = []

    def run(self) -> list[Equation]:
        instead: dict[int, int] = {}
        for eqn in self.flat.equations:
            eqn = replace(eqn, ins=tuple(instead.get(v, v) for v in eqn.ins))
            v = eqn.outs[0] if eqn.outs else -1
            if v in self.along:
                for p in sorted(self.positions[v]):
                    self.elements[v, self.along[v], p] = self.made(eqn, p)
            elif eqn.prim.name == "slice" and eqn.ins[0] in self.along:
                axis = self.along[eqn.ins[0]]
                instead[v] = self.elements[eqn.ins[0], axis, eqn.params["start_indices"][axis]]
            else:
                self.equations.append(eqn)
                if eqn.prim.name == "slice" and (cut := _axis_read(self.flat, eqn, eqn.ins[0], {})) is not None:
                    self.elements.setdefault((eqn.ins[0], cut, eqn.params["start_indices"][cut]), v)
        self.flat.outputs = [instead.get(v, v) for v in self.flat.outputs]
        return self.equations

    def made(self, eqn: Equation, p: int) -> int:
        """The elements of a result at a position, from those of its operands."""
        (v,), axis = eqn.outs, self.along[eqn.outs[0]]
        if eqn.prim.name == "slice":
            return self.element(eqn.ins[0], axis, eqn.params["start_indices"][axis] + p, eqn)
        axes = [_axis_of(self.flat, eqn, u, axis) for u in eqn.ins]
        ins = tuple(u if a is None else self.element(u, a, p, eqn) for u, a in zip(eqn.ins, axes, strict=True))
        shape = _with_one(self.flat.shapes[v], axis)
        params = {**eqn.params, "shape": shape} if eqn.prim.name == "broadcast_in_dim" else eqn.params
        return self.add(eqn, eqn.prim, params, ins, shape, self.flat.dtypes[v])

    def element(self, u: int, axis: int, p: int, reader: Equation) -> int:
        """One position of an axis of a value: computed apart, or a slice."""
        key = u, axis, p
        if key not in self.elements:
            shape = self.flat.shapes[u]
            start = tuple(p if a == axis else 0 for a in range(len(shape)))
            limit = tuple(p + 1 if a == axis else n for a, n in enumerate(shape))
            params = {"start_indices": start, "limit_indices": limit, "strides": None}
            self.elements[key] = self.add(reader, primitives.slice_p, params, (u,), _with_one(shape, axis), self.flat.dtypes[u])
        return self.elements[key]

    def add(self, eqn: Equation, prim: object, params: dict[str, Any], ins: tuple[int, ...], shape: Shape, dtype: object) -> int:
        v = self.flat.new(shape, dtype)
        made = replace(eqn, prim=prim, params=params, ins=ins, outs=(v,), passes=eqn.passes | {ELEMENTS.name})
        self.equations.append(made)
        return v


def _with_one(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], 1, *shape[axis + 1 :])
