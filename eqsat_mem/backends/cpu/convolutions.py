"""The memory that convolutions of XLA:CPU allocate and XLA does not report."""

from __future__ import annotations

import math
from collections.abc import Mapping

from eqsat_mem.backends import hlo
from eqsat_mem.backends.cpu.hidden_scratch import library_computations
from eqsat_mem.backends.hlo import Instruction, Module

# Growth of resident memory in the first run, on 2 cores, jax 0.10, in MiB without the result; benchmarks/calibration/convolutions.py.
# The kernel library copies a padded operand with its padding, and the kernel; without padding, it copies what each window covers.
#
#   32 x 64 x 64 x 64, window 3 x 3, 64 results, padded         34 = 32 with padding; 36 where the window has gaps, 33 with a stride of 2
#   the same without padding; with a stride of 2                270 = 9 * 30; 72 = 9 * 8
#   the same in 4 groups, padded                                322 = 34 + 9 * 32; as many groups as features: 34
#   window 1 x 1                                                32
#   the gradient of the kernel, of 8 and 8, 32 and 8 MiB        16.5, 42
#   16 x 14 x 14 x 512, 3 x 3, 512 results; four times as many  25 = 2 * 8 + 9, where the kernel is 9; 73 = 2 * 32 + 9
#   16 x 56 x 56 x 128, 3 x 3, 128 results                      53 = 2 * 26 + 0.6
#
# Eigen, which has those of few features, copies nothing but the operand of convolutions over three axes, or in groups, and what windows
# cover of one whose elements lie apart (transposed convolutions): 72 = 9 * 8.

COPIED_ONCE = 64
"""The most features of which the kernel library was observed to make one copy with padding: benchmarks/calibration/convolutions.py."""


def convolution_bytes(module: Module) -> int:
    """The most bytes that one convolution of a program allocates: they run one at a time."""
    library = set(library_computations(module))
    found = ((i, body, name in library) for name, body in module.computations.items() for i in body.values() if i.op == "convolution")
    return max((_in_library(i, body) if inside else _by_itself(i, body) for i, body, inside in found), default=0)


def _in_library(conv: Instruction, body: Mapping[str, Instruction]) -> int:
    operand, kernel = (body[name] for name in conv.operands)
    (groups,) = conv.axes("feature_group_count") or (1,)
    results = kernel.shape[conv.axes("dim_labels")[0]]
    features = groups * math.prod(kernel.shape) // max(results * _taps(conv), 1)
    covered = math.prod(conv.shape) // max(results, 1) * _taps(conv) * features * hlo.itemsize(operand.type)
    if not any(low or high or apart > 1 for _, low, high, apart in _window(conv)):
        return covered
    copies = 2 if features > COPIED_ONCE else 1
    return copies * _padded(conv, operand) + kernel.nbytes + (covered if 1 < groups < features else 0)


def _by_itself(conv: Instruction, body: Mapping[str, Instruction]) -> int:
    operand = body[conv.operands[0]]
    if any(apart > 1 for *_, apart in _window(conv)):
        return _taps(conv) * operand.nbytes
    return operand.nbytes if conv.axes("feature_group_count") or len(_window(conv)) > 2 else 0


def _window(conv: Instruction) -> list[tuple[int, ...]]:
    """Of each axis: the size of the window, the padding before and behind, and how far apart the elements of the operand lie."""
    numbers = conv.axes("window")
    return [numbers[at : at + 4] for at in range(0, len(numbers), 4)]


def _taps(conv: Instruction) -> int:
    return math.prod(size for size, *_ in _window(conv))


def _padded(conv: Instruction, operand: Instruction) -> int:
    """The bytes of the operand with its padding."""
    extents = list(operand.shape)
    for axis, (_, low, high, apart) in zip(conv.axes("dim_labels")[1:], _window(conv), strict=True):
        extents[axis] = max((extents[axis] - 1) * apart + 1 + low + high, 0)
    return math.prod(extents) * hlo.itemsize(operand.type)
