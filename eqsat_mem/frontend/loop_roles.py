"""The axes of operands and results of a scan along which it is the same scan of each chunk: found in its body."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import ClosedJaxpr

from eqsat_mem.ir import Program, itemsize
from eqsat_mem.ir.axis_roles import Role, carried_roles, place_of
from eqsat_mem.ir.inside import Inside
from eqsat_mem.ir.jaxprs import consts_and_carries, largest_value
from eqsat_mem.ir.ops import Group, Place

SMALL_BYTES = 2**16
"""A scan of whose operands, results and inner values all have fewer bytes stays one operation."""
InputAxis = tuple[int, int]
Alike = Sequence[tuple[InputAxis, InputAxis]]
"""Pairs of axes of a body's arguments that are one index around it; those of its results stand in the list of what is carried."""
LoadBody = Callable[[ClosedJaxpr, Alike, int, int], Program]
"""Loads a body, given axes that are alike, the number of operands before the carries, and the number of carries."""


@dataclass(frozen=True)
class LoopAxes:
    """The axes along which a scan may be split.

    Attributes:
        inside: its body.
        groups: the places of each such axis.
        summed: whether some result is a sum over it, for each of them.
    """

    inside: Inside
    groups: Sequence[Group]
    summed: Sequence[bool]


def loop_axes(
    params: dict[str, Any],
    variables: Sequence[Sequence[Any]],
    zeros: Collection[int],
    used: Collection[int],
    load: LoadBody,
) -> LoopAxes | None:
    """The axes along which a scan may be split; None if there are none.

    Args:
        params: the parameters of the scan.
        variables: what names each axis of each operand around the scan; axes with equal names are one index there.
        zeros: the operands that are zero.
        used: the results that are used.
        load: loads the body.
    """
    body: ClosedJaxpr = params["jaxpr"]
    consts, carries = consts_and_carries(params)
    if body.effects or params["length"] < 1 or _largest(body, params["length"], consts + carries, carries) < SMALL_BYTES:
        return None
    first: dict[Any, InputAxis] = {}
    alike: list[tuple[InputAxis, InputAxis]] = []
    for slot, names in enumerate(variables):
        for a, name in enumerate(names[1:] if slot >= consts + carries else names):
            if name is not None and first.setdefault(name, (slot, a)) != (slot, a):
                alike.append((first[name], (slot, a)))
    inside = Inside(load(body, alike, consts, carries), consts, carries)
    axes = list(inside.body_axes())
    indices = dict.fromkeys(axis[0] for own in axes for axis in own if len(axis) == 1)
    found = {i: group for i in indices if (group := _group(inside, i, zeros, used)) is not None}
    if not found:
        return None
    places: dict[int, Place] = {i: group[0] for i, (group, _) in found.items()}
    return LoopAxes(replace(inside, places=places), [group for group, _ in found.values()], [summed for _, summed in found.values()])


def _group(inside: Inside, index: int, zeros: Collection[int], used: Collection[int]) -> tuple[Group, bool] | None:
    """The places of an index of the body around a scan, and whether some result that is used is a sum over it."""
    given, places = [], list[Place]()
    for slot, axes in enumerate(inside.body_axes()):
        place = place_of(axes, index)
        if place is None and any(index in axis for axis in axes):
            return None
        if place is not None:
            places.append(("in", slot, place + inside.is_stepped(slot)))
        given.append(Role.ROWS if place is not None else Role.ZERO if slot in zeros else Role.SAME)
    roles = carried_roles(inside, index, given)
    if Role.OTHER in roles or not all(roles[k] in (Role.ROWS, Role.SUM) for k in used):
        return None
    for k, (role, o) in enumerate(zip(roles, inside.program.outputs)):
        if role is Role.ROWS:
            place = place_of(o.axes, index)
            assert place is not None
            places.append(("out", k, place + (k >= inside.carries)))
    return tuple(places), any(roles[k] is Role.SUM for k in used)


def _largest(body: ClosedJaxpr, length: int, stepped: int, carries: int) -> int:
    """Bytes of the largest operand, result or inner value."""

    def size(aval: Any, steps: int) -> int:
        return steps * math.prod(aval.shape) * itemsize(aval.dtype)

    ins = (size(aval, length if k >= stepped else 1) for k, aval in enumerate(body.in_avals))
    outs = (size(aval, length if k >= carries else 1) for k, aval in enumerate(body.out_avals))
    return max([*ins, *outs, largest_value(body)])
