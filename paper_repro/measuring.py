"""One measurement in a process of its own: what a program holds, how much the process grows, and how long a run takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import eqsat_mem
from benchmarks.resident import grown, warm_up
from eqsat_mem.backends.xla import held_bytes
from eqsat_mem.errors import MemoryLimitError
from eqsat_mem.options import device_capacity, format_bytes

RESULTS = ("device_name", "status", "as_written", "held_bytes", "resident_bytes", "seconds", "plan_seconds", "error")
"""What every measurement has: whether a plan is the program as it was written, bytes that the compiled program holds, bytes by which the
process grew with the arguments, seconds of a run, seconds of tracing and planning, and the error against a slow reference."""

SHARE = 0.5
"""Programs that hold more than this share of the device's memory are not run."""
ENOUGH_S = 2.0
"""Runs are repeated until they have taken so long together."""
LONG_S = 10.0
"""A first run that took longer than this is not repeated."""
MOST_REPEATS = 15


def measure_jax(
    function: Callable[..., Any], arguments: Callable[[], Sequence[Any]], limit: int | str | None
) -> tuple[Any, dict[str, Any]]:
    """The output of ``function`` and the results of running it, as ``jax.jit`` has it, or planned under ``limit``.

    ``arguments`` makes numpy or JAX arrays (or pytrees of them). The output is None where ``status`` tells why nothing ran.
    """
    args = jax.block_until_ready(jax.tree.map(jnp.asarray, tuple(arguments())))
    start = time.perf_counter()
    try:
        fast = planned_under(function, limit)
        lowered = fast.lower(*args)
    except MemoryLimitError as error:
        return None, {"device_name": device_name(), "status": f"no plan: the smallest found holds {format_bytes(error.smallest_bytes)}"}
    planned = time.perf_counter() - start
    run = lowered.compile()
    as_written = limit is not None and fast.plan(*args).unchanged
    results = {"device_name": device_name(), "as_written": as_written or "", "held_bytes": held_bytes(run), "plan_seconds": planned}
    if results["held_bytes"] > SHARE * device_capacity():
        return None, results | {"status": f"not run: needs {format_bytes(results['held_bytes'])}"}
    leaves = jax.tree.leaves(args)
    warm_up(leaves[0].dtype)
    out, measured = measure(lambda: run(*args), sum(leaf.nbytes for leaf in leaves))
    return out, results | measured | _held_on_device()


def planned_under(function: Callable[..., Any], limit: int | str | None) -> Any:
    """``function`` as ``jax.jit`` has it, or planned under ``limit``; either can be lowered."""
    return jax.jit(function) if limit is None else eqsat_mem.optimize(function, memory_limit=limit)


def measure(run: Callable[[], Any], argument_bytes: int) -> tuple[Any, dict[str, Any]]:
    """The output of ``run``, and its results: the first run tells how much the process grows, those after it how long one takes."""
    start = time.perf_counter()
    out, growth = grown(run)
    first = time.perf_counter() - start
    times = [first] if first > LONG_S else list(_repeated(run, first))
    return out, {
        "device_name": device_name(),
        "status": "ok",
        "resident_bytes": "" if growth is None or jax.default_backend() != "cpu" else growth + argument_bytes,
        "seconds": statistics.median(times),
    }


def _repeated(run: Callable[[], Any], first: float) -> Any:
    for _ in range(max(1, min(int(ENOUGH_S / max(first, 1e-6)), MOST_REPEATS))):
        start = time.perf_counter()
        jax.block_until_ready(run())
        yield time.perf_counter() - start


def _held_on_device() -> dict[str, Any]:
    """What JAX has held on a GPU at most, as its allocator knows; nothing on a CPU, where the process grows."""
    stats = jax.local_devices()[0].memory_stats()
    return {"resident_bytes": int(stats["peak_bytes_in_use"])} if stats and "peak_bytes_in_use" in stats else {}


def device_name() -> str:
    """What measurements depend on: the processor, its cores, and the version of JAX."""
    import os
    import platform

    device = jax.local_devices()[0]
    name = f"{platform.machine()} CPU, {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind
    return f"{name}, jax {jax.__version__}"
