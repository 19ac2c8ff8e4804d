"""Scratch of block operations that depends on dtypes: bytes that XLA:GPU and libraries hold beside operands and results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from eqsat_mem.backends.gpu import habits, workspaces
from eqsat_mem.backends.gpu.targets import Target
from eqsat_mem.ir import Call, itemsize
from eqsat_mem.ir.ops import Shapes

POSITION = 4
"""Bytes of a position along a row: read from compiled programs."""
Scratch = Callable[[Call, Shapes, Target], float]


def scratch_bytes(call: Call, ins: Shapes, target: Target) -> float | None:
    """The bytes of scratch of a call on operands of these shapes; None where a table of elements has them."""
    own = _SCRATCH.get(call.prim.name)
    return None if own is None else own(call, ins, target)


def operand_width(call: Call) -> int:
    """The bytes of an element of the first operand."""
    width = itemsize(call.out_dtypes[0])
    if call.prim.name != "fft":
        return width
    return {"RFFT": width // 2, "IRFFT": 2 * width}.get(_transform(call), width)


def is_sorted_for_top_k(call: Call, ins: Shapes) -> bool:
    """Whether a selection sorts whole rows."""
    return not habits.is_selected(call.params["k"], ins[0][-1], call.out_dtypes[0])


def _top_k(call: Call, ins: Shapes, target: Target) -> float:
    """Positions, which are sorted along, and the copies of CUB where it sorts."""
    if not is_sorted_for_top_k(call, ins):
        return 0.0
    width = operand_width(call) + POSITION
    copied = workspaces.SCRATCH_SHARE * width if workspaces.is_sorted_by_cub(ins[0], target) else 0.0
    return (POSITION + copied) * math.prod(ins[0])


def _sort(call: Call, ins: Shapes, target: Target) -> float:
    """Positions where the sort is stable, and the copies of CUB where it sorts: with two arrays of keys for floating-point numbers, which
    it sorts alone only."""
    taken = float(POSITION) if call.params["is_stable"] else 0.0
    widths = list(map(itemsize, call.out_dtypes))
    keys = widths[0] if getattr(call.out_dtypes[0], "kind", "V") not in "biu" else 0
    is_last = call.params["dimension"] == len(ins[0]) - 1
    if is_last and len(ins) <= (1 if keys else 2) and workspaces.is_sorted_by_cub(ins[0], target):
        taken += 2 * keys + workspaces.SCRATCH_SHARE * (sum(widths) + keys)
    return taken * math.prod(ins[0])


def _fft(call: Call, ins: Shapes, target: Target) -> float:
    """The scratch of cuFFT: see :func:`workspaces.transform_bytes`."""
    kind, lengths = _transform(call), call.params["fft_lengths"]
    width = itemsize(call.out_dtypes[0])
    last = lengths[-1] // 2 + 1 if kind == "RFFT" else lengths[-1]
    shape = *ins[0][: len(ins[0]) - len(lengths)], *lengths[:-1], last
    return workspaces.transform_bytes(2 * width if kind == "IRFFT" else width, shape, lengths)


def _transform(call: Call) -> str:
    kind = call.params["fft_type"]
    return str(getattr(kind, "name", kind))


def _select_and_scatter(call: Call, ins: Shapes, target: Target) -> float:
    """The selected values, and the position of each along each axis."""
    return (operand_width(call) + POSITION * len(ins[0])) * math.prod(ins[0])


_SCRATCH: Mapping[str, Scratch] = {
    "fft": _fft,
    "select_and_scatter_add": _select_and_scatter,
    "sort": _sort,
    "top_k": _top_k,
}
