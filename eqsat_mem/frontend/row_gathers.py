"""Reads and writes of one element of each row at a computed position, which arrive as gathers and scatters, as plain terms.

``take_along_axis(x, i[:, None], 1)``, ``x[arange(n), i]`` and ``vmap(lambda row, k: row[k])(x, i)`` are ``sum_j where(j == i, x, 0)``, and
writes there are ``where(j == i, x + u, x)``: elementwise and a fold, which can be computed in pieces along ``j`` too, and at which the
computation of ``x`` need not stop. Where ``x`` is in memory anyway, reading one element of a row is cheaper: such gathers stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from eqsat_mem.frontend.diagonal_gathers import counts, written
from eqsat_mem.frontend.flat_jaxpr import Equation, Flat, Plain
from eqsat_mem.frontend.known_numbers import Constants
from eqsat_mem.ir.ops import ALIASES, MAPS, REDUCTIONS
from eqsat_mem.passes import ROWS

_VIEWS = frozenset({"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "convert_element_type"})


def plain_form(flat: Flat, producer: Mapping[int, Equation], name: str, params: dict[str, Any], ins: Sequence[int]) -> Plain | None:
    """Elementwise operations and a fold that mean the same as this equation, ``None`` if there are none or if ``x`` is held anyway."""
    write = written(name, params)
    if (name != "gather" and write is None) or not _is_computed(flat, producer, ins[0]):
        return None
    rows = _rows(flat, producer, name, params, ins)
    if rows is None or (rows.fills and params.get("fill_value") is None):
        return None
    values = [ins[0], rows.column, *ins[2:]]
    form = rows.write(write) if write is not None else rows.read(params)
    return Plain(jax.make_jaxpr(form)(*(jax.ShapeDtypeStruct(flat.shapes[v], flat.dtypes[v]) for v in values)), values, ROWS)


def batched_form(flat: Flat, producer: Mapping[int, Equation], name: str, params: dict[str, Any], ins: Sequence[int]) -> Plain | None:
    """The same gather or scatter, with axes whose positions count 0, 1, ... as batch axes; ``None`` if it has no such axes, or no others.

    ``x[arange(n)[:, None], p]`` takes several elements of each row.
    """
    if name != "gather" and written(name, params) is None:
        return None
    reads, numbers, shape = name == "gather", params["dimension_numbers"], flat.shapes[ins[0]]
    names = _GATHER if reads else _SCATTER
    batch, of_indices, gone, dims = ([int(d) for d in getattr(numbers, field)] for field in names)
    columns = _columns(flat, producer, ins[1], len(dims))
    if columns is None or len(dims) < 2:
        return None
    counted: dict[int, int] = {}
    for d, column in zip(dims, columns):
        along = _counts_along(flat, producer, column, shape[d], {*of_indices, *counted.values()})
        if along is not None and d in gone and len(counted) < len(dims) - 1:
            counted[d] = along
    if not counted:
        return None
    pairs = sorted([*zip(batch, of_indices), *counted.items()])
    left = [column for d, column in zip(dims, columns) if d not in counted]
    rest = [d for d in dims if d not in counted]
    new = ([d for d, _ in pairs], [a for _, a in pairs], [d for d in gone if d not in counted], rest)
    changed = {**params, "dimension_numbers": numbers._replace(**{field: tuple(value) for field, value in zip(names, new)})}

    def form(x: Any, *others: Any) -> Any:
        positions = lax.concatenate(others[: len(left)], others[0].ndim - 1) if len(left) > 1 else others[0]
        return getattr(primitives, f"{name.replace('-', '_')}_p").bind(x, positions, *others[len(left) :], **changed)

    values = [ins[0], *left, *ins[2:]]
    return Plain(jax.make_jaxpr(form)(*(jax.ShapeDtypeStruct(flat.shapes[v], flat.dtypes[v]) for v in values)), values)


_GATHER = "operand_batching_dims", "start_indices_batching_dims", "collapsed_slice_dims", "start_index_map"
_SCATTER = "operand_batching_dims", "scatter_indices_batching_dims", "inserted_window_dims", "scatter_dims_to_operand_dims"


def _is_computed(flat: Flat, producer: Mapping[int, Equation], value: int) -> bool:
    """Whether a value is computed element by element, by a contraction or a fold, or is constant, so that it might never be in memory."""
    while (eqn := producer.get(value)) is not None and eqn.prim.name in _VIEWS:
        value = eqn.ins[0]
    if eqn is None:
        return value in flat.literals
    name = eqn.prim.name
    return name in MAPS or name in ALIASES or name in REDUCTIONS or name in ("dot_general", "iota")


@dataclass(frozen=True)
class _Rows:
    """One element of each row of ``x``, at a position that ``column`` holds.

    Attributes:
        column: the value with the positions, of the shape of the operation's indices with a single column.
        searched: the axis of ``x`` along which rows lie.
        index_axes: for other axes of ``x`` the axis of ``column`` that stands for them.
        places: for axes of ``x`` other than ``searched`` where they stand in what is read or written; other axes of it have extent one.
        clips: whether positions outside stand for the nearest inside.
        fills: whether what is read outside is a value of its own.
    """

    column: int
    searched: int
    index_axes: Mapping[int, int]
    places: Mapping[int, int]
    extents: tuple[int, ...]
    clips: bool
    fills: bool

    def read(self, params: dict[str, Any]) -> Callable[..., Any]:
        def read(x: Any, column: Any) -> Any:
            here = self.positions(column, x.shape)
            only = jnp.where(self.found(here, x.shape), x, lax.full_like(x, 0))
            folded = (lax.reduce_or if x.dtype == bool else lax.reduce_sum)(only, (self.searched,))
            if self.fills:
                first = lax.index_in_dim(here, 0, self.searched, keepdims=False)
                inside = (first >= 0) & (first < x.shape[self.searched])
                folded = jnp.where(inside, folded, jnp.asarray(params["fill_value"], x.dtype))
            stay = [d for d in range(x.ndim) if d != self.searched]
            order = sorted(range(len(stay)), key=lambda k: self.places[stay[k]])
            return lax.broadcast_in_dim(lax.transpose(folded, order), self.extents, sorted(self.places.values()))

        return read

    def write(self, combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def write(x: Any, column: Any, updates: Any) -> Any:
            axes = sorted(self.places, key=lambda d: self.places[d])
            aligned = lax.squeeze(updates, [k for k in range(updates.ndim) if k not in self.places.values()])
            aligned = lax.transpose(aligned, [axes.index(d) for d in sorted(axes)])
            aligned = lax.broadcast_in_dim(aligned, x.shape, sorted(axes))
            return jnp.where(self.found(self.positions(column, x.shape), x.shape), combine(x, aligned), x)

        return write

    def positions(self, column: Any, shape: Sequence[int]) -> Any:
        """The position of each row, along every element of it."""
        axes = sorted(self.index_axes, key=lambda d: self.index_axes[d])
        flat = lax.squeeze(column, [a for a in range(column.ndim) if a not in self.index_axes.values()])
        flat = lax.transpose(flat, [axes.index(d) for d in sorted(axes)])
        flat = flat if flat.dtype.itemsize >= 4 else flat.astype(np.int32)  # positions need not reach the end of the rows
        if self.clips:
            flat = lax.clamp(np.zeros((), flat.dtype), flat, np.asarray(shape[self.searched] - 1, flat.dtype))
        return lax.broadcast_in_dim(flat, shape, sorted(axes))

    def found(self, here: Any, shape: Sequence[int]) -> Any:
        return lax.broadcasted_iota(here.dtype, shape, self.searched) == here


def _rows(flat: Flat, producer: Mapping[int, Equation], name: str, params: dict[str, Any], ins: Sequence[int]) -> _Rows | None:
    """The rows of which a gather or scatter takes one element each; ``None`` if it takes others."""
    numbers, shape, indices = params["dimension_numbers"], flat.shapes[ins[0]], flat.shapes[ins[1]]
    reads = name == "gather"
    if reads:
        windows, gone, dims = numbers.offset_dims, numbers.collapsed_slice_dims, numbers.start_index_map
        batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims)
        extents = _gathered(shape, indices, params)
    else:
        windows, gone, dims = numbers.update_window_dims, numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
        batching = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims)
        extents = flat.shapes[ins[2]]
    index_axes = {int(d): int(a) for d, a in batching}
    kept = [d for d in range(len(shape)) if d not in {*map(int, gone), *map(int, numbers.operand_batching_dims)}]
    taken = dict(zip(kept, sorted(map(int, windows))))
    columns = _columns(flat, producer, ins[1], len(dims))
    if columns is None:
        return None
    positions = {int(d): column for d, column in zip(dims, columns)}
    for d, column in positions.items() if len(positions) > 1 else ():
        along = _counts_along(flat, producer, column, shape[d], set(index_axes.values()))
        index_axes |= {} if along is None else {d: along}
    searched = [d for d in positions if d not in index_axes]
    batch = [a for a in range(len(indices) - 1) if indices[a] != 1]
    if len(searched) != 1 or not set(batch) <= set(index_axes.values()) or any(extents[taken[d]] != 1 for d in positions if d in taken):
        return None
    if any(extents[taken[d]] != shape[d] for d in kept if d not in positions):
        return None
    outer = [k for k in range(len(extents)) if k not in taken.values()]
    places = {d: outer[a] for d, a in index_axes.items()} | {d: taken[d] for d in kept if d not in positions}
    mode, modes = params["mode"], lax.GatherScatterMode
    if mode not in (modes.CLIP, modes.FILL_OR_DROP, modes.PROMISE_IN_BOUNDS):
        return None
    clips = mode is modes.CLIP or (reads and mode is modes.PROMISE_IN_BOUNDS)  # XLA clips what is read, and drops what is written
    fills = reads and mode is modes.FILL_OR_DROP
    return _Rows(positions[searched[0]], searched[0], index_axes, places, tuple(extents), clips, fills)


def _gathered(shape: Sequence[int], indices: Sequence[int], params: dict[str, Any]) -> tuple[int, ...]:
    """The shape of what a gather reads."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    gone = {*map(int, numbers.collapsed_slice_dims), *map(int, numbers.operand_batching_dims)}
    window = iter([int(sizes[d]) for d in range(len(shape)) if d not in gone])
    batch = iter(indices[:-1])
    offsets = set(map(int, numbers.offset_dims))
    return tuple(next(window) if k in offsets else next(batch) for k in range(len(offsets) + len(indices) - 1))


def _columns(flat: Flat, producer: Mapping[int, Equation], indices: int, count: int) -> Sequence[int] | None:
    """The values of each column of indices."""
    if count == 1:
        return [indices]
    eqn, last = producer.get(indices), len(flat.shapes[indices]) - 1
    if eqn is None or eqn.prim.name != "concatenate" or eqn.params["dimension"] != last or len(eqn.ins) != count:
        return None
    return eqn.ins


def _counts_along(flat: Flat, producer: Mapping[int, Equation], column: int, extent: int, taken: set[int]) -> int | None:
    """The axis along which a column is 0, 1, 2, ... up to ``extent``."""
    known = Constants(flat, producer).array(column)
    if known is None:
        return None
    free = (a for a, n in enumerate(known.shape[:-1]) if n == extent and a not in taken)
    return next((a for a in free if counts(known, a)), None)
