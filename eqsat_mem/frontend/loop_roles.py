"""The axes of operands and results of a loop along which it is the same loop of each chunk: found in its body."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from eqsat_mem.frontend.same_results import SameResults, same_results
from eqsat_mem.ir import Program, itemsize, mask_of
from eqsat_mem.ir.axis_roles import Role, carried_roles, place_of
from eqsat_mem.ir.inside import BRANCHES, Inside, Subfunction
from eqsat_mem.ir.jaxprs import consts_and_carries, largest_value
from eqsat_mem.ir.ops import Group, Place

SMALL_BYTES = 2**16
"""A loop of whose operands, results and inner values all have fewer bytes stays one operation."""
InputAxis = tuple[int, int]
Alike = Sequence[tuple[InputAxis, InputAxis]]
"""Pairs of axes of a body's arguments that are one index around it; those of its results stand in the list of what is carried."""
LoadBody = Callable[[ClosedJaxpr, Alike, int, int], Program]
"""Loads a body, given axes that are alike, the number of operands before the carries, and the number of carries."""


@dataclass(frozen=True)
class LoopAxes:
    """The axes along which a loop may be split.

    Attributes:
        inside: its body.
        groups: the places of each such axis.
        summed: whether some result is a sum over it, for each of them.
        same: the loop that computes the results that are the same for all of them, if some are used.
    """

    inside: Inside
    groups: Sequence[Group]
    summed: Sequence[bool]
    same: SameResults | None = None


def loop_axes(
    params: dict[str, Any],
    variables: Sequence[Sequence[Any]],
    zeros: Collection[int],
    same: Sequence[int],
    used: Collection[int],
    load: LoadBody,
) -> LoopAxes | None:
    """The axes along which a scan, a ``while`` loop or a choice may be split; None if there are none.

    Args:
        params: the parameters of the loop.
        variables: what names each axis of each operand around the loop; axes with equal names are one index there.
        zeros: the operands that are zero.
        same: for each operand, the first that is the same value.
        used: the results that are used.
        load: loads the body.
    """
    loop = _of_while(params, same) if "cond_jaxpr" in params else _of_choice(params) if BRANCHES in params else _of_scan(params)
    if loop.has_effects or loop.length < 1 or loop.largest() < SMALL_BYTES:
        return None
    first: dict[Any, InputAxis] = {}
    alike: list[tuple[InputAxis, InputAxis]] = []
    consts, carries = loop.consts, loop.carries
    for slot, names in enumerate(variables):
        for a, name in enumerate(names[1:] if slot >= consts + carries else names):
            if name is not None and first.setdefault(name, (slot, a)) != (slot, a):
                alike.append((first[name], (slot, a)))
    program = load(loop.body(), alike, consts, carries)
    inside = Inside(program, consts, carries, loop.results, loop.parts, loop.same, loop.goes_on)
    axes = list(inside.body_axes())
    indices = dict.fromkeys(axis[0] for own in axes for axis in own if len(axis) == 1)
    every = {i: along for i in indices if (along := _split_along(inside, i, zeros, used)) is not None}
    apart = _same(inside, params, every)
    found = {i: along for i, along in every.items() if along.alike.issubset(apart.results if apart is not None else ())}
    if not found:
        return None
    places: dict[int, Place] = {i: along.group[0] for i, along in found.items()}
    groups, summed = [along.group for along in found.values()], [along.is_summed for along in found.values()]
    return LoopAxes(replace(inside, places=places), groups, summed, apart)


@dataclass(frozen=True)
class _Controlled:
    """A loop or choice, as what there is of every kind of them."""

    functions: Sequence[ClosedJaxpr]
    parts: Sequence[Subfunction]
    consts: int
    carries: int
    length: int
    same: Sequence[int]
    body: Callable[[], ClosedJaxpr]
    goes_on: int | None = None

    @property
    def results(self) -> int:
        return len(self.functions[-1].out_avals)

    @property
    def has_effects(self) -> bool:
        return any(function.effects for function in self.functions)

    def largest(self) -> int:
        """Bytes of the largest operand, result or inner value."""
        *_, last = self.functions  # the body of a loop, or one of the branches
        stepped = self.consts + self.carries

        def size(aval: Any, steps: int) -> int:
            return steps * math.prod(aval.shape) * itemsize(aval.dtype)

        ins = (size(aval, self.length if k >= stepped else 1) for k, aval in enumerate(last.in_avals))
        outs = (size(aval, self.length if k >= self.carries else 1) for k, aval in enumerate(last.out_avals))
        return max([*ins, *outs, *map(largest_value, self.functions)])


def _of_scan(params: dict[str, Any]) -> _Controlled:
    body: ClosedJaxpr = params["jaxpr"]
    every = range(len(body.in_avals))
    parts = [Subfunction("jaxpr", every, range(len(body.out_avals)))]
    return _Controlled([body], parts, *consts_and_carries(params), params["length"], every, lambda: body)


def _of_while(params: dict[str, Any], same: Sequence[int]) -> _Controlled:
    """A ``while`` loop as one whose body returns, after the carries, whether there is another step after the one before it."""
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first, consts = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carries = len(body.out_avals)
    carried = range(consts, consts + carries)
    parts = [
        Subfunction("cond_jaxpr", [*range(first), *carried], [carries]),
        Subfunction("body_jaxpr", [*range(first, consts), *carried], range(carries)),
    ]
    avals = [*condition.in_avals[:first], *body.in_avals]
    own = [k if k >= consts else same[k] for k in range(len(avals))]  # what begins as the same value does not stay it

    def step(*given: Any) -> list[Any]:
        operands = [given[k] for k in own]
        carry = operands[consts:]
        return [*jaxpr_as_fun(body)(*operands[first:consts], *carry), *jaxpr_as_fun(condition)(*operands[:first], *carry)]

    def both() -> ClosedJaxpr:
        return jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))

    return _Controlled([condition, body], parts, consts, carries, 1, own, both, goes_on=carries)


def _of_choice(params: dict[str, Any]) -> _Controlled:
    """A choice as all its branches, between whose results it selects."""
    branches: Sequence[ClosedJaxpr] = params[BRANCHES]
    avals, results = branches[0].in_avals, len(branches[0].out_avals)
    operands = range(1, 1 + len(avals))
    parts = [Subfunction(BRANCHES, operands, range(results * (1 + k), results * (2 + k))) for k in range(len(branches))]

    def every(which: Any, *given: Any) -> list[Any]:
        made = [jaxpr_as_fun(branch)(*given) for branch in branches]
        return [*(lax.select_n(which, *cases) for cases in zip(*made)), *itertools.chain.from_iterable(made)]

    def body() -> ClosedJaxpr:
        which = jax.ShapeDtypeStruct((), bool if len(branches) == 2 else np.int32)
        return jax.make_jaxpr(every)(which, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))

    return _Controlled(branches, parts, 1 + len(avals), 0, 1, range(1 + len(avals)), body)


@dataclass(frozen=True)
class _Along:
    """An index of the body along which a loop may be split.

    Attributes:
        group: its places.
        is_summed: whether some result that is used is a sum over it.
        alike: the results that are used and are the same for all of it.
    """

    group: Group
    is_summed: bool
    alike: frozenset[int]


def _same(inside: Inside, params: dict[str, Any], every: Mapping[int, _Along]) -> SameResults | None:
    """The loop of the results that are used and are the same along every index."""
    shared = set.intersection(*(set(along.alike) for along in every.values())) if every else set()
    return same_results(inside, params, shared, mask_of(every)) if shared else None


def _split_along(inside: Inside, index: int, zeros: Collection[int], used: Collection[int]) -> _Along | None:
    """The places of an index of the body around a loop, if results that are used have its rows, are sums over it, or the same for all."""
    given, places = [], list[Place]()
    for slot, axes in enumerate(inside.body_axes()):
        place = place_of(axes, index)
        if place is None and any(index in axis for axis in axes):
            return None
        if place is not None:
            places.append(("in", slot, place + inside.is_stepped(slot)))
        given.append(Role.ROWS if place is not None else Role.ZERO if slot in zeros else Role.SAME)
    roles = carried_roles(inside, index, given)
    outputs = list(zip(roles, inside.program.outputs))
    has_others = any(role is Role.OTHER and any(index in axis for axis in o.axes) for role, o in outputs)
    alike = frozenset(k for k in used if roles[k] in (Role.SAME, Role.ZERO))
    if has_others or alike.issuperset(used) or not all(roles[k] in (Role.ROWS, Role.SUM) for k in used if k not in alike):
        return None
    for k, (role, o) in enumerate(outputs):
        if role is Role.ROWS:
            place = place_of(o.axes, index)
            assert place is not None
            places.append(("out", k, place + inside.is_stacked(k)))
    return _Along(tuple(places), any(roles[k] is Role.SUM for k in used), alike)
