"""Which kernels XLA:CPU deals out to several cores: what the model of time says, beside what the compiler notes in the compiled program."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest

from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.egraph.extract import Extraction, original
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block, Fold
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.search import schedule
from eqsat_mem.schedule.split import region
from eqsat_mem.schedule.timing import Timing
from tests.schedule.test_timing import DEVICE

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
COLUMNS = 2048
SHARES: list[tuple[type, float]] = []


@dataclass(frozen=True)
class Seen(CpuBackend):
    """The backend, which notes the share of the device that each kernel has."""

    def share(self, kernel):
        found = super().share(kernel)
        SHARES.append((type(kernel.term), found))
        return found


def shares(ex, cores):
    SHARES.clear()
    Timing(Memory(ex, Seen(replace(DEVICE, matrix_cores=cores)))).total(region(ex), {})
    return list(SHARES)


def traced(function, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return load(jax.make_jaxpr(function)(*args), [f"x{k}" for k in range(len(args))]), args


def functions(x, y, count):
    value = x[:, None] + y
    for _ in range(count):
        value = jnp.log1p(value)
    return value


def products(x, y, count):
    value = x[:, None] + y
    for k in range(count):
        value = value * (y + (k + 0.5))
    return jnp.sin(value)


def choices(x, y, count):
    value = x[:, None] + y
    for k in range(count):
        value = jnp.where(value > y * (k + 1.0) + 0.3, value, y)
    return jnp.sin(value)


def partitioned(function, args):
    """Whether the one kernel of a compiled program is cut into parts."""
    (config,) = set(re.findall(r"ROOT .* fusion\(.*", jax.jit(function).lower(*args).compile().as_text()))
    return bool(re.search(r'outer_dimension_partitions":\["', config))


@pytest.mark.parametrize("rows", [1, 4, 16, 48, 63, 64, 96, 256])
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("kind", [functions, products, choices])
def test_elementwise_kernels_are_dealt_out_where_xla_deals_them_out(kind, count, rows):
    def function(x, y):
        return kind(x, y, count)

    program, args = traced(function, (rows,), (COLUMNS,))
    ((_, share),) = shares(Extraction(program), CORES)
    assert (share * CORES > 1) == partitioned(function, args)


def test_more_cores_take_more_elements():
    """Half a mebibyte of a function's results is two parts, whatever the number of cores. Exponentials take one core
    no longer, and a contraction is left to the library."""
    small, large = (Extraction(traced(lambda x, y: functions(x, y, 1), (rows,), (COLUMNS,))[0]) for rows in (64, 1024))
    for cores in (1, 2, 4, 16):
        assert shares(small, cores)[0][1] == min(cores, 2) / cores
        assert shares(large, cores)[0][1] == 1
    polynomial = Extraction(traced(lambda x, y: jnp.exp(x[:, None] + y), (8,), (COLUMNS,))[0])
    assert shares(polynomial, 2)[0][1] == 1
    product = Extraction(traced(lambda x, y: x @ y, (8, 8), (8, 8))[0])
    assert shares(product, 4)[0][1] == 1


def test_small_folds_of_the_library_are_one_cores():
    def share_of_fold(rows):
        found = shares(Extraction(traced(lambda x: jnp.sum(x, 1), (rows, COLUMNS))[0]), 2)
        (share,) = (share for kind, share in found if kind is Fold)
        return share

    assert [share_of_fold(rows) for rows in (16, 31, 32, 64)] == [0.5, 0.5, 1, 1]


@pytest.mark.parametrize("count", [64, 1024, 2048, 4096, 2**14, 2**18])
def test_random_numbers_are_dealt_out_where_xla_deals_them_out(count):
    def drawn(key):
        return jax.random.bits(key, (count,))

    key = jax.random.PRNGKey(0)
    program = load(jax.make_jaxpr(drawn)(key), ["key"])
    share = min(share for kind, share in shares(Extraction(program), CORES) if kind is Block)
    compiled = jax.jit(drawn).lower(key).compile().as_text()
    assert (share * CORES > 1) == ("outer_dimension_partitions" in compiled)


def test_chunks_have_work_for_all_cores_where_there_is_room():
    """Sines of differences, summed with weights: chunks of less than half a mebibyte would be computed by one core."""

    def coupled(x, weights):
        return jnp.sum(weights * jnp.sin(x - x[:, None]), 1)

    program, _ = traced(coupled, (COLUMNS,), (COLUMNS, COLUMNS))
    ex = original(program, load_rules())

    def chunk_bytes(limit):
        (taken,) = schedule(ex, limit, CpuBackend(DEVICE)).chunks.values()
        return taken * COLUMNS * 4

    assert chunk_bytes(2**24 + 2**21) >= 2**19
    assert chunk_bytes(2**24 + 2**19) < 2**19
