"""Predicted peaks: by hand, against running every turn, and against what XLA reports."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqsat_mem.backends.xla import compiled_peak
from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import Extraction, original
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import argument_bytes
from eqsat_mem.ir.loop_tree import Loop, Seq, loops, walk_regions
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.search import schedule, straight
from eqsat_mem.schedule.split import region, split
from tests.oracles import peak as oracle
from tests.oracles.differential import random_tree
from tests.oracles.peak import brute_force_peak
from tests.oracles.targets import CPU
from tests.schedule.test_split import traced

N = 2000
KIB = 1024


def total(fun: Callable[..., Any], *shapes: tuple[int, ...]) -> int:
    return straight(traced(fun, *shapes), CPU).peak_bytes


# --- by hand ----------------------------------------------------------------------------------------


def test_an_elementwise_chain_holds_its_argument_and_its_result():
    assert total(lambda a: jnp.exp(jnp.sin(a) * 2), (256,)) == 2 * KIB


def test_arguments_that_are_not_used_count():
    assert total(lambda a, b: a + 1, (256,), (512,)) == 4 * KIB


def test_a_result_that_is_an_argument_is_a_copy():
    assert total(lambda a: a, (256,)) == 2 * KIB
    assert total(lambda a: (a, a), (256,)) == 3 * KIB


def test_what_is_broadcast_for_an_output_counts_at_its_full_size():
    assert total(lambda a: jnp.broadcast_to(a[:, None], (256, 4)), (256,)) == 5 * KIB


def test_a_contraction_is_held_until_its_last_reader():
    a = 64 * 64 * 4
    assert total(lambda x: (x @ x) @ x, (64, 64)) == 3 * a  # argument, inner product, result


@pytest.mark.parametrize(("rows", "columns", "parts"), [(512, 8192, 128), (512, 65536, 512), (4096, 512, 64), (20, 128, 0)])
def test_folds_of_leading_axes_hold_partial_results(rows, columns, parts):
    """As growth of resident memory showed: a row of results for each 32,768 elements of the operand."""
    arguments = 4 * (rows + columns)
    assert total(lambda a, b: jnp.sum(jnp.exp(a[:, None] - b), 0), (rows,), (columns,)) == arguments + 4 * columns + 4 * parts * columns
    assert total(lambda a, b: jnp.sum(jnp.exp(a[:, None] - b), 1), (rows,), (columns,)) == arguments + 4 * rows


def test_closed_over_arrays_count_as_arguments():
    table = np.ones(256, np.float32)
    program = load(jax.make_jaxpr(lambda a: a + table)(jax.ShapeDtypeStruct((256,), np.float32)), ["a"])
    assert argument_bytes(program) in (KIB, 2 * KIB)


def test_a_loop_holds_its_results_and_one_chunk():
    ex = traced(lambda a, b: jnp.exp(a @ b.T) @ b, (128, 2), (64, 2))
    found = schedule(ex, 1, CPU)
    chunk = next(iter(found.chunks.values()))
    assert chunk == 1
    assert found.peak_bytes < argument_bytes(ex.program) + 128 * 2 * 4 + 2 * 64 * 4 + 256


def test_the_peak_names_what_is_live_at_it():
    ex = traced(lambda a: jnp.sum(jnp.exp(a @ a.T), 0), (64, 2))
    memory = Memory(ex, CPU)
    peak, (live, _) = (find(region(ex), memory.full_extents(), {}) for find in (memory.peak, memory.at_peak))
    assert 64 * 64 * 4 in [value.nbytes for value in live]
    assert sum(value.nbytes for value in live) == peak.nbytes


# --- against running every turn ----------------------------------------------------------------------


def softmax_gradient(q, k, v):
    return jax.grad(lambda *a: jnp.sum((jax.nn.softmax(a[0] @ a[1].T, -1) @ a[2]) ** 2), (0, 1, 2))(q, k, v)


def peaks(ex: Extraction, seq: Seq, chunks: dict[Loop, int]) -> tuple[int, int]:
    """The peak of a loop tree as it is predicted, and as it is when every turn of every loop runs, without memory of unwritten outputs."""
    memory = Memory(ex, CPU.inside())
    return memory.peak(seq, memory.full_extents(), chunks).nbytes, brute_force_peak(Schedule(ex, CPU, seq, chunks, 0, 0.0))


@pytest.mark.parametrize("seed", range(12))
def test_peaks_are_those_of_the_running_program(seed):
    ex = traced(softmax_gradient, (11, 3), (7, 3), (7, 2))
    predicted, held = peaks(ex, *random_tree(ex, random.Random(seed)))
    assert predicted == held


def leading_sums(a, b):
    return jnp.sum(jnp.exp(a[:, None] - b), 0), jnp.sum(jnp.exp(a[:, None] + b), 1)


def two_layers(x, w, u):
    hidden = jnp.tanh(x @ w)
    return hidden @ u, jnp.sum(hidden, 0)


def gradient_of_layers(x, w, u):
    return jax.grad(lambda *a: sum(jnp.sum(out.astype(jnp.float32)) for out in two_layers(*a)), (0, 1, 2))(x, w, u)


def whole_and_by_position(x, y, v):
    return (jnp.exp(x @ (2.0 * y).T - distances(x, 2.0 * y))) @ v


LAYERS = [(40, 8), (8, 24), (24, 6)]
COUNTED = {
    "rows of results": (leading_sums, [(300,), (400,)], "float32"),
    "positions": (whole_and_by_position, [(400, 3), (500, 3), (500,)], "float32"),
    "bfloat16 layers": (two_layers, LAYERS, "bfloat16"),
    "float16 layers": (two_layers, LAYERS, "float16"),
    "gradient of bfloat16 layers": (gradient_of_layers, LAYERS, "bfloat16"),
}


@pytest.mark.parametrize("name", COUNTED)
def test_copies_and_widened_values_are_those_of_the_running_program(name):
    fun, shapes, dtype = COUNTED[name]
    jaxpr = jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    ex = original(load(jaxpr, "abc"[: len(shapes)]))
    assert bool(ex.unrolls) == (name == "positions")
    trees = [(region(ex), {}), *(random_tree(ex, random.Random(seed)) for seed in range(20))]
    for seq, chunks in trees:
        predicted, held = peaks(ex, seq, chunks)
        assert held == predicted
    assert any(isinstance(step, Seq) for seq, _ in trees for _, inner in walk_regions(seq) for step in inner.steps)


def test_the_oracle_of_peaks_asks_nothing_of_the_model_of_memory():
    judged = {name for name in vars(oracle) if getattr(vars(oracle)[name], "__module__", "") == Memory.__module__}
    assert not judged
    source = Path(oracle.__file__).read_text(encoding="utf-8")
    assert not re.search(r"^\s*(from|import) .*schedule\.memory", source, re.MULTILINE)


@pytest.mark.parametrize("seed", range(12))
def test_larger_chunks_hold_no_less_but_for_buffers_that_happen_to_fit(seed):
    ex = traced(softmax_gradient, (11, 3), (7, 3), (7, 2))
    seq, chunks = random_tree(ex, random.Random(seed))
    memory = Memory(ex, CPU)
    for loop in loops(seq):
        extent = ex.program.indices[loop.index].extent
        peaks = [memory.total(seq, {**chunks, loop: chunk}) for chunk in range(1, extent)]
        assert all(larger >= 0.9 * smaller for smaller, larger in itertools.pairwise(peaks))


# --- against XLA --------------------------------------------------------------------------------------


def distances(x, y):
    return jnp.sum((x[:, None] - y[None]) ** 2, -1)


def kernel_vector(x, y, v):
    return jnp.exp(-0.5 * distances(x, y)) @ v


XLA: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "kernel times vector": (kernel_vector, [(N, 3), (N, 3), (N, 2)]),
    "Gram matrix": (lambda x: jnp.exp(x @ x.T), [(N, 16)]),
    "layer": (lambda x, w, u: jnp.tanh(x @ w) @ u, [(N, 32), (32, N), (N, 8)]),
    "cholesky": (lambda x: jnp.linalg.cholesky(x @ x.T + 100 * jnp.eye(500)), [(500, 16)]),
    "chain": (lambda a, b, c: (a @ b) @ c, [(N, 64), (64, N), (N, 64)]),
}


def compare_with_xla(ex: Extraction, limit: int | None, most: float = 1.15) -> None:
    made = straight(ex, CPU) if limit is None else schedule(ex, limit, CPU)
    avals = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in ex.program.inputs]
    held, _ = compiled_peak(emit(made).function, avals)
    assert 0.95 * held <= made.peak_bytes <= most * held


@pytest.mark.parametrize("limit", [None, 4 * KIB * KIB])
@pytest.mark.parametrize("name", XLA)
def test_predictions_are_what_xla_holds(name, limit):
    fun, shapes = XLA[name]
    compare_with_xla(traced(fun, *shapes), limit)


def scan_after_products(x):
    rows = (x @ x) @ x
    stacked = lax.scan(lambda total, row: (total + row[0], jnp.sin(total + row)), jnp.float32(0), rows)[1]
    return stacked.T @ stacked


def loop_after_products(x, y):
    return jnp.exp(((x @ x) @ x) @ y)


@pytest.mark.parametrize(("fun", "shapes"), [(scan_after_products, [(256, 256)]), (loop_after_products, [(256, 256), (256, 1024)])])
def test_what_loops_write_into_is_there_while_earlier_kernels_run(fun, shapes):
    """Its zeros wait for nothing: XLA makes them before the products, the first of which it still holds as it makes the second."""
    ex = traced(fun, *shapes)
    columns = [k for k, index in enumerate(ex.program.indices) if index.extent == 1024]
    tree = split(ex, region(ex), *columns) if columns else region(ex)
    chunks = dict.fromkeys(loops(tree), 32)
    made = Schedule(ex, CPU, tree, chunks, Memory(ex, CPU).total(tree, chunks), 0.0)
    avals = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in ex.program.inputs]
    held, _ = compiled_peak(emit(made).function, avals)
    assert held == pytest.approx(made.peak_bytes, rel=1e-3)


ROWS = 8192
POINTS = [(ROWS, 3), (ROWS, 3), (ROWS,)]
APART: dict[str, Callable[..., Any]] = {
    "arguments": kernel_vector,
    "one argument, the other divided by one": lambda x, y, v: kernel_vector(x, y / 1.0, v),
    "elementwise values": lambda x, y, v: kernel_vector(x * 2.0, jnp.exp(y), v),
    "a contraction": lambda x, y, v: kernel_vector(x, y @ (y[:3] + 1.0), v),
    "values that are read whole as well": lambda x, y, v: (jnp.exp(x @ (2.0 * y).T - distances(x, 2.0 * y))) @ v,
}


@pytest.mark.parametrize("name", APART)
def test_what_loops_read_position_by_position_is_held_so(name):
    """Tiles are small beside the columns of arguments and of other values, of which XLA holds as many as are predicted."""
    ex = traced(APART[name], *POINTS)
    assert ex.unrolls
    compare_with_xla(ex, argument_bytes(ex.program) + 500 * KIB, most=1.05)


def test_a_stretch_holds_what_its_steps_hold():
    """Values that its own loops read position by position are taken apart inside of it."""
    ex = traced(APART["values that are read whole as well"], *POINTS)
    made = schedule(ex, argument_bytes(ex.program) + 500 * KIB, CPU)
    around = Seq((made.seq,), made.seq.outs, made.seq.reads)
    assert Memory(ex, CPU).total(around, made.chunks) == made.peak_bytes
