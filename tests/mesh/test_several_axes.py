"""Stencils along two axes, both of which lie in shares: what is padded and cut along both is rows that neighbours send along each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize

BOTH = P("data", "model")


def mesh_of(*shape):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def drawn(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def cross(u):
    p = jnp.pad(u, 1)
    return p[2:, 1:-1] - 2 * p[:-2, 1:-1] + 3 * p[1:-1, 2:] - 5 * p[1:-1, :-2]


def square(u):
    p, (n, m) = jnp.pad(u, 1), u.shape
    return sum((1 + i + 2 * j) * p[i : i + n, j : j + m] for i in range(3) for j in range(3))


def repeated(u):
    return lax.fori_loop(0, 4, lambda _, u: jnp.tanh(square(u) * 0.1), u)


def relaxed(b):
    """An iteration until changes are small."""

    def step(state):
        u, _, k = state
        new = 0.02 * square(u) + b
        return new, jnp.max(jnp.abs(new - u)), k + 1

    return lax.while_loop(lambda s: (s[1] > 1e-3) & (s[2] < 12), step, (jnp.zeros_like(b), jnp.float32(1), 0))[0]


def agrees(function, u, limit, mesh, *, ins=BOTH, out=BOTH):
    """The plan under a limit, where it computes what one device does."""
    f = optimize(function, memory_limit=limit, mesh=mesh, in_shardings=ins, out_shardings=out)
    got, want = f(u), jax.jit(function)(u)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-4, atol=2e-4 * np.abs(want).max())
    return f.plan(u)


@pytest.mark.parametrize(("function", "turns"), [(cross, 1), (square, 1), pytest.param(repeated, 4, marks=pytest.mark.slow)])
def test_a_stencil_of_two_axes_in_shares_receives_rows_of_neighbours(function, turns):
    plan = agrees(function, drawn((512, 512)), "1MiB", mesh_of(4, 2))
    rows = 4 * (2 * 256 + 2 * 3 * 130)  # two rows, and two columns of what is read above, here and below
    assert not plan.unchanged
    assert 0 < plan.received_bytes <= turns * rows


@pytest.mark.slow
def test_a_stencil_in_a_loop_that_ends_by_its_values():
    plan = agrees(relaxed, drawn((512, 512)), "1280KiB", mesh_of(2, 4))
    assert {sent.kind for sent in plan.collectives if sent.bytes > 64} == {"ppermute"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
def test_pieces_of_what_is_padded_along_two_axes_are_those_of_one_device(seed, shape):
    """Paddings of any width, negative ones too, and slices that begin anywhere, of square arrays, on whose axes any mesh axis lies."""
    rng = np.random.default_rng(seed)
    low, high = rng.integers(-1, 4, (2, 2))
    ends = [int(16 + a + b) for a, b in zip(low, high)]
    begins = [[int(rng.integers(0, end - 9)) for end in ends] for _ in range(3)]

    def function(u):
        p = lax.pad(u, 0.5, [(int(a), int(b), 0) for a, b in zip(low, high)])
        return sum((k + 1) * jnp.sin(p[i : i + 8, j : j + 8]) for k, (i, j) in enumerate(begins))

    def loop(u):
        return jnp.exp(jnp.abs(function(u)[:, None] - function(u)[None])).sum(0) + function(u)

    out = (BOTH, P("model", "data"), P("data"), P())[seed]
    agrees(loop, drawn((16, 16), seed), "3KiB", mesh_of(*shape), out=out)


def changes(u):
    return 0.1 * (u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["add", "set"])
def test_the_inside_of_an_array_is_updated_by_its_neighbours(kind):
    def heat(u):
        def step(_, u):
            inside = u.at[1:-1, 1:-1]
            return inside.add(changes(u)) if kind == "add" else inside.set(u[1:-1, 1:-1] + changes(u))

        return lax.fori_loop(0, 5, step, u)

    plan = agrees(heat, drawn((512, 512)), "1MiB", mesh_of(4, 2))
    assert not plan.unchanged
    assert 0 < plan.received_bytes <= 5 * 4 * (4 * 256 + 4 * 130)


@pytest.mark.parametrize("seed", range(6))
def test_windows_of_two_axes_that_are_written(seed):
    """Windows at any place, which are written or added to an array whose axes are equally long."""
    rng = np.random.default_rng(seed)
    rows, columns = (sorted(rng.choice(17, 2, replace=False).tolist()) for _ in range(2))
    window, kind = np.s_[rows[0] : rows[1], columns[0] : columns[1]], ("set", "add", "multiply")[seed % 3]

    def function(u):
        written = getattr(u.at[window], kind)(jnp.cos(u.T[window]) + u[window])
        return jnp.exp(jnp.abs(written[:, None] - u[None])).sum(0) + written

    agrees(function, drawn((16, 16), seed), "4KiB", mesh_of(*((4, 2), (2, 4))[seed % 2]), out=(BOTH, P())[seed // 3])


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(4, 2), (8, 1)])
def test_cotangents_of_windows_that_are_written_are_rows_of_neighbours(axes):
    """They arrive as gathers of one window at a known place."""

    def slope(u):
        return jax.grad(lambda u: jnp.sum(jnp.sin(jnp.cos(u).at[1:-1, 1:-1].add(changes(u)))))(u)

    plan = agrees(slope, drawn((512, 512)), "1500KiB", mesh_of(*axes))
    assert not plan.unchanged
    assert plan.received_bytes <= 12 * 512 * 4  # a dozen rows at most


@pytest.mark.parametrize("out", [P("data"), P("model"), P()])
def test_rows_of_both_axes_may_meet_in_one_result(out):
    """Positions along one axis are those along the other, which lies otherwise: there was no way to spread this."""

    def edges(u):
        below, right = jnp.concatenate([u, u[:2]], 0), jnp.concatenate([u, u[:, :2]], 1)
        return below[1:17, 1] + right[3, 1:17]

    agrees(edges, drawn((16, 16)), "2KiB", mesh_of(4, 2), out=out)
