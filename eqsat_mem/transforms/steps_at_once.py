"""What the steps of a scan compute apart from its carries, for all steps at once.

A recurrent network multiplies each input by the same matrix, and its gradient adds a product of two vectors to the same sum in each step: a
product of few rows reads and writes a matrix to do little with it. None of that is part of the recurrence. A scan is therefore taken apart,
as compilers distribute loops: what does not depend on its carries comes *before* it, what its carries do not depend on *after* it,
each for all steps, and the sums that it carries are sums over what it stacks (Kennedy and McKinley, 1990; for LSTMs, Appleyard, Kocisky
and Blunsom, 2016). Where that takes more room than there is, the steps compute it again (:mod:`eqsat_mem.transforms.scan_analysis`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun

from eqsat_mem.frontend.flat_jaxpr import Equation, Flat
from eqsat_mem.frontend.inline import lines_of
from eqsat_mem.frontend.roll import results_of, strong
from eqsat_mem.ir import Program, itemsize, ops
from eqsat_mem.passes import AT_ONCE, Pass
from eqsat_mem.transforms.control_flow import Scan, repeats
from eqsat_mem.transforms.retraced import Retracing, retraced
from eqsat_mem.transforms.scan_analysis import near_divisor
from eqsat_mem.transforms.steps import Step

Array = Any
LEAST_BYTES = 2**14
"""Products that would spare each step fewer bytes stay in it."""
FEW_STEPS = 4
"""Scans of fewer steps stay as they are."""
ADDITIONS = frozenset({"add", "add_any"})
TURNS = frozenset({"transpose", "neg"})
"""Operations of which a sum over steps is that of the sum over steps."""
BY_ROWS = frozenset({
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "concatenate", "pad", "rev", "split", "iota",
    "gather", "dynamic_slice", "argmax", "argmin", "top_k", "sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp",
})  # fmt: skip
"""Operations, besides elementwise ones, reductions and contractions, that are done for all steps at once."""


def with_steps_at_once(program: Program, passes: Collection[Pass]) -> Program | None:
    """The program with what its scans compute apart from their carries outside of them; None where that is nothing worth it."""
    if AT_ONCE not in passes or program.effects or not (apart := _apart(program)):  # effects have an order
        return None
    new = retraced(program, lambda args, consts: _Apart(program, apart, args, consts).outputs(), passes)
    new.passes |= {AT_ONCE.name}
    return new


def _apart(program: Program) -> dict[Scan, Parts]:
    """The scans of which something is worth being evaluated for all steps at once, in their parts."""
    scans = (scan for scan in repeats(program) if scan.call.prim.name == "scan" and scan.length >= FEW_STEPS)
    return {scan: parts for scan in scans if (parts := Parts(scan)).roots}


@dataclass(frozen=True)
class Increments:
    """What each step adds to a carry, or subtracts where that is ``negated``, and the equations that do so."""

    values: tuple[int, ...]
    negated: tuple[bool, ...]
    equations: tuple[Equation, ...]


class Parts(Step):
    """The equations of a scan's step, in the parts that come before, in and after the scan.

    Attributes:
        sums: the carries that steps only add to, by position.
    """

    def __init__(self, scan: Scan):
        super().__init__(scan)
        found = {k: _increments(self.flat, self.readers, before, after) for k, (before, after) in enumerate(zip(self.carried, self.after))}
        self.sums = {k: added for k, added in found.items() if added is not None}

    # what depends on what

    @cached_property
    def tied(self) -> frozenset[int]:
        """The values that depend on a carry, other than sums."""
        return self.dependents(v for k, v in enumerate(self.carried) if k not in self.sums)

    @cached_property
    def core(self) -> frozenset[Equation]:
        """The equations that carries depend on, other than sums."""
        return frozenset(self.needed([v for k, v in enumerate(self.after) if k not in self.sums], ()))

    @cached_property
    def adding(self) -> frozenset[Equation]:
        """The equations that add to sums."""
        return frozenset(eqn for added in self.sums.values() for eqn in added.equations)

    @cached_property
    def early(self) -> frozenset[Equation]:
        """The equations that can be evaluated for all steps before the scan."""
        found = set[Equation]()
        for eqn in self.flat.equations:
            varying = [v for v in eqn.ins if v in self.varying]
            able = varying and _is_able(eqn) and self.tied.isdisjoint(eqn.outs) and eqn not in self.adding
            if able and all(v not in self.producer or self.producer[v] in found for v in varying):
                found.add(eqn)
        return frozenset(found)

    @cached_property
    def late(self) -> frozenset[Equation]:
        """The equations that can be evaluated for all steps after the scan, with all that depends on them."""
        found = set[Equation]()
        for eqn in reversed(self.flat.equations):
            able = _is_able(eqn) and eqn not in self.core and eqn not in self.adding and not self.varying.isdisjoint(eqn.ins)
            if able and self._is_read_in(eqn, found.union(self.adding)):
                found.add(eqn)
        return frozenset(found)

    # what is worth it

    @cached_property
    def heavy(self) -> frozenset[Equation]:
        """The contractions of little with a matrix that all steps read, or whose result all steps add to a sum."""
        return frozenset(eqn for eqn in self.flat.equations if eqn.prim.name == "dot_general" and self._is_heavy(eqn))

    def _is_heavy(self, eqn: Equation) -> bool:
        spared, moved = self._bytes(eqn)
        return moved > 0 and spared >= max(moved, LEAST_BYTES)

    def _bytes(self, eqn: Equation) -> tuple[int, int]:
        """The bytes that a contraction in a step reads and writes which it would not for all steps, and those that it would for each."""
        own = [v for v in eqn.ins if v in self.varying]
        is_summed = len(own) == 2 and self._is_summed(eqn.outs[0])
        same = sum(self._nbytes(v) for v in eqn.ins if v not in self.varying)
        moved = sum(map(self._nbytes, own)) + (0 if is_summed or not own else self._nbytes(eqn.outs[0]))
        return 2 * self._nbytes(eqn.outs[0]) if is_summed else same, moved

    def _is_summed(self, v: int) -> bool:
        """Whether a value is nothing but added to a sum, perhaps turned."""
        if len(self.readers[v]) != 1 or v in self.flat.outputs:
            return False
        (reader,) = self.readers[v]
        return reader in self.adding or (reader.prim.name in TURNS and self._is_summed(reader.outs[0]))

    def _nbytes(self, v: int) -> int:
        return math.prod(self.flat.shapes[v]) * itemsize(self.flat.dtypes[v])

    # the parts

    @cached_property
    def roots(self) -> frozenset[Equation]:
        """The operations for which the scan is taken apart: where nothing goes from step to step but sums, all that contract or fold."""
        varying = {eqn for eqn in self.flat.equations if not self.varying.isdisjoint(eqn.ins)}
        if varying <= self.early & self.late | self.adding:
            return frozenset(eqn for eqn in varying if eqn.prim.name == "dot_general" or eqn.prim.name in ops.REDUCTIONS)
        return self.heavy & (self.early | self.late)

    @cached_property
    def segment(self) -> int:
        """The number of steps whose products, evaluated at once, read and write as much for each step as what they spare: more would gain
        little."""
        spared, moved = (sum(sizes) for sizes in zip(*map(self._bytes, self.roots), strict=True))
        return near_divisor(self.scan.length, max(FEW_STEPS, math.ceil(spared / moved)))

    @cached_property
    def at_once(self) -> frozenset[Equation]:
        """The equations that are evaluated for all steps: contractions, what depends on those that come after the scan, what these read
        that depends on no carry, and what can be made of what is stacked for all that."""
        found = set(self.roots)
        for eqn in self.flat.equations:
            if eqn in self.late and any(self.producer.get(v) in found & self.late for v in eqn.ins):
                found.add(eqn)
        for eqn in reversed(self.flat.equations):
            if eqn in self.early and any(reader in found for v in eqn.outs for reader in self.readers[v]):
                found.add(eqn)
        return frozenset(found | self._made_of_stacked(found))

    def _made_of_stacked(self, found: Collection[Equation]) -> set[Equation]:
        """Further equations that are evaluated for all steps if others are: they read nothing but what these read or make."""
        able = [eqn for eqn in self.flat.equations if eqn in self.late and eqn not in found]
        while True:
            own = self._made(able)
            given = {*self.xs, *self._made(found), *(v for v in self._read_after(found) if v not in own)}
            more = set[Equation]()
            for eqn in able:
                if all(v in given for v in eqn.ins if v in self.varying):
                    more.add(eqn)
                    given.update(eqn.outs)
            kept = [eqn for eqn in able if eqn in more and self._is_read_in(eqn, more.union(found, self.adding))]
            if len(kept) == len(able):
                return set(kept)
            able = kept

    def _is_read_in(self, eqn: Equation, equations: Collection[Equation]) -> bool:
        """Whether only some equations read results of one."""
        return all(reader in equations for v in eqn.outs for reader in self.readers[v])

    def _read_after(self, equations: Iterable[Equation]) -> set[int]:
        """The values that are read after the scan where equations are evaluated for all steps."""
        return {*self.ys, *(v for eqn in equations if eqn not in self.early for v in eqn.ins if v in self.varying)}

    @cached_property
    def before(self) -> list[Equation]:
        """The equations that are evaluated for all steps before the scan."""
        return [eqn for eqn in self.flat.equations if eqn in self.at_once and eqn in self.early]

    @cached_property
    def behind(self) -> list[Equation]:
        """The equations that are evaluated for all steps after the scan."""
        return [eqn for eqn in self.flat.equations if eqn in self.at_once and eqn not in self.early]

    @cached_property
    def made_before(self) -> list[int]:
        """The values of contractions before the scan, and of what is made of them, which its steps read."""
        heavy = set[int]()
        for eqn in self.before:
            if eqn in self.roots or not heavy.isdisjoint(eqn.ins):
                heavy.update(eqn.outs)
        read = {v for eqn in self.needed(self._wanted, heavy) for v in eqn.ins}.union(self._wanted)
        return sorted(heavy & read)

    @cached_property
    def left(self) -> dict[int, list[tuple[int, bool]]]:
        """What the scan still adds to sums, by the position of the carry; what it adds nothing to is no carry of it any more."""
        made = self._made(self.at_once)
        rest = {k: [(v, no) for v, no in zip(added.values, added.negated, strict=True) if v not in made] for k, added in self.sums.items()}
        return {k: values for k, values in rest.items() if values}

    @cached_property
    def stacked(self) -> list[int]:
        """The values that the scan stacks: results, and what is read after it."""
        return sorted(self._read_after(self.at_once).difference(self._made(self.at_once), self.xs))

    @cached_property
    def _wanted(self) -> list[int]:
        """The values that the steps of the scan have to make."""
        carried = [v for k, v in enumerate(self.after) if k not in self.sums]
        return [*carried, *(v for values in self.left.values() for v, _ in values), *self.stacked]

    @cached_property
    def steps(self) -> list[Equation]:
        """The equations of the steps that are left."""
        return list(self.needed(self._wanted, self.made_before))[::-1]

    @cached_property
    def same(self) -> list[Equation]:
        """The equations that are the same in all steps and of which something is read outside of the scan."""
        read = [v for eqn in (*self.before, *self.behind) for v in eqn.ins if v not in self.varying]
        return list(self.needed(read, ()))[::-1]

    def _made(self, equations: Iterable[Equation]) -> set[int]:
        return {v for eqn in equations for v in eqn.outs}


def _increments(flat: Flat, readers: Mapping[int, list[Equation]], before: int, after: int) -> Increments | None:
    """What a step adds to a carry, where nothing else reads it or what it is on the way; None where it does more, or nothing."""
    uses, carry = Counter(flat.outputs), before
    values, negated, equations = list[int](), list[bool](), list[Equation]()
    while carry != after:
        if uses[carry] or len(readers[carry]) != 1:
            return None
        (reader,) = readers[carry]
        others = [v for v in reader.ins if v != carry]
        adds = reader.prim.name in ADDITIONS or (reader.prim.name == "sub" and reader.ins[0] == carry)
        if not adds or len(others) != 1 or any(flat.shapes[v] != flat.shapes[before] for v in others):
            return None
        values += others
        negated.append(reader.prim.name == "sub")
        equations.append(reader)
        (carry,) = reader.outs
    is_sum = values and uses[after] == 1 and not readers[after]
    return Increments(tuple(values), tuple(negated), tuple(equations)) if is_sum else None


def _is_able(eqn: Equation) -> bool:
    """Whether an equation is evaluated for all steps as it is for one."""
    name = eqn.prim.name
    known = name in BY_ROWS or name in ops.REDUCTIONS or name == "dot_general" or ops.is_elementwise(eqn.prim, eqn.params)
    return known and not eqn.effects


@dataclass(eq=False)
class _Apart(Retracing):
    """A program while it is traced with scans taken apart."""

    scans: dict[Scan, Parts]

    def run(self, scan: Scan) -> dict[int, Array]:
        return _Run(self.scans[scan], self.operands(scan)).results()


class _Run:
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
            self._one(eqn, self.one)
        for eqn in parts.before:
            self._all(eqn)
        last = self._steps()
        for eqn in parts.behind:
            self._all(eqn)
        for k in parts.sums:
            last[k] = self._sum(k, last.get(k, self.init[k]))
        return last | {scan.carries + k: self.every[v] for k, v in enumerate(parts.ys)}

    def _one(self, eqn: Equation, values: dict[int, Array]) -> None:
        with lines_of(eqn.source):
            values.update(zip(eqn.outs, results_of(eqn, [values[v] for v in eqn.ins]), strict=True))

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
                self._one(eqn, values)
            after = []
            for k, before in zip(kept, carry, strict=True):
                for v, negated in parts.left.get(k, ()):
                    before = before - values[v] if negated else before + values[v]
                after.append(strong(before if k in parts.left else values[parts.after[k]]))
            return after, [values[v] for v in parts.stacked]

        given = [self.every[v] for v in read]
        unroll = scan.call.params["unroll"]
        start = [self.init[k] for k in kept]
        last, stacks = lax.scan(step, start, given, length=scan.length, reverse=scan.reverse, unroll=unroll)
        self.every.update(zip(parts.stacked, stacks, strict=True))
        return dict(zip(kept, last, strict=True))

    def _sum(self, k: int, total: Array) -> Array:
        """A sum with what the steps add to it outside of the scan."""
        added, left = self.parts.sums[k], {v for v, _ in self.parts.left.get(k, ())}
        for v, negated in zip(added.values, added.negated, strict=True):
            if v not in left:
                part = self._summed(v)
                total = total - part if negated else total + part
        return total

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
    sizes = {scan: size for scan, parts in _apart(program).items() if 2 * (size := parts.segment) <= scan.length}
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
        whole = scan.length // size * size
        first, after = scan.first_carry, scan.first_carry + scan.carries
        consts, init, xs = operands[:first], list(map(strong, operands[first:after])), operands[after:]
        step = jaxpr_as_fun(scan.body)

        def steps(carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
            def one(carry: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
                results = step(*consts, *carry, *x)
                return list(map(strong, results[: scan.carries])), results[scan.carries :]

            return lax.scan(one, carry, xs, length=len(xs[0]), reverse=scan.reverse, unroll=scan.call.params["unroll"])

        tail: list[Array] = []
        rest = [x[whole:] for x in xs] if whole < scan.length else []
        if rest and scan.reverse:
            init, tail = steps(init, rest)
        last, stacks = lax.scan(steps, init, [x[:whole].reshape(-1, size, *x.shape[1:]) for x in xs], reverse=scan.reverse)
        stacks = [y.reshape(whole, *y.shape[2:]) for y in stacks]
        if rest and not scan.reverse:
            last, tail = steps(last, rest)
        stacks = [lax.concatenate([y, z], 0) for y, z in zip(stacks, tail, strict=True)] if rest else stacks
        return dict(enumerate([*last, *stacks]))
