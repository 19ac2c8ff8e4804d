"""The parts of a scan: the equations of its step that come before it, that stay, and that come after it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Any

from eqsat_mem.frontend.flat_jaxpr import Equation
from eqsat_mem.ir import Program, itemsize, ops
from eqsat_mem.ir.jaxprs import CALLED, inner_jaxprs
from eqsat_mem.passes import Pass
from eqsat_mem.transforms.control_flow import Scan, repeats
from eqsat_mem.transforms.scan_analysis import near_divisor
from eqsat_mem.transforms.steps import FlatStep

LEAST_BYTES = 2**14
"""Products that would spare each step fewer bytes stay in it."""
FEW_STEPS = 4
"""Scans of fewer steps stay as they are."""
TURNS = frozenset({"transpose", "neg"})
"""Operations of which a sum over steps is that of the sum over steps."""
BY_ROWS = frozenset({
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "concatenate", "pad", "rev", "split", "iota",
    "gather", "dynamic_slice", "argmax", "argmin", "top_k", "sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp",
})  # fmt: skip
"""Operations, besides elementwise ones, reductions and contractions, that are done for all steps at once."""


def apart(program: Program, passes: Collection[Pass]) -> dict[Scan, Parts]:
    """The scans of which something is worth being evaluated for all steps at once, in their parts."""
    scans = (scan for scan in repeats(program) if scan.call.prim.name == "scan" and scan.length >= FEW_STEPS)
    return {scan: parts for scan in scans if (parts := Parts(scan, passes)).roots}


class Parts(FlatStep):
    """The equations of a scan's step, in the parts that come before, in and after the scan."""

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
        found = set(self.adding)
        for eqn in reversed(self.flat.equations):
            able = _is_able(eqn) and eqn not in self.core and not self.varying.isdisjoint(eqn.ins)
            if able and self._is_read_in(eqn, found):
                found.add(eqn)
        return frozenset(found - self.adding)

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
            return frozenset(eqn for eqn in varying if eqn.prim.name in ("dot_general", "scan") or eqn.prim.name in ops.REDUCTIONS)
        return self.heavy & (self.early | self.late)

    @cached_property
    def segment(self) -> int:
        """The number of steps whose products, evaluated at once, read and write as much for each step as what they spare: more would gain
        little."""
        spared, moved = (sum(sizes) for sizes in zip(*map(self._bytes, self.roots), strict=True))
        return near_divisor(self.scan.length, max(FEW_STEPS, math.ceil(spared / max(moved, 1))))

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
            made, stacked = {*self.xs, *self._made(found)}, self._read_after(found).difference(own)
            more = set[Equation]()
            for eqn in able:
                given = made if eqn in self.early else made | stacked  # which is known after the scan
                if all(v in given for v in eqn.ins if v in self.varying):
                    more.add(eqn)
                    made.update(eqn.outs)
            outside = more.union(found, self.adding)
            kept = [eqn for eqn in able if eqn in more and self._is_read_in(eqn, outside)]
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
        """The values that the scan still adds to sums, by the position of the carry; other sums are no carries of it any more."""
        made = self._made(self.at_once)
        rest = {k: [(v, negated) for v, negated in added.parts if v not in made] for k, added in self.sums.items()}
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


def _is_able(eqn: Equation) -> bool:
    """Whether an equation is evaluated for all steps as it is for one."""
    return not eqn.effects and _is_by_rows(eqn.prim, eqn.params)


def _is_by_rows(prim: Any, params: Mapping[str, Any]) -> bool:
    """Whether an operation, or a scan of such operations, is done for all steps at once."""
    if prim.name == "scan" or prim.name in CALLED:
        return all(_is_by_rows(eqn.primitive, eqn.params) for inner in inner_jaxprs(params) for eqn in inner.eqns)
    return prim.name in BY_ROWS or prim.name in ops.REDUCTIONS or prim.name == "dot_general" or ops.is_elementwise(prim, params)
