"""Indices and values in the terms of a JAX user: arguments with their axes, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from eqsat_mem.ir import Axes, Block, Input, Map, Program, Rename, Take, bits

AXES = {1: ("elements of {}",), 2: ("rows of {}", "columns of {}")}
"""How the axes of an argument are called, by how many it has; of more than two they are numbered from 0."""


def axis_of(program: Program, index: int) -> str:
    """The axis that an index runs over: ``rows of x``, ``axis 1 of q``; empty for an index that no argument or result has.

    The first argument with an axis of its own for the index gives the name, else the first of whose axis it is a part.
    """
    read = sorted(((term.slot, term.axes) for term in program.terms if isinstance(term, Input)), key=lambda pair: pair[0])
    arguments = [(program.inputs[slot].name, axes) for slot, axes in read]
    several = len(program.outputs) > 1
    results = [(f"result {k}" if several else "the result", output.axes) for k, output in enumerate(program.outputs)]
    for arrays in (arguments, results):
        for parts in (False, True):
            for name, axes in arrays:
                for position, axis in enumerate(axes):
                    if axis == (index,) or (parts and index in axis):
                        return ("part of " if parts else "") + _axis(name, axes, position)
    return ""


def _axis(name: str, axes: Axes, position: int) -> str:
    words = AXES.get(len(axes))
    return f"axis {position} of {name}" if words is None else words[position].format(name)


def array_type(shape: Sequence[int], dtype: object) -> str:
    """A shape and dtype as JAX prints them: ``f32[8,512]``."""
    return str(jax.core.ShapedArray(tuple(shape), dtype).str_short(short_dtypes=True))


def operation(program: Program, t: int) -> str:
    """The name of what computes a value: ``exp``, ``dot``, ``top_k``, ``argument q``."""
    term = program.terms[t]
    match term:
        case Input():
            return f"argument {program.inputs[term.slot].name}"
        case Block():
            return str(term.call.prim.name)
        case Map():
            return term.op
        case Rename():
            return "transpose"
        case Take():
            return "rows taken"
    return str(getattr(term, "monoid", None) or type(term).__name__.lower())


def describe(program: Program, t: int, extents: Sequence[int] | None = None) -> str:
    """A value by its shape, dtype and operation: ``f32[8,512,64] exp``; inside a loop with the ``extents`` of a chunk."""
    sizes = [index.extent for index in program.indices] if extents is None else extents
    return f"{array_type([sizes[i] for i in bits(program.free[t])], program.terms[t].dtype)} {operation(program, t)}"
