"""The slices of a split region that its loops had better keep for later loops than let these compute them again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import bits
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.cost_model import again_s
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.minimum_cut import sink_side
from eqsat_mem.schedule.sizes import Extents
from eqsat_mem.schedule.split import Kind, Phases

PARTS = 1024
"""Parts of a byte in which prices are counted: the last of them decides between values of as many bytes."""

Arc = tuple[int | str, int | str, int]


def worth_keeping(ex: Extraction, memory: Memory, backend: Backend, phases: Phases, extents: Extents) -> tuple[int, ...]:
    """The slices to keep so that it takes least to store these, and to compute again in later loops what else is needed there.

    What is small may stand for all that it is made of: one column of sorted rows for rows and sort, a mask for its random bits. Values are
    kept for operations that are not repeated, so a choice is a cut of the network through both, and the best one a minimum cut. Of equal
    choices it has values that take time to compute, and then the last.
    """
    later = {t: loops for t, loops in phases.loops_of.items() if phases.kind[t] is Kind.SLICE and loops >> phases.phase[t] > 1}
    seconds = {t: again_s(ex, t, extents, backend) for t in later}
    again = {t: seconds[t] * (loops.bit_count() - 1) for t, loops in later.items()}
    if not any(again.values()):
        return ()
    stored = backend.device.levels[-1][1] / 3  # bytes per second: written by one loop, and copied to where they are kept
    arcs: list[Arc] = [("computed", t, round(s * stored * PARTS)) for t, s in again.items() if s]
    arcs += [(t, ~t, memory.size(t, extents) * PARTS + (not seconds[t])) for t in later]
    side = sink_side((*arcs, *_needs(ex, phases, later)), "computed", "later")
    return tuple(t for t in later if ~t in side and t not in side)


def _needs(ex: Extraction, phases: Phases, later: Mapping[int, int]) -> Iterator[Arc]:
    """The values, of those that later loops could read, that are needed there for others which are not kept, or in any case.

    A value is a node where it is computed, and its complement is one where it is read.
    """
    always = PARTS << 80
    first = {t: bits(loops)[0] if loops.bit_count() > 1 else phases.phase[t] for t, loops in later.items()}
    for user, loops in phases.loops_of.items():
        for t in first.keys() & {*ex.program.operands(user)}:
            if loops >> first[t] > 1:
                kept_in_time = user in later and phases.phase[user] <= first[t]
                yield ~t, user if kept_in_time else "later", always
