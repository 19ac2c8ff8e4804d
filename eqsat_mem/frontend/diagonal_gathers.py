"""Reads and writes of a diagonal, which arrive as gathers and scatters at positions made of iotas, as plain terms.

``x[i, i]`` is ``sum_j where(i == j, x[i, j], 0)`` and ``x.at[i, i].add(u)`` is ``where(i == j, x + u, x)``: elementwise and a
fold, which every rule about them knows how to handle and to split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eqsat_mem.frontend.flat_jaxpr import Equation, Flat, Plain
from eqsat_mem.frontend.known_numbers import Constants
from eqsat_mem.passes import DIAGONALS

_WRITES: dict[str, Callable[[Any, Any], Any]] = {"scatter": lambda x, u: u, "scatter-add": lax.add, "scatter-mul": lax.mul}


def plain_form(flat: Flat, producer: Mapping[int, Equation], name: str, params: dict[str, Any], ins: Sequence[int]) -> Plain | None:
    """Elementwise operations and folds that mean the same as this equation, ``None`` if there is none."""
    write = written(name, params)
    if (name != "gather" and write is None) or jax.dtypes.issubdtype(flat.dtypes[ins[0]], jax.dtypes.extended):
        return None
    numbers = params["dimension_numbers"]
    shape = flat.shapes[ins[0]]
    dims = [int(d) for d in (numbers.start_index_map if name == "gather" else numbers.scatter_dims_to_operand_dims)]
    taken = numbers.collapsed_slice_dims if name == "gather" else numbers.inserted_window_dims
    if len(dims) != 2 or sorted(dims) != sorted(map(int, taken)) or numbers.operand_batching_dims or len(flat.shapes[ins[1]]) != 2:
        return None
    windows = [int(d) for d in (numbers.offset_dims if name == "gather" else numbers.update_window_dims)]
    places = [flat.shapes[ins[2]][d] for d in windows] if name != "gather" else [params["slice_sizes"][d] for d in _rest(shape, dims)]
    if places != [shape[d] for d in _rest(shape, dims)]:
        return None
    positions = Constants(flat, producer).array(ins[1])
    if positions is None:
        return None
    columns = {d: positions[:, c] for c, d in enumerate(dims)}
    kept = next((d for d in dims if np.array_equal(columns[d], np.arange(shape[d]))), None)
    if kept is None:
        return None
    other = dims[1] if kept == dims[0] else dims[0]
    offset = int(columns[other][0]) if len(positions) else 0
    if not np.array_equal(columns[other], np.arange(len(positions)) + offset) or len(positions) + offset > shape[other] or offset < 0:
        return None
    form = _write(write, kept, other, offset, windows) if write is not None else _read(kept, other, offset, windows)
    return Plain(jax.make_jaxpr(form)(*(jax.ShapeDtypeStruct(flat.shapes[v], flat.dtypes[v]) for v in ins)), ins, DIAGONALS)


def written(name: str, params: Mapping[str, Any]) -> Callable[[Any, Any], Any] | None:
    """The element that a scatter leaves, by the one before and the one that it writes; ``None`` if it applies the user's function, or
    is none."""
    applies = name == "scatter" and params["update_jaxpr"] is not None  # x.at[i].apply(f)
    return None if applies else _WRITES.get(name)


def _rest(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    return [d for d in range(len(shape)) if d not in dims]


def _mask(shape: Sequence[int], kept: int, other: int, offset: int) -> Any:
    """The mask of the elements whose position along ``other`` is that along ``kept`` plus ``offset``."""
    here = lax.broadcasted_iota(np.int32, shape, kept)
    there = lax.broadcasted_iota(np.int32, shape, other)
    return (here if offset == 0 else here + np.int32(offset)) == there


def _read(kept: int, other: int, offset: int, windows: Sequence[int]) -> Callable[..., Any]:
    def read(x: Any, _: Any) -> Any:
        only = jnp.where(_mask(x.shape, kept, other, offset), x, lax.full_like(x, 0))
        fold = lax.reduce_or if x.dtype == bool else lax.reduce_sum
        folded = fold(only, (other,))
        batch = next(a for a in range(len(windows) + 1) if a not in windows)
        return jnp.moveaxis(folded, kept - (other < kept), batch)

    return read


def _write(combine: Callable[[Any, Any], Any], kept: int, other: int, offset: int, windows: Sequence[int]) -> Callable[..., Any]:
    def write(x: Any, _: Any, updates: Any) -> Any:
        batch = next(a for a in range(len(windows) + 1) if a not in windows)
        aligned = jnp.expand_dims(jnp.moveaxis(updates, batch, kept - (other < kept)), other)
        aligned = jnp.broadcast_to(aligned, x.shape)
        return jnp.where(_mask(x.shape, kept, other, offset), combine(x, aligned), x)

    return write


def counts(known: np.ndarray, axis: int) -> bool:
    """Whether an array is 0, 1, 2, ... along an axis and the same along all others."""
    counting = np.arange(known.shape[axis]).reshape([-1 if a == axis else 1 for a in range(known.ndim)])
    return np.array_equal(known, np.broadcast_to(counting, known.shape))
