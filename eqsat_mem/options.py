"""The options of a plan, their checks, and the memory limit that results."""

from __future__ import annotations

import math
import numbers
import operator
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, get_args

from eqsat_mem.errors import OptionError
from eqsat_mem.units import UNITS, format_bytes

__all__ = ["Accuracy", "Options", "device_capacity", "format_bytes", "parse_bytes", "resolve_limit"]

Accuracy = Literal["bitwise", "reassociate", "all"]
"""The rules that may apply: those that keep every bit, those that also re-associate sums, or all of them."""

LIMIT_VARIABLE = "EQSAT_MEM_LIMIT"
DEVICE_VARIABLE = "EQSAT_MEM_DEVICE"
SECONDS_VARIABLE = "EQSAT_MEM_MAX_PLANNING_SECONDS"
LARGEST_BYTES = 2**63 - 1

_SIZE = re.compile(r"((?:\d+(?:\.\d*)?|\.\d+)(?:e\+?\d{1,2}(?![a-z]))?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_BINARY = {unit.lower(): factor for unit, factor in UNITS.items() if "i" in unit}
_FACTORS = {unit.lower(): factor for unit, factor in UNITS.items()} | {
    unit[:letters]: factor for unit, factor in _BINARY.items() for letters in (1, 2)
}
"""Bytes in one of each unit, by its name in lower case; M and Mi are MiB, as in the limits of Docker, Slurm and systemd."""


@dataclass(frozen=True)
class Options:
    """The options of one plan, checked. Hashable, so that plans can be cached by them.

    Sizes may be given in every form that :func:`parse_bytes` takes, and are kept as numbers of bytes.

    Attributes:
        memory_limit: bytes that the program may hold at its peak (arguments, outputs and temporaries); None is
            ``EQSAT_MEM_LIMIT`` or the device's capacity, see :func:`resolve_limit`.
        accuracy: ``"bitwise"``, ``"reassociate"`` or ``"all"``.
        rules: rule files to load besides the shipped ones.
        only_rules: names of rules or passes, or of rule files, to which planning keeps; None is all of them. One that is named by its
            own name applies whatever its soundness. Without the rules of ``splitting`` there are no loops; ``passes`` names all passes.
        without_rules: names of rules or passes, or of rule files, that are left out.
        operations: the :class:`eqsat_mem.Operation` and :class:`eqsat_mem.Monoid` objects that the rule files name.
        tensor_size_threshold: only tensors of more bytes than this are split; None leaves it to the planner.
        tensor_split_size: bytes that a slice of a split tensor should have; None leaves it to the planner.
        max_rows: rows of the e-graph at which saturation stops.
        max_iterations: iterations after which saturation stops.
        max_seconds: seconds after which saturation stops; its plans then depend on how busy the machine was.
        max_planning_seconds: seconds after which planning as a whole looks no further and takes the best plan found that fits; None is
            ``EQSAT_MEM_MAX_PLANNING_SECONDS``, or :func:`eqsat_mem.pipeline.planning_seconds` of the program.
        tune: seconds for running the best few plans on the device, of which the fastest is taken; None takes the one predicted to be.
        verify: whether the plan is compiled and its peak compared with the limit.
        device: the device to plan for: a name that ``eqsat-mem devices`` lists, ``"cpu"``, or the file of a profile; None is
            ``EQSAT_MEM_DEVICE``, or the device in use.
        tiles: whether folds of pairs may be tile kernels, on GPUs and with versions of JAX that have them; they need ``accuracy="all"``.

    Raises:
        OptionError: naming the option that has a wrong value, and the values it may have.
    """

    memory_limit: int | None = None
    accuracy: Accuracy = "all"
    rules: tuple[str, ...] = ()
    only_rules: tuple[str, ...] | None = None
    without_rules: tuple[str, ...] = ()
    operations: tuple[Any, ...] = ()
    tensor_size_threshold: int | None = None
    tensor_split_size: int | None = None
    max_rows: int = 50_000
    max_iterations: int = 30
    max_seconds: float = 60.0
    max_planning_seconds: float | None = None
    tune: float | None = None
    verify: bool = True
    device: str | None = None
    tiles: bool = True

    def __post_init__(self) -> None:
        for name in ("memory_limit", "tensor_size_threshold", "tensor_split_size"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        for name in ("max_rows", "max_iterations"):
            object.__setattr__(self, name, _positive_int(getattr(self, name), name))
        for name in ("max_seconds", "max_planning_seconds", "tune"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _positive_seconds(getattr(self, name), name))
        object.__setattr__(self, "rules", _paths(self.rules, "rules"))
        object.__setattr__(self, "operations", _several(self.operations))
        if self.only_rules is not None:
            object.__setattr__(self, "only_rules", _names(self.only_rules, "only_rules"))
        object.__setattr__(self, "without_rules", _names(self.without_rules, "without_rules"))
        if self.accuracy not in get_args(Accuracy):
            raise OptionError(f'accuracy must be "bitwise", "reassociate" or "all", not {self.accuracy!r}.')
        for name in ("verify", "tiles"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        self._check_tuning()
        if self.device is not None:
            if not isinstance(self.device, (str, os.PathLike)):
                raise OptionError(f"device must be the name of a device or the file of a profile, not {self.device!r}.")
            object.__setattr__(self, "device", str(os.fspath(self.device)))

    def _check_tuning(self) -> None:
        """Raise ``OptionError`` for options that leave nothing to measure."""
        if self.tune is not None and not self.verify:
            raise OptionError("tune runs only plans that were compiled and fit: leave out verify=False.")
        if self.tune is not None and (self.tensor_size_threshold is not None or self.tensor_split_size is not None):
            raise OptionError("tune chooses by time, tensor_size_threshold and tensor_split_size by sizes: leave out one or the other.")


def parse_bytes(value: Any, argument: str = "memory_limit") -> int:
    """A size in bytes from a number of bytes or from text such as ``"1GiB"``, ``"1.5 GB"``, ``"64M"`` or ``"512"``.

    GB = 10^9 bytes, GiB = 2^30 bytes, and so on from k to P; the case of letters does not matter. A prefix alone is binary: ``"1G"`` is
    1 GiB, as in the limits of Docker, Slurm and systemd. A fraction of a byte is dropped.

    Raises:
        OptionError: if the value is anything else, is below one byte, or does not fit 63 bits; it names ``argument``.

    >>> parse_bytes("64MiB"), parse_bytes("1.5 GB"), parse_bytes(512), parse_bytes(0.8 * 2**30)
    (67108864, 1500000000, 512, 858993459)
    """
    size = _parse_text(value, argument) if isinstance(value, str) else _bytes(value, argument)
    if size is None:
        raise _size_error(argument, value, f"is of type {type(value).__name__}")
    if size < 1:
        raise _size_error(argument, value, "is less than one byte")
    if size > LARGEST_BYTES:
        raise _size_error(argument, value, "is more than 2^63 - 1 bytes")
    return size


def resolve_device(options: Options) -> str | None:
    """The device to plan for: the option, else ``EQSAT_MEM_DEVICE``; None is the device in use."""
    return options.device or os.environ.get(DEVICE_VARIABLE, "").strip() or None


def resolve_planning_seconds(options: Options) -> float | None:
    """The bound on the whole of planning: the option, else ``EQSAT_MEM_MAX_PLANNING_SECONDS``; None leaves it to the program's size.

    Raises:
        OptionError: if the variable holds no number of seconds.
    """
    given = os.environ.get(SECONDS_VARIABLE, "").strip()
    if options.max_planning_seconds is not None or not given:
        return options.max_planning_seconds
    return parse_seconds(given, SECONDS_VARIABLE)


def parse_seconds(text: str, argument: str) -> float:
    """A number of seconds from text.

    Raises:
        OptionError: if the text is no number above zero; it names ``argument``.
    """
    try:
        return _positive_seconds(float(text), argument)
    except ValueError:
        raise _not_seconds(text, argument) from None


def resolve_limit(options: Options, capacity: int | None = None, mesh: Any = None) -> int:
    """The bytes that a program may hold: the option, else ``EQSAT_MEM_LIMIT``, else the capacity of the device.

    On a mesh, what each device may hold: else the least capacity of those that are here.

    Args:
        options: the options of a plan.
        capacity: bytes of the device that the plan is made for; None is the device in use.
        mesh: the devices that run the program, where they are several.

    Raises:
        OptionError: if the variable holds no size, or the device does not tell its capacity.
    """
    if options.memory_limit is not None:
        return options.memory_limit
    from_environment = os.environ.get(LIMIT_VARIABLE, "").strip()
    if from_environment:
        return parse_bytes(from_environment, LIMIT_VARIABLE)
    if capacity is not None:
        return capacity
    devices = getattr(mesh, "local_devices", None)
    if not devices:
        return device_capacity()
    return min(map(device_capacity, devices)) // (len(devices) if devices[0].platform == "cpu" else 1)


def device_capacity(device: Any = None) -> int:
    """Bytes of a device, the default one unless another is given: those that its allocator may use, or the machine's memory for a CPU.

    Raises:
        OptionError: if the system does not tell.
    """
    import jax

    device = device or jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and stats.get("bytes_limit"):
        return int(stats["bytes_limit"])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        raise OptionError(f"the capacity of {device} is not known: pass memory_limit, or set {LIMIT_VARIABLE}.") from None


def _parse_text(text: str, argument: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise _size_error(argument, text, "is not a number with a unit")
    number, unit = match.groups()
    if not unit and Decimal(number) != int(Decimal(number)):
        raise _size_error(argument, text, "has no unit")
    factor = _FACTORS.get(unit.lower()) if unit else 1
    if factor is None:
        raise _size_error(argument, text, f"has the unknown unit {unit!r}")
    return int(Decimal(number) * factor)  # exact: 0.29 * 100 is 29 here


def _bytes(value: Any, argument: str) -> int | None:
    """A Python, numpy or JAX number of bytes as an int, without the fraction of a byte; None for anything else."""
    whole = _whole(value)
    if whole is not None or isinstance(value, bool) or not isinstance(value, numbers.Real):
        return whole
    if not math.isfinite(value):
        raise _size_error(argument, value, "is not finite")
    return int(float(value))


def _whole(value: Any) -> int | None:
    """A Python, numpy or JAX integer as an int; None for anything else. True and False are not sizes."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _size_error(argument: str, value: Any, problem: str) -> OptionError:
    shown = repr(value) if len(repr(value)) <= 40 else repr(value)[:37] + "..."
    return OptionError(
        f"{argument} = {shown} {problem}. A size is a number of bytes (2**30) or text with a unit: "
        '"64MiB", "1.5 GB", "8G" (kB MB GB TB PB are powers of 1000, KiB MiB GiB TiB PiB and K M G T P of 1024).'
    )


def _positive_int(value: Any, argument: str) -> int:
    number = _whole(value)
    if number is None or number < 1:
        raise OptionError(f"{argument} must be a whole number above zero, not {value!r}.")
    return number


def _positive_seconds(value: Any, argument: str) -> float:
    check_seconds(value, argument)
    if math.isfinite(value) and value > 0:
        return float(value)
    raise _not_seconds(value, argument)


def check_seconds(value: Any, argument: str) -> None:
    """Raises :class:`OptionError` unless a value is a number, of seconds say."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise _not_seconds(value, argument)


def _not_seconds(value: Any, argument: str) -> OptionError:
    return OptionError(f"{argument} must be a number of seconds above zero, not {value!r}.")


def _paths(value: Any, argument: str) -> tuple[str, ...]:
    """One path or several as a tuple of text."""
    given = (value,) if isinstance(value, (str, os.PathLike)) else value
    if isinstance(given, Iterable):
        paths = tuple(given)
        if all(isinstance(path, (str, os.PathLike)) for path in paths):
            return tuple(str(os.fspath(path)) for path in paths)
    raise OptionError(f"{argument} must be a path or a sequence of paths, not {value!r}.")


def _several(value: Any) -> tuple[Any, ...]:
    """One object or several as a tuple."""
    return tuple(value) if isinstance(value, Iterable) else (value,)


def _names(value: Any, argument: str) -> tuple[str, ...]:
    """One name or several as a tuple."""
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise OptionError(f"{argument} must be the name of a rule or a rule file, or a sequence of such names, not {value!r}.")
    return names
