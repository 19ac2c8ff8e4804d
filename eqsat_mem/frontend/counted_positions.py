"""Positions that count 0, 1, 2, ..., which every step of a scan reads, counted in its body.

What does not change from step to step is computed before a scan: the ``arange(n)`` of ``x[arange(n)[:, None], p]`` too, or the positions of
both axes side by side. Within the body nothing then says that each row is read at its own place. Counted there it does, so that rows are
read and written as a batch, and the scan may be run in chunks of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.dtypes import issubdtype
from jax.extend.core import jaxpr_as_fun

from eqsat_mem.frontend.diagonal_gathers import counts
from eqsat_mem.frontend.flat_jaxpr import Equation, Flat, Plain
from eqsat_mem.frontend.known_numbers import Constants
from eqsat_mem.ir.jaxprs import consts_and_carries


@dataclass(frozen=True)
class _Counted:
    """An array of integers that count along an axis and are the same along all others."""

    shape: tuple[int, ...]
    dtype: Any
    axis: int

    def made(self) -> Array:
        return lax.broadcasted_iota(self.dtype, self.shape, self.axis)


_Columns = Sequence[_Counted | int]
"""What an operand consists of along its last axis: what counts, and other values by their number."""


def plain_form(flat: Flat, producer: Mapping[int, Equation], params: dict[str, Any], ins: Sequence[int]) -> Plain | None:
    """A scan that counts positions in its body; ``None`` if it reads none from outside."""
    (consts, carries), body = consts_and_carries(params), params["jaxpr"]
    constants = Constants(flat, producer)
    columns = [_columns(flat, producer, constants, v) for v in ins[:consts]]
    if body.effects or not any(isinstance(column, _Counted) for own in columns for column in own):
        return None
    left = [column for own in columns for column in own if not isinstance(column, _Counted)]

    def form(*values: Array) -> list[Array]:
        kept, init, xs = values[: len(left)], values[len(left) :][:carries], values[len(left) + carries :]

        def step(carry: Sequence[Array], x: Sequence[Array]) -> tuple[list[Array], list[Array]]:
            given = iter(kept)
            made = jaxpr_as_fun(body)(*(_joined(own, given) for own in columns), *carry, *x)
            return list(made[:carries]), list(made[carries:])

        last, stacked = lax.scan(step, list(init), list(xs), params["length"], params["reverse"], params["unroll"])
        return [*last, *stacked]

    operands = [*left, *ins[consts:]]
    return Plain(jax.make_jaxpr(form)(*(jax.ShapeDtypeStruct(flat.shapes[v], flat.dtypes[v]) for v in operands)), operands)


def _columns(flat: Flat, producer: Mapping[int, Equation], constants: Constants, value: int) -> _Columns:
    eqn, last = producer.get(value), len(flat.shapes[value]) - 1
    parts = eqn.ins if eqn is not None and eqn.prim.name == "concatenate" and eqn.params["dimension"] == last else [value]
    return [_counted(flat, constants, v) or v for v in parts] if issubdtype(flat.dtypes[value], np.integer) else [value]


def _counted(flat: Flat, constants: Constants, value: int) -> _Counted | None:
    """The counting array that a value is, along an axis of more than one element; ``None`` if it is none."""
    known = constants.array(value)
    if known is None:
        return None
    along = next((a for a, n in enumerate(known.shape) if n > 1 and counts(known, a)), None)
    return None if along is None else _Counted(known.shape, flat.dtypes[value], along)


def _joined(columns: _Columns, given: Iterator[Array]) -> Array:
    made = [column.made() if isinstance(column, _Counted) else next(given) for column in columns]
    return made[0] if len(made) == 1 else lax.concatenate(made, made[0].ndim - 1)
