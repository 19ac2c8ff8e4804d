"""The step of a scan as equations on numbered values: what it reads, carries and makes, and what depends on what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property

from eqsat_mem.frontend.flat_jaxpr import Equation
from eqsat_mem.frontend.inline import flatten
from eqsat_mem.frontend.preferences import LOADED
from eqsat_mem.transforms.control_flow import Scan


class Step:
    """The step of a scan.

    Attributes:
        scan: the scan.
        flat: its body without nesting.
        readers: the equations that read each value.
        producer: the equation that makes each value that one makes.
    """

    def __init__(self, scan: Scan):
        self.scan, self.flat = scan, flatten(scan.body, LOADED, ())
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
        """What it reads of values that have a slice for each step."""
        return self.flat.inputs[self.scan.first_carry + self.scan.carries :]

    @property
    def ys(self) -> Sequence[int]:
        """What the scan stacks."""
        return self.flat.outputs[self.scan.carries :]

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
