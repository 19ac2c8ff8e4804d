"""Products with JAX's sparse arrays are gathers, products and scatters, which loops compute in chunks of the elements stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import eqsat_mem
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block

STORED, WIDTH = 9_000, 16


def drawn(seed):
    """Elements at random places of a matrix, some of them twice, and layers for a network on its graph."""
    rng = np.random.default_rng(seed)
    rows, columns = (int(n) for n in rng.integers(60, 130, 2))
    data = rng.standard_normal(STORED, np.float32)
    places = np.stack([rng.integers(0, rows, STORED), rng.integers(0, columns, STORED)], 1).astype(np.int32)
    features, layer = rng.standard_normal((columns, WIDTH), np.float32), rng.standard_normal((WIDTH, WIDTH), np.float32) / 4
    return (rows, columns), (data, places, features, layer, rng.standard_normal((rows, WIDTH), np.float32))


def product(shape, data, places, features):
    return sparse.BCOO((data, places), shape=shape) @ features


def dense(shape, data, places, features):
    matrix = np.zeros(shape)
    np.add.at(matrix, tuple(places.T), np.asarray(data, np.float64))
    return matrix @ features


def primitives(function, *args):
    program = load(jax.make_jaxpr(function)(*args), [f"a{k}" for k in range(len(args))])
    return {term.call.prim.name for t in program.reachable() if isinstance(term := program.terms[t], Block)}


@pytest.mark.parametrize("by", ["rows", "columns", "sampled", "csr", "dense"])
def test_no_operation_on_sparse_arrays_stays_as_it_is(by):
    shape, (data, places, features, _, weights) = drawn(0)
    functions = {
        "rows": lambda d: product(shape, d, places, features),
        "columns": lambda d: jnp.asarray(weights.T) @ sparse.BCOO((d, places), shape=shape),
        "sampled": lambda d: sparse.bcoo_dot_general_sampled(
            weights, features, places[: len(d)], dimension_numbers=(((1,), (1,)), ((), ()))
        ),
        "csr": lambda d: sparse.BCSR((d, places[:, 1], jnp.linspace(0, STORED, shape[0] + 1).astype(jnp.int32)), shape=shape) @ features,
        "dense": lambda d: sparse.BCOO((d, places), shape=shape).todense(),
    }
    assert not any(name.startswith(("bcoo", "bcsr")) for name in primitives(functions[by], data))


def test_a_product_is_that_with_the_dense_matrix():
    shape, (data, places, features, *_) = drawn(1)
    limit = data.nbytes + places.nbytes + features.nbytes + STORED * WIDTH * 2  # all rows that are read take twice as much

    def fun(data, places, features):
        return product(shape, data, places, features)

    fast = eqsat_mem.optimize(fun, memory_limit=limit)
    assert fast.plan(data, places, features).loops
    np.testing.assert_allclose(fast(data, places, features), dense(shape, data, places, features), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_training_steps_on_graphs_go_through_the_elements_stored(seed):
    shape, args = drawn(seed)

    def step(data, places, features, layer, target):
        def loss(data, layer):
            return jnp.mean((jax.nn.relu(product(shape, data, places, features @ layer)) - target) ** 2)

        value, slopes = jax.value_and_grad(loss, (0, 1))(data, layer)
        return value, data - 0.1 * slopes[0], layer - 0.1 * slopes[1]

    limit = sum(a.nbytes for a in args) + args[0].nbytes + STORED * WIDTH * 2
    fast = eqsat_mem.optimize(step, memory_limit=limit)
    assert fast.plan(*args).loops
    for got, want in zip(fast(*args), jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
