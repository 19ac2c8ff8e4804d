"""The body of a loop as a program over named indices, so that the loop can run on chunks of an axis that its body acts on row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.dtypes import issubdtype
from jax.extend.core import ClosedJaxpr

from eqsat_mem.ir.ops.blocks import Place, Shapes
from eqsat_mem.ir.program import Program
from eqsat_mem.ir.terms import Axes, Block, Dot, Input


@dataclass(frozen=True, eq=False)
class Inside:
    """The body of a scan.

    Attributes:
        program: the body, at the extents of the whole scan; its arguments are the operands of the scan less the axis of the steps.
        consts: the number of operands that every step reads whole.
        carries: the number of operands after them that are carried.
        places: for each index of the body that may be split, an axis of an operand of the scan that is this index.
        known: roles that have been found of its results, by the index and the roles of its operands.
        figures: what schedules have found of it, by what it is of.
    """

    program: Program
    consts: int
    carries: int
    places: Mapping[int, Place] = field(default_factory=dict)
    known: dict[Any, Any] = field(default_factory=dict)
    figures: dict[Any, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "known": {}, "figures": {}}

    @cached_property
    def contracts(self) -> bool:
        """Whether it contracts numbers that are rounded."""
        inner = (term.call.inside for term in self.program.terms if isinstance(term, Block))
        dots = (term for term in self.program.terms if isinstance(term, Dot))
        return any(issubdtype(dot.dtype, np.inexact) for dot in dots) or any(i is not None and i.contracts for i in inner)

    def body_axes(self) -> Iterator[Axes]:
        """Yield the axes of each argument of the body."""
        axes: dict[int, Axes] = {}
        for term in self.program.terms:
            if isinstance(term, Input):
                axes.setdefault(term.slot, term.axes)
        return (axes[slot] for slot in range(len(self.program.inputs)))

    def is_stepped(self, operand: int) -> bool:
        """Whether an operand is read step by step."""
        return operand >= self.consts + self.carries

    def extents(self, in_shapes: Shapes) -> dict[int, int]:
        """The extents of the indices that may be split, for operands of these shapes, where they are not those of the whole."""
        now = {i: in_shapes[k][a] for i, (_, k, a) in self.places.items()}
        return {i: n for i, n in now.items() if n != self.program.indices[i].extent}

    def at(self, extents: Mapping[int, int]) -> Program:
        """The body with other extents of some indices."""
        indices = [replace(index, extent=extents.get(i, index.extent)) for i, index in enumerate(self.program.indices)]
        program = replace(self.program, indices=indices, _ids={}, _operands={}, _readers=[], _made_of=[])
        shapes = {t.slot: program.shape(t.axes) for t in program.terms if isinstance(t, Input)}
        program.inputs = [replace(b, shape=shapes.get(slot, b.shape)) for slot, b in enumerate(program.inputs)]
        return program

    def traced(self, extents: Mapping[int, int]) -> ClosedJaxpr:
        """The body as a jaxpr, with other extents of some indices."""
        from eqsat_mem.ir.interpreter import evaluate

        program = self.at(extents)
        avals = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in program.inputs]
        return jax.make_jaxpr(lambda *args: evaluate(program, args))(*avals)
