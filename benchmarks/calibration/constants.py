"""The measured constants of the source: found by reading it, and changed for as long as something is tried with other values."""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import eqsat_mem
from eqsat_mem.backends.cpu import backend, weights
from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.backends.cpu.profile import CpuDevice

PACKAGE = Path(eqsat_mem.__file__).parent
ROOT = PACKAGE.parent
MODULES = tuple(sorted((PACKAGE / "backends" / "cpu").glob("*.py")))
"""The modules with measured constants."""
SCRIPT = re.compile(r"benchmarks/calibration/(\w+)\.py")
ATTRIBUTES = {
    "UNROLLED": "unrolled_elements",
    "SPREAD": "unrolled_weight",
    "CROWDED": "crowded_weight",
    "CROWDING": "crowding_weight",
    "SHORT": "short_fold",
}
"""Constants of the backend's module that its class repeats under the names that every backend has for them."""
DEVICE = "device"
"""The module of a constant that is a field of the device's profile."""


@dataclass(frozen=True)
class Constant:
    """A number in the source, or a table of numbers.

    Attributes:
        module: its module below the package, or :data:`DEVICE`.
        name: of the variable; ``NAME[key]`` is one entry of a table.
        value: a number, or a mapping whose values are numbers or tuples of them.
        said: its docstring.
    """

    module: str
    name: str
    value: Any
    said: str = ""

    @property
    def scripts(self) -> tuple[str, ...]:
        """The scripts of this folder that the docstring names."""
        return tuple(SCRIPT.findall(self.said))

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


def in_code(modules: Sequence[Path] = MODULES) -> Iterator[Constant]:
    """Every constant of some modules, in their order: variables of modules that are numbers or tables of numbers."""
    for path in modules:
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        own = importlib.import_module(f"eqsat_mem.{module}")
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for node, following in zip(body, [*body[1:], None]):
            said = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                said = str(following.value.value)
            for name in _assigned(node):
                value = getattr(own, name)
                if _is_figure(value):
                    yield Constant(module, name, value, said)


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _is_figure(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(map(_is_figure, value.values()))
    if isinstance(value, tuple):
        return bool(value) and all(map(_is_figure, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


@cache
def known() -> Mapping[str, Constant]:
    """The constants of the source by path."""
    return {constant.path: constant for constant in in_code()}


def value(path: str) -> Any:
    """The value in the source of a constant, an entry of a table or a field of this machine's built-in profile."""
    name, key = _entry(path)
    if name.startswith(f"{DEVICE}."):
        return getattr(CpuBackend.built_in().device, name.partition(".")[2])
    return known()[name].value if key is None else known()[name].value[key]


def scaled(of: Any, factor: float) -> Any:
    """A figure, or all figures of a table or of the levels of the memory, times a factor; whole numbers stay whole."""
    if isinstance(of, Mapping):
        return {key: scaled(each, factor) for key, each in of.items()}
    if isinstance(of, tuple):
        return tuple(scaled(each, factor) for each in of)
    return max(round(of * factor), 1) if isinstance(of, int) else of * factor


@contextmanager
def changed(values: Mapping[str, Any]) -> Iterator[None]:
    """Other values for constants, by path, for all that is planned meanwhile."""
    modules: list[tuple[Any, str, Any]] = []
    fields: dict[str, Any] = {}
    for path, new in values.items():
        name, key = _entry(path)
        if name.startswith(f"{DEVICE}."):
            fields[name.partition(".")[2]] = new
            continue
        constant = known()[name]
        own = importlib.import_module(f"eqsat_mem.{constant.module}")
        before = getattr(own, constant.name)
        modules.append((own, constant.name, before))
        setattr(own, constant.name, new if key is None else {**before, key: new})
        if own is backend and constant.name in ATTRIBUTES:
            modules.append((CpuBackend, ATTRIBUTES[constant.name], before))
            setattr(CpuBackend, ATTRIBUTES[constant.name], new)
    built_in = backend.built_in

    def device() -> CpuDevice:
        return replace(built_in(), **fields)

    try:
        backend.built_in = device  # type: ignore[attr-defined]
        weights.table.cache_clear()
        yield
    finally:
        for own, attribute, before in reversed(modules):
            setattr(own, attribute, before)
        backend.built_in = built_in  # type: ignore[attr-defined]
        weights.table.cache_clear()


def _entry(path: str) -> tuple[str, str | None]:
    """A path without the key of an entry, and the key."""
    name, bracket, key = path.partition("[")
    return name, key.rstrip("]") if bracket else None


def ratio(first: float, second: float) -> float:
    """The ratio of the larger of two figures to the smaller."""
    return math.exp(abs(math.log(first / second))) if first > 0 and second > 0 else math.inf
