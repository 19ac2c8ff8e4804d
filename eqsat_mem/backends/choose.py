"""The choice of the backend for which plans are made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.backends.profiles import kept, profile_path
from eqsat_mem.errors import OptionError
from eqsat_mem.schedule.backend import Backend

if TYPE_CHECKING:  # a plan for a CPU does without what is known of GPUs, and is made sooner
    from eqsat_mem.backends.gpu.backend import GpuBackend


def built_in(platform: str) -> CpuBackend | GpuBackend:
    """Return the backend of a platform with its built-in profile; an unknown platform is treated as a GPU."""
    if platform == "cpu":
        return CpuBackend.built_in()
    from eqsat_mem.backends.gpu.backend import GpuBackend

    return GpuBackend.built_in()


def backend_for(device: str | None) -> Backend:
    """Return the backend that a user names.

    Args:
        device: ``"cpu"``, the name of a card (:mod:`eqsat_mem.backends.gpu.targets`), the path of a profile calibrated on another
            machine, or None for JAX's default device.

    Raises:
        OptionError: if no device has this name, or the file is missing or is not a profile of this version.
    """
    if device is None:
        return backend_in_use()
    from eqsat_mem.backends.gpu.backend import GpuBackend
    from eqsat_mem.backends.gpu.targets import is_profile, named

    if is_profile(device):
        return _of_profile(Path(device))
    if device.strip().lower() == "cpu":
        return backend_in_use() if jax.default_backend() == "cpu" else CpuBackend.built_in()
    return GpuBackend.of(named(device))


def _of_profile(path: Path) -> Backend:
    if not path.is_file():
        raise OptionError(f"there is no device profile {path}: eqsat-mem calibrate keeps one; eqsat-mem devices lists devices by name.")
    for platform in ("cpu", "gpu"):
        backend: Backend = built_in(platform)
        figures = kept(path, type(backend.device))
        if figures is not None:
            return replace(backend, device=figures)
    raise OptionError(f"the device profile {path} is of another version of eqsat-mem: run eqsat-mem calibrate again on that machine.")


def backend_in_use() -> Backend:
    """Return the backend of JAX's default device, with its calibrated profile if there is one, else the built-in profile.

    Raises:
        OptionError: if the file of the calibrated profile cannot be read as a profile.
    """
    backend: Backend = built_in(jax.default_backend())
    path = profile_path()
    figures = kept(path, type(backend.device)) if path is not None and path.exists() else None
    return backend if figures is None else replace(backend, device=figures)
