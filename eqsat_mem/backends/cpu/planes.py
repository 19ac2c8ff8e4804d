"""Convolutions along three axes as convolutions along two, which emitted programs carry with them as source.

XLA:CPU leaves those along three axes to Eigen, which takes 4 to 30 times as long as the library of those along two, and 30 to 400 times
where elements of an operand lie apart. Measured: benchmarks/calibration/convolution.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eqsat_mem.backends.cpu.convolutions import copied_elements
from eqsat_mem.ir.ops import feature_groups
from eqsat_mem.ir.ops.blocks import Params, Shapes


def convolved_by_planes(
    x: Any,
    kernel: Any,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dimension_numbers: Any,
    lhs_dilation: Sequence[int] = (1, 1, 1),
    rhs_dilation: Sequence[int] = (1, 1, 1),
    **options: Any,
) -> Any:
    """``lax.conv_general_dilated`` of ``NDHWC`` and ``DHWIO``, one plane of the result after the other.

    The planes of ``x`` that are read for one stand side by side, as its features. Where those of ``x`` lie apart, planes of the result that
    are as far apart meet the same planes of the kernel: there is a loop for each set of these.
    """
    low, stride, apart, gap = padding[0][0], window_strides[0], lhs_dilation[0], rhs_dilation[0]

    def whole() -> Any:
        return lax.conv_general_dilated(x, kernel, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, **options)

    def as_features(planes: Any, axis: int, to: int) -> Any:
        beside = jnp.moveaxis(planes, axis, to)
        return beside.reshape(*beside.shape[:to], beside.shape[to] * beside.shape[to + 1], *beside.shape[to + 2 :])

    def planes_from(first: int, result: Any) -> Any:
        met = (low - first) % apart
        taps = kernel[met::apart]
        if not taps.shape[0]:
            return result
        turns, reach = -(-(result.shape[1] - first) // apart), (taps.shape[0] - 1) * gap + 1
        before = (low - first - met) // apart
        after = (turns - 1) * stride + reach - before - x.shape[1]
        padded = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (before, after, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0)))
        flat = as_features(taps, 0, 2)

        def plane(turn: Any, result: Any) -> Any:
            read = as_features(lax.dynamic_slice_in_dim(padded, turn * stride, reach, 1)[:, ::gap], 1, 3)
            numbers, sides = ("NHWC", "HWIO", "NHWC"), (window_strides[1:], padding[1:], lhs_dilation[1:], rhs_dilation[1:])
            made = lax.conv_general_dilated(read, flat, *sides, numbers, **options)
            return lax.dynamic_update_slice_in_dim(result, made[:, None], turn * apart + first, 1)

        return lax.fori_loop(0, turns, plane, result)

    made = jax.eval_shape(whole)
    result = jnp.zeros(made.shape, made.dtype)
    for first in range(min(apart, made.shape[1])):
        result = planes_from(first, result)
    return result


def is_by_planes(ins: Shapes, params: Params) -> bool:
    """Whether emitted source has a convolution plane by plane: one along three axes, of more than single elements, without groups."""
    window = [ins[1][a] for a in params["dimension_numbers"][1][2:]]
    if len(window) != 3 or max(feature_groups(ins, params), params["batch_group_count"]) > 1:
        return False
    (stride, *_), apart, (gap, *_) = params["window_strides"], params["lhs_dilation"], params["rhs_dilation"]
    return math.prod(window) * math.prod(apart) > 1 and (apart[0] == 1 or stride == gap == 1)


def one_plane(ins: Shapes, outs: Shapes, params: Params) -> tuple[Shapes, Shapes, Params]:
    """The operands, results and parameters of the convolution of one plane of the result."""
    data, kernel, result = params["dimension_numbers"]
    planes = math.ceil(ins[1][kernel[2]] / params["lhs_dilation"][0])
    features = planes * ins[0][data[1]]
    operand = (ins[0][data[0]], features, *(ins[0][a] for a in data[3:]))
    window = (ins[1][kernel[0]], features, *(ins[1][a] for a in kernel[3:]))
    made = (outs[0][result[0]], outs[0][result[1]], *(outs[0][a] for a in result[3:]))
    along = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    flat = {**params, **{name: params[name][1:] for name in along}, "dimension_numbers": ((0, 1, 2, 3),) * 3}
    return (operand, window), (made,), flat


def held_elements(ins: Shapes, outs: Shapes, params: Params) -> float:
    """The elements that a convolution as emitted holds besides its operands and its result.

    Plane by plane they are the padded operand, the planes read for one of the result and what the library copies of them, the kernel in
    another order, and the plane.
    """
    if not is_by_planes(ins, params):
        return copied_elements(ins, outs, params)
    data = params["dimension_numbers"][0]
    (read, kernel), (made,), _ = flat = one_plane(ins, outs, params)
    padding, planes = sum(params["padding"][0]), ins[0][data[2]]
    padded = math.prod(ins[0]) // max(planes, 1) * max(planes + padding, 0) if padding else 0
    return padded + math.prod(read) + math.prod(kernel) + math.prod(made) + copied_elements(*flat)
