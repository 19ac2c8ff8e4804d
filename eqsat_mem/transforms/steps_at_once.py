"""Values that the steps of a scan compute apart from its carries, computed for all steps at once.

A recurrent network multiplies each input by the same matrix, and its gradient adds a product of two vectors to the same sum in each step: a
product of few rows reads and writes a matrix to do little with it. None of that is part of the recurrence. A scan is therefore taken apart,
as compilers distribute loops: what does not depend on its carries comes *before* it, what its carries do not depend on *after* it,
each for all steps, and the sums that it carries are sums over what it stacks (Kennedy and McKinley, 1990; for LSTMs, Appleyard, Kocisky
and Blunsom, 2016). Where that takes more room than there is, the steps compute it again (:mod:`eqsat_mem.transforms.scan_analysis`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun

from eqsat_mem.frontend.flat_jaxpr import Equation
from eqsat_mem.frontend.inline import lines_of
from eqsat_mem.frontend.roll import results_of, strong
from eqsat_mem.ir import Program
from eqsat_mem.passes import AT_ONCE, Pass
from eqsat_mem.transforms.control_flow import Scan
from eqsat_mem.transforms.retraced import Retracing, retraced
from eqsat_mem.transforms.step_parts import TURNS, Parts, apart
from eqsat_mem.transforms.steps import evaluate_equation, with_added

Array = Any
FEWEST_SEGMENTS = 4
"""Segments of a scan: one of fewer would hold much of what all steps hold at once."""


def with_steps_at_once(program: Program, passes: Collection[Pass]) -> Program | None:
    """The program with what its scans compute apart from their carries outside of them; None where that is nothing worth it."""
    if AT_ONCE not in passes or program.effects or not (scans := apart(program, passes)):  # effects have an order
        return None
    new = retraced(program, lambda args, consts: _TakenApart(program, scans, args, consts).outputs(), passes)
    new.passes |= {AT_ONCE.name}.union(*(eqn.passes for parts in scans.values() for eqn in parts.flat.equations))
    return new


@dataclass(eq=False)
class _TakenApart(Retracing):
    """A program while it is traced with scans taken apart."""

    scans: dict[Scan, Parts]

    def run(self, scan: Scan) -> dict[int, Array]:
        return _RunAtOnce(self.scans[scan], self.operands(scan)).results()


class _RunAtOnce:
    """One scan while it is traced in its parts.

    Attributes:
        one: the values that are the same in all steps.
        every: the values of all steps, side by side.
    """

    def __init__(self, parts: Parts, operands: Sequence[Array]):
        self.parts, self.scan, self.flat = parts, parts.scan, parts.flat
        first, xs = self.scan.first_carry, self.scan.first_carry + self.scan.carries
        self.one: dict[int, Array] = {**self.flat.consts, **self.flat.literals, **dict(zip(self.flat.inputs[:first], operands))}
        self.every: dict[int, Array] = dict(zip(parts.xs, operands[xs:], strict=True))
        self.init = list(map(strong, operands[first:xs]))

    def results(self) -> dict[int, Array]:
        """The results of the scan, by position."""
        parts, scan = self.parts, self.scan
        for eqn in parts.same:
            evaluate_equation(eqn, self.one)
        for eqn in parts.before:
            self._all(eqn)
        last = self._steps()
        for eqn in parts.behind:
            self._all(eqn)
        for k in parts.sums:
            last[k] = self._sum(k, last.get(k, self.init[k]))
        return last | {scan.carries + k: self.every[v] for k, v in enumerate(parts.ys)}

    def _all(self, eqn: Equation) -> None:
        """Evaluate an equation for all steps."""
        axes = [0 if v in self.every else None for v in eqn.ins]
        with lines_of(eqn.source):
            results = jax.vmap(lambda *operands: results_of(eqn, operands), in_axes=axes)(*map(self._value, eqn.ins))
        self.every.update(zip(eqn.outs, results, strict=True))

    def _value(self, v: int) -> Array:
        return self.every[v] if v in self.every else self.one[v]

    def _steps(self) -> dict[int, Array]:
        """Run what is left of the steps: carries after the last of them, by position; what they stack is known afterwards."""
        parts, scan = self.parts, self.scan
        kept = [k for k in range(scan.carries) if k not in parts.sums or k in parts.left]
        if not kept and not parts.stacked:
            return {}
        read = [*parts.xs, *parts.made_before]

        def step(carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
            values = self.one | dict(zip(read, xs, strict=True)) | {parts.carried[k]: c for k, c in zip(kept, carry, strict=True)}
            for eqn in parts.steps:
                evaluate_equation(eqn, values)
            after = []
            for k, before in zip(kept, carry, strict=True):
                left = ((values[v], negated) for v, negated in parts.left.get(k, ()))
                after.append(strong(with_added(before, left) if k in parts.left else values[parts.after[k]]))
            return after, [values[v] for v in parts.stacked]

        given = [self.every[v] for v in read]
        unroll = scan.call.params["unroll"]
        start = [self.init[k] for k in kept]
        last, stacks = lax.scan(step, start, given, length=scan.length, reverse=scan.reverse, unroll=unroll)
        self.every.update(zip(parts.stacked, stacks, strict=True))
        return dict(zip(kept, last, strict=True))

    def _sum(self, k: int, total: Array) -> Array:
        """A sum with what the steps add to it outside of the scan."""
        left = {v for v, _ in self.parts.left.get(k, ())}
        return with_added(total, ((self._summed(v), negated) for v, negated in self.parts.sums[k].parts if v not in left))

    def _summed(self, v: int) -> Array:
        """The sum of a value over all steps; of a product of two values that all steps have, one product."""
        eqn = self.parts.producer.get(v)
        with lines_of(None if eqn is None else eqn.source):
            if eqn is not None and eqn.prim.name in TURNS:
                return results_of(eqn, [self._summed(eqn.ins[0])])[0]
            if eqn is not None and eqn.prim.name == "dot_general" and all(u in self.every for u in eqn.ins):
                (left, right), batch = eqn.params["dimension_numbers"]
                over = (0, *(a + 1 for a in left)), (0, *(a + 1 for a in right))
                dims = over, tuple(tuple(a + 1 for a in side) for side in batch)
                return eqn.prim.bind(*(self.every[u] for u in eqn.ins), **{**eqn.params, "dimension_numbers": dims})
            return lax.reduce_sum(self.every[v], (0,))


# --- segments of steps ---------------------------------------------------------------------------------


def with_segments(program: Program, passes: Collection[Pass]) -> Program | None:
    """The program with scans of which parts would be worth being evaluated for all steps as scans of scans of fewer steps, whose
    bodies are planned so; None where there are none."""
    if AT_ONCE not in passes or program.effects:
        return None
    sizes = {scan: size for scan, parts in apart(program, passes).items() if FEWEST_SEGMENTS * (size := parts.segment) <= scan.length}
    if not sizes:
        return None
    new = retraced(program, lambda args, consts: _InSegments(program, sizes, args, consts).outputs(), passes)
    new.passes |= {AT_ONCE.name}
    return new


@dataclass(eq=False)
class _InSegments(Retracing):
    """A program while it is traced with scans in segments."""

    scans: dict[Scan, int]

    def run(self, scan: Scan) -> dict[int, Array]:
        size, operands = self.scans[scan], self.operands(scan)
        segments, rest = divmod(scan.length, size)
        whole = segments * size
        first, after = scan.first_carry, scan.first_carry + scan.carries
        consts, init, xs = operands[:first], list(map(strong, operands[first:after])), operands[after:]
        step = jaxpr_as_fun(scan.body)

        def steps(carry: list[Array], xs: list[Array], length: int = size) -> tuple[list[Array], list[Array]]:
            def one(carry: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
                results = step(*consts, *carry, *x)
                return list(map(strong, results[: scan.carries])), results[scan.carries :]

            return lax.scan(one, carry, xs, length=length, reverse=scan.reverse, unroll=scan.call.params["unroll"])

        tail: list[Array] = []
        if rest and scan.reverse:
            init, tail = steps(init, [x[whole:] for x in xs], rest)
        cut = [x[:whole].reshape(segments, size, *x.shape[1:]) for x in xs]
        last, stacks = lax.scan(steps, init, cut, length=segments, reverse=scan.reverse)
        stacks = [y.reshape(whole, *y.shape[2:]) for y in stacks]
        if rest and not scan.reverse:
            last, tail = steps(last, [x[whole:] for x in xs], rest)
        stacks = [lax.concatenate([y, z], 0) for y, z in zip(stacks, tail, strict=True)] if rest else stacks
        return dict(enumerate([*last, *stacks]))
