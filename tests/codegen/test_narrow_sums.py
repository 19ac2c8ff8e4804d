"""Sums of narrow floating-point numbers, which XLA:CPU rounds after each addition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import eqsat_mem


def value_gradient(q: Array, k: Array, v: Array) -> Array:
    """The gradient of all that attention returns in its values: a product of weights with ones, which rules make a sum of weights."""

    def total(v: Array) -> Array:
        scores = (q @ k.mT).astype(jnp.float32)
        return jnp.sum((jax.nn.softmax(scores, -1).astype(v.dtype) @ v).astype(jnp.float32))

    return jax.grad(total)(v)


def errors(function, args, limit, **options):
    with jax.enable_x64(True):
        exact = np.asarray(jax.jit(function)(*(np.asarray(x, np.float64) for x in args)))
    fast = eqsat_mem.optimize(function, memory_limit=limit, device="cpu", **options)
    found = (np.asarray(f(*args), np.float64) for f in (fast, jax.jit(function)))
    return fast.plan(*args), [float(np.max(np.abs(x - exact)) / np.max(np.abs(exact))) for x in found]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("limit", [4_000_000, 12_000_000])
def test_sums_that_were_products_are_as_accurate_as_these(dtype, limit):
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.standard_normal((4, 1001, 16)), dtype) for _ in range(3)]
    plan, (own, plain) = errors(value_gradient, args, limit)
    assert not plan.unchanged
    assert own <= 2 * plain


def test_sums_as_written_keep_their_bits_where_these_are_asked_for():
    """Of what JAX writes as a sum in its own dtype: the cotangent of what was repeated."""
    x = jnp.asarray(np.random.default_rng(0).random((1001, 301)), jnp.bfloat16)

    def total(x: Array) -> Array:
        return lax.reduce_sum(jnp.exp(x), (1,))

    fast = eqsat_mem.optimize(total, memory_limit=x.nbytes + 200_000, device="cpu", accuracy="bitwise")
    assert "jnp.sum(" not in fast.plan(x).source
    np.testing.assert_array_equal(np.asarray(fast(x), np.float32), np.asarray(jax.jit(total)(x), np.float32))
