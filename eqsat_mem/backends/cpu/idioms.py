"""How source is written for XLA:CPU."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from eqsat_mem.backends.cpu.fusion import ends
from eqsat_mem.backends.cpu.top_k import block_length, top_k_by_blocks
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Fold
from eqsat_mem.ir.loop_tree import Seq
from eqsat_mem.ir.ops import BLOCKS, Shapes
from eqsat_mem.schedule.fusion import Fused
from eqsat_mem.schedule.idioms import BlockSource, Idioms
from eqsat_mem.schedule.weights import Params


@dataclass(frozen=True)
class CpuIdioms(Idioms):
    """Idioms that keep XLA:CPU's libraries from taking hidden memory, and let them read operands as they stand.

    With ``keeps_bits`` contractions keep the order of their operands, and triangular solves their side: exchanged, libraries may add
    products in another order.
    """

    keeps_bits: bool = False

    sums_lone_axes: ClassVar[bool] = True
    """The kernel library holds five times the products that it sums if an axis that stays has extent one."""

    def fenced(self, ex: Extraction, seq: Seq, fused: Fused, rescaled: Collection[int]) -> frozenset[int]:
        """Values behind which the kernel library would continue its fusion.

        Sums that a loop rescales are among them, since the library would multiply inside its fold.
        """
        folds = {t for t in rescaled if isinstance(ex.program.terms[t], Fold) and not ex.rescales[t].extreme}
        return ends(ex, seq, fused) | folds

    def fence(self, text: str, dtype: Any) -> str:
        """An identity that the kernel library does not know: its fusion ends here, and all readers get the same bits."""
        bits_of = jnp.finfo(dtype)
        return f"lax.reduce_precision({text}, {bits_of.nexp}, {bits_of.nmant})"

    def slice(self, array: str, start: str, size: str, axis: int, dtype: Any, turned: bool) -> str:
        """Behind a barrier for bfloat16: XLA:CPU would widen the whole array ahead of the loop."""
        operands = f"{array}, {start}"
        if str(dtype) == "bfloat16":
            operands = f"*lax.optimization_barrier(({operands}))"
        return f"lax.dynamic_slice_in_dim({operands}, {size}, {axis})"

    def swaps_operands(self, contracted_last: bool, rows: int, columns: int, depth: int) -> bool:
        """Whether the left operand, the largest array, would be copied so that the contracted axis is last.

        As the right operand it is read as it stands. The result then has its axes exchanged; it is smaller to transpose.
        """
        return not self.keeps_bits and not contracted_last and columns < rows and columns <= depth

    def block(self, name: str) -> BlockSource:
        return BlockSource() if self.keeps_bits and name in _REORDERED else _BLOCKS.get(name, BlockSource())


def _solve_in_order(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    """``A^-1 B`` as the transpose of ``B^T A^-T``, and ``B A^-1`` as that of ``A^-T B^T``.

    LAPACK stores columns, so it takes an array of the rows of ``B`` for ``B^T``. Asked for ``B``, XLA:CPU writes it with a
    stride, element by element. It would read the result so too, were that not a matrix of rows behind a barrier: transposes
    move through elementwise operations to contractions, which take them in, and then want columns in rows.
    """
    flipped = {**params, "left_side": not params["left_side"], "transpose_a": not params["transpose_a"]}
    solved = BLOCKS["triangular_solve"].text(flipped, [args[0], f"jnp.swapaxes({args[1]}, -1, -2)"], ins)
    return None if solved is None else f"lax.optimization_barrier(jnp.swapaxes({solved}, -1, -2))"


def _top_k(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    """By blocks along the last axis."""
    if params["axis"] not in (-1, len(ins[0]) - 1):
        return BLOCKS["top_k"].text(params, args, ins)
    return f"top_k_by_blocks({args[0]}, {params['k']})"


_BLOCKS = {
    "triangular_solve": BlockSource(in_order=_solve_in_order),
    "top_k": BlockSource(_top_k, helpers=(block_length, top_k_by_blocks)),
}

_REORDERED = frozenset({"triangular_solve"})
"""Operations whose replacement computes in another order, so that bits may change."""
