"""The idioms of source emitted for XLA:GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eqsat_mem.backends.gpu import scratch
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Block
from eqsat_mem.schedule.idioms import Idioms

BY_COLUMNS = frozenset({"triangular_solve", "cholesky", "lu", "qr", "householder_product", "eigh", "svd"})
"""Operations whose libraries store matrices by columns."""


@dataclass(frozen=True)
class GpuIdioms(Idioms):
    """Idioms that keep XLA:GPU from copying whole arrays ahead of a loop.

    Attributes:
        gathers: whether all slices are gathered.
    """

    gathers: bool = False

    def turned(self, ex: Extraction) -> frozenset[int]:
        """The values that solvers read, which store matrices by columns, and all values that elementwise operations make them of."""
        terms, found = ex.program.terms, set[int]()
        solvers = (term for term in terms if isinstance(term, Block) and term.call.prim.name in BY_COLUMNS)
        waiting = [a for term in solvers for a in term.args]
        while waiting:
            t = waiting.pop()
            if t not in found:
                found.add(t)
                waiting += scratch.elementwise_operands(ex.program, t)
        return frozenset(found)

    def slice(self, array: str, start: str, size: str, axis: int, dtype: Any, turned: bool) -> str:
        """A gather where the chunk is read in another order of axes: XLA would bring the whole array into that order before the loop."""
        if not (turned or self.gathers):
            return super().slice(array, start, size, axis, dtype, turned)
        return f'jnp.take({array}, {start} + jnp.arange({size}), {axis}, mode="clip")'
