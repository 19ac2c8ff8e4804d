"""What reads or adds to windows of arrays, in numpy: convolutions, gathers and scatters. For ``stepwise``, whose functions take parameters
and operands alike; what JAX is to compute itself they leave to it (``NotImplemented``)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

Array = Any


def padded(x: Array, value: Array, config: Sequence[tuple[int, int, int]]) -> Array:
    """An array with so much before, after and between the elements of each axis, as ``lax.pad`` does; less than nothing cuts off."""
    out = np.full(
        [max(low, 0) + n + max(n - 1, 0) * inner + max(high, 0) for n, (low, high, inner) in zip(x.shape, config)], value, x.dtype
    )
    out[tuple(slice(max(low, 0), max(low, 0) + n + max(n - 1, 0) * inner, inner + 1) for n, (low, _, inner) in zip(x.shape, config))] = x
    return out[tuple(slice(max(-low, 0), n - max(-high, 0)) for n, (low, high, _) in zip(out.shape, config))]


def convolution(params: Any, x: Array, kernel: Array) -> Array:
    """``conv_general_dilated`` of floating-point numbers: the windows side by side times the kernel, half precision added in float32."""
    wide = np.result_type(x, kernel, params["preferred_element_type"] or x.dtype)
    wide = np.dtype(np.float32) if wide.itemsize == 2 else wide
    numbers = params["dimension_numbers"]
    x, kernel = x.transpose(numbers.lhs_spec).astype(wide), kernel.transpose(numbers.rhs_spec).astype(wide)
    x = padded(x, 0, [(0, 0, 0)] * 2 + [(low, high, n - 1) for (low, high), n in zip(params["padding"], params["lhs_dilation"])])
    windows = _windows(x, kernel.shape[2:], params["window_strides"], params["rhs_dilation"])
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    out, taps = windows.shape[2 : x.ndim], kernel.shape[2:]
    rows, channels, features = x.shape[0] // batches, kernel.shape[1], kernel.shape[0] // (groups * batches)
    windows = windows.reshape(batches, rows, groups, channels, *out, *taps)
    windows = np.moveaxis(windows, (2, 3), (1, 3 + len(out))).reshape(groups * batches, rows * math.prod(out), channels * math.prod(taps))
    weights = kernel.reshape(groups * batches, features, channels * math.prod(taps))
    made = np.matmul(windows, weights.swapaxes(1, 2)).reshape(groups * batches, rows, *out, features)
    made = np.moveaxis(np.moveaxis(made, -1, 1), 2, 0).reshape(rows, kernel.shape[0], *out)
    return made.transpose(np.argsort(numbers.out_spec))


def _windows(x: Array, taps: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Array:
    """The windows of all axes but the first two: their positions, then what lies at each."""
    reach = [(n - 1) * dilation + 1 for n, dilation in zip(taps, dilations)]
    if any(n < r for n, r in zip(x.shape[2:], reach)):
        places = [(n - r) // stride + 1 if n >= r else 0 for n, r, stride in zip(x.shape[2:], reach, strides)]
        return np.zeros((*x.shape[:2], *places, *taps), x.dtype)
    windows = np.lib.stride_tricks.sliding_window_view(x, reach, tuple(range(2, x.ndim)))
    return windows[(slice(None), slice(None), *(slice(None, None, s) for s in (*strides, *dilations)))]


def gather(params: Any, x: Array, indices: Array) -> Array:
    """``gather``: a window of the array at each of the positions."""
    numbers, mode = params["dimension_numbers"], params["mode"]
    if x.ndim == 0 or (mode is GatherScatterMode.FILL_OR_DROP and params["fill_value"] is None):
        return NotImplemented
    batch, sizes = indices.shape[:-1], params["slice_sizes"]
    starts = _starts(indices, numbers.start_index_map, numbers.operand_batching_dims, numbers.start_indices_batching_dims)
    inside = _inside(starts, x.shape, sizes, batch)
    windows = x[_positions(_clipped(starts, x.shape, sizes, batch), sizes)]
    if mode is GatherScatterMode.FILL_OR_DROP:
        windows = np.where(inside.reshape(inside.shape + (1,) * x.ndim), windows, np.asarray(params["fill_value"]).astype(x.dtype))
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = windows.reshape([*batch, *(n for axis, n in enumerate(sizes) if axis not in gone)])
    return np.moveaxis(windows, range(len(batch), windows.ndim), numbers.offset_dims)


def scatter(merge: Callable[[Array, Any, Array], None]) -> Callable[..., Array]:
    """The scatter that merges updates with what lies in the array at their places, in place and one after the other."""

    def scattered(params: Any, x: Array, indices: Array, updates: Array) -> Array:
        if x.ndim == 0 or (merge is operator.setitem and params["update_jaxpr"] is not None):  # a function of the user's
            return NotImplemented
        numbers, batch, out = params["dimension_numbers"], indices.shape[:-1], np.array(x)
        gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        window = iter(numbers.update_window_dims)
        sizes = [1 if axis in gone else updates.shape[next(window)] for axis in range(x.ndim)]
        starts = _starts(
            indices, numbers.scatter_dims_to_operand_dims, numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
        )
        inside = _inside(starts, x.shape, sizes, batch)
        if params["mode"] is GatherScatterMode.CLIP:
            inside = np.ones_like(inside)
        updates = np.moveaxis(updates, numbers.update_window_dims, range(len(batch), updates.ndim)).reshape([*batch, *sizes])
        kept = [start[inside] for start in _clipped(starts, x.shape, sizes, batch)]
        merge(out, _positions(kept, sizes), updates[inside].astype(x.dtype))
        return out

    return scattered


def _starts(indices: Array, axes: Sequence[int], batched: Sequence[int], lanes: Sequence[int]) -> dict[int, Array]:
    """Where the windows begin along each axis of the array that they do not have whole."""
    given = {axis: indices[..., k].astype(np.int64) for k, axis in enumerate(axes)}
    return given | {axis: np.indices(indices.shape[:-1], sparse=True)[lane] for axis, lane in zip(batched, lanes)}


def _inside(starts: dict[int, Array], shape: Sequence[int], sizes: Sequence[int], batch: Sequence[int]) -> Array:
    """Which of the windows lie in the array."""
    inside = np.ones(batch, bool)
    for axis, start in starts.items():
        inside &= (start >= 0) & (start <= shape[axis] - sizes[axis])
    return inside


def _clipped(starts: dict[int, Array], shape: Sequence[int], sizes: Sequence[int], batch: Sequence[int]) -> list[Array]:
    """Where the windows begin along all axes, moved into the array."""
    clipped = [np.clip(starts.get(axis, np.int64(0)), 0, n - size) for axis, (n, size) in enumerate(zip(shape, sizes))]
    return [np.broadcast_to(start, batch) for start in clipped]


def _positions(starts: Sequence[Array], sizes: Sequence[int]) -> tuple[Array, ...]:
    """The index of all elements of all windows: axes of the batch, then those of a window."""
    ones = (1,) * len(sizes)
    along = [np.arange(size).reshape([-1 if k == axis else 1 for k in range(len(sizes))]) for axis, size in enumerate(sizes)]
    return tuple(start.reshape(start.shape + ones) + steps for start, steps in zip(starts, along))
