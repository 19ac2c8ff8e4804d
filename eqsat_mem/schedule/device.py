"""The profile of a device."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

Points = tuple[str, int, tuple[tuple[float, float], ...]]
"""What was measured of one collective (:data:`eqsat_mem.ir.ops.collectives.EXCHANGES`) of so many devices: bytes that each of them
receives, smallest first, with the seconds that this takes."""


@dataclass(frozen=True)
class Link:
    """The link over which devices exchange values.

    Attributes:
        latency_s: seconds for the first byte of an exchange.
        rate: bytes that a device receives per second.
        points: measured exchanges. They count instead: exchanges of medium size reach less than the rate.
    """

    latency_s: float
    rate: float
    points: tuple[Points, ...] = ()

    def seconds(self, kind: str, received: float, devices: int) -> float:
        """Seconds of a collective of so many devices, each of which receives so many bytes.

        Of measured numbers of devices the next larger counts, else the largest. Between two points the seconds are a power of the bytes;
        less than the first takes as long as that, and more than the last is received at its rate.

        >>> link = Link(1e-5, 1e9, (("all_reduce", 8, ((1e3, 2e-5), (1e5, 2e-4))),))
        >>> [f"{link.seconds('all_reduce', received, 4):.1e}" for received in (10, 1e4, 1e6)], link.seconds("gather_shares", 1e4, 4)
        (['2.0e-05', '6.3e-05', '2.0e-03'], 2e-05)
        """
        known = [(count, points) for name, count, points in self.points if name == kind]
        if not known:
            return self.latency_s + received / self.rate
        points = min(known, key=lambda one: (one[0] < devices, abs(one[0] - devices)))[1]
        k = bisect_left(points, (received, 0.0))
        if k == 0:
            return points[0][1]
        if k == len(points):
            return points[-1][1] * received / points[-1][0]
        (few, first), (many, last) = points[k - 1 : k + 1]
        return first * (last / first) ** (math.log(received / few) / math.log(many / few))


NEAR, FAR = Link(2e-5, 370e9), Link(65e-6, 50e9)
"""The links of data-centre GPUs: NVIDIA's figures of NVLink with NCCL, and 400 Gbit/s for each device between machines."""


@dataclass(frozen=True, kw_only=True)
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
        near: the link to other devices of the machine.
        far: the link to devices of other machines.
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
    near: Link = NEAR
    far: Link = FAR

    def level(self, working_set: float) -> int:
        """Return the number of the first level of memory that holds a working set, given its bytes; the last level if none does."""
        for k, (capacity, _) in enumerate(self.levels):
            if working_set <= capacity:
                return k
        return len(self.levels) - 1

    def bandwidth(self, working_set: float) -> float:
        """Return the bytes per second at which a working set is read, given its bytes."""
        return self.levels[self.level(working_set)][1]

    def fresh_s(self, allocated: float) -> float:
        """Return the seconds that the system takes to provide an allocation, given its bytes; zero if memory is reused."""
        return allocated / self.fresh_rate if allocated >= self.reused_bytes else 0.0
