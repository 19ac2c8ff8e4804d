"""Figures of a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Figures of a device: work per second, all cores together.

    Attributes:
        name: how reports call the device.
        flops: multiplications and additions per second of float32 contractions computed in full.
        narrow_flops: those of two-byte contractions; contractions whose operands are rounded
            (:mod:`eqsat_mem.ir.precision`) run at half of it.
        elements: elementwise additions of 4-byte numbers per second.
        levels: pairs of a capacity in bytes and the bytes per second of data that fits it, smallest first; the last is main
            memory.
        tile_level: the level at which tiles of loops are assumed to stay when programs are extracted.
        kernel_s: seconds to launch a kernel.
        iteration_s: seconds for one more turn of a loop.
        reduce_weight: additions that folding one element takes.
        short_reduce_weight: the same along an axis of fewer than :attr:`eqsat_mem.schedule.backend.Backend.short_fold` elements.
        matrix_cores: units to which the rows of a contraction are distributed.
        reused_bytes: an allocation of at least so many bytes is new memory in every run.
        fresh_rate: bytes per second at which the system hands out new memory.
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
        """The first level of the memory that holds so many bytes, or the last."""
        return next((k for k, (capacity, _) in enumerate(self.levels) if working_set <= capacity), len(self.levels) - 1)

    def bandwidth(self, working_set: float) -> float:
        """Bytes per second of data of so many bytes."""
        return self.levels[self.level(working_set)][1]

    def fresh_s(self, allocated: float) -> float:
        """Seconds that the system takes to hand out an allocation of so many bytes."""
        return allocated / self.fresh_rate if allocated >= self.reused_bytes else 0.0
