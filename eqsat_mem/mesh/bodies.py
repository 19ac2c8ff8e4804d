"""Loops and branches on a mesh: their bodies are planned as programs of their own, whose arguments lie as the operands do.

A carry lies as its first value does where that is made in shares, else it is whole; stacked results and those of branches are whole. Bodies
exchange what they need from turn to turn, so that all devices take the same turns and the same branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jax.extend.core import ClosedJaxpr

from eqsat_mem.ir import Block, Call, argument_bytes, axes_mask, is_leaf, itemsize, mask_of
from eqsat_mem.ir.jaxprs import largest_value
from eqsat_mem.ir.mesh import Spec, whole
from eqsat_mem.transforms.control_flow import consts_and_carries
from eqsat_mem.transforms.plan_bodies import BODIES, SMALL_BYTES, bodies

if TYPE_CHECKING:
    from eqsat_mem.mesh.localise import Localiser

Specs = tuple[Spec, ...]
BodyPlanner = Callable[[ClosedJaxpr, Specs, Specs, int], tuple[Any, int]]
"""Plans a body whose arguments and results lie as given: its schedule, and the bytes that it holds besides its arguments, of which there
should be no more than the last argument says."""


@dataclass
class Bodies:
    """The bodies of a program under a limit, each planned once for each way in which its arguments lie."""

    limit: int
    planner: BodyPlanner
    known: dict[Any, tuple[Any, int]] = field(default_factory=dict)

    def are_large(self, call: Call) -> bool:
        """Whether anything in a loop or branch is worth a plan."""
        small = min(SMALL_BYTES, self.limit // 16)
        return call.prim.name in BODIES and not call.effects and any(largest_value(body) >= small for body in bodies(call))

    def plan(self, body: ClosedJaxpr, ins: Specs, outs: Specs, room: int) -> tuple[Any, int]:
        key = id(body), ins, outs, room
        if key not in self.known:
            self.known[key] = self.planner(body, ins, outs, room)
        return self.known[key]


@dataclass(frozen=True, eq=False)
class Flow:
    """The loop or branch that a device runs: its call, operands, and the indices that each result has shares of."""

    call: Call
    args: tuple[int, ...]
    shares: tuple[int, ...]


def flow_of(at: Localiser, term: Block) -> Flow | None:
    """A loop or branch whose bodies are planned for shares; None if they are left as they are."""
    key = id(term.call), term.args
    if key not in at.flows:
        planned = at.bodies is not None and at.bodies.are_large(term.call)
        at.flows[key] = _planned(at, term) if planned else None
    return at.flows[key]


def _planned(at: Localiser, term: Block) -> Flow:
    call, local = term.call, at.local
    consts, carries = _carried(call)
    stepped = range(consts + carries, len(term.args)) if call.prim.name == "scan" else range(0)
    shares = [_lying(at, a, axes[k in stepped :]) for k, (a, axes) in enumerate(zip(term.args, call.in_axes, strict=True))]
    results = [0] * len(call.out_axes)
    for j in range(carries):
        names = _names(at, call.in_axes[consts + j], shares[consts + j])
        fits = all(at.deals(axis, own) for axis, own in zip(call.out_axes[j], names, strict=True))
        shares[consts + j] *= fits
        results[j] = mask_of(axis[0] for axis, own in zip(call.out_axes[j], names, strict=True) if own) * fits
    args = tuple(at.value(a, own) for a, own in zip(term.args, shares, strict=True))
    ins = tuple(tuple(local.axes(axes, own)) for axes, own in zip(call.in_axes, shares, strict=True))
    outs = tuple(tuple(local.axes(axes, own)) for axes, own in zip(call.out_axes, results, strict=True))
    new = replace(call, in_axes=ins, out_axes=outs, pointwise=0, folds=0)
    lying = [_names(at, axes[k in stepped :], own) for k, (axes, own) in enumerate(zip(call.in_axes, shares, strict=True))]
    left = [_names(at, axes, own) for axes, own in zip(call.out_axes, results, strict=True)]
    assert at.bodies is not None
    room = at.bodies.limit - argument_bytes(local.program) - _live(at, args, new)
    made = [at.bodies.plan(body, *specs, max(room, 0)) for body, specs in zip(bodies(call), _specs(call, lying, left), strict=True)]
    planned = replace(new, bodies=tuple(s for s, _ in made), scratch_bytes=max(held for _, held in made))
    return Flow(planned, args, tuple(results))


def _carried(call: Call) -> tuple[int, int]:
    """The position of the first carry of a loop among its operands, and the number of carries; a branch has none."""
    if call.prim.name == "scan":
        return consts_and_carries(call.params)
    first = call.params["cond_nconsts"] + call.params["body_nconsts"] if call.prim.name == "while" else len(call.in_axes)
    return first, len(call.in_axes) - first


def _lying(at: Localiser, t: int, axes: Sequence[tuple[int, ...]]) -> int:
    """The indices of which a body gets shares of an operand, where the devices have them; each mesh axis deals out one."""
    natural, taken, shares = at.natural(t), set[str](), 0
    for axis in axes:
        if axis and natural >> axis[0] & 1 and not taken.intersection(at.divided[axis[0]]):
            taken.update(at.divided[axis[0]])
            shares |= 1 << axis[0]
    return shares


def _names(at: Localiser, axes: Sequence[tuple[int, ...]], shares: int) -> Spec:
    return tuple(at.divided[axis[0]] if axis and shares >> axis[0] & 1 else () for axis in axes)


def _specs(call: Call, ins: Sequence[Spec], outs: Sequence[Spec]) -> list[tuple[Specs, Specs]]:
    """The specs of the arguments and results of each body, given those of the call, of which a scan steps through some."""
    if call.prim.name == "scan":
        carries = consts_and_carries(call.params)[1]
        stacked = (whole(len(axes) - 1) for axes in call.out_axes[carries:])
        return [(tuple(ins), (*outs[:carries], *stacked))]
    if call.prim.name == "cond":
        return [(tuple(ins[1:]), tuple(outs))] * len(bodies(call))
    first, second = call.params["cond_nconsts"], call.params["cond_nconsts"] + call.params["body_nconsts"]
    return [((*ins[:first], *ins[second:]), ((),)), (tuple(ins[first:]), tuple(outs))]


def _live(at: Localiser, args: Sequence[int], call: Call) -> int:
    """Bytes of the operands of a loop or branch that are computed, and of its results."""
    program = at.local.program
    made = sum(map(program.nbytes, {u for u in map(program.source_of, args) if not is_leaf(program.terms[u])}))
    sizes = (program.extent(axes_mask(axes)) * itemsize(dtype) for axes, dtype in zip(call.out_axes, call.out_dtypes, strict=True))
    return made + sum(sizes)
