"""The memory that convolutions of XLA:CPU allocate and XLA does not report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from eqsat_mem.backends import hlo
from eqsat_mem.backends.cpu.hidden_scratch import library_computations
from eqsat_mem.backends.hlo import Instruction, Module
from eqsat_mem.ir.ops import BatchGroups, feature_groups
from eqsat_mem.ir.ops.blocks import Params, Shape, Shapes

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

FEW_FEATURES = 16
"""A convolution along two dimensions with more features than this, in or out, is passed to the kernel library, others to Eigen. Observed
from 1 to 128 features of each; in benchmarks/calibration/convolution.py elements cost less beyond."""
COPIED_ONCE = 64
"""The most features of which the kernel library was observed to make one copy with padding: benchmarks/calibration/convolutions.py."""


def is_librarys(axes: int, features: int, results: int) -> bool:
    """Whether a convolution along so many axes, with so many features in and out, is passed to the kernel library."""
    return axes == 2 and max(features, results) > FEW_FEATURES


@dataclass(frozen=True)
class Copied:
    """The sizes of a convolution on which it depends how much its library copies: shapes, the axes of the operand along which windows move,
    and of each of these the size of the window, the padding before and behind, and how far apart the elements of the operand lie."""

    operand: Shape
    kernel: Shape
    result: Shape
    results: int
    moved: tuple[int, ...]
    window: tuple[tuple[int, ...], ...]
    groups: int

    @property
    def features(self) -> int:
        return self.groups * math.prod(self.kernel) // max(self.results * self._taps, 1)

    def in_library(self) -> int:
        """The elements that the kernel library copies."""
        covered = math.prod(self.result) // max(self.results, 1) * self._taps * self.features
        if not any(low or high or apart > 1 for _, low, high, apart in self.window):
            return covered
        copies = 2 if self.features > COPIED_ONCE else 1
        return copies * self._padded + math.prod(self.kernel) + (covered if 1 < self.groups < self.features else 0)

    def by_itself(self) -> int:
        """The elements that Eigen copies."""
        if any(apart > 1 for *_, apart in self.window):
            return self._taps * math.prod(self.operand)
        return math.prod(self.operand) if self.groups > 1 or len(self.window) > 2 else 0

    @property
    def _taps(self) -> int:
        return math.prod(size for size, *_ in self.window)

    @property
    def _padded(self) -> int:
        """The elements of the operand with its padding."""
        extents = list(self.operand)
        for axis, (_, low, high, apart) in zip(self.moved, self.window, strict=True):
            extents[axis] = max((extents[axis] - 1) * apart + 1 + low + high, 0)
        return math.prod(extents)


def copied_elements(ins: Shapes, outs: Shapes, params: Params) -> float:
    """The elements of the operand that a convolution of a program copies, in the library that XLA will choose.

    With a kernel that is larger than the operand, as in gradients of gradients, XLA exchanges the roles and leaves it to Eigen.
    """
    (batch, _, *moved), (results, _, *windows), _ = params["dimension_numbers"]
    operand, kernel, groups = *ins, feature_groups(ins, params)
    taps = [kernel[a] for a in windows]
    if groups == 1 and math.prod(taps) > math.prod(operand[a] for a in moved):
        window = tuple((operand[a], 0, 0, gap) for a, gap in zip(moved, params["rhs_dilation"], strict=True))
        return Copied(kernel, operand, outs[0], operand[batch], tuple(windows), window, groups).by_itself()
    window = tuple((n, *pad, apart) for n, pad, apart in zip(taps, params["padding"], params["lhs_dilation"], strict=True))
    copied = Copied(operand, kernel, outs[0], kernel[results], tuple(moved), window, groups)
    if max(params["lhs_dilation"], default=1) == 1 and is_librarys(len(window), copied.features, copied.results):
        return copied.in_library()
    return copied.by_itself()


def copied_as_written(ins: Shapes, outs: Shapes, params: Params) -> float:
    """The elements that a convolution of a program as written copies: both operands, where it has groups of its batch."""
    in_groups_of_batch = isinstance(params["feature_group_count"], BatchGroups)
    return float(sum(map(math.prod, ins))) if in_groups_of_batch else copied_elements(ins, outs, params)


def convolution_bytes(module: Module) -> int:
    """The most bytes that one convolution of a program allocates: they run one at a time."""
    library = set(library_computations(module))
    found = ((i, body, name in library) for name, body in module.computations.items() for i in body.values() if i.op == "convolution")
    return max((_bytes(i, body, inside) for i, body, inside in found), default=0)


def _bytes(conv: Instruction, body: Mapping[str, Instruction], in_library: bool) -> int:
    operand, kernel = (body[name] for name in conv.operands)
    (groups,), numbers = conv.axes("feature_group_count") or (1,), conv.axes("window")
    window = tuple(tuple(numbers[at : at + 4]) for at in range(0, len(numbers), 4))
    results, *moved = conv.axes("dim_labels")
    sizes = Copied(operand.shape, kernel.shape, conv.shape, kernel.shape[results], tuple(moved), window, groups)
    copied = sizes.in_library() if in_library else sizes.by_itself()
    return copied * hlo.itemsize(operand.type)
