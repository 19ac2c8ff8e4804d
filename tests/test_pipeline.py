"""Plans from end to end, at sizes that take a moment: values, peaks, knobs, bodies of control flow, and the error where nothing fits."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem import MemoryLimitError, events, pipeline
from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.candidates import Forms
from eqsat_mem.equal_programs import MEMORY_PRICES
from eqsat_mem.options import Options
from eqsat_mem.request import HARDLY, request_of
from eqsat_mem.schedule.checks import Check
from eqsat_mem.transforms import plan_bodies
from eqsat_mem.verification import ROOM
from tests.oracles.targets import CPU
from tests.schedule.test_search import kernel_vector
from tests.schedule.test_split import bound, softmax
from tests.tiers import tiered

MIB = 2**20
optimize = partial(eqsat_mem.optimize, max_seconds=60.0)
"""Saturation stops for other reasons: plans do not depend on how busy the machine is."""


def squared_distances(x, y):
    return jnp.sum((x[:, None] - y[None]) ** 2, -1)


def nearest(x, y):
    return lax.top_k(-squared_distances(x, y), 5)


def chamfer(x, y):
    d = squared_distances(x, y)
    return jnp.mean(jnp.min(d, 0)) + jnp.mean(jnp.min(d, 1))


def layers(x, w, u):
    return jnp.mean((jnp.tanh(x @ w) @ u) ** 2)


def forces(x):
    d = x[:, None] - x[None]
    return jnp.sum(d / (jnp.sum(d**2, -1, keepdims=True) + 0.1) ** 1.5, 1)


Case = tuple[Callable[..., Any], list[tuple[int, ...]], int]
CASES: dict[str, Case] = {  # a function, shapes of its arguments, and a limit far below what it holds as written
    "kernel times vector": (kernel_vector, [(1200, 3), (1200, 3), (1200, 2)], MIB),
    "kernel gradients": (jax.grad(lambda *a: jnp.sum(kernel_vector(*a) ** 2), (0, 1, 2)), [(1200, 3), (1200, 3), (1200, 2)], MIB),
    "attention": (softmax, [(900, 16), (900, 16), (900, 16)], MIB),
    "attention gradients": (jax.grad(lambda *a: jnp.sum(softmax(*a) ** 2), (0, 1, 2)), [(900, 16)] * 3, MIB),
    "nearest neighbours": (nearest, [(500, 8), (2003, 8)], MIB),
    "nearest point": (lambda x, y: jnp.argmin(squared_distances(x, y), 1), [(500, 8), (2003, 8)], MIB),
    "chamfer gradients": (jax.grad(chamfer, (0, 1)), [(700, 3), (801, 3)], MIB),
    "network gradients": (jax.value_and_grad(layers, (1, 2)), [(2000, 16), (16, 256), (256, 4)], MIB),
    "gradients of forces": (jax.grad(lambda x: jnp.sum(forces(x) ** 2)), [(800, 3)], MIB),
    "bound gradients": (jax.value_and_grad(bound, (0, 2)), [(4000, 3), (4000, 1), (24, 3)], MIB),
}


def arguments(shapes: list[tuple[int, ...]]) -> list[Any]:
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("name", tiered(CASES, ["kernel times vector", "attention", "nearest neighbours", "bound gradients"]))
def test_plans_fit_and_compute_the_same(name):
    fun, shapes, limit = CASES[name]
    args = arguments(shapes)
    plan = optimize(fun, memory_limit=limit).plan(*args)
    assert not plan.unchanged
    assert plan.loops
    assert plan.peak_bytes <= limit < plan.original_peak_bytes
    assert plan.compiled_peak_bytes is not None
    assert plan.compiled_peak_bytes <= limit
    with jax.enable_x64(True):  # the reference, of which float32 is one rounding away
        want = jax.tree.leaves(jax.jit(fun)(*(np.asarray(a, np.float64) for a in args)))
    for got, exact in zip(jax.jit(plan.function)(*args), want, strict=True):
        exact = np.asarray(exact)
        if exact.dtype.kind == "i":
            assert np.mean(np.asarray(got) != exact) < 0.01  # points as near as rounding
        else:
            np.testing.assert_allclose(got, exact, atol=3e-4 * max(1.0, np.abs(exact).max()), rtol=3e-4)


@pytest.mark.parametrize(("queries", "points", "width", "extra"), [(300, 20_011, 64, 4 * MIB), (40, 9001, 33, MIB)])
def test_positions_of_minima_lie_within_the_searched_axis(queries, points, width, extra):
    """The minimum must be found again where it is looked for, so values are not computed twice with different rounding."""
    args = arguments([(queries, width), (points, width)])
    fun = lambda x, y: jnp.argmin(squared_distances(x, y), 1)  # noqa: E731
    plan = optimize(fun, memory_limit=4 * width * (queries + points) + extra).plan(*args)
    got = np.asarray(jax.jit(plan.function)(*args)[0])
    assert got.max() < points
    assert np.mean(got != np.asarray(jax.jit(fun)(*args))) < 0.01


# --- what is left alone --------------------------------------------------------------------------------


def test_a_program_that_fits_and_gains_nothing_is_returned_bit_for_bit():
    args = arguments([(40, 3), (30, 3), (30, 2)])
    plan = optimize(kernel_vector, memory_limit="1GiB").plan(*args)
    assert plan.unchanged
    np.testing.assert_array_equal(jax.jit(plan.function)(*args)[0], jax.jit(kernel_vector)(*args))


def test_bitwise_plans_give_the_same_bits():
    fun = lambda x, y: jnp.max(jnp.exp(-jnp.abs(x[:, None] - y)), 1)  # noqa: E731
    args = arguments([(3000,), (2000,)])
    plan = optimize(fun, memory_limit=MIB // 4, accuracy="bitwise").plan(*args)
    np.testing.assert_array_equal(jax.jit(plan.function)(*args)[0], jax.jit(fun)(*args))


def test_shapes_are_enough_for_a_plan():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(1200, 3), (1200, 3), (1200, 2)]]
    optimized = optimize(kernel_vector, memory_limit=MIB)
    assert optimized.plan(*shapes).source == optimized.plan(*arguments([s.shape for s in shapes])).source


def test_plans_are_the_same_every_time():
    fun, shapes, limit = CASES["attention gradients"]
    args = arguments(shapes)
    sources = {optimize(fun, memory_limit=limit).plan(*args).source for _ in range(2)}
    assert len(sources) == 1


# --- the knobs ------------------------------------------------------------------------------------------


def test_only_tensors_above_the_threshold_are_split():
    def sorted_rows(x, y, v):
        return jnp.sort(x @ y.T) @ v

    args = arguments([(1200, 3), (1200, 3), (1200, 2)])
    assert optimize(sorted_rows, memory_limit=MIB, tensor_size_threshold="1kB").plan(*args).loops
    with pytest.raises(MemoryLimitError, match=r"tensor_size_threshold = 953\.67 MiB keeps tensors of up to that size whole"):
        optimize(sorted_rows, memory_limit=MIB, tensor_size_threshold="1GB").plan(*args)


def test_slices_of_split_tensors_are_no_larger_than_asked_for():
    args = arguments([(1200, 3), (1200, 3), (1200, 2)])
    plan = optimize(kernel_vector, memory_limit=4 * MIB, tensor_split_size="100kB").plan(*args)
    assert plan.loops
    assert plan.peak_bytes < plan.argument_bytes + plan.output_bytes + 3 * 100_000


# --- where nothing fits ----------------------------------------------------------------------------------


def test_the_error_names_the_largest_tensors_with_their_lines():
    x, w = arguments([(600, 600), (600, 600)])
    with pytest.raises(MemoryLimitError) as caught:
        optimize(lambda x, w: jnp.linalg.cholesky(x @ w), memory_limit=4 * MIB)(x, w)
    error, text = caught.value, str(caught.value)
    assert error.limit_bytes == 4 * MIB < error.smallest_bytes
    assert "f32[600,600] argument x" in text
    assert "test_pipeline.py" in text
    assert "Raise memory_limit" in text
    assert error.tensors == sorted(error.tensors, key=lambda tensor: -tensor[1])


def test_the_error_names_the_options_that_keep_tensors_whole():
    args = arguments([(1200, 3), (1200, 3)])
    refused = partial(optimize, lambda x, y: lax.top_k(x @ y.T, 5), memory_limit=MIB)
    with pytest.raises(MemoryLimitError, match='"reassociate" allows chunks of them') as bitwise:
        refused(accuracy="bitwise").plan(*args)
    assert refused(accuracy="reassociate").plan(*args).peak_bytes <= MIB
    with pytest.raises(MemoryLimitError, match="Rules that without_rules leave out may be those that split these tensors") as unsplit:
        refused(without_rules="splitting").plan(*args)
    assert len(bitwise.value.restrictions) == len(unsplit.value.restrictions) == 1


def test_what_the_error_advises_is_enough():
    fun, shapes, _ = CASES["attention"]
    args = arguments(shapes)
    with pytest.raises(MemoryLimitError) as caught:
        optimize(fun, memory_limit=100_000)(*args)
    assert optimize(fun, memory_limit=int(1.05 * caught.value.smallest_bytes)).plan(*args).loops


def compiled(monkeypatch, held):
    """Have ``held(function, avals)`` say what compiled programs hold."""
    monkeypatch.setattr(CpuBackend, "check", lambda self, function, avals, *args, **options: Check(held(function, avals)))


def test_xla_is_asked_where_the_smallest_plan_is_predicted_to_hold_a_little_more(monkeypatch):
    args = arguments([(1200, 3), (1200, 3), (1200, 2)])
    with pytest.raises(MemoryLimitError) as caught:
        optimize(kernel_vector, memory_limit=1000, verify=False).plan(*args)
    limit = int(caught.value.smallest_bytes / 1.1)
    with pytest.raises(MemoryLimitError):
        optimize(kernel_vector, memory_limit=limit, verify=False).plan(*args)

    def says(held, function, avals):
        is_whole = plan_bodies.largest_value(jax.make_jaxpr(function)(*avals)) > 2**20
        return 2 * limit if is_whole else held

    compiled(monkeypatch, partial(says, limit))
    plan = optimize(kernel_vector, memory_limit=limit).plan(*args)
    assert plan.compiled_peak_bytes == limit < plan.peak_bytes
    np.testing.assert_allclose(jax.jit(plan.function)(*args)[0], kernel_vector(*args), rtol=1e-4, atol=1e-4)
    compiled(monkeypatch, partial(says, limit + 1))
    with pytest.raises(MemoryLimitError) as refused:
        optimize(lambda *a: kernel_vector(*a), memory_limit=limit).plan(*args)
    assert refused.value.smallest_bytes == limit + 1


def test_what_nearly_fits_a_guess_is_asked_about_before_another_search(monkeypatch):
    """After a plan that held too much, the smallest there is holds a little more than the next guess."""
    args = arguments([(1200, 3), (1200, 3), (1200, 2)])
    with pytest.raises(MemoryLimitError) as caught:
        optimize(kernel_vector, memory_limit=1000, verify=False).plan(*args)
    limit, searches, after = int(1.5 * caught.value.smallest_bytes), [], []

    def says(function, avals):
        after.append(len(searches))
        return limit if after[1:] else 2 * limit

    compiled(monkeypatch, says)
    fastest = Forms.fastest
    monkeypatch.setattr(Forms, "fastest", lambda *given, **named: searches.append(given[2]) or fastest(*given, **named))
    plan = optimize(kernel_vector, memory_limit=limit).plan(*args)
    assert plan.compiled_peak_bytes == limit
    assert searches[1] < caught.value.smallest_bytes
    assert after[:2] == [1, 2]


# --- programs inside programs ----------------------------------------------------------------------------


class Generous(CpuBackend):
    """A backend whose compiled programs hold a part of what XLA says beside arguments and results."""

    part = 1.0

    def check(self, *args, **kwargs):
        found = super().check(*args, **kwargs)
        return dataclasses.replace(found, held_bytes=int(60_000 + self.part * (found.held_bytes - 60_000)))


def test_plans_are_expected_to_hold_hardly_less_of_their_predictions_than_what_was_compiled():
    """Beside what is fixed, 100 bytes here."""
    jaxpr = jax.make_jaxpr(jnp.sin)(1.0)
    request = request_of(jaxpr, Options(memory_limit=1100), ["x"], "f", CPU)
    assert request.most_predicted(100) == np.inf
    request.compared.append((2100, 2100))
    assert request.most_predicted(100) == pytest.approx(100 + 1000 / HARDLY)
    request.compared.append((2100, 1100))  # half of what was predicted
    assert request.most_predicted(100) == pytest.approx(100 + 1000 / (0.5 * HARDLY))
    request.compared.append((2100, 4100))
    assert request.most_predicted(100) == pytest.approx(100 + 1000 / (0.5 * HARDLY))


@pytest.mark.parametrize("share", [0.9, 1.05])
def test_far_faster_plans_are_tried_that_are_predicted_to_hold_more_and_do_not(share):
    """Compiled, the roomiest of them holds a ``share`` of the limit, whatever XLA says: if that is too much, one in between is found."""

    def laplacian_kernel(x, v):
        return jnp.exp(-jnp.sum(jnp.abs(x[:, None] - x[None]), -1)) @ v

    def planned(limit, part):
        backend = type("Backend", (Generous,), {"part": part})(CPU.device)
        return pipeline.plan(jaxpr, Options(memory_limit=limit), ["x", "v"], "laplacian_kernel", backend)

    jaxpr = jax.make_jaxpr(laplacian_kernel)(*arguments([(3000, 3), (3000,)]))
    limit = 133_000
    roomiest = planned(int(ROOM * limit), 1.0)
    plan = planned(limit, (share * limit - 60_000) / (roomiest.compiled_peak_bytes - 60_000))
    assert plan.compiled_peak_bytes <= limit < plan.peak_bytes <= roomiest.peak_bytes
    assert (plan.peak_bytes == roomiest.peak_bytes) == (share < 1)
    assert plan.predicted_s < plan.original_predicted_s


@pytest.mark.parametrize("part", [0.7, 1.0])
def test_faster_plans_are_tried_that_hold_as_little_of_their_prediction_as_a_slow_one_does(part):
    """A plan for 140 kB takes longer than the program as written, and holds much less than is predicted."""

    def laplacian_kernel(x, v):
        return jnp.exp(-jnp.sum(jnp.abs(x[:, None] - x[None]), -1)) @ v

    jaxpr = jax.make_jaxpr(laplacian_kernel)(*arguments([(3000, 3), (3000,)]))
    backend = type("Backend", (Generous,), {"part": part})(CPU.device)
    plan = pipeline.plan(jaxpr, Options(memory_limit=140_000), ["x", "v"], "laplacian_kernel", backend)
    assert plan.compiled_peak_bytes <= 140_000 < plan.peak_bytes
    assert plan.predicted_s < plan.original_predicted_s


def through_scan(x, y, v):
    return lax.scan(lambda c, _: (kernel_vector(x, y, c) / 1200, None), v, None, length=3)[0]


def through_while(x, y, v):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, kernel_vector(x, y, c[1]) / 1200), (0, v))[1]


def through_cond(x, y, v):
    return lax.cond(v[0, 0] > 0, kernel_vector, lambda x, y, v: -kernel_vector(x, y, v), x, y, v)


@pytest.mark.parametrize("fun", [through_scan, through_while, through_cond])
def test_bodies_of_control_flow_are_planned(fun):
    args = arguments([(1200, 3), (1200, 3), (1200, 2)])
    plan = optimize(fun, memory_limit=MIB).plan(*args)
    assert plan.compiled_peak_bytes is not None
    assert plan.compiled_peak_bytes <= MIB
    np.testing.assert_allclose(jax.jit(plan.function)(*args)[0], jax.jit(fun)(*args), rtol=1e-4, atol=1e-5)


def test_an_xla_that_folds_arrays_gets_smaller_chunks(monkeypatch):
    """Versions of XLA differ in what they compute on the way to a fold; here is one that computes nothing on the way."""
    compiled(monkeypatch, held_unfused)
    monkeypatch.setattr(pipeline, "backend_for", lambda device: CPU)
    fun = lambda x, y: jnp.max(jnp.exp(-jnp.abs(x[:, None] - y)), 1)  # noqa: E731
    args = arguments([(3000,), (2000,)])
    plan = optimize(fun, memory_limit=MIB // 4).plan(*args)
    assert held_unfused(plan.function, args) <= MIB // 4
    np.testing.assert_allclose(jax.jit(plan.function)(*args)[0], fun(*args), rtol=1e-6)
    with pytest.raises(MemoryLimitError) as caught:
        optimize(fun, memory_limit=40_000).plan(*args)
    assert caught.value.smallest_bytes > 40_000


def test_a_program_is_extracted_once_whatever_limits_it_is_searched_for(monkeypatch):
    """XLA holds more than was predicted, so the limit is tightened, and then again without what XLA computes on the way to folds."""
    heard = []
    compiled(monkeypatch, lambda function, avals: 2 * MIB)
    monkeypatch.setattr(pipeline, "backend_for", lambda device: CPU)
    with events.listening(heard.append), pytest.raises(MemoryLimitError):
        optimize(kernel_vector, memory_limit=MIB).plan(*arguments([(1200, 3), (1200, 3), (1200, 2)]))
    count = Counter(type(event) for event in heard)
    assert count[events.Searched] > 4
    assert count[events.Compiled] > 4
    assert count[events.Extracted] == 1 + len(MEMORY_PRICES)


def held_unfused(fun, avals):
    """Bytes of two of the largest values of a function, with its arguments."""
    jaxpr = jax.make_jaxpr(fun)(*avals)
    return 2 * plan_bodies.largest_value(jaxpr) + plan_bodies.aval_bytes(jaxpr.in_avals)


def test_small_bodies_are_left_as_they_are():
    jaxpr = jax.make_jaxpr(lambda a: jnp.sin(a))(np.ones(10, np.float32))
    assert plan_bodies.largest_value(jaxpr) == 40 < plan_bodies.SMALL_BYTES


def test_optimised_functions_nest():
    inner = optimize(kernel_vector, memory_limit=MIB)
    args = arguments([(1200, 3), (1200, 3), (1200, 2)])
    outer = optimize(lambda x, y, v: jnp.sin(inner(x, y, v)), memory_limit=MIB)
    np.testing.assert_allclose(outer(*args), jnp.sin(kernel_vector(*args)), rtol=1e-3, atol=1e-4)


def test_plans_keep_to_the_rules_that_are_named():
    def distances(x, y):
        return jnp.sum((x[:, None] - y[None]) ** 2, -1)

    args = [jax.ShapeDtypeStruct((n, 40), np.float32) for n in (900, 1000)]

    def fired(**options):
        return set(eqsat_mem.optimize(distances, memory_limit="16MiB", **options).plan(*args).rules_fired)

    assert "expand-distance" in fired()
    assert "expand-distance" not in fired(without_rules="expand-distance")
    assert not fired(without_rules=["distance", "centre"]) & {"expand-distance", "centre"}
    assert "expand-distance" in fired(only_rules=["simplify", "centre", "distance.egg", "splitting"])
    assert "expand-distance" not in fired(only_rules=["integer-pow-2", "splitting"])
    with pytest.raises(eqsat_mem.RuleError, match="no rule, pass or rule file is named 'expand'"):
        fired(without_rules="expand")


def test_distances_to_as_many_other_points_and_to_itself_share_what_xla_writes_out():
    """Both read a column of ``x`` at one shape, though at the indices of other points: it is held at that shape."""

    def squares(x, y):
        return jnp.sum((x[:, None] - y[None]) ** 2, -1)

    def kernels(x, y):
        return jax.vmap(lambda x: jnp.mean(jnp.exp(-squares(x, y))) - jnp.mean(jnp.exp(-squares(x, x))))(x)

    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((40, 100, 4), (100, 4))]
    plan = eqsat_mem.optimize(kernels, memory_limit="1MiB").plan(*shapes)
    assert plan.compiled_peak_bytes <= 2**20
    assert plan.original_peak_bytes > 4 * 40 * 100 * 100 * 4


@pytest.mark.parametrize(("held", "stays"), [(MIB, False), (200 * MIB, True)])
def test_a_plan_that_holds_new_memory_after_all_is_judged_again(monkeypatch, held, stays):
    limit, fixed = 2**30, 3000 * 4 * 3
    compiled(monkeypatch, lambda function, avals: fixed + held)
    x = jax.ShapeDtypeStruct((3000,), jnp.float32)
    plan = optimize(lambda x, y, v: jnp.exp(jnp.abs(x[:, None] - y[None])) @ v, memory_limit=limit).plan(x, x, x)
    assert plan.unchanged is stays
    assert plan.compiled_peak_bytes == fixed + held


def blocks_of_attention(ws, x):
    for q, k, v, up, down in ws:
        x = x + jax.nn.softmax(jnp.einsum("btd,bsd->bts", x @ q, x @ k), -1) @ (x @ v)
        x = x + jnp.tanh(x @ up) @ down
    return jnp.sum(x**2)


def test_values_are_computed_again_inside_of_loops_that_hold_too_much_rather_than_loops_made_that_are_slow():
    """One example at a time holds a quarter more than there is room for: activations are computed again there, instead of columns of
    every layer in loops of their own, forward and backward, which are predicted to take twice as long as the program as written."""
    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    wide, narrow = (jax.ShapeDtypeStruct(dims, jnp.float32) for dims in ((16, 64), (64, 16)))
    ws, x = [(shape, shape, shape, wide, narrow)] * 3, jax.ShapeDtypeStruct((4, 96, 16), jnp.float32)
    gradient = jax.value_and_grad(blocks_of_attention)
    written = eqsat_mem.optimize(gradient, memory_limit="1GiB", verify=False).plan(ws, x).original_peak_bytes
    plan = eqsat_mem.optimize(gradient, memory_limit=written // 5, verify=False).plan(ws, x)
    assert plan.loops
    assert plan.peak_bytes <= written // 5
    assert plan.predicted_s < 1.75 * plan.original_predicted_s


def test_the_stages_of_planning_are_all_of_it(monkeypatch):
    """What forms, programs as written and searches take between other stages is counted, too: a plan says how long it took to make."""
    timed = []
    for name in ("written", "_forms", "_fastest_of"):
        run = getattr(Forms, name)
        monkeypatch.setattr(Forms, name, lambda forms, *args, run=run: timed.append(bool(forms.clock._inside)) or run(forms, *args))
    eqsat_mem.optimize(kernel_vector, memory_limit=2**20).plan(
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2000, 3), (2000, 3), (2000, 1)))
    )
    assert timed
    assert all(timed)
