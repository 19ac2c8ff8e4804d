"""Text about the values that the devices of a mesh share out and exchange, for plans to print."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from eqsat_mem.units import format_bytes


@dataclass(frozen=True)
class SpreadIndex:
    """An index of which each device computes a share.

    Attributes:
        index: its name.
        axes: the mesh axes that deal it out.
        devices: how many devices they have.
        share: how many positions one device has.
        axis: the axis of an argument or result that it runs over, if there is one.
        extent: how many positions there are, where devices do not divide them: the last ones have fewer.
    """

    index: str
    axes: tuple[str, ...]
    devices: int
    share: int
    axis: str = ""
    extent: int | None = None

    def __str__(self) -> str:
        what, total = self.axis or f"index {self.index}", self.extent or self.devices * self.share
        most = "" if self.extent is None else "at most "
        return f"{what}: {most}{self.share:,} of {total:,} on each device, over {', '.join(self.axes)} ({self.devices} devices)"


@dataclass(frozen=True)
class Exchange:
    """A collective of a plan.

    Attributes:
        kind: the function of ``jax.lax``.
        axes: the mesh axes along which devices take part.
        of: the value that is exchanged, in words.
        bytes: those that a device holds afterwards, each time.
        received: the bytes that it receives from others in one call of the function, all times together.
        times: how often it runs in one call.
        at: the user's file and line, or None.
    """

    kind: str
    axes: tuple[str, ...]
    of: str
    bytes: int
    received: int
    times: int
    at: str | None = None

    def __str__(self) -> str:
        often = f", {self.times:,} times" if self.times > 1 else ""
        text = f"{self.kind} of {self.of} over {', '.join(self.axes)}: {format_bytes(self.bytes)}{often}"
        return text + (f"  at {self.at}" if self.at else "")


def together(exchanges: Iterable[Exchange]) -> list[Exchange]:
    """Exchanges of which those that differ in nothing but how often they run are one."""
    alike: dict[Exchange, Exchange] = {}
    for one in exchanges:
        key = replace(one, received=0, times=0)
        known = alike.get(key, key)
        alike[key] = replace(one, received=known.received + one.received, times=known.times + one.times)
    return list(alike.values())
