"""XLA:GPU as a backend: the base with the figures of a data-centre GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from eqsat_mem.schedule.backend import Backend, Device


@dataclass(frozen=True)
class GpuBackend(Backend):
    """XLA:GPU."""

    platform: ClassVar[str] = "gpu"
    rounds_operands: ClassVar[bool] = True

    @classmethod
    def built_in(cls) -> Self:
        """The backend with a guessed profile of a data-centre GPU."""
        return cls(
            Device(
                name="gpu",
                flops=45e12,
                narrow_flops=700e12,
                elements=15e12,
                levels=((40 * 2**20, 6e12), (math.inf, 2e12)),
                tile_level=0,
                kernel_s=4e-6,
                iteration_s=12e-6,
                reduce_weight=1.0,
                short_reduce_weight=2.0,
                matrix_cores=64,
                reused_bytes=80 * 2**30,
                fresh_rate=2e12,
            )
        )
