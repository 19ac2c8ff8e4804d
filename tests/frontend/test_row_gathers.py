"""One element of each row, read and written at computed positions: the same values, as elementwise operations and folds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block
from tests.oracles.evaluation import values

N, V, D = 6, 5, 3


def made(*shape):
    return np.random.RandomState(0).standard_normal(shape).astype(np.float32)


def along(x, i):
    return jnp.take_along_axis(x, i[:, None], 1)


def along_first(x, i):
    return jnp.take_along_axis(x.T, i[None], 0)


def indexed(x, i):
    return x[jnp.arange(N), i]


def indexed_swapped(x, i):
    return x.T[i, jnp.arange(N)]


def mapped(x, i):
    return jax.vmap(lambda row, k: row[k])(x, i)


def dynamic(x, i):
    return jax.vmap(lambda row, k: jax.lax.dynamic_index_in_dim(row, k, keepdims=False))(x, i)


def clipped(x, i):
    return jnp.take_along_axis(x, i[:, None], 1, mode="clip")


def filled(x, i):
    return x.at[jnp.arange(N), i].get(mode="fill", fill_value=7.0)


def added(x, i):
    return x.at[jnp.arange(N), i].add(2.0)


def written(x, i):
    return x.at[jnp.arange(N), i].set(x[:, 0])


def scaled(x, i):
    return x.at[jnp.arange(N), i].multiply(x[:, 1])


READS = [along, along_first, indexed, indexed_swapped, mapped, dynamic, clipped, filled]
WRITES = [added, written, scaled]
INSIDE = np.array([0, 4, 2, 2, 1, 3], np.int32)


def loaded(fun, *args):
    return load(jax.make_jaxpr(fun)(*args), [f"x{k}" for k in range(len(args))])


def same(fun, *args):
    program = loaded(fun, *args)
    for mine, theirs in zip(values(args, program)[0], jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    return program


@pytest.mark.parametrize("pick", READS + WRITES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [np.int32, np.int8])
def test_rows_of_computed_values_are_picked_by_elementwise_operations(pick, dtype):
    program = same(lambda x, i: pick(x * 2, i), made(N, V), INSIDE.astype(dtype))
    assert "gather" not in str(program)
    assert "scatter" not in str(program)


@pytest.mark.parametrize("pick", [along, indexed, mapped, clipped, filled, added, written], ids=lambda f: f.__name__)
def test_positions_outside_mean_what_they_meant(pick):
    same(lambda x, i: pick(x * 2, i), made(N, V), np.array([0, 5, 2, -1, -6, 9], np.int32))


@pytest.mark.parametrize("pick", READS, ids=lambda f: f.__name__)
def test_derivatives_write_by_elementwise_operations(pick):
    program = same(lambda x, i: jax.grad(lambda x: jnp.sum(pick(x * 2, i) ** 2))(x), made(N, V), INSIDE)
    assert "scatter" not in str(program)


def test_rows_may_have_batches_and_elements_with_axes():
    def batches(x, i):
        return jnp.take_along_axis(x * 2, i[..., None], -1)

    def vectors(x, i):
        return (x * 2)[jnp.arange(N), i]

    tokens = np.arange(2 * N).reshape(2, N).astype(np.int32) % V
    for program in (same(batches, made(2, N, V), tokens), same(vectors, made(N, V, D), INSIDE)):
        assert "gather" not in str(program)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float16, np.complex64])
def test_every_dtype_is_picked(dtype):
    same(lambda x, i: indexed(jnp.logical_not(x) if x.dtype == bool else -x, i), (made(N, V) * 3).astype(dtype), INSIDE)


def test_arrays_that_are_in_memory_are_read_where_they_are():
    assert "gather" in str(loaded(along, made(N, V), INSIDE))
    assert "gather" in str(loaded(lambda x, i: along(jnp.sort(x), i), made(N, V), INSIDE))


def test_several_elements_of_a_row_are_gathered():
    several = np.array([[0, 1], [2, 2], [3, 4], [0, 0], [1, 4], [2, 3]], np.int32)
    assert "gather" in str(same(lambda x, i: jnp.take_along_axis(x * 2, i, 1), made(N, V), several))


SEVERAL = np.array([[0, 1], [2, 2], [3, 4], [0, 0], [1, 4], [2, 3]], np.int32)


def rows():
    return jnp.arange(N)[:, None]


FEW = {
    "read": lambda x, i: (x * 2)[rows(), i],
    "read, swapped": lambda x, i: (x.T * 2)[i, rows()],
    "read, of vectors": lambda x, i: (x[..., None] * made(D))[rows(), i],
    "read, outside": lambda x, i: (x * 2).at[rows(), i + 3].get(mode="fill", fill_value=7.0),
    "read, clipped": lambda x, i: (x * 2).at[rows(), i + 3].get(mode="clip"),
    "read in a grid": lambda x, i: jnp.einsum("ab,cd->abcd", x, x)[rows(), jnp.arange(2), i, i],
    "added": lambda x, i: (x * 2).at[rows(), i].add(x[:, :2]),
    "multiplied, outside": lambda x, i: (x * 2).at[rows(), i + 3].mul(x[:, :2]),
    "derivative": lambda x, i: jax.grad(lambda x: jnp.sum((x * 2)[rows(), i] ** 2))(x),
    "read where it lies": lambda x, i: x[rows(), i],
    "added where it lies": lambda x, i: x.at[rows(), i].add(x[:, :2]),
}


@pytest.mark.parametrize("name", FEW)
def test_rows_that_are_counted_are_batches(name):
    program = same(FEW[name], made(N, V), SEVERAL)
    call = next(term.call for term in program.terms if isinstance(term, Block) and term.call.prim.name.startswith(("gather", "scatter")))
    numbers = call.params["dimension_numbers"]
    assert numbers.operand_batching_dims


@pytest.mark.parametrize("several", [1, 9])
def test_several_elements_of_each_row_of_a_product_are_gathered_in_pieces(several):
    def picked(a, b, i):
        return (a @ b.T)[jnp.arange(a.shape[0])[:, None], i]

    rng = np.random.default_rng(0)
    args = [made(600, 8), made(800, 8), rng.integers(0, 800, (600, several)).astype(np.int32)]
    optimized = eqsat_mem.optimize(picked, memory_limit=600 * 800)
    assert optimized.plan(*args).compiled_peak_bytes <= 600 * 800
    np.testing.assert_allclose(optimized(*args), jax.jit(picked)(*args), rtol=1e-5, atol=1e-5)


def test_a_contrastive_loss_over_both_sides_is_computed_in_pieces():
    """Labels are picked from the rows of the logits and from their columns: neither axis is whole."""

    def loss(a, b):
        logits, labels = a @ b.T, jnp.arange(a.shape[0])

        def side(x):
            return jnp.mean(jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, labels[:, None] % 7, 1)[:, 0])

        return side(logits) + side(logits.T)

    args = [made(600, 4) * 0.3, made(600, 4)[::-1].copy()]
    gradient = jax.value_and_grad(loss, (0, 1))
    limit = 600 * 600 * 4 // 2
    optimized = eqsat_mem.optimize(gradient, memory_limit=limit, max_seconds=60.0)
    assert optimized.plan(*args).compiled_peak_bytes <= limit
    for mine, theirs in zip(jax.tree.leaves(optimized(*args)), jax.tree.leaves(jax.jit(gradient)(*args)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5 * float(np.max(np.abs(theirs))))
