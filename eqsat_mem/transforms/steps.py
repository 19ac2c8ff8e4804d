"""The step of a scan as equations on numbered values: what it reads, carries and makes, and what depends on what."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from eqsat_mem.frontend.flat_jaxpr import Equation
from eqsat_mem.frontend.inline import flatten, lines_of
from eqsat_mem.frontend.preferences import LOADED
from eqsat_mem.frontend.roll import results_of
from eqsat_mem.passes import ELEMENTS, UPDATES, Pass
from eqsat_mem.transforms.control_flow import Scan

Array = Any
ADDITIONS = frozenset({"add", "add_any"})


@dataclass(frozen=True)
class Increments:
    """The values that each step adds to a carry, each with whether it is subtracted instead, and the equations that do so."""

    parts: tuple[tuple[int, bool], ...]
    equations: tuple[Equation, ...]


class FlatStep:
    """The step of a scan, which passes that write operations as others may change.

    Attributes:
        scan: the scan.
        flat: its body without nesting.
        readers: the equations that read each value.
        producer: the equation that makes each value that one makes.
    """

    def __init__(self, scan: Scan, passes: Collection[Pass] = ()):
        self.scan, self.flat = scan, flatten(scan.body, LOADED, [known for known in passes if known not in (UPDATES, ELEMENTS)])
        self.readers = defaultdict[int, list[Equation]](list)
        self.producer = {v: eqn for eqn in self.flat.equations for v in eqn.outs}
        for eqn in self.flat.equations:
            for v in set(eqn.ins):
                self.readers[v].append(eqn)

    @property
    def carried(self) -> Sequence[int]:
        """The carries before the step."""
        return self.flat.inputs[self.scan.first_carry :][: self.scan.carries]

    @property
    def after(self) -> Sequence[int]:
        """The carries after the step."""
        return self.flat.outputs[: self.scan.carries]

    @property
    def xs(self) -> Sequence[int]:
        """The slices that it reads of values which have one for each step."""
        return self.flat.inputs[self.scan.first_carry + self.scan.carries :]

    @property
    def ys(self) -> Sequence[int]:
        """The results that the scan stacks."""
        return self.flat.outputs[self.scan.carries :]

    @cached_property
    def sums(self) -> dict[int, Increments]:
        """The increments of carries to which steps do nothing else, by the position of the carry."""
        found = {k: self._increments(before, after) for k, (before, after) in enumerate(zip(self.carried, self.after, strict=True))}
        return {k: added for k, added in found.items() if added is not None}

    @cached_property
    def varying(self) -> frozenset[int]:
        """The values that differ from step to step."""
        return self.dependents([*self.carried, *self.xs])

    def dependents(self, given: Iterable[int]) -> frozenset[int]:
        """Some values, and all that depend on them."""
        found = set(given)
        for eqn in self.flat.equations:
            if not found.isdisjoint(eqn.ins):
                found.update(eqn.outs)
        return frozenset(found)

    def needed(self, wanted: Iterable[int], given: Collection[int]) -> Iterator[Equation]:
        """Yield the equations that make values from others that are given, last ones first."""
        needed = set(wanted).difference(given)
        for eqn in reversed(self.flat.equations):
            if not needed.isdisjoint(eqn.outs):
                needed.update(v for v in eqn.ins if v not in given)
                yield eqn

    def _increments(self, before: int, after: int) -> Increments | None:
        """The increments of a carry, where nothing else reads it or what it is on the way; None where the step does more, or nothing."""
        uses, carry = Counter(self.flat.outputs), before
        parts, equations = list[tuple[int, bool]](), list[Equation]()
        while carry != after:
            if uses[carry] or len(self.readers[carry]) != 1:
                return None
            (reader,) = self.readers[carry]
            others = [v for v in reader.ins if v != carry]
            adds = reader.prim.name in ADDITIONS or (reader.prim.name == "sub" and reader.ins[0] == carry)
            if not adds or len(others) != 1 or self.flat.shapes[reader.outs[0]] != self.flat.shapes[before]:
                return None
            parts.append((others[0], reader.prim.name == "sub"))
            equations.append(reader)
            (carry,) = reader.outs
        is_sum = parts and uses[after] == 1 and not self.readers[after]
        return Increments(tuple(parts), tuple(equations)) if is_sum else None


def evaluate_equation(eqn: Equation, values: dict[int, Array]) -> None:
    """Add the results of an equation to the values that are known."""
    with lines_of(eqn.source):
        values.update(zip(eqn.outs, results_of(eqn, [values[v] for v in eqn.ins]), strict=True))


def with_added(total: Array, parts: Iterable[tuple[Array, bool]]) -> Array:
    """A total with parts added to it, or subtracted where they come with that."""
    for part, is_subtracted in parts:
        total = total - part if is_subtracted else total + part
    return total
