"""Sums of exponentials less their maximum, and of squares less their mean, are one loop with the values and infinities of the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqsat_mem import optimize
from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import Extraction, as_written
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.loop_tree import Loop, loops, with_region
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.split import region, split
from tests.oracles.execution import execute
from tests.oracles.targets import CPU
from tests.schedule.test_split import index_of
from tests.tiers import tiered

ROWS, KEYS, COLUMNS = 6, 11, 3
RULES = load_rules(only=("simplify", "splitting", "streaming"))


def streamed(fun: Callable[..., Any], args: list[Any]) -> Extraction:
    """A program as it is written but for what simplifies, with what may be streamed; every value counts as large."""
    program = load(jax.make_jaxpr(fun)(*args), [f"x{k}" for k in range(len(args))])
    view = saturate(program, RULES, Limits(large_elements=0, max_iterations=0, max_seconds=60.0))
    return as_written(view)


def over_keys(ex: Extraction, keys: int = KEYS) -> list[Loop]:
    tree = split(ex, region(ex), index_of(ex.program, keys))
    assert tree is not None
    return list(loops(tree))


def scores(seed: int = 0, keys: int = KEYS) -> np.ndarray:
    return 5 * np.random.default_rng(seed).standard_normal((ROWS, keys)).astype(np.float32)


def values(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((KEYS, COLUMNS)).astype(np.float32)


def by_hand(s, v):
    e = jnp.exp(s - jnp.max(s, axis=1, keepdims=True))
    return (e @ v) / jnp.sum(e, axis=1, keepdims=True)


def unnormalised(s, v):
    e = jnp.exp(s - jnp.max(s, axis=1, keepdims=True))
    return e @ v, jnp.sum(e, axis=1)


def masked(s, v):
    keep = jnp.tril(jnp.ones((ROWS, KEYS), bool), 2)
    s = jnp.where(keep, s, -jnp.inf)
    e = jnp.where(keep, jnp.exp(s - jnp.max(s, axis=1, keepdims=True)), 0.0)
    return -(e @ v) / jnp.sum(e, axis=1, keepdims=True)


def mixed(s, v):
    """A dropout-like factor, a quotient of something else, and the sum over a second index at once."""
    e = jnp.exp(s - jnp.max(s, axis=1, keepdims=True))
    return jnp.sum((e[:, :, None] * v[None]) / 3.0, axis=(1, 2)) + jnp.sum(e * jnp.cos(s), axis=1)


def through_its_logarithm(s, v):
    top = jnp.max(s, axis=1)
    level = jnp.log(jnp.sum(jnp.exp(s - top[:, None]), axis=1)) + top
    return jnp.exp(s - level[:, None]) @ v


PROGRAMS: dict[str, Callable[..., Any]] = {
    "quotient of two sums": by_hand,
    "both sums": unnormalised,
    "mask": masked,
    "factors": mixed,
    "normalised by its logarithm": through_its_logarithm,
    "logsumexp": lambda s, v: jax.nn.logsumexp(s + v[:, 0], axis=1),
    "log-partition of weighted terms": lambda s, v: jax.nn.logsumexp(s, axis=1, b=jnp.abs(v[:, 0])),
    "variance": lambda s, v: (jnp.var(s + v[:, 0], axis=1, ddof=1), jnp.mean(s + v[:, 0], axis=1)),
    "variance of all": lambda s, v: jnp.std(jnp.sin(s) + v[:, 0]),
    "normalised": lambda s, v: ((s - s.mean(1, keepdims=True)) / jnp.sqrt(s.var(1, keepdims=True) + 1e-3)) @ v,
    "softmax": lambda s, v: jnp.sum(jax.nn.softmax(s, axis=1)[:, :, None] * v, axis=1),
}
ABOUT_MEANS = ("variance", "variance of all", "normalised")
ONE_LOOP = (
    "both sums",
    "mask",
    "factors",
    "normalised by its logarithm",
    "quotient of two sums",
    "logsumexp",
    "variance",
    "variance of all",
)


@pytest.mark.parametrize("name", ONE_LOOP)
def test_a_maximum_and_the_sums_less_it_are_one_loop(name):
    ex = streamed(PROGRAMS[name], [scores(), values()])
    found = [loop for loop in over_keys(ex) if loop.rescaled]
    assert len(found) == 1
    assert len(over_keys(ex)) == 1


def specials(keys: int = KEYS) -> dict[str, np.ndarray]:
    """Rows with what maxima and exponentials treat in ways of their own."""
    s = scores(3, keys)
    out = {"ordinary": s, "large": 80 * s, "far below": s - 3e4, "ascending": np.sort(s, axis=1), "descending": -np.sort(-s, axis=1)}
    for name, value in (("-inf", -np.inf), ("inf", np.inf), ("nan", np.nan)):
        some = s.copy()
        some[0, :4], some[1, 7:], some[2], some[3, 5], some[4, ::2] = value, value, value, value, value
        out[name] = some
    low = s.copy()
    low[:, :4] = -np.inf
    out["-inf in the first chunks, far below after"] = low - 200
    return out


@pytest.mark.parametrize("chunk", tiered([1, 2, 3, 7, 10], [3]))
@pytest.mark.parametrize("name", PROGRAMS)
def test_streamed_programs_mean_what_was_written(name, chunk):
    fun, v = PROGRAMS[name], values()
    ex = streamed(fun, [scores(), v])
    tree = split(ex, region(ex), index_of(ex.program, KEYS))
    made = Schedule(ex, CPU, tree, dict.fromkeys(loops(tree), chunk), 0, 0.0)
    emitted, original = jax.jit(emit(made).function), jax.jit(fun)
    for kind, s in specials().items():
        want = jax.tree.leaves(original(s, v))
        rounding = rounding_of_means(s) if name in ABOUT_MEANS else 0.0
        for got in (emitted(s, v), execute(made, [s, v])):
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5 + rounding, atol=1e-6 + rounding, err_msg=kind)


def rounding_of_means(s: np.ndarray) -> float:
    """The change of the difference of two means that are rounded to float32, in standard deviations: a few times, of values in rows."""
    finite = s[np.isfinite(s)]
    return float(4 * np.finfo(np.float32).eps * np.abs(finite).max() / finite.std(axis=None))


def test_rows_in_chunks_inside_of_keys_in_chunks():
    s, v = specials()["-inf"], values()
    ex = streamed(by_hand, [s, v])
    tree = split(ex, region(ex), index_of(ex.program, KEYS))
    (place,) = [k for k, step in enumerate(tree.steps) if isinstance(step, Loop)]
    inner = split(ex, tree.steps[place].body, index_of(ex.program, ROWS))
    tree = with_region(tree, (place,), inner)
    keys, rows = loops(tree)
    made = Schedule(ex, CPU, tree, {keys: 4, rows: 2}, 0, 0.0)
    want = by_hand(s, v)
    for got in (jax.jit(emit(made).function)(s, v)[0], execute(made, [s, v])[0]):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_two_summed_indices_one_inside_the_other():
    s = np.random.default_rng(5).standard_normal((4, KEYS, 5)).astype(np.float32)
    s[0], s[1, :4], s[2, :, 2:] = -np.inf, -np.inf, -np.inf

    def fun(s):
        return jnp.sum(jnp.exp(s - jnp.max(s, axis=(1, 2), keepdims=True)), axis=(1, 2))

    made = both_in_chunks(fun, s, 4, 2)
    for got in (jax.jit(emit(made).function)(s)[0], execute(made, [s])[0]):
        np.testing.assert_allclose(got, fun(s), rtol=1e-5)


def both_in_chunks(fun: Callable[..., Any], s: np.ndarray, across: int, inside: int) -> Schedule:
    """A program in chunks along the middle axis of its argument, and inside of those along its last axis."""
    ex = streamed(fun, [s])
    tree = split(ex, region(ex), index_of(ex.program, s.shape[1]))
    (place,) = [k for k, step in enumerate(tree.steps) if isinstance(step, Loop)]
    tree = with_region(tree, (place,), split(ex, tree.steps[place].body, index_of(ex.program, s.shape[2])))
    outer, inner = loops(tree)
    assert outer.rescaled
    assert outer.rescaled == inner.rescaled
    return Schedule(ex, CPU, tree, {outer: across, inner: inside}, 0, 0.0)


@pytest.mark.parametrize("chunks", [(4, 2), (1, 1), (10, 3)])
def test_a_variance_over_two_indices_one_inside_the_other(chunks):
    s = 7 + np.random.default_rng(5).standard_normal((4, KEYS, 5)).astype(np.float32)
    s[1, :, 3] += 100
    made = both_in_chunks(lambda s: jnp.var(s, axis=(1, 2)), s, *chunks)
    for got in (jax.jit(emit(made).function)(s)[0], execute(made, [s])[0]):
        np.testing.assert_allclose(got, np.var(s.astype(np.float64), axis=(1, 2)), rtol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5])
def test_a_variance_in_chunks_rounds_by_the_mean_in_standard_deviations(offset):
    """Not by its square, as a difference of the mean of squares and the square of the mean does."""
    s = (offset + np.random.default_rng(6).standard_normal((4, 997))).astype(np.float32)
    ex = streamed(lambda s: jnp.var(s, axis=1), [s])
    tree = split(ex, region(ex), index_of(ex.program, 997))
    (got,) = emit(Schedule(ex, CPU, tree, dict.fromkeys(loops(tree), 8), 0, 0.0)).function(s)
    np.testing.assert_allclose(got, np.var(s.astype(np.float64), axis=1), rtol=4 * np.finfo(np.float32).eps * (1 + offset))


def test_means_whose_squares_overflow_do_not():
    """The first chunk is joined to no elements, whose mean counts as zero."""
    s = np.full((2, KEYS), 2.0**70, np.float32)
    ex = streamed(lambda s: jnp.var(s, axis=1), [s])
    tree = split(ex, region(ex), index_of(ex.program, KEYS))
    (got,) = emit(Schedule(ex, CPU, tree, dict.fromkeys(loops(tree), 4), 0, 0.0)).function(s)
    assert np.all(got <= (4 * np.finfo(np.float32).eps * 2.0**70) ** 2)


def test_squares_about_something_else_than_the_mean_wait_for_it():
    def fun(s):
        return jnp.sum((s - jnp.sum(s, axis=1, keepdims=True) / (KEYS - 1)) ** 2, axis=1)

    assert not any(loop.rescaled for loop in over_keys(streamed(fun, [scores()])))


def test_narrow_numbers_are_accumulated_in_float32():
    s, v = (jnp.asarray(a, jnp.bfloat16) for a in (scores(), values()))
    ex = streamed(by_hand, [s, v])
    tree = split(ex, region(ex), index_of(ex.program, KEYS))
    made = Schedule(ex, CPU, tree, dict.fromkeys(loops(tree), 2), 0, 0.0)
    (got,) = jax.jit(emit(made).function)(s, v)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), by_hand(*(a.astype(jnp.float32) for a in (s, v))), atol=0.05)


def test_a_level_that_is_read_in_another_way_is_waited_for():
    def fun(s):
        top = jnp.max(s, axis=1, keepdims=True)
        return jnp.sum(jnp.exp(s - top) * top, axis=1)

    assert not any(loop.rescaled for loop in over_keys(streamed(fun, [scores()])))


def test_a_sum_over_what_its_level_depends_on_is_not_rescaled():
    def fun(s):
        return jnp.sum(jnp.exp(s - jnp.max(s, axis=1, keepdims=True)))

    assert not any(loop.rescaled for loop in over_keys(streamed(fun, [scores()])))


def test_only_maxima_are_levels():
    """An exponential less a mean may overflow in one chunk and not in all."""

    def fun(s):
        return jnp.sum(jnp.exp(s - jnp.mean(s, axis=1, keepdims=True)), axis=1)

    assert not any(loop.rescaled for loop in over_keys(streamed(fun, [scores()])))


def test_long_rows_are_read_once_where_two_passes_would_compute_them_twice():
    x = jax.ShapeDtypeStruct((64, 128), np.float32)
    w = jax.ShapeDtypeStruct((40_000, 128), np.float32)

    plan = optimize(lambda x, w: jax.nn.logsumexp(x @ w.T, axis=1), memory_limit=22 * 2**20).plan(x, w)
    assert plan.source.count("einsum") == 1
    assert "rescaled(" in plan.source


def test_the_deviation_of_a_kernel_reads_its_elements_once():
    points = jax.ShapeDtypeStruct((8192, 3), np.float32)

    def deviation(x, y):
        return jnp.std(jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)))

    plan = optimize(deviation, memory_limit="4MiB").plan(points, points)
    assert len(plan.loops) == 1
    assert "joined(" in plan.source


# --- extremes and their places ----------------------------------------------------------------------

PLACED = 35
"""More keys than a search writes out."""


def of_the_largest(s):
    return jnp.sum(jnp.where(s == jnp.max(s, axis=1, keepdims=True), s + 2.0, 0.0), axis=1)


def place_by_hand(s):
    return jnp.min(jnp.where(jnp.min(s, axis=1, keepdims=True) == s, jnp.arange(PLACED), PLACED), axis=1)


PLACES: dict[str, Callable[..., Any]] = {
    "argmax": lambda s: (jnp.max(s, axis=1), jnp.argmax(s, axis=1)),
    "argmin": lambda s: jnp.argmin(s, axis=1),
    "argmax of all": lambda s: jnp.argmax(s),
    "argmin of whole numbers": lambda s: jnp.argmin(jnp.clip(s, -3, 3).astype(np.int32), axis=1),
    "argmax in few bits": lambda s: jnp.argmax(s.astype(jnp.bfloat16), axis=1),
    "a place by hand": place_by_hand,
    "sum of what is largest": of_the_largest,
    "gradient of a maximum": lambda s: jax.grad(lambda c: jnp.sum(jnp.max(s * c, axis=1) ** 2))(1.5),
    "gradient of a minimum": lambda s: jax.grad(lambda s: jnp.sum(jnp.min(jnp.abs(s), axis=1) ** 2))(s),
}


@pytest.mark.parametrize("name", [name for name in PLACES if "gradient" not in name])
def test_an_extreme_and_its_place_are_one_loop(name):
    (loop,) = over_keys(streamed(PLACES[name], [scores(keys=PLACED)]), PLACED)
    assert loop.rescaled


@pytest.mark.parametrize("chunk", tiered([4, 16], [4]))
@pytest.mark.parametrize("name", PLACES)
def test_streamed_places_are_those_of_the_original(name, chunk):
    fun = PLACES[name]
    ex = streamed(fun, [scores(keys=PLACED)])
    tree = split(ex, region(ex), index_of(ex.program, PLACED))
    made = Schedule(ex, CPU, tree, dict.fromkeys(loops(tree), chunk), 0, 0.0)
    emitted, original = jax.jit(emit(made).function), jax.jit(fun)
    for kind, s in {**specials(PLACED), "ties": np.round(scores(keys=PLACED) / 3)}.items():
        if "gradient" in name and not np.isfinite(s).all():
            continue  # XLA makes products with zeros and ones choices, which give 0 rather than nan, in some kernels and not in others
        want = jax.tree.leaves(original(s))
        for got in (emitted(s), execute(made, [s])):
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6, err_msg=kind)


def test_what_is_compared_with_an_extreme_elsewhere_waits_for_it():
    def fun(s):
        return jnp.sum(jnp.where(s == jnp.max(s, axis=1, keepdims=True), 1.0, s), axis=1)

    assert not any(loop.rescaled for loop in over_keys(streamed(fun, [scores(keys=PLACED)]), PLACED))


def test_places_that_may_lie_behind_what_stands_for_none_wait():
    def fun(s):
        return jnp.min(jnp.where(s == jnp.max(s, axis=1, keepdims=True), jnp.arange(PLACED), PLACED // 2), axis=1)

    assert not any(loop.rescaled for loop in over_keys(streamed(fun, [scores(keys=PLACED)]), PLACED))


@pytest.mark.parametrize("along", [0, 1])
def test_the_first_of_what_is_no_number_is_found_behind_larger_numbers(along):
    """XLA:CPU's maximum passes over it, in the original too."""
    x = jnp.ones((700, 9), np.float32)
    y = np.random.default_rng(0).standard_normal((800, 9)).astype(np.float32)
    y[3], y[500:] = 50, np.nan

    def fun(x, y):
        s = x @ y.T if along else y @ x.T
        return jnp.argmax(s, axis=along), jnp.argmin(-s, axis=along)

    planned = optimize(fun, memory_limit="1MiB")
    assert planned.plan(x, y).loops
    for got in planned(x, y):
        assert np.all(got == 500)


def test_places_along_both_axes_of_a_contraction_need_no_matrix():
    a, b = (jax.ShapeDtypeStruct((n, 9), np.float32) for n in (2003, 3001))

    def fun(a, b):
        s = a @ b.T
        return jnp.argmax(s, axis=1), jnp.max(s, axis=1), jnp.argmax(s, axis=0), jnp.unravel_index(jnp.argmin(s), s.shape)

    plan = optimize(fun, memory_limit="3MiB").plan(a, b)
    assert plan.source.count("einsum") == 1


def test_places_that_float32_does_not_hold():
    x = np.random.default_rng(2).standard_normal((4100, 2)).astype(np.float32)
    x[-1] = 100
    planned = optimize(lambda x: jnp.argmax(x @ x.T), memory_limit="8MiB")
    assert planned.plan(x).loops
    assert planned(x) == 4100**2 - 1
