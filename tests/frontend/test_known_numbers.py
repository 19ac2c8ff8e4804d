"""Whole numbers that literals make are literals, and slices that begin at them are slices at known places."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax

import eqsat_mem
from eqsat_mem.frontend.flat_jaxpr import Flat
from eqsat_mem.frontend.known_numbers import known_number
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block
from eqsat_mem.ir.interpreter import evaluate

X = np.arange(40.0, dtype=np.float32).reshape(5, 8)
COMPUTED = ["add", "and", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "or", "sub"]
DTYPES = ["int8", "uint8", "int32", "uint32", "bool"]


def loaded(function, *args):
    program = load(jax.make_jaxpr(function)(*args), [f"x{k}" for k in range(len(args))])
    blocks = [program.terms[t].call.prim.name for t in program.reachable() if isinstance(program.terms[t], Block)]
    return program, blocks


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(COMPUTED), st.sampled_from(DTYPES), st.integers(-300, 300), st.integers(-300, 300))
def test_numbers_are_those_that_jax_computes(name, dtype, a, b):
    if dtype == "bool" and name in ("add", "sub", "mul"):  # JAX has other operations for these
        return
    x, y = (np.asarray(n).astype(dtype) for n in (a, b))
    names = {"and": "bitwise_and", "or": "bitwise_or"}
    want = np.asarray(getattr(lax, names.get(name, name))(x, y))
    flat = Flat(literals={0: x[()], 1: y[()]})
    found = known_number(flat, name, {}, (0, 1), want.dtype)
    assert found.dtype == want.dtype
    assert found == want


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["add", "sub", "mul", "max", "min", "lt", "ge", "eq", "ne"]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([0.0, 1.0, -1.0, 0.5, 3.0, 0.1, 1e-30, 257.0, 65504.0, np.inf, np.nan, -0.0]),
    st.integers(-9, 9),
)
@example("mul", "float16", 65504.0, 2)  # more than float16 has
def test_exact_floating_point_numbers_are_those_that_jax_computes(name, dtype, a, b):
    x, y = (np.asarray(n).astype(dtype) for n in (a, b))
    want = np.asarray(getattr(lax, name)(x, y))
    found = known_number(Flat(literals={0: x[()], 1: y[()]}), name, {}, (0, 1), want.dtype)
    if found is not None:
        assert found.dtype == want.dtype
        assert found == want
        assert np.signbit(np.float64(found)) == np.signbit(np.float64(want))
    elif np.isfinite(a) and float(a).is_integer() and not np.signbit(a) and abs(a) < 10 and b >= 0:
        assert name in ("sub", "mul")  # all that is left is a negative zero
        assert np.signbit(np.float64(want)) or name == "sub"


def test_numbers_that_their_dtype_cannot_hold_are_left_to_xla():
    def beyond(x):
        return x * (jnp.float32(3e38) * jnp.float32(10.0))

    x = np.ones((64, 64), np.float32)
    fast = eqsat_mem.optimize(beyond, memory_limit=4 * x.nbytes)
    np.testing.assert_array_equal(fast(x), np.full_like(x, np.inf))


@pytest.mark.parametrize("zero", [
    lambda: jnp.float32(0.0) * jnp.ones((50, 64)), lambda: jnp.zeros((50, 64)) * 3.0, lambda: jnp.ones((50, 64)) - jnp.ones(64),
    lambda: jnp.minimum(jnp.zeros((50, 1)), jnp.ones(64)), lambda: jnp.where(jnp.zeros((50, 64)) > 0.0, 1.0, 0.0),
])  # fmt: skip
def test_updates_of_a_computed_zero_are_added_chunk_by_chunk(zero):
    """Libraries fill arrays with zero times one, into which a sum by places goes."""
    rng = np.random.default_rng(0)
    x, at = rng.standard_normal((20_000, 64), np.float32), rng.integers(0, 50, 20_000)

    def f(x, at):
        return jnp.sin(zero().at[at].add(jnp.cumsum(x, 1)))

    limit = x.nbytes + at.nbytes + x.nbytes // 4
    planned = eqsat_mem.optimize(f, memory_limit=limit)
    assert planned.plan(x, at).compiled_peak_bytes <= limit
    np.testing.assert_allclose(planned(x, at), jax.jit(f)(x, at), rtol=1e-3, atol=1e-3)


def test_numbers_that_round_or_are_not_known_stay():
    flat = Flat(literals={0: np.float32(0.1), 1: np.int32(2), 3: np.bool_(True)})
    assert known_number(flat, "mul", {}, (0, 0), np.float32) is None
    assert known_number(flat, "add", {}, (1, 2), np.int32) is None
    assert known_number(flat, "div", {}, (1, 1), np.int32) is None
    assert known_number(flat, "select_n", {}, (3, 1, 1), np.int32) == 2


@pytest.mark.parametrize("starts", [(1, 2), (-3, 7), (9, 9), (0, 0), (2, 4)])
def test_slices_at_known_places_are_slices(starts):
    function = lambda x: lax.dynamic_slice(x, starts, (3, 4))  # noqa: E731
    program, blocks = loaded(function, X)
    assert blocks == ["slice"]
    np.testing.assert_array_equal(evaluate(program, [X])[0], function(X))


@pytest.mark.parametrize("k", [-5, -1, 0, 3, 4])
def test_rows_by_number_are_slices(k):
    function = lambda x: lax.dynamic_index_in_dim(x, k, 0, keepdims=False) + jnp.sum(lax.dynamic_slice_in_dim(x, k, 2, 1))  # noqa: E731
    program, blocks = loaded(function, X)
    assert blocks == ["slice", "slice"]
    np.testing.assert_array_equal(evaluate(program, [X])[0], function(X))


def test_slices_at_places_that_are_computed_stay():
    function = lambda x, i: lax.dynamic_slice(x, (i, 0), (3, 8))  # noqa: E731
    program, blocks = loaded(function, X, np.int32(1))
    assert "slice" not in blocks
    np.testing.assert_array_equal(evaluate(program, [X, np.int32(1)])[0], X[1:4])
