"""Device profiles that ``eqsat-mem calibrate`` measured, kept in the user's cache folder; without one, the built-in profile counts.

A profile is kept under what it depends on: the device's kind, the number of cores, and the version of JAX.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TypeVar

import jax

from eqsat_mem.errors import OptionError
from eqsat_mem.schedule.device import Device

D = TypeVar("D", bound=Device)
VARIABLE = "EQSAT_MEM_PROFILES"
"""The folder of profiles in place of the user's cache folder; ``none`` is no folder, so that built-in profiles count."""


def profile_path() -> Path | None:
    """Where the profile of the default device is kept, whether or not it is there; None where profiles are switched off."""
    home = folder()
    return None if home is None else home / f"{_key()}.json"


def folder() -> Path | None:
    """``EQSAT_MEM_PROFILES``, or what the platform sets aside for files that can be made again."""
    chosen = os.environ.get(VARIABLE, "").strip()
    if chosen:
        return None if chosen.lower() == "none" else Path(chosen)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "eqsat_mem"


def keep(device: Device) -> Path:
    """Write a profile for the default device, where :func:`eqsat_mem.backends.choose.backend_in_use` finds it.

    Raises:
        OptionError: if profiles are switched off.
    """
    path = profile_path()
    if path is None:
        raise OptionError(f"{VARIABLE}=none keeps no profiles: unset it, or name a folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    values = asdict(device) | {"levels": [[None if math.isinf(size) else size, rate] for size, rate in device.levels]}
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return path


def kept(path: Path, kind: type[D]) -> D | None:
    """The profile in a file; None if it has other fields than profiles have now, as those of other versions may.

    Raises:
        OptionError: if the file holds no profile.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
        if set(values) != {f.name for f in fields(kind)}:
            return None
        levels = tuple((math.inf if size is None else float(size), float(rate)) for size, rate in values["levels"])
        numbers = [n for name, n in values.items() if name not in ("name", "levels", "tile_level")]
        if not levels or not all(n > 0 for n in (*numbers, *(rate for _, rate in levels))):
            raise ValueError("a rate is not above zero")
        if values["tile_level"] not in range(len(levels)):
            raise ValueError("tile_level is no level")
        return kind(**values | {"levels": levels})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise OptionError(
            f"the device profile {path} cannot be read ({error}): run eqsat-mem calibrate, or eqsat-mem calibrate --reset."
        ) from error


def forget() -> Path | None:
    """Remove the profile of the default device; the file that is gone, or None if there was none."""
    path = profile_path()
    if path is None or not path.exists():
        return None
    path.unlink()
    return path


def _key() -> str:
    device = jax.local_devices()[0]
    kind = platform.machine() if device.platform == "cpu" else device.device_kind
    return re.sub(r"[^\w.]+", "-", f"{device.platform}-{kind}-{os.cpu_count()}-cores-jax-{jax.__version__}")
