"""Scans that fold, compute again and checkpoint instead of stacking: same values, less held, effects left alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.backends.xla import compiled_peak
from eqsat_mem.egraph.extract import original
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.interpreter import evaluate
from eqsat_mem.testing import same_values
from eqsat_mem.transforms.scan_analysis import How, Stage, Stages, block_size
from eqsat_mem.transforms.scan_rewrite import forms
from tests.tiers import tiered

STEPS, WIDTH = 23, 30


def f32(*shape, seed=0):
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32) * np.float32(0.5)


def cell(h, x, w):
    a = jnp.tanh(h * w + x)
    return jnp.sin(a) * 0.5 + h * 0.5


def folded(w, h, xs):
    h, ys = lax.scan(lambda h, x: (cell(h, x, w), jnp.exp(h)), h, xs)
    return jnp.mean(ys, 0), jnp.max(ys), jnp.sum(ys * xs[:, None]), h


def weighted(w, h, xs):
    """A contraction over the steps, with positions among the factors."""
    _, ys = lax.scan(lambda h, x: (cell(h, x, w), h), h, xs)
    return jnp.arange(xs.shape[0], dtype=ys.dtype) @ ys


def loss(w, h, xs):
    h, ys = lax.scan(lambda h, x: (cell(h, x, w), jnp.exp(-(h**2))), h, xs)
    return jnp.mean(ys**2) + jnp.sum(h)


def backwards(w, h, xs):
    h, ys = lax.scan(lambda h, x: (cell(h, x, w), h**3), h, xs, reverse=True)
    return jnp.sum(jnp.max(ys, 1)) + jnp.sum(h)


def layered(w, h, xs):
    """The second scan reads what the first stacks."""
    _, ys = lax.scan(lambda h, x: (cell(h, x, w), h), h, xs)
    h, zs = lax.scan(lambda h, y: (cell(h, jnp.cos(y), w), h + y), h, ys * 2, reverse=True)
    return jnp.sum(zs**2) + jnp.sum(h)


def nested(w, h, xs):
    def outer(h, x):
        h, ys = lax.scan(lambda h, k: (cell(h, x * k, w), h), h, jnp.arange(3.0))
        return h, jnp.sum(ys)

    h, ys = lax.scan(outer, h, xs)
    return jnp.sum(h) + jnp.mean(ys)


def counted(w, h, xs):
    """A carry of several dtypes, one of them a typed key."""

    def step(carry, x):
        h, n, key = carry
        key, new = jax.random.split(key)
        h = cell(h, x + n, w) + 0.1 * jax.random.normal(new, h.shape)
        return (h, n + 1, key), h**2

    (h, _, _), ys = lax.scan(step, (h, 0, jax.random.key(3)), xs)
    return jnp.mean(ys) + jnp.sum(h)


def returned(w, h, xs):
    """Stacked values are results as well."""
    h, ys = lax.scan(lambda h, x: (cell(h, x, w), h**2), h, xs)
    return jnp.sum(jnp.sin(ys)) + jnp.sum(h), ys


def of_a_mean(w, h, xs):
    """The cotangents of what is stacked depend on a fold of all of it."""
    _, ys = lax.scan(lambda h, x: (cell(h, x, w), h), h, xs)
    return jnp.sum((ys - jnp.mean(ys, 0)) ** 4)


PROGRAMS = {
    "folds": folded,
    "positions": weighted,
    "gradient": jax.value_and_grad(loss, (0, 1, 2)),
    "gradient of a backward scan": jax.grad(backwards, (0, 1, 2)),
    "gradient of two scans": jax.value_and_grad(layered, (0, 1, 2)),
    "gradient of nested scans": jax.grad(nested, (0, 2)),
    "gradient with a key": jax.grad(counted, (0, 2)),
    "gradient and stack": jax.value_and_grad(returned, (0, 1), has_aux=True),
    "gradient through a fold": jax.grad(of_a_mean, (0, 1)),
    "hessian-vector product": lambda w, h, xs: jax.jvp(jax.grad(loss), (w, h, xs), (w, h, xs))[1],
    "batched gradient": jax.vmap(jax.grad(loss), (0, None, None)),
    "without a carry": jax.grad(lambda w, h, xs: jnp.sum(jnp.tanh(lax.map(lambda x: jnp.exp(jnp.sin(x * w) * h), xs)))),
}


def arguments(name, steps=STEPS, width=WIDTH):
    w = f32(3, width) if name == "batched gradient" else f32(width)
    return [w, f32(width, seed=1), f32(steps, seed=2)]


def traced(function, args):
    flat = lambda *a: jax.tree.leaves(function(*a))  # noqa: E731
    jaxpr = jax.make_jaxpr(flat)(*args)
    return load(jaxpr, [f"x{k}" for k in range(len(args))]), jax.jit(flat)(*args)


def all_forms(program, accuracy="reassociate"):
    rules = load_rules(accuracy=accuracy)
    return list(forms(original(program, rules), rules))


QUICK = [("folds", 23), ("positions", 23), ("gradient", 23), ("without a carry", 23)]


@pytest.mark.parametrize(("name", "steps"), tiered([*((name, 23) for name in PROGRAMS), ("gradient", 24)], QUICK))
def test_every_form_computes_the_same(name, steps):
    args = arguments(name, steps)
    program, want = traced(PROGRAMS[name], args)
    made = all_forms(program)
    assert made, "no scan was taken apart"
    for form in made if name == "gradient" else made[:4]:
        got = jax.jit(lambda *a, form=form: evaluate(form, a))(*args)
        for a, b, o in zip(got, want, form.outputs, strict=True):
            assert (a.shape, a.dtype, o.weak_type) == (b.shape, b.dtype, b.weak_type)
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * float(np.max(np.abs(b), initial=1e-3)))


def rows_times_square(a):
    b = a * a
    return jnp.sum(jnp.tanh(lax.map(lambda row: jnp.sum(row) * b, a) * b))


def rows_times_whole(a):
    low = jnp.linalg.cholesky(a @ a.T + 3 * jnp.eye(5))
    return jnp.sum(jnp.tanh(lax.map(lambda row: row @ low.T, low))) + jnp.sum(jnp.tanh(low))


def rows_of_sums(a):
    low = a / (1 + jnp.sum(a**2, 0, keepdims=True))
    sums = lax.scan(lambda c, row: (c + row, row * low), jnp.zeros(5), a)[1].sum(0)
    return jnp.sum(jnp.tanh(lax.scan(lambda c, row: (jnp.tanh(c + row), c * row), sums[0], sums)[1]))


@pytest.mark.parametrize("function", [rows_times_square, rows_times_whole, rows_of_sums])
def test_rows_of_a_matrix_that_every_step_reads_whole_may_be_steps_too(function):
    """Then what is stacked, or carried, has the index of the steps for another reason, and is no slice of the step."""
    a = f32(5, 5)
    program, want = traced(jax.value_and_grad(function), [a])
    made = all_forms(program)
    assert made
    for form in made:
        for got, expected in zip(evaluate(form, [a]), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("name", tiered(["gradient", "gradient of two scans", "gradient and stack"], ["gradient"]))
def test_each_form_holds_less_once_compiled(name):
    """The carries of many wide steps: most of what the gradient holds, until only those at checkpoints are kept."""
    args = arguments(name, 225, 2000)
    program, _ = traced(PROGRAMS[name], args)
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    *made, _ = all_forms(program)  # the last leaves it to the plans of its blocks to hold less
    peaks = [compiled_peak(lambda *a, form=form: evaluate(form, a), avals, optimise=False)[0] for form in [program, *made]]
    assert peaks == sorted(peaks, reverse=True)
    fixed = sum(a.nbytes for a in args) + (peaks[-1] if name == "gradient and stack" else 0)
    assert peaks[-1] - fixed < peaks[0] / 4


CASES = [
    ("gradient", 0.6),
    ("gradient", 0.1),
    ("gradient", 0.02),
    ("gradient of two scans", 0.25),
    ("gradient of two scans", 0.1),
    ("gradient of nested scans", 0.25),
]


@pytest.mark.parametrize(("name", "share"), tiered(CASES, [("gradient", 0.1)]))
def test_a_gradient_is_planned_within_a_share_of_what_it_holds(name, share):
    args = arguments(name, 225, 2000)
    limit = int(share * compiled_peak(lambda *a: jax.tree.leaves(PROGRAMS[name](*a)), args, optimise=False)[0])
    optimized = eqsat_mem.optimize(PROGRAMS[name], memory_limit=limit, max_seconds=60.0)
    plan = optimized.plan(*args)
    assert plan.compiled_peak_bytes <= limit
    assert 0.6 < plan.peak_bytes / plan.compiled_peak_bytes < 1.6
    for a, b in zip(jax.tree.leaves(optimized(*args)), jax.tree.leaves(jax.jit(PROGRAMS[name])(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * float(np.max(np.abs(b))))


@pytest.mark.slow
def test_the_derivative_of_an_optimised_scan_keeps_to_its_limit():
    args = arguments("gradient", 225, 2000)
    optimized = eqsat_mem.optimize(loss, memory_limit="1MB", max_seconds=60.0)
    held = compiled_peak(jax.grad(optimized, (0, 1)), args, optimise=False)[0]
    assert held < 1.1e6 < compiled_peak(jax.grad(loss, (0, 1)), args, optimise=False)[0] / 4
    np.testing.assert_allclose(jax.grad(optimized)(*args), jax.grad(loss)(*args), rtol=1e-4, atol=1e-6)


def test_what_is_computed_again_has_the_same_bits():
    """The gradient with respect to the first carry uses nothing but values of single steps."""
    args = arguments("gradient")
    program, want = traced(jax.grad(loss, 1), args)
    for form in all_forms(program):
        np.testing.assert_array_equal(jax.jit(lambda *a, form=form: evaluate(form, a))(*args)[0], want[0])


def test_bitwise_accuracy_leaves_sums_where_they_are():
    def absorbed(function, accuracy):
        program, _ = traced(lambda w, h, xs: function(lax.scan(lambda h, x: (cell(h, x, w), h), h, xs)[1], 0), arguments("folds"))
        return len(Stages(original(program, load_rules(accuracy=accuracy)), Stage.FUSE).absorbed)

    assert [absorbed(f, a) for f in (jnp.sum, jnp.max) for a in ("bitwise", "reassociate")] == [0, 1, 1, 1]


def test_sums_of_narrow_numbers_are_kept_in_float32():
    xs = np.ones((4096,), jnp.bfloat16)
    program, _ = traced(lambda xs: jnp.sum(lax.map(lambda x: x * 1, xs), dtype=jnp.bfloat16), [xs])
    for form in all_forms(program):
        (total,) = jax.jit(lambda xs, form=form: evaluate(form, [xs]))(xs)
        assert (total.dtype, float(total)) == (jnp.bfloat16, 4096.0)


def test_scans_with_effects_run_as_they_are():
    def noisy(h, x):
        jax.debug.callback(lambda: None)
        return jnp.tanh(h + x), h

    program, _ = traced(lambda h, xs: jnp.mean(lax.scan(noisy, h, xs)[1]), [f32(), f32(9)])
    assert all_forms(program) == []


def test_a_result_that_is_needed_whole_is_read_and_not_computed_again():
    program, _ = traced(PROGRAMS["gradient and stack"], arguments("gradient and stack"))
    stages = Stages(original(program), Stage.RECOMPUTE)
    stacked = next(o.term for o in program.outputs if program.free[o.term].bit_count() == 2)
    assert stacked not in stages.again
    assert How.STORED in {stages.slices(scan).how.get(stacked) for scan in stages.scans}


def test_blocks_leave_no_steps_over_where_the_number_of_steps_allows_it():
    assert [block_size(n, Stage.CHECKPOINT) for n in (100, 1000, 64, 97)] == [10, 25, 8, 10]
    assert block_size(1000, Stage.NEST) == 100
    assert [block_size(n, stage) for n in (11, 13, 23) for stage in (Stage.CHECKPOINT, Stage.NEST)] == [3, 5, 4, 6, 5, 8]
    assert block_size(23, Stage.BLOCKS, 1 / 2) == 3


def test_blocks_are_as_long_as_what_is_stored_of_their_steps_is_small():
    assert [block_size(400, Stage.BLOCKS, times) for times in (1 / 4, 1.0, 4.0)] == [10, 20, 40]
    assert [block_size(400, Stage.BLOCKS, times) for times in (1e-9, 1e9)] == [2, 200]


def wave(w, h, xs):
    """A gradient whose steps need less than half of what they carry."""

    def step(carry, x):
        a, b, c = carry
        a = a - 0.3 * (b - c)
        b = b + 0.3 * (a - jnp.roll(a, 1))
        return (a, b, jnp.tanh(c + w * b) + x), None

    return jnp.sum(lax.scan(step, (h, h, h), xs)[0][2])


def several(w, h, xs):
    """A gradient whose steps need several times what they carry."""
    return jnp.sum(lax.scan(lambda h, x: (jnp.tanh(jnp.sin(h * w) * jnp.exp(h + x)) * jnp.cos(h), None), h, xs)[0])


@pytest.mark.parametrize(("function", "of_results"), [(wave, [True]), (several, [True, False])])
def test_blocks_store_carries_only_where_results_take_more_memory(function, of_results):
    """Where results are stored, each step runs twice in all: in a third scan it would have run a third time."""
    program, want = traced(jax.grad(function, (0, 1)), arguments("gradient", 64))
    found = {}
    for stage in (Stage.BLOCKS, Stage.CHECKPOINT):
        stages = Stages(original(program), stage)
        found[stages.decisions()] = {stages.keeps_results(scan) for scan in stages.checkpointed}
    assert list(found.values()) == [{kept} for kept in of_results]
    for form in all_forms(program):
        got = jax.jit(lambda *a, form=form: evaluate(form, a))(*arguments("gradient", 64))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * float(np.max(np.abs(b))))


def test_blocks_with_results_run_steps_once_again():
    args = arguments("gradient", 64)
    program, _ = traced(jax.grad(wave, (0, 1)), args)
    times = [str(jax.make_jaxpr(lambda *a, form=form: evaluate(form, a))(*args)).count(" tanh ") for form in all_forms(program)]
    assert times == [2, 2, 2], "as written, and again"


def test_lines_of_the_user_survive():
    args = arguments("gradient")
    program, _ = traced(PROGRAMS["gradient"], args)
    for form in all_forms(program):
        assert {source.file for source in form.source.values()} == {__file__}


@pytest.mark.slow
def test_large_values_that_no_step_changes_are_computed_in_every_step():
    """The distances of a Sinkhorn iteration stand outside of its scan, where only the body's plan could split them."""

    def transport(x, y):
        def step(g, _):
            cost = jnp.sum((x[:, None] - y[None]) ** 2, -1)
            f = -jax.nn.logsumexp(g - cost, 1)
            return -jax.nn.logsumexp(f[:, None] - cost, 0), None

        return jnp.sum(lax.scan(step, jnp.zeros(y.shape[0]), None, length=9)[0] ** 2)

    args = [f32(300, 3), f32(250, 3, seed=1)]
    gradient = jax.grad(transport, (0, 1))
    limit = 300 * 250 * 4  # one matrix of distances
    optimized = eqsat_mem.optimize(gradient, memory_limit=limit, max_seconds=60.0)
    assert optimized.plan(*args).compiled_peak_bytes <= limit < compiled_peak(gradient, args, optimise=False)[0] / 10
    for a, b in zip(optimized(*args), gradient(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(np.max(np.abs(b))))


@pytest.mark.slow
def test_large_values_that_no_turn_changes_are_computed_in_every_turn():
    """A kernel matrix that conjugate gradients multiply by, forwards and backwards, as users write it: before the loop."""

    def fit(x, y, scale):
        gram = jnp.exp(-jnp.sum((x[:, None] - x[None]) ** 2, -1) / scale) + 0.1 * jnp.eye(x.shape[0])
        return y @ jax.scipy.sparse.linalg.cg(lambda v: gram @ v, y, maxiter=5)[0]

    args = [f32(300, 3), f32(300, seed=1), np.float32(0.7)]
    gradient = jax.value_and_grad(fit, 2)
    limit = 300 * 300 * 4 // 2
    optimized = eqsat_mem.optimize(gradient, memory_limit=limit, max_seconds=60.0)
    assert optimized.plan(*args).compiled_peak_bytes <= limit < compiled_peak(gradient, args, optimise=False)[0] / 3
    for a, b in zip(optimized(*args), gradient(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)


def ranks_of_pages(a, b, n=400):
    """The matrix of a graph, scattered from its edges before the loop."""
    matrix = jnp.zeros((n, n)).at[b, a].add(1.0)
    step = matrix / jnp.maximum(matrix.sum(0), 1.0)
    return lax.scan(lambda r, _: (0.85 * (step @ r) + 0.15 / n, None), jnp.full(n, 1 / n), None, length=6)[0]


def sorted_neighbours(x, v):
    """Rows of distances, sorted before a loop that weighs them until it has come to rest."""
    near = jnp.sort(jnp.sum((x[:, None] - x[None]) ** 2, -1), 1)
    return lax.while_loop(lambda s: s[1] < 3, lambda s: (jnp.tanh(near @ s[0]), s[1] + 1), (v, 0))[0]


INVARIANT = {
    "scattered": lambda: (ranks_of_pages, [np.random.RandomState(k).randint(0, 400, 3000).astype(np.int32) for k in range(2)]),
    "sorted": lambda: (sorted_neighbours, [f32(400, 3), f32(400, seed=1)]),
}


@pytest.mark.parametrize("name", INVARIANT)
def test_what_blocks_make_and_no_step_changes_is_made_in_every_step(name):
    function, args = INVARIANT[name]()
    limit = 400 * 400 * 4 // 2
    optimized = eqsat_mem.optimize(function, memory_limit=limit)
    assert optimized.plan(*args).compiled_peak_bytes <= limit < compiled_peak(function, args, optimise=False)[0] / 2
    np.testing.assert_allclose(optimized(*args), function(*args), rtol=1e-4, atol=1e-6)


def test_factors_of_a_matrix_are_not_made_in_every_step():
    def solved(x, v):
        low = jnp.linalg.cholesky(jnp.exp(-jnp.sum((x[:, None] - x[None]) ** 2, -1)) + jnp.eye(len(x)))
        return lax.scan(lambda v, _: (jnp.tanh(low @ v), None), v, None, length=4)[0]

    program = load(jax.make_jaxpr(solved)(f32(300, 3), f32(300, seed=1)), ["x", "v"])
    stages = Stages(original(program), Stage.RECOMPUTE)
    (scan,) = stages.scans
    assert [stages.sunk(t) for t in scan.consts if program.nbytes(t) == 300 * 300 * 4] == [
        ([], [t]) for t in scan.consts if program.free[t]
    ]


def test_a_loop_without_large_values_that_no_turn_changes_runs_as_it_is():
    def newton(x):
        return lax.while_loop(lambda s: s[1] < 3, lambda s: (0.5 * (s[0] + x / s[0]), s[1] + 1), (x, 0))[0]

    program = load(jax.make_jaxpr(newton)(f32(40)), ["x"])
    assert list(forms(original(program), load_rules())) == []


def switched(x, z, w, which):
    distances = jnp.sum((x[:, None] - z[None]) ** 2, -1)
    branches = [lambda d: jnp.exp(-d) @ w, lambda d: (1 / jnp.sqrt(1 + d)) @ w, lambda d: jnp.zeros((len(x), 2))]
    return lax.switch(which, branches, distances)


@pytest.mark.parametrize("which", tiered([-1, 0, 1, 2, 7], [1]))
def test_large_values_that_branches_read_are_computed_in_the_branch_that_runs(which):
    args = f32(600, 3), f32(500, 3, seed=1), f32(500, 2, seed=2), np.int32(which)
    limit = 600 * 500 * 4 // 2
    optimized = eqsat_mem.optimize(switched, memory_limit=limit)
    assert optimized.plan(*args).compiled_peak_bytes <= limit < compiled_peak(switched, args, optimise=False)[0] / 2
    np.testing.assert_allclose(optimized(*args), switched(*args), rtol=1e-4, atol=1e-5)


def test_branches_of_small_values_run_as_they_are():
    program = load(jax.make_jaxpr(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x * x))(f32(40)), ["x"])
    assert list(forms(original(program), load_rules())) == []


def marched(centres, origins, directions):
    """Rays that go on by a smooth distance: they go far, and distances far away are rounded by more than a softmax of them can bear."""

    def step(t, _):
        at = origins + t[:, None] * directions
        distances = jnp.sqrt(jnp.sum((at[:, None] - centres) ** 2, -1) + 1e-6)
        return t - jax.nn.logsumexp(-10 * distances, 1) / 10, None

    return jnp.mean(lax.scan(step, jnp.zeros(len(origins)), None, length=12)[0])


@pytest.mark.parametrize("share", tiered([1, 6, 24], [1, 24]))
def test_all_that_a_gradient_reads_of_a_step_comes_from_one_run_of_it(share):
    """Were sums of exponentials stored, and the exponentials computed again, the error would be half of the gradient."""
    args = f32(60, 3), f32(800, 3, seed=1), f32(800, 3, seed=2)
    gradient = jax.value_and_grad(marched)
    optimized = eqsat_mem.optimize(gradient, memory_limit=6 * 2**20 // share)
    assert optimized.plan(*args).compiled_peak_bytes <= 6 * 2**20 // share
    comparison = same_values(gradient, optimized, args, tolerance=1e-5)
    assert comparison.same, comparison


def warped(a, b):
    """Dynamic time warping: the first row of the distances begins what the others go on with."""
    distances = jnp.abs(a[:, None] - b)

    def row(before, costs):
        def cell(left, c):
            value = c[2] + jnp.minimum(jnp.minimum(left, c[0]), c[1])
            return value, value

        return lax.scan(cell, jnp.inf, (before, jnp.concatenate([jnp.full(1, jnp.inf), before[:-1]]), costs))[1], None

    return lax.scan(row, jnp.cumsum(distances[0]), distances[1:])[0][-1]


def test_slices_of_what_is_computed_are_made_step_by_step_rather_than_for_chunks_of_a_batch():
    """Chunks of the batch would run all steps once for each."""
    function, args = jax.vmap(warped), (f32(96, 80), f32(96, 90, seed=1))
    optimized = eqsat_mem.optimize(function, memory_limit=96 * 80 * 90 * 4 // 4)
    plan = optimized.plan(*args)
    assert plan.predicted_s < plan.original_predicted_s
    assert "slices-in-scans" in plan.rules_fired
    assert plan.loops == []
    np.testing.assert_allclose(optimized(*args), function(*args), rtol=1e-5)
