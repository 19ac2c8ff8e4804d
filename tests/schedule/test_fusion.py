"""The kernels that XLA:CPU makes of one straight region, mechanism by mechanism: predicted bytes against those of the compiled program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eqsat_mem import pipeline
from eqsat_mem.backends.cpu.fusion import ends
from eqsat_mem.backends.cpu.kernel_library import heavy_folds
from eqsat_mem.backends.xla import compiled_peak
from eqsat_mem.codegen.emit import emit
from eqsat_mem.errors import MemoryLimitError
from eqsat_mem.ir import Dot, Map
from eqsat_mem.ir.loop_tree import loops, walk_regions, with_region
from eqsat_mem.options import Options
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.search import straight
from eqsat_mem.schedule.split import Choices, region, split
from tests.oracles.targets import CPU
from tests.schedule.test_split import traced

pytestmark = pytest.mark.usefixtures("compiled_as_everybodys")

N = 512
MATRIX = N * N * 4
"""Bytes of one matrix, which all programs here are made of."""
SQUARE, ROW = (N, N), (N,)


def first_of_the_smallest(x, y):
    """The minimum is read by a comparison, which the library does not know: it would hand on a matrix of minima."""
    z = x * y
    return jnp.argmin(z, 1)


def softmax_then_sine(x, y):
    """The library would go on to the difference, which then is held, if it were not stopped at the maximum."""
    return jnp.sum(jnp.sin(x @ y - jnp.max(x @ y, 1)[:, None]), 1)


def number_shared_with_a_fold(x, y, v):
    """Both the maximum inside of the sum and the choice read a matrix of zeros, which is held."""
    return jnp.sum(jnp.maximum(x, 0.0), 1), jnp.where(y > 0.0, jnp.sin(x), 0.0) @ v


def row_shared_with_a_fold(x, y, v):
    return jnp.sum(x * v, 1), jnp.sin(jnp.where(y > x, v, y)) @ v


def row_shared_by_two_folds(x, y, v):
    return jnp.sum(x * v, 1), jnp.sum(jnp.abs(x * y - v), 1)


def cheap_value_of_a_product(x, y, v):
    """The choice computes the sum with 1 again from the product, which waits for it, rather than read it."""
    z = x @ y + 1.0
    return z @ v, jnp.sum(z, 0), jnp.sin(jnp.where(z > x, x, y)) @ v


def ready_early_and_read_late(x, y):
    """The sine is computed as soon as its product is there, and waits while the chain of products goes on."""
    first = x @ y
    late = jnp.sin(first)
    chain = ((jnp.cos(first) @ y) @ y) @ y
    return jnp.exp(chain) @ x + late @ y


def divided_by_a_root(x, y):
    """A product with the inverse root, which selection reads twice and which is held therefore."""
    return lax.top_k((x @ y) / jnp.sqrt(jnp.sum(x * x, 1)[:, None] * jnp.sum(y * y, 0)), 2)


def pairs_of_many_operations(x, y):
    """All pairs are written to memory, since the kernel library would take longer for so many operations than XLA's own code."""
    return jnp.min(1 / (1 + jnp.sqrt(1 + jnp.abs(x[:, None] - y) ** 3)), 1)


def pairs_of_few_operations(x, y):
    return jnp.min(jnp.abs(x[:, None] - y), 1)


def pairs_of_logarithms(x, y):
    """Those of the kernel library are faster than XLA's."""
    return jnp.sum(jnp.log1p(jnp.sqrt(1 + jnp.abs(x[:, None] - y) ** 3)), 1)


def pairs_of_shared_values(x, y):
    """Each sum reads what is in memory."""
    pairs, other = (jnp.sqrt(1 + jnp.abs(x[:, None] - y) ** k) for k in (3, 4))
    return jnp.sum(pairs * other, 1), jnp.sum(pairs * pairs, 1), jnp.sum(other * other, 1)


def share_of_pairs(x, y):
    """The rows and columns that both sums repeat are repeated inside of each."""
    return jnp.sum(jnp.minimum(x[:, None], y), 1) / jnp.sum(jnp.maximum(x[:, None], y), 1)


def many_shares_of_pairs(x, y):
    return jnp.max(jnp.sum(jnp.minimum(x[:, None], y), 2) / jnp.sum(jnp.maximum(x[:, None], y), 2), 1)


def pairs_in_three_kernels(x, y, z):
    below, above = (jnp.sum(f(x[:, None], y), 2) for f in (jnp.minimum, jnp.maximum))
    return jnp.max(below / above, 1), jnp.sum(jnp.sin(jnp.minimum(x[:, None], z)), 2)


def clamped_pairs(x, y):
    """XLA makes one operation of both, which the library does not know."""
    return jnp.sum(jnp.maximum(0.0, jnp.minimum(1.0, x[:, None] - y)), 1)


def rows_with_weights(x, y, v):
    """A matrix that is in memory is contracted where it lies."""
    return jnp.sum(x * v[:, None], 0) + y[0]


def nearest_of_roots(x, y):
    """The choice and the fold both compute the cheap end of the roots again, which are held beside it."""
    roots = jnp.sqrt(1 + jnp.abs(x[:, None] - y))
    return jnp.argmin(jnp.where(roots > 1.5, roots, 2.0), 1)


def largest_of_roots(x, y):
    """The roots are there once, for the fold and the choice."""
    return jnp.argmax(jnp.sqrt(1 + jnp.abs(x[:, None] - y)), 1)


def pairs_counted(x, y):
    """A one for each pair is written to memory."""
    return jax.ops.segment_sum(jnp.ones((N, N)).ravel(), (x * 3 + y).astype(jnp.int32).ravel(), 30)


def row_for_every_transform(x, y):
    return jnp.sum(jnp.abs(jnp.fft.rfft(jnp.broadcast_to(x[0], (N, N)))), 0) + y[0, : N // 2 + 1]


def row_sorted_for_every_row(x, y):
    """The sort is in place: in the repeated row."""
    return jnp.sort(jnp.broadcast_to(x[0], (N, N))) + y


MECHANISMS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    f.__name__: (f, shapes)
    for f, shapes in [
        (first_of_the_smallest, [SQUARE, SQUARE]),
        (softmax_then_sine, [SQUARE, SQUARE]),
        (number_shared_with_a_fold, [SQUARE, SQUARE, ROW]),
        (row_shared_with_a_fold, [SQUARE, SQUARE, ROW]),
        (row_shared_by_two_folds, [SQUARE, SQUARE, ROW]),
        (cheap_value_of_a_product, [SQUARE, SQUARE, ROW]),
        (ready_early_and_read_late, [SQUARE, SQUARE]),
        (divided_by_a_root, [(N, 8), (8, 4 * N)]),
        (pairs_of_many_operations, [ROW, (4 * N,)]),
        (pairs_of_few_operations, [ROW, (4 * N,)]),
        (pairs_of_logarithms, [ROW, (4 * N,)]),
        (clamped_pairs, [ROW, (4 * N,)]),
        (share_of_pairs, [ROW, (4 * N,)]),
        (many_shares_of_pairs, [(N, 32), (N, 32)]),
        (pairs_in_three_kernels, [(N, 32), (N, 32), (N, 32)]),
        (rows_with_weights, [SQUARE, SQUARE, ROW]),
        (nearest_of_roots, [ROW, (4 * N,)]),
        (largest_of_roots, [ROW, (4 * N,)]),
        (pairs_counted, [SQUARE, SQUARE]),
        (row_for_every_transform, [SQUARE, SQUARE]),
        (row_sorted_for_every_row, [SQUARE, SQUARE]),
    ]
}


def held(made: Schedule) -> int:
    avals = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in made.ex.program.inputs]
    return compiled_peak(emit(made).function, avals)[0]


@pytest.mark.parametrize("name", MECHANISMS)
def test_predictions_are_what_xla_holds(name):
    fun, shapes = MECHANISMS[name]
    made = straight(traced(fun, *shapes), CPU)
    assert 0.97 * held(made) <= made.peak_bytes <= 1.03 * held(made)


@pytest.mark.parametrize("name", ["share_of_pairs", "row_shared_by_two_folds"])
def test_what_several_kernels_repeat_is_held_as_written(name):
    fun, shapes = MECHANISMS[name]
    ex = traced(fun, *shapes)
    predicted = straight(ex, CPU, emitted=False).peak_bytes
    actual, _ = compiled_peak(fun, [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in ex.program.inputs])
    assert 0.97 * actual <= predicted <= 1.03 * actual


def test_what_folds_repeat_that_meet_in_one_kernel_is_not_held_as_written():
    """The library makes one fusion of both sums and their quotient where there are thousands of results."""

    def held_and_predicted(rows):
        ex = traced(share_of_pairs, (rows,), (2 * N,))
        actual, _ = compiled_peak(share_of_pairs, [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in ex.program.inputs])
        return [(bytes_held > rows * N * 4) for bytes_held in (actual, straight(ex, CPU, emitted=False).peak_bytes)]

    assert held_and_predicted(4095) == [True, True]
    assert held_and_predicted(4096) == [False, False]


WEIGHTED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "rows": (lambda x, y, v: jnp.sum(jnp.abs(x[:, None] - y) * v, 1), [ROW, (4 * N,), (4 * N,)]),
    "columns": (lambda x, y, v: jnp.sum(jnp.abs(x[:, None] - y) * v[:, None], 0), [ROW, (4 * N,), ROW]),
    "last of three": (lambda x, y, v: jnp.sum(jnp.abs(x[:, :, None] - y[:, None]) * v, 2), [(64, 32), (64, N), (N,)]),
    "first of three": (lambda x, y, v: jnp.sum(jnp.abs(x[:, :, None] - y[:, None]) * v[:, None, None], 0), [(64, 32), (64, N), (64,)]),
    "quotients": (lambda x, y, v: jnp.sum(jnp.abs(x[:, :, None] - y[:, None]) / v[:, None], 2), [(64, 32), (64, N), (64, N)]),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_the_library_holds_what_it_sums_with_weights(name):
    fun, shapes = WEIGHTED[name]
    ex = traced(fun, *shapes)
    inside = straight(ex, CPU.plain())
    assert 0.97 * held(inside) <= inside.peak_bytes <= 1.03 * held(inside)
    assert heavy_folds(ex, CPU)  # kept out of the library where there is room for them


@pytest.mark.parametrize("chunk", [1000, 2000, 3500])
def test_what_a_piece_computes_is_held_for_that_piece_only(chunk):
    """The sine of a piece does not depend on the outer loop, before which XLA would compute it if it knew where the piece begins."""
    ex = traced(lambda x, y: jnp.max(x @ jnp.sin(y).T, 1), (64, 400), (3500, 400))
    (sine,) = (t for t, term in enumerate(ex.program.terms) if isinstance(term, Map))
    row, column = (next(k for k, i in enumerate(ex.program.indices) if i.extent == n) for n in (64, 3500))
    outer = split(ex, region(ex), row, Choices(sink=frozenset({sine})))
    path, body = next((path, seq) for path, seq in walk_regions(outer) if sine in seq.steps)
    tree = with_region(outer, path, split(ex, body, column))
    chunks = {loop: 16 if loop.index == row else chunk for loop in loops(tree)}
    made = Schedule(ex, CPU, tree, chunks, Memory(ex, CPU).total(tree, chunks), 0.0)
    assert 0.97 * held(made) <= made.peak_bytes <= 1.03 * held(made)


def test_fusions_end_at_folds_that_are_read_elementwise():
    """A fold that a loop hands on, or a contraction reads, is an array anyway."""
    ex = traced(lambda x, y: (jnp.max(x, 1) - jnp.sum(y, 1), jnp.sum(x, 0) @ y), (8, 8), (8, 8))
    assert len(ends(ex, region(ex), Memory(ex, CPU).fused(region(ex)))) == 2


def test_a_fold_takes_no_layer_of_a_network_into_its_fusion():
    """Where it did, each number of a GELU would be an array of the hidden layer's shape."""

    def pooled(x, w, u):
        return jnp.sum(x + jax.nn.gelu(x @ w) @ u, 1)

    ex = traced(pooled, (64, 32, 64), (64, 1024), (1024, 64))
    made = straight(ex, CPU)
    (read,) = (t for t in region(ex).steps if isinstance(term := ex.program.terms[t], Dot) and ex.program.extent(term.over) == 1024)
    assert read in ends(ex, region(ex), Memory(ex, CPU).fused(region(ex)))
    hidden = 4 * 64 * 32 * 1024
    assert held(made) < 3 * hidden


@pytest.mark.parametrize(
    ("function", "pairs"),
    [(pairs_of_many_operations, 1), (pairs_of_few_operations, 0), (pairs_of_logarithms, 0), (pairs_of_shared_values, 0)],
)
def test_operands_of_many_operations_stay_out_of_the_kernel_library(function, pairs):
    """But in a program as its author wrote it, and where every bit is to stay."""
    ex = traced(function, ROW, (4 * N,))
    fences = {backend: emit(straight(ex, backend)).source.count("reduce_precision") for backend in (CPU, CPU.plain(), CPU.keeping_bits())}
    assert fences == {CPU: pairs, CPU.plain(): 0, CPU.keeping_bits(): 0}


def test_columns_of_unrolled_sums_are_computed_from_columns_of_arguments():
    """Where the kernel library is to compute nothing inside, the sum is written to memory rather than what it sums."""

    def nearest(x, y):
        return jnp.min(jnp.sum(jnp.log(x[:, None] / y) + (x[:, None] - y) ** 2 / y, -1), 1)

    jaxpr = jax.make_jaxpr(nearest)(*(jax.ShapeDtypeStruct((500, 8), jnp.float32) for _ in range(2)))
    for backend in (CPU, CPU.cautious()):
        plan = pipeline.plan(jaxpr, Options(memory_limit="200KiB", verify=False), "xy", "nearest", backend)
        assert "[:, :, 7]" not in plan.source
        assert "[:, 7]" in plan.source
        assert "reduce_precision" in plan.source


def discrepancy(x, s):
    """Three sums over coordinates of differences of pairs, which nothing else reads; one sum reads an exponential in four places."""
    d = x[:, None] - x
    squares = jnp.sum(d**2, -1)
    k = jnp.exp(-squares / 2)
    return jnp.mean((s @ s.T) * k + jnp.sum(s[:, None] * d, -1) * k - jnp.sum(s * d, -1) * k + (8 - squares) * k)


@pytest.mark.parametrize("limit", ["1MiB", "8MiB"])
def test_what_is_read_element_by_element_is_computed_for_each_of_several_sums(limit):
    avals = [jax.ShapeDtypeStruct((1500, 8), jnp.float32)] * 2
    plan = pipeline.plan(jax.make_jaxpr(discrepancy)(*avals), Options(memory_limit=limit), "xs", "discrepancy", CPU)
    assert "[:, :, 7]" not in plan.source
    assert "reduce_precision" in plan.source
    assert plan.compiled_peak_bytes is not None
    assert plan.compiled_peak_bytes <= int(limit[0]) * 2**20


def element_of_a_product(x, y, v):
    """Its bits are counted again in each of two operations that read them: nothing of one element is a kernel of its own."""
    zero = lax.population_count(lax.bitcast_convert_type((x @ y)[:1, :1], jnp.uint32)) >> 7
    tied = [lax.bitcast_convert_type(lax.bitcast_convert_type(z, jnp.uint32) | zero, jnp.float32) for z in (x, y)]
    return (tied[0] @ tied[1]) @ v


def test_slices_are_computed_inside_elementwise_operations_that_read_them():
    ex = traced(element_of_a_product, SQUARE, SQUARE, ROW)
    kept = Memory(ex, CPU).fused(region(ex)).kept
    assert [ex.program.nbytes(t) for t in kept] == [MATRIX, MATRIX, MATRIX, MATRIX, 4 * N]


HEAVY = {
    "divergence": lambda x, y: jnp.min(jnp.sum((x[:, None] - y) ** 2, -1) + jnp.sum(jnp.abs(x[:, None] - y), -1), 1),
    "columns": lambda x, y: jnp.sum(jnp.abs(jnp.tanh(x[:, None, 0] - y[:, 0]) * x[:, None, 1] + y[:, 1]) * 2 - 1, 0),
}


@pytest.mark.parametrize("name", HEAVY)
@pytest.mark.parametrize("kib", [24, 60, 300, 2000])
def test_operands_of_many_operations_stay_in_the_library_where_that_is_better(name, kib):
    """To keep them out takes memory, which there may be too little of: both ways are searched."""
    traced_function = jax.make_jaxpr(HEAVY[name])(*[jax.ShapeDtypeStruct((n, 3), jnp.float32) for n in (3000, 2500)])
    limit = 78_000 + kib * 1024  # of arguments and results, and of the rest

    def seconds(backend):
        try:
            return pipeline.plan(traced_function, Options(memory_limit=limit, verify=False), ["x", "y"], name, backend).predicted_s
        except MemoryLimitError:
            return float("inf")

    both, inside = seconds(CPU), seconds(CPU.plain())
    assert both <= 1.05 * inside  # what holds less is taken where it is hardly slower
