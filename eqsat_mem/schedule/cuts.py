"""The ways to split a region along an index, among which the search chooses."""

from __future__ import annotations

from collections.abc import Iterator

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir.loop_tree import Seq
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.cost_model import again_s
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.sizes import Extents
from eqsat_mem.schedule.split import Choices, Phases


def cuts(
    ex: Extraction, memory: Memory, backend: Backend, large: bool, seq: Seq, extents: Extents, i: int, small: frozenset[int]
) -> Iterator[Seq]:
    """Split a region along ``i``: with no slices kept for later loops, and with all whose recomputation takes longer than storing them.

    Where loops would do too much work again, with all that several of them need; then at waists, and, unless the program is ``large``, with
    elementwise values as late as they may, where that makes a difference: of a large program one tree is kept, which then is the wrong one
    too often. Values that are ``small`` may be computed whole.
    """
    slowest = backend.device.levels[-1][1]
    phases = Phases(ex, seq, i, Choices(small=small))
    shared = phases.shared_slices()
    dear = [t for t in shared if again_s(ex, t, extents, backend) > 3 * memory.size(t, extents) / slowest]
    changed = phases.split()
    if changed is not None:
        yield changed
    for keep in (dear, shared) if changed is None else (dear,):
        keeping = Phases(ex, seq, i, Choices(keep=frozenset(keep), small=small))
        if keeping.stacked != phases.stacked and (kept := keeping.split()) is not None:
            yield kept
            break
    narrow = Phases(ex, seq, i, Choices(small=small, waists=True))
    if narrow.kind != phases.kind and (apart := narrow.split()) is not None:
        yield apart
    late = None if changed is None or large else phases.split(late=True)
    if late is not None and late != changed:
        yield late
