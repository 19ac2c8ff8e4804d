"""``eqsat-mem calibrate --mesh``: measure how fast the devices of this machine exchange values."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from eqsat_mem.backends.calibrate import REPEATS, SHORTEST_S, timed
from eqsat_mem.errors import OptionError
from eqsat_mem.schedule.device import Link, Points

SIZES = tuple(2**k for k in range(10, 27, 4))
"""The bytes that each device receives in the exchanges that are measured: 1 KiB to 64 MiB."""
LONG_S = 0.1
"""Runs of more seconds are repeated twice only."""
AXIS = "devices"


def _all_reduce(x: jax.Array, devices: int) -> jax.Array:
    return lax.psum(x, AXIS) * (1 / devices)


def _gather(x: jax.Array, devices: int) -> jax.Array:
    return lax.optimization_barrier(lax.all_gather(x, AXIS))[0]  # XLA would send one share only


def _scatter(x: jax.Array, devices: int) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, lax.psum_scatter(x, AXIS) * (1 / devices), 0, 0)


def _exchange(x: jax.Array, devices: int) -> jax.Array:
    return lax.all_to_all(x, AXIS, 0, 0)


Sent = tuple[Callable[[jax.Array, int], jax.Array], Callable[[float, int], tuple[int, ...]]]

KINDS: Mapping[str, Sent] = MappingProxyType(
    {
        "all_reduce": (_all_reduce, lambda n, d: (int(n * d / (2 * (d - 1))),)),
        "gather_shares": (_gather, lambda n, d: (int(n / (d - 1)),)),
        "sum_to_shares": (_scatter, lambda n, d: (d, int(n / (d - 1)))),
        "exchange_shares": (_exchange, lambda n, d: (d, int(n / (d - 1)))),
    }
)
"""For each collective of :data:`eqsat_mem.ir.ops.collectives.EXCHANGES` one whose result has the shape of its operand, and that shape, for
so many elements that each of so many devices receives."""


def measure(
    devices: Sequence[jax.Device],
    report: Callable[[str], None] = lambda kind: None,
    sizes: Sequence[int] = SIZES,
    shortest_s: float = SHORTEST_S,
) -> Link:
    """Measure the exchanges between devices, of 2, 4, 8 and so on of them, and of all, which takes about half a minute.

    Args:
        devices: the devices, at least two.
        report: called with what is measured next.
        sizes: bytes that each device receives, in ascending order.
        shortest_s: the least duration of a measurement, in seconds.

    Returns:
        The link: its latency and rate are those of the fastest exchange and of the highest rate, its points all that was measured.

    Raises:
        OptionError: if there are fewer than two devices.
    """
    if len(devices) < 2:
        raise OptionError(
            "calibrate --mesh measures what devices send each other, and there is one here. A CPU counts as eight of them with "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8."
        )
    points = tuple(_points(devices, report, sizes, shortest_s))
    every = [point for _, _, measured in points for point in measured]
    return Link(min(seconds for _, seconds in every), max(received / seconds for received, seconds in every), points)


def _points(devices: Sequence[jax.Device], report: Callable[[str], None], sizes: Sequence[int], shortest_s: float) -> Iterator[Points]:
    doubled = (2**k for k in range(1, len(devices).bit_length()))
    for count in sorted({*doubled, len(devices)}):
        mesh = jax.sharding.Mesh(np.array(devices[:count]), (AXIS,))
        for kind, (send, shape_for) in KINDS.items():
            report(f"{kind} of {count} devices")
            shapes = {size: shape_for(size / 4, count) for size in sizes}
            yield kind, count, tuple((float(size), _seconds(mesh, send, shape, shortest_s)) for size, shape in shapes.items())


def _seconds(mesh: jax.sharding.Mesh, send: Callable[[jax.Array, int], jax.Array], shape: tuple[int, ...], shortest_s: float) -> float:
    """Return the seconds of one of many collectives in turn, the median of runs."""
    whole = PartitionSpec()

    def many(x: jax.Array, turns: jax.Array) -> jax.Array:
        return lax.fori_loop(0, turns, lambda _, x: send(x, mesh.size), x)

    x = jax.device_put(jnp.ones(shape, jnp.float32), jax.sharding.NamedSharding(mesh, whole))
    spread: Any = jax.shard_map(many, mesh=mesh, in_specs=(whole, whole), out_specs=whole, check_vma=False)
    compiled = jax.jit(spread).lower(x, np.int32(1)).compile()
    jax.block_until_ready(compiled(x, np.int32(1)))
    turns = 1
    while (seconds := timed(compiled, (x, np.int32(turns)))) < shortest_s:
        turns *= 4
    again = REPEATS - 1 if seconds < LONG_S else 2
    return statistics.median([seconds, *(timed(compiled, (x, np.int32(turns))) for _ in range(again))]) / turns
