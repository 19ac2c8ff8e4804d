"""Compiler targets that tests plan for."""

from __future__ import annotations

from dataclasses import replace

from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.backends.gpu.backend import GpuBackend

CPU = CpuBackend.built_in()
GPU = GpuBackend.built_in()
TINY = CpuBackend(
    replace(CPU.device, name="tiny", levels=((256, 1e12), (1024, 1e10), (float("inf"), 1e8)), kernel_s=1e-9, iteration_s=1e-9)
)
"""XLA:CPU on a machine whose caches hold next to nothing, so that small programs are worth splitting."""
