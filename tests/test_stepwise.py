"""The oracle that runs jaxprs in numpy computes what XLA computes, primitive by primitive."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.oracles import stepwise

RNG = np.random.default_rng(0)
MATRICES = RNG.standard_normal((2, 4, 4))
ROUNDING = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""A few units in the last place, of results of at most a few operations."""


def check(function, *args):
    """The results of a function in numpy are those of XLA."""
    with jax.enable_x64(True):
        got = stepwise.run(jax.make_jaxpr(function)(*args), args)
        wanted = jax.tree.leaves(jax.jit(function)(*args))
    for mine, theirs in zip(got, map(np.asarray, wanted), strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        wide = np.complex128 if jnp.issubdtype(mine.dtype, jnp.inexact) else mine.dtype
        rtol = max((tolerance for name, tolerance in ROUNDING.items() if mine.dtype == name), default=0)
        np.testing.assert_allclose(mine.astype(wide), theirs.astype(wide), rtol=rtol, atol=rtol)


FLOATING = {
    "pad": lambda x: lax.pad(x, jnp.zeros((), x.dtype), ((1, 2, 1), (-1, 1, 0))),
    "pad of less": lambda x: lax.pad(x, jnp.ones((), x.dtype), ((-1, -1, 2), (3, -2, 1))),
    "round": lambda x: jnp.round(3 * x),
    "as float16": lambda x: lax.reduce_precision(x, 5, 10),
    "as bfloat16": lambda x: lax.reduce_precision(x, 8, 7),
    "to bfloat16": lambda x: x.astype(jnp.bfloat16),
    "to float16": lambda x: x.astype(jnp.float16),
    "to truth": lambda x: x.astype(bool),
    "to integers": lambda x: x.astype(jnp.int32),
    "any": lambda x: jnp.any(x > 0, 1),
    "all": lambda x: jnp.all(x > 0),
    "split": lambda x: jnp.split(x, [1, 3], 1),
    "stack": lambda x: jnp.stack([x, -x], 1),
    "argmax": lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 0)),
    "cumulative": lambda x: (lax.cumsum(x, 1, reverse=True), lax.cummax(x, 0), lax.cummin(x, 1), lax.cumprod(x, 0)),
    "finite": lambda x: jnp.isfinite(x / jnp.maximum(x, 0)),
    "functions": lambda x: (jnp.log1p(abs(x)), jnp.expm1(x), jnp.sign(x), jnp.floor(x), jnp.ceil(x), jax.nn.sigmoid(x), jnp.tan(x)),
    "bits": lambda x: lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"),
    "barrier": lambda x: lax.optimization_barrier((x, 2 * x)),
}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", FLOATING)
def test_floating_point_numbers(name, dtype):
    check(FLOATING[name], RNG.standard_normal((3, 5)).astype(dtype))


INTEGERS = {
    "narrowed": lambda x: (x.astype(jnp.int8), x.astype(jnp.uint8)),
    "as numbers": lambda x: (x.astype(jnp.float32), x.astype(bool)),
    "rest": lambda x: (lax.rem(x, x + 1), lax.rem(x, x)),
    "bits": lambda x: (x & 3, x | 3, x ^ 5, ~x, lax.reduce_or(x, (0,)), lax.reduce_and(x, (0, 1)), lax.reduce_or(x, (0, 1))),
    "cumulative": lambda x: lax.cumsum(x, 0),
}


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int32", "int64"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name, dtype):
    check(INTEGERS[name], RNG.integers(0, 100, (3, 4)).astype(dtype))


@pytest.mark.parametrize("options", [*itertools.product([False, True], repeat=4)])
def test_triangular_systems(options):
    names = ("left_side", "lower", "transpose_a", "unit_diagonal")
    shape = (2, 4, 3) if options[0] else (2, 3, 4)
    check(partial(lax.linalg.triangular_solve, **dict(zip(names, options))), MATRICES, RNG.standard_normal(shape))


def test_factors():
    check(jnp.linalg.cholesky, MATRICES @ MATRICES.swapaxes(-1, -2))
    check(jnp.linalg.cholesky, -MATRICES @ MATRICES.swapaxes(-1, -2))  # no number
