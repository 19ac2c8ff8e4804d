"""The idioms of emitted source that depend on the compiler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Fold, Program
from eqsat_mem.ir.loop_tree import Seq
from eqsat_mem.ir.ops.blocks import Text

if TYPE_CHECKING:
    from eqsat_mem.schedule.fusion import Fused


@dataclass(frozen=True)
class BlockSource:
    """A backend's source of a block operation, which replaces that of the operation table.

    Attributes:
        text: as :attr:`eqsat_mem.ir.ops.BlockOp.text`; None keeps the table's.
        in_order: replaces ``text`` if operands already have the axes of the call in its order, none of them of extent one.
        helpers: the functions that the source may call, which the emitted program then defines.
    """

    text: Text | None = None
    in_order: Text | None = None
    helpers: tuple[Callable[..., Any], ...] = ()


class Idioms:
    """The idioms of emitted source for a compiler. This base class writes every operation as plain JAX."""

    sums_lone_axes: ClassVar[bool] = False
    """Whether sums also fold the axes of extent one that their result has, which are restored afterwards."""
    reads_slices_one_way: ClassVar[bool] = False
    """Whether a slice is made anew for each way in which elementwise operations repeat it along other axes."""

    keeps_pieces_apart: ClassVar[bool] = False
    """Whether a piece that is no turn of its loop is a loop of its own, of one turn that the compiler does not know to be one: otherwise it
    merges what pieces of several loops have in common, moves it out of the loops around them, and holds it."""
    compiles_equal_kernels_once: ClassVar[bool] = False
    """Whether the time of compiling equal kernels grows with those that differ."""

    def sums_wide(self, fold: Fold) -> bool:
        """Return whether a sum of narrow floating-point numbers adds in float32, because the compiler would round each addition."""
        return False

    def fences(
        self, ex: Extraction, seq: Seq, fused: Fused, rescaled: Collection[int], is_cheap: Callable[[Program, int], bool]
    ) -> Mapping[int, str]:
        """Return the values of a region after which a fusion of the compiler must end, with source of an identity around each.

        Products are among them that would be contracted with an addition for some readers of its value, all of which need the same bits.

        Args:
            ex: the program.
            seq: the region.
            fused: the kernels of the region.
            rescaled: the folds of the region that the enclosing loop rescales when it combines them.
            is_cheap: whether the compiler computes a value again in every reader.
        """
        return {t: "jnp.where({0} == {0}, {0}, jnp.nan)" for t in seq.steps if isinstance(t, int) and t in ex.uncontracted}

    def repeated_apart(self, ex: Extraction, fused: Fused) -> Mapping[tuple[int, int], int]:
        """Return the reads (an elementwise operation, an operand) that are hidden from the compiler, each with its kernel: it would write
        out what several kernels repeat along the same axes."""
        return {}

    def turned(self, ex: Extraction) -> frozenset[int]:
        """Return the values of which the compiler would hoist a transposed copy of the whole array out of the loops that read them."""
        return frozenset()

    def slice(self, array: str, start: str, size: str, axis: int, dtype: Any, turned: bool) -> str:
        """Return source of the chunk of an array that a loop reads.

        Args:
            array: source of the array.
            start: source of the first position of the chunk.
            size: source of the number of positions.
            axis: the axis.
            dtype: the dtype of the array.
            turned: whether the array is read in another order of axes than it is stored in.
        """
        return f"lax.dynamic_slice_in_dim({array}, {start}, {size}, {axis})"

    def swaps_operands(self, contracted_last: bool, rows: int, columns: int, depth: int) -> bool:
        """Whether a contraction is written with its operands exchanged.

        Args:
            contracted_last: whether the left operand has the contracted axis last.
            rows: the extent of the left operand's own axes.
            columns: the extent of the right operand's own axes.
            depth: the extent of the contracted axes.
        """
        return False

    def block(self, name: str) -> BlockSource:
        """Return the source that replaces the operation table's for a primitive."""
        return BlockSource()
