"""Which backend plans are made for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax

from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.backends.gpu.targets import is_profile, named
from eqsat_mem.backends.profiles import kept, profile_path
from eqsat_mem.errors import OptionError
from eqsat_mem.schedule.backend import Backend

BACKENDS: dict[str, type[CpuBackend | GpuBackend]] = {"cpu": CpuBackend, "gpu": GpuBackend}
"""By JAX's name of the platform."""


def built_in(platform: str) -> CpuBackend | GpuBackend:
    """The backend of a platform with its built-in profile; a platform that is not known is planned for as a GPU."""
    return BACKENDS.get(platform, GpuBackend).built_in()


def backend_for(device: str | None) -> Backend:
    """The backend that a user names.

    Args:
        device: ``"cpu"``, the name of a card (:mod:`eqsat_mem.backends.gpu.targets`), the file of a profile that was calibrated on another
            machine, or None for the device in use.

    Raises:
        OptionError: if there is no such device, or the file holds no profile.
    """
    if device is None:
        return backend_in_use()
    if is_profile(device):
        return _of_profile(Path(device))
    if device.strip().lower() == "cpu":
        return backend_in_use() if jax.default_backend() == "cpu" else CpuBackend.built_in()
    return GpuBackend.of(named(device))


def _of_profile(path: Path) -> Backend:
    if not path.is_file():
        raise OptionError(f"there is no device profile {path}: eqsat-mem calibrate keeps one; eqsat-mem devices lists devices by name.")
    for kind in BACKENDS.values():
        backend: Backend = kind.built_in()
        figures = kept(path, type(backend.device))
        if figures is not None:
            return replace(backend, device=figures)
    raise OptionError(f"the device profile {path} is of another version of eqsat-mem: run eqsat-mem calibrate again on that machine.")


def backend_in_use() -> Backend:
    """The backend of JAX's default device, with the profile that was calibrated for it, or else the built-in one.

    Raises:
        OptionError: if the file of the profile cannot be read as one.
    """
    backend: Backend = built_in(jax.default_backend())
    path = profile_path()
    figures = kept(path, type(backend.device)) if path is not None and path.exists() else None
    return backend if figures is None else replace(backend, device=figures)
