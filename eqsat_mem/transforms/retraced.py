"""Programs that are traced anew: a pass evaluates the terms of a program in another way, and what comes of it is loaded again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from eqsat_mem.frontend.inline import lines_of
from eqsat_mem.frontend.load import load
from eqsat_mem.frontend.preferences import LOADED
from eqsat_mem.frontend.roll import traced
from eqsat_mem.ir import Axes, Program
from eqsat_mem.ir.interpreter import evaluate_term, from_axes, to_axes
from eqsat_mem.passes import Pass
from eqsat_mem.transforms.control_flow import Scan

Array = Any


def retraced(program: Program, run: Callable[[Sequence[Array], Sequence[Array]], Sequence[Array]], passes: Collection[Pass]) -> Program:
    """The program of ``run``, which returns the outputs of another for its arguments and constants; what passes changed that is kept."""
    avals = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in program.inputs]
    new = load(traced(run, avals, program.consts), [b.name for b in program.inputs], LOADED, passes)
    new.passes |= program.passes
    new.outputs = [replace(o, weak_type=w.weak_type) for o, w in zip(new.outputs, program.outputs, strict=True)]
    return new


@dataclass(eq=False)
class Retracing:
    """A program while it is traced with some of its scans in another way, which subclasses say.

    Attributes:
        program: the program.
        scans: the scans that run in another way, with what is known of each.
        args, consts: its arguments and closed-over arrays.
        values: the values of its terms, whole.
    """

    program: Program
    scans: Mapping[Scan, Any]
    args: Sequence[Array]
    consts: Sequence[Array]
    values: dict[int, Array] = field(default_factory=dict)

    def outputs(self) -> list[Array]:
        """The outputs of the program."""
        program, calls = replace(self.program, consts=list(self.consts)), dict[Any, list[Array]]()
        by_result = {t: scan for scan in self.scans for t in scan.results.values()}
        for t in program.reachable():
            with lines_of(program.source.get(t)):
                if t not in by_result:
                    self.values[t] = evaluate_term(program, t, self.args, self.values, calls)
                elif t not in self.values:
                    scan = by_result[t]
                    results = self.run(scan)
                    self.values |= {u: from_axes(program, results[k], scan.call.out_axes[k]) for k, u in scan.results.items()}
        return [self.laid_out(o.term, o.axes) for o in program.outputs]

    def laid_out(self, t: int, axes: Axes) -> Array:
        """A value that lies along these axes."""
        return to_axes(self.program, self.values[t], self.program.free[t], axes)

    def operands(self, scan: Scan) -> list[Array]:
        """The operands of a scan."""
        return [self.laid_out(t, axes) for t, axes in zip(scan.args, scan.call.in_axes, strict=True)]

    def run(self, scan: Scan) -> dict[int, Array]:
        """The results of one of the scans, by position."""
        raise NotImplementedError
