"""Loops that begin with memory of their own only when what they read is there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.codegen.unknown import zero_after
from eqsat_mem.schedule.late_states import LEAST_BYTES


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint32", "float64"])
@pytest.mark.parametrize("first", [0, 1, -1, "nan", "inf"])
def test_a_zero_after_a_value_is_zero_whatever_the_value(dtype, first):
    with jax.enable_x64(dtype == "float64"):
        is_float = jnp.issubdtype(dtype, jnp.floating)
        if isinstance(first, str) and not is_float:
            first = -1
        x = jnp.full((2, 3), float(first) if is_float else first, jnp.int32 if not is_float else dtype).astype(dtype)
        assert int(jax.jit(zero_after)(x)) == 0


def layers(a, x, ws):
    """Each layer needs the whole of the one before, of which a product with a large matrix that is computed is taken."""
    k = jnp.exp(-((a[:, None] - a) ** 2))
    for w in ws:
        x = x + jnp.tanh((k @ x) @ w)
    return x


ROWS, COLUMNS, LAYERS = 2_000, 64, 12


def arguments():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32) * 0.1  # noqa: E731
    return draw(ROWS), draw(ROWS, COLUMNS), [draw(COLUMNS, COLUMNS) for _ in range(LAYERS)]


def test_the_results_of_all_layers_are_not_there_from_the_beginning():
    args = arguments()
    state = ROWS * COLUMNS * 4
    assert state >= LEAST_BYTES
    fixed = sum(a.nbytes for a in jax.tree.leaves(args)) + state
    limit = fixed + 6 * state
    plan = eqsat_mem.optimize(layers, memory_limit=limit).plan(*args)
    assert plan.compiled_peak_bytes <= limit
    assert plan.source.count("= zero_after(") >= LAYERS - 1
    assert plan.compiled_peak_bytes <= plan.peak_bytes + state
    np.testing.assert_allclose(plan.function(*jax.tree.leaves(args))[0], layers(*args), rtol=2e-4, atol=2e-5)


def scaled_layers(a, x, ws):
    """Each layer also reads a number made of arguments alone, which is there from the beginning: no loop waits for it."""
    t = jnp.sort(jnp.cos(jnp.arange(ROWS) * 1.0))
    for k, w in enumerate(ws):
        x = x + jnp.tanh(jnp.exp(-((t[:, None] - a * k) ** 2)) @ x) @ w
    return x


def test_loops_wait_for_what_other_loops_have_made():
    args = arguments()
    limit = sum(a.nbytes for a in jax.tree.leaves(args)) + 6 * ROWS * COLUMNS * 4
    plan = eqsat_mem.optimize(scaled_layers, memory_limit=limit).plan(*args)
    assert plan.compiled_peak_bytes <= limit
    assert plan.source.count("= zero_after(") >= LAYERS - 1
    assert "= zero_after(mul" not in plan.source
    np.testing.assert_allclose(plan.function(*jax.tree.leaves(args))[0], scaled_layers(*args), rtol=2e-4, atol=2e-5)


def test_no_loop_waits_for_numbers_of_four_bits():
    def alike(a, x, w):
        q = jnp.round(jnp.tanh(jnp.exp(-((a[:, None] - a) ** 2)) @ x) * 0.1).astype(jnp.int4)
        return jnp.sum(jnp.where(q[:, None, :] == q[None], a[None, :, None], 0.0), 1)

    args = arguments()
    plan = eqsat_mem.optimize(alike, memory_limit="6 MB").plan(*args[:2], 1.0)
    np.testing.assert_allclose(plan.function(*args[:2], 1.0)[0], jax.jit(alike)(*args[:2], 1.0), rtol=1e-3, atol=1e-3)


def test_xla_holds_less_where_loops_wait():
    def network(late):
        def program(a, x, ws):
            for w in ws:

                def body(t, y, x=x):
                    return lax.dynamic_update_slice_in_dim(y, jnp.tanh(lax.dynamic_slice_in_dim(a, t * 100, 100) @ x), t * 100, 0)

                begin = jnp.full((ROWS, COLUMNS), zero_after(x), jnp.float32) if late else jnp.zeros((ROWS, COLUMNS))
                x = x + lax.fori_loop(0, ROWS // 100, body, begin) @ w
            return x

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((ROWS, ROWS), (ROWS, COLUMNS))]
        ws = [jax.ShapeDtypeStruct((COLUMNS, COLUMNS), jnp.float32)] * LAYERS
        return jax.jit(program).lower(*shapes, ws).compile().memory_analysis().temp_size_in_bytes

    assert network(late=True) + (LAYERS - 2) * ROWS * COLUMNS * 4 <= network(late=False) + 2**16
