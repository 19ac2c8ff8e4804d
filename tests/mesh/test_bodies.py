"""How what loops carry and leave lies on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize
from eqsat_mem.api.meshes import described
from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.candidates import Forms
from eqsat_mem.events import Clock, Searched, listening
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.mesh import Placement
from eqsat_mem.mesh.bodies import BodySpecs
from eqsat_mem.mesh.choose import asking, left_as
from eqsat_mem.options import Options
from eqsat_mem.pipeline import BodyPlans
from eqsat_mem.request import rules_of
from tests.transforms.test_step_sums import transport


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def recurrent(xs, w):
    """Batches in shares, a carry that begins with zeros, and stacked results; and distances that nothing fits without loops."""

    def cell(h, x):
        h = jnp.tanh(x + h @ w)
        return h, h

    h, every = lax.scan(cell, jnp.zeros(xs.shape[1:]), xs)
    return h, every, jnp.sum(jnp.abs(h[:, None] - h), (1, 2))


def test_what_begins_with_zeros_and_what_is_stacked_lie_as_the_body_leaves_them(mesh):
    f = optimize(recurrent, memory_limit="4MiB", mesh=mesh, in_shardings=(P(None, "x"), P()))
    plan = f.plan(f32(64, 512, 64), f32(64, 64))
    assert plan.out_specs[:2] == [P("x", None), P(None, "x", None)]
    assert all(sent.times == 1 for sent in plan.collectives)
    assert plan.compiled_peak_bytes < 4 * 2**20  # 8 MiB for the stacked results alone, were they whole
    rng = np.random.default_rng(0)
    xs, w = (rng.standard_normal(shape).astype(np.float32) / 8 for shape in ((64, 512, 64), (64, 64)))
    for got, want in zip(f(xs, w), recurrent(xs, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)


def conjugate_gradients(x, b):
    def step(c, _):
        z, r, p, rr = c
        kernel = jnp.exp(-0.5 * jnp.sum((x[:, None] - x[None]) ** 2, -1))
        ap = kernel @ p + 10.0 * p
        a = rr / jnp.vdot(p, ap)
        z, r = z + a * p, r - a * ap
        new = jnp.vdot(r, r)
        return (z, r, r + (new / rr) * p, new), None

    return lax.scan(step, (jnp.zeros_like(b), b, b, jnp.vdot(b, b)), None, length=8)[0][0]


def test_what_turns_would_gather_is_gathered_before_them(mesh):
    f = optimize(conjugate_gradients, memory_limit="2MiB", mesh=mesh, in_shardings=P("x"), out_shardings=P("x"))
    plan = f.plan(f32(4096, 3), f32(4096))
    gathers = [sent for sent in plan.collectives if sent.kind == "all_gather" and sent.bytes == 4096 * 3 * 4]
    assert [sent.times for sent in gathers] == [1]
    rng = np.random.default_rng(0)
    x, b = rng.standard_normal((4096, 3)).astype(np.float32), rng.standard_normal(4096).astype(np.float32)
    np.testing.assert_allclose(f(x, b), conjugate_gradients(x, b), rtol=1e-3, atol=1e-5)


def counted(x, y):
    """A loop with a number among its carries, and a matrix of shares among its operands."""
    cost = jnp.sum((x[:, None] - y[None]) ** 2, -1)

    def step(_, fg):
        f, g = fg
        return -jax.nn.logsumexp(g[None] - cost, axis=1), -jax.nn.logsumexp(f[:, None] - cost, axis=0)

    return lax.fori_loop(0, 4, step, (jnp.zeros(len(x)), jnp.zeros(len(y))))


def test_a_loop_with_a_counter(mesh):
    f = optimize(counted, memory_limit="1MiB", mesh=mesh, in_shardings=P("x"))
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((n, 3)).astype(np.float32) for n in (1024, 512))
    for got, want in zip(f(x, y), counted(x, y), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_results_are_left_as_they_are_computed_and_operands_gathered_where_they_must(mesh):
    jaxpr = jax.make_jaxpr(lambda x, y: (x * 2, jnp.cumsum(x), jnp.exp(x[:, None] - y)))(f32(16), f32(16))
    program = load(jaxpr, ["x", "y"])
    shares = (("x",),)
    left = left_as(program, Placement(described(mesh), (shares, shares), (None,) * 3), CpuBackend.built_in(), {})
    assert left.specs[0] == shares
    assert left.specs[1] == ((),)
    assert left.specs[2].count(("x",)) == 1
    assert left.gathered


def test_what_loops_inside_exchange_counts_in_every_turn_of_theirs(mesh):
    def turns(count):
        return lambda a, v: lax.scan(lambda v, _: (jnp.tanh(a @ v), None), v, None, length=count)[0]

    def seconds(count):
        program = load(jax.make_jaxpr(turns(count))(f32(4096, 4096), f32(4096)), ["a", "v"])
        placement = Placement(described(mesh), ((("x",), ()), ((),)), (None,))
        backend = CpuBackend.built_in()
        loops = asking(placement, backend, 2**20, lambda body: load(body, [f"a{k}" for k in range(len(body.in_avals))]))
        return left_as(program, placement, backend, {}, loops).exchanged_s

    assert seconds(1) > 0
    assert seconds(50) == pytest.approx(50 * seconds(1))


def step(p, x, y):
    value, slope = jax.value_and_grad(lambda p: jnp.mean((jax.nn.gelu(x @ p["a"]) @ p["b"] - y) ** 2))(p)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, p, slope)


def test_weights_in_shares_are_updated_in_shares(mesh):
    """Batches and weights both lie along one mesh axis: weights are gathered, and gradients summed into the shares that are updated."""
    f = optimize(step, memory_limit="1792KiB", mesh=mesh, in_shardings=P("x"), out_shardings=(P(), P("x")))
    plan = f.plan({"a": f32(128, 512), "b": f32(512, 128)}, f32(2048, 128), f32(2048, 128))
    kinds = {sent.kind for sent in plan.collectives if sent.bytes > 1024}
    assert kinds == {"all_gather", "psum_scatter"}


def test_of_plans_that_take_about_as_long_the_one_that_receives_less_is_taken():
    grid = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    both = P(("data", "model"))
    kernel = optimize(
        lambda x, y, v: jnp.exp(-jnp.sum(jnp.abs(x[:, None] - y), -1)) @ v,
        memory_limit="2MiB",
        mesh=grid,
        in_shardings=(both, P(), P()),
        out_shardings=both,
    )
    assert kernel.plan(f32(8192, 3), f32(8192, 3), f32(8192, 4)).received_bytes == 0


def test_a_body_with_less_room_than_its_share_of_what_it_leaves_is_not_searched(mesh):
    body = jax.make_jaxpr(lambda c, x: jnp.exp(c[:, None] - x) @ x)(f32(8000), f32(500))
    backend, options, rows = CpuBackend.built_in(), Options(memory_limit=2**30, verify=False), ((("x",),), ((),))
    placement, lies = Placement(described(mesh), rows, rows[:1]), BodySpecs(rows, rows[:1])
    forms = Forms(load(body, "cx"), rules_of(options, backend), options, backend, BodyPlans(), Clock(), placement)
    searched = []
    with listening(lambda event: searched.append(event) if isinstance(event, Searched) else None):
        hopeless, held = forms._body(placement, backend, True, body, lies, 3999)
        assert not searched
        assert hopeless.peak_bytes > held > 2_000_000
        assert forms._body(placement, backend, True, body, lies, 2**17)[1] <= 2**17
        assert searched


def test_sums_that_steps_carry_are_read_by_each_device_part_by_part(mesh):
    """The gradient begins with a number that stands for a vector, and carries a sum as large as the distances."""
    function = jax.value_and_grad(transport)
    f = optimize(function, memory_limit="2MiB", mesh=mesh, in_shardings=P("x"), out_shardings=(P(), P("x")))
    plan = f.plan(f32(4096, 3), f32(4096, 3))
    assert plan.compiled_peak_bytes < 2 * 2**20  # the distances of a device's points are 8 MiB
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((4096, 3)).astype(np.float32) for _ in range(2))
    for got, want in zip(f(x, y), jax.jit(function)(x, y), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5 * float(np.abs(want).max()))


def chosen(which, x, y):
    return lax.switch(which, [lambda d: jnp.exp(-d).sum(1), lambda d: (1 / (1 + d)).sum(1)], jnp.sum((x[:, None] - y) ** 2, -1))


def summed(count, x, y):
    d = jnp.sum((x[:, None] - y) ** 2, -1)
    return lax.fori_loop(
        0, count, lambda k, sums: (sums[0] + jnp.exp(-d * k).sum(1), sums[1] + jnp.cos(d * k).sum(0)), (0 * x[:, 0], 0 * y[:, 0])
    )


@pytest.mark.parametrize("function", [chosen, summed])
@pytest.mark.parametrize("specs", [(P("x"), P()), (P(), P("x"))])
def test_choices_and_loops_add_up_what_each_device_sums(mesh, function, specs):
    rng = np.random.default_rng(0)
    points = [rng.standard_normal((n, 3)).astype(np.float32) for n in (800, 744)]
    want = jax.jit(function)(np.int32(1), *points)
    fast = optimize(function, memory_limit=110_000)
    args = [np.int32(1), *(jax.device_put(a, jax.NamedSharding(mesh, spec)) for a, spec in zip(points, specs, strict=True))]
    assert not fast.plan(*args).unchanged
    for got, expected in zip(jax.tree.leaves(fast(*args)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)
