"""Footprints of regions: what is held around each kernel, and where most is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

from eqsat_mem.ir.loop_tree import Path, Step
from eqsat_mem.schedule.fusion import Fused
from eqsat_mem.schedule.packing import added_by_scratch, at_once, bytes_of, free_outputs, places_of
from eqsat_mem.schedule.sizes import Extents


@dataclass(frozen=True)
class Peak:
    """The largest live set of a region: its bytes, where in the tree it is, and the position of its kernel."""

    nbytes: int
    path: Path
    position: int


@dataclass(frozen=True, eq=False)
class Footprint:
    """The memory that a region holds around each of its kernels, whatever the chunks of loops inside it.

    Attributes:
        kernels: its kernels.
        around: the bytes held while each of them runs, besides what is inside it if it is a loop or a stretch.
        lives: its values, their bytes, and the positions of the first and last kernel at which they are there.
        spare: of a whole program, the outputs that are still to be written then, in which no value around the kernel lies: sizes, with
            how many have them. Their bytes are among those ``around`` a kernel that is no loop or stretch; what is inside of these may lie
            in them.
    """

    kernels: Fused
    around: tuple[int, ...]
    lives: tuple[tuple[int, int, int, float], ...]
    spare: tuple[Counter[int], ...] = ()

    @classmethod
    def of_program(
        cls,
        kernels: Fused,
        around: list[int],
        lives: list[tuple[int, int, int, float]],
        joined: Mapping[int, int],
        scratch: Sequence[tuple[int, int]],
        packs: bool,
    ) -> Self:
        """The footprint of a whole program; outputs that are still to be written are not yet among the bytes ``around`` kernels, but the
        ``scratch`` of each is. Values ``joined`` to others lie in their place. Where the backend ``packs``, most is held where values are
        most, with what scratch adds that lies beside them."""
        values, alone = places_of(lives, joined), at_once(scratch)
        spare = free_outputs(values, alone, len(around))
        straight = set(kernels.straight)
        held = [nbytes + bytes_of(spare[p]) if p in straight else nbytes for p, nbytes in enumerate(around)]
        if packs and straight:
            most = max(straight, key=held.__getitem__)
            beside = [sum(nbytes for nbytes in both if nbytes > 0) for both in scratch]  # less than nothing where operands are overwritten
            held[most] = max(held[most], max(held[p] - beside[p] for p in straight) + added_by_scratch(values, alone))
        return cls(kernels, tuple(held), tuple(lives), tuple(spare))

    @property
    def kept(self) -> tuple[Step, ...]:
        return self.kernels.kept

    @cached_property
    def highest(self) -> Peak:
        """The first of the highest points that are no loops or stretches."""
        position = max(self.kernels.straight, key=self.around.__getitem__, default=-1)
        return Peak(self.around[position], (), position) if position >= 0 else Peak(0, (), -1)

    def free(self, position: int) -> Counter[int]:
        """The outputs in which nothing lies at a kernel, as ``spare``."""
        return self.spare[position] if self.spare and position >= 0 else Counter()

    @cached_property
    def free_bytes(self) -> tuple[int, ...]:
        """The bytes of these outputs at each kernel."""
        return tuple(map(bytes_of, self.spare)) or (0,) * len(self.around)

    def unwritten(self, position: int, nbytes: int) -> list[tuple[int, int]]:
        """Of the outputs that are written after a kernel the largest, with so many bytes altogether."""
        found = []
        for t, size, first, last in sorted(self.lives, key=lambda live: -live[1]):
            if nbytes > 0 and first > position and last == math.inf:
                found.append((t, min(size, nbytes)))
                nbytes -= size
        return found

    def live(self, position: int) -> list[tuple[int, int]]:
        """The values that are there while a kernel runs, with their bytes."""
        return [(t, nbytes) for t, nbytes, first, last in self.lives if first <= position <= last]


class Passing(NamedTuple):
    """The values that are there at a kernel and that no later one reads, and the slices of outer values that it reads from copies. The
    loop around makes these, since what further loops have sliced is there as it is read."""

    dying: tuple[int, ...]
    sliced: tuple[int, ...]


class Live(NamedTuple):
    """A value that is there at a peak: its bytes, and the extents of all indices in its region."""

    term: int
    nbytes: int
    extents: Extents
