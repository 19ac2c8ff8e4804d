"""Operations that make, move and pick elements: one row each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir.dialects import stablehlo

from eqsat_mem.stablehlo.operation import Op, Row
from eqsat_mem.stablehlo.values import Unreadable, constant


def made_of(op: Op) -> Any:
    """A constant, known while the module is read; one whose elements are the same is made where it is needed."""
    value = constant(op.operation, op.aval)
    return value if np.shape(value) == op.aval.shape else lax.full(op.aval.shape, value)


def reshaped(op: Op, x: Any, *_: Any) -> Any:
    """Of dynamic reshapes, too: the type of the result has the shape."""
    return x if np.shape(x) == op.aval.shape else lax.reshape(x, op.aval.shape)


def iota(op: Op, *_: Any) -> Any:
    return lax.broadcasted_iota(op.aval.dtype, op.aval.shape, op.value("iota_dimension"))


def broadcast_in_dim(op: Op, x: Any, *_: Any) -> Any:
    shape = op.aval.shape
    dims = op.integers("broadcast_dimensions")
    return x if np.shape(x) == shape and dims == tuple(range(len(shape))) else lax.broadcast_in_dim(x, shape, dims)


def pad(op: Op, x: Any, value: Any) -> Any:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    return lax.pad(x, value, list(zip(*(op.integers(name) for name in names), strict=True)))


def dynamic_pad(op: Op, x: Any, value: Any, *_: Any) -> Any:
    return lax.pad(x, value, [(int(a), int(b), int(c)) for a, b, c in zip(*(op.numbers(k) for k in (2, 3, 4)), strict=True)])


def real_dynamic_slice(op: Op, x: Any, *_: Any) -> Any:
    starts, limits, strides = (tuple(map(int, op.numbers(k))) for k in (1, 2, 3))
    return lax.slice(x, starts, limits, strides)


def sliced(op: Op, x: Any) -> Any:
    return lax.slice(x, op.integers("start_indices"), op.integers("limit_indices"), op.integers("strides"))


def dynamic_slice(op: Op, x: Any, *starts: Any) -> Any:
    return lax.dynamic_slice(x, starts, op.integers("slice_sizes"), allow_negative_indices=False) if starts else x


def dynamic_update_slice(op: Op, x: Any, update: Any, *starts: Any) -> Any:
    return lax.dynamic_update_slice(x, update, starts, allow_negative_indices=False) if starts else update


# --- gathers and scatters ----------------------------------------------------------------------------


def gather(op: Op, x: Any, indices: Any, *sizes: Any) -> Any:
    """Positions outside are clipped, as StableHLO has it. Of dynamic gathers, too, whose sizes are a constant."""
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(numbers.offset_dims),
        collapsed_slice_dims=tuple(numbers.collapsed_slice_dims),
        start_index_map=tuple(numbers.start_index_map),
        operand_batching_dims=tuple(numbers.operand_batching_dims),
        start_indices_batching_dims=_behind_vectors(numbers.start_indices_batching_dims, numbers.index_vector_dim),
    )
    return lax.gather(
        x,
        _vectors_last(indices, numbers.index_vector_dim),
        dims,
        tuple(map(int, op.numbers(2))) if sizes else op.integers("slice_sizes"),
        indices_are_sorted=op.value("indices_are_sorted", False),
        mode=lax.GatherScatterMode.CLIP,
    )


_SCATTERS = {
    "": lax.scatter,
    "add": lax.scatter_add,
    "multiply": lax.scatter_mul,
    "maximum": lax.scatter_max,
    "minimum": lax.scatter_min,
}


def scatter(op: Op, *operands: Any) -> Any:
    """Elements that lie outside are dropped, as StableHLO has it."""
    if len(operands) != 3:
        raise Unreadable("a scatter into several arrays at once")
    combiner, replaces = op.combiner(0), op.returned(0) == op.arguments(0)[1:]
    if combiner not in _SCATTERS or not (combiner or replaces):
        raise Unreadable("a scatter that combines with a function of its own")
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(numbers.update_window_dims),
        inserted_window_dims=tuple(numbers.inserted_window_dims),
        scatter_dims_to_operand_dims=tuple(numbers.scattered_dims_to_operand_dims),
        operand_batching_dims=tuple(numbers.input_batching_dims),
        scatter_indices_batching_dims=_behind_vectors(numbers.scatter_indices_batching_dims, numbers.index_vector_dim),
    )
    x, indices, updates = operands
    return _SCATTERS[combiner](
        x,
        _vectors_last(indices, numbers.index_vector_dim),
        updates,
        dims,
        indices_are_sorted=op.value("indices_are_sorted", False),
        unique_indices=op.value("unique_indices", False),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )


def _vectors_last(indices: Any, axis: int) -> Any:
    """Indices with their vectors along the last axis, where JAX wants them; an axis behind the last one is of extent one."""
    return lax.expand_dims(indices, (axis,)) if axis == np.ndim(indices) else jnp.moveaxis(indices, axis, -1)


def _behind_vectors(dims: Sequence[int], axis: int) -> tuple[int, ...]:
    """The axes of indices once their vectors are along the last axis."""
    return tuple(d - (d > axis) for d in dims)


SHAPES: dict[str, Row] = {
    "stablehlo.broadcast": lambda op, x: lax.broadcast(x, op.integers("broadcast_sizes")),
    "stablehlo.broadcast_in_dim": broadcast_in_dim,
    "stablehlo.concatenate": lambda op, *xs: lax.concatenate(xs, op.value("dimension")),
    "stablehlo.constant": made_of,
    "stablehlo.dynamic_broadcast_in_dim": broadcast_in_dim,
    "stablehlo.dynamic_gather": gather,
    "stablehlo.dynamic_iota": iota,
    "stablehlo.dynamic_pad": dynamic_pad,
    "stablehlo.dynamic_reshape": reshaped,
    "stablehlo.dynamic_slice": dynamic_slice,
    "stablehlo.dynamic_update_slice": dynamic_update_slice,
    "stablehlo.gather": gather,
    "stablehlo.get_dimension_size": lambda op, x: np.asarray(x.shape[op.value("dimension")], op.aval.dtype),
    "stablehlo.iota": iota,
    "stablehlo.pad": pad,
    "stablehlo.real_dynamic_slice": real_dynamic_slice,
    "stablehlo.reshape": reshaped,
    "stablehlo.reverse": lambda op, x: lax.rev(x, op.integers("dimensions")),
    "stablehlo.scatter": scatter,
    "stablehlo.slice": sliced,
    "stablehlo.transpose": lambda op, x: lax.transpose(x, op.integers("permutation")),
}
