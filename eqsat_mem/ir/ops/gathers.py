"""Blocks that read or write at computed positions: gather and the scatters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eqsat_mem.ir.ops.blocks import BlockOp, Group, Params, Pointwise, Shapes, Text, extents, replaced
from eqsat_mem.ir.ops.elementwise import value_text


def _gather(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return a group for each operand axis that is read whole, and for each batch axis of the start indices."""
    operand, indices = ins[0], ins[1]
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    offsets = {int(a) for a in numbers.offset_dims}
    window = [d for d in range(len(operand)) if d not in _dims(numbers.collapsed_slice_dims, numbers.operand_batching_dims)]
    groups: list[Group] = []
    for place, d in zip(sorted(offsets), window):
        if sizes[d] == operand[d]:
            groups.append((("in", 0, d), ("out", 0, place)))
    batching = dict(zip(map(int, numbers.start_indices_batching_dims), map(int, numbers.operand_batching_dims)))
    batch_places = [a for a in range(len(outs[0])) if a not in offsets]
    for axis, place in zip(range(len(indices) - 1), batch_places):
        also = (("in", 0, batching[axis]),) if axis in batching else ()
        groups.append((("in", 1, axis), *also, ("out", 0, place)))
    return groups


def _resize_gather(params: Params, ins: Shapes, groups: Sequence[Group]) -> dict[str, Any]:
    batching = _dims(params["dimension_numbers"].operand_batching_dims)
    new = {a: n for a, n in extents(groups, ins).items() if a not in batching}
    return {**params, "slice_sizes": replaced(params["slice_sizes"], new)}


def written_axes(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return a group for each operand axis that is written whole, and for each batching axis."""
    operand, updates = ins[0], ins[2]
    numbers = params["dimension_numbers"]
    windows = sorted(int(a) for a in numbers.update_window_dims)
    written = [d for d in range(len(operand)) if d not in _dims(numbers.inserted_window_dims, numbers.operand_batching_dims)]
    groups: list[Group] = []
    for place, d in zip(windows, written):
        if updates[place] == operand[d]:
            groups.append((("in", 0, d), ("in", 2, place), ("out", 0, d)))
    batch_places = [a for a in range(len(updates)) if a not in windows]
    for d, axis in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims):
        groups.append((("in", 0, int(d)), ("in", 1, int(axis)), ("in", 2, batch_places[axis]), ("out", 0, int(d))))
    return groups


def _meeting(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return a group for each other batch axis of positions and updates, whose elements may be written to the same place."""
    numbers = params["dimension_numbers"]
    windows = _dims(numbers.update_window_dims)
    batch_places = [a for a in range(len(ins[2])) if a not in windows]
    batching = _dims(numbers.scatter_indices_batching_dims)
    return [(("in", 1, axis), ("in", 2, place)) for axis, place in enumerate(batch_places) if axis not in batching]


def _dims(*groups: Sequence[Any]) -> set[int]:
    return {int(d) for group in groups for d in group}


def _gather_text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    fill = params["fill_value"]
    return (f"lax.gather({args[0]}, {args[1]}, {numbers_text('GatherDimensionNumbers', params['dimension_numbers'])}, "
            f"slice_sizes={tuple(map(int, params['slice_sizes']))}{_flags_text(params)}, mode=lax.GatherScatterMode.{params['mode'].name}"
            + (")" if fill is None else f", fill_value={value_text(fill)})"))  # fmt: skip


def _scatter_text(function: str) -> Any:
    def text(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
        if function == "scatter" and params["update_jaxpr"] is not None:
            return None  # x.at[i].apply(f)
        return (f"lax.{function}({args[0]}, {args[1]}, {args[2]}, "
                f"{numbers_text('ScatterDimensionNumbers', params['dimension_numbers'])}{_flags_text(params)}, "
                f"mode=lax.GatherScatterMode.{params['mode'].name})")  # fmt: skip

    return text


def _flags_text(params: Params) -> str:
    """Return source of the promises that the caller made about the positions."""
    return "".join(f", {name}=True" for name in ("unique_indices", "indices_are_sorted") if params[name])


def numbers_text(cls: str, numbers: Any) -> str:
    fields = {k: tuple(map(int, v)) for k, v in numbers._asdict().items() if len(v) or "batching" not in k}
    return f"lax.{cls}(" + ", ".join(f"{k}={v}" for k, v in fields.items()) + ")"


SCATTERS: dict[str, str | None] = {
    "scatter": None,
    "scatter-add": "add",
    "scatter-sub": "add",
    "scatter-mul": "mul",
    "scatter-min": "min",
    "scatter-max": "max",
}
"""The scatters, each with the monoid by which it combines updates."""


def scatter_row(name: str, monoid: str | None, pointwise: Pointwise, text: Text, helpers: tuple[Callable[..., Any], ...] = ()) -> BlockOp:
    """Return the row of a scatter, whose first operands are what it writes into, the positions and the updates."""
    linear = slice(0, 3, 2) if monoid == "add" and "sub" not in name else None
    return BlockOp(name, pointwise, text=text, helpers=helpers, shared=_meeting, monoid=monoid, writes_into=True, linear=linear)


GATHERS = [
    BlockOp("gather", _gather, _resize_gather, _gather_text, moves=True),
    *(scatter_row(name, monoid, written_axes, _scatter_text(name.replace("-", "_"))) for name, monoid in SCATTERS.items()),
]
