"""The table of operations: one row each, with meaning, roles of axes and JAX source.

``MAPS`` are elementwise, ``MONOIDS`` fold indices, ``BLOCKS`` bind some axes; any other primitive is opaque.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from eqsat_mem.ir import Axis, Call, Map, Params, mask_of
from eqsat_mem.ir.ops.augmented_dot import SUMMING, longer, parts_of, with_sums_p
from eqsat_mem.ir.ops.blocks import BlockOp, Group, Place, Selection, Shapes, Text, Window, parts_at
from eqsat_mem.ir.ops.collectives import COLLECTIVES
from eqsat_mem.ir.ops.control import CONTROL, OPAQUE, held_inside
from eqsat_mem.ir.ops.custom.monoid import Monoid
from eqsat_mem.ir.ops.custom.operation import USER, Operation, call_on, named_axes, operation_of
from eqsat_mem.ir.ops.elementwise import ALIASES, IDENTITIES, MAPS, MapOp, map_params, map_text, of_one_rank, value_text
from eqsat_mem.ir.ops.gathers import GATHERS
from eqsat_mem.ir.ops.linear_algebra import ALGEBRA, BatchGroups, feature_groups
from eqsat_mem.ir.ops.monoids import MONOIDS, REDUCTIONS, MonoidOp, accumulator, foldable
from eqsat_mem.ir.ops.online_rescaling import RESCALING
from eqsat_mem.ir.ops.ordering import ORDERING
from eqsat_mem.ir.ops.pieces import PIECES, Piece, pieces_p
from eqsat_mem.ir.ops.random import RANDOMS
from eqsat_mem.ir.ops.scatter_at import SCATTERS_AT, scatters_at
from eqsat_mem.ir.ops.shaping import SHAPING, is_first_operand
from eqsat_mem.ir.ops.slice_at import SLICES, shift_to_p, slice_at_p
from eqsat_mem.ir.ops.source_text import is_key, param_text, primitive_text

__all__ = [
    "ALIASES", "BLOCKS", "IDENTITIES", "MAPS", "MONOIDS", "REDUCTIONS", "RESCALING", "BatchGroups", "BlockOp", "Group", "MapOp", "Monoid",
    "MonoidOp", "Operation", "Piece", "Place", "Selection", "Shapes", "Text", "Window", "accumulator", "bind_call", "block_op",
    "block_text", "call_groups", "call_on", "call_params", "feature_groups", "foldable", "has_row", "held_inside", "is_elementwise",
    "is_first_operand", "is_key", "joins", "longer", "map_of", "map_params", "map_row", "map_text", "named_axes", "of_one_rank",
    "operation_of", "param_text", "parts_at", "parts_of", "picks", "pieces_p", "primitive_text", "result_axes", "scatters_at", "searched",
    "shift_to_p", "slice_at_p", "value_text", "with_sums_p",
]  # fmt: skip

_ROWS = [*SHAPING, *SLICES, PIECES, *GATHERS, *SCATTERS_AT, *ORDERING, *ALGEBRA, *RANDOMS, *CONTROL, *SUMMING, *USER, *COLLECTIVES]
BLOCKS: dict[str, BlockOp] = {row.name: row for row in _ROWS}


def is_elementwise(prim: Any, params: Mapping[str, Any]) -> bool:
    """Whether a primitive is a row of ``MAPS``, or an elementwise operation of the user's."""
    own = operation_of(params)
    return prim.name in MAPS or prim.name in ALIASES or (own is not None and own.elementwise)


def map_of(prim: Any, params: Mapping[str, Any]) -> tuple[str, Params]:
    """The operation of the ``Map`` term that an elementwise primitive becomes, and its parameters."""
    own = operation_of(params)
    if own is not None:
        return own.name, (("operation", own),)
    name = ALIASES.get(prim.name, prim.name)
    return name, map_params(name, params)


def result_axes(params: Mapping[str, Any], operand: int, rank: int) -> list[int]:
    """The axis of an elementwise result that each axis of an operand is."""
    mapped = params.get("mapped")
    return list(range(rank)) if mapped is None else [axis for axis, has in enumerate(mapped) if has[operand]]


def map_row(term: Map) -> MapOp:
    """The row of an elementwise operation."""
    own = operation_of(dict(term.params)) if term.params else None
    return MAPS[term.op] if own is None else own.row


def block_op(name: str) -> BlockOp:
    """The row of a primitive, or what holds for any."""
    return BLOCKS.get(name, OPAQUE)


def has_row(prim: Any, params: Mapping[str, Any]) -> bool:
    """Whether a primitive has a row in one of the tables, or is an operation of the user's."""
    return is_elementwise(prim, params) or prim.name in BLOCKS or prim.name in REDUCTIONS or operation_of(params) is not None


def picks(call: Call) -> bool:
    """Whether a call picks elements along the axis that it folds, as ``top_k`` does; other calls that fold combine by a monoid."""
    selection = block_op(call.prim.name).selection
    return selection is not None and selection.text is not None


def joins(call: Call) -> bool:
    """Whether results for chunks of what a call folds combine all together, as the two of ``top_k`` do, or else each on its own."""
    return bool(call.folds) and call.inside is None


def searched(call: Call) -> int:
    """The index, as a set, that a call binds and may be written out along, element by element; 0 if there is none."""
    if block_op(call.prim.name).written_out is None or any(len(axis) != 1 for axis in call.in_axes[0]):
        return 0
    bound = mask_of(axis[0] for axis in call.in_axes[0]) & ~call.pointwise
    return bound if bound.bit_count() == 1 else 0


def bind_call(call: Call, arrays: Sequence[Any]) -> list[Any]:
    """The results of ``call`` on arrays laid out as ``call.in_axes``, whatever extents its pointwise indices have.

    A call without results returns one scalar ``False``, so that its effect has a value to stand for it.
    """
    params = call_params(call, [jnp.shape(a) for a in arrays])
    results = call.prim.bind(*arrays, **call.prim.get_bind_params(params))
    if not call.prim.multiple_results:
        return [results]
    return list(results) or [jnp.zeros((), bool)]


def call_params(call: Call, in_shapes: Shapes) -> dict[str, Any]:
    """The parameters of ``call`` for operands of these shapes."""
    if call.inside is not None:
        extents = call.inside.extents(in_shapes)
        return {**call.params, **call.inside.traced(extents)} if extents else dict(call.params)
    return block_op(call.prim.name).resize(call.params, in_shapes, call_groups(call))


def call_groups(call: Call) -> list[Group]:
    """The places of each pointwise axis of ``call``: of an index, or of the product of several."""
    places: dict[Axis, list[Place]] = {}
    for side, arrays in (("in", call.in_axes), ("out", call.out_axes)):
        for k, axes in enumerate(arrays):
            for a, axis in enumerate(axes):
                if axis and all(call.pointwise >> i & 1 for i in axis):
                    places.setdefault(axis, []).append((side, k, a))
    return [tuple(group) for group in places.values()]


def block_text(call: Call, args: Sequence[str], in_shapes: Shapes, write: Text | None = None) -> str | None:
    """JAX source of ``call`` on these operands, a tuple if it has several results; ``None`` where there is none.

    ``write`` replaces the table's source.
    """
    params = call_params(call, in_shapes)
    text = (write or block_op(call.prim.name).text)(params, args, in_shapes)
    return primitive_text(call.prim, params, args) if text is None else text
