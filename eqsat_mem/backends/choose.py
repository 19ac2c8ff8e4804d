"""Which backend plans are made for."""

from __future__ import annotations

from dataclasses import replace

import jax

from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.backends.profiles import kept, profile_path
from eqsat_mem.schedule.backend import Backend

BACKENDS: dict[str, type[CpuBackend | GpuBackend]] = {"cpu": CpuBackend, "gpu": GpuBackend}
"""By JAX's name of the platform."""


def built_in(platform: str) -> CpuBackend | GpuBackend:
    """The backend of a platform with its built-in profile; a platform that is not known is planned for as a GPU."""
    return BACKENDS.get(platform, GpuBackend).built_in()


def backend_in_use() -> Backend:
    """The backend of JAX's default device, with the profile that was calibrated for it, or else the built-in one.

    Raises:
        OptionError: if the file of the profile cannot be read as one.
    """
    backend: Backend = built_in(jax.default_backend())
    path = profile_path()
    figures = kept(path, type(backend.device)) if path is not None and path.exists() else None
    return backend if figures is None else replace(backend, device=figures)
