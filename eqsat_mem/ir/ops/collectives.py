"""Blocks by which the devices of a mesh exchange values: one row for each collective of ``jax.lax`` that plans use.

All are pointwise in every index but the one that counts devices, which stands first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from eqsat_mem.ir.mesh import Names
from eqsat_mem.ir.ops.blocks import BlockOp, Params, Shapes


@dataclass(frozen=True)
class Collective:
    """An exchange between devices in the place of a JAX primitive: :class:`eqsat_mem.ir.Call` asks no more of one."""

    name: str
    run: Callable[..., Any]
    multiple_results: bool = False

    def bind(self, *arrays: Any, **params: Any) -> Any:
        """The operation on arrays, where JAX knows the mesh axes."""
        return self.run(*arrays, **params)

    def get_bind_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """As a JAX primitive's."""
        return params


def rows_around(x: Any, start: int, stop: int, names: Any, devices: int, axis: int) -> Any:
    """Rows ``start`` up to ``stop`` along ``axis``, counted from where the share of a device begins, sent by those that have them.

    Devices stand in a ring, in which the first comes after the last.
    """
    share, parts = x.shape[axis], []
    for hop in range(start // share, -(-stop // share)):
        rows = lax.slice_in_dim(x, max(start - hop * share, 0), min(stop - hop * share, share), 1, axis)
        parts.append(rows if hop % devices == 0 else lax.ppermute(rows, names, [(k, (k - hop) % devices) for k in range(devices)]))
    return lax.concatenate(parts, axis)


REDUCTIONS = {"add": "psum", "max": "pmax", "min": "pmin"}
"""The function of ``jax.lax`` that combines values of all devices by a monoid; other monoids fold what is gathered."""


def merge_top_k_shares(values: Any, places: Any, share: int, names: Any, axis: int) -> Any:
    """``lax.top_k`` along ``axis`` of what all devices have found in their shares: of equal elements the first come first."""
    k = values.shape[axis]
    places = places + lax.axis_index(names).astype(places.dtype) * share
    every, everywhere = (lax.all_gather(x, names, axis=axis, tiled=True) for x in (values, places))
    values, chosen = lax.top_k(every, k, axis=axis)
    return values, jnp.take_along_axis(everywhere, chosen, axis)


def merge_top_k_in_rounds(values: Any, places: Any, share: int, names: Any, devices: int, axis: int) -> Any:
    """The same in rounds, of a power of two of devices: neighbours first, then pairs of them, and so on, merge what they have."""
    k, here = values.shape[axis], lax.axis_index(names)
    places = places + here.astype(places.dtype) * share
    apart = 1
    while apart < devices:
        pairs = [(device, device ^ apart) for device in range(devices)]
        is_second = (here & apart) != 0
        every, everywhere = (
            jnp.where(is_second, jnp.concatenate([theirs, x], axis), jnp.concatenate([x, theirs], axis))
            for x, theirs in ((x, lax.ppermute(x, names, pairs)) for x in (values, places))
        )
        values, chosen = lax.top_k(every, k, axis=axis)
        places = jnp.take_along_axis(everywhere, chosen, axis)
        apart *= 2
    return values, places


def _all_reduce(x: Any, *, monoid: str, names: Names, devices: int) -> Any:
    return getattr(lax, REDUCTIONS[monoid])(x, names)


def _gather(x: Any, *, names: Names, devices: int) -> Any:
    return lax.all_gather(x, names)


def _scatter(x: Any, *, names: Names, devices: int) -> Any:
    return lax.psum_scatter(x, names)


def _exchange(x: Any, *, names: Names, devices: int) -> Any:
    return lax.all_to_all(x, names, 0, 0)


def _neighbours(x: Any, *, names: Names, devices: int, start: int, stop: int, share: int, axis: int) -> Any:
    return rows_around(x, start, stop, names, devices, axis)


def _own(x: Any, *, names: Names, devices: int, axis: int) -> Any:
    return lax.dynamic_index_in_dim(x, lax.axis_index(names), axis, keepdims=False)


def _number(*, names: Names, devices: int) -> Any:
    return lax.axis_index(names)


def _merge(values: Any, places: Any, *, names: Names, devices: int, share: int, axis: int) -> Any:
    return merge_top_k_shares(values, places, share, names, axis)


def _merge_in_rounds(values: Any, places: Any, *, names: Names, devices: int, share: int, axis: int) -> Any:
    return merge_top_k_in_rounds(values, places, share, names, devices, axis)


all_reduce_p = Collective("all_reduce", _all_reduce)
gather_p = Collective("gather_shares", _gather)
scatter_p = Collective("sum_to_shares", _scatter)
exchange_p = Collective("exchange_shares", _exchange)
neighbours_p = Collective("neighbouring_rows", _neighbours)
own_p = Collective("own_share", _own)
number_p = Collective("device_number", _number)
merge_p = Collective("merge_top_k", _merge, multiple_results=True)
merge_in_rounds_p = Collective("merge_top_k_in_rounds", _merge_in_rounds, multiple_results=True)

ROUNDS_FROM = 64
"""Devices from which they merge what they have picked in rounds, if they are a power of two: 64 receive six shares each instead of 63."""


def merging(devices: int) -> Collective:
    """The exchange by which so many devices merge what they have picked."""
    return merge_in_rounds_p if devices >= ROUNDS_FROM and devices.bit_count() == 1 else merge_p


def names_text(names: Names) -> str:
    """Source of some mesh axes."""
    return f'"{names[0]}"' if len(names) == 1 else "(" + ", ".join(f'"{name}"' for name in names) + ")"


def _text(template: str) -> Callable[[Params, Sequence[str], Shapes], str]:
    def text(params: Params, args: Sequence[str], ins: Shapes) -> str:
        named = {"names": names_text(params["names"]), "reduce": REDUCTIONS.get(params.get("monoid", ""), "")}
        return template.format(*args, **{**params, **named})

    return text


COLLECTIVES = [
    BlockOp("all_reduce", text=_text("lax.{reduce}({0}, {names})")),
    BlockOp("gather_shares", text=_text("lax.all_gather({0}, {names})")),
    BlockOp("sum_to_shares", text=_text("lax.psum_scatter({0}, {names})")),
    BlockOp("exchange_shares", text=_text("lax.all_to_all({0}, {names}, 0, 0)")),
    BlockOp(
        "neighbouring_rows",
        text=_text("rows_around({0}, {start}, {stop}, {names}, {devices}, {axis})"),
        helpers=(rows_around,),
    ),
    BlockOp("own_share", text=_text("lax.dynamic_index_in_dim({0}, lax.axis_index({names}), {axis}, keepdims=False)"), moves=True),
    BlockOp("device_number", text=_text("lax.axis_index({names})")),
    BlockOp("merge_top_k", text=_text("merge_top_k_shares({0}, {1}, {share}, {names}, {axis})"), helpers=(merge_top_k_shares,)),
    BlockOp(
        "merge_top_k_in_rounds",
        text=_text("merge_top_k_in_rounds({0}, {1}, {share}, {names}, {devices}, {axis})"),
        helpers=(merge_top_k_in_rounds,),
    ),
]

EXCHANGES = frozenset(
    {"all_reduce", "gather_shares", "sum_to_shares", "exchange_shares", "neighbouring_rows", "merge_top_k", "merge_top_k_in_rounds"}
)
"""The rows that send something from device to device."""
SENT_BY = {"merge_top_k": "gather_shares", "merge_top_k_in_rounds": "exchange_shares", "neighbouring_rows": "exchange_shares"}
"""Those that send it by another row's collective, or at its price."""


def rounds(name: str, params: Params) -> int:
    """The exchanges, one after the other, of which one consists."""
    if name == "neighbouring_rows":
        return len(_hops(params))
    return int(params["devices"]).bit_length() - 1 if name == "merge_top_k_in_rounds" else 1


def _hops(params: Params) -> list[int]:
    """The rows that a device receives from each other device of which it needs neighbouring rows."""
    start, stop, share, devices = (params[name] for name in ("start", "stop", "share", "devices"))
    hops = (hop for hop in range(start // share, -(-stop // share)) if hop % devices)
    return [min(stop - hop * share, share) - max(start - hop * share, 0) for hop in hops]


def received_bytes(name: str, params: Params, in_bytes: float, out_bytes: float) -> float:
    """Bytes that each device receives from others in one exchange, given those of its operands and of its results.

    Sums of shares go round twice, once to be made and once to be handed out, in equal parts.
    """
    devices = params["devices"]
    match name:
        case "gather_shares":
            return out_bytes * (devices - 1) / devices
        case "all_reduce":
            return 2 * in_bytes * (devices - 1) / devices
        case "sum_to_shares" | "exchange_shares":
            return in_bytes * (devices - 1) / devices
        case "neighbouring_rows":
            return out_bytes * sum(_hops(params)) / (params["stop"] - params["start"])
        case "merge_top_k":
            return in_bytes * (devices - 1)
        case "merge_top_k_in_rounds":
            return in_bytes * rounds(name, params)
    return 0.0
