"""Vectors that plans are compiled for: on which machines, for which programs, and that nothing is planned twice because of it."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem import optimize
from eqsat_mem.api import compiled, primitive
from eqsat_mem.api.compiled import JitByPlan
from eqsat_mem.backends.cpu import profile, vector_width
from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.ir.ops import MAPS
from tests.ir.test_operation_table import SLOW_TO_COMPILE, map_cases
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("compiled_as_everybodys")

WIDE = {vector_width.OPTION: "512"}
POINTS = np.random.default_rng(0).standard_normal((1500, 3)).astype(np.float32)


def energies(x, scale=1.0):
    return jnp.exp(-scale * jnp.sum((x[:, None] - x[None]) ** 2, -1)).sum(1)


@pytest.fixture
def wide(monkeypatch):
    """A machine of wide vectors, whatever this one is; the list of what ``jax.jit`` compiled with options."""
    monkeypatch.setattr(CpuBackend, "compiler_options", WIDE)
    made = []
    for module in (compiled, primitive):
        monkeypatch.setattr(module, "jit", lambda fun, **options: made.append(options.get("compiler_options")) or jax.jit(fun, **options))
    return made


@pytest.mark.parametrize(
    ("flags", "bits"), [("fpu avx2 fma", 256), ("fpu avx512f avx512dq", 256), ("fpu avx512f avx512_vbmi2", 512), (None, 256)]
)
def test_the_width_is_read_from_the_flags_of_the_processor(flags, bits, tmp_path, monkeypatch):
    described = tmp_path / "cpuinfo"
    if flags is not None:
        described.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    monkeypatch.setattr(vector_width, "CPUINFO", described)
    assert vector_width.machine_bits() == profile.built_in().vector_bits == bits


def test_options_are_only_those_that_this_jaxlib_knows(monkeypatch):
    assert vector_width.compiler_options(256) == {}
    assert vector_width.compiler_options(512) == (WIDE if jax.default_backend() == "cpu" else {})
    monkeypatch.setattr(vector_width, "OPTION", "xla_cpu_no_such_option")
    assert vector_width.compiler_options(512) == {}


def angles(x):
    return jnp.arctan(jnp.sum((x[:, None] - x[None]) ** 2, -1)).sum(1)


def phases(x):
    return jnp.log(jax.lax.complex(jnp.ones((len(x), len(x)), x.dtype), x[:, :1] - x[:, 0])).imag.sum(1)


def angles_of_steps(x):
    return jax.lax.scan(lambda carry, row: (carry, jnp.arctan2(row - x, 1.0).sum()), 0, x)[1]


@pytest.mark.parametrize("function", [angles, phases, angles_of_steps])
def test_programs_with_angles_keep_the_usual_width(function):
    machine = CpuBackend(dataclasses.replace(profile.built_in(), vector_bits=512))
    assert machine.compiling(jax.make_jaxpr(energies)(POINTS)) is machine
    assert machine.compiling(jax.make_jaxpr(function)(POINTS)).compiler_options == {}
    x = POINTS.astype(np.float64)
    want = {
        angles: lambda: np.arctan(((x[:, None] - x[None]) ** 2).sum(-1)).sum(1),
        phases: lambda: np.arctan(x[:, :1] - x[:, 0]).sum(1),
        angles_of_steps: lambda: np.arctan(x[:, None] - x).sum((1, 2)),
    }[function]()
    fast = optimize(function, memory_limit="4MiB")
    assert "xla_cpu_prefer_vector_width" not in fast.plan(POINTS).compiler_options
    np.testing.assert_allclose(fast(POINTS), want, rtol=1e-4, atol=1e-2)


def test_plans_of_one_function_have_options_of_their_own(wide, monkeypatch):
    """By their dtypes: those of numbers are compiled for wide vectors, those of complex numbers are not."""
    monkeypatch.setattr(CpuBackend, "compiler_options", property(lambda self: WIDE if self.device.vector_bits > 256 else {}))
    monkeypatch.setattr(profile, "machine_bits", lambda: 512)
    fast = optimize(lambda x: jnp.abs(energies(x)), memory_limit="4MiB")
    for x in (POINTS, POINTS.astype(np.complex64), POINTS):
        np.testing.assert_allclose(fast(x), jnp.abs(energies(x)), rtol=1e-3)
    assert fast.plan(POINTS).compiler_options == WIDE
    assert fast.plan(POINTS.astype(np.complex64)).compiler_options == {}
    assert wide.count(WIDE) == 1


@pytest.mark.parametrize("part", tiered(range(4), [], range(4)))
def test_other_elementwise_operations_are_right_with_wide_vectors(part):
    names = list(MAPS)[part::4]
    cases = [(name, args, params) for name in names if name not in SLOW_TO_COMPILE for args, params in map_cases(name)]
    cases = [case for case in cases if case[0] not in vector_width.ANGLES and not np.iscomplexobj(case[1][0])]

    def every(operands):
        return [MAPS[name].bind(*own, **params) for own, (name, _, params) in zip(operands, cases, strict=True)]

    many = [[np.tile(a, 40) for a in args] for _, args, _ in cases]
    compiled = jax.jit(every).lower(many)
    for (name, _, _), want, got in zip(cases, compiled.compile()(many), compiled.compile(WIDE)(many), strict=True):
        got, want = (np.asarray(a).view(np.float32) if jnp.iscomplexobj(a) else np.asarray(a, np.float64) for a in (got, want))
        np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=name)


def test_a_plan_is_compiled_with_them_and_a_program_as_written_without(wide):
    small, large = POINTS[:50], POINTS
    fast = optimize(energies, memory_limit="4MiB")
    by_plan = fast._function_for((large,), {})
    assert not fast.plan(large).unchanged
    assert fast.plan(small).unchanged
    for x in (large, small, large):
        np.testing.assert_allclose(fast(x), energies(x), rtol=1e-4)
    assert by_plan.chosen((large,), {}) is not by_plan.chosen((small,), {})
    assert by_plan.chosen((large + 1,), {}) is by_plan.chosen((large,), {})
    assert wide.count(WIDE) == 1
    assert fast.plan(large).compiler_options == WIDE
    assert fast.plan(small).compiler_options == {}
    assert np.array_equal(fast(small), jax.jit(energies)(small))


def test_a_call_and_its_plan_trace_the_function_once(wide):
    traced = []

    def counted(x):
        traced.append(x)
        return energies(x)

    fast = optimize(counted, memory_limit="4MiB")
    plan = fast.plan(POINTS)
    fast(POINTS)
    fast.lower(POINTS).compile()(POINTS)
    assert len(traced) == 1
    assert fast.plan(POINTS) is plan


def test_inside_another_trace_options_are_those_of_the_caller(wide):
    fast = optimize(energies, memory_limit="4MiB")
    np.testing.assert_allclose(jax.jit(lambda x: fast(x) + 1)(POINTS), energies(POINTS) + 1, rtol=1e-4)
    slope = jax.jit(jax.grad(lambda x: fast(x).sum()))(POINTS)
    assert WIDE not in wide
    np.testing.assert_allclose(jax.grad(lambda x: fast(x).sum())(POINTS), slope, rtol=1e-3, atol=1e-3)


def test_derivatives_and_batches_outside_of_jit_are_compiled_with_them(wide):
    traced = []

    def counted(x):
        traced.append(x)
        return energies(x)

    fast = optimize(counted, memory_limit="4MiB")
    for _ in range(2):
        jax.grad(lambda x: fast(x).sum())(POINTS)
    assert wide.count(WIDE) == 2  # the gradient's two parts, forward and backward
    once = len(traced)
    jax.grad(lambda x: fast(x).sum())(POINTS)
    assert len(traced) == once
    two = np.stack([POINTS[:600], POINTS[600:1200]])
    np.testing.assert_allclose(jax.vmap(fast)(two)[1], energies(two[1]), rtol=1e-4)
    assert wide.count(WIDE) == 3


def test_static_values_are_told_apart(wide):
    def repeated(x, n):
        return sum(energies(x) for _ in range(n)) if n else x[:, 0]

    fast = optimize(repeated, memory_limit="4MiB", static_argnums=1)
    by_plan = fast._function_for((POINTS, 0), {})
    np.testing.assert_allclose(fast(POINTS, 0), POINTS[:, 0])
    np.testing.assert_allclose(fast(POINTS, 1), energies(POINTS), rtol=1e-4)
    assert by_plan.chosen((POINTS, 0), {}) is not by_plan.chosen((POINTS, 1), {})
    assert fast._alternates  # between a program as written and a plan: neither is tried first
    with pytest.raises(ValueError, match="hashable"):
        fast(POINTS, [1])


def test_options_of_the_user_are_left_alone(wide):
    by_plan = JitByPlan(energies, {"compiler_options": {vector_width.OPTION: "128"}})
    assert by_plan.chosen((POINTS,), {}) is by_plan.plain
    np.testing.assert_allclose(by_plan(POINTS), energies(POINTS), rtol=1e-4)
    assert wide == [{vector_width.OPTION: "128"}]


def test_numbers_that_change_with_every_call_are_one_signature(wide):
    fast = optimize(energies, memory_limit="4MiB")
    for scale in (0.5, 1.5, 2.5):
        np.testing.assert_allclose(fast(POINTS, scale), energies(POINTS, scale), rtol=1e-4)
    assert len(fast._function_for((POINTS, 0.5), {})._chosen) == 1


BY_POSITION = [(0.5, 2), (1.5, 2), (2.5, 3)]
BY_NAME = [(2.5, {"n": 3}), (3.5, {"n": 3}), (2.5, {"n": 4})]


@pytest.mark.parametrize(
    ("static", "calls", "signatures"),
    [
        ({"static_argnums": 2}, BY_POSITION + BY_NAME, 4),
        ({"static_argnames": "n"}, BY_POSITION + BY_NAME, 4),
        ({"static_argnums": (-1,)}, BY_POSITION, 2),
    ],
)
def test_only_static_values_make_another_signature(static, calls, signatures, wide):
    fast = JitByPlan(lambda x, scale, n=1: n * scale * x, static)
    for scale, n in calls:
        out = fast(POINTS, scale, **n) if isinstance(n, dict) else fast(POINTS, scale, n)
        np.testing.assert_allclose(out, (n["n"] if isinstance(n, dict) else n) * scale * POINTS, rtol=1e-5)
    assert len(fast._chosen) == signatures


def test_forgotten_signatures_are_planned_again_when_called(wide, monkeypatch):
    monkeypatch.setattr(compiled, "MOST_SIGNATURES", 2)
    fast = optimize(partial(energies, scale=2.0), memory_limit="4MiB")
    for n in (40, 50, 60, 40):
        assert fast(POINTS[:n]).shape == (n,)
    assert len(fast._function_for((POINTS,), {})._chosen) <= 2


# --- the way of a call --------------------------------------------------------------------------------


def frames(call):
    """The Python functions that run during a call: the file and the name of each."""
    seen = []

    def noted(frame, event, arg):
        if event == "call":
            seen.append((Path(frame.f_code.co_filename), frame.f_code.co_name))

    sys.setprofile(noted)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("has_options", [True, False])
def test_a_call_goes_straight_to_the_function_of_the_last_one(has_options, wide, monkeypatch):
    if not has_options:
        monkeypatch.setattr(CpuBackend, "compiler_options", {})
    fast = optimize(energies, memory_limit="4MiB")
    x, other = jnp.asarray(POINTS), jnp.asarray(POINTS[:1400])
    for _ in range(2):
        fast(x)
        fast(other)
    for given in (x, other):  # two signatures of one kind
        seen = frames(lambda given=given: fast(given))
        ours = [name for path, name in seen if path.parent.parent.name == "eqsat_mem"]
        assert ours[:2] == ["__call__", "_variables"]
        assert set(ours[2:]) <= {"<listcomp>"}
        assert "cache_miss" not in [name for _, name in seen]  # of JAX: its fast path took the call
        assert len(seen) < 12


def test_the_last_function_is_not_for_other_limits(wide, monkeypatch):
    fast = optimize(energies)
    monkeypatch.setenv("EQSAT_MEM_LIMIT", "4MiB")
    fast(POINTS)
    last = fast._last
    fast(POINTS)
    assert fast._last is last
    monkeypatch.setenv("EQSAT_MEM_LIMIT", "1GiB")
    np.testing.assert_allclose(fast(POINTS), energies(POINTS), rtol=1e-4)
    assert fast._last[0] is not last[0]
    assert fast.plan(POINTS).limit_bytes == 2**30


def test_a_new_signature_that_stays_as_written_is_not_compiled_as_a_plan(wide):
    fast = optimize(energies, memory_limit="4MiB")
    fast(POINTS)
    small = POINTS[:50]
    assert np.array_equal(fast(small), jax.jit(energies)(small))
    by_plan = fast._function_for((small,), {})
    assert by_plan.chosen((small,), {}) is by_plan._made[None]
    fast.clear_cache()
    assert fast._last is None


def test_errors_of_a_second_signature_are_those_of_the_function(wide):
    fast = optimize(lambda x: energies(x) if x.shape[0] > 100 else 1 / 0, memory_limit="4MiB")
    fast(POINTS)
    with pytest.raises(ZeroDivisionError):
        fast(POINTS[:50])
    with pytest.raises(eqsat_mem.MemoryLimitError):
        fast(np.zeros((3_000_000, 3), np.float32))
    np.testing.assert_allclose(fast(POINTS), energies(POINTS), rtol=1e-4)
