"""The profile of a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """The figures of a device for the roofline model (Williams, Waterman and Patterson, 2009). Rates are those of all cores together.

    Attributes:
        name: the name of the device in reports.
        flops: multiplications and additions per second of float32 contractions with unrounded operands.
        narrow_flops: those of contractions of two-byte numbers; contractions whose operands are rounded
            (:mod:`eqsat_mem.ir.precision`) run at half this rate.
        elements: elementwise additions of 4-byte numbers per second.
        levels: for each level of memory, its capacity in bytes and the bytes per second of data that fits it, smallest first; the last
            is main memory.
        tile_level: the number of the level in which tiles are assumed to stay when programs are extracted.
        kernel_s: seconds to launch a kernel.
        iteration_s: seconds of overhead per iteration of a loop.
        reduce_weight: the cost of folding one element, in elementwise additions.
        short_reduce_weight: the same along an axis of fewer than :attr:`eqsat_mem.schedule.backend.Backend.short_fold` elements.
        matrix_cores: the number of units to which the rows of a contraction are distributed.
        reused_bytes: an allocation of at least this many bytes is new memory in every run.
        fresh_rate: bytes per second at which the system provides new memory.
    """

    name: str
    flops: float
    narrow_flops: float
    elements: float
    levels: tuple[tuple[float, float], ...]
    tile_level: int
    kernel_s: float
    iteration_s: float
    reduce_weight: float
    short_reduce_weight: float
    matrix_cores: int
    reused_bytes: float
    fresh_rate: float

    def level(self, working_set: float) -> int:
        """Return the number of the first level of memory that holds a working set, given its bytes; the last level if none does."""
        return next((k for k, (capacity, _) in enumerate(self.levels) if working_set <= capacity), len(self.levels) - 1)

    def bandwidth(self, working_set: float) -> float:
        """Return the bytes per second at which a working set is read, given its bytes."""
        return self.levels[self.level(working_set)][1]

    def fresh_s(self, allocated: float) -> float:
        """Return the seconds that the system takes to provide an allocation, given its bytes; zero if memory is reused."""
        return allocated / self.fresh_rate if allocated >= self.reused_bytes else 0.0


@dataclass(frozen=True)
class Link:
    """The link over which devices exchange values: seconds for the first byte of an exchange, and bytes that a device receives per
    second."""

    latency_s: float
    rate: float
