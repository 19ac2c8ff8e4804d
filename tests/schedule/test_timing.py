"""Predicted seconds on a fixed device: what they tell apart, and what the search makes of it."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from eqsat_mem import optimize
from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.backends.cpu.profile import CpuDevice
from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block, Fold
from eqsat_mem.ir.loop_tree import loops
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.cost_model import arithmetic_s
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.search import schedule, straight
from eqsat_mem.schedule.split import Choices, region, split
from eqsat_mem.schedule.timing import FOLD_TOLL, LOOP_TOLL, Timing, passed
from tests.schedule.test_split import traced

DEVICE = CpuDevice(
    name="fixed",
    flops=450e9,
    narrow_flops=900e9,
    elements=100e9,
    levels=((2**20, 100e9), (2**21, 80e9), (2**25, 60e9), (math.inf, 40e9)),
    tile_level=1,
    kernel_s=1e-6,
    iteration_s=2e-6,
    reduce_weight=9.0,
    short_reduce_weight=35.0,
    matrix_cores=2,
    reused_bytes=2**25,
    fresh_rate=4e9,
    vector_bits=256,
    thin_columns=12.0,
    deal_s=2e-5,
    function_factor=1.0,
)
BACKEND = CpuBackend(DEVICE)
PLENTY = 2**34


def timing(ex: Extraction, device: CpuDevice = DEVICE) -> Timing:
    return Timing(Memory(ex, CpuBackend(device)))


def distances_times_vector(x, y, v):
    return jnp.exp(jnp.abs(x[:, None] - y[None])) @ v


def test_new_memory_is_what_makes_a_program_that_fits_slow():
    ex = traced(distances_times_vector, (3000,), (3000,), (3000, 1))
    as_written, reusing = straight(ex, BACKEND), straight(ex, CpuBackend(replace(DEVICE, reused_bytes=2**40)))
    assert as_written.peak_bytes > DEVICE.reused_bytes
    assert as_written.seconds == pytest.approx(reusing.seconds + 3000 * 3000 * 4 / DEVICE.fresh_rate, rel=0.01)
    assert schedule(ex, PLENTY, BACKEND).seconds < 0.5 * as_written.seconds


def test_an_output_is_new_memory_in_every_plan():
    ex = traced(lambda x: x + 1.0, (2**24,))
    assert timing(ex).allocating(region(ex), {}) == 2**26 / DEVICE.fresh_rate
    assert timing(traced(lambda x: x + 1.0, (2**20,))).allocating(region(ex), {}) == 0.0


@pytest.mark.parametrize(
    ("function", "streams"),
    [
        (lambda x: jnp.var(jnp.tanh(x), axis=1), True),
        (lambda x: jax.nn.softmax(x, axis=1), True),
        (lambda x: jnp.var(jnp.tanh(x), axis=0), False),
        (lambda x: jax.nn.softmax(x, axis=0), False),
        (lambda x: (jnp.exp(x), jnp.sum(jnp.exp(x), axis=1)), False),
    ],
    ids=["variance of rows", "softmax of rows", "variance of columns", "softmax of columns", "result needed too"],
)
def test_the_library_passes_rows_on_without_keeping_them(function, streams):
    ex = traced(function, (8192, 2048))
    fused = Memory(ex, BACKEND).fused(region(ex))
    assert bool(fused.streamed) is streams
    assert not fused.streamed & {o.term for o in ex.program.outputs}


def test_a_variance_of_rows_runs_as_written():
    ex = traced(lambda a, b: jnp.var(jnp.tanh(a @ b), axis=1), (4096, 16), (16, 8192))
    assert not schedule(ex, PLENTY, BACKEND).chunks


def layers(count):
    def run(x, y, *vs):
        return tuple(distances_times_vector(x + k, y, v) for k, v in enumerate(vs))

    return traced(run, (3000,), (3000,), *[(3000, 1)] * count)


@pytest.mark.parametrize("count", [1, 4])
def test_tolls_are_shares_of_what_loops_take(count):
    ex = layers(count)
    found = schedule(ex, PLENTY, BACKEND)
    tolls = timing(ex).tolls(found.seq, Memory(ex, BACKEND).full_extents(), found.chunks)
    most = max(LOOP_TOLL + FOLD_TOLL * len(loop.folds) for loop in loops(found.seq))
    assert 0 < tolls <= most * found.seconds


def test_a_contraction_in_a_loop_pays_for_new_memory_in_every_turn():
    ex = traced(lambda q, k, v: jax.nn.softmax(jnp.einsum("hik,hjk->hij", q, k), -1) @ v, *[(8, 2048, 64)] * 3)
    seq = region(ex)
    (i,) = (n for n, index in enumerate(ex.program.indices) if index.extent == 2048 and ex.program.terms[0].axes[1] == (n,))
    tree = split(ex, seq, i, Choices())
    (loop,) = loops(tree)
    half, eighth = (timing(ex).total(tree, {loop: chunk}) for chunk in (1024, 256))
    free_half, free_eighth = (timing(ex, replace(DEVICE, reused_bytes=2**40)).total(tree, {loop: chunk}) for chunk in (1024, 256))
    assert half > 1.5 * free_half
    assert eighth == free_eighth  # measured as fast as smaller chunks, where products have 16 MiB


def negative_distances(q, p):
    return -jnp.sum(jnp.abs(q[:, None] - p), -1)


@pytest.mark.parametrize(("points", "long"), [(40_000, True), (30_000, False)])
def test_a_fold_of_differences_with_long_results_takes_long_where_it_is_not_kept_apart_from_its_reader(points, long):
    ex = traced(negative_distances, (10, 256), (points, 256))
    emitted, as_written = straight(ex, BACKEND), straight(ex, BACKEND, emitted=False)
    assert "reduce_precision" in emit(emitted).source
    assert (as_written.seconds > 5 * emitted.seconds) is long
    if not long:
        assert as_written.seconds == emitted.seconds


def test_a_fold_of_an_array_that_is_there_takes_no_longer_as_written():
    ex = traced(lambda x: -jnp.sum(jnp.abs(x), -1), (40_000, 64))
    assert straight(ex, BACKEND, emitted=False).seconds == straight(ex, BACKEND).seconds


@pytest.mark.parametrize(("power", "products"), [(1, 1), (2, 1), (3, 2), (4, 2), (7, 4), (8, 3)])
def test_a_power_costs_its_products(power, products):
    ex = traced(lambda x: jax.lax.integer_pow(x, power) if power != 1 else x * x, (1000,))
    (t,) = region(ex).steps
    assert arithmetic_s(ex.program, t, [1000], BACKEND) == pytest.approx(products * 1000 / DEVICE.elements)


def test_what_is_written_out_for_each_element_of_a_fold_costs_less():
    def squared_distances(x, y):
        return jnp.exp(jnp.sum((x[:, None] - y[None]) ** 2, -1))

    few, many = traced(squared_distances, (2000, 3), (2000, 3)), traced(squared_distances, (2000, 30), (2000, 30))
    spread, none = (Memory(ex, BACKEND).fused(region(ex)).spread for ex in (few, many))
    assert [type(few.program.terms[t]).__name__ for t in sorted(spread)] == ["Map", "Map", "Fold"]
    assert not none
    three_terms = 3 * 3 * CpuBackend.crowded_weight * 2000**2 / DEVICE.elements
    assert timing(few).arithmetic(region(few), Memory(few, BACKEND).full_extents()) == pytest.approx(
        three_terms + 21 * 2000**2 / DEVICE.elements
    )


def test_no_fold_is_written_out_along_an_index_that_a_loop_cuts():
    ex = traced(lambda x, y: jnp.sum((x[:, None] - y[None]) ** 2, -1), (500, 16), (600, 16))
    (fold,) = (t for t in ex.unrolls if isinstance(ex.program.terms[t], Fold))
    seq = split(ex, region(ex), ex.unrolls[fold].bit_length() - 1)
    assert seq is not None
    model = timing(ex)
    whole = model.seconds(region(ex), model.memory.full_extents(), {})
    elements = 500 * 600 * 16 / DEVICE.elements
    assert whole < 5 * elements
    assert model.seconds(seq, model.memory.full_extents(), dict.fromkeys(loops(seq), 8)) > DEVICE.short_reduce_weight * elements


def test_an_elementwise_result_that_a_loop_stacks_is_computed_by_one_core():
    ex = traced(lambda x, y: jnp.tanh(jnp.exp(x[:, None] + y)), (2000,), (2000,))
    seq = split(ex, region(ex), 0)
    assert seq is not None
    chunks = dict.fromkeys(loops(seq), 100)
    two, one = timing(ex), timing(ex, replace(DEVICE, matrix_cores=1))
    assert two.seconds(seq, two.memory.full_extents(), chunks) > 1.7 * one.seconds(seq, one.memory.full_extents(), chunks)
    assert straight(ex, BACKEND).seconds == straight(ex, CpuBackend(replace(DEVICE, matrix_cores=1))).seconds


def test_a_search_that_is_written_out_is_faster_than_loops_around_it_and_holds_nothing():
    ex = traced(lambda x, y: jnp.argmax(x - y[:, None], 2), (500, 12), (600, 12))
    found = schedule(ex, 2**21, BACKEND)
    assert not list(loops(found.seq))
    assert found.peak_bytes == (500 + 600) * 12 * 4 + 500 * 600 * 4


def test_a_contraction_of_few_rows_pays_for_its_columns_as_often_as_it_runs():
    ex = traced(lambda x, y: x @ y.T, (4096, 64), (20000, 64))
    t = ex.program.roots()[0]

    def seconds(rows: int) -> float:
        extents = [rows if i.extent == 4096 else i.extent for i in ex.program.indices]
        return 4096 / rows * arithmetic_s(ex.program, t, extents, BACKEND)

    packing = 20000 * 64 * 4 / DEVICE.levels[-1][1]
    assert seconds(16) > seconds(64) + 0.9 * (256 - 64) * packing
    assert seconds(64) < 1.4 * seconds(512)


def test_a_library_copies_few_columns_in_panels():
    def copied(columns: int) -> float:
        ex = traced(lambda x, y: x @ y, (2, 16384), (16384, columns))
        return BACKEND.contraction_s(ex.program.terms[ex.program.roots()[0]], 1, 2, columns, 16384)

    assert copied(2) == pytest.approx(copied(16), rel=0.3)
    assert copied(1) < 0.3 * copied(2)  # a vector is not copied in panels


def test_what_is_written_out_only_in_emitted_source_takes_longer_as_written():
    ex = traced(lambda x, y: jnp.sum(jnp.abs(x[:, None] - y), 2), (1000, 3), (1000, 3))
    assert ex.unrolls
    assert straight(ex, BACKEND, emitted=False).seconds > 2 * straight(ex, BACKEND).seconds


def test_chunks_of_a_convolution_lay_its_patches_out_again_unless_they_are_of_its_batch():
    def convolved(x, w):
        return jnp.max(jax.lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")), 1)

    ex = traced(convolved, (8, 60_001, 1), (33, 1, 24))
    extents = Memory(ex, BACKEND).full_extents()
    t = next(t for t in region(ex).steps if isinstance(ex.program.terms[t], Block))
    batch, features = (next(n for n, i in enumerate(ex.program.indices) if i.extent == extent) for extent in (8, 24))
    whole, one, two = (
        arithmetic_s(ex.program, t, e, BACKEND) for e in (extents, extents.with_extent(batch, 1), extents.with_extent(features, 2))
    )
    assert 8 * one == pytest.approx(whole)
    assert 12 * two > 7 * whole
    found = schedule(ex, 2**24, BACKEND)
    assert {loop.index for loop in loops(found.seq)} == {batch}


def test_small_matrices_are_factorised_and_solved_at_more_than_their_operations():
    def solved(a, b):
        return jax.lax.linalg.triangular_solve(jax.lax.linalg.cholesky(a, symmetrize_input=False), b, left_side=True, lower=True)

    def weights(n: int, columns: int) -> list[float]:
        ex = traced(solved, (3, n, n), (3, n, columns))
        extents = [i.extent for i in ex.program.indices]
        blocks = (t for t in region(ex).steps if isinstance(ex.program.terms[t], Block))
        return [arithmetic_s(ex.program, t, extents, BACKEND) * DEVICE.elements for t in blocks]

    small, large = weights(16, 4), weights(1024, 256)
    assert all(weight > 10 * 3 * operations for weight, operations in zip(small, (0.7 * 16**3, 16**2 * 4)))
    assert all(weight < 1.5 * 3 * operations for weight, operations in zip(large, (0.7 * 1024**3, 1024**2 * 256)))


@pytest.mark.parametrize(("shape", "laid_out"), [((64, 4096), True), ((64, 1), False)])
def test_a_solve_as_written_pays_for_the_columns_that_its_library_stores(shape: tuple[int, int], laid_out: bool):
    ex = traced(lambda a, b: jax.lax.linalg.triangular_solve(a, jnp.exp(b), left_side=True, lower=True), (64, 64), shape)
    emitted, as_written = straight(ex, BACKEND).seconds, straight(ex, BACKEND, emitted=False).seconds
    assert (as_written > 1.2 * emitted) is laid_out
    assert as_written == emitted or laid_out


@pytest.mark.parametrize("written", [False, True])
def test_a_window_costs_more_for_its_position_than_an_element_of_it(written: bool):
    def moved(x, at, u):
        return x.at[at].add(u) if written else x[at] + u

    def seconds(windows: int, width: int) -> float:
        shapes = ((64, width), "float32"), ((windows,), "int32"), ((windows, width), "float32")
        ex = Extraction(load(jax.make_jaxpr(moved)(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)), "xau"))
        extents = [i.extent for i in ex.program.indices]
        return sum(arithmetic_s(ex.program, t, extents, BACKEND) for t in region(ex).steps if isinstance(ex.program.terms[t], Block))

    narrow, wide = seconds(4096, 1), seconds(1024, 4)
    assert wide < narrow < 4 * wide


@pytest.mark.parametrize(("shape", "axis", "slow"), [((48, 20_000), 0, True), ((48, 16_000), 0, False), ((20_000, 48), 1, False)])
def test_rows_that_are_too_long_take_long_to_add(shape: tuple[int, int], axis: int, slow: bool):
    ex = traced(lambda x: jnp.exp(x).sum(axis), shape)
    (fold,) = (t for t in region(ex).steps if isinstance(ex.program.terms[t], Fold))
    extents = [i.extent for i in ex.program.indices]
    additions = arithmetic_s(ex.program, fold, extents, BACKEND) * DEVICE.elements / (48 * max(shape))
    assert additions > 100 if slow else additions < 10
    base = arithmetic_s(ex.program, fold, extents, Backend(DEVICE))
    assert base * DEVICE.elements == pytest.approx(48 * max(shape) * DEVICE.reduce_weight)


def test_a_contraction_that_is_dealt_to_the_cores_pays_for_that_in_every_turn():
    ex = traced(lambda x, y: jnp.exp(x @ y.T).max(1), (2048, 512), (1024, 512))
    (i,) = (n for n, index in enumerate(ex.program.indices) if index.extent == 2048)
    seq = split(ex, region(ex), i)
    assert seq is not None
    (loop,) = loops(seq)
    two, one = timing(ex), timing(ex, replace(DEVICE, matrix_cores=1))

    def dealing(chunk: int) -> float:
        return two.total(seq, {loop: chunk}) - one.total(seq, {loop: chunk})

    assert dealing(64) == 0
    assert dealing(128) == pytest.approx(2048 / 128 * 2e-5)


def halves(x):
    return jnp.abs(x[:, :3000]) - x[:, 3000:]


def sum_of_half(x):
    return jnp.sum(x[:, :3000], 1)


def rows_picked(x, places):
    return x[jnp.clip(places, 0, 2**16) + 1] * 2.0


@pytest.mark.parametrize(
    ("function", "shapes", "written"),
    [(halves, [(3000, 6000)], 1), (sum_of_half, [(3000, 6000)], 2), (rows_picked, [(2**17, 64), (2**16,)], 1)],
)
def test_what_only_moves_elements_is_read_and_written_inside_elementwise_readers(function, shapes, written):
    dtypes = [jnp.float32, jnp.int32][: len(shapes)]
    ex = Extraction(load(jax.make_jaxpr(function)(*map(jax.ShapeDtypeStruct, shapes, dtypes)), ["x", "places"][: len(shapes)]))
    seq = region(ex)
    fused = Memory(ex, BACKEND).fused(seq)
    assert len(set(fused.kept) - passed(ex.program, fused, seq.outs)) == written


def test_a_half_of_an_array_is_read_as_half_of_it():
    ex = traced(halves, (3000, 6000))
    moved = 3 * 3000 * 3000 * 4  # both halves are read, the result is written
    seconds = timing(ex).seconds(region(ex), Memory(ex, BACKEND).full_extents(), {})
    assert seconds == pytest.approx(moved / DEVICE.levels[-1][1], rel=0.05)


def test_a_product_with_little_to_do_takes_as_long_as_on_one_core():
    def each(rows: int) -> float:
        ex = traced(lambda x, y: x @ y, (rows, 128), (128, 128))
        (t,) = region(ex).steps
        return arithmetic_s(ex.program, t, [i.extent for i in ex.program.indices], BACKEND) / rows

    assert each(256) == pytest.approx(2 * each(4096), rel=0.05)


def test_products_of_a_batch_follow_one_another():
    ex = traced(lambda x, y: jnp.einsum("bik,bkj->bij", x, y), (64, 128, 128), (64, 128, 128))
    (t,) = region(ex).steps
    one = traced(lambda x, y: x @ y, (128, 128), (128, 128))
    (u,) = region(one).steps
    batch, alone = (arithmetic_s(e.program, s, [i.extent for i in e.program.indices], BACKEND) for e, s in ((ex, t), (one, u)))
    assert batch == pytest.approx(64 * alone, rel=0.01)


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_a_loop_takes_as_long_as_its_steps_one_after_the_other(loop: str):
    def step(x, w):
        return jnp.tanh(x @ w)

    def written_out(x, ws):
        for k in range(8):
            x = step(x, ws[k])
        return x

    def looped(x, ws):
        if loop == "scan":
            return jax.lax.scan(lambda x, w: (step(x, w), None), x, ws)[0]
        return jax.lax.while_loop(lambda c: c[0] < 8, lambda c: (c[0] + 1, step(c[1], ws[0])), (0, x))[1]

    args = jax.ShapeDtypeStruct((2048, 256), jnp.float32), jax.ShapeDtypeStruct((8, 256, 256), jnp.float32)
    apart, together = (optimize(f, memory_limit="1GiB", verify=False).plan(*args).original_predicted_s for f in (written_out, looped))
    assert 0.8 * apart < together < 1.4 * apart


def test_stacking_results_and_reading_slices_takes_time():
    def outer(x, ws):
        return jax.lax.scan(lambda c, w: (c, (x + c).T @ (x * w)), 0.0, ws)[1]

    def summed(x, ws):
        return jax.lax.scan(lambda c, w: (c + (x + c[0, 0]).T @ (x * w), None), jnp.zeros((512, 512)), ws)[0]

    args = jax.ShapeDtypeStruct((64, 512), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.float32)
    stacked, added = (optimize(f, memory_limit="1GiB", verify=False).plan(*args).original_predicted_s for f in (outer, summed))
    assert stacked > added + 16 * 2**20 / 40e9
