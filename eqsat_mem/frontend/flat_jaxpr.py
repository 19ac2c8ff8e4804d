"""Numbered values and primitives on them: a jaxpr without nesting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr

from eqsat_mem.ir import Source
from eqsat_mem.passes import Pass

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Equation:
    """One primitive on numbered values, with the names of the passes that made it of others."""

    prim: Any
    params: dict[str, Any]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    effects: bool
    source: Source | None
    passes: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Plain:
    """An equation in terms of other operations: a jaxpr of some values; ``by`` is the pass that says so, ``None`` where JAX says it."""

    jaxpr: ClosedJaxpr
    operands: Sequence[int]
    by: Pass | None = None


@dataclass
class Flat:
    """Values by number (shape and dtype), what each of the given ones is, and the equations in order.

    ``variables`` has the number of each variable of the jaxpr and of the jaxprs inlined in it; -1 where one was inlined twice, so that its
    variables are several values.
    """

    shapes: list[Shape] = field(default_factory=list)
    dtypes: list[Any] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    consts: dict[int, Any] = field(default_factory=dict)
    literals: dict[int, Any] = field(default_factory=dict)
    equations: list[Equation] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    weak: list[bool] = field(default_factory=list)
    variables: dict[Any, int] = field(default_factory=dict)

    def new(self, shape: Sequence[int], dtype: Any) -> int:
        self.shapes.append(tuple(int(n) for n in shape))
        self.dtypes.append(dtype)
        return len(self.shapes) - 1

    def note(self, env: Mapping[Any, int]) -> None:
        """Keep the numbers of a jaxpr's variables."""
        for variable, number in env.items():
            self.variables[variable] = number if self.variables.get(variable, number) == number else -1
