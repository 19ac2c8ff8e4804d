"""Shifted reads of an axis that is dealt out: devices send their neighbours the rows that these need, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize
from eqsat_mem.egraph.extract import original
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.frontend.load import load
from eqsat_mem.mesh.pieces import is_pieces, with_pieces
from tests.oracles.collectives import collectives
from tests.oracles.evaluation import values
from tests.oracles.stencils import failure, slid, square
from tests.tiers import tiered

ROWS, WIDTH = 4096, 32
ROW = 4 * WIDTH
S, R = P("x"), P()


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def laplacian(u):
    return u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]


def heat(u):
    return lax.fori_loop(0, 6, lambda _, u: u.at[1:-1, 1:-1].add(0.1 * laplacian(u)), u)


def inside(u):
    return jnp.pad(u[1:-1, 1:-1] + 0.1 * laplacian(u), 1)


def wave(u):
    def step(both, _):
        u, v = both
        v = v + 0.1 * (jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) - 2 * u)
        return (u + v, v), None

    return lax.scan(step, (u, 0.5 * u), None, length=4)[0][0]


def variation(u):
    return jax.grad(lambda u: jnp.sum(jnp.sqrt(jnp.diff(u, axis=0) ** 2 + 0.1)) + jnp.sum(jnp.cos(jnp.diff(u, axis=1))))(u)


def fourth(u):
    return jax.grad(lambda u: jnp.mean(jnp.tanh(u[4:] - 4 * u[3:-1] + 6 * u[2:-2] - 4 * u[1:-3] + u[:-4]) ** 2))(u)


def shifted(u):
    return jnp.tanh(u) * jnp.concatenate([u[:1], u[:-1]])


def edges(u):
    p = jnp.pad(u, ((2, 2), (0, 0)), mode="edge")
    return u - 0.1 * (3 * p[2:-2] - 4 * p[1:-3] + p[:-4])


def clamped(u):
    u = u.at[0].set(1.0)
    return u.at[-1].set(u[-2])


def far(u):
    return u * jnp.roll(u, ROWS // 4 + 3, 0)


def pooled(u):
    return jnp.maximum(u[::2], u[1::2])


PROGRAMS = {heat: 6 * 3, inside: 4, wave: 4 * 2, variation: 4, fourth: 16, shifted: 1, edges: 2, clamped: 2, far: ROWS // 8 + 3, pooled: 0}
"""Programs, and the most rows that a device receives."""


def planned(program, mesh, u, limit="500KiB", shares=S):
    """The plan of a program, its compiled text and its results. Pairwise distances beside it do not fit the limit as they are written."""

    def both(u, w):
        return program(u), jnp.sum(jnp.cumsum(jnp.abs(w[:, None] - w), 2), (1, 2))

    w = np.random.default_rng(1).standard_normal((96, 64)).astype(np.float32)
    f = optimize(both, memory_limit=limit, mesh=mesh, in_shardings=(shares, R), out_shardings=(shares, S))
    plan = f.plan(u, w)
    assert not plan.unchanged
    placed = jax.device_put(u, NamedSharding(mesh, shares)), jax.device_put(w, NamedSharding(mesh, R))
    return plan, f.lower(*placed).compile().as_text(), f(*placed)[0]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_devices_receive_neighbouring_rows_alone(program, mesh):
    u = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    plan, text, got = planned(program, mesh, u)
    found = collectives(text, 8)
    assert sum(received for _, received in found.values()) <= PROGRAMS[program] * ROW, found
    assert plan.received_bytes <= PROGRAMS[program] * ROW
    assert set(found) <= {"collective-permute"}
    np.testing.assert_allclose(got, jax.jit(program)(u), rtol=1e-5, atol=1e-6)


def test_rows_of_any_axis_are_received(mesh):
    def steps(u):
        return u + 0.1 * (jnp.roll(u, 1, 1) - jnp.roll(u, -2, 1)) + jnp.pad(jnp.diff(u, axis=1), ((0, 0), (1, 0)))

    u = np.random.default_rng(0).standard_normal((WIDTH, ROWS)).astype(np.float32)
    _, text, got = planned(steps, mesh, u, shares=P(None, "x"))
    assert sum(received for _, received in collectives(text, 8).values()) <= 4 * ROW
    np.testing.assert_allclose(got, jax.jit(steps)(u), rtol=1e-5, atol=1e-6)


def test_shares_of_two_mesh_axes_have_neighbours_along_both():
    grid = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def steps(u):
        return u + 0.1 * (jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1) - 4 * u)

    u = np.random.default_rng(0).standard_normal((512, 256)).astype(np.float32)
    _, text, got = planned(steps, grid, u, shares=P("x", "y"))
    found = collectives(text, 8)
    assert found["collective-permute"][1] <= 4 * 2 * (128 + 128)
    assert found.keys() <= {"collective-permute", "all-reduce"}  # the distances beside it are summed
    np.testing.assert_allclose(got, jax.jit(steps)(u), rtol=1e-5, atol=1e-6)


def test_axes_of_one_extent_that_are_shifted_alike_are_two():
    u = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    for rolled in (lambda u: jnp.roll(u, 1, 0) + 2 * jnp.roll(u, 1, 1), lambda u: jnp.diff(u, axis=0)[:, 1:] * jnp.diff(u, axis=1)[1:]):
        program = load(jax.make_jaxpr(rolled)(u), ["u"])
        cut = with_pieces(original(program, load_rules()), dict.fromkeys(range(len(program.indices)), ("x",))).program
        assert {term.call.params["axis"] for term in cut.terms if is_pieces(term)} == {0, 1}
        np.testing.assert_allclose(values([u], cut)[0][0], rolled(u), rtol=1e-6)


def test_what_all_rows_are_needed_for_is_no_matter_of_neighbours(mesh):
    """Halves side by side: each device needs rows of most others, and the plan is none that sends them from neighbour to neighbour."""
    u = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    _, _, got = planned(lambda u: jnp.concatenate([u[: ROWS // 2] * u[ROWS // 2 :], u[::2]]), mesh, u, "800KiB")
    np.testing.assert_allclose(got, np.concatenate([u[: ROWS // 2] * u[ROWS // 2 :], u[::2]]), rtol=1e-6)


@pytest.mark.parametrize("block", tiered(range(12), [1], [2]))
@pytest.mark.filterwarnings("ignore")
def test_plans_of_random_stencils_compute_the_same(block):
    with jax.enable_x64(True):
        for seed in range(6 * block, 6 * (block + 1)):
            assert (found := failure(seed, devices=block % 2 == 0)) is None, found


@pytest.mark.parametrize("block", tiered(range(6), [1], []))
@pytest.mark.filterwarnings("ignore")
def test_plans_of_random_reads_along_both_axes_of_squares_compute_the_same(block):
    with jax.enable_x64(True):
        for seed in range(6 * block, 6 * (block + 1)):
            assert (found := failure(seed, devices=block % 2 == 0, drawn=square)) is None, found


def test_what_fits_as_written_is_planned_where_the_partitioner_gathers(mesh):
    u = jax.ShapeDtypeStruct((2**18,), jnp.float32)

    def steps(u):
        return lax.fori_loop(0, 10, lambda _, u: u.at[1:-1].add(0.1 * (u[2:] - 2 * u[1:-1] + u[:-2])), u)

    plan = optimize(steps, memory_limit="64MiB", mesh=mesh, in_shardings=S, out_shardings=S).plan(u)
    written = jax.jit(steps, in_shardings=NamedSharding(mesh, S), out_shardings=NamedSharding(mesh, S)).lower(u).compile()
    assert sum(received for _, received in collectives(written.as_text(), 8).values()) > 2**20
    assert not plan.unchanged
    assert plan.received_bytes <= 10 * 3 * 4


def test_what_fits_as_written_and_exchanges_less_stays(mesh):
    """Of a convolution XLA's partitioner sends the rows at the edges of shares."""

    def sharpened(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x, w = jax.ShapeDtypeStruct((2, 256, 128, 16), jnp.float32), jax.ShapeDtypeStruct((3, 3, 16, 16), jnp.float32)
    lying = P(None, "x")
    plan = optimize(sharpened, memory_limit="8MiB", mesh=mesh, in_shardings=(lying, R), out_shardings=lying).plan(x, w)
    assert plan.unchanged or plan.received_bytes <= 2 * 2 * 128 * 16 * 4


def convolved(x, w, stride=1, dilation=1):
    padding = [((len(w) - 1) * dilation, 0)] if stride == 1 else "SAME"
    return lax.conv_general_dilated(x[None], w, (stride,), padding, None, (dilation,), ("NTC", "TIO", "NTC"))[0]


def causal(x, w):
    return jnp.tanh(convolved(jnp.tanh(convolved(x, w)), w, 1, 4))


def halved(x, w):
    return lax.reduce_window(convolved(x, w, 2), -jnp.inf, lax.max, (2, 1), (2, 1), "VALID")


def of_kernel(x, w):
    return jax.grad(lambda w: jnp.sum(jnp.sin(convolved(x, w))))(w)


@pytest.mark.parametrize(("program", "rows", "result"), [(causal, 2 + 2 * 4, S), (halved, 1, S), (of_kernel, 2 + 2 * 3 * WIDTH, R)])
def test_devices_receive_the_rows_that_windows_reach(program, rows, result, mesh):
    """The gradient of a kernel is a sum over devices, which each receives nearly twice."""
    values = np.random.default_rng(0)
    x, w = (values.standard_normal(shape).astype(np.float32) for shape in ((ROWS, WIDTH), (3, WIDTH, WIDTH)))

    def both(x, w, z):  # distances beside it do not fit as they are written
        return program(x, w), jnp.sum(jnp.cumsum(jnp.abs(z[:, None] - z), 2), (1, 2))

    f = optimize(both, memory_limit="600KiB", mesh=mesh, in_shardings=(S, R, R), out_shardings=(result, S))
    z = values.standard_normal((96, 64)).astype(np.float32)
    plan = f.plan(x, w, z)
    assert not plan.unchanged
    assert plan.received_bytes <= rows * ROW
    np.testing.assert_allclose(f(x, w, z)[0], jax.jit(program)(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", tiered(range(10), [1], []))
@pytest.mark.filterwarnings("ignore")
def test_plans_of_random_convolutions_compute_the_same(block):
    with jax.enable_x64(True):
        for seed in range(6 * block, 6 * (block + 1)):
            assert (found := failure(seed, block % 2 == 0, slid)) is None, found


def steps(u, times):
    return lax.scan(lambda u, _: (u.at[1:-1].add(0.1 * jnp.tanh(u[2:] - 2 * u[1:-1] + u[:-2])), None), u, length=times)[0]


def after_a_loop(u):
    v = steps(u, 3)
    return jnp.roll(v, 1, 0) - v


def through_a_loop(u):
    def step(u, _):
        return u + 0.1 * jnp.tanh(jnp.roll(u, 1, 0) - 2 * u + jnp.roll(u, -1, 0)), None

    return jax.grad(lambda u: jnp.sum(lax.scan(step, u, None, length=4)[0] ** 2))(u)


def of_a_branch(u):
    return lax.cond(jnp.sum(u[0]) > 0, lambda u: jnp.roll(u, 1, 0), lambda u: jnp.pad(jnp.diff(u, axis=0), ((0, 1), (0, 0))), u)


def until_calm(u):
    def goes_on(both):
        return (both[1] < 5) & (jnp.max(jnp.abs(jnp.diff(both[0], axis=0))) > 1e-3)

    return lax.while_loop(goes_on, lambda both: (both[0] + 0.1 * (jnp.roll(both[0], 1, 0) - both[0]), both[1] + 1), (u, 0))[0]


@pytest.mark.parametrize("program", [after_a_loop, through_a_loop, of_a_branch, until_calm], ids=lambda program: program.__name__)
def test_loops_and_branches_exchange_rows_of_what_they_carry(program, mesh):
    u = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    plan, _, got = planned(program, mesh, u, "700KiB")
    assert plan.received_bytes <= 40 * ROW
    np.testing.assert_allclose(got, jax.jit(program)(u), rtol=1e-5, atol=1e-5)
