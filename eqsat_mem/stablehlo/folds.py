"""Reductions, windows, sorts, products and the like: one row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jax.extend.mlir.dialects import stablehlo

from eqsat_mem.ir.ops import MONOIDS
from eqsat_mem.stablehlo.operation import Op, Row, is_number
from eqsat_mem.stablehlo.values import Unreadable, word

_FOLDS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "add": ("add", lax.reduce_sum, lax.add),
    "multiply": ("mul", lax.reduce_prod, lax.mul),
    "maximum": ("max", lax.reduce_max, lax.max),
    "minimum": ("min", lax.reduce_min, lax.min),
    "and": ("and", lax.reduce_and, lax.bitwise_and),
    "or": ("or", lax.reduce_or, lax.bitwise_or),
    "xor": ("xor", lax.reduce_xor, lax.bitwise_xor),
}
"""The operations that reductions combine with: our monoid, the reduction, and the function of two."""

_CUMULATIVE = {"add": lax.cumsum, "multiply": lax.cumprod, "maximum": lax.cummax, "minimum": lax.cummin}


def reduce(op: Op, *operands: Any) -> Any:
    count = len(operands) // 2
    values, starts, axes = operands[:count], operands[count:], op.integers("dimensions")
    monoid = op.combiner(0) if count == 1 else ""
    if monoid:
        (x,), (start,) = values, starts
        name, fold, combine = _FOLDS[monoid]
        folded = fold(x, axes)
        if is_number(start, MONOIDS[name].identity(x.dtype)):
            return folded
        return combine(folded, lax.broadcast(start, folded.shape))
    found = _position(op, values, starts, axes)
    return found or list(lax.reduce(values, starts, _of_tuples(op), axes))


def _of_tuples(op: Op) -> Callable[[Any, Any], Any]:
    """The first region as a function of two tuples of values."""
    return lambda a, b: tuple(op.regions[0](*a, *b))


def _position(op: Op, values: Sequence[Any], starts: Sequence[Any], axes: Sequence[int]) -> list[Any] | None:
    """The extreme and its position, if the reduction is as JAX writes that of ``argmax`` or ``argmin``."""
    if len(values) != 2 or len(axes) != 1 or not is_number(starts[1], 0):
        return None
    source = op.operation.operands[1].owner
    if getattr(source, "name", "") != "stablehlo.iota" or source.attributes["iota_dimension"].value != axes[0]:
        return None
    x, position = values
    for name, extreme, find in (("max", lax.reduce_max, lax.argmax), ("min", lax.reduce_min, lax.argmin)):
        if not is_number(starts[0], MONOIDS[name].identity(x.dtype)):
            continue
        as_jax = op.reader.body_of(lambda x, find=find: find(x, 0, position.dtype), [_pair(x)], "stablehlo.reduce")
        if op.body(0) == as_jax:
            return [extreme(x, axes), find(x, axes[0], position.dtype)]
    return None


def _pair(x: Any) -> jax.ShapeDtypeStruct:
    """Two elements of an array's dtype."""
    return jax.ShapeDtypeStruct((2,), x.dtype)


# --- windows -----------------------------------------------------------------------------------------


def reduce_window(op: Op, *operands: Any) -> Any:
    count = len(operands) // 2
    values, starts = operands[:count], operands[count:]
    rank = np.ndim(values[0])
    ones = (1,) * rank
    window = op.integers("window_dimensions")
    strides, base, inner = (op.integers(name, ones) for name in ("window_strides", "base_dilations", "window_dilations"))
    padding = op.pairs("padding", rank)
    monoid = op.combiner(0) if count == 1 else ""
    if monoid:
        (x,), (start,) = values, starts
        name, _, combine = _FOLDS[monoid]
        neutral = is_number(start, MONOIDS[name].identity(x.dtype))
        if neutral and monoid in _CUMULATIVE and strides == base == inner == ones:
            along = _whole_axis(x.shape, window, padding)
            if along is not None:
                return _CUMULATIVE[monoid](x, along[0], reverse=along[1])
        return lax.reduce_window(x, start, combine, window, strides, padding, base, inner)
    return list(lax.reduce_window(tuple(values), tuple(starts), _of_tuples(op), window, strides, padding, base, inner))


def _whole_axis(shape: Sequence[int], window: Sequence[int], padding: Sequence[tuple[int, int]]) -> tuple[int, bool] | None:
    """The axis along which a window holds all elements up to each, or from each on (then True): the reduction is cumulative."""
    wide = [axis for axis, extent in enumerate(window) if extent > 1]
    if len(wide) != 1 or window[wide[0]] != shape[wide[0]] or any(padding[a] != (0, 0) for a in range(len(shape)) if a != wide[0]):
        return None
    before = window[wide[0]] - 1, 0
    return (wide[0], padding[wide[0]] != before) if padding[wide[0]] in (before, before[::-1]) else None


def select_and_scatter(op: Op, x: Any, source: Any, start: Any) -> Any:
    operations = op.inner(0)
    compared = operations[0]
    prefers = {"GE": primitives.ge_p, "LE": primitives.le_p}
    plain = len(operations) == 2 and compared.name == "stablehlo.compare" and list(compared.operands) == op.arguments(0)
    direction = word(compared.attributes["comparison_direction"]) if plain else ""
    if direction not in prefers or op.combiner(1) != "add" or not is_number(start, 0):
        raise Unreadable("a choice from windows that is no pooling")
    rank = np.ndim(x)
    return primitives.select_and_scatter_add_p.bind(
        source,
        x,
        select_prim=prefers[direction],
        window_dimensions=op.integers("window_dimensions"),
        window_strides=op.integers("window_strides", (1,) * rank),
        padding=op.pairs("padding", rank),
    )


# --- sorts -------------------------------------------------------------------------------------------


def sort(op: Op, *operands: Any) -> Any:
    """Sorted by the first few operands, if the comparison is as JAX writes that."""
    axis, is_stable = op.value("dimension", -1) % np.ndim(operands[0]), op.value("is_stable", False)
    body, pairs = op.body(0), [_pair(x) for x in operands]
    for keys in range(1, len(operands) + 1):

        def sorting(*xs: Any, keys: int = keys) -> Any:
            return lax.sort(xs, num_keys=keys)

        if body == op.reader.body_of(sorting, pairs, "stablehlo.sort"):
            return list(lax.sort(operands, dimension=axis, is_stable=is_stable, num_keys=keys))
    raise Unreadable("a sort with a comparison of its own")


# --- products and the like ---------------------------------------------------------------------------


def dot_general(op: Op, x: Any, y: Any) -> Any:
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    dims = (
        (tuple(numbers.lhs_contracting_dimensions), tuple(numbers.rhs_contracting_dimensions)),
        (tuple(numbers.lhs_batching_dimensions), tuple(numbers.rhs_batching_dimensions)),
    )
    if op.has("algorithm"):
        raise Unreadable("an algorithm for a product")
    return lax.dot_general(x, y, dims, precision=_precision(op), preferred_element_type=_preferred(op, x, y))


def dot(op: Op, x: Any, y: Any) -> Any:
    dims = (((np.ndim(x) - 1,), (0,)), ((), ()))
    return lax.dot_general(x, y, dims, precision=_precision(op), preferred_element_type=_preferred(op, x, y))


def _preferred(op: Op, x: Any, y: Any) -> Any:
    return None if x.dtype == y.dtype == op.aval.dtype else op.aval.dtype


def _precision(op: Op) -> Any:
    """The precision that is asked for; None where none is."""
    words = [word(item) for item in op.attributes.get("precision_config", ())]
    return tuple(lax.Precision[name] for name in words) if any(name != "DEFAULT" for name in words) else None


def convolution(op: Op, x: Any, kernel: Any, *padding: Any) -> Any:
    """Of dynamic convolutions, too, whose padding is a constant."""
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    spatial = tuple(numbers.kernel_spatial_dimensions)
    flipped = [axis for axis, turned in zip(spatial, op.integers("window_reversal", (0,) * len(spatial)), strict=True) if turned]
    ones = (1,) * len(spatial)
    dims = lax.ConvDimensionNumbers(
        (numbers.input_batch_dimension, numbers.input_feature_dimension, *numbers.input_spatial_dimensions),
        (numbers.kernel_output_feature_dimension, numbers.kernel_input_feature_dimension, *spatial),
        (numbers.output_batch_dimension, numbers.output_feature_dimension, *numbers.output_spatial_dimensions),
    )
    return lax.conv_general_dilated(
        x,
        lax.rev(kernel, flipped) if flipped else kernel,
        op.integers("window_strides", ones),
        [(int(low), int(high)) for low, high in op.numbers(2)] if padding else op.pairs("padding", len(spatial)),
        lhs_dilation=op.integers("lhs_dilation", ones),
        rhs_dilation=op.integers("rhs_dilation", ones),
        dimension_numbers=dims,
        feature_group_count=op.value("feature_group_count"),
        batch_group_count=op.value("batch_group_count"),
        precision=_precision(op),
        preferred_element_type=_preferred(op, x, kernel),
    )


def triangular_solve(op: Op, a: Any, b: Any) -> Any:
    transpose = op.word("transpose_a")
    return lax.linalg.triangular_solve(
        a,
        b,
        left_side=op.value("left_side"),
        lower=op.value("lower"),
        transpose_a=transpose in ("TRANSPOSE", "ADJOINT"),
        conjugate_a=transpose == "ADJOINT",
        unit_diagonal=op.value("unit_diagonal"),
    )


def cholesky(op: Op, x: Any) -> Any:
    if op.value("lower", False):
        return lax.linalg.cholesky(x, symmetrize_input=False)
    axes = (*range(np.ndim(x) - 2), np.ndim(x) - 1, np.ndim(x) - 2)
    lower = lax.linalg.cholesky(jnp.conj(lax.transpose(x, axes)), symmetrize_input=False)
    return jnp.conj(lax.transpose(lower, axes))


def fft(op: Op, x: Any) -> Any:
    return lax.fft(x, op.word("fft_type"), op.integers("fft_length"))


def rng_bit_generator(op: Op, state: Any) -> Any:
    algorithm = op.word("rng_algorithm")
    _, bits = op.avals
    kinds = {"DEFAULT": "RNG_DEFAULT", "THREE_FRY": "RNG_THREE_FRY", "PHILOX": "RNG_PHILOX"}
    return list(lax.rng_bit_generator(state, bits.shape, bits.dtype, algorithm=getattr(lax.RandomAlgorithm, kinds[algorithm])))


def top_k(op: Op, x: Any) -> Any:
    return list(lax.top_k(x, op.value("k")))


FOLDS: dict[str, Row] = {
    "chlo.top_k": top_k,
    "stablehlo.cholesky": cholesky,
    "stablehlo.convolution": convolution,
    "stablehlo.dynamic_conv": convolution,
    "stablehlo.dot": dot,
    "stablehlo.dot_general": dot_general,
    "stablehlo.fft": fft,
    "stablehlo.reduce": reduce,
    "stablehlo.reduce_window": reduce_window,
    "stablehlo.rng_bit_generator": rng_bit_generator,
    "stablehlo.select_and_scatter": select_and_scatter,
    "stablehlo.sort": sort,
    "stablehlo.triangular_solve": triangular_solve,
}
