"""``eqsat-mem calibrate``: measure the profile of this device with small programs, each of which determines one field."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eqsat_mem.backends.cpu.backend import AT_ONCE, DEALT
from eqsat_mem.backends.cpu.profile import CpuDevice
from eqsat_mem.backends.cpu.vector_width import USUAL_BITS, WIDE_BITS, compiler_options
from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.ir.precision import FULL
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.device import Device

SHORTEST_S = 5e-3
"""The work of a measurement is increased until it takes at least this many seconds."""
REPEATS = 7
OPERATIONS = 64
"""Operations per element in a measurement of arithmetic, so that memory traffic is negligible."""
LONGEST_S = 5.0
"""The work of a measurement is increased no further after this many seconds: on a GPU, each size is autotuned anew."""
SMALL_KERNELS = 8
THIN_ROWS, FEW_COLUMNS = 1024, 16
"""The rows (also the depth) and the columns of the contraction that measures the cost of having few columns."""
DEAL_DEPTH, DEAL_COLUMNS = 8, 256
"""The depth and the columns of contractions that take little longer than it takes to distribute them to cores."""
EVEN = 1024
"""Arrays that are measured have a multiple of so many elements: XLA:CPU distributes 2,831,155 elements to two cores in parts whose
loops are not vectorised, and takes 15 times as long as for 2,831,156."""
CLEARLY = 1.1
"""The speed-up from which on wider vectors are preferred."""


def measure(backend: Backend, report: Callable[[str], None] = lambda field: None, shortest_s: float = SHORTEST_S) -> Device:
    """Measure the profile of JAX's default device, which takes some seconds.

    All measurements use float32 except ``narrow_flops``, which uses bfloat16. The capacities of caches and the size from which on an
    allocation is new memory are not measured: they keep their built-in values, and so does ``matrix_cores`` unless the device tells
    its number of cores. On a GPU matrices are large from the start, and folds compute what they fold.

    Args:
        backend: the backend of the default device with its built-in profile.
        report: called with the names of the fields that are measured next.
        shortest_s: the least duration of a measurement, in seconds.

    Returns:
        The backend's profile with the measured fields replaced; links to other devices are measured in :mod:`eqsat_mem.backends.links`.
    """
    device, on_cpu = backend.device, isinstance(backend.device, CpuDevice)
    first = 256 if on_cpu else 4096
    report("flops")
    device = replace(device, name=f"{device.name}, measured", flops=_flops(jnp.float32, shortest_s, first))
    report("narrow_flops")
    device = replace(device, narrow_flops=_flops(jnp.bfloat16, shortest_s, first))
    report("elements")
    in_cache = _elements(0.75 * device.levels[0][0])
    device = replace(device, elements=elementwise_rate(in_cache, shortest_s))
    report("levels")
    device = replace(device, levels=tuple(_levels(device, shortest_s)))
    report("fresh_rate")
    device = replace(device, fresh_rate=_fresh_rate(device, shortest_s))
    report("iteration_s, kernel_s")
    iteration_s, kernel_s = _overheads(shortest_s, launches=1 if on_cpu else 2)
    device = replace(device, iteration_s=iteration_s, kernel_s=kernel_s / AT_ONCE if on_cpu else kernel_s)  # those measured are small
    report("reduce_weight, short_reduce_weight")
    fold = _fold if on_cpu else _computed_fold
    short_reduce_weight = fold(device, backend.short_fold // 4, shortest_s)
    device = replace(device, reduce_weight=fold(device, 1024, shortest_s), short_reduce_weight=short_reduce_weight)
    cores = getattr(jax.local_devices()[0], "core_count", None)
    if not on_cpu and cores:
        device = replace(device, matrix_cores=int(cores))
    if isinstance(device, CpuDevice):
        report("vector_bits")
        device = replace(device, vector_bits=_vector_bits(in_cache, shortest_s))
        report("function_factor")
        device = replace(device, function_factor=_function_factor(device, backend, in_cache, shortest_s))
        report("thin_columns, deal_s")
        device = replace(device, thin_columns=_thin_columns(device, shortest_s), deal_s=_deal_s(shortest_s))
    return device


def _flops(dtype: Any, shortest_s: float, first: int) -> float:
    """Return multiplications and additions per second of a product of square matrices in full precision; ``first`` is the least extent."""

    def make(n: int) -> tuple[Callable[..., Any], Any, float]:
        a = jnp.linspace(0, 1, n * n, dtype=dtype).reshape(n, n)
        return partial(jnp.matmul, precision=FULL), (a, a), 2.0 * n**3

    return _rate(make, first, shortest_s)


def elementwise_rate(elements: int, shortest_s: float) -> float:
    """Return float32 additions and multiplications per second in one elementwise kernel.

    Args:
        elements: the size of the array that it passes over; it should fit a cache.
        shortest_s: the least duration of the measurement, in seconds.
    """

    def many(x: jax.Array) -> jax.Array:
        for k in range(OPERATIONS // 2):
            x = x * 0.999 + 0.001 * k
        return x

    return OPERATIONS * _passes(many, elements, shortest_s)


def _levels(device: Device, shortest_s: float) -> Iterator[tuple[float, float]]:
    """Yield the capacity of each memory level, in bytes, and its measured bandwidth, in bytes read and written per second.

    The array passed over has three quarters of the level's capacity, or four times that of the last cache for main memory. The
    bandwidth of a level is at most that of the levels before it.
    """
    fastest = math.inf
    largest = max(size for size, _ in device.levels if size < math.inf)
    for size, _ in device.levels:
        working_set = 0.75 * size if size < math.inf else 4 * largest
        fastest = min(fastest, 8.0 * _passes(lambda x: x + 1.0, _elements(working_set), shortest_s))
        yield size, fastest


def _elements(size: float) -> int:
    """Return how many float32 elements ``size`` bytes hold, a multiple of :data:`EVEN`."""
    return max(int(size / 4) // EVEN, 1) * EVEN


def _passes(function: Callable[[jax.Array], jax.Array], elements: int, shortest_s: float, options: dict[str, str] | None = None) -> float:
    """Return the elements per second of passes of an elementwise function over a float32 array, each over what the last one wrote."""

    def make(count: int) -> tuple[Callable[..., Any], Any, float]:
        x = jnp.ones(elements, jnp.float32)
        return lambda x: lax.fori_loop(0, count, lambda t, x: function(x), x), (x,), float(elements * count)

    return _rate(make, 1, shortest_s, options)


def _fresh_rate(device: Device, shortest_s: float) -> float:
    """Return the bytes per second at which the system provides a result that is new memory in every run.

    If an array of that size would be too large to measure, return the built-in figure.
    """
    elements = int(device.reused_bytes) // 2
    if elements > 2**25:
        return device.fresh_rate

    def make(count: int) -> tuple[Callable[..., Any], Any, float]:
        x = jnp.ones(elements * count, jnp.float32)
        return lambda x: x + 1.0, (x,), 4.0 * x.size

    moving_s = 2 / device.levels[-1][1]
    return 1 / max(1 / _rate(make, 1, shortest_s) - moving_s, moving_s / 100)


def _overheads(shortest_s: float, launches: int) -> tuple[float, float]:
    """Return the seconds of one more iteration of a loop, and of one more kernel in its body.

    The loop carries a large array and writes one of its elements, because XLA compiles a loop over little data to a single kernel.
    A sort and a change of sign are one kernel on XLA:CPU, and two ``launches`` on XLA:GPU.
    """
    carried = jnp.zeros(2**18, jnp.float32)

    def loop(kernels: int) -> Callable[[int], tuple[Callable[..., Any], Any, float]]:
        def body(t: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, large = state
            for _ in range(kernels):
                x = -lax.sort(x)  # no compiler fuses two of these
            return x, lax.dynamic_update_index_in_dim(large, x[0], t % large.size, 0)

        def make(count: int) -> tuple[Callable[..., Any], Any, float]:
            return lambda *state: lax.fori_loop(0, count, body, state), (jnp.ones(2, jnp.float32), carried), float(count)

        return make

    one, many = (1 / _rate(loop(kernels), 256, shortest_s) for kernels in (1, SMALL_KERNELS))
    kernel_s = max((many - one) / (launches * (SMALL_KERNELS - 1)), 1e-9)
    return max(one - (launches + 1) * kernel_s, 1e-8), kernel_s


def _fold(device: Device, length: int, shortest_s: float) -> float:
    """Return the time to sum one element along rows of ``length`` elements that are in cache, in units of elementwise additions."""
    rows = _elements(0.75 * device.levels[0][0]) // length

    def body(t: jax.Array, x: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(x, jnp.sum(x, 1)[:1, None], (t % rows, 0))  # so that the next sum is another

    def make(count: int) -> tuple[Callable[..., Any], Any, float]:
        return lambda x: lax.fori_loop(0, count, body, x), (jnp.zeros((rows, length), jnp.float32),), float(count * rows * length)

    return max(device.elements / _rate(make, 16, shortest_s), 0.1)


def _computed_fold(device: Device, length: int, shortest_s: float) -> float:
    """The same of products that the fold computes itself, so that no memory is read: the time of the products is left out."""

    def make(rows: int) -> tuple[Callable[..., Any], Any, float]:
        x, y = jnp.ones((rows, 1), jnp.float32), jnp.ones((1, length), jnp.float32)
        return lambda x, y: jnp.sum(x * y, 1), (x, y), float(rows * length)

    return max(device.elements / _rate(make, max(2**20 // length, 1), shortest_s) - 1, 0.1)


def _two_exponentials(x: jax.Array) -> jax.Array:
    """Exponentials beside products with numbers: XLA:CPU has a code generator of its own for kernels without numbers, changes of sign and
    functions alone, which always uses vectors of 256 bits (jaxlib 0.10.2)."""
    return jnp.exp(-0.5 * jnp.exp(-0.5 * x))


def _vector_bits(elements: int, shortest_s: float) -> int:
    """Return the vector width, in bits, with which exponentials are fastest: the default unless the other is clearly faster."""
    usual = _passes(_two_exponentials, elements, shortest_s)
    wide = compiler_options(WIDE_BITS)
    return WIDE_BITS if wide and _passes(_two_exponentials, elements, shortest_s, wide) > CLEARLY * usual else USUAL_BITS


def _function_factor(device: CpuDevice, backend: Backend, elements: int, shortest_s: float) -> float:
    """Return the measured time of an exponential divided by its time according to the table of weights.

    It is compiled with the vector width with which plans are compiled.
    """
    rate = 2 * _passes(_two_exponentials, elements, shortest_s, compiler_options(device.vector_bits))
    return max(device.elements / rate - 1.0, 1.0) / backend.weights.elementwise["exp"]  # minus the product


def _thin_columns(device: CpuDevice, shortest_s: float) -> float:
    """Return the number of columns at which a contraction reaches half of its full rate, from its rate with few columns.

    The model is that ``n`` columns run at the fraction ``n / (n + thin_columns)`` of the full rate. Each product is an operand of the
    next, so that both operands stay in a cache.
    """

    def make(count: int) -> tuple[Callable[..., Any], Any, float]:
        x = jnp.full((THIN_ROWS, THIN_ROWS), 1 / THIN_ROWS, jnp.float32), jnp.ones((THIN_ROWS, FEW_COLUMNS), jnp.float32)
        return lambda a, b: lax.fori_loop(0, count, lambda t, b: jnp.matmul(a, b, precision=FULL), b), x, float(count)

    seconds = 1 / _rate(make, 16, shortest_s) - device.iteration_s - device.kernel_s
    return max(FEW_COLUMNS * (seconds * device.flops / (2.0 * THIN_ROWS**2 * FEW_COLUMNS) - 1), 1.0)


def _deal_s(shortest_s: float) -> float:
    """Return the seconds that it takes to distribute a contraction to cores.

    They are the difference between a contraction that is just large enough to be distributed and the largest that is not.
    """

    def contraction_s(rows: int) -> float:
        def body(t: jax.Array, x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x @ jnp.ones((DEAL_DEPTH, DEAL_COLUMNS), jnp.float32), t % 2, DEAL_DEPTH, 1)

        def make(count: int) -> tuple[Callable[..., Any], Any, float]:
            return lambda x: lax.fori_loop(0, count, body, x), (jnp.zeros((rows, DEAL_DEPTH), jnp.float32),), float(count)

        return 1 / _rate(make, 16, shortest_s)

    alone, dealt = (contraction_s(rows) for rows in (DEALT // DEAL_COLUMNS, DEALT // DEAL_COLUMNS + DEAL_DEPTH))
    return max(dealt - alone, 1e-9)


def _rate(
    make: Callable[[int], tuple[Callable[..., Any], Any, float]], n: int, shortest_s: float, options: dict[str, Any] | None = None
) -> float:
    """Return the work per second of a compiled function.

    It is the difference of work between two runs, one of which does more, by the difference of their times, so that what a call costs
    whatever it does, new memory for its results among it, is not counted. Both times are the least of ``REPEATS`` runs in turn.

    Args:
        make: ``make(n)`` returns a function, its arguments, and the work that the function does; work grows with ``n``.
        n: the first size to try; it is doubled or quadrupled until a run takes at least ``shortest_s`` seconds, and then doubled again.
        shortest_s: the least duration of a run, in seconds.
        options: compiler options.
    """

    if options is None and jax.default_backend() == GpuBackend.platform:
        options = dict(GpuBackend.built_in().compiler_options)

    def compiled(n: int) -> tuple[Any, Any, float]:
        function, args, work = make(n)
        program = jax.jit(function, compiler_options=options).lower(*args).compile()
        jax.block_until_ready(program(*args))
        return program, args, work

    began = time.perf_counter()
    while True:
        less, less_args, less_work = compiled(n)
        seconds = timed(less, less_args)
        if seconds >= shortest_s or time.perf_counter() - began > LONGEST_S:
            break
        n *= 2 if seconds > shortest_s / 8 else 4
    more, more_args, more_work = compiled(2 * n)
    pairs = [(timed(less, less_args), timed(more, more_args)) for _ in range(REPEATS)]
    less_s, more_s = (min(column) for column in zip(*pairs))
    return (more_work - less_work) / (more_s - less_s) if more_s > less_s else more_work / more_s


def timed(compiled: Any, args: Any) -> float:
    """Return the seconds of one run of a compiled function, with its results complete."""
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    return time.perf_counter() - start


def compared(built_in: Device, measured: Device | None) -> str:
    """Return a table of the built-in profile beside the measured one, if there is one, with a line for each field; what was not measured
    has a dash."""
    used = measured or built_in
    rows: list[tuple[str, str, str]] = []

    def row(title: str, figure: str, before: float, after: float) -> None:
        rows.append((title, format(before, figure), format(after, figure) if after != before else "-"))

    units = {"flops": (1e9, "contraction, GFLOP/s"), "narrow_flops": (1e9, "of bfloat16, GFLOP/s"), "elements": (1e9, "elementwise, 1e9/s")}
    for name, (unit, title) in units.items():
        row(title, ".1f", getattr(built_in, name) / unit, getattr(used, name) / unit)
    for (size, before), (_, after) in zip(built_in.levels, used.levels):
        row("memory, GB/s" if math.isinf(size) else f"within {size / 2**20:.1f} MiB, GB/s", ".1f", before / 1e9, after / 1e9)
    row("new memory, GB/s", ".1f", built_in.fresh_rate / 1e9, used.fresh_rate / 1e9)
    for name, title in (("kernel_s", "a kernel, us"), ("iteration_s", "an iteration, us")):
        row(title, ".2f", getattr(built_in, name) * 1e6, getattr(used, name) * 1e6)
    for name, title in (("reduce_weight", "a sum, additions"), ("short_reduce_weight", "a short sum, additions")):
        row(title, ".1f", getattr(built_in, name), getattr(used, name))
    if isinstance(built_in, CpuDevice) and isinstance(used, CpuDevice):
        row("functions", ".2f", built_in.function_factor, used.function_factor)
        row("columns at half rate", ".1f", built_in.thin_columns, used.thin_columns)
        row("distribution, us", ".2f", built_in.deal_s * 1e6, used.deal_s * 1e6)
        row("vectors, bits", "d", built_in.vector_bits, used.vector_bits)
    for name, title in (("near", "between devices"), ("far", "between machines")):
        before, after = getattr(built_in, name), getattr(used, name)
        row(f"{title}, us", ".1f", before.latency_s * 1e6, after.latency_s * 1e6)
        row(f"{title}, GB/s", ".1f", before.rate / 1e9, after.rate / 1e9)
    shown = [("", "built-in", "measured"), *rows]
    return "\n".join(f"{title:24}{before:>14}" + (f"{after:>14}" if measured else "") for title, before, after in shown)
