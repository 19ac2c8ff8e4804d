"""Values that are compared with elements selected from them have the same bits in every kernel that needs them."""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.frontend.load import load
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("compiled_as_everybodys")

ROWS, COLUMNS = 1_000, 1_500
RNG = np.random.default_rng(0)
ARGS = tuple(RNG.standard_normal(shape, np.float32) for shape in ((ROWS, 1), (1, COLUMNS), (ROWS, 1), (1, COLUMNS)))


def first_product(a, b, c, d):
    p = a * b
    s = p + c * d
    return jnp.sum(jnp.where(s == jnp.max(s, 1, keepdims=True), jnp.sin(p), 0), 1)


def second_product(a, b, c, d):
    p = c * d
    s = a * b - p
    return jnp.sum(jnp.where(s <= jnp.min(s, 1, keepdims=True), p + 1, 0), 1)


def both_products(a, b, c, d):
    p, q = a * b, c * d
    s = jax.nn.relu(p + q)
    return jnp.sum(jnp.where(s >= jnp.max(s, 1, keepdims=True), p * q, 0), 1)


def squares(a, b, c, d):
    p = jnp.square(a - b)
    s = p + jnp.square(c - d)
    return jnp.sum(jnp.where(s == jnp.min(s, 1, keepdims=True), p, 0), 1)


def written_out(a, b, c, d):
    p = jnp.stack([a * b, c * d, a - d], -1) * jnp.asarray([1.5, -0.5, 0.25], np.float32)
    s = jnp.sum(p, -1)
    return jnp.sum(jnp.where(s == jnp.max(s, 1, keepdims=True), p[..., 1], 0), 1)


def positions(a, b, c, d):
    p = a * b
    s = p + c * d
    return jnp.sum(jnp.where(jnp.arange(COLUMNS) == jnp.argmax(s, 1, keepdims=True), p, 0), 1)


def gradient(a, b, c, d):
    def loss(a):
        p = a * b
        s = p + c * d
        return jnp.sum(jnp.max(s * jnp.where(s > 0, p, 1), 1))

    return jax.grad(loss)(a)


POINTS = tuple(RNG.standard_normal((n, 3), np.float32) for n in (ROWS, COLUMNS))


def element_of_a_product(x, y):
    s = x @ y.T
    return jnp.sum(jnp.where(s == jnp.max(s, 1, keepdims=True), jnp.sin(x[:, :1] * y[:, 0]), 0), 1)


def element_of_a_distance(x, y):
    s = jnp.sum((x[:, None] - y) ** 2, -1)
    return jnp.sum(jnp.where(s == jnp.min(s, 1, keepdims=True), (x[:, :1] - y[:, 0]) ** 2, 0), 1)


def gradient_of_nearest(x, y):
    return jax.grad(lambda x: jnp.sum(jnp.sqrt(jnp.min(jnp.sum((x[:, None] - y) ** 2, -1), 1))))(x)


@pytest.mark.parametrize("function", [element_of_a_product, element_of_a_distance, gradient_of_nearest], ids=lambda f: f.__name__)
def test_so_are_elements_of_sums_that_are_written_out(function):
    planned = eqsat_mem.optimize(function, memory_limit=ROWS * COLUMNS)
    with jax.disable_jit():
        want = function(*POINTS)
    np.testing.assert_allclose(planned(*POINTS), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "function", [first_product, second_product, both_products, squares, written_out, positions, gradient], ids=lambda f: f.__name__
)
def test_products_that_a_comparison_shares_with_other_readers_are_rounded_once(function):
    planned = eqsat_mem.optimize(function, memory_limit=ROWS * COLUMNS)  # a quarter of the values that are compared
    assert planned.plan(*ARGS).loops
    with jax.disable_jit():  # one operation after the other: nothing is computed twice
        want = function(*ARGS)
    np.testing.assert_allclose(planned(*ARGS), want, rtol=1e-4, atol=1e-5)


def drawn(seed):
    """A sum of products that is compared with its largest elements, and a value where it equals them that reads some of the products."""
    rng = random.Random(seed)

    def value(*args):
        return rng.choice(args) + rng.choice((0.0, 0.5)) if rng.random() < 0.5 else rng.choice(args) - rng.choice(args)

    def function(*args):
        rng.seed(seed)
        kinds = (lambda: value(*args) * value(*args), lambda: jnp.square(value(*args)), lambda: -(value(*args) * 0.7), lambda: value(*args))
        parts = [rng.choice(kinds)() for _ in range(rng.randint(2, 5))]
        s = functools.reduce(rng.choice((jnp.add, jnp.subtract, lambda x, y: jax.nn.relu(x) + y)), parts)
        s = jnp.broadcast_to(s, (ROWS, COLUMNS))
        best = rng.choice((jnp.max, jnp.min))(s, 1, keepdims=True)
        read = functools.reduce(jnp.multiply, rng.sample(parts, rng.randint(1, len(parts))))
        return jnp.sum(jnp.where(s == best, jnp.cos(read), 0), 1)

    return function


@pytest.mark.parametrize("seed", tiered(range(16), [0, 1, 2]))
def test_sums_drawn_at_random_find_the_places_of_their_extremes(seed):
    planned = eqsat_mem.optimize(drawn(seed), memory_limit=ROWS * COLUMNS)
    with jax.disable_jit():
        want = drawn(seed)(*ARGS)
    np.testing.assert_allclose(planned(*ARGS), want, rtol=1e-3, atol=1e-3)


def kept_apart(function, *args):
    ex = Extraction(load(jax.make_jaxpr(function)(*args), "abcd"))
    return sorted(ex.program.terms[t].op for t in ex.uncontracted)


def test_only_products_in_compared_sums_that_others_read_are_kept_from_contraction():
    assert kept_apart(first_product, *ARGS) == ["mul"]
    assert kept_apart(both_products, *ARGS) == ["mul", "mul"]
    assert kept_apart(squares, *ARGS) == ["square"]
    assert kept_apart(lambda a, b, c, d: jnp.argmax(a * b + c * d, 1), *ARGS) == []
    assert kept_apart(lambda a, b, c, d: jnp.sum(a * b + c * d == 1) + jnp.sum(a * b), *ARGS) == []
