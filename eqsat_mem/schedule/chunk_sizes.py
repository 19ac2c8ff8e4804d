"""Chunk sizes: those that a loop may have, and which loops of a tree get theirs together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from eqsat_mem.ir.loop_tree import Chunks, Loop

FEW_LOOPS = 32
"""Up to so many loops of a tree, or groups of loops that are alike, get their chunk sizes one by one."""


def same_loop(loop: Loop) -> Any:
    """What is the same of a loop in another tree."""
    return loop.index, loop.folds, loop.stacks


def tied(some: Sequence[Loop], chunks: Chunks) -> list[list[Loop]]:
    """The loops of a tree one by one; where there are many, as in deep networks, loops over one index that are alike together."""

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
    """Chunk sizes to try, ascending: near powers of two, divisors of the extent where one is near (no remainder to run)."""
    sizes = {1}
    power = 2
    while 2 * power <= extent:
        near = [c for c in range(max(1, power * 3 // 4), min(extent // 2, power * 4 // 3) + 1) if extent % c == 0]
        sizes.add(min(near, key=lambda c: (abs(c - power), c)) if near else power)
        power *= 2
    return sorted(sizes)


def first_chunk(steps: Sequence[int]) -> int:
    """Where the search for a chunk size starts."""
    return min(steps, key=lambda c: (abs(c - 128), c))
