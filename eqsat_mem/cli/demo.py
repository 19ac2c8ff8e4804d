"""The demonstration: a kernel matrix-vector product whose peak is 56 GiB as written, planned under a limit of 64 MiB."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit

from eqsat_mem.api.optimize import optimize
from eqsat_mem.options import parse_bytes
from eqsat_mem.units import format_bytes

if TYPE_CHECKING:
    from eqsat_mem.reports.plan import Plan

DIMENSIONS = 2
CHECKED_ROWS = 16
TOLERANCE = 1e-4
WIDTH = 30
"""Characters of a bar of progress."""
NEXT = """
Next: @eqsat_mem.optimize(memory_limit="64MiB") above a function of yours, or without a change to a script:
  eqsat-mem run --memory-limit 64MiB train.py            every function that jax.jit compiles is planned
  eqsat-mem plan train.py:step --args train.py:batch     what would be done, and why (--explain)
  eqsat-mem plan ... --device h100                       will it fit a card that is not here?"""


def matvec(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    """The squared exponential kernel of points ``x`` and ``y`` (n, d) times ``v`` (n, 1), as anyone would write it."""
    distance = jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)
    return jnp.exp(-0.5 * distance) @ v


def run(points: int, limit: int | str) -> bool:
    """Plan, compile, run and check the product, and print a report.

    Args:
        points: the number of points on either side of the kernel.
        limit: the memory limit, in bytes or as text such as ``"64MiB"``.

    Returns:
        Whether the compiled program fits the limit and its values agree with a float64 computation.
    """
    limit_bytes = parse_bytes(limit)
    x, y, v = _points(points)
    print(f"A kernel matrix-vector product over {points:,} points in {DIMENSIONS} dimensions, as written:\n")
    print(inspect.getsource(matvec))
    with stage("asking XLA what it holds as written"):
        before_bytes = _held_bytes(jit(matvec).lower(x, y, v).compile())
    print(f"XLA would hold {format_bytes(before_bytes)} for it. Limit: {format_bytes(limit_bytes)}.\n")

    fast = optimize(matvec, memory_limit=limit_bytes)
    started = time.perf_counter()
    with stage("planning"):
        plan = fast.plan(x, y, v)
    with stage("compiling"):
        compiled = fast.lower(x, y, v).compile()
    ready_s = time.perf_counter() - started
    with stage("running", plan.predicted_s):
        started = time.perf_counter()
        result, resident_bytes = _measured(compiled, x, y, v)
        run_s = time.perf_counter() - started
    with stage(f"checking {CHECKED_ROWS} rows in float64"):
        error = _error(x, y, v, result)

    print(plan, "\n\n" + plan.source)
    passed = _verdict(plan, before_bytes, _held_bytes(compiled), resident_bytes, limit_bytes, ready_s, run_s, error)
    print(NEXT)
    return passed


def _verdict(
    plan: Plan,
    before_bytes: int,
    held_bytes: int,
    resident_bytes: int | None,
    limit_bytes: int,
    ready_s: float,
    run_s: float,
    error: float,
) -> bool:
    """Print the figures, and return whether the program fits the limit and its values agree."""
    fits, agrees = held_bytes <= limit_bytes, error <= TOLERANCE
    print(f"peak before    {format_bytes(before_bytes)} by XLA's analysis, {format_bytes(plan.original_peak_bytes)} planned; not run")
    print(f"peak held      {format_bytes(held_bytes)} of {format_bytes(limit_bytes)}{'' if fits else ': OVER THE LIMIT'}")
    if resident_bytes is not None:
        print(f"resident       the process grew by {format_bytes(resident_bytes)} while it ran, with threads and code")
    print(f"time           {run_s:.2f} s, after {ready_s:.2f} s to plan and compile")
    verdict = "" if agrees else f": MORE THAN {TOLERANCE:g}"
    print(f"largest error  {error:.1e} relative to the largest value, {CHECKED_ROWS} rows against float64{verdict}")
    return fits and agrees


# --- measuring --------------------------------------------------------------------------------------


def _points(count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = ((count, DIMENSIONS), (count, DIMENSIONS), (count, 1))
    x, y, v = (jnp.asarray(rng.standard_normal(shape).astype(np.float32)) for shape in shapes)
    return x, y, v


def _held_bytes(compiled: Any) -> int:
    """Return the bytes of arguments, outputs and temporaries that XLA reserves for a compiled program."""
    memory = compiled.memory_analysis()
    sizes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return int(sizes - memory.alias_size_in_bytes)


def _measured(compiled: Any, *args: jax.Array) -> tuple[jax.Array, int | None]:
    """Run a compiled function.

    Returns:
        The result, and the growth of the process's peak resident memory in bytes, or None where the system does not report it.
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        before = _status_bytes(status, "VmRSS")
        reset.write_text("5")  # the high-water mark starts again from here
    except OSError:
        return jax.block_until_ready(compiled(*args)), None
    result = jax.block_until_ready(compiled(*args))
    return result, max(_status_bytes(status, "VmHWM") - before, 0)


def _status_bytes(status: Path, key: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def _error(x: jax.Array, y: jax.Array, v: jax.Array, result: jax.Array) -> float:
    """Return the largest difference of sampled rows from a direct float64 computation, relative to the largest value."""
    wide_x, wide_y, wide_v = (np.asarray(a, np.float64) for a in (x, y, v))
    rows = np.random.default_rng(1).integers(0, len(wide_x), CHECKED_ROWS)
    distance = ((wide_x[rows, None] - wide_y[None]) ** 2).sum(-1)
    truth = np.exp(-0.5 * distance) @ wide_v
    return float(np.max(np.abs(np.asarray(result)[rows] - truth)) / np.max(np.abs(truth)))


# --- progress ---------------------------------------------------------------------------------------


@contextmanager
def stage(name: str, expected_s: float | None = None) -> Iterator[None]:
    """Show on stderr that a stage runs and for how long: as a counting line on a terminal, as two plain lines elsewhere.

    Args:
        name: the name of the stage.
        expected_s: the seconds that it is predicted to take, for a bar on the terminal.
    """
    done = threading.Event()
    started = time.perf_counter()
    live = sys.stderr.isatty()
    ticker = threading.Thread(target=_tick, args=(name, started, done, expected_s), daemon=True)
    if live:
        ticker.start()
    else:
        print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        done.set()
        if live:
            ticker.join()
        text = f"{name}: {time.perf_counter() - started:.1f} s"
        print(f"\r{text:<{len(name) + WIDTH + 40}}" if live else text, file=sys.stderr, flush=True)  # spaces cover the longer line before


def _tick(name: str, started: float, done: threading.Event, expected_s: float | None) -> None:
    while not done.wait(0.1):
        print(f"\r{progress(name, time.perf_counter() - started, expected_s)}", end="", file=sys.stderr, flush=True)


def progress(name: str, seconds: float, expected_s: float | None) -> str:
    """Return a line about a stage that runs: how long it has, with a bar if it is predicted how long it takes.

    >>> progress("planning", 0.5, None), progress("running", 2.0, 4.0)
    ('planning ... 0.5 s', 'running [###############               ] 2.0 s of about 4.0 s')
    """
    if not expected_s:
        return f"{name} ... {seconds:.1f} s"
    bar = "#" * min(int(WIDTH * seconds / expected_s), WIDTH)
    return f"{name} [{bar:<{WIDTH}}] {seconds:.1f} s of about {expected_s:.1f} s"
