"""Scatters into some rows of an array, at positions in all of it, which emitted programs carry with them as source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from eqsat_mem.ir.ops.blocks import Group, Params, Shapes
from eqsat_mem.ir.ops.gathers import SCATTERS, numbers_text, scatter_row, written_axes


def scattered_at(write: Any, x: Any, positions: Any, updates: Any, places: Any, columns: Any, ends: Any, numbers: Any) -> Any:
    """``x`` with updates, as ``write`` (a scatter of ``lax``) makes it of an array of which ``x`` is a part.

    ``positions`` are those in the whole array, one column for each axis that is written at positions. Of these, ``columns`` are axes of
    which ``x`` has consecutive ``places``. What is to be written elsewhere is dropped; with ``ends``, at the nearest place that the whole
    has, of which they are the last ones.
    """
    if positions.dtype.itemsize < 4:
        positions = positions.astype(jnp.int32)
    if ends is not None:
        positions = jnp.clip(positions, 0, jnp.asarray(ends, positions.dtype))
    if positions.dtype not in (jnp.int32, jnp.int64):
        positions = positions.astype(jnp.int32)
    at = [positions[..., c] for c in range(positions.shape[-1])]
    for c, place in zip(columns, places):
        here = at[c] - place[0].astype(positions.dtype)
        at[c] = jnp.where(here < 0, jnp.asarray(len(place), positions.dtype), here)
    return write(x, jnp.stack(at, -1), updates, numbers, mode="drop")


WRITES: dict[str, Callable[..., Any]] = {name: getattr(lax, name.replace("-", "_")) for name in SCATTERS}


def _primitive(name: str) -> Primitive:
    """Return a primitive that does so with one of JAX's scatters."""

    def function(x: Any, positions: Any, updates: Any, *places: Any, columns: Any, ends: Any, dimension_numbers: Any) -> Any:
        return scattered_at(WRITES[name], x, positions, updates, places, columns, ends, dimension_numbers)

    made = Primitive(f"{name}_at")
    made.def_impl(jax.jit(function, static_argnames=("columns", "ends", "dimension_numbers")))
    made.def_abstract_eval(lambda x, *others, **params: jax.core.ShapedArray(x.shape, x.dtype))
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))
    return made


scatters_at = {name: _primitive(name) for name in SCATTERS}
"""The primitive for each of JAX's scatters. Its operands are those of the scatter, and places along some axes of the first."""


def _pointwise(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return the groups of the scatter, and one for each axis that has places."""
    axes = [int(params["dimension_numbers"].scatter_dims_to_operand_dims[c]) for c in params["columns"]]
    return [*written_axes(ins, outs, params), *((("in", 0, d), ("in", 3 + k, 0), ("out", 0, d)) for k, d in enumerate(axes))]


def _text(name: str) -> Callable[[Params, Sequence[str], Shapes], str]:
    def text(params: Params, args: Sequence[str], ins: Shapes) -> str:
        places = f"({', '.join(args[3:])}{',' if len(args) == 4 else ''})"
        numbers = numbers_text("ScatterDimensionNumbers", params["dimension_numbers"])
        return (
            f"scattered_at(lax.{name.replace('-', '_')}, {args[0]}, {args[1]}, {args[2]}, {places}, {params['columns']}, "
            f"{params['ends']}, {numbers})"
        )

    return text


SCATTERS_AT = [scatter_row(f"{name}_at", monoid, _pointwise, _text(name), (scattered_at,)) for name, monoid in SCATTERS.items()]
