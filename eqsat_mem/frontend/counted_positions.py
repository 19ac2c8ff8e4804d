"""Positions that count 0, 1, 2, ..., which every step of a loop reads, counted in its body.

What does not change from step to step is computed before a loop: the ``arange(n)`` of ``x[arange(n)[:, None], p]`` too, or the positions of
both axes side by side. Within the body nothing then says that each row is read at its own place. Counted there it does, so that rows are
read and written as a batch, and the loop may be run in chunks of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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


def plain_form(flat: Flat, producer: Mapping[int, Equation], name: str, params: dict[str, Any], ins: Sequence[int]) -> Plain | None:
    """A scan or a ``while`` loop that counts positions in its body; ``None`` if it reads none from outside."""
    if name not in ("scan", "while"):
        return None
    consts = consts_and_carries(params)[0] if name == "scan" else params["cond_nconsts"] + params["body_nconsts"]
    functions = [params["jaxpr"]] if name == "scan" else [params["cond_jaxpr"], params["body_jaxpr"]]
    constants = Constants(flat, producer)
    columns = [_columns(flat, producer, constants, v) for v in ins[:consts]]
    counted = any(isinstance(column, _Counted) for own in columns for column in own)
    if not counted or any(function.effects for function in functions):
        return None
    left = [column for own in columns for column in own if not isinstance(column, _Counted)]

    def form(*values: Array) -> list[Array]:
        def read() -> list[Array]:
            given = iter(values)
            return [_joined(own, given) for own in columns]

        run = _scanned if name == "scan" else _repeated
        return run(params, read, values[len(left) :])

    operands = [*left, *ins[consts:]]
    return Plain(jax.make_jaxpr(form)(*(jax.ShapeDtypeStruct(flat.shapes[v], flat.dtypes[v]) for v in operands)), operands)


def _scanned(params: dict[str, Any], read: Callable[[], list[Array]], others: Sequence[Array]) -> list[Array]:
    """A scan, each step of which reads its constants anew."""
    carries, body = consts_and_carries(params)[1], jaxpr_as_fun(params["jaxpr"])

    def step(carry: Sequence[Array], x: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        made = body(*read(), *carry, *x)
        return list(made[:carries]), list(made[carries:])

    init, xs = list(others[:carries]), list(others[carries:])
    last, stacked = lax.scan(step, init, xs, params["length"], params["reverse"], params["unroll"])
    return [*last, *stacked]


def _repeated(params: dict[str, Any], read: Callable[[], list[Array]], init: Sequence[Array]) -> list[Array]:
    """A ``while`` loop, each step of which reads its constants anew."""
    first, condition, body = params["cond_nconsts"], jaxpr_as_fun(params["cond_jaxpr"]), jaxpr_as_fun(params["body_jaxpr"])
    return list(lax.while_loop(lambda c: condition(*read()[:first], *c)[0], lambda c: list(body(*read()[first:], *c)), list(init)))


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
