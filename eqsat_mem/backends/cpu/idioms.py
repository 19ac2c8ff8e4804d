"""The idioms of source emitted for XLA:CPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from eqsat_mem.backends.cpu.fusion import ends, held_once, lone_operands, repeated_apart
from eqsat_mem.backends.cpu.kernel_library import NARROW
from eqsat_mem.backends.cpu.planes import convolved_by_planes, is_by_planes
from eqsat_mem.backends.cpu.top_k import block_length, in_order, top_k_by_blocks
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Fold, Program
from eqsat_mem.ir.loop_tree import Seq
from eqsat_mem.ir.ops import BLOCKS, Shapes
from eqsat_mem.schedule.fusion import Fused
from eqsat_mem.schedule.idioms import BlockSource, Idioms
from eqsat_mem.schedule.weights import Params


@dataclass(frozen=True)
class CpuIdioms(Idioms):
    """Idioms that keep XLA:CPU's libraries from allocating hidden memory, and let them read operands in their own layout.

    Attributes:
        keeps_apart: whether the kept operands of folds stay out of the kernel library's fusion.
        keeps_bits: whether contractions keep the order of their operands, triangular solves their side, and convolutions their axes,
            because libraries may add products in another order otherwise.
    """

    keeps_apart: bool = True
    keeps_bits: bool = False

    reads_slices_one_way: ClassVar[bool] = True
    """True: a kernel computes one slice that it reads in two ways (``x[:, None] - x[:, :, None]``) without vectors, in 5 times the time."""
    keeps_pieces_apart: ClassVar[bool] = True
    """True: of a Sinkhorn divergence's gradient for 1,500 points, pieces of two loops hold 1.6 MB where 0.4 were predicted."""
    compiles_equal_kernels_once: ClassVar[bool] = True
    """True: of 864 updates of arrays, 24 of them different, those 24 are compiled, in 0.6 s; all of them take 5."""
    sums_lone_axes: ClassVar[bool] = True
    """True: the kernel library holds five times the bytes of the products that it sums if an axis that is not summed has extent one."""

    def sums_wide(self, fold: Fold) -> bool:
        """Return whether a sum is of narrow numbers: XLA:CPU rounds each addition, but contracts in float32 what rules make sums of."""
        return not self.keeps_bits and fold.monoid == "add" and str(fold.dtype) in NARROW

    def fences(
        self, ex: Extraction, seq: Seq, fused: Fused, rescaled: Collection[int], is_cheap: Callable[[Program, int], bool]
    ) -> Mapping[int, str]:
        """Return the values after which the kernel library would continue its fusion, with an identity that it does not support.

        Sums that a loop rescales are among them, because the library would multiply inside its fold, and values that must keep their
        bits, of which the library would compute other ones than XLA's kernels.
        """
        exact = ex.exact.intersection(s for s in seq.steps if isinstance(s, int)) - held_once(ex, fused, is_cheap)
        folds = {t for t in rescaled if isinstance(ex.program.terms[t], Fold) and not ex.rescales[t].extreme}
        found = exact | ends(ex, seq, fused) | folds | (lone_operands(ex, fused, seq.outs) if self.keeps_apart else frozenset())
        inner = super().fences(ex, seq, fused, rescaled, is_cheap)
        return dict(inner) | {t: _identity(ex.program.terms[t].dtype, inner.get(t, "{0}")) for t in found}

    def repeated_apart(self, ex: Extraction, fused: Fused) -> Mapping[tuple[int, int], int]:
        return repeated_apart(ex, fused)

    def slice(self, array: str, start: str, size: str, axis: int, dtype: Any, turned: bool) -> str:
        """Return a slice, behind a barrier for bfloat16: XLA:CPU would otherwise hoist the widening of the whole array out of the loop."""
        operands = f"{array}, {start}"
        if str(dtype) == "bfloat16":
            operands = f"*lax.optimization_barrier(({operands}))"
        return f"lax.dynamic_slice_in_dim({operands}, {size}, {axis})"

    def swaps_operands(self, contracted_last: bool, rows: int, columns: int, depth: int) -> bool:
        """Whether the left operand, the largest array, would be copied so that the contracted axis is last.

        As the right operand it is read without a copy. The axes of the result are then exchanged, and it is smaller to transpose.
        """
        return not self.keeps_bits and not contracted_last and columns < rows and columns <= depth

    def block(self, name: str) -> BlockSource:
        return (_KEEPING_BITS if self.keeps_bits else _BLOCKS).get(name, BlockSource())


def _identity(dtype: Any, text: str) -> str:
    bits_of = jnp.finfo(dtype)
    return f"lax.reduce_precision({text}, {bits_of.nexp}, {bits_of.nmant})"


def _solve_in_order(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    """Return source of ``A^-1 B`` as the transpose of ``B^T A^-T``, and of ``B A^-1`` as the transpose of ``A^-T B^T``.

    LAPACK stores matrices by columns, so a row-major array of ``B`` is ``B^T`` to it. To pass ``B``, XLA:CPU would write it element by
    element with a stride. It would read the result with a stride too without the barrier: XLA moves transposes through elementwise
    operations into contractions, which then read columns from rows.
    """
    flipped = {**params, "left_side": not params["left_side"], "transpose_a": not params["transpose_a"]}
    solved = BLOCKS["triangular_solve"].text(flipped, [args[0], f"jnp.swapaxes({args[1]}, -1, -2)"], ins)
    return None if solved is None else f"lax.optimization_barrier(jnp.swapaxes({solved}, -1, -2))"


def _top_k(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    """Return source of a selection by blocks if it is along the last axis, else the operation table's source."""
    if params["axis"] not in (-1, len(ins[0]) - 1):
        return BLOCKS["top_k"].text(params, args, ins)
    return f"top_k_by_blocks({args[0]}, {params['k']})"


def _convolution(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    """Return source of a convolution in the only layout that the library takes: features last, in the kernel those of the result.

    XLA:CPU transposes the operands of others itself, but not in loops, where they run some twenty times as long.
    """
    numbers, rank = params["dimension_numbers"], len(ins[0])
    spatial = tuple(range(1, rank - 1))
    images, kernel = (0, rank - 1, *spatial), (rank - 1, rank - 2, *range(rank - 2))
    alike = {**params, "dimension_numbers": type(numbers)(images, kernel, images)}
    (n, c, *places), (o, i, *window), (results_n, results_c, *results_places) = numbers
    given = [_transposed(args[0], [n, *places, c]), _transposed(args[1], [*window, i, o])]
    text = BLOCKS["conv_general_dilated"].text(alike, given, ins) if len(spatial) in (1, 2, 3) else None
    order = [results_n, *results_places, results_c]
    return None if text is None else _transposed(text, [order.index(axis) for axis in range(rank)])


def _by_planes(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    """Return source of a convolution along three axes plane by plane, and of others as a whole."""
    text = _convolution(params, args, ins)
    if text is None or not is_by_planes(ins, params):
        return text
    return text.replace("lax.conv_general_dilated(", "convolved_by_planes(", 1)


def _transposed(text: str, axes: Sequence[int]) -> str:
    return text if list(axes) == sorted(axes) else f"jnp.transpose({text}, {tuple(map(int, axes))})"


_KEEPING_BITS = {
    "conv_general_dilated": BlockSource(_convolution),
    "top_k": BlockSource(_top_k, helpers=(block_length, in_order, top_k_by_blocks)),
}
_BLOCKS = {
    **_KEEPING_BITS,
    "conv_general_dilated": BlockSource(_by_planes, helpers=(convolved_by_planes,)),
    "triangular_solve": BlockSource(in_order=_solve_in_order),
}
