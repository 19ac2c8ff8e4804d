"""Names that change: a value is read under its new names slice by slice, however much of the program lies below it."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.egraph.encode import Encoder
from eqsat_mem.egraph.names import copied, passed_down
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Output, Rename, bits
from eqsat_mem.testing import same_values
from tests.oracles.evaluation import values

ROWS = 389


def drawn(seed):
    """A loss of pairs of rows and its gradient, whose squares lie on the diagonal of the products: the diagonal's derivative, a matrix as
    large, is read along both axes, and what it is of is read under both names."""
    rng = random.Random(seed)
    squared = rng.choice([jnp.diagonal, jnp.diag, lambda g: jnp.einsum("ii->i", g)])
    bend = rng.choice([jnp.sqrt, jnp.log, lambda d: jnp.tanh(d) * jax.nn.softplus(d), lambda d: d / (1 + d) + jnp.cbrt(d)])
    both = [
        lambda d, same: jnp.max(jnp.where(same, d, -jnp.inf), 1) - jnp.min(jnp.where(same, jnp.inf, d), 1),
        lambda d, same: jax.nn.logsumexp(jnp.where(same, d, -1e9), 1) + jnp.mean(d**2, 0),
        lambda d, same: jnp.sum(jnp.where(same, 0.0, jnp.exp(-d)), 1) * jnp.sum(jnp.where(same, d, 0.0), 0),
    ]
    of_rows = rng.choice(both)

    def loss(z, labels):
        g = z @ z.T
        squares = squared(g)
        d = bend(jnp.maximum(squares[:, None] + squares[None] - 2 * g, 1e-3))
        return jnp.mean(jax.nn.softplus(of_rows(d, labels[:, None] == labels[None])))

    return jax.value_and_grad(loss)


def arguments():
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 5)).astype(np.float32), rng.integers(0, 9, ROWS).astype(np.int32)


@pytest.mark.parametrize("seed", range(8))
def test_derivatives_of_a_diagonal_are_never_a_matrix(seed):
    function, args = drawn(seed), arguments()
    matrix = 4 * ROWS * ROWS
    planned = eqsat_mem.optimize(function, memory_limit=matrix)
    assert planned.plan(*args).peak_bytes < matrix
    same_values(function, planned, args)


def test_a_name_that_a_sum_binds_goes_no_further():
    """Below the sum lie more terms than a change of names may copy."""

    def function(x):
        for _ in range(60):
            x = jnp.sin(x) + x
        columns = x.sum(0)
        return jnp.exp(columns[:, None] + 0.0 * x).sum(1)

    x = np.random.default_rng(0).normal(size=(7, 7)).astype(np.float32) / 99
    program = load(jax.make_jaxpr(function)(x), ["x"])
    encoder = Encoder(program)
    nodes = encoder.encode()
    changes = [t for t in program.reachable() if isinstance(program.terms[t], Rename)]
    assert changes
    assert all(nodes[t].node.constructor == "Ren" for t in changes)
    np.testing.assert_allclose(values([x], program)[0][0], function(x), rtol=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_values_whose_names_pass_down_are_the_same(seed):
    args = arguments()[0][:11], arguments()[1][:11]
    program = load(jax.make_jaxpr(drawn(seed))(*args), ["z", "labels"])
    changes = [t for t in program.reachable() if isinstance(program.terms[t], Rename)]
    for fewest in (0, 1, 2):
        made = {t: passed_down(program, program.terms[t], lambda _: True, fewest)[-1] for t in changes}
        assert any(made[t] != t for t in changes)
        axes = {t: tuple((i,) for i in bits(program.free[t])) for t in changes}
        program.outputs = [Output(term, axes[t]) for t in changes for term in (t, made[t])]
        found = values(list(args), program)[0]
        for before, after in zip(found[::2], found[1::2], strict=True):
            np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)  # sums in another layout


@pytest.mark.parametrize("seed", range(8))
def test_as_many_terms_are_copied_as_are_counted(seed):
    program = load(jax.make_jaxpr(drawn(seed))(*arguments()), ["z", "labels"])
    for t in program.reachable():
        term = program.terms[t]
        if isinstance(term, Rename):
            for fewest in (0, 2):
                everything = len(program.terms)
                counted = copied(program, term, lambda _: True, 10**6, fewest)
                passed_down(program, term, lambda _: True, fewest)
                assert len(program.terms) - everything <= counted
                assert min(counted, 4) <= copied(program, term, lambda _: True, 3, fewest) <= counted
