"""Lookups and updates of rows, where devices have the rows of a table in shares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize

ROWS, WIDTH, READ = 4096, 64, 96
S, R = P("x"), P()


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    positions = rng.integers(-ROWS - 40, ROWS + 40, READ).astype(np.int32)
    return rng.standard_normal((ROWS, WIDTH)).astype(np.float32), positions, rng.standard_normal((READ, WIDTH)).astype(np.float32)


def planned(function, limit, mesh, ins, outs, *args):
    """The plan of a function, and its results on a mesh. Pairwise distances beside it do not fit the limit as they are written."""

    def both(*args):
        rows = args[2]
        return function(*args), jnp.sum(jnp.cumsum(jnp.abs(rows[:, None] - rows), 2), (1, 2))

    f = optimize(both, memory_limit=limit, mesh=mesh, in_shardings=ins, out_shardings=(outs, S))
    plan = f.plan(*args)
    assert not plan.unchanged
    return plan, f(*args)[0]


def filled(table, positions, _):
    return table.at[positions].get(mode="fill", fill_value=3.0)


def missing(table, positions, _):
    return table.at[positions].get(mode="fill")


def clipped(table, positions, _):
    return jnp.take(table, positions, axis=0, mode="clip")


def numbers(table, positions, _):
    return lax.bitcast_convert_type(table, jnp.int32).at[positions].get(mode="clip")


def columns(table, positions, _):
    """One element of each column, at a position of its own."""
    return jnp.take_along_axis(table, jnp.abs(positions[None, :WIDTH]) % ROWS, 0)


@pytest.mark.parametrize("function", [filled, missing, clipped, numbers, columns])
def test_rows_are_read_where_they_are(function, mesh):
    args = arrays()
    want = jax.jit(function)(*args)
    plan, got = planned(function, "500KiB", mesh, (S, R, R), R, *args)  # the table has 1 MiB
    assert plan.received_bytes <= 2 * want.nbytes
    np.testing.assert_array_equal(got, want)


def test_rows_that_are_read_keep_the_sign_of_zero(mesh):
    table, positions, rows = arrays()
    _, got = planned(clipped, "500KiB", mesh, (S, R, R), R, np.full_like(table, -0.0), positions, rows)
    assert np.all(np.signbit(got))


def embedding(table, positions, rows):
    def loss(table):
        return jnp.sum(jnp.tanh(table[jnp.abs(positions) % ROWS] * rows))

    value, gradient = jax.value_and_grad(loss)(table)
    return value, table - 0.1 * gradient


def test_gradients_of_rows_are_written_where_they_are(mesh):
    args = arrays()
    plan, results = planned(embedding, "400KiB", mesh, (S, R, R), (R, S), *args)
    assert plan.received_bytes <= 2 * args[2].nbytes + 64
    for got, want in zip(results, jax.jit(embedding)(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("write", ["add", "set", "max", "multiply"])
@pytest.mark.parametrize("mode", ["drop", "clip"])
def test_rows_are_written_where_they_are(write, mode, mesh):
    def update(table, positions, rows):
        return getattr(table.at[positions], write)(rows, mode=mode)

    table, positions, rows = arrays()
    if write == "set":  # which of several writes to one row is the last, nobody says
        positions = np.unique(positions)
        positions = positions[(positions >= 0) & (positions < ROWS)] if mode == "clip" else positions[(positions < 0) | (positions >= 40)]
        positions = positions[: len(positions) // 8 * 8]
        rows = rows[: len(positions)]
    plan, got = planned(update, "400KiB", mesh, (S, R, R), S, table, positions, rows)
    assert plan.received_bytes == 0
    np.testing.assert_allclose(got, jax.jit(update)(table, positions, rows), rtol=1e-6, atol=1e-6)


def test_a_small_table_is_gathered_for_many_reads(mesh):
    def many(table, positions):
        return jnp.sum(jnp.sin(table[positions]), 0)

    f = optimize(many, memory_limit="2MiB", mesh=mesh, in_shardings=(S, R), out_shardings=R)
    plan = f.plan(jax.ShapeDtypeStruct((64, 4), jnp.float32), jax.ShapeDtypeStruct((2**17,), jnp.int32))
    assert plan.received_bytes <= 64 * 4 * 4 + 2 * 4 * 4
