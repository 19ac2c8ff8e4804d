"""Tile kernels: which folds are some, what they cost and hold, their source; and where JAX has them, the kernels themselves."""

from __future__ import annotations

import inspect
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqsat_mem.backends.gpu import deviceless, tiles
from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.backends.gpu.targets import named
from eqsat_mem.backends.gpu.tiles import Tiles
from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import original
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.errors import DeviceCompilerError
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block
from eqsat_mem.ir.loop_tree import loops
from eqsat_mem.options import Options
from eqsat_mem.pipeline import plan
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.search import straight
from eqsat_mem.schedule.split import region, split
from tests.oracles import pairs
from tests.oracles.pairs import PROGRAMS
from tests.tiers import tiered

H100 = named("h100")
SMALL = replace(H100, multiprocessors=1, memory_rate=H100.memory_rate / H100.multiprocessors)
"""A card that a few rows keep busy."""
RNG = np.random.default_rng(0)
LARGE = 1_000_000


def backend(target=H100):
    """The backend of a card, with tile kernels whether or not the installed JAX has them."""
    return replace(GpuBackend.of(target), tiles=Tiles(target))


def f32(*shapes, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def written(function, avals, own):
    program = load(jax.make_jaxpr(function)(*avals), [f"x{k}" for k in range(len(avals))], own.preferences)
    return replace(original(program, load_rules(only=("splitting", "streaming"))), unrolls={})


def tiles_of(function, avals, own):
    """The tile kernels of a program without loops."""
    ex = written(function, avals, own)
    memory = Memory(ex, own)
    seq = straight(ex, own).seq
    fused = memory.fused(seq)
    found = {}
    for step, members in zip(fused.kept, fused.members_at(ex, memory.full_extents(), own)):
        term, tile = ex.program.terms[step], own.tile(ex, step, members, memory.full_extents())
        if tile is not None:
            found.setdefault((id(term.call), term.args) if isinstance(term, Block) else step, tile)
    return ex.program, [*found.values()]


def program_of(name):
    function, shapes = PROGRAMS[name]
    return function, f32(*shapes, dtype=pairs.dtype_of(name))


def values_for(avals):
    return [(3 * RNG.standard_normal(a.shape)).astype(a.dtype) if a.dtype == jnp.int32 else _numbers(a) for a in avals]


def _numbers(aval):
    return np.abs(RNG.standard_normal(aval.shape)).astype(aval.dtype)


def planned(function, avals, own, **options):
    limit = options.pop("memory_limit", "1GB")
    return plan(jax.make_jaxpr(function)(*avals), Options(memory_limit=limit, verify=False, **options), "xyvw"[: len(avals)], "f", own)


def kernel_product(n, d):
    return pairs.product, f32((n, d), (n, d), (n,))


# --- which folds are tile kernels


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_fold_of_pairs_is_a_tile_kernel(name):
    function, avals = program_of(name)
    _, found = tiles_of(function, avals, backend(SMALL))
    assert len(found) == {"logsumexp": 2, "farthest_and_nearest": 2}.get(name, 1)


def test_rows_columns_and_reads_of_a_kernel_product():
    program, (tile,) = tiles_of(*kernel_product(LARGE, 3), backend())
    own = tile.pairs
    extents = [program.indices[i].extent for i in (*own.result, own.columns, *own.written_out)]
    assert extents == [LARGE, LARGE, 3]
    assert [read.layout[-1] for read in own.reads] == [own.rows, own.columns, own.columns]
    assert [read.copied for read in own.reads] == [True, True, False], "points lie row by row, and are turned"


@pytest.mark.parametrize(
    ("function", "shapes", "dtype"),
    [
        (lambda x, y: jnp.sum(jnp.exp(x[:, None] - y), 1), ((30,), (200,)), jnp.float32),  # fewer rows than a block
        (lambda x, y: jnp.sum(jnp.exp(x[:, None] - y)), ((200,), (200,)), jnp.float32),  # no rows are left
        (lambda x, y: jnp.sum(lax.erf(x[:, None] - y), 1), ((200,), (200,)), jnp.float32),  # a function that Mosaic lacks
        (lambda x, y: jnp.any(x[:, None] > y, 1), ((200,), (200,)), jnp.float32),  # a fold of truth values
        (lambda x, y: lax.top_k(x[:, None] - y, 5), ((200,), (9000,)), jnp.float32),  # more than a kernel keeps
        (lambda x, y: lax.reduce(x[:, None] - y, np.float32(0), lambda a, b: jnp.hypot(a, b), (1,)), ((200,), (9000,)), jnp.float32),
        (lambda x, y: jnp.sum(jnp.exp(x[:, None] - y), 1), ((200,), (200,)), jnp.bfloat16),
        (lambda x, y, w: jnp.sum(jnp.exp(x[:, None] - y) * w, 1), ((200,), (200,), (200, 200)), jnp.float32),  # an array of all pairs
        (lambda x, y: jnp.sum(jnp.exp(-jnp.sum((x[:, None] - y) ** 2, -1)), 1), ((200, 17), (200, 17)), jnp.float32),  # a long fold inside
    ],
    ids=["few rows", "no rows", "function", "monoid", "selection", "combination", "dtype", "array", "long"],
)
def test_folds_that_are_no_tile_kernels(function, shapes, dtype):
    assert tiles_of(function, f32(*shapes, dtype=dtype), backend(SMALL))[1] == []


def test_what_a_kernel_leaves_to_arrays_is_held_where_no_kernel_is_faster():
    """A contraction is computed inside tile kernels only; on a card that few rows do not keep busy, XLA has it in memory."""
    function, avals = program_of("of_products")
    own = backend(replace(H100, multiprocessors=10_000))
    assert tiles_of(function, avals, own)[1] == []
    assert straight(written(function, avals, own), own).peak_bytes >= 4 * pairs.N * pairs.M


# --- what they cost


def test_a_kernel_product_has_at_most_twelve_instructions_per_pair():
    own = backend()
    program, (tile,) = tiles_of(*kernel_product(LARGE, 3), own)
    extents = [index.extent for index in program.indices]
    counted = own.tiles.instructions(program, tile.pairs, tile.block, extents, tile.approximate)
    assert counted == pytest.approx(10.64, abs=0.25), "681 of 64 pairs in machine code"
    assert tile.seconds == pytest.approx(LARGE**2 * counted / own.device.elements, rel=1e-3)


def nearest(k):
    """The ``k`` nearest of many points: a search, if one is asked for."""
    points = f32((LARGE, 3), (LARGE, 3))
    return (pairs.nearest if k == 1 else lambda x, y: lax.top_k(-pairs.distances(x, y), k)), points


@pytest.mark.parametrize(("k", "instructions", "columns"), [(1, 14.5, 64), (2, 21.9, 32), (3, 29.0, 16), (4, 34.5, 16)])
def test_counted_instructions_of_searches_are_those_of_machine_code(k, instructions, columns):
    """Of a kernel that keeps an extreme and its place, or so many elements and places: more numbers leave room for fewer columns."""
    own = backend()
    program, (tile,) = tiles_of(*nearest(k), own)
    extents = [index.extent for index in program.indices]
    assert tile.block == (64, columns)
    counted = own.tiles.instructions(program, tile.pairs, tile.block, extents, tile.approximate)
    assert counted == pytest.approx(instructions, rel=0.07)


def test_few_columns_leave_much_to_the_end():
    """What a block does once, after all columns, counts for each of its pairs the more the fewer columns there are."""
    ours = [tiles_of(pairs.three_nearest, f32((LARGE, 3), (m, 3)), backend())[1][0].seconds / m for m in (LARGE, 1000)]
    assert ours[1] > 1.05 * ours[0]


@pytest.mark.parametrize("k", [2, 4])
def test_nearest_neighbours_hold_neither_distances_nor_loops(k):
    made = planned(*nearest(k), backend(), memory_limit="100MB")
    assert "folded_pairs(" in made.source
    assert made.loops == []
    assert made.peak_bytes < 100e6


def test_blocks_are_as_small_as_keeps_the_card_busy():
    sizes = [tiles_of(*kernel_product(n, 3), backend())[1][0].block for n in (LARGE, 16_384)]
    assert sizes == [(128, 64), (64, 64)]


def test_many_dimensions_leave_registers_for_fewer_rows():
    (tile,) = tiles_of(*kernel_product(LARGE, 10), backend())[1]
    assert tile.block == (64, 64)


def test_functions_whose_approximations_lose_digits_are_computed_by_software():
    def logarithms(x, y):
        return jnp.sum(jnp.log(pairs.distances(x, y) + 1.0), 1)

    (tile,) = tiles_of(logarithms, f32((LARGE, 4), (LARGE, 4)), backend())[1]
    assert not tile.approximate
    (tile,) = tiles_of(*kernel_product(LARGE, 3), backend())[1]
    assert tile.approximate


def test_few_rows_are_left_to_xla():
    assert tiles_of(pairs.product, f32((128, 3), (LARGE, 3), (LARGE,)), backend())[1] == []


# --- plans


def test_a_plan_for_a_large_kernel_product_is_one_kernel_without_loops():
    function, avals = kernel_product(LARGE, 3)
    by_tiles, by_loops = (planned(function, avals, own, memory_limit="100MB") for own in (backend(), backend().without_tiles()))
    assert "folded_pairs(" in by_tiles.source
    assert by_tiles.loops == []
    points, numbers = 12 * LARGE, 4 * LARGE
    assert by_tiles.peak_bytes == 2 * points + 2 * points + 2 * numbers, "arguments, copies of the points, result"
    assert by_tiles.predicted_s < 0.6 * by_loops.predicted_s
    assert by_loops.loops


@pytest.mark.parametrize("options", [{"tiles": False}, {"accuracy": "reassociate"}, {"accuracy": "bitwise"}], ids=str)
def test_options_without_tile_kernels(options):
    made = planned(*kernel_product(LARGE, 3), backend(), **options)
    assert "folded_pairs" not in made.source
    assert made.predicted_s == planned(*kernel_product(LARGE, 3), backend().without_tiles(), **options).predicted_s


@pytest.mark.parametrize(
    ("function", "streams"),
    [(lambda x, y, v: jax.nn.logsumexp(-pairs.distances(x, y) + v, 1), True), (pairs.soft_neighbours, True), (pairs.weighted_mean, False)],
    ids=["logsumexp", "softmax", "mean"],
)
def test_folds_of_the_same_pairs_are_one_kernel(function, streams):
    """A maximum and the sums of exponentials less it, or several sums: distances are computed once."""
    avals = f32((20_000, 3), (20_000, 3), (20_000,))
    by_tiles, by_loops = (planned(function, avals, own, memory_limit="8MB") for own in (backend(), backend().without_tiles()))
    assert by_tiles.source.count("= folded_pairs(") == 1
    assert ("streams=True" in by_tiles.source) == streams
    assert by_tiles.loops == []
    assert by_tiles.predicted_s < 0.5 * by_loops.predicted_s


def test_a_streamed_kernel_inside_a_loop_over_columns_has_the_level_of_a_chunk(monkeypatch):
    """The loop brings sums of chunks to the level of all; chunks and rows may have no finite element."""
    function, avals = program_of("streamed_logsumexp")

    def hidden(x, y, *rest):
        return function(x, jnp.where((jnp.arange(y.shape[0]) < 130)[:, None], jnp.inf, y), *rest)

    own = backend(SMALL)
    ex = written(hidden, avals, own)
    columns = next(i for i, index in enumerate(ex.program.indices) if index.extent == pairs.M)
    seq = split(ex, region(ex), columns)
    loop = next(loop for loop in loops(seq) if loop.rescaled)
    code = emit(Schedule(ex, own, seq, dict.fromkeys(loops(seq), 125), 0, 0.0))
    assert len(loop.folds) >= 2
    assert "streams=True" in code.source
    code.function.__globals__["folded_pairs"] = instead(monkeypatch, pairs.folded_pairs)
    compare(code.function, hidden, values_for(avals), lambda run: run())


def test_plans_are_no_slower_than_those_without_tile_kernels():
    """Here contractions that tile kernels compute inside are worth it for one fold, and shared by others."""

    def gradients(x, v, scales, height):
        def loss(scales, height):
            return jnp.sum((height * jnp.exp(-0.5 * pairs.distances(x / scales, x / scales)) @ v) ** 2)

        return jax.value_and_grad(loss, (0, 1))(scales, height)

    avals = f32((8192, 8), (8192, 1), (8,), ())
    ours, plain = (planned(gradients, avals, own, memory_limit="64MiB") for own in (backend(), backend().without_tiles()))
    assert ours.predicted_s <= plain.predicted_s * 1.001


def test_a_program_as_written_has_no_tile_kernels():
    function, avals = kernel_product(LARGE, 3)
    ours, plain = (planned(function, avals, own) for own in (backend(), backend().without_tiles()))
    assert ours.original_predicted_s == plain.original_predicted_s
    assert ours.original_peak_bytes == plain.original_peak_bytes > ours.peak_bytes


@pytest.mark.slow
def test_a_tile_kernel_stands_inside_a_loop(monkeypatch):
    """Rows come in chunks where values of all pairs are held before and after; what the kernel reads of them is a copy of a slice."""

    def weighted_by_rank(x, y, z):
        ordered = jnp.sort(pairs.distances(x, y), 1)
        weights = jnp.sum(jnp.exp(-pairs.distances(x, z) / ordered[:, 1:2]), 1)
        return jnp.sort(ordered * weights[:, None], 1)[:, 2]

    avals = f32((1280, 3), (600, 3), (20000, 3))
    made = planned(weighted_by_rank, avals, backend(SMALL), memory_limit="3MiB")
    assert re.search(r"^        # all pairs of \w and \w in one kernel", made.source, re.MULTILINE), "indented: inside a loop"
    function = inspect.unwrap(made.function)  # not as the check has traced it
    function.__globals__["folded_pairs"] = instead(monkeypatch, pairs.folded_pairs)
    compare(function, weighted_by_rank, values_for(avals), lambda run: run())


def test_cards_and_versions_of_jax_without_tile_kernels(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert Tiles.of(H100) is None
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    assert Tiles.of(H100) == Tiles(H100)
    assert Tiles.of(named("a100")) is None


# --- source


def compare(function, original, args, run):
    """A function gives what the original does in float64; ``run`` calls it."""
    with jax.enable_x64(True):
        wanted = jax.tree.leaves(original(*(a if a.dtype == np.int32 else a.astype(np.float64) for a in args)))
    for got, want in zip(run(lambda: function(*args)), wanted, strict=True):
        assert got.dtype in (jnp.float32, jnp.int32)
        scale = np.max(np.abs(want), where=np.isfinite(want), initial=0)
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6 * scale)


def instead(monkeypatch, ours, platform="cuda"):
    """Have programs run what they would on a platform, ``ours`` being the function that folds pairs there."""
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, **branches: branches.get(platform, branches["default"])(*args))
    return ours


def source_of(name):
    function, avals = program_of(name)
    own = backend(SMALL)
    return function, avals, emit(straight(written(function, avals, own), own))


@pytest.mark.parametrize("name", tiered(PROGRAMS, ["product", "by_columns", "of_one_array"]))
def test_the_function_of_a_pair_is_that_of_the_program(name, monkeypatch):
    function, avals, code = source_of(name)
    code.function.__globals__["folded_pairs"] = instead(monkeypatch, pairs.folded_pairs)
    compare(code.function, function, values_for(avals), lambda run: run())


@pytest.mark.parametrize("name", PROGRAMS)
def test_elsewhere_the_fold_is_computed_as_usual(name, monkeypatch):
    function, avals, code = source_of(name)
    code.function.__globals__["folded_pairs"] = instead(monkeypatch, None, platform="cpu")
    compare(code.function, function, values_for(avals), lambda run: run())


def test_source_reads_as_the_formula():
    *_, code = source_of("product")
    assert "# all pairs of i and k in one kernel, in blocks of 64 x 64" in code.source
    assert re.search(r'folded_pairs\("ji,jk,k->i", "k", pair_of_i_and_k, \(0.0, jnp.float32, combine\)', code.source)
    assert re.search(r"return jnp.exp\(\(-0.5\) \* sum\w*\) \* \w+\n", code.source)
    assert "Any" not in code.source


# --- the kernels themselves: with a JAX that has them

FIRST = ".".join(map(str, tiles.OLDEST_JAX))
with_kernels = pytest.mark.skipif(not tiles.has_kernels(), reason=f"needs JAX {FIRST}, whose Mosaic GPU kernels run in an interpreter")


def kernels(test):
    """A test of the second tier that needs a JAX with tile kernels."""
    return pytest.mark.slow(with_kernels(test))


def _compiler() -> bool:
    try:
        return bool(deviceless.installed())
    except DeviceCompilerError:
        return False


compiler = pytest.mark.skipif(not _compiler(), reason="needs pip install 'eqsat-mem[gpu]'")


@kernels
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_compute_what_folds_do(name, monkeypatch):
    from jax.experimental.pallas import mosaic_gpu

    function, avals, code = source_of(name)
    instead(monkeypatch, None)

    def interpreted(run):
        with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams()):
            return jax.jit(run)()

    compare(code.function, function, values_for(avals), interpreted)


def compiled(function, avals, folder, monkeypatch):
    """Bytes of temporaries of a program that XLA:GPU compiles, and what ptxas says of each of its tile kernels."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
    temporaries = deviceless.compile_for(function, avals, H100, settings=["triton"]).settings[0].temporaries
    return temporaries, [path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("*.ptxas"))]


@kernels
@compiler
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_spill_nothing_and_hold_what_is_predicted(name, tmp_path, monkeypatch):
    function, avals = program_of(name)
    large = [jax.ShapeDtypeStruct([n * 40 if n in (pairs.N, pairs.M, pairs.LONG) else n for n in a.shape], a.dtype) for a in avals]
    own = backend(SMALL)
    schedule = straight(written(function, large, own), own)
    temporaries, told = compiled(emit(schedule).function, large, tmp_path, monkeypatch)
    assert told
    assert all("0 bytes spill stores, 0 bytes spill loads" in text for text in told)
    fixed = sum(a.size * a.dtype.itemsize for a in [*large, *jax.tree.leaves(jax.eval_shape(function, *large))])
    assert fixed + temporaries <= schedule.peak_bytes * 1.05 + 2048


@kernels
@compiler
def test_a_kernel_whose_operands_are_contiguous_holds_nothing(tmp_path, monkeypatch):
    function, avals = program_of("of_numbers")
    own = backend(SMALL)
    temporaries, _ = compiled(emit(straight(written(function, avals, own), own)).function, avals, tmp_path, monkeypatch)
    assert temporaries == 0


OPERATIONS = {
    "abs": jnp.abs, "add": lambda d: d + 1.5, "clamp": lambda d: lax.clamp(jnp.float32(0), d, jnp.float32(1)), "div": lambda d: 1 / (2 + d),
    "eq": lambda d: jnp.where(d == 0, 1.0, d), "ge": lambda d: jnp.where(d >= 0, 1.0, d), "gt": lambda d: jnp.where(d > 0, 1.0, d),
    "integer_pow": lambda d: d**3, "le": lambda d: jnp.where(d <= 0, 1.0, d), "logistic": jax.nn.sigmoid,
    "lt": lambda d: jnp.where(d < 0, 1.0, d), "max": lambda d: jnp.maximum(d, 0.5), "min": lambda d: jnp.minimum(d, 0.5),
    "mul": lambda d: 3 * d, "ne": lambda d: jnp.where(d != 0, 1.0, d), "neg": lambda d: -d, "round": jnp.round,
    "select_n": lambda d: jnp.where(d > 1, d, 0.0), "sign": jnp.sign, "square": lax.square, "sub": lambda d: 1.5 - d,
    "and": lambda d: jnp.where((d > 0) & (d < 1), 1.0, d),
    "or": lambda d: jnp.where((d < 0) | (d > 1), 1.0, d), "xor": lambda d: jnp.where((d > 0) ^ (d > 1), 1.0, d),
    "log": lambda d: jnp.log(jnp.abs(d) + 1), "tanh": jnp.tanh,
    "exp": jnp.exp, "exp2": jnp.exp2, "sqrt": lambda d: jnp.sqrt(jnp.abs(d)), "rsqrt": lambda d: lax.rsqrt(jnp.abs(d) + 1),
}  # fmt: skip


def test_every_operation_has_a_program():
    assert OPERATIONS.keys() == tiles.SIMPLE | tiles.LOGICAL | tiles.OTHERS | tiles.INEXACT | tiles.APPROXIMATED.keys()


@pytest.mark.parametrize("name", OPERATIONS)
@kernels
def test_operations_are_compiled_and_computed(name, tmp_path, monkeypatch):
    from jax.experimental.pallas import mosaic_gpu

    def function(x, y):
        return jnp.sum(OPERATIONS[name](pairs.distances(x, y) - 2.0), 1)

    avals = f32((128, 4), (128, 4))
    own = backend(SMALL)
    ex = written(function, avals, own)
    code = emit(straight(ex, own))
    assert name in {getattr(term, "op", "") for term in ex.program.terms}
    assert "folded_pairs(" in code.source
    if _compiler():
        _, told = compiled(code.function, avals, tmp_path, monkeypatch)
        assert "0 bytes spill stores" in told[0]
    instead(monkeypatch, None)
    with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams()):
        got = jax.jit(code.function)(*(args := values_for(avals)))
    np.testing.assert_allclose(got[0], function(*args), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("power", [-12, -3, -1, 0, 1, 4])
@kernels
@compiler
def test_whatever_the_power_what_is_emitted_compiles(power, tmp_path, monkeypatch):
    """Of powers below two Mosaic compiles the reciprocal alone: folds of others are left to XLA."""

    def function(x, y):
        return jnp.sum(lax.integer_pow(1 + pairs.distances(x, y), power), 1)

    avals = f32((128, 4), (128, 4))
    code = emit(straight(written(function, avals, backend(SMALL)), backend(SMALL)))
    assert ("folded_pairs(" in code.source) == (power in (-1, 4))
    compiled(code.function, avals, tmp_path, monkeypatch)


@kernels
@compiler
@pytest.mark.parametrize(
    ("function", "avals", "most"),
    [
        (*kernel_product(2**16, 3), 12),
        (pairs.nearest, f32((2**16, 3), (2**16, 3)), 16),
        (pairs.three_nearest, f32((2**16, 3), (2**16, 3)), 32),
        (pairs.streamed_logsumexp, f32((2**16, 3), (2**16, 3)), 14),
        (pairs.soft_neighbours, f32((2**16, 3), (2**16, 3), (2**16,)), 17),
        (pairs.weighted_mean, f32((2**16, 3), (2**16, 3), (2**16,)), 12),
    ],
    ids=["product", "nearest", "three nearest", "logsumexp", "softmax", "mean"],
)
def test_machine_code_has_no_more_instructions_per_pair(function, avals, most, tmp_path, monkeypatch):
    from benchmarks.calibration.instructions import JUMP, instructions, tool

    try:
        assembler, reader = tool("ptxas"), tool("nvdisasm")
    except SystemExit as missing:
        pytest.skip(str(missing))
    own = backend()
    (tile,) = tiles_of(function, avals, own)[1]
    compiled(emit(straight(written(function, avals, own), own)).function, avals, tmp_path, monkeypatch)
    (source,) = tmp_path.glob("*.ptx")
    binary = tmp_path / "kernel.cubin"
    arch = re.search(r"\.target (\w+)", source.read_text(encoding="utf-8"))[1]
    subprocess.run([assembler, f"-arch={arch}", "-o", binary, source], check=True, capture_output=True)
    code, labels = instructions(subprocess.run([reader, "-c", binary], check=True, capture_output=True, text=True).stdout)
    turns = [k - labels[jump[1]] + 1 for k, (_, text) in enumerate(code) if (jump := JUMP.match(text)) and labels[jump[1]] < k]
    per_pair = max(turns) / (tile.block[0] * tile.block[1] / tiles.THREADS)
    assert 0.7 * most < per_pair <= most
