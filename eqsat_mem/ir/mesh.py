"""Meshes of devices as programs see them: names of axes with numbers of devices, and which of them hold an array in shares.

Nothing here names a device: a mesh that nobody has can be planned for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Names = tuple[str, ...]
"""Mesh axes that together deal out one axis of an array, the outermost first; none leave it whole."""
Spec = tuple[Names, ...]
"""For each axis of an array the mesh axes that deal it out: a ``PartitionSpec`` written out to the array's rank."""


@dataclass(frozen=True)
class Devices:
    """The axes of a mesh with their numbers of devices, outermost first; ``far`` are axes whose devices are in several machines."""

    axes: tuple[tuple[str, int], ...]
    far: frozenset[str] = frozenset()

    def count(self, names: Sequence[str]) -> int:
        """The devices along some axes."""
        sizes = dict(self.axes)
        return math.prod(sizes[name] for name in names)

    @property
    def total(self) -> int:
        """All devices."""
        return self.count([name for name, _ in self.axes])

    def ordered(self, names: Sequence[str]) -> Names:
        """Some axes in the order of the mesh, each once."""
        return tuple(name for name, _ in self.axes if name in names)

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes)


@dataclass(frozen=True)
class Sum:
    """An argument and a result of a body of a loop that are a sum in parts: the sum is that over devices along some mesh axes."""

    argument: int
    result: int
    names: Names


@dataclass(frozen=True)
class Placement:
    """The specs of the arguments and results of a function on a mesh; None is for the planner to choose.

    ``sums`` are those of arguments and results that are in parts, where the function is the body of a loop.
    ``mesh`` is JAX's, or None where there is none to compile for; with ``around`` functions take that of ``jax.set_mesh`` when they run.
    """

    devices: Devices
    arguments: tuple[Spec | None, ...]
    results: tuple[Spec | None, ...]
    mesh: Any = None
    around: bool = False
    sums: tuple[Sum, ...] = ()

    def with_more(self, times: int, shapes: Sequence[Sequence[int]]) -> Placement | None:
        """The same on a mesh with so many times the devices along its longest axis, to plan only; None if arguments and results, which
        have these shapes, do not divide among them.
        """
        longest = max(self.devices.axes, key=lambda axis: axis[1])[0]
        axes = tuple((name, size * (times if name == longest else 1)) for name, size in self.devices.axes)
        devices = replace(self.devices, axes=axes)
        for shape, spec in zip(shapes, (*self.arguments, *self.results), strict=True):
            if any(extent % devices.count(names) for extent, names in zip(shape, spec or ())):
                return None
        return replace(self, devices=devices, mesh=None)

    def of(self, arguments: Iterable[Spec | None], results: Iterable[Spec | None], sums: Iterable[Sum] = ()) -> Placement:
        """The placement of another function's arguments and results on the same mesh."""
        return replace(self, arguments=tuple(arguments), results=tuple(results), sums=tuple(sums))


@dataclass(frozen=True)
class Spreading:
    """The indices that devices take shares of, those that come first preferred, each with the mesh axes that deal it out.

    ``padded`` are those whose extent has been made one that devices divide, with the number of positions that they had.
    """

    order: tuple[tuple[int, Names], ...]
    padded: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Shares:
    """The part of a program of one device that concerns the other devices: its mesh, and the indices of which it computes a share.

    Attributes:
        devices: the mesh.
        spread: the indices of which a device has a share, with the mesh axes that deal it out.
        across: for each of them the index that counts devices: a value that has both is whole.
        arguments: how each argument arrives.
        results: how each result is left.
        padded: for indices whose shares together have more positions than there are, how many there are.
        sums: the arguments and results that are in parts.
    """

    devices: Devices
    spread: Mapping[int, Names] = field(default_factory=dict)
    across: Mapping[int, int] = field(default_factory=dict)
    arguments: tuple[Spec, ...] = ()
    results: tuple[Spec, ...] = ()
    padded: Mapping[int, int] = field(default_factory=dict)
    sums: tuple[Sum, ...] = ()

    def dealt_out(self, mask: int) -> int:
        """Those of an index set of which a value with these indices is a share."""
        return sum(1 << i for i, across in self.across.items() if mask >> i & 1 and not mask >> across & 1)

    def names(self, mask: int) -> list[str]:
        """The mesh axes that deal out the shares of an index set."""
        return [name for i, names in self.spread.items() if self.dealt_out(mask) >> i & 1 for name in names]


def whole(rank: int) -> Spec:
    """The spec of an array that every device has whole."""
    return ((),) * rank


def share_of(shape: Sequence[int], spec: Spec, devices: Devices) -> tuple[int, ...]:
    """The shape of one device's share of an array."""
    return tuple(n // devices.count(names) for n, names in zip(shape, spec, strict=True))
