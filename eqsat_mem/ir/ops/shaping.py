"""Blocks that move data: slices, updates, concatenations, padding, reshapes that mix axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from eqsat_mem.ir.ops.blocks import BlockOp, Group, Params, Shapes, Window, Windowed, all_but, extents, replaced
from eqsat_mem.ir.ops.elementwise import dtype_text


def _slice(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    strides = params["strides"] or (1,) * len(ins[0])
    cut = [a for a, n in enumerate(ins[0]) if (params["start_indices"][a], params["limit_indices"][a], strides[a]) != (0, n, 1)]
    return all_but(cut, len(ins[0]))


def _resize_slice(params: Params, ins: Shapes, groups: Sequence[Group]) -> dict[str, Any]:
    return {**params, "limit_indices": replaced(params["limit_indices"], extents(groups, ins))}


def _slice_text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    strides = "" if params["strides"] is None else f", {_ints(params['strides'])}"
    return f"lax.slice({args[0]}, {_ints(params['start_indices'])}, {_ints(params['limit_indices'])}{strides})"


def _dynamic_slice(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    return all_but([a for a, n in enumerate(ins[0]) if params["slice_sizes"][a] != n], len(ins[0]))


def _resize_dynamic_slice(params: Params, ins: Shapes, groups: Sequence[Group]) -> dict[str, Any]:
    return {**params, "slice_sizes": replaced(params["slice_sizes"], extents(groups, ins))}


def _dynamic_slice_text(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    starts = args[1 : 1 + len(ins[0])]
    if len(starts) != len(args) - 1:
        return None
    return f"lax.dynamic_slice({args[0]}, {_tuple(starts)}, {_ints(params['slice_sizes'])}, allow_negative_indices=False)"


def _dynamic_update_slice(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    return all_but([a for a, n in enumerate(ins[0]) if ins[1][a] != n], len(ins[0]), operands=(0, 1))


def _dynamic_update_slice_text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    return f"lax.dynamic_update_slice({args[0]}, {args[1]}, {_tuple(args[2:])}, allow_negative_indices=False)"


def _pad(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    return all_but([a for a, config in enumerate(params["padding_config"]) if tuple(config) != (0, 0, 0)], len(ins[0]))


def _pad_text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    return f"lax.pad({args[0]}, {args[1]}, {_tuple([_ints(config) for config in params['padding_config']])})"


def _pad_windows(ins: Shapes, outs: Shapes, params: Params) -> list[Window]:
    """Return the windows of the axes that are padded, of one element each."""
    configs = enumerate(tuple(map(int, config)) for config in params["padding_config"])
    return [Window(a, a, ("out", 0, a), 1, gap + 1, low, 1) for a, (low, high, gap) in configs if (low, high, gap) != (0, 0, 0)]


def _pad_anew(params: Params, number: int, low: int, high: int, extent: int) -> dict[str, Any]:
    configs = enumerate(params["padding_config"])
    return {**params, "padding_config": tuple((low, high, config[2]) if a == number else config for a, config in configs)}


def _slice_windows(ins: Shapes, outs: Shapes, params: Params) -> list[Window]:
    """Return the windows of the axes that are cut, of one element each."""
    kept = {group[0][2] for group in _slice(ins, outs, params)}
    starts, strides = params["start_indices"], params["strides"] or (1,) * len(ins[0])
    return [Window(a, a, ("out", 0, a), strides[a], 1, -starts[a], 1) for a in range(len(ins[0])) if a not in kept]


def _slice_anew(params: Params, number: int, low: int, high: int, extent: int) -> dict[str, Any]:
    """Return the parameters of a slice of ``extent`` elements, of which padding that is negative is cut away."""
    ends = {"start_indices": -low, "limit_indices": extent + high}
    return {**params, **{name: replaced(params[name], {number: end}) for name, end in ends.items()}}


def _concatenate(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    return all_but([params["dimension"]], len(ins[0]), operands=range(len(ins)))


def _split(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    return all_but([params["axis"]], len(ins[0]), results=range(len(outs)))


def _stack(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return a group for each operand axis, which in the result comes one later if it is not before the new axis."""
    new = params["axis"]
    return [tuple([("in", k, a) for k in range(len(ins))] + [("out", 0, a + (a >= new))]) for a in range(len(ins[0]))]


def _unstack(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    gone = params["axis"]
    return [tuple([("in", 0, a + (a >= gone))] + [("out", k, a) for k in range(len(outs))]) for a in range(len(outs[0]))]


def _rev(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    return all_but(params["dimensions"], len(ins[0]))


def _reshape(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return the pointwise axes: those of the same extent in operand and result, with equally many elements before and after."""
    if params.get("dimensions") is not None or 0 in ins[0]:
        return []
    before = {math.prod(outs[0][:a]): a for a, n in enumerate(outs[0]) if n != 1}
    pairs = [(a, before.get(math.prod(ins[0][:a]))) for a, n in enumerate(ins[0]) if n != 1]
    return [(("in", 0, a), ("out", 0, b)) for a, b in pairs if b is not None and ins[0][a] == outs[0][b]]


def _resize_reshape(params: Params, ins: Shapes, groups: Sequence[Group]) -> dict[str, Any]:
    new = {group[1][2]: ins[0][group[0][2]] for group in groups}
    return {**params, "new_sizes": replaced(params["new_sizes"], new)}


def _everywhere(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return a group for every axis of every operand: the results equal their operands."""
    return [(("in", k, a), ("out", k, a)) for k, shape in enumerate(ins) for a in range(len(shape))]


def _bitcast(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return a group for each axis except the last one along which a change of width splits or joins elements."""
    return all_but([], min(len(ins[0]), len(outs[0])))


def _tuple(items: Sequence[str]) -> str:
    return "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"


def _ints(values: Sequence[Any]) -> str:
    return str(tuple(int(v) for v in values))


SHAPING = [
    BlockOp(
        "slice",
        _slice,
        _resize_slice,
        _slice_text,
        moves=True,
        linear=slice(None),
        windows=Windowed(_slice_windows, _slice_anew, "add", cuts=True),
    ),
    BlockOp("dynamic_slice", _dynamic_slice, _resize_dynamic_slice, _dynamic_slice_text, moves=True, linear=slice(1)),
    BlockOp("dynamic_update_slice", _dynamic_update_slice, text=_dynamic_update_slice_text, linear=slice(2)),
    BlockOp("pad", _pad, text=_pad_text, moves=True, linear=slice(None), windows=Windowed(_pad_windows, _pad_anew, None, cuts=True)),
    BlockOp(
        "concatenate",
        _concatenate,
        text=lambda p, a, s: f"lax.concatenate([{', '.join(a)}], {p['dimension']})",
        moves=True,
        linear=slice(None),
    ),
    BlockOp("split", _split, text=lambda p, a, s: f"lax.split({a[0]}, {_ints(p['sizes'])}, {p['axis']})", linear=slice(None)),
    BlockOp("stack", _stack, text=lambda p, a, s: f"jnp.stack([{', '.join(a)}], {p['axis']})", linear=slice(None)),
    BlockOp("unstack", _unstack, text=lambda p, a, s: f"jnp.unstack({a[0]}, axis={p['axis']})", linear=slice(None)),
    BlockOp("rev", _rev, text=lambda p, a, s: f"lax.rev({a[0]}, {_ints(p['dimensions'])})", moves=True, linear=slice(None)),
    BlockOp("reshape", _reshape, _resize_reshape, lambda p, a, s: f"lax.reshape({a[0]}, {_ints(p['new_sizes'])})", linear=slice(None)),
    BlockOp(
        "bitcast_convert_type",
        _bitcast,
        text=lambda p, a, s: f"lax.bitcast_convert_type({a[0]}, {dtype_text(p['new_dtype'])})",
    ),
    BlockOp("optimization_barrier", _everywhere, text=lambda p, a, s: f"lax.optimization_barrier({_tuple(a)})"),
]


def is_first_operand(name: str, params: Params, operands: int) -> bool:
    """Whether the only result of an operation is all of its first operand: the one piece of a split, a concatenation of one, no padding."""
    match name:
        case "split":
            return len(params["sizes"]) == 1
        case "concatenate":
            return operands == 1
        case "pad":
            return not any(map(any, params["padding_config"]))
    return False
