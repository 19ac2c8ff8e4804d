"""``while`` loops are pointwise in the axes that their bodies act on row by row, where each row ends on its own or all end alike."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqsat_mem.frontend import loop_roles
from eqsat_mem.ir import Block, bits
from eqsat_mem.ir.ops import bind_call
from tests.tiers import tiered
from tests.transforms.test_loop_axes import operands_of, program_of, sliced, squeezed, values

ROWS, WIDTH = 5, 3


@pytest.fixture
def small_too(monkeypatch):
    """Loops are looked into however small they are."""
    monkeypatch.setattr(loop_roles, "SMALL_BYTES", 0)


def calls(program, name):
    found = {}
    for t in program.reachable():
        term = program.terms[t]
        if isinstance(term, Block) and term.call.prim.name == name:
            found.setdefault(term.call, {})[term.out] = t
    return found


def split_along(function, args, name="while"):
    """The extents of the axes along which the only loop of a function is pointwise, or sums; chunks of its operands are run beside it."""
    program = program_of(function, args)
    ((call, results),) = calls(program, name).items()
    operands = operands_of(program, call, results, args)
    before = [np.asarray(x) for x in bind_call(call, operands)]
    for i in bits(call.pointwise):
        extent = program.indices[i].extent
        made = [bind_call(call, sliced(call, operands, i, rows)) for rows in (slice(0, 1), slice(1, 3), slice(3, extent))]
        for out in results:
            axes = call.out_axes[out]
            parts = [np.asarray(m[out]) for m in made]
            whole = np.concatenate(parts, axes.index((i,))) if (i,) in axes else sum(parts)
            np.testing.assert_allclose(whole, before[out], rtol=1e-5, atol=1e-6)
    return tuple({program.indices[i].extent for i in bits(mask)} for mask in (call.pointwise, call.folds))


def lengths(rows=ROWS):
    return (np.arange(rows) * 7 % 5 + 1).astype(np.int32)


def moved(x, w):
    return jnp.tanh(x @ w) + 0.1 * x


# --- loops that end row by row, in the ways that they are written ------------------------------------------


def by_vmap(x, w, n):
    return jax.vmap(lambda x, n: lax.while_loop(lambda s: s[1] < n, lambda s: (moved(s[0], w), s[1] + 1), (x, 0)))(x, n)


def by_vmap_until_small(x, w, n):
    def one(x):
        return lax.while_loop(lambda s: (s[1] < 9) & (jnp.sum(s[0] ** 2) > 0.1), lambda s: (0.8 * moved(s[0], w), s[1] + 1), (x, 0))

    return jax.vmap(one)(x)


def by_counter(x, w, n):
    def step(s):
        live = s[0] < n
        return s[0] + 1, jnp.where(live[:, None], moved(s[1], w), s[1])

    return lax.while_loop(lambda s: jnp.any(s[0] < n), step, (0, x))[1]


def by_flags(x, w, n):
    def step(s):
        i, going, x = s
        return i + 1, going & (i < n), jnp.where(going[:, None] & (i < n)[:, None], moved(x, w), x)

    return lax.while_loop(lambda s: jnp.any(s[1]), step, (0, jnp.ones(x.shape[0], bool), x))[2]


def by_done(x, w, n):
    def step(s):
        done, x = s
        new = 0.5 * moved(x, w)
        return done | (jnp.sum(new**2, 1) < 0.05), jnp.where(done[:, None], x, new)

    return lax.while_loop(lambda s: ~jnp.all(s[0]), step, (jnp.zeros(x.shape[0], bool), x))[1]


def by_done_at_most(x, w, n):
    def step(s):
        i, done, x = s
        new = 0.9 * moved(x, w)
        return i + 1, done | (jnp.sum(new**2, 1) < 0.05), jnp.where(~done[:, None], new, x)

    return lax.while_loop(lambda s: (s[0] < 6) & ~jnp.all(s[1]), step, (0, jnp.zeros(x.shape[0], bool), x))[2]


def by_number(x, w, n):
    return lax.fori_loop(0, n[0], lambda _, x: moved(x, w), x)


def by_counted_rows(x, w, n):
    rows = jnp.arange(x.shape[0])

    def step(s):
        i, at, x = s
        live = i < n
        return i + 1, jnp.where(live, (at + 1) % WIDTH, at), jnp.where(live[:, None], x.at[rows, at].multiply(0.5), x)

    return lax.while_loop(lambda s: jnp.any(s[0] < n), step, (0, jnp.zeros(x.shape[0], jnp.int32), x))[1:]


def by_two_that_begin_alike(x, w, n):
    def step(s):
        live = (s[0] < n)[:, None]
        return s[0] + 1, jnp.where(live, moved(s[1], w), s[1]), jnp.where(live, s[2] - s[1] + x, s[2])

    return lax.while_loop(lambda s: jnp.any(s[0] < n), step, (0, x, x))[1:]


APART = [by_two_that_begin_alike, by_vmap, by_vmap_until_small, by_counter, by_flags, by_done, by_done_at_most, by_number, by_counted_rows]


@pytest.mark.parametrize("function", APART)
def test_loops_whose_rows_end_on_their_own_are_split(function, small_too):
    args = [*values((ROWS, WIDTH), (WIDTH, WIDTH)), lengths()]
    assert ROWS in split_along(function, args)[0]


def test_sums_over_rows_add_up_where_all_rows_take_as_many_steps(small_too):
    def total(x, w, n):
        return lax.fori_loop(0, n[0], lambda _, s: (moved(s[0], w), s[1] + jnp.sum(s[0], 0)), (x, jnp.zeros(WIDTH)))

    def total_of_those_that_go_on(x, w, n):
        def step(s):
            live = (s[0] < n)[:, None]
            return s[0] + 1, jnp.where(live, moved(s[1], w), s[1]), s[2] + jnp.sum(s[1], 0)

        return lax.while_loop(lambda s: jnp.any(s[0] < n), step, (0, x, jnp.zeros(WIDTH)))[1:]

    args = [*values((ROWS, WIDTH), (WIDTH, WIDTH)), lengths()]
    assert split_along(total, args) == ({ROWS}, {ROWS})
    assert split_along(total_of_those_that_go_on, args) == (set(), set())


# --- those that do not -----------------------------------------------------------------------------------


def rows_that_have_ended_change(x, w, n):
    return lax.while_loop(lambda s: jnp.any(s[0] < n), lambda s: (s[0] + 1, moved(s[1] + n[:, None], w)), (0, x))[1]


def rows_go_on_again(x, w, n):
    def step(s):
        live = (s[0] % 3) < n % 3
        return s[0] + 1, jnp.where(live[:, None], moved(s[1], w), s[1])

    return lax.while_loop(lambda s: jnp.any((s[0] % 3) < n % 3) & (s[0] < 7), step, (0, x))[1]


def rows_end_by_a_counter_that_falls(x, w, n):
    def step(s):
        live = s[0] < n
        return s[0] - 1, jnp.where(live[:, None], moved(s[1], w), s[1])

    return lax.while_loop(lambda s: jnp.any(s[0] < n) & (s[0] > -4), step, (9, x))[1]


def another_condition_keeps_them(x, w, n):
    def step(s):
        return s[0] + 1, jnp.where((s[0] < n + 1)[:, None], moved(s[1], w), s[1])

    return lax.while_loop(lambda s: jnp.any(s[0] < n), step, (0, x))[1]


def rows_are_mixed(x, w, n):
    def step(s):
        live = s[0] < n
        return s[0] + 1, jnp.where(live[:, None], moved(s[1], w) - s[1].mean(0), s[1])

    return lax.while_loop(lambda s: jnp.any(s[0] < n), step, (0, x))[1]


def the_number_of_steps_is_a_result(x, w, n):
    def step(s):
        live = s[0] < n
        return s[0] + 1, jnp.where(live[:, None], moved(s[1], w), s[1])

    return lax.while_loop(lambda s: jnp.any(s[0] < n), step, (0, x))


def all_rows_end_with_the_first(x, w, n):
    def step(s):
        live = s[0] < n
        return s[0] + 1, jnp.where(live[:, None], moved(s[1], w), s[1])

    return lax.while_loop(lambda s: jnp.all(s[0] < n), step, (0, x))[1]


def all_rows_end_with_their_sum(x, w, n):
    return lax.while_loop(lambda x: jnp.sum(x**2) > 0.5, lambda x: 0.7 * moved(x, w), x)


MIXED = [
    rows_that_have_ended_change,
    rows_go_on_again,
    rows_end_by_a_counter_that_falls,
    another_condition_keeps_them,
    rows_are_mixed,
    the_number_of_steps_is_a_result,
    all_rows_end_with_the_first,
    all_rows_end_with_their_sum,
]


@pytest.mark.parametrize("function", MIXED)
def test_loops_whose_rows_depend_on_each_other_are_not_split(function, small_too):
    args = [*values((ROWS, WIDTH), (WIDTH, WIDTH)), lengths()]
    assert split_along(function, args)[0] == set()


@pytest.mark.parametrize("seed", tiered(range(40), range(4), range(4, 20)))
def test_whatever_is_split_is_the_same_loop_of_chunks(seed, small_too):
    """Random steps, conditions and ways to keep rows: what is found to be pointwise is checked against the whole."""
    rng = np.random.default_rng(seed)
    steps = [moved, lambda x, w: jnp.sort(x, 1) * 0.7, lambda x, w: x - 0.2 * x.mean(0), lambda x, w: jnp.sin(x) * w[0]]
    asks = [
        lambda i, x, n: i < n,
        lambda i, x, n: (i < n) & (jnp.sum(x, 1) < 5),
        lambda i, x, n: jnp.sum(x**2, 1) > 0.1,
        lambda i, x, n: (i < 5) & (jnp.max(x, 1) > x[0, 0] - 1),
        lambda i, x, n: ~((i >= n) | (jnp.min(x, 1) < -2)),
    ]
    keeps = [
        lambda live, new, old: jnp.where(live[:, None], new, old),
        lambda live, new, old: jnp.where(~live[:, None], old, new),
        lambda live, new, old: jnp.where(live[:, None] & (old < 3), new, old),
        lambda live, new, old: jnp.where(live[:, None] | (old < 0), new, old),
    ]
    step, ask, keep = (some[rng.integers(len(some))] for some in (steps, asks, keeps))

    def function(x, w, n):
        def body(s):
            return s[0] + 1, keep(ask(s[0], s[1], n), step(s[1], w), s[1])

        return lax.while_loop(lambda s: (s[0] < 12) & jnp.any(ask(s[0], s[1], n)), body, (0, x))[1]

    split_along(function, [*values((ROWS, WIDTH), (WIDTH, WIDTH), seed=seed), lengths()])


def test_in_a_scan(small_too):
    """A walk down a tree in each step of a search, for each row on its own."""

    def search(x, w, n):
        def step(x, t):
            return by_counter(x, w, n) * 0.5, x[:, 0]

        return lax.scan(step, x, jnp.arange(4))

    program = program_of(search, [*values((ROWS, WIDTH), (WIDTH, WIDTH)), lengths()])
    (call,) = {term.call for term in program.terms if isinstance(term, Block)}
    assert {program.indices[i].extent for i in bits(call.pointwise)} == {ROWS}


# --- plans -----------------------------------------------------------------------------------------------


def fits(t, start, data):
    """Curves fitted by Gauss and Newton's method, with residuals and derivatives carried."""

    def one(p, d):
        def model(p):
            return p[0] * jnp.exp(-p[1] * t) + p[2] - d

        def body(s):
            p, r, j, i, _ = s
            change = jnp.linalg.solve(j.T @ j + 1e-3 * jnp.eye(3), j.T @ r)
            return p - change, model(p - change), jax.jacfwd(model)(p - change), i + 1, jnp.max(jnp.abs(change))

        return lax.while_loop(lambda s: (s[3] < 9) & (s[4] > 1e-3), body, (p, model(p), jax.jacfwd(model)(p), 0, jnp.float32(1)))[0]

    return jax.vmap(one)(start, data)


def sensitivities(w, y, n):
    def step(s):
        i, y, g = s
        z, live = jnp.tanh(y @ w), i < n
        grown = g + y[:, :, None] * (1 - z**2)[:, None]
        return i + 1, jnp.where(live[:, None], z, y), jnp.where(live[:, None, None], grown, g)

    _, y, g = lax.while_loop(lambda s: jnp.any(s[0] < n), step, (0, y, jnp.zeros((*y.shape, y.shape[1]))))
    return y, g.sum(0)


def counted_sensitivities(count, w, y):
    """The same with a number of steps that an argument says."""

    def step(_, s):
        z = jnp.tanh(s[0] @ w)
        return z, s[1] + s[0][:, :, None] * (1 - z**2)[:, None]

    y, g = lax.fori_loop(0, count, step, (y, jnp.zeros((*y.shape, y.shape[1]))))
    return y, g.sum(0)


def counted_sums(count, x, v):
    """Sums over rows and columns of a matrix, more of them in each step."""
    distances = jnp.sum((x[:, None] - x[None]) ** 2, -1)

    def step(k, sums):
        kernel = jnp.exp(-distances * (k + 1))
        return sums[0] + kernel.sum(1), sums[1] + (kernel * v).sum(0)

    return lax.fori_loop(0, count, step, (jnp.zeros(len(x)), jnp.zeros(len(x))))


TIMES = np.linspace(0, 3, 64, dtype=np.float32)
PLANS = {
    "fits": lambda: (fits, [TIMES, np.full((700, 3), 1.1, np.float32), np.abs(values((700, 64))[0])]),
    "sensitivities": lambda: (sensitivities, [*values((16, 16), (900, 16), scale=0.3), lengths(900)]),
    "counted sums": lambda: (counted_sums, [np.int32(3), *values((500, 3), (500,))]),
    "counted sensitivities": lambda: (counted_sensitivities, [np.int32(4), *values((16, 16), (900, 16), scale=0.3)]),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_batch_of_loops_runs_in_chunks_of_rows(name):
    function, args = PLANS[name]()
    plan = squeezed(function, args, 0.25, tolerance=2e-3 if name == "fits" else 1e-4)
    assert plan.loops
