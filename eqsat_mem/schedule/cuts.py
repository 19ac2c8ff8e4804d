"""The ways to split a region along an index, among which the search chooses."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import tee
from typing import Generic, TypeVar

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import argument_bytes
from eqsat_mem.ir.loop_tree import Seq
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.cost_model import again_s
from eqsat_mem.schedule.kept_slices import worth_keeping
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.sizes import Extents
from eqsat_mem.schedule.split import Choices, Phases

T = TypeVar("T")

SHARES = 0.55, 0.85
"""The shares of the room beside arguments that slices may fill which loops keep for later ones; the rest is for what they work on."""
MOST_KEPT = 40
"""Slices beyond which there are too many to choose those that are kept one after the other."""


def kept_in_room(
    ex: Extraction,
    memory: Memory,
    backend: Backend,
    limit: int,
    dear: Sequence[int],
    seq: Seq,
    extents: Extents,
    i: int,
    small: frozenset[int],
) -> Iterator[Seq]:
    """Split a region along ``i`` where there is no room for all slices that are ``dear``: with as many of them as there is room for, those
    that spare most seconds for their bytes."""
    room = limit - argument_bytes(ex.program)
    if not 1 < len(dear) <= MOST_KEPT or sum(memory.size(t, extents) for t in dear) <= SHARES[0] * room:
        return
    phases = Phases(ex, seq, i, Choices(small=small))
    seconds = {t: again_s(ex, t, extents, backend) for t in phases.loops_of}

    def spent(keep: frozenset[int]) -> float:
        loops_of = phases.keeping(keep).loops_of if keep else phases.loops_of
        return sum(loops.bit_count() * seconds[t] for t, loops in loops_of.items())

    ordered = most_worth(dear, {t: memory.size(t, extents) for t in dear}, spent, int(SHARES[-1] * room))
    filled = [sum(memory.size(t, extents) for t in ordered[: k + 1]) for k in range(len(ordered))]
    for count in sorted({bisect(filled, share * room) for share in SHARES}):
        kept = phases.keeping(frozenset(ordered[:count])).split() if 0 < count < len(dear) else None
        if kept is not None:
            yield kept


def most_worth(able: Sequence[int], sizes: Mapping[int, int], spent: Callable[[frozenset[int]], float], room: int) -> list[int]:
    """Values of at most ``room`` bytes, one by one that which spares most of what is ``spent`` for its bytes.

    What one spares becomes less with others: it is looked at again only where it was the most. Source: M. Minoux, Accelerated greedy
    algorithms for maximizing submodular set functions, 1978.
    """
    kept, now = frozenset[int](), spent(frozenset())
    order: list[int] = []
    worth = [(-math.inf, t, -1) for t in able]
    while worth:
        least, t, known = heappop(worth)
        if sizes[t] > room:
            continue
        if known == len(order):
            if least >= 0:
                break
            order.append(t)
            kept, now, room = kept | {t}, now + least * sizes[t], room - sizes[t]
        else:
            heappush(worth, ((spent(kept | {t}) - now) / sizes[t], t, len(order)))
    return order


@dataclass(frozen=True)
class Cuts:
    """The ways to split a region along an index, each made when it is asked for first, and the slices that several loops compute and that
    are dear: to compute them again takes longer than to store them, or what alone reads them."""

    ways: Lazy[Seq]
    dear: tuple[int, ...]


class Lazy(Generic[T]):
    """The elements of an iterator, each made when it is asked for first, and once."""

    def __init__(self, source: Iterator[T]) -> None:
        (self._kept,) = tee(source, 1)

    def __iter__(self) -> Iterator[T]:
        return copy(self._kept)


def cuts(ex: Extraction, memory: Memory, backend: Backend, large: bool, seq: Seq, extents: Extents, i: int, small: frozenset[int]) -> Cuts:
    """Split a region along ``i``: with no slices kept for later loops, and with all whose recomputation takes longer than storing them.

    Where loops would do too much work again, with all that several of them need; then at waists, and, unless the program is ``large``, with
    elementwise values as late as they may, where that makes a difference: of a large program one tree is kept, which then is the wrong one
    too often. Values that are ``small`` may be computed whole.
    """
    phases = Phases(ex, seq, i, Choices(small=small))
    dear = worth_keeping(ex, memory, backend, phases, extents)
    return Cuts(Lazy(_ways(ex, large, phases, phases.shared_slices(), dear, small)), dear)


def _ways(ex: Extraction, large: bool, phases: Phases, shared: Sequence[int], dear: Sequence[int], small: frozenset[int]) -> Iterator[Seq]:
    """Split as :func:`cuts` says, without slices kept and with these."""
    seq, i = phases.seq, phases.index
    changed = phases.split()
    if changed is not None:
        yield changed
    for keep in (dear, shared) if changed is None else (dear,):
        keeping = phases.keeping(frozenset(keep))
        if keeping.stacked != phases.stacked and (kept := keeping.split()) is not None:
            yield kept
            break
    narrow = Phases(ex, seq, i, Choices(small=small, waists=True))
    if narrow.kind != phases.kind and (apart := narrow.split()) is not None:
        yield apart
    late = None if changed is None or large else phases.split(late=True)
    if late is not None and late != changed:
        yield late
