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


REDUCTIONS = {"add": "psum", "max": "pmax", "min": "pmin"}
"""The function of ``jax.lax`` that combines values of all devices by a monoid; other monoids fold what is gathered."""


def merge_top_k_shares(values: Any, places: Any, share: int, names: Any, axis: int) -> Any:
    """``lax.top_k`` along ``axis`` of what all devices have found in their shares: of equal elements the first come first."""
    k = values.shape[axis]
    places = places + lax.axis_index(names).astype(places.dtype) * share
    every, everywhere = (lax.all_gather(x, names, axis=axis, tiled=True) for x in (values, places))
    values, chosen = lax.top_k(every, k, axis=axis)
    return values, jnp.take_along_axis(everywhere, chosen, axis)


def _all_reduce(x: Any, *, monoid: str, names: Names, devices: int) -> Any:
    return getattr(lax, REDUCTIONS[monoid])(x, names)


def _gather(x: Any, *, names: Names, devices: int) -> Any:
    return lax.all_gather(x, names)


def _scatter(x: Any, *, names: Names, devices: int) -> Any:
    return lax.psum_scatter(x, names)


def _exchange(x: Any, *, names: Names, devices: int) -> Any:
    return lax.all_to_all(x, names, 0, 0)


def _own(x: Any, *, names: Names, devices: int, axis: int) -> Any:
    return lax.dynamic_index_in_dim(x, lax.axis_index(names), axis, keepdims=False)


def _number(*, names: Names, devices: int) -> Any:
    return lax.axis_index(names)


def _merge(values: Any, places: Any, *, names: Names, devices: int, share: int, axis: int) -> Any:
    return merge_top_k_shares(values, places, share, names, axis)


all_reduce_p = Collective("all_reduce", _all_reduce)
gather_p = Collective("gather_shares", _gather)
scatter_p = Collective("sum_to_shares", _scatter)
exchange_p = Collective("exchange_shares", _exchange)
own_p = Collective("own_share", _own)
number_p = Collective("device_number", _number)
merge_p = Collective("merge_top_k", _merge, multiple_results=True)


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
    BlockOp("own_share", text=_text("lax.dynamic_index_in_dim({0}, lax.axis_index({names}), {axis}, keepdims=False)"), moves=True),
    BlockOp("device_number", text=_text("lax.axis_index({names})")),
    BlockOp("merge_top_k", text=_text("merge_top_k_shares({0}, {1}, {share}, {names}, {axis})"), helpers=(merge_top_k_shares,)),
]

EXCHANGES = frozenset({"all_reduce", "gather_shares", "sum_to_shares", "exchange_shares", "merge_top_k"})
"""The rows that send something from device to device."""
SENT_BY = {"merge_top_k": "gather_shares"}
"""Those that send it by another row's collective."""


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
        case "merge_top_k":
            return in_bytes * (devices - 1)
    return 0.0
