"""Values computed one position of a short axis at a time: their equations, written for each position from those of their operands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

from jax.extend.core import primitives

from eqsat_mem.frontend.flat_jaxpr import Equation, Flat, Shape
from eqsat_mem.ir import itemsize
from eqsat_mem.passes import Pass

_COMBINED = {
    "reduce_sum": primitives.add_p,
    "dot_general": primitives.add_p,
    "reduce_prod": primitives.mul_p,
    "reduce_max": primitives.max_p,
    "reduce_min": primitives.min_p,
    "reduce_and": primitives.and_p,
    "reduce_or": primitives.or_p,
}
"""Folds, and what combines those of several positions."""
_ADDING = ("add", "add_any")


def nbytes(flat: Flat, v: int) -> int:
    return math.prod(flat.shapes[v]) * itemsize(flat.dtypes[v])


def cut_axes(flat: Flat, eqn: Equation) -> list[int]:
    """The axes along which the first operand of a slice or a padding is longer or shorter than the result."""
    pairs = zip(flat.shapes[eqn.ins[0]], flat.shapes[eqn.outs[0]], strict=True)
    return [a for a, (before, after) in enumerate(pairs) if before != after]


def has_steps(eqn: Equation) -> bool:
    """Whether a slice leaves out what is between its elements, or a padding puts something there."""
    if eqn.prim.name == "pad":
        return any(int(between) for _, _, between in eqn.params["padding_config"])
    return any(int(step) != 1 for step in eqn.params["strides"] or ())


def operand_axis(flat: Flat, eqn: Equation, v: int, axis: int) -> int | None:
    """The axis of an operand that is an axis of the result; ``None`` where each position of the result reads all of the operand."""
    name = eqn.prim.name
    if name in ("slice", "pad", "concatenate"):
        return axis if flat.shapes[v] else None
    if name == "stack":
        return None
    if name == "transpose":
        return int(eqn.params["permutation"][axis])
    dims = tuple(eqn.params["broadcast_dimensions"] if name == "broadcast_in_dim" else range(len(flat.shapes[v])))
    a = dims.index(axis) if axis in dims else None
    return a if a is not None and flat.shapes[v][a] == flat.shapes[eqn.outs[0]][axis] else None


def read_at(flat: Flat, eqn: Equation, axis: int, p: int) -> list[tuple[int, int, int]]:
    """The operands of which a position of the result reads one position: operand, its axis, and that position."""
    if eqn.prim.name == "pad":
        q = p - int(eqn.params["padding_config"][axis][0])
        return [(eqn.ins[0], axis, q)] if 0 <= q < flat.shapes[eqn.ins[0]][axis] else []
    if eqn.prim.name == "concatenate":
        for u in eqn.ins:
            if p < (extent := flat.shapes[u][axis]):
                return [(u, axis, p)]
            p -= extent
    start = eqn.params["start_indices"][axis] if eqn.prim.name == "slice" else 0
    return [(u, a, start + p) for u in eqn.ins if (a := operand_axis(flat, eqn, u, axis)) is not None]


def folded_axis(flat: Flat, eqn: Equation, v: int, axis: int) -> int | None:
    """The axis of the result of a fold or contraction that is one of an operand; ``None`` where that folds it."""
    if eqn.prim.name != "dot_general":
        axes = eqn.params["axes"]
        return None if axis in axes else axis - sum(a < axis for a in axes)
    contracted, batch = eqn.params["dimension_numbers"]
    side = eqn.ins.index(v)
    if axis in contracted[side]:
        return None
    if axis in batch[side]:
        return tuple(batch[side]).index(axis)
    free = [[a for a in range(len(flat.shapes[u])) if a not in (*c, *b)] for u, c, b in zip(eqn.ins, contracted, batch, strict=True)]
    return len(batch[0]) + side * len(free[0]) + free[side].index(axis)


def met_axis(eqn: Equation, v: int, axis: int) -> int | None:
    """The axis of the other operand of a contraction that meets an axis of one of them; ``None`` where none does."""
    side = eqn.ins.index(v)
    for axes in eqn.params["dimension_numbers"]:
        if axis in axes[side]:
            return int(axes[1 - side][tuple(axes[side]).index(axis)])
    return None


class Apart:
    """The equations while they are written; ``elements`` are the values that have one position of an axis of another."""

    def __init__(self, flat: Flat, along: Mapping[int, int], positions: Mapping[int, set[int]], by: Pass):
        self.flat, self.along, self.positions, self.by = flat, along, positions, by
        self.elements: dict[tuple[int, int, int], int] = {}
        self.zeros: set[int] = set()
        self.equations: list[Equation] = []

    def run(self) -> list[Equation]:
        instead: dict[int, int] = {}
        for eqn in self.flat.equations:
            eqn = replace(eqn, ins=tuple(instead.get(v, v) for v in eqn.ins))
            v = eqn.outs[0] if eqn.outs else -1
            read = next((u for u in eqn.ins if u in self.along), -1)
            if v in self.along:
                for p in sorted(self.positions[v]):
                    self.elements[v, self.along[v], p] = self.made(eqn, p)
            elif read < 0:
                self.equations.append(eqn)
                if eqn.prim.name == "slice" and (cut := single(self.flat, eqn)) is not None:
                    self.elements.setdefault((eqn.ins[0], cut, eqn.params["start_indices"][cut]), v)
            elif (places := places_read(self.flat, eqn)) is not None:
                for out, p in zip(eqn.outs, places[1], strict=True):
                    instead[out] = self.read(eqn, out, self.elements[read, self.along[read], p])
            else:
                self.fold(eqn, read)
        self.flat.outputs = [instead.get(v, v) for v in self.flat.outputs]
        return self.equations

    def read(self, eqn: Equation, out: int, element: int) -> int:
        """The value of a result that reads one position: an element, without the axis where the result has none."""
        shape = self.flat.shapes[out]
        if eqn.prim.name != "unstack":
            return element
        return self.add(eqn, primitives.squeeze_p, {"dimensions": (eqn.params["axis"],)}, (element,), shape, self.flat.dtypes[out])

    def made(self, eqn: Equation, p: int) -> int:
        """The elements of a result at a position, from those of its operands."""
        (v,), axis, name = eqn.outs, self.along[eqn.outs[0]], eqn.prim.name
        shape, read = _with_one(self.flat.shapes[v], axis), read_at(self.flat, eqn, axis, p)
        if name == "pad" and not read:
            params = {"shape": shape, "broadcast_dimensions": (), "sharding": None}
            filled = self.add(eqn, primitives.broadcast_in_dim_p, params, eqn.ins[1:], shape, self.flat.dtypes[v])
            self.zeros |= {filled} if self.flat.literals.get(eqn.ins[1], 1) == 0 else set()
            return filled
        if name == "stack":
            params = {"shape": shape, "broadcast_dimensions": tuple(a for a in range(len(shape)) if a != axis), "sharding": None}
            return self.add(eqn, primitives.broadcast_in_dim_p, params, (eqn.ins[p],), shape, self.flat.dtypes[v])
        elements = {u: self.element(u, a, q, eqn) for u, a, q in read}
        if name in ("slice", "pad", "concatenate"):
            return next(iter(elements.values()))
        ins = tuple(elements.get(u, u) for u in eqn.ins)
        if name in _ADDING and not self.zeros.isdisjoint(ins):
            return ins[1] if ins[0] in self.zeros else ins[0]
        params = {**eqn.params, "shape": shape} if name == "broadcast_in_dim" else eqn.params
        return self.add(eqn, eqn.prim, params, ins, shape, self.flat.dtypes[v])

    def element(self, u: int, axis: int, p: int, reader: Equation) -> int:
        """One position of an axis of a value: computed apart, or a slice."""
        shape, key = self.flat.shapes[u], (u, axis, p)
        if shape[axis] == 1:
            return u
        if key not in self.elements:
            start = tuple(p if a == axis else 0 for a in range(len(shape)))
            limit = tuple(p + 1 if a == axis else n for a, n in enumerate(shape))
            params = {"start_indices": start, "limit_indices": limit, "strides": None}
            self.elements[key] = self.add(reader, primitives.slice_p, params, (u,), _with_one(shape, axis), self.flat.dtypes[u])
        return self.elements[key]

    def fold(self, eqn: Equation, read: int) -> None:
        """A fold of a value, from folds of its elements: side by side, or combined."""
        (v,), axis = eqn.outs, self.along[read]
        kept, shape, dtype = folded_axis(self.flat, eqn, read, axis), self.flat.shapes[v], self.flat.dtypes[v]
        axes = {read: axis}
        if eqn.prim.name == "dot_general" and (met := met_axis(eqn, read, axis)) is not None:
            axes[eqn.ins[1 - eqn.ins.index(read)]] = met
        each = shape if kept is None else _with_one(shape, kept)
        parts = []
        for p in range(self.flat.shapes[read][axis]):
            ins = tuple(self.element(u, axes[u], p, eqn) if u in axes else u for u in eqn.ins)
            parts.append(self.add(eqn, eqn.prim, eqn.params, ins, each, dtype))
        if kept is not None:
            last = replace(eqn, prim=primitives.concatenate_p, params={"dimension": kept}, ins=tuple(parts))
        else:
            prim, params = _COMBINED[eqn.prim.name], dict[str, Any]()
            first = reduce(lambda one, other: self.add(eqn, prim, params, (one, other), shape, dtype), parts[:-1])
            last = replace(eqn, prim=prim, params=params, ins=(first, parts[-1]))
        self.equations.append(replace(last, passes=eqn.passes | {self.by.name}))

    def add(self, eqn: Equation, prim: object, params: dict[str, Any], ins: tuple[int, ...], shape: Shape, dtype: object) -> int:
        v = self.flat.new(shape, dtype)
        made = replace(eqn, prim=prim, params=params, ins=ins, outs=(v,), passes=eqn.passes | {self.by.name})
        self.equations.append(made)
        return v


def single(flat: Flat, eqn: Equation) -> int | None:
    """The axis of which a slice reads one position, and all of the others; ``None`` of any other operation."""
    if eqn.prim.name != "slice" or has_steps(eqn):
        return None
    cut = cut_axes(flat, eqn)
    return cut[0] if len(cut) == 1 and flat.shapes[eqn.outs[0]][cut[0]] == 1 else None


def places_read(flat: Flat, eqn: Equation) -> tuple[int, list[int]] | None:
    """The axis of which each result of an operation is one position, and these; ``None`` of any other operation."""
    if eqn.prim.name == "unstack" or (eqn.prim.name == "split" and all(size == 1 for size in eqn.params["sizes"])):
        return eqn.params["axis"], list(range(len(eqn.outs)))
    axis = single(flat, eqn)
    return (axis, [eqn.params["start_indices"][axis]]) if axis is not None else None


def _with_one(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], 1, *shape[axis + 1 :])
