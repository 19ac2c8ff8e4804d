"""Loops that run a known number of times, as scans: over slices of the arrays that they read in order, stacking the slices that they write.

A module has no scans. JAX lowers one to a loop that counts, reads a slice at the counter and writes one there; read as such a loop, all
that a scan says would be lost: slices are independent, all of them are written, and there is a derivative.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

Affine = tuple[int, int]
"""A position as a function of the turn: a step and a start."""


def run(turn: Callable[..., Sequence[Any]], first: Sequence[Any], turns: int) -> list[Any]:
    """The values that a loop carries after its last turn.

    Args:
        turn: a turn of the loop, a function of the values that it carries.
        first: these values before the first turn.
        turns: how many there are.
    """
    closed: Any = jax.make_jaxpr(turn)(*first)
    work = _CountedLoop(closed.jaxpr, first, turns)
    reads, writes = work.accesses(work.reads()), work.accesses(work.writes())
    backwards = not any(r.forward for r in (*reads, *writes))
    reads, writes = ([a for a in found if a.forward != backwards] for found in (reads, writes))
    stacked = {work.carried[a.array]: a for a in writes}
    gone = {id(a.eqn) for a in (*reads, *writes)}
    known, rest = work.without_counters([eqn for eqn in closed.jaxpr.eqns if id(eqn) not in gone], stacked)
    carry = [k for k in range(len(first)) if k not in stacked and k not in known]
    body = _with(closed, rest, carry, [a.eqn.outvars[0] for a in reads], [a.eqn.invars[1] for a in stacked.values()])
    consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def step(values: Sequence[Any], slices: Sequence[Any]) -> tuple[Any, Any]:
        out = jaxpr_as_fun(body)(*values, *(lax.expand_dims(x, (a.axis,)) for x, a in zip(slices, reads, strict=True)))
        written = zip(out[len(carry) :], stacked.values(), strict=True)
        return out[: len(carry)], [lax.squeeze(x, (a.axis,)) for x, a in written]

    over = [_axis_moved(consts[a.array], a.axis, 0) for a in reads]
    last, written = lax.scan(step, [first[k] for k in carry], over, length=turns, reverse=backwards)
    results: dict[int, Any] = dict(zip(carry, last, strict=True))
    results |= {k: _axis_moved(x, 0, a.axis) for (k, a), x in zip(stacked.items(), written, strict=True)}
    results |= {k: _wrapped(start + step * turns, first[k].dtype) for k, (step, start) in known.items()}
    return [results[k] for k in range(len(first))]


def _wrapped(count: int, dtype: np.dtype) -> np.ndarray:
    """A count that goes on from the lowest number of its dtype behind the highest."""
    width = np.dtype(dtype).itemsize
    return np.asarray(count % 2 ** (8 * width), f"uint{8 * width}").astype(dtype)


def _axis_moved(x: Any, source: int, to: int) -> Any:
    axes = [axis for axis in range(np.ndim(x)) if axis != source]
    axes.insert(to, source)
    return x if axes == sorted(axes) else lax.transpose(x, axes)


def _with(closed: ClosedJaxpr, eqns: list[Any], carried: Sequence[int], read: Sequence[Any], written: Sequence[Any]) -> ClosedJaxpr:
    """A turn as a function of some of the values that it carries and of slices that it reads; it returns slices, too."""
    jaxpr = closed.jaxpr
    return ClosedJaxpr(
        jaxpr.replace(
            invars=[*(jaxpr.invars[k] for k in carried), *read],
            eqns=eqns,
            outvars=[*(jaxpr.outvars[k] for k in carried), *written],
            debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
        ),
        closed.consts,
    )


@dataclass(frozen=True)
class _Access:
    """A slice of one element along an axis that is as long as the loop: of an array at the turn, or at the turn counted from the end."""

    eqn: Any
    array: Any
    axis: int
    forward: bool


class _CountedLoop:
    """The slices that the turns of a loop read and write at positions that follow from the number of the turn."""

    def __init__(self, jaxpr: Any, first: Sequence[Any], turns: int) -> None:
        self.jaxpr, self.first, self.turns = jaxpr, first, turns
        self.carried = {var: k for k, var in enumerate(jaxpr.invars)}
        self.producer = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.uses = Counter(var for eqn in jaxpr.eqns for var in eqn.invars if not isinstance(var, Literal))
        self.uses.update(var for var in jaxpr.outvars if not isinstance(var, Literal))
        self.counters = {jaxpr.invars[k]: found for k in range(len(first)) if (found := self.counter(k)) is not None}

    def counter(self, k: int) -> Affine | None:
        """The step and the start of a carried number, if it grows by the same in every turn."""
        start, grown = self.first[k], self.producer.get(self.jaxpr.outvars[k])
        if grown is None or grown.primitive.name != "add" or not isinstance(start, np.ndarray | np.generic) or start.dtype.kind not in "iu":
            return None
        var, steps = self.jaxpr.invars[k], [x.val for x in grown.invars if isinstance(x, Literal)]
        return (int(steps[0]), int(start)) if len(steps) == 1 and start.shape == () and var in grown.invars else None

    def affine(self, var: Any) -> Affine | None:
        """A number as a function of the turn; None if it depends on more."""
        if isinstance(var, Literal):
            return 0, int(var.val)
        if var in self.counters:
            return self.counters[var]
        eqn = self.producer.get(var)
        if eqn is None or eqn.primitive.name not in ("add", "sub"):
            return None
        left, right = map(self.affine, eqn.invars)
        if left is None or right is None:
            return None
        sign = 1 if eqn.primitive.name == "add" else -1
        return left[0] + sign * right[0], left[1] + sign * right[1]

    def reads(self) -> list[tuple[Any, Any, Sequence[int], Sequence[Any]]]:
        """The slices of arrays from outside: the equation, the array, the shape of the slice, its start."""
        outside = set(self.jaxpr.constvars)
        return [
            (eqn, eqn.invars[0], eqn.outvars[0].aval.shape, eqn.invars[1:])
            for eqn in self.jaxpr.eqns
            if eqn.primitive.name == "dynamic_slice" and not isinstance(eqn.invars[0], Literal) and eqn.invars[0] in outside
        ]

    def writes(self) -> list[tuple[Any, Any, Sequence[int], Sequence[Any]]]:
        """The slices of carried arrays that are written, where nothing else is done with the array."""
        return [
            (eqn, eqn.invars[0], eqn.invars[1].aval.shape, eqn.invars[2:])
            for eqn in self.jaxpr.eqns
            if eqn.primitive.name == "dynamic_update_slice" and self.is_own(eqn.invars[0], eqn.outvars[0])
        ]

    def is_own(self, before: Any, after: Any) -> bool:
        """Whether a carried value is only read to become itself in the next turn."""
        if isinstance(before, Literal) or before not in self.carried:
            return False
        return self.uses[before] == 1 == self.uses[after] and self.jaxpr.outvars[self.carried[before]] is after

    def accesses(self, found: Sequence[tuple[Any, Any, Sequence[int], Sequence[Any]]]) -> list[_Access]:
        """Those that go along an axis in order, from its first place to its last or the other way."""
        made = []
        for eqn, array, shape, starts in found:
            positions = [self.affine(x) for x in starts]
            forward, backward = (1, 0), (-1, self.turns - 1)
            along = [axis for axis, at in enumerate(positions) if at in (forward, backward)]
            others = [axis for axis in range(len(shape)) if axis not in along]
            whole = all(positions[axis] == (0, 0) and shape[axis] == array.aval.shape[axis] for axis in others)
            if len(along) == 1 and whole and shape[along[0]] == 1 and array.aval.shape[along[0]] == self.turns:
                made.append(_Access(eqn, array, along[0], positions[along[0]] == forward))
        return made

    def without_counters(self, eqns: Sequence[Any], stacked: Mapping[int, _Access]) -> tuple[dict[int, Affine], list[Any]]:
        """The counters that nothing but themselves depends on, among these equations, and the equations that the others need."""
        outvars = self.jaxpr.outvars
        own = {k: var for var, k in self.carried.items() if var in self.counters}
        wanted = [outvars[k] for k in range(len(outvars)) if k not in stacked and k not in own]
        needed = {var for var in (*wanted, *(a.eqn.invars[1] for a in stacked.values())) if not isinstance(var, Literal)}
        kept = []
        for eqn in reversed(eqns):
            if eqn.effects or not needed.isdisjoint(eqn.outvars):
                needed.update(var for var in eqn.invars if not isinstance(var, Literal))
                kept.append(eqn)
        counting = {k: self.counters[var] for k, var in own.items() if var not in needed}
        used = {outvars[k] for k in own if k not in counting} - {var for eqn in kept for var in eqn.outvars}
        return counting, [*kept[::-1], *(eqn for eqn in eqns if not used.isdisjoint(eqn.outvars))]
