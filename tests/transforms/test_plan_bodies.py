"""Bodies of loops are planned for few limits, and a training step with a scan over its layers for any limit that checkpoints reach."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem import pipeline
from eqsat_mem.backends.xla import compiled_peak
from eqsat_mem.deadline import NEVER
from eqsat_mem.events import Began, Searched, listening
from eqsat_mem.frontend.fingerprint import fingerprint, program_fingerprint
from eqsat_mem.frontend.load import load
from eqsat_mem.options import Options
from eqsat_mem.testing import same_values
from eqsat_mem.transforms.plan_bodies import RUNGS, BodyPlan, Frontier, floor_bytes
from tests.oracles.targets import CPU


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# --- the frontier of one body -------------------------------------------------------------------------


def planner(asked, least=100, whole=1000):
    """A body whose plans take as long as their memory is short, down to ``least`` bytes; what is planned is noted."""

    def plan(limit):
        asked.append(limit)
        peak = min(max(limit // 10 * 10, least), whole)  # what is held comes in steps
        return BodyPlan(None, peak, whole, peak, 1e6 / peak, fits=peak <= limit, least=0 if peak <= limit else peak)

    return plan


def test_the_first_plan_is_for_the_limit_itself_and_others_for_less():
    asked, frontier = [], Frontier()
    assert frontier.within(777, planner(asked)).peak_bytes == 770
    assert frontier.within(770, planner(asked)).peak_bytes == 770
    assert asked == [777]
    assert frontier.within(600, planner(asked)).peak_bytes <= 600
    assert 600 / 2 ** (1 / RUNGS) <= asked[1] <= 600


def test_what_fits_with_more_room_is_the_plan():
    asked, frontier = [], Frontier()
    first = frontier.within(5000, planner(asked))
    assert frontier.within(1000, planner(asked)) is first
    assert frontier.within(9000, planner(asked)).peak_bytes == 1000


def test_where_more_room_does_not_do_less_does_not_either():
    asked, frontier = [], Frontier()
    failed = frontier.within(99, planner(asked))
    assert not failed.fits
    assert frontier.within(50, planner(asked)) is failed
    assert asked == [99]


def test_a_rung_that_is_too_low_is_followed_by_the_limit_itself():
    asked, frontier = [], Frontier()
    frontier.within(1000, planner(asked))
    assert frontier.within(105, planner(asked)).fits
    assert asked[1] < 100 < asked[2] == 105


def test_what_fits_is_the_plan_until_a_rung_has_more_room():
    asked, frontier = [], Frontier()
    first = frontier.within(1000, planner(asked, least=995))
    assert frontier.within(1010, planner(asked, least=995)) is first  # the rung below would be for 861 bytes
    assert frontier.within(1300, planner(asked, whole=2000)) is not first
    assert asked[0] == 1000 < asked[1] <= 1300


def test_nothing_fits_in_less_than_a_search_came_to():
    asked, frontier = [], Frontier()
    failed = frontier.within(60, planner(asked))
    assert frontier.within(99, planner(asked)) is failed
    assert asked == [60]
    assert frontier.within(100, planner(asked)).fits


def test_a_body_that_was_not_searched_tells_nothing_of_more_room():
    frontier = Frontier()
    frontier.within(60, lambda limit: BodyPlan(None, 500, 500, 500, fits=False))
    assert frontier.within(99, planner([], least=90)).fits


def test_many_limits_take_few_plans():
    asked, frontier = [], Frontier()
    for limit in range(1000, 100, -1):
        assert frontier.within(limit, planner(asked)).peak_bytes <= limit
    assert len(asked) <= RUNGS * 4 + 2


@pytest.mark.parametrize("seed", range(20))
def test_what_the_frontier_gives_fits_where_anything_does(seed):
    rng, asked, frontier = np.random.default_rng(seed), [], Frontier()
    least, whole = sorted(map(int, rng.integers(10, 5000, 2)))
    for limit in map(int, rng.integers(1, 6000, 60)):
        plan = frontier.within(limit, planner(asked, least, whole))
        assert (plan.peak_bytes <= limit) == (limit >= least), (limit, least)
    assert len(asked) == len(set(asked))


# --- equal bodies -------------------------------------------------------------------------------------


def body(number=2.0, shape=(3,), table=None):
    def function(x):
        y = jax.nn.softmax(jnp.sin(x) * number)
        return lax.scan(lambda c, z: (c + z, c), y, jnp.stack([y, y]))[1] + (0 if table is None else jnp.asarray(table)[:3])

    return jax.make_jaxpr(function)(f32(*shape))


def test_two_traces_of_the_same_lines_are_one_body():
    assert fingerprint(body()) == fingerprint(body())
    assert hash(fingerprint(body())) == hash(fingerprint(body()))


def test_no_number_is_one_number_and_zero_has_a_sign():
    def divided(number):
        return jax.make_jaxpr(lambda x: lax.reduce(x, number, lax.add, (0,)) * number)(f32(3))

    assert fingerprint(divided(float("nan"))) == fingerprint(divided(float("nan")))
    assert fingerprint(divided(0.0)) != fingerprint(divided(-0.0))


def test_a_small_constant_counts_by_its_value():
    one, same, other = (fingerprint(body(table=np.full(5, value))) for value in (1.0, 1.0, 2.0))
    assert one == same != other


@pytest.mark.parametrize(
    "other", [{"number": 3.0}, {"shape": (4,)}, {"shape": (1, 3)}, {"number": -0.0}, {"number": jnp.bfloat16(2)}, {"table": np.ones(5)}]
)
def test_what_differs_is_another_body(other):
    assert fingerprint(body()) != fingerprint(body(**other))


def test_equal_functions_on_different_lines_are_two_bodies():
    one = jax.make_jaxpr(lambda x: x + 1)(f32(3))
    other = jax.make_jaxpr(lambda x: x + 1)(f32(3))
    assert str(one) == str(other)
    assert fingerprint(one) != fingerprint(other)  # each tells users of its own line


def stepping(seed, factor=2.0, swapped=False, noise=0, size=40):
    """A body with a scan inside, in which axes of extent one come and go as a ``seed`` says."""
    rng, table = np.random.default_rng(seed), np.full((size, 1), noise, np.float32)

    def again(x):
        axis = int(rng.integers(0, x.ndim + 1))
        return jnp.squeeze(jnp.expand_dims(x, axis), axis) if rng.random() < 0.7 else x

    def step(c, x):
        c, x = again(c), again(x)
        distances = again(jnp.abs(c[:, None] - x[None]))
        inner = lax.scan(lambda z, y: (again(z) + again(jnp.exp(-distances) @ y), None), c, jnp.stack([x, x * factor]))[0]
        results = again(jnp.tanh(inner)), again(jnp.sum(distances, 0)) + table[:, 0]
        return results[::-1] if swapped else results

    return step


def of_steps(*options, **others):
    return jax.make_jaxpr(stepping(*options, **others))(f32(40), f32(40))


def test_bodies_that_load_as_one_program_are_planned_once():
    one, other = of_steps(0), of_steps(1)
    assert fingerprint(one) != fingerprint(other)
    plans, options, searched = pipeline.BodyPlans(), Options(memory_limit=2**30, verify=False), []
    first = plans.plan(options, CPU, NEVER, one, 4000)
    with listening(lambda event: searched.append(event) if isinstance(event, Searched) else None):
        assert plans.plan(options, CPU, NEVER, other, 4000) is first
        assert not searched
        assert plans.plan(options, CPU, NEVER, of_steps(1, factor=3.0), 4000) is not first, "the scan inside is another"
        assert searched
    assert plans.written(options, CPU, one, 4000).seconds == plans.written(options, CPU, other, 4000).seconds


@pytest.mark.parametrize("other", [{"factor": 3.0}, {"swapped": True}, {"noise": 1}])
def test_what_differs_is_another_program(other):
    def program(*options, **others):
        closed = of_steps(*options, **others)
        return program_fingerprint(load(closed, ["c", "x"]))

    inside = {seed: program(seed, noise=0) for seed in range(4)}
    assert program(0) == inside[0]
    assert program(0, **other) not in inside.values()


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_of_one_body_computes_what_equal_ones_do(seed):
    size = 300
    steps = [stepping(10 * seed + k, 1.5, size=size) for k in range(3)]

    def function(a, xs):
        for step in steps:
            a, stacked = lax.scan(step, a, xs)
            xs = xs + jnp.tanh(stacked / size)
        return a, xs.sum(0)

    rng = np.random.default_rng(seed)
    args = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((size,), (5, size))]
    limit = size * size * 2
    optimised = eqsat_mem.optimize(function, memory_limit=limit, verify=False)
    assert optimised.plan(*args).peak_bytes <= limit
    comparison = same_values(function, optimised, args)
    assert comparison.same, comparison


# --- what no plan gets below --------------------------------------------------------------------------


def test_what_a_scan_stacks_is_there_whole():
    def stacked(x):
        ys = lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=50)[1]
        return jnp.sum(lax.scan(lambda c, y: (c + y, y * 2), x, jnp.cos(ys))[1])

    def mixed(x):
        ys = lax.scan(lambda c, _: (jnp.sin(c) + c[::-1], c), x, None, length=50)[1]
        return jnp.sum(lax.scan(lambda c, y: (c[::-1] + y, y * 2), x, jnp.cos(ys))[1])

    program = load(jax.make_jaxpr(mixed)(f32(20_000)), ["x"])
    assert floor_bytes(program) == 80_000 * (1 + 1 + 2 * 50), "the argument, the carry, and what is read and stacked"
    program = load(jax.make_jaxpr(stacked)(f32(20_000)), ["x"])
    assert floor_bytes(program) == 80_000 + 4 * (1 + 2 * 50), "loops over rows leave one of them"


def test_what_a_scan_reads_of_the_arguments_counts_once():
    program = load(jax.make_jaxpr(lambda xs: lax.scan(lambda c, x: (c + x, None), jnp.zeros(1000), xs)[0])(f32(50, 1000)), ["xs"])
    assert floor_bytes(program) == 200_000 + 4, "with one row of the carry"


# --- a training step ----------------------------------------------------------------------------------


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)


def layer(x, p):
    h = norm(x)
    q, k, v = (jnp.einsum("btd,dhe->bthe", h, p[name]) for name in "qkv")
    a = jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", q, k), -1)
    x = x + jnp.einsum("bhts,bshe,hed->btd", a, v, p["o"])
    return x + jax.nn.gelu(norm(x) @ p["w1"]) @ p["w2"], None


def step(remember, p, x, y):
    """One step of gradient descent through a scan over layers; ``remember`` is what becomes of a layer."""

    def loss(p):
        return jnp.mean((lax.scan(remember(layer), x, p)[0] - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(p)
    return value, jax.tree.map(lambda a, b: a - 0.1 * b, p, gradient)


def arguments(layers, batch, words, width, heads=4):
    inner = width // heads
    shapes = {"q": (width, heads, inner), "k": (width, heads, inner), "v": (width, heads, inner), "o": (heads, inner, width)}
    shapes |= {"w1": (width, 4 * width), "w2": (4 * width, width)}
    return {name: f32(layers, *shape) for name, shape in shapes.items()}, f32(batch, words, width), f32(batch, words, width)


def traced(size, remember=lambda layer: layer):
    args = arguments(*size)
    return jax.make_jaxpr(lambda *leaves: jax.tree.leaves(step(remember, *jax.tree.unflatten(jax.tree.structure(args), leaves))))(
        *jax.tree.leaves(args)
    )


SMALL = 6, 2, 64, 32


def planned(size, limit):
    """The plan of a step, the limits for which bodies were planned on the way, and how many forms were searched."""
    jaxpr, events = traced(size), []
    with listening(events.append):
        plan = pipeline.plan(jaxpr, Options(memory_limit=limit, verify=False), [f"x{k}" for k in range(len(jaxpr.in_avals))], "step", CPU)
    return plan, [event.limit_bytes for event in events if isinstance(event, Began)][1:], sum(isinstance(e, Searched) for e in events)


def test_a_body_with_less_room_than_its_results_is_not_searched():
    body = jax.make_jaxpr(lambda c, x: jnp.exp(c[:, None] - x) @ x)(f32(1000), f32(500))
    plans, options, searched = pipeline.BodyPlans(), Options(memory_limit=2**30, verify=False), []
    with listening(lambda event: searched.append(event) if isinstance(event, Searched) else None):
        hopeless = plans.plan(options, CPU, NEVER, body, 4 * 1500 + 3999)
        assert not searched
        assert (hopeless.schedule, hopeless.fits) == (None, False)
        assert hopeless.held == hopeless.written == plans.written(options, CPU, body, 1).held > 2_000_000
        assert plans.plan(options, CPU, NEVER, body, 2**20).fits
        assert searched


@pytest.fixture(scope="module")
def reached():
    """The bytes that the small step holds as written, and with ``jax.checkpoint`` of its layers."""
    plain, checkpointed = (traced(SMALL, remember) for remember in (lambda layer: layer, jax.checkpoint))
    return tuple(compiled_peak(jax.extend.core.jaxpr_as_fun(function), function.in_avals)[0] for function in (plain, checkpointed))


def test_what_checkpoints_of_the_body_reach_takes_one_plan_of_each_body(reached):
    whole, lean = reached
    assert lean < whole / 2
    plan, bodies, searched = planned(SMALL, lean)
    assert plan.peak_bytes <= lean
    assert len(bodies) <= 2, "one forward, one backward"
    assert searched <= 3, "no form that cannot fit"


def test_any_limit_down_to_it_is_met(reached):
    whole, lean = reached
    for share in (0.75, 0.5, 0.25):
        plan, bodies, _ = planned(SMALL, int(lean + share * (whole - lean)))
        assert plan.peak_bytes <= plan.limit_bytes
        assert len(bodies) <= 4


@pytest.mark.slow
def test_a_step_within_what_checkpoints_hold_computes_the_same():
    size = 4, 4, 128, 128
    args = [np.random.default_rng(k).standard_normal(a.shape, np.float32) * 0.1 for k, a in enumerate(jax.tree.leaves(arguments(*size)))]
    plain, checkpointed = (jax.extend.core.jaxpr_as_fun(traced(size, remember)) for remember in (lambda layer: layer, jax.checkpoint))
    most, _ = compiled_peak(checkpointed, args)
    optimised = eqsat_mem.optimize(plain, memory_limit=most)
    assert optimised.plan(*args).compiled_peak_bytes <= most
    comparison = same_values(plain, optimised, args)
    assert comparison.same, comparison


def attended(w, h):
    """Iterations with a softmax that all steps read, and their gradient."""
    q = h @ w
    a = jax.nn.softmax(q @ q.T / 8.0, -1)
    return jnp.mean(lax.scan(lambda z, _: (jnp.tanh(a @ z + h), None), h, None, length=6)[0] ** 2)


@pytest.mark.parametrize("mib", [8.4, 9.1])
def test_bodies_get_less_room_until_they_hold_less(mib):
    """What lies around them takes a little more than is counted for it, and they hold a little less than they may."""
    function = jax.value_and_grad(attended)
    limit = int(mib * 2**20)
    plan = eqsat_mem.optimize(function, memory_limit=limit, verify=False).plan(f32(32, 32), f32(3000, 32))
    assert plan.peak_bytes <= limit
