"""Costs of operations on a GPU in machine instructions, the scratch that block operations take, and how many kernels they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from eqsat_mem.backends.gpu import measured, workspaces
from eqsat_mem.backends.gpu.call_scratch import is_sorted_for_top_k, operand_width, scratch_bytes
from eqsat_mem.backends.gpu.targets import Target
from eqsat_mem.backends.gpu.weights import estimate, weight
from eqsat_mem.ir import Call, Map, itemsize
from eqsat_mem.ir.ops import Shapes, operation_of
from eqsat_mem.schedule.weights import BLOCKS, ELEMENTWISE, WORKSPACES, Params, Weights


@dataclass(frozen=True)
class GpuWeights(Weights):
    """Costs counted in machine instructions of a card, by the width of numbers."""

    target: Target | None = None

    def of_map(self, term: Map) -> float:
        own = operation_of(dict(term.params)) if term.params else None
        if own is None and term.op == "integer_pow":
            return super().of_map(term) * (weight("mul", itemsize(term.dtype), self._card) or 1.0)
        counted = None if own is not None else weight(term.op, itemsize(term.dtype), self._card)
        return super().of_map(term) if counted is None else counted

    def estimated(self, term: Map) -> float:
        """The cost of an operation as XLA estimates it; one of the user's has the weight that the user gave it."""
        own = operation_of(dict(term.params)) if term.params else None
        return estimate(term.op) if own is None else self.of_map(term)

    def of_block(self, call: Call, ins: Shapes, outs: Shapes) -> float:
        if call.prim.name == "top_k" and is_sorted_for_top_k(call, ins):
            return measured.sorting(ins, outs, call.params)
        return super().of_block(call, ins, outs)

    def workspace(self, call: Call, ins: Shapes, outs: Shapes) -> float:
        taken = scratch_bytes(call, ins, self._card)
        return super().workspace(call, ins, outs) if taken is None else taken / operand_width(call)

    @property
    def _card(self) -> Target:
        assert self.target is not None, "weights of a GPU name their card"
        return self.target


def _solver(routine: str, copies: float) -> Callable[[Shapes, Shapes, Params], float]:
    """Copies of the matrix in columns, and the scratch of cuSOLVER's routine."""

    def elements(ins: Shapes, outs: Shapes, params: Params) -> float:
        k, n = sorted(ins[0][-2:])
        return copies * math.prod(ins[0]) + workspaces.SOLVERS[routine](k, n)

    return elements


JACOBI = 1024
"""Up to so many rows and columns cuSOLVER finds singular values by rotations, as JAX asks it to: read from compiled programs."""


def _singular_values(ins: Shapes, outs: Shapes, params: Params) -> float:
    """The matrix in columns, the scratch of the routine, and the vectors where they are not wanted: it computes them all the same."""
    k, n = sorted(ins[0][-2:])
    routine = "gesvdj" if n <= JACOBI else "gesvd"
    return _solver(routine, 1.0)(ins, outs, params) + (math.prod(ins[0]) + k**2 if len(outs) == 1 else 0.0)


def _extremes(ins: Shapes, outs: Shapes, params: Params) -> float:
    """The extremes beside their positions."""
    return float(math.prod(outs[0]))


_GPU_WORKSPACES: Mapping[str, Callable[[Shapes, Shapes, Params], float]] = {
    **WORKSPACES,
    "reduce": lambda ins, outs, params: float(sum(map(math.prod, outs[1:]))),
    "argmax": _extremes,
    "argmin": _extremes,
    "cholesky": _solver("potrf", 0.0),
    "lu": _solver("getrf", 0.0),
    "qr": _solver("geqrf", 1.0),
    "eigh": _solver("syevd", 1.0),
    "svd": _singular_values,
}
LIBRARY = 12
"""Kernels in a CUDA graph that take as long to launch as a routine of a library, which the host launches by itself: factorisations and
convolutions in loops, measured on an H100 (benchmarks/gpu_times.py)."""
LAUNCHES = {**dict.fromkeys((*measured.COLUMN_S, "conv_general_dilated"), LIBRARY), "fft": 6, "sort": 2}
"""Kernels that block operations take as long to launch as, if more than one; those of sorts are in benchmarks/gpu_model.py."""


@lru_cache(maxsize=64)
def weights_of(target: Target) -> GpuWeights:
    """The weights of a card, made once."""
    blocks = {
        **BLOCKS,
        **{name: measured.solver(name) for name in measured.COLUMN_S},
        "sort": measured.sorting,
        "top_k": measured.top_k(target),
        "conv_general_dilated": measured.convolution(target),
    }
    return GpuWeights(ELEMENTWISE, blocks, _GPU_WORKSPACES, target=target)
