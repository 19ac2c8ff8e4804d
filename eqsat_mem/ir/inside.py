"""The body of a loop, or the branches of a choice, as a program over named indices, so that it can run on chunks of an axis whose rows it
acts on one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.dtypes import issubdtype
from jax.extend.core import ClosedJaxpr

from eqsat_mem.ir.ops.blocks import Place, Shapes
from eqsat_mem.ir.program import Program
from eqsat_mem.ir.terms import Axes, Block, Dot, Input

BRANCHES = "branches"
"""The name of the functions of a choice among its parameters, of which they are one tuple."""


class Subfunction(NamedTuple):
    """One of the functions of a loop or choice: its name among the parameters, the operands that it takes, and the results of the body
    that it returns."""

    name: str
    operands: Sequence[int]
    results: Sequence[int]


@dataclass(frozen=True, eq=False)
class Inside:
    """The body of a loop, or all branches of a choice.

    Attributes:
        program: the body, at the extents of the whole loop; its arguments are the operands of the loop, those that are read step by step
            less the axis of the steps. After its results, a ``while`` loop has that which says whether there is another step, and a choice
            those of each branch.
        consts: the number of operands that every step reads whole.
        carries: the number of operands after them that are carried.
        results: the number of results of the loop.
        parts: the functions of the loop.
        same: for each operand, the first that is the same value; the body reads no other.
        goes_on: the result that says whether there is another step; None where that is known.
        places: for each index of the body that may be split, an axis of an operand of the loop that is this index.
        known: roles that have been found of its results, by the index and the roles of its operands.
        figures: what schedules have found of it, by what it is of.
    """

    program: Program
    consts: int
    carries: int
    results: int
    parts: Sequence[Subfunction]
    same: Sequence[int]
    goes_on: int | None = None
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

    @property
    def chooses(self) -> bool:
        """Whether it is a choice between its functions."""
        return self.parts[0].name == BRANCHES

    def is_stacked(self, result: int) -> bool:
        """Whether a result has one slice for each step."""
        return result >= self.carries and not self.chooses

    @cached_property
    def functions(self) -> Sequence[Program]:
        """The functions of the loop as programs."""
        return [self.program] if len(self.parts) == 1 else list(map(self.restricted, self.parts))

    @property
    def alternatives(self) -> Sequence[Program]:
        """The programs of which each step computes one: the branches of a choice, or the body."""
        return self.functions if self.chooses else [self.program]

    def restricted(self, part: Subfunction) -> Program:
        """The part of the body that makes some of its results of some of its operands."""
        axes, whole = list(self.body_axes()), self.program
        inputs = [whole.inputs[k] for k in part.operands]
        given = {self.same[k]: place for place, k in reversed([*enumerate(part.operands)])}
        new = replace(whole.empty_like(), inputs=inputs)
        for place, k in enumerate(part.operands):
            new.add(Input(inputs[place].dtype, place, axes[k]))

        def own(_: Program, t: int, __: Mapping[int, int]) -> Input | None:
            term = whole.terms[t]
            return replace(term, slot=given[term.slot]) if isinstance(term, Input) else None

        return replace(whole, outputs=[whole.outputs[k] for k in part.results]).rewritten(own, into=new)[0]

    def traced(self, extents: Mapping[int, int]) -> dict[str, Any]:
        """The functions of the loop as its parameters, with other extents of some indices."""
        jaxprs = [_traced(_at(program, extents)) for program in self.functions]
        if self.chooses:
            return {BRANCHES: tuple(jaxprs)}
        return {part.name: jaxpr for part, jaxpr in zip(self.parts, jaxprs, strict=True)}


def _at(program: Program, extents: Mapping[int, int]) -> Program:
    """A program with other extents of some indices."""
    indices = [replace(index, extent=extents.get(i, index.extent)) for i, index in enumerate(program.indices)]
    program = replace(program, indices=indices, _ids={}, _operands={}, _readers=[], _made_of=[])
    shapes = {t.slot: program.shape(t.axes) for t in program.terms if isinstance(t, Input)}
    program.inputs = [replace(b, shape=shapes.get(slot, b.shape)) for slot, b in enumerate(program.inputs)]
    return program


def _traced(program: Program) -> ClosedJaxpr:
    from eqsat_mem.ir.interpreter import evaluate

    avals = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in program.inputs]
    return jax.make_jaxpr(lambda *args: evaluate(program, args))(*avals)
