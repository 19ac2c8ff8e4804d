"""Compiling for a card that is not there, and what was found out with it."""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from jax import lax

import eqsat_mem
from benchmarks import gpu_times
from eqsat_mem.backends.gpu import deviceless, habits, thunks
from eqsat_mem.backends.gpu.backend import KERNEL_S, GpuBackend
from eqsat_mem.backends.gpu.operations import LAUNCHES, LIBRARY
from eqsat_mem.backends.gpu.targets import named
from eqsat_mem.backends.gpu.workspaces import library_bytes, workspaces
from eqsat_mem.errors import DeviceCompilerError
from eqsat_mem.schedule.memory import Memory

missing = pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs pip install 'eqsat-mem[gpu]'")
H100, L4 = named("h100"), named("l4")


def compiler(test):
    """A test that asks the compiler: of the second tier, as what the extra ``gpu`` installs is only needed there."""
    return pytest.mark.slow(missing(test))


def f32(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def temporaries(function, *avals, target=H100, setting="triton"):
    return deviceless.compile_for(function, avals, target, settings=[setting]).settings[0].temporaries


def kernel_sum(x, y, v):
    return (jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)) * v).sum(1)


# without the compiler


def versions(monkeypatch, **of):
    def version(name):
        found = of.get(name.replace("-", "_"))
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_a_missing_compiler_says_which_to_install(monkeypatch):
    versions(monkeypatch)
    wheels = f"jax-cuda13-plugin=={jaxlib.__version__} jax-cuda13-pjrt=={jaxlib.__version__}"
    with pytest.raises(DeviceCompilerError, match=r"two wheels that are not installed: pip install 'eqsat-mem\[gpu\]'") as error:
        deviceless.installed()
    assert wheels in str(error.value)


def test_a_compiler_of_another_version_says_which_to_install(monkeypatch):
    versions(monkeypatch, jax_cuda13_plugin="0.4.1", jax_cuda13_pjrt=jaxlib.__version__)
    with pytest.raises(
        DeviceCompilerError, match=rf"{jaxlib.__version__}; jax-cuda13-plugin 0.4.1. Install them: pip install jax-cuda13-plugin"
    ):
        deviceless.installed()
    versions(monkeypatch, jax_cuda12_plugin=jaxlib.__version__)
    with pytest.raises(DeviceCompilerError, match="jax-cuda12-pjrt is missing"):
        deviceless.installed()


def test_a_card_too_old_for_the_compiler_is_refused(monkeypatch):
    versions(monkeypatch, jax_cuda13_plugin=jaxlib.__version__, jax_cuda13_pjrt=jaxlib.__version__)
    with pytest.raises(DeviceCompilerError, match=r"does not compile for v100, whose compute capability is 7.0: it needs 7.5"):
        deviceless.device(named("v100"))


SEQUENCE = """001: kCopy  [source       | next=003 (2)] kCopy
002: kWhile [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] compare grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    004: kCustomKernel [source] reduce grid: [2, 3, 1] threads: [128, 1, 1]  shared_memory: 64 bytes
    005: kWhile        [prev=004 (1) | next=008 (1)]
condition:
        006: kCustomKernel [source | sink] compare_1 grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
      body:
        007: kDynamicSliceFusion [source] params=1, results=1
            008: kCopy [source | sink] kCopy
        010: kAsyncDone [source | sink] kAsyncDone
    009: kCublasLtMatmul [prev=005 (1) | sink] kCublasLtMatmul
"""


def test_launches_are_counted_by_the_turns_of_their_loops():
    names = {1: "copy", 2: "outer", 5: "inner", 8: "copy.1", 9: "dot"}
    launches = list(thunks.parse(SEQUENCE, names, {"outer": 10, "inner": 4}))
    assert [(launch.kind, launch.name, launch.turns, launch.depth) for launch in launches] == [
        ("Copy", "copy", 1, 0),
        ("kernel", "reduce", 10, 1),
        ("Copy", "copy.1", 40, 2),
        ("CublasLtMatmul", "dot", 10, 1),
    ]
    assert (launches[1].blocks, launches[1].threads, launches[1].shared_bytes) == (6, 128, 64)


def test_conditions_are_launched_where_the_number_of_turns_is_not_known():
    launches = list(thunks.parse(SEQUENCE, {2: "outer", 5: "inner"}, {"inner": 4}))
    assert [launch.turns for launch in launches if launch.name == "compare"] == [None]
    assert "compare_1" not in [launch.name for launch in launches]


def test_workspaces_come_from_a_table_and_say_so():
    text = (
        '  %a = (f32[8,100,40]{1,2,0}, f32[8,40]{1,0}) custom-call(%x), custom_call_target="cusolver_geqrf_ffi", x=1\n'
        "  %b = c64[10,131]{1,0} fft(%y), fft_type=FFT, fft_length={131}\n"
    )
    transform, factors = workspaces(text, H100)
    assert (transform.routine, transform.bytes) == ("cuFFT", 8 * 8 * 1310)
    assert (factors.routine, factors.bytes) == ("cuSOLVER geqrf", 64 * 140 * 4)
    assert library_bytes(text, H100) == transform.bytes
    assert "not measured" in str(factors)
    assert "which XLA does not report, from a table" in str(factors)


def test_programs_without_libraries_take_no_workspace():
    assert workspaces("ENTRY %main () -> f32[] {\n}", H100) == []
    assert library_bytes("", H100) == 0


@pytest.mark.parametrize(
    ("extent", "last", "parts"),
    [
        (4096, False, 1),
        (4097, False, 50),
        (16_384, False, 128),
        (16_384, True, 1),
        (122_880, True, 256),
        (10**6, True, 1000),
        (120_000, True, 375),
    ],
)
def test_long_folds_are_cut(extent, last, parts):
    assert habits.fold_parts(extent, last) == parts


def test_products_with_a_vector_are_folds_up_to_a_size():
    assert habits.vector_is_fold(3161**2, 3161, 4)
    assert not habits.vector_is_fold(3162**2, 3162, 4)
    assert habits.vector_is_fold(10**9, 10**4, 8)


def test_products_that_are_not_cut_hold_nothing():
    assert habits.product_scratch(1, 4096, 4096, 4096, 4, H100) == 0
    assert habits.padded_contraction(1000, 1, 4) == 1000


# with the compiler


@compiler
@pytest.mark.parametrize("target", [H100, L4], ids=lambda target: target.name)
def test_what_programs_hold(target):
    points, v = f32(4096, 3), f32(4096)
    fused = deviceless.compile_for(kernel_sum, [points, points, v], target)
    assert [c.temporaries for c in fused.settings] == [0, 0]
    assert fused.held_bytes == 4 * (2 * 3 * 4096 + 2 * 4096)

    tile = 4 * 4096**2
    product = deviceless.compile_for(lambda a, b: jnp.exp(a @ b.T).sum(1), [f32(4096, 64)] * 2, target)
    triton, cublas = (c.temporaries for c in product.settings)
    assert tile <= triton < 1.1 * tile
    assert cublas > triton

    donated = deviceless.compile_for(lambda x: x + 1, [f32(1000)], target, donate=[0])
    assert donated.held_bytes == 4000


@compiler
def test_launches_of_a_loop():
    def columns(x, y, v):
        def turn(t, total):
            return total + kernel_sum(x, lax.dynamic_slice_in_dim(y, t * 256, 256), lax.dynamic_slice_in_dim(v, t * 256, 256))

        return lax.fori_loop(0, 16, turn, jnp.zeros(4096))

    compiled = deviceless.compile_for(columns, [f32(4096, 3), f32(4096, 3), f32(4096)], H100, settings=["triton"], launches=True).settings[
        0
    ]
    assert compiled.temporaries < 20_000
    assert {launch.turns for launch in compiled.launches} == {1, 16}
    assert max(launch.blocks for launch in compiled.launches) > 100


@compiler
@pytest.mark.parametrize("name", gpu_times.loops())
def test_launches_of_loops_that_are_not_planned(name):
    """As many as their equations tell, within a third, where a routine of a library counts as the kernels that take as long to launch."""
    timed = gpu_times.loops()[name]
    compiled = deviceless.compile_for(timed.function, timed.avals, H100, settings=["cublas"], launches=True).settings[0]
    routines = {"Convolution": LIBRARY, "CustomCall": LIBRARY, "Fft": LAUNCHES["fft"]}
    launched = sum(launch.turns * routines.get(launch.kind, 1) for launch in compiled.launches if launch.depth)
    assert 0.67 < gpu_times.predicted_s(timed, H100.name) / KERNEL_S / launched < 1.5


@compiler
def test_functions_without_arguments_are_compiled_for_the_card():
    compiled = deviceless.compile_for(lambda: jnp.sin(jnp.arange(10**6)), [], H100, settings=["triton"], launches=True).settings[0]
    assert [launch.kind for launch in compiled.launches] == ["kernel"]


@compiler
def test_a_setting_that_finds_no_kernel_is_left_out_unless_there_is_no_other(monkeypatch):
    compiled = deviceless._compile

    def refuses(settings):
        def compile_in(lowered, options):
            if any(options.items() >= deviceless.SETTINGS[setting].items() for setting in settings):
                raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes")
            return compiled(lowered, options)

        return compile_in

    first, *others = deviceless.SETTINGS
    monkeypatch.setattr(deviceless, "_compile", refuses([first]))
    found = deviceless.compile_for(jnp.matmul, [f32(256, 256)] * 2, H100)
    assert [each.setting for each in found.settings] == others
    monkeypatch.setattr(deviceless, "_compile", refuses([first, *others]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="tile sizes"):
        deviceless.compile_for(jnp.matmul, [f32(256, 256)] * 2, H100)


@compiler
def test_the_topology_of_a_card_is_made_once():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: deviceless.device(L4), range(8)))
    assert all(device is found[0] for device in found)
    assert jax.devices()[0].platform == jax.default_backend()


@compiler
@pytest.mark.parametrize(
    ("function", "arrays"),
    [
        (jnp.sort, 16.7),
        (jnp.argsort, 0),
        (lambda x: lax.sort(x.astype(jnp.int32)), 4.2),
        (lambda x: lax.top_k(x, 100), 8.4),
        (lambda x: lax.top_k(x, 10), 0),
    ],
    ids=["floats", "positions", "integers", "many", "few"],
)
def test_sorts_take_what_cub_takes(function, arrays):
    compiled = deviceless.compile_for(function, [f32(10**6)], H100, settings=["triton"]).settings[0]
    taken = compiled.workspaces[0].bytes if compiled.workspaces else 0
    assert taken == pytest.approx(arrays * 10**6, rel=0.02)


@compiler
def test_factorisations_take_what_the_table_says():
    compiled = deviceless.compile_for(jnp.linalg.eigh, [f32(512, 512)], H100, settings=["triton"]).settings[0]
    assert compiled.workspaces[0].routine == "cuSOLVER syevd"
    assert compiled.workspaces[0].bytes > 2 * 4 * 512**2


@compiler
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [(64, 64, 10**5, "float32"), (4096, 64, 4096, "bfloat16"), (256, 1024, 2**16, "float32"), (512, 512, 512, "float32")],
)
@pytest.mark.parametrize("target", [H100, L4], ids=lambda target: target.name)
def test_products_are_cut_as_the_arithmetic_says(m, n, k, dtype, target):
    held = temporaries(jnp.matmul, f32(m, k, dtype=dtype), f32(k, n, dtype=dtype), target=target)
    assert held == habits.product_scratch(1, m, n, k, jnp.dtype(dtype).itemsize, target)


@compiler
@pytest.mark.parametrize("extent", [16_384, 16_385, 20_000, 31_247, 120_000, 122_880, 10**6])
def test_long_rows_are_cut_as_the_arithmetic_says(extent):
    parts = temporaries(lambda x: x.sum(1), f32(64, extent)) / (4 * 64)
    assert parts <= habits.fold_parts(extent, last=True) if extent > habits.ROW_FOLD else parts == 0


@compiler
@pytest.mark.parametrize("extent", [4096, 4097, 20_000, 120_000])
def test_long_columns_are_cut_as_the_arithmetic_says(extent):
    parts = temporaries(lambda x: x.sum(0), f32(extent, 64)) / (4 * 64)
    assert parts == (habits.fold_parts(extent, last=False) if extent > habits.COLUMN_FOLD else 0)


@compiler
def test_a_matrix_times_a_vector_holds_no_matrix_up_to_a_size():
    def product(x, y, v):
        return jnp.exp(x[:, None] * y[None]) @ v

    assert temporaries(product, f32(3161), f32(3161), f32(3161)) == 0
    assert temporaries(lambda x, y, v: product(x, y, v)[:, None], f32(3161), f32(3161), f32(3161)) == 0
    assert temporaries(kernel_sum, f32(4096, habits.INNER_FOLD - 1), f32(4096, habits.INNER_FOLD - 1), f32(4096)) == 0
    assert temporaries(kernel_sum, f32(4096, habits.INNER_FOLD), f32(4096, habits.INNER_FOLD), f32(4096)) == 4 * 4096**2


@compiler
def test_rows_of_a_softmax_stream_up_to_a_length():
    for extent, kernels in ((habits.STREAMED_ROW, 1), (habits.STREAMED_ROW + 1, 5)):
        compiled = deviceless.compile_for(
            lambda x: jax.nn.softmax(x, -1), [f32(64, extent)], H100, settings=["triton"], launches=True
        ).settings[0]
        assert len(compiled.launches) == kernels


@compiler
def test_few_of_long_rows_are_selected_without_scratch():
    k, row = habits.TOP_K, habits.TOP_K_ROW
    assert temporaries(lambda x: lax.top_k(x, k), f32(100, row)) == 0
    assert temporaries(lambda x: lax.top_k(x, k + 1), f32(100, row)) > 4 * 100 * row
    assert temporaries(lambda x: lax.top_k(x, k), f32(100, row - 1)) > 4 * 100 * row


# loops and outputs


def rows_then_columns(x, w):
    """A loop over chunks of rows, and an output that is made after it."""

    def body(t, most):
        return jnp.maximum(most, jnp.max(lax.dynamic_slice_in_dim(x, t * 1024, 1024, 0) @ w, 1))

    most = lax.fori_loop(0, 4, body, jnp.zeros(1024))
    return jnp.tile(most[:, None], (1, 2048)) * 2


@compiler
def test_bodies_of_loops_take_no_memory_of_outputs():
    assert temporaries(rows_then_columns, f32(4096, 1024), f32(1024, 1024)) >= 4 * 2**20


def test_outputs_that_are_made_after_a_loop_count_beside_it():
    def f(x, y):
        most = jnp.max(jnp.exp(x @ y.T), 1)
        return jnp.sqrt(most[:, None] + jnp.arange(64.0))

    plan = eqsat_mem.optimize(f, memory_limit="16MiB", device="h100", verify=False, tiles=False).plan(f32(16384, 16), f32(4096, 16))
    s = plan.schedule
    assert plan.loops
    shared = Shared(s.backend.device, s.backend.target, products=s.backend.products)
    assert plan.peak_bytes == Memory(s.ex, shared).total(s.seq, s.chunks) + plan.output_bytes


class Shared(GpuBackend):
    """A device whose loops may use the memory of outputs."""

    loops_beside_outputs = False
