"""Masks of diagonals, each place with its own: traces of products of centred matrices are read along their diagonals."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Fold, Rename
from eqsat_mem.testing import same_values
from tests.oracles.evaluation import values

N = 9


def made(*shape, seed=0):
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def gram(x):
    return jnp.exp(-0.5 * jnp.sum((x[:, None] - x[None]) ** 2, -1))


def loaded(function, args, within=1e-4):
    """A function of x and y as a program, which computes the same within a share of the largest number."""
    program = load(jax.make_jaxpr(function)(*args), ["x", "y"])
    for mine, theirs in zip(values(args, program)[0], jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=within * float(np.max(np.abs(theirs))))
    return program


def dependence(x, y):
    """The Hilbert-Schmidt independence criterion."""
    h = jnp.eye(x.shape[0]) - 1 / x.shape[0]
    return jnp.trace(gram(x) @ h @ gram(y) @ h)


def drawn(seed):
    """A function of a product of matrices, some of them centring or diagonal, and of its diagonal."""
    rng = random.Random(seed)
    factors = [rng.choice(["k", "l", "h", "h", "e"]) for _ in range(rng.randint(2, 5))]
    end = rng.choice([jnp.trace, jnp.diag, lambda m: jnp.sum(jnp.diag(m) ** 2) + jnp.sum(m)])

    def function(x, y):
        n = x.shape[0]
        known = {"k": gram(x), "l": gram(y), "h": jnp.eye(n) - 1 / n, "e": 2.0 * jnp.eye(n) + 0.1 * gram(x)}
        out = known[factors[0]]
        for name in factors[1:]:
            out = out @ (known[name].T if rng.random() < 0.3 else known[name])
        return end(out)

    return function


@pytest.mark.parametrize("seed", range(12))
def test_products_with_own_masks_mean_what_they_meant(seed):
    loaded(drawn(seed), [made(N, 3), made(N, 2, seed=1)])


def test_the_mask_of_a_trace_has_the_names_of_its_matrix():
    program = load(jax.make_jaxpr(dependence)(made(N, 3), made(N, 2)), ["x", "y"])
    assert not any(isinstance(program.terms[t], Rename) for t in program.reachable())


def test_a_mask_that_is_returned_and_read_twice_is_one_result():
    def function(x):
        e = jnp.eye(N)
        return e, x @ e, e @ x, e * x

    x = made(N, N)
    program = load(jax.make_jaxpr(function)(x), ["x"])
    for mine, theirs in zip(values([x], program)[0], function(x), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
def test_a_trace_of_centred_matrices_holds_none_of_them():
    args = [made(400, 3), made(400, 2, seed=1)]
    fast = eqsat_mem.optimize(dependence, memory_limit=200 * 1024)  # a matrix has 625 KiB
    assert fast.plan(*args).peak_bytes <= 200 * 1024
    assert same_values(dependence, fast, args).same


def two_sided(seed):
    """The gradient of a loss of rows and columns of a square matrix, whose means divide by one number each."""
    rng = random.Random(seed)
    pairs = rng.choice([lambda x, y: jnp.sum((x[:, None] - y[None]) ** 2, -1), lambda x, y: x @ y.T, lambda x, y: jnp.tanh(x @ y.T) + 2])
    ends = [lambda d, axis: d.min(axis), lambda d, axis: d.max(axis), jax.nn.logsumexp, lambda d, axis: jnp.sqrt(1 + (d**2).sum(axis))]
    rows, columns = rng.choice(ends), rng.choice(ends)

    def loss(x, y):
        d = pairs(x, y)
        return rows(d, 1).mean() + 0.5 * columns(d, 0).mean() + jnp.where(rows(d, 1) > 0.1, columns(d, 0), 0.0).mean()

    return jax.grad(loss)


@pytest.mark.parametrize("seed", range(10))
def test_rows_and_columns_that_are_divided_by_one_number_keep_names_of_their_own(seed):
    loaded(two_sided(seed), [made(N, 3), made(N, 3, seed=1)])


def test_the_gradient_of_a_chamfer_distance_of_equally_many_points_reads_nothing_under_other_names():
    def loss(x, y):
        d = jnp.sqrt(jnp.sum((x[:, None] - y[None]) ** 2, -1))
        return d.min(0).mean() + d.min(1).mean()

    program = load(jax.make_jaxpr(jax.grad(loss))(made(N, 3), made(N, 3, seed=1)), ["x", "y"])
    assert not [term for term in program.terms if isinstance(term, Rename)]


def matched(seed):
    """The gradient of a loss by which each row of one array is to be told from all rows of another, and the other way round."""
    rng = random.Random(seed)
    told = rng.choice(["take", "diagonal", "one-hot", "index"])
    normed = rng.random() < 0.5

    def entropy(scores):
        labels = jnp.arange(len(scores))
        logs = jax.nn.log_softmax(scores)
        if told == "take":
            return -jnp.take_along_axis(logs, labels[:, None], -1).mean()
        if told == "diagonal":
            return -jnp.diagonal(logs).mean()
        if told == "one-hot":
            return -(jax.nn.one_hot(labels, len(scores)) * logs).sum(-1).mean()
        return -logs[labels, labels].mean()

    def loss(x, y):
        if normed:
            x, y = (v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (x, y))
        scores = 3.0 * jnp.tanh(x) @ jnp.tanh(y).T
        return (entropy(scores) + entropy(scores.T)) / 2

    return jax.grad(loss, (0, 1))


@pytest.mark.parametrize("seed", range(8))
def test_both_sides_of_a_contrastive_loss_keep_their_names_in_its_gradient(seed):
    program = loaded(matched(seed), [made(N, 3), made(N, 3, seed=1)], within=1e-5)
    assert not any(isinstance(program.terms[t], Rename) for t in program.reachable())


def test_rows_and_columns_that_are_cut_at_one_position_keep_names_of_their_own():
    """A vector of truth values is one for rows of both, and repeated along the columns of each."""

    def cut(x, y):
        inside = (jnp.arange(N) < N - 2)[:, None]
        return jnp.where(inside, x, 0.0) @ jnp.where(inside, y, 0.0).T

    program = loaded(cut, [made(N, 3), made(N, 3, seed=1)])
    assert not any(isinstance(term, Rename) for term in program.terms)


def test_what_many_read_is_not_computed_for_each():
    """Sums over pairs of positions, functions of positions, and long chains of positions are one value for all their readers."""

    def function(*vectors):
        at = jnp.arange(N)
        counts = (jnp.exp(-0.1 * jnp.abs(at[:, None] - at)) * (at[:, None] >= at)).sum(1)
        turns, chain = jnp.sin(0.3 * at), at
        for step in range(60):
            chain = (chain * 5 + step) % 7
        return tuple(jnp.tanh(v) / counts[: len(v)] + turns[: len(v)] * chain[: len(v)] for v in vectors)

    args = [made(N - k, seed=k) for k in range(4)]
    program = load(jax.make_jaxpr(function)(*args), "vwxy")
    terms = [program.terms[t] for t in program.reachable()]
    assert sum(isinstance(term, Fold) for term in terms) == 1
    assert [getattr(term, "op", "") for term in terms].count("sin") == 1
    assert [getattr(term, "op", "") for term in terms].count("rem") == 60
    for mine, theirs in zip(values(args, program)[0], function(*args), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
