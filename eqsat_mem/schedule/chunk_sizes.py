"""Chunk sizes: the candidates for a loop, and the loops of a tree whose sizes are chosen together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

from eqsat_mem.ir.loop_tree import Chunks, Loop

T = TypeVar("T")

FEW_LOOPS = 32
"""The most loops of a tree, or groups of similar loops, whose chunk sizes are chosen individually."""


def same_loop(loop: Loop) -> Any:
    """Return a key that identifies a loop across trees: its index, folds and stacks."""
    return loop.index, loop.folds, loop.stacks


def tied(some: Sequence[Loop], chunks: Chunks) -> list[list[Loop]]:
    """Group the loops of a tree whose chunk sizes are chosen together.

    Each loop is a group of its own; if there are many loops, as in deep networks, similar loops over the same index are one group.

    Args:
        some: the loops.
        chunks: their present chunk sizes; loops with different sizes are in different groups.
    """

    def exactly(loop: Loop) -> Any:
        return loop.index, chunks[loop], len(loop.folds), len(loop.stacks), len(loop.body.steps)

    def roughly(loop: Loop) -> Any:
        return loop.index, chunks[loop], *(n.bit_length() for n in exactly(loop)[2:])

    groups: dict[Any, list[Loop]] = {}
    for alike in (lambda loop: loop, exactly, roughly):
        groups = {}
        for loop in some:
            groups.setdefault(alike(loop), []).append(loop)
        if len(groups) <= FEW_LOOPS:
            break
    return list(groups.values())


@cache
def ladder(extent: int) -> list[int]:
    """Return the chunk sizes to try for an extent, ascending: near each power of two, a divisor of the extent if one is close."""
    sizes = {1}
    power = 2
    while 2 * power <= extent:
        near = [c for c in range(max(1, power * 3 // 4), min(extent // 2, power * 4 // 3) + 1) if extent % c == 0]
        sizes.add(min(near, key=lambda c: (abs(c - power), c)) if near else power)
        power *= 2
    return sorted(sizes)


def first_chunk(steps: Sequence[int]) -> int:
    """Return the size at which the search for a chunk size starts: the closest to 128."""
    return min(steps, key=lambda c: (abs(c - 128), c))


def climbed(best: T, steps: Sequence[int], size: int, improved: Callable[[T, int], T | None]) -> T:
    """Return the best that smaller and then larger sizes give, each for as long as that helps, past one step that does not.

    Args:
        best: what the size at hand gives.
        steps: the sizes to try, ascending.
        size: the size at hand.
        improved: returns what a size gives in place of the best, or None if that is no better.
    """
    here = min(range(len(steps)), key=lambda k: abs(steps[k] - size))
    for path in (range(here - 1, -1, -1), range(here + 1, len(steps))):
        worse = 0
        for position in path:
            new = improved(best, steps[position])
            best, worse = (best, worse + 1) if new is None else (new, 0)
            if worse > 1:
                break
    return best
