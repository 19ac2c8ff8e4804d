"""Splits of a region whose loops compute large values again that kernels make element by element, along an index of these."""

from __future__ import annotations

from collections.abc import Iterator

from eqsat_mem.ir import Map, bits
from eqsat_mem.ir.loop_tree import Loop, Seq, with_region
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.sizes import Extents
from eqsat_mem.schedule.split import Choices, split

LARGE = 8
"""A value is large if so many of it exceed the limit."""


def sunk(memory: Memory, limit: int, seq: Seq, extents: Extents, i: int, small: frozenset[int]) -> Iterator[Seq]:
    """``seq`` split along ``i``, large values that do not depend on it computed again inside, along an index of theirs.

    They are elementwise or folds that are written out: distances are elementwise values of a fold over few coordinates.
    """
    ex, program, full = memory.ex, memory.ex.program, memory.full_extents()
    sizes = memory.sizes(extents)
    inside = frozenset(t for t in seq.steps if isinstance(t, int))
    by_element = {t for t in inside if isinstance(program.terms[t], Map) or ex.unrolls.get(t)}
    simple = {t for t in by_element if not program.free[t] >> i & 1 and t not in small}
    large = [t for t in simple if sizes[t] * LARGE > limit]
    if not large:
        return
    read = {c for t in large for c in program.operands(t)}
    for t in sorted(simple.difference(large), reverse=True):  # with what they are made of
        if t in read:
            large.append(t)
            read.update(program.operands(t))
    changed = split(ex, seq, i, Choices(sink=frozenset(large), small=small))
    along = {j for t in large for j in bits(program.free[t]) if extents[j] == full[j]}
    if changed is None or not along:
        return
    j = min(along, key=lambda j: (-extents[j], j))
    for k, step in enumerate(changed.steps):
        if isinstance(step, Loop) and set(step.body.steps).intersection(large):
            inner = split(ex, step.body, j, Choices(small=small))
            changed = changed if inner is None else with_region(changed, (k,), inner)
    yield changed
