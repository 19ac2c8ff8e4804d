"""How source is written for a compiler."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir.loop_tree import Seq
from eqsat_mem.ir.ops.blocks import Text

if TYPE_CHECKING:
    from eqsat_mem.schedule.fusion import Fused


@dataclass(frozen=True)
class BlockSource:
    """Source of a block operation that replaces the operation table's.

    Attributes:
        text: as :attr:`eqsat_mem.ir.ops.BlockOp.text`; None keeps the table's.
        in_order: replaces ``text`` where operands have the axes of the call in its order already, none of extent one.
        helpers: functions that the source may call, which the emitted program then defines.
    """

    text: Text | None = None
    in_order: Text | None = None
    helpers: tuple[Callable[..., Any], ...] = ()


class Idioms:
    """How emitted source is written for a compiler. The base writes every operation as JAX spells it."""

    sums_lone_axes: ClassVar[bool] = False
    """Whether sums also fold axes of extent one that stay, which are put back afterwards."""

    def fenced(self, ex: Extraction, seq: Seq, fused: Fused, rescaled: Collection[int]) -> frozenset[int]:
        """The values of a region behind which the compiler must not continue a fusion; ``rescaled`` are combined in a loop."""
        return frozenset()

    def fence(self, text: str, dtype: Any) -> str:
        """A value, so written that all its readers get the same bits and no fusion continues behind it."""
        return text

    def turned(self, ex: Extraction) -> frozenset[int]:
        """The values that the compiler would bring into another order of axes for operations that read them, whole, ahead of loops."""
        return frozenset()

    def slice(self, array: str, start: str, size: str, axis: int, dtype: Any, turned: bool) -> str:
        """A chunk of an array that a loop reads; ``turned`` says whether it is read in another order of axes than it is stored in."""
        return f"lax.dynamic_slice_in_dim({array}, {start}, {size}, {axis})"

    def swaps_operands(self, contracted_last: bool, rows: int, columns: int, depth: int) -> bool:
        """Whether a contraction of ``rows`` x ``depth`` by ``depth`` x ``columns`` is written with its operands exchanged.

        ``contracted_last`` says whether the left operand has the contracted axis last.
        """
        return False

    def block(self, name: str) -> BlockSource:
        """What replaces the operation table's source of a primitive."""
        return BlockSource()
