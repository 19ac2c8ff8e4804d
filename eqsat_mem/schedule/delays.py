"""Delays: values that a compiler computes long before their first use are computed there.

A program has its terms in an order in which little waits, and a compiler may run it in another: whatever waits for arguments alone first,
all weights that devices gather among it. A delayed value's operand is tied to a value that exists only shortly before its use.
"""

from __future__ import annotations

from collections.abc import Iterator

from eqsat_mem.deadline import Deadline
from eqsat_mem.ir.loop_tree import Path, Seq, at, enclosing, made
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.moves import Move, apply, tie_of, written
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.sizes import extents_inside
from eqsat_mem.schedule.whole_terms import has_effects

MOST_DELAYS = 100
"""Delays of one schedule."""
TRIED = 6
"""Delays that are tried before there are no more."""


def delayed(s: Schedule, limit: int, deadline: Deadline) -> Schedule:
    """The same with values delayed until it fits ``limit`` bytes in the order of execution, or no delay helps."""
    late, memory = frozenset[int](), written(s)
    for _ in range(MOST_DELAYS):
        if s.fits(limit) or deadline.passed():
            break
        tried = filter(None, (apply(s, memory, [move], late) for move in _delays(s, memory, late)[:TRIED]))
        following = next((new for new in tried if new.schedule.peak_bytes <= s.peak_bytes), None)
        if following is None:
            break
        s, late, memory = following
    return s


def _delays(s: Schedule, memory: Memory, late: frozenset[int]) -> list[Move]:
    """The delays of values that wait at the peak in the order of execution, those that save most bytes first."""
    as_run = Memory(s.ex, s.backend)
    path = as_run.peak(s.seq, as_run.full_extents(), s.chunks).path
    found: list[Move] = []
    for depth in range(len(path) + 1):
        seq = at(s.seq, path[:depth]) if depth < len(path) or not path else None
        if isinstance(seq, Seq):
            found += _of_region(s, memory, as_run, path[:depth], seq, late)
    return sorted(found, key=lambda move: (-move.saved, move.path, move.chain))


def _of_region(s: Schedule, memory: Memory, as_run: Memory, path: Path, seq: Seq, late: frozenset[int]) -> Iterator[Move]:
    extents = memory.full_extents()
    for loop in enclosing(s.seq, path):
        extents = extents_inside(extents, loop, s.chunks)
    fused, run, terms = memory.fused(seq), as_run.fused(seq), s.ex.program.terms
    position = as_run.peak(seq, extents, s.chunks).position
    place, runs = ({t: q for q, step in enumerate(order.kept) for t in made(step)}
                   for order in (fused, run))  # fmt: skip
    now = fused.kept.index(run.kept[position])
    for t in run.kept[:position]:
        if not isinstance(t, int) or t in late or t in seq.outs or t in run.operands[position] or run.last_use.get(t, -1) < position:
            continue
        use = next((n for n in range(len(fused.kept)) if t in fused.operands[n]), -1)
        if use <= now or any(has_effects(terms[m]) or t in s.ex.exact for m in fused.members[place[t]]):
            continue
        able = [c for c, q in place.items() if now <= q < use and runs[c] >= position and tie_of(s).can_wait_for(s.ex.program, c)]
        last = max(able, key=lambda c: (c in fused.operands[use], runs[c], -c), default=None)
        longer = [c for c in fused.operands[place[t]] if c in place and fused.last_use[c] < use]
        saved = as_run.size(t, extents) - sum(as_run.size(c, extents) for c in longer)
        if last is not None and saved > 0:
            yield Move(path, (place[t],), use, last, saved, s.backend.device.kernel_s, delays=True)
