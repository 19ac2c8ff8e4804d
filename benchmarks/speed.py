"""Seconds of plain JAX, of the plan, and of the version cut by hand: ``python -m benchmarks.speed [--only NAME] [--json FILE]``.

The versions take turns, and a ratio is the median of the ratios of each turn, so that a machine that slows down slows all of them.
A program that does not fit this machine as written has no time for that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import eqsat_mem
from benchmarks.programs import BENCHMARKS, Benchmark
from eqsat_mem.config import device_capacity
from eqsat_mem.verify import compiled_peak

SHARE = 0.5
"""A version is run only if it holds at most this share of the device's memory."""


def main() -> None:
    """Run, and print the table; write the figures as JSON where a file is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=[b.name for b in BENCHMARKS])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    for b in BENCHMARKS:
        if not options.only or b.name in options.only:
            rows.append(measure(b, options.turns))
            print(line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "programs": rows}, indent=2) + "\n", encoding="utf-8")
    print("\n" + table(rows))


def measure(b: Benchmark, turns: int) -> dict[str, Any]:
    """Seconds of each version, and how many times faster than it the plan is."""
    with jax.enable_x64(b.x64):
        args = b.arguments()
        versions: dict[str, Callable[..., Any]] = {"plan": eqsat_mem.optimize(b.function, memory_limit=b.limit_bytes)}
        if compiled_peak(b.function, b.specs())[0] <= SHARE * device_capacity():
            versions["plain"] = jax.jit(b.function)
        if b.by_hand is not None:
            versions["by hand"] = jax.jit(b.by_hand)
        for run in versions.values():
            jax.block_until_ready(run(*args))
        times: dict[str, list[float]] = {name: [] for name in versions}
        for _ in range(turns):
            for name, run in versions.items():
                start = time.perf_counter()
                jax.block_until_ready(run(*args))
                times[name].append(time.perf_counter() - start)
    median = {name: statistics.median(values) for name, values in times.items()}
    ratios = {name: statistics.median(t / p for t, p in zip(times[name], times["plan"])) for name in versions if name != "plan"}
    return {"name": b.name, "limit_bytes": b.limit_bytes, "seconds": median, "times_faster_than": ratios}


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    seconds = [f"{row['seconds'][k]:.3f}" if k in row["seconds"] else "" for k in ("plain", "by hand", "plan")]
    ratios = [f"{row['times_faster_than'][k]:.2f}" if k in row["times_faster_than"] else "" for k in ("plain", "by hand")]
    return f"| `{row['name']}` | {' | '.join(seconds + ratios)} |"


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table: seconds, and ratios above one where the plan is faster."""
    head = ["| program | plain | by hand | plan | plain / plan | by hand / plan |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    return "\n".join([*head, *map(line, rows)])


def machine() -> dict[str, Any]:
    """What figures depend on."""
    packages = {name: version(name) for name in ("jax", "jaxlib", "numpy", "egglog")}
    device = jax.devices()[0]
    return {
        "device": f"{device.platform} {device.device_kind}",
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": device_capacity(),
        "python": platform.python_version(),
        "eqsat_mem": eqsat_mem.__version__,
        **packages,
    }


if __name__ == "__main__":
    main()
