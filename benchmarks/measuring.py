"""Measurements of programs: bytes that a compiled program holds, bytes by which the process grows, seconds of runs, and the machine.

The benchmarks and the scripts in ``paper_repro`` measure with nothing else. Versions of one program take turns
(:func:`take_turns`), so that a machine that slows down slows all of them; :func:`measure` takes one program alone, in a
process that has run little else, so that growth of resident memory is its own.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

import eqsat_mem
from eqsat_mem.backends.xla import held_bytes
from eqsat_mem.errors import MemoryLimitError
from eqsat_mem.options import device_capacity
from eqsat_mem.units import format_bytes

os.environ.setdefault("EQSAT_MEM_CACHE_DIR", "none")  # seconds of planning are measured

Run = Callable[[], Any]
Results = dict[str, Any]

SHARE = 0.5
"""Programs that hold more than this share of the device's memory are not run."""
LONG_S = 10.0
"""A program whose first run took longer than this is not run again by :func:`measure`."""
ENOUGH_S, MOST_REPEATS = 2.0, 15
"""Runs are repeated by :func:`measure` until they have taken so long together, or so often."""
PACKAGES = ("eqsat-mem", "jax", "jaxlib", "numpy", "egglog", "pykeops", "scikit-learn", "faiss-cpu", "opt_einsum", "scipy")
RESULTS = ("device_name", "status", "as_written", "held_bytes", "resident_bytes", "seconds", "plan_seconds", "error")
"""The fields that a kept measurement has: the device, whether the program ran and why not, whether a plan is the program as written, bytes
that the compiled program holds, bytes by which the process grew with the arguments, seconds of a run, seconds of tracing and
planning, and the error against a slow reference, which callers of :func:`measure_jax` fill in."""


# --- compiled programs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """A program that is ready to run.

    Attributes:
        compiled: JAX's compiled program.
        held_bytes: arguments, outputs and temporaries, as XLA reserves them.
        plan_seconds: how long tracing and planning took, without compiling.
        compile_seconds: how long XLA took after that.
        as_written: whether a plan was asked for, and is the program itself.
    """

    compiled: Any
    held_bytes: int
    plan_seconds: float
    compile_seconds: float
    as_written: bool

    @property
    def fits_device(self) -> bool:
        """Whether it may be run on this device."""
        return self.held_bytes <= SHARE * device_capacity()


def prepare(
    function: Callable[..., Any], args: Sequence[Any], limit: int | str | None, options: Mapping[str, str] = MappingProxyType({})
) -> Prepared:
    """``function`` planned under ``limit`` and compiled for ``args``, arrays or ``jax.ShapeDtypeStruct``; as written without a limit.

    ``options`` are the compiler's, where it is compiled as written.

    Raises:
        MemoryLimitError: where no plan fits.
    """
    start = time.perf_counter()
    fast: Any = (
        jax.jit(function, compiler_options=dict(options) or None) if limit is None else eqsat_mem.optimize(function, memory_limit=limit)
    )
    lowered = fast.lower(*args)
    planned = time.perf_counter() - start
    compiled = lowered.compile()
    compiling = time.perf_counter() - start - planned
    return Prepared(compiled, held_bytes(compiled), planned, compiling, limit is not None and fast.plan(*args).unchanged)


# --- seconds ------------------------------------------------------------------------------------------


def take_turns(runs: Mapping[str, Run], turns: int) -> dict[str, list[float]]:
    """Seconds of each run in each turn; every run is expected to be warm."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)
    return times


def turns_within(enough_s: float, one_s: float, least: int, most: int) -> int:
    """The number of turns that take about ``enough_s`` seconds together if one takes ``one_s``, within bounds.

    >>> turns_within(8.0, 1.5, 2, 7), turns_within(8.0, 100.0, 2, 7), turns_within(8.0, 1e-9, 2, 7)
    (5, 2, 7)
    """
    return max(least, min(int(enough_s / max(one_s, 1e-6)), most))


def measure(run: Run, argument_bytes: int, repeat: bool = True) -> tuple[Any, Results]:
    """The output of ``run``, and its results: the first run tells how much the process grows, those after it how long one takes.

    Without ``repeat`` the first run tells both.
    """
    start = time.perf_counter()
    out, growth = grown(run)
    first = time.perf_counter() - start
    again = repeat and first <= LONG_S
    times = take_turns({"": run}, turns_within(ENOUGH_S, first, 1, MOST_REPEATS))[""] if again else [first]
    return out, {
        "device_name": device_name(),
        "status": "ok",
        "resident_bytes": "" if growth is None or jax.default_backend() != "cpu" else growth + argument_bytes,
        "seconds": statistics.median(times),
    }


def measure_jax(function: Callable[..., Any], arguments: Callable[[], Sequence[Any]], limit: int | str | None) -> tuple[Any, Results]:
    """The output of ``function`` and the results of running it, as ``jax.jit`` has it, or planned under ``limit``.

    ``arguments`` makes numpy or JAX arrays (or pytrees of them). The output is None where ``status`` tells why nothing ran.
    """
    args = jax.block_until_ready(jax.tree.map(jnp.asarray, tuple(arguments())))
    try:
        made = prepare(function, args, limit)
    except MemoryLimitError as error:
        return None, {"device_name": device_name(), "status": no_plan(error)}
    results = {
        "device_name": device_name(),
        "as_written": made.as_written or "",
        "held_bytes": made.held_bytes,
        "plan_seconds": made.plan_seconds,
    }
    if not made.fits_device:
        return None, results | {"status": f"not run: needs {format_bytes(made.held_bytes)}"}
    leaves = jax.tree.leaves(args)
    warm_up(leaves[0].dtype)
    out, measured = measure(lambda: made.compiled(*args), sum(leaf.nbytes for leaf in leaves))
    return out, results | measured | _held_on_device()


def no_plan(error: MemoryLimitError) -> str:
    """The status of a program that no plan fits."""
    return f"no plan: the smallest found holds {format_bytes(error.smallest_bytes)}"


# --- resident memory ----------------------------------------------------------------------------------

PROCESS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

WARM_EXTENT = 256
"""Rows of the matrices that a process is warmed up with."""


def grown(run: Run) -> tuple[Any, int | None]:
    """The results of ``run``, once they are there, and the bytes by which the process grew at most meanwhile; None where Linux does not
    tell.

    >>> import numpy as np
    >>> out, nbytes = grown(lambda: np.ones(2**24))
    >>> nbytes is None or 2**26 < nbytes < 2**29
    True
    """
    try:
        before = _field("VmRSS")
        RESET.write_text("5")  # the high-water mark starts again from here
    except OSError:
        return jax.block_until_ready(run()), None
    out = jax.block_until_ready(run())
    return out, max(_field("VmHWM") - before, 0)


def warm_up(dtype: Any) -> None:
    """Let threads start, and libraries allocate what they keep, so that growth counts none of it."""
    if dtype in (jnp.float32, jnp.float64):
        square = jnp.eye(WARM_EXTENT, dtype=dtype)
        rows = jnp.ones((WARM_EXTENT, 8 * WARM_EXTENT), dtype)
        solved = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(square), rows, lower=True)
        jax.block_until_ready(solved @ solved.T)


def _field(key: str) -> int:
    line = next(line for line in PROCESS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def _held_on_device() -> Results:
    """The most bytes that JAX has held on a GPU, as its allocator knows; nothing on a CPU, where the process grows."""
    stats = jax.local_devices()[0].memory_stats()
    return {"resident_bytes": int(stats["peak_bytes_in_use"])} if stats and "peak_bytes_in_use" in stats else {}


# --- the machine --------------------------------------------------------------------------------------


def device_name() -> str:
    """The processor, its cores, and the version of JAX, in a few words."""
    device = jax.local_devices()[0]
    name = f"{platform.machine()} CPU, {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind
    return f"{name}, jax {jax.__version__}"


def machine() -> Results:
    """Everything that figures depend on."""
    device = jax.local_devices()[0]
    return {
        "device": f"{device.platform} {device.device_kind}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": device_capacity(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """The commit of this checkout, ``+`` behind it where files differ from it; empty outside of git."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=here, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return eqsat_mem.__version__ if name == "eqsat-mem" else ""
