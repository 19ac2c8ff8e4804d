"""One backend per plan: what it says of a device and its compiler holds in every stage, and nowhere else is there another."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

from benchmarks.programs import BENCHMARKS
from eqsat_mem import MemoryLimitError, pipeline
from eqsat_mem.backends import hlo
from eqsat_mem.backends.cpu import hidden_scratch
from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import Extraction, original
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.loop_tree import walk_regions
from eqsat_mem.ir.ops import BLOCKS, MAPS
from eqsat_mem.options import Options
from eqsat_mem.reports.timeline import timeline
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.device import Device
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.search import schedule, straight
from eqsat_mem.schedule.split import region
from eqsat_mem.schedule.timing import Timing
from eqsat_mem.schedule.weights import BLOCKS as BASE_BLOCKS
from eqsat_mem.schedule.weights import ELEMENTWISE, Weights
from tests.oracles.targets import CPU, GPU
from tests.schedule.test_remat import normalised

BASE = Backend(replace(GPU.device, name="base"))
IDIOMS = re.compile(r"reduce_precision|optimization_barrier|population_count|swapaxes|top_k_by_blocks")
MIB = 2**20


# --- a new backend in one place -----------------------------------------------------------------------


@dataclass(frozen=True)
class Interpreted(Backend):
    """A slow device whose compiler materialises what folds read, and computes exponentials in hardware."""

    weights = Weights({**ELEMENTWISE, "exp": 1.0}, BASE_BLOCKS)

    def fuses_into_fold(self, ex, t, fold, alone):
        return False

    def fuses_fold(self, ex, t, extent, reader, alone):
        return False


SLOW = Interpreted(
    Device(
        name="interpreted",
        flops=1e9,
        narrow_flops=1e9,
        elements=1e8,
        levels=((2**16, 1e9), (float("inf"), 1e8)),
        tile_level=0,
        kernel_s=1e-5,
        iteration_s=1e-5,
        reduce_weight=1.0,
        short_reduce_weight=1.0,
        matrix_cores=1,
        reused_bytes=2**40,
        fresh_rate=1e9,
    )
)


def extremes(x, y):
    return jnp.max(jnp.exp(-jnp.abs(x[:, None] - y)), 1)


def planned(backend, limit=MIB // 4, function=extremes, shapes=((3000,), (2000,)), **options):
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    names = [f"a{k}" for k in range(len(shapes))]
    return pipeline.plan(jaxpr, Options(memory_limit=limit, verify=False, **options), names, "program", backend)


@cache
def slow_plan():
    return planned(SLOW)


def test_a_backend_of_ones_own_decides_what_is_held_and_how_long_it_takes():
    plan, usual, fused = slow_plan(), planned(CPU), planned(BASE, limit=2**34)
    assert plan.schedule.backend is SLOW
    assert plan.original_peak_bytes > 3000 * 2000 * 4, "the operand of the maximum is materialised"
    assert fused.original_peak_bytes < MIB, "where folds compute their operands, it is not"
    assert plan.loops
    assert plan.peak_bytes <= MIB // 4
    assert plan.predicted_s > 20 * usual.predicted_s
    x, y = (np.random.default_rng(k).standard_normal(n, dtype=np.float32) for k, n in enumerate((3000, 2000)))
    np.testing.assert_allclose(plan.function(x, y)[0], extremes(x, y), rtol=1e-6)


def test_reports_and_explanations_use_its_model():
    plan = slow_plan()
    s, memory = plan.schedule, Memory(plan.schedule.ex, SLOW)
    assert memory.total(s.seq, s.chunks) == plan.peak_bytes
    assert Timing(memory).total(s.seq, s.chunks) == pytest.approx(plan.predicted_s)
    held, _ = memory.at_peak(s.seq, memory.full_extents(), s.chunks)
    live = sorted(value.nbytes for value in held)
    assert sorted(nbytes for name, nbytes, _ in plan.peak_tensors if " argument " not in name) == live
    assert max(point.nbytes for point in timeline(s)) == plan.peak_bytes
    why = plan.explain()
    assert sum(tensor.nbytes for tensor in why.peak_after if " argument " not in tensor.what) == sum(live)
    assert all(loop.one_turn_peak_bytes > plan.peak_bytes for loop in why.loops)


def test_errors_use_its_model():
    with pytest.raises(MemoryLimitError) as caught:
        planned(SLOW, limit=25_000)
    program = straight_program(extremes, (3000,), (2000,)).program
    smallest, other = (schedule(original(program, load_rules()), 1, backend).peak_bytes for backend in (SLOW, BASE))
    assert caught.value.smallest_bytes == smallest != other


def straight_program(function, *shapes):
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    return Extraction(load(jaxpr, [f"a{k}" for k in range(len(shapes))]))


# --- nothing of one compiler elsewhere ----------------------------------------------------------------


@pytest.mark.parametrize("b", BENCHMARKS, ids=lambda b: b.name)
def test_the_base_writes_no_idioms(b):
    with jax.enable_x64(b.x64):
        jaxpr = jax.make_jaxpr(b.function)(*b.specs())
        assert not IDIOMS.search(str(jaxpr))
        names = [f"a{k}" for k in range(len(b.shapes))]
        plan = pipeline.plan(jaxpr, Options(memory_limit=b.limit_bytes, verify=False), names, b.name, BASE)
        assert not IDIOMS.search(plan.source)


def unlucky(x, y, a, b):
    """Every idiom of XLA:CPU: a stalled fold, a solve by rows, a search by blocks, a contraction of a matrix that stands by columns."""
    distances = -jnp.sum(jnp.abs(x[:, None] - y[None]), -1)
    return jax.lax.top_k(distances, 3), jnp.linalg.norm(jax.scipy.linalg.solve_triangular(a, b, lower=True)), jnp.einsum("ki,kj->ij", b, a)


UNLUCKY = ((50, 7), (40_000, 7), (64, 64), (64, 4000))


def test_what_one_compiler_needs_is_written_for_it_only():
    ex = straight_program(unlucky, *UNLUCKY)
    assert len(set(IDIOMS.findall(emit(straight(ex, CPU)).source))) >= 3
    for backend in (BASE, GPU, SLOW):
        assert not IDIOMS.search(emit(straight(ex, backend)).source)


def test_what_takes_one_compiler_long_does_not_take_others_long():
    """As written, and as emitted: on XLA:CPU the first has its penalties; the base knows neither."""
    ex = straight_program(unlucky, *UNLUCKY)
    cpu_like = Backend(CPU.device)
    for backend, penalties in ((CPU, True), (cpu_like, False)):
        written, emitted = (straight(ex, backend, emitted=how).seconds for how in (False, True))
        assert (written > 1.5 * emitted) is penalties
        assert written >= emitted
    assert straight(ex, cpu_like).seconds < straight(ex, CPU).seconds


def test_the_order_of_kernels_is_the_programs():
    ex = straight_program(unlucky, *UNLUCKY)
    for _, seq in walk_regions(region(ex)):
        fused = Memory(ex, BASE).fused(seq)
        place = {step: k for k, step in enumerate(seq.steps)}
        assert [place[step] for step in fused.kept] == sorted(place[step] for step in fused.kept)
        assert not fused.copies
        assert not fused.streamed


@pytest.mark.slow
def test_nothing_is_rematerialised_where_no_tie_is_known():
    gradient = jax.grad(lambda *values: normalised(values[:-1], values[-1]))
    shapes = (*((32, 32),) * 10, (500, 32))
    written = planned(CPU, limit=2**34, function=gradient, shapes=shapes).original_peak_bytes
    apart = {"without_rules": ["equal-blocks-as-loops"]}  # loops over the layers compute them again in any case
    least = partial(planned, limit=int(0.6 * written), function=gradient, shapes=shapes, **apart)
    assert "population_count" in least(CPU).source
    by_loops = least(Backend(CPU.device))
    assert by_loops.loops
    assert "population_count" not in by_loops.source


def test_weights_name_operations_that_there_are():
    from eqsat_mem.schedule import weights as base

    assert set(base.ELEMENTWISE) | set(CPU.weights.elementwise) <= set(MAPS)
    assert set(base.BLOCKS) | set(CPU.weights.blocks) | set(CPU.weights.workspaces) <= set(BLOCKS)


# --- bits ---------------------------------------------------------------------------------------------


def solved(a, b):
    return jax.scipy.linalg.solve_triangular(a, b, lower=True)


def turned(a, b):
    return jnp.einsum("ki,kj->ij", b, a)


@pytest.mark.parametrize("function", [solved, turned])
def test_bitwise_plans_keep_operands_and_sides(function):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((64, 64), (64, 4000)))
    a += 64 * np.eye(64, dtype=np.float32)

    def looped(a, b):
        return jnp.exp(-jnp.abs(b[0][:, None] - b[1])).sum(1) @ function(a, b).reshape(4000, -1)

    sources = {
        accuracy: planned(CPU, limit=16 * MIB, function=looped, shapes=(a.shape, b.shape), accuracy=accuracy).source
        for accuracy in ("bitwise", "reassociate")
    }
    texts = {accuracy: re.findall(r"swapaxes|einsum\(\"\w+,\w+->\w+\"", source) for accuracy, source in sources.items()}
    assert "swapaxes" not in texts["bitwise"]
    with jax.disable_jit(False):
        got = jax.jit(pipeline_function(function, a, b))(a, b)[0]
        assert np.array_equal(got, jax.jit(function)(a, b))


def pipeline_function(function, a, b):
    return planned(CPU, limit=3 * MIB, function=function, shapes=(a.shape, b.shape), accuracy="bitwise").function


# --- what the compiler hides --------------------------------------------------------------------------


COMPILED = jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA:CPU's kernel library")
def test_the_canary_sings_in_this_version_of_jaxlib():
    assert hidden_scratch.canary()


def test_a_renamed_fusion_is_told(monkeypatch):
    """A jaxlib of the future that calls the library's fusions otherwise, and reports no more than this one."""
    monkeypatch.setattr(hidden_scratch, "SEEN_IN", frozenset())
    monkeypatch.setattr(hidden_scratch, "LIBRARY_FUSION", '"kind":"__renamed"')
    monkeypatch.setattr(hidden_scratch, "BATCH", "no_such_attribute")
    hidden_scratch.canary.cache_clear()
    try:
        assert not hidden_scratch.canary()
        (doubt,) = CPU.checked(COMPILED).doubts
        jaxpr = jax.make_jaxpr(jnp.sin)(jnp.ones(3))
        plan = pipeline.plan(jaxpr, Options(memory_limit=MIB), ["x"], "sine", CPU)
        assert plan.doubts == (doubt,)
        assert "is not recognised" in str(plan)
        assert "is not recognised" in plan.to_json()
    finally:
        hidden_scratch.canary.cache_clear()


def test_known_versions_are_not_asked(monkeypatch):
    monkeypatch.setattr(hidden_scratch, "SEEN_IN", frozenset({jaxlib.__version__}))
    monkeypatch.setattr(hidden_scratch, "canary", lambda: pytest.fail("compiled something"))
    assert CpuBackend(CPU.device).checked(COMPILED).doubts == ()
    assert BASE.checked(COMPILED).doubts == ()


def test_a_program_that_cannot_be_read_is_told(monkeypatch):
    monkeypatch.setattr(hidden_scratch, "SEEN_IN", frozenset({jaxlib.__version__}))
    monkeypatch.setattr(hlo, "TYPES", {})
    monkeypatch.setattr(hlo, "_OP", re.compile("no such operation"))
    jaxpr = jax.make_jaxpr(jnp.sin)(jnp.ones(3))
    plan = pipeline.plan(jaxpr, Options(memory_limit=MIB), ["x"], "sine", CPU)
    (doubt,) = plan.doubts
    assert "instructions cannot be read" in doubt
    assert doubt in " ".join(str(plan).split())
    assert BASE.checked(COMPILED).doubts == ()
