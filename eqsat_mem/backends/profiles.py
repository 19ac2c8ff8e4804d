"""Device profiles measured by ``eqsat-mem calibrate``, stored in the user's cache folder; without one, the built-in profile is used.

The name of a profile's file consists of everything that it depends on: the kind of device, the number of cores, the version of JAX.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import jax

from eqsat_mem.errors import OptionError
from eqsat_mem.schedule.device import Device, Link

D = TypeVar("D", bound=Device)
LINKS = "near", "far"
"""The fields of a profile that are links to other devices."""
VARIABLE = "EQSAT_MEM_PROFILES"
"""The environment variable with a folder of profiles to use instead of the user's cache folder; ``none`` disables stored profiles."""


def profile_path() -> Path | None:
    """Return the path for the profile of the default device, whether or not it exists; None if stored profiles are disabled."""
    home = folder()
    return None if home is None else home / f"{_key()}.json"


def folder() -> Path | None:
    """Return the folder of profiles: ``EQSAT_MEM_PROFILES``, or else the platform's cache folder; None if profiles are disabled."""
    chosen = os.environ.get(VARIABLE, "").strip()
    if chosen:
        return None if chosen.lower() == "none" else Path(chosen)
    return user_folder()


def user_folder() -> Path:
    """Return the folder of this package in the platform's cache folder."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "eqsat_mem"


def keep(device: Device) -> Path:
    """Store a profile for the default device, where :func:`eqsat_mem.backends.choose.backend_in_use` finds it.

    Returns:
        The path of its file.

    Raises:
        OptionError: if stored profiles are disabled.
    """
    path = profile_path()
    if path is None:
        raise OptionError(f"{VARIABLE}=none keeps no profiles: unset it, or name a folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(device), indent=1) + "\n", encoding="utf-8")
    return path


def as_json(device: Device) -> dict[str, Any]:
    """A profile as its file has it: the capacity of main memory is null."""
    return asdict(device) | {"levels": [[None if math.isinf(size) else size, rate] for size, rate in device.levels]}


def from_json(values: dict[str, Any], kind: type[D]) -> D:
    """The inverse of :func:`as_json`."""
    levels = tuple((math.inf if size is None else float(size), float(rate)) for size, rate in values["levels"])
    return kind(**values | {"levels": levels} | {name: _link(values[name]) for name in LINKS})


def _link(values: dict[str, Any]) -> Link:
    points = tuple((str(name), int(count), tuple((float(n), float(s)) for n, s in pairs)) for name, count, pairs in values["points"])
    return Link(float(values["latency_s"]), float(values["rate"]), points)


def kept(path: Path, kind: type[D]) -> D | None:
    """Read a stored profile.

    Args:
        path: the file.
        kind: the class of the profile.

    Returns:
        The profile; None if its fields are not those of ``kind``, as may happen with a profile of another version.

    Raises:
        OptionError: if the file cannot be read as a profile.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
        if set(values) != {f.name for f in fields(kind)}:
            return None
        device = from_json(values, kind)
        rates = [n for name, n in values.items() if name not in ("name", "levels", "tile_level", *LINKS)]
        rates += [n for link in (device.near, device.far) for n in (link.latency_s, link.rate, *_numbers(link))]
        if not device.levels or not all(n > 0 for n in (*rates, *(rate for _, rate in device.levels))):
            raise ValueError("a rate is not above zero")
        if values["tile_level"] not in range(len(device.levels)):
            raise ValueError("tile_level is no level")
        return device
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise OptionError(
            f"the device profile {path} cannot be read ({error}): run eqsat-mem calibrate, or eqsat-mem calibrate --reset."
        ) from error


def _numbers(link: Link) -> Iterator[float]:
    for _, count, points in link.points:
        yield from (count, len(points), *(number for point in points for number in point))


def forget() -> Path | None:
    """Remove the stored profile of the default device.

    Returns:
        The path of the removed file, or None if there was none.
    """
    path = profile_path()
    if path is None or not path.exists():
        return None
    path.unlink()
    return path


def _key() -> str:
    device = jax.local_devices()[0]
    kind = platform.machine() if device.platform == "cpu" else device.device_kind
    return re.sub(r"[^\w.]+", "-", f"{device.platform}-{kind}-{os.cpu_count()}-cores-jax-{jax.__version__}")
