"""Sums that loops carry: each device adds its parts in the turns, and what devices exchange for them is exchanged once, after the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize
from tests.mesh.test_bodies import f32

STEPS, ROWS, WIDTH = 6, 2048, 64
LIMIT = "1792KiB"


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def drawn(seed, *shapes):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(s.shape).astype(s.dtype) / 8 for s in shapes)


def beside_pairs(function):
    """A function, and one result more that no device can compute under the limit without a loop: so a plan is made."""

    def both(w, xs):
        return function(w, xs), jnp.sum(jnp.exp(xs[0] @ xs[0].T) @ xs[0])

    return both


def exchanged(plan, parts=1):
    """The exchanges of as many bytes as such a part of the weights has, or more: but for what pairs need."""
    return [sent for sent in plan.collectives if sent.bytes >= WIDTH * WIDTH * 4 // parts and sent.kind != "all_gather"]


def agree(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-4, atol=1e-5 * np.abs(b).max())


def planned(function, mesh, seed, limit=LIMIT, **specs):
    """The plan of a function beside pairs, whose values have been compared with those of ``jit``."""
    args = f32(WIDTH, WIDTH), f32(STEPS, ROWS, WIDTH)
    function = beside_pairs(function)
    f = optimize(function, memory_limit=limit, mesh=mesh, **{"in_shardings": (P(), P(None, "x")), "out_shardings": P(), **specs})
    return compared(f, function, seed, *args)


def compared(f, function, seed, *args):
    """The plan that an optimised function has for these shapes, where its values are those of ``jit``."""
    given = drawn(seed, *args)
    agree(f(*given), jax.jit(function)(*given))
    return f.plan(*args)


def recurrent(w, xs):
    """Gradient of a recurrent network: the cotangent of its weights is a sum over steps and rows."""
    return jax.grad(lambda w: jnp.sum(lax.scan(lambda h, x: (jnp.tanh(x + h @ w), None), jnp.zeros(xs.shape[1:]), xs)[0] ** 2))(w)


def accumulated(w, xs):
    """Gradients of one batch after the other."""

    def add(total, x):
        value, slope = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return (total[0] + value, total[1] + slope), None

    return lax.scan(add, (jnp.zeros(()), jnp.zeros_like(w)), xs)[0]


def counted(w, xs):
    """The same of a loop that counts its turns, and ends when it has counted enough of them."""

    def add(state):
        k, total = state
        return k + 1, total + xs[k].T @ jnp.tanh(xs[k] @ w)

    return lax.while_loop(lambda state: state[0] < jnp.sum(w[0] < 9) % 9 + STEPS - 1, add, (0, jnp.zeros_like(w)))[1]


def subtracted(w, xs):
    """Two sums over rows, one of which is subtracted."""
    return lax.scan(lambda c, x: (c - x.T @ jnp.sin(x @ w) + jnp.cos(x).T @ x, None), jnp.zeros_like(w), xs)[0]


def nested(w, xs):
    """A sum in a loop that is added to one around it."""

    def around(total, x):
        own = lax.fori_loop(0, 3, lambda k, c: c + x.T @ jnp.tanh(x @ w + k), jnp.zeros_like(w))
        return total + own, None

    return lax.scan(around, jnp.zeros_like(w), xs)[0]


def continued(w, xs):
    """A sum that loops in a loop go on with."""

    def around(total, x):
        return lax.fori_loop(0, 3, lambda k, c: c + x.T @ jnp.tanh(x @ w + k), total), None

    return lax.scan(around, jnp.ones_like(w), xs)[0]


def in_segments(w, xs):
    """The gradient of a recurrent network whose steps are computed again segment by segment."""

    def loss(w):
        steps = jax.checkpoint(lambda h, part: lax.scan(lambda h, x: (jnp.tanh(x + h @ w), None), h, part))
        return jnp.sum(lax.scan(steps, jnp.zeros(xs.shape[1:]), xs.reshape(2, -1, *xs.shape[1:]))[0] ** 2)

    return jax.grad(loss)(w)


@pytest.mark.parametrize("function", [recurrent, accumulated, counted, subtracted, continued, in_segments])
def test_devices_sum_once_what_turns_add(function, mesh):
    plan = planned(function, mesh, 0)
    assert [(sent.kind, sent.times) for sent in exchanged(plan)] == [("psum", 1)]
    assert all(sent.times == 1 for sent in plan.collectives if sent.bytes >= ROWS * WIDTH * 4)  # no state is gathered in turns


def test_loops_in_loops_exchange_once_for_each_turn_around_at_most(mesh):
    assert 1 <= sum(sent.times for sent in exchanged(planned(nested, mesh, 1))) <= STEPS


def test_a_sum_that_is_wanted_in_shares_is_handed_out_once(mesh):
    plan = planned(recurrent, mesh, 2, out_shardings=(P("x"), P()))
    assert [(sent.kind, sent.times) for sent in exchanged(plan, parts=8)] == [("psum_scatter", 1)]


def test_weights_in_shares_along_another_axis_have_sums_in_shares():
    grid = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = {"in_shardings": (P(None, "model"), P(None, "data")), "out_shardings": ((P(), P(None, "model")), P())}
    plan = planned(accumulated, grid, 3, "3MiB", **specs)
    sums = [(sent.kind, sent.axes, sent.times) for sent in exchanged(plan, parts=2)]
    assert [sent for sent in sums if sent[1] == ("data",)] == [("psum", ("data",), 1)]
    assert sums[:-1] in ([], [("psum_scatter", ("model",), 1)])  # of steps in shares, where these are dealt out too


def test_a_sum_that_does_not_fit_whole_stays_in_shares(mesh):
    """Each device has a share of 1 MiB of a sum of 8 MiB, of which every turn sums what it adds."""

    def outer(xs, ys):
        return lax.scan(lambda c, xy: (c + jnp.tanh(xy[0]).T @ xy[1], None), jnp.zeros((1024, 2048)), (xs, ys))[0]

    args = f32(STEPS, 256, 1024), f32(STEPS, 256, 2048)
    f = optimize(outer, memory_limit="8MiB", mesh=mesh, in_shardings=P(None, "x"), out_shardings=P("x"))
    assert compared(f, outer, 4, *args).compiled_peak_bytes <= 8 * 2**20


def test_sums_that_turns_or_their_condition_read_are_summed_in_the_turns(mesh):
    def read(w, xs):
        def add(state):
            k, total, decayed = state
            slope = xs[k % STEPS].T @ jnp.tanh(xs[k % STEPS] @ (w - 0.01 * total))
            return k + 1, total + slope, 0.9 * decayed + slope

        return lax.while_loop(lambda state: jnp.sum(state[2] ** 2) < 1e-2, add, (0, jnp.zeros_like(w), jnp.zeros_like(w)))

    planned(read, mesh, 5)


def test_sums_that_are_stacked_too_are_summed_once_in_each_turn(mesh):
    def stacked(w, xs):
        return lax.scan(lambda c, x: (c + x.T @ jnp.tanh(x @ w), c), jnp.zeros_like(w), xs)

    assert sum(sent.times for sent in exchanged(planned(stacked, mesh, 7))) == STEPS


def test_of_many_sums_those_are_whole_that_have_room(mesh):
    """Eight sums of 1 MiB each, of which devices may have shares: there is no room for all of them on each device."""

    def sums(xs):
        def step(carry, x):
            return tuple(c + jnp.tanh(x * (k + 1)).T @ x for k, c in enumerate(carry)), None

        return lax.scan(step, (jnp.zeros((512, 512)),) * 8, xs)[0]

    f = optimize(sums, memory_limit="6656KiB", mesh=mesh, in_shardings=P(None, "x"), out_shardings=P("x"))
    assert compared(f, sums, 8, f32(STEPS, 512, 512)).compiled_peak_bytes <= 6656 * 2**10


def test_narrow_sums_are_as_accurate_as_on_one_device(mesh):
    def summed(xs):
        return lax.scan(lambda c, x: (c + x.T @ x, None), jnp.zeros((WIDTH, WIDTH), jnp.bfloat16), xs)[0]

    (xs,) = drawn(6, f32(STEPS, ROWS, WIDTH))
    f = optimize(summed, memory_limit="1MiB", mesh=mesh, in_shardings=P(None, "x"), out_shardings=P())
    narrow = jnp.asarray(xs, jnp.bfloat16)
    want = np.einsum("tnd,tne->de", *(np.asarray(narrow, np.float64),) * 2)
    errors = (np.abs(np.asarray(values, np.float64) - want).max() for values in (f(narrow), jax.jit(summed)(narrow)))
    ours, theirs = errors
    assert ours <= 3 * theirs


CARRIES = {
    "state": (lambda w: jnp.zeros((ROWS, WIDTH)), lambda c, h, x, w: jnp.tanh(x + h @ w)),
    "sum": (jnp.zeros_like, lambda c, h, x, w: c + h.T @ x),
    "two sums": (jnp.zeros_like, lambda c, h, x, w: (h.T @ jnp.cos(x) + c) - jnp.sin(x).T @ h),
    "sum and more": (jnp.zeros_like, lambda c, h, x, w: c + h.T @ x + w),
    "from ones": (jnp.ones_like, lambda c, h, x, w: c + h.T @ x),
    "decayed": (jnp.zeros_like, lambda c, h, x, w: 0.5 * c + h.T @ x),
    "columns": (lambda w: jnp.zeros(WIDTH), lambda c, h, x, w: c + (h * x).sum(0)),
    "rows": (lambda w: jnp.zeros(ROWS), lambda c, h, x, w: c + (h @ w * x).sum(1)),
    "largest": (lambda w: jnp.zeros(WIDTH), lambda c, h, x, w: jnp.maximum(c, (h * x).max(0))),
    "whole": (jnp.zeros_like, lambda c, h, x, w: c + w @ w),
    "negative": (jnp.zeros_like, lambda c, h, x, w: -c + x.T @ h),
    "number": (lambda w: jnp.zeros(()), lambda c, h, x, w: c + jnp.sum(h * x)),
}
"""The first value of a carry, and the next of the last one, the state, a step's rows and the weights."""


@pytest.mark.parametrize(("seed", "segments"), [*((seed, 1) for seed in range(6)), (6, 2), (7, 3), (8, 2), (9, 3)])
def test_random_loops_compute_the_same(seed, segments, mesh):
    rng = np.random.default_rng(seed)
    names = ["state", *rng.choice([name for name in CARRIES if name != "state"], 5, replace=False)]
    reads_all = rng.integers(4) == 0

    def function(w, xs):
        begun = tuple(CARRIES[name][0](w) for name in names)

        def step(carry, x):
            h = carry[0]
            new = tuple(CARRIES[name][1](c, h, x, w) for name, c in zip(names, carry, strict=True))
            return new, sum(jnp.sum(c) for c in new) if reads_all else jnp.sum(new[0])

        def steps(carry, some):
            return lax.scan(step, carry, some)

        parts = xs.reshape(segments, -1, *xs.shape[1:])
        return lax.scan(steps, begun, parts) if segments > 1 else lax.scan(step, begun, xs)

    assert planned(function, mesh, seed, 2**20 * int(rng.choice([2, 3]))).loops
