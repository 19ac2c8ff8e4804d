"""Memory and time of a step of the user's loop, at any extents of the axes along which the loop may be split."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Block, Call, Program, itemsize
from eqsat_mem.ir.jaxprs import consts_and_carries
from eqsat_mem.ir.loop_tree import Seq, loops, walk_regions
from eqsat_mem.ir.ops import Shapes
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.copies import turned_operands
from eqsat_mem.schedule.weights import trips

if TYPE_CHECKING:
    from eqsat_mem.schedule.schedules import Schedule

SLOW = 0.7
"""Times as written from which scans in chunks of a batch are compared with scans whose steps run again: a product of few rows reads all
parameters in each step of each chunk."""
SLOW_BY_WINDOW = 1.5
"""Times as written from which operations with windows are compared with tiles that overlap, of which a third is computed again."""


@dataclass(frozen=True, eq=False)
class Step:
    """The body of a loop, or the branches of a choice, without loops of ours, on a backend."""

    bodies: Sequence[tuple[Seq, Any]]

    @classmethod
    def of(cls, call: Call, backend: Backend) -> Step:
        """The body of a call that has one as a program; made once."""
        known: Step | None = call.inside.figures.get(backend)
        if known is None:
            from eqsat_mem.schedule.memory import Memory  # the figures of a call are among those of the program around it
            from eqsat_mem.schedule.split import region
            from eqsat_mem.schedule.timing import Timing

            every = map(Extraction, call.inside.alternatives)
            known = call.inside.figures[backend] = cls([(region(ex), Timing(Memory(ex, backend.inside()))) for ex in every])
        return known

    def held(self, extents: Mapping[int, int]) -> int:
        """Bytes that it holds besides its arguments."""
        return max(int(timing.memory.peak(seq, self._extents(timing, extents), {}).nbytes) for seq, timing in self.bodies)

    def seconds(self, extents: Mapping[int, int]) -> float:
        """Seconds that it takes, with what a turn of a loop takes besides its kernels."""
        return max(float(timing.seconds(seq, self._extents(timing, extents), {}) + timing.backend.step_s) for seq, timing in self.bodies)

    def _extents(self, timing: Any, extents: Mapping[int, int]) -> Any:
        out = timing.memory.full_extents()
        for i, n in extents.items():
            out = out.with_extent(i, n)
        return out


def loop_s(call: Call, ins: Shapes, outs: Shapes, backend: Backend) -> float | None:
    """Seconds of a loop or branch of the user's whose operands and results have these shapes: of its steps on a chunk, else of the plans of
    its bodies, the longest of branches; None where neither is known."""
    chunk = {} if call.inside is None else call.inside.extents(ins)
    known = [seconds for seconds in call.bodies_s if seconds]
    if known and not chunk:
        once = max(known) if call.prim.name == "cond" else sum(known) + backend.step_s
    elif call.inside is not None:
        once = Step.of(call, backend).seconds(chunk)
    else:
        return None
    return trips(call) * once + _copied_bytes(call, ins, outs) / backend.device.levels[-1][1]


def _copied_bytes(call: Call, ins: Shapes, outs: Shapes) -> int:
    """Bytes that the steps of a scan move besides what its body does: slices come out of arrays, and results are written twice."""
    if call.prim.name != "scan":
        return 0
    consts, carries = consts_and_carries(call.params)
    first, avals = consts + carries, call.params["jaxpr"].in_avals
    read = sum(math.prod(shape) * itemsize(aval.dtype) for shape, aval in zip(ins[first:], avals[first:], strict=True))
    made = sum(math.prod(shape) * itemsize(dtype) for shape, dtype in zip(outs[carries:], call.out_dtypes[carries:], strict=True))
    return read + 2 * made


def block_scratch(program: Program, backend: Backend, call: Call, args: tuple[int, ...], extents: Sequence[int]) -> int:
    """Bytes that a block operation holds beside its operands and results."""
    ins, outs = ([tuple(math.prod(extents[i] for i in axis) for axis in axes) for axes in side] for side in (call.in_axes, call.out_axes))
    turned = sum(math.prod(ins[k]) * itemsize(program.terms[args[k]].dtype) for k in turned_operands(call, args, program, backend))
    if call.inside is not None and (chunk := call.inside.extents(ins)):
        return turned + Step.of(call, backend).held(chunk)
    elements = backend.weights.workspace(call, ins, outs)
    return turned + call.scratch_bytes + (int(elements) * itemsize(program.terms[args[0]].dtype) if args else 0)


def in_chunks(program: Program, seq: Seq) -> set[Call]:
    """The loops of the user's that a tree runs chunk by chunk, so that plans of their bodies do not count."""
    found = set[Call]()
    for loop in loops(seq):
        steps = (step for _, inner in walk_regions(loop.body) for step in inner.steps if isinstance(step, int))
        calls = {term.call for t in steps if isinstance(term := program.terms[t], Block)}
        found |= {call for call in calls if call.inside is not None and (call.pointwise | call.folds) >> loop.index & 1}
    return found


def slow_in_chunks(s: Schedule, written: Schedule, by_window: Callable[[], bool] = lambda: False) -> bool:
    """Whether a schedule takes long that runs loops of the user's chunk by chunk, or operations with windows, if any are ``by_window``."""
    in_loops = s.seconds > SLOW * written.seconds and bool(in_chunks(s.ex.program, s.seq))
    return in_loops or (s.seconds > SLOW_BY_WINDOW * written.seconds and by_window())


def settled(s: Schedule) -> Schedule:
    """A schedule without plans of bodies that it does not run: those of loops that it runs chunk by chunk."""
    program = s.ex.program
    planned = (call for call in in_chunks(program, s.seq) if any(call.bodies) or not call.fit)
    new = {call: replace(call, bodies=(), bodies_s=(), fit=True, scratch_bytes=0) for call in planned}
    if not new:
        return s
    terms = [replace(t, call=new[t.call]) if isinstance(t, Block) and t.call in new else t for t in program.terms]
    return replace(s, ex=replace(s.ex, program=replace(program, terms=terms)))
