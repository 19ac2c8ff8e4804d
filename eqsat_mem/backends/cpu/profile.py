"""The built-in profile of a CPU, from its number of cores and the sizes of its caches."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from eqsat_mem.backends.cpu.vector_width import machine_bits
from eqsat_mem.schedule.device import Device, Link

THIN_COLUMNS = 12.0
"""The columns of a contraction's result at which it reaches half of its full rate: benchmarks/calibration/small_contractions.py."""
DEAL_S = 2e-5
"""The seconds that the kernel library takes to distribute a contraction to all cores: benchmarks/calibration/small_contractions.py."""
NEAR, FAR = Link(1.5e-4, 2e9), Link(3e-3, 1e9)
"""Between devices of one process, and of processes that exchange by gloo: both measured on a 2-core server that counts as 8 devices."""


@dataclass(frozen=True, kw_only=True)
class CpuDevice(Device):
    """The profile of a CPU.

    Attributes:
        vector_bits: the width in bits of the vectors for which plans are compiled (:mod:`eqsat_mem.backends.cpu.vector_width`).
        thin_columns: the columns of a contraction's result at which it reaches half of its full rate.
        deal_s: seconds that the kernel library takes to distribute a large contraction to all cores.
        function_factor: the cost of an exponential or similar function on this CPU, as a multiple of its weight in
            :data:`eqsat_mem.backends.cpu.weights.MEASURED`.
        near: the link to other devices of the process.
        far: the link to devices of other processes.
    """

    vector_bits: int
    thin_columns: float
    deal_s: float
    function_factor: float
    near: Link = NEAR
    far: Link = FAR


def built_in() -> CpuDevice:
    """Return the built-in profile of this machine.

    Rates per core were measured on a 2-core x86 server; ``eqsat-mem calibrate`` replaces them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    l2 = (_cache_bytes(2) or 2**20) * cores
    l3 = _cache_bytes(3) or 16 * 2**20
    return CpuDevice(
        name=f"cpu ({cores} cores)",
        flops=225e9 * cores,
        narrow_flops=450e9 * cores,
        elements=50e9 * cores,
        levels=(
            (l2 / 2, 90e9 * cores),
            (l2, 75e9 * cores),
            (0.45 * l3, 65e9 * cores),
            (l3, 20e9 * cores),
            (math.inf, 15e9 * cores),
        ),
        tile_level=1,
        kernel_s=1e-6,
        iteration_s=2e-6,
        reduce_weight=9.0,
        short_reduce_weight=35.0,
        matrix_cores=cores,
        reused_bytes=32 * 2**20,
        fresh_rate=4e9,
        vector_bits=machine_bits(),
        thin_columns=THIN_COLUMNS,
        deal_s=DEAL_S,
        function_factor=1.0,
    )


def _cache_bytes(level: int) -> int | None:
    """Return the size in bytes of this machine's cache of a level, from Linux's description of its first core; None if unknown."""
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            if int((folder / "level").read_text()) == level and (folder / "type").read_text().strip() != "Instruction":
                text = (folder / "size").read_text().strip()
                return int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]]
        except (OSError, ValueError, KeyError):
            continue
    return None
