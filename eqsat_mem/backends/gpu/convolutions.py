"""Copies that convolutions hold besides operands and result: cuDNN computes them channels last, with as much padding before as behind.

Arrays that a program is given or returns channels first are copied; those that it computes lie as convolutions want them. An operand with
other padding, or with holes between its elements, is copied with it; the gradient with respect to an operand with such padding is cut out
of a larger array. Both read from programs compiled for an H100: docs/xla-gpu.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from eqsat_mem.ir import Block, Map, Program
from eqsat_mem.ir.ops import feature_groups

CONVOLUTION = "conv_general_dilated"


def convolution_bytes(program: Program, t: int, size: Callable[[int], int]) -> int:
    """Bytes of copies of operands and result, without the scratch of cuDNN, which nothing tells."""
    term = program.terms[t]
    assert isinstance(term, Block)
    params, (operand, kernel) = term.call.params, term.args
    layout, is_returned = params["dimension_numbers"], any(o.term == t for o in program.outputs)
    if layout.lhs_spec[0] > layout.lhs_spec[1] and feature_groups([program.shape(axes) for axes in term.call.in_axes], params) > 1:
        # kernels' gradients in groups are convolutions of copies of both operands, and are returned with groups elsewhere
        return size(operand) + size(kernel) + (size(t) if is_returned else 0)
    made, longer = size(t), _longer(program.shape(term.call.in_axes[0]), params)
    is_gradient = longer > 1 and max(params["lhs_dilation"], default=1) > 1 and _is_reversed(program, kernel)
    swaps = layout.lhs_spec[0] == len(layout.lhs_spec) - 1 and max(params["window_strides"], default=1) > 1  # no form of cuDNN's gradients
    result = 0.0
    if is_gradient and _is_uneven(params):
        result = made * _cut_from(program.shape(term.call.out_axes[0]), params)
    elif _is_channels_first(layout.out_spec) and is_returned:
        result = made
    read = 0.0
    if longer > 1 and not is_gradient:
        read = size(operand) * longer
    elif (swaps or _is_channels_first(layout.lhs_spec)) and _lies_as_given(program, operand):
        read = size(operand)
    turned = size(kernel)
    if not ((swaps or _is_channels_first(layout.rhs_spec)) and _lies_as_given(program, kernel)):
        turned = min(turned, made)
    in_place = result > 0 and read <= made  # of the result, which is written last
    return int(result + turned + (0 if in_place else read))


def _is_uneven(params: Any) -> bool:
    return any(low != high or low < 0 for low, high in params["padding"])


def _longer(shape: Sequence[int], params: Any) -> float:
    """The factor by which padding and holes that cuDNN does not know lengthen the operand; 1 where it needs none."""
    if max(params["lhs_dilation"], default=1) == 1 and not _is_uneven(params):
        return 1.0
    extents = [shape[axis] for axis in params["dimension_numbers"].lhs_spec[2:]]
    rows = zip(extents, params["lhs_dilation"], params["padding"])
    return math.prod(((n - 1) * gap + 1 + max(low, 0) + max(high, 0)) / max(n, 1) for n, gap, (low, high) in rows)


def _cut_from(shape: Sequence[int], params: Any) -> float:
    """The size of the array that a gradient is cut out of, over that of the gradient."""
    extents = [shape[axis] for axis in params["dimension_numbers"].out_spec[2:]]
    return math.prod((n + abs(high - low)) / max(n, 1) for n, (low, high) in zip(extents, params["padding"]))


def _is_channels_first(axes: Sequence[int]) -> bool:
    """Whether the last axis of an array is one along which windows move."""
    return len(axes) - 1 in axes[2:]


def _is_reversed(program: Program, kernel: int) -> bool:
    term = program.terms[kernel]
    return isinstance(term, Block) and term.call.prim.name == "rev"


def _lies_as_given(program: Program, t: int) -> bool:
    """Whether an array is not computed for a convolution: an argument, a result, or one made by something else that has its own order."""
    term = program.terms[t]
    is_made = isinstance(term, Map) or (isinstance(term, Block) and term.call.prim.name == CONVOLUTION)
    return not is_made or any(o.term == t for o in program.outputs)
