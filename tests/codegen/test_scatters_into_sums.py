"""Scatters in loops over what they write: they write into the sum of the loop, of which no chunk is ever there."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eqsat_mem
from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import original
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.loop_tree import loops
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.search import schedule
from tests.oracles.targets import CPU
from tests.schedule.test_split import index_of, nested

NODES, EDGES, FEATURES = 3_001, 60_000, 8
SEGMENTS = {"sum": jax.ops.segment_sum, "max": jax.ops.segment_max, "min": jax.ops.segment_min, "prod": jax.ops.segment_prod}


def graph(seed=0, nodes=NODES, edges=EDGES, features=FEATURES, dtype=np.float32):
    rng = np.random.default_rng(seed)
    ends = (rng.integers(-1, nodes + 2, edges).astype(np.int32) for _ in range(2))  # beyond the nodes, too: such edges are dropped
    return (jnp.asarray(rng.uniform(0.5, 1.5, (nodes, features)), dtype), *ends)


def messages(fold, nodes=NODES):
    """What the neighbours of each node make together of a function of both."""
    return lambda h, s, d: SEGMENTS[fold](jnp.tanh(h[s] * h[d]) + 0.5, d, nodes)


def in_chunks(f, *args):
    """The smallest schedule, emitted, and the function."""
    s = schedule(original(load(jax.make_jaxpr(f)(*args), [f"x{k}" for k in range(len(args))])), 1, CPU)
    assert s.chunks
    return s, emit(s)


@settings(max_examples=12, deadline=None)
@given(
    fold=st.sampled_from(sorted(SEGMENTS)),
    shape=st.tuples(st.integers(300, 900), st.integers(20_000, 40_000), st.sampled_from([1, 3, 8])),
    seed=st.integers(0, 99),
)
def test_chunks_are_written_into_the_sum(fold, shape, seed):
    args = graph(seed, *shape)
    f = messages(fold, shape[0])
    s, code = in_chunks(f, *args)
    assert re.search(r"= lax\.scatter_\w+\(scatter_", code.source)
    # a sum of n numbers of at most 1.5 is off by n / 2 units in the last place at most, of the largest; factors likewise
    most = np.bincount(np.maximum(args[2], 0), minlength=shape[0] + 2).max()
    got, want = jax.jit(code.function)(*args)[0], jax.jit(f)(*args)
    np.testing.assert_allclose(got, want, rtol=2 * most * np.finfo(np.float32).eps)
    memory = jax.jit(code.function).lower(*args).compile().memory_analysis()
    assert s.peak_bytes >= memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes


def test_no_chunk_of_a_sum_is_held():
    args = graph()
    f = jax.jit(messages("sum"))
    memory = f.lower(*args).compile().memory_analysis()
    fixed, result = memory.argument_size_in_bytes + memory.output_size_in_bytes, NODES * FEATURES * 4
    plan = eqsat_mem.optimize(messages("sum"), memory_limit=fixed + 3 * result).plan(*args)
    assert plan.compiled_peak_bytes <= fixed + 3 * result < fixed + memory.temp_size_in_bytes // 4


def test_gradients_of_rows_that_chunks_read_are_written_into_their_sum():
    """The gradient of a table of embeddings, summed over a batch beside that of a matrix."""
    rng = np.random.default_rng(0)
    table, w = rng.standard_normal((2_000, 32)).astype(np.float32), rng.standard_normal((32, 64)).astype(np.float32)
    words = rng.integers(0, 2_000, (256, 64)).astype(np.int32)
    step = jax.value_and_grad(lambda table, w, words: jnp.mean(jnp.tanh(jnp.tanh(table[words]) @ w) ** 2), (0, 1))
    memory = jax.jit(step).lower(table, w, words).compile().memory_analysis()
    fixed = memory.argument_size_in_bytes + memory.output_size_in_bytes
    own = eqsat_mem.optimize(step, memory_limit=fixed + memory.temp_size_in_bytes // 8)
    assert re.search(r"= lax\.scatter_add\(scatter_add", own.plan(table, w, words).source)
    for mine, theirs in zip(jax.tree.leaves(own(table, w, words)), jax.tree.leaves(step(table, w, words)), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5 * np.abs(theirs).max())


def test_narrow_sums_are_kept_in_float32():
    """Where the sum has another dtype than its chunks, these are added to it."""
    args = graph(dtype=jnp.bfloat16)
    _, code = in_chunks(messages("sum"), *args)
    assert not re.search(r"= lax\.scatter_add\(scatter_", code.source)
    want = messages("sum")(args[0].astype(np.float32), *args[1:])
    np.testing.assert_allclose(jax.jit(code.function)(*args)[0].astype(np.float32), want, rtol=2**-6, atol=2**-6)


def test_a_chunk_that_something_else_reads_is_there():
    """Sums of squares of chunks would be others than those of the whole: these wait until the loop is over."""
    f = lambda h, s, d: (total := messages("sum")(h, s, d), jnp.sum(total**2))[1]  # noqa: E731
    args = graph()
    _, code = in_chunks(f, *args)
    np.testing.assert_allclose(jax.jit(code.function)(*args)[0], jax.jit(f)(*args), rtol=1e-4)


@pytest.mark.parametrize("extent", [1, 2])
def test_batches_have_sums_of_their_own(extent):
    """Loops over a batch around loops over edges."""
    h, s, d = graph(edges=20_000)
    hs = jnp.stack([h * (k + 1) for k in range(extent)])
    f = jax.vmap(messages("sum"), (0, None, None))
    _, code = in_chunks(f, hs, s, d)
    np.testing.assert_allclose(jax.jit(code.function)(hs, s, d)[0], jax.jit(f)(hs, s, d), rtol=1e-4)


@pytest.mark.parametrize("fold", ["add", "max"])
def test_sums_of_loops_inside_are_added_to_those_around(fold):
    """A scatter along two axes, in loops over both: the inner loop writes into its sum, the outer one adds that to its own."""
    rng = np.random.default_rng(0)
    h = rng.uniform(0.5, 1.5, (60, 4)).astype(np.float32)
    d = rng.integers(0, 60, (23, 200)).astype(np.int32)
    f = lambda h, d: getattr(jnp.zeros_like(h).at[d], fold)(jnp.tanh(h[d] * 2))  # noqa: E731
    ex = original(load(jax.make_jaxpr(f)(h, d), ["h", "d"]))
    tree, batch = nested(ex, 23, 200), index_of(ex.program, 23)
    assert len([loop for loop in loops(tree) if loop.folds]) == 2
    code = emit(Schedule(ex, CPU, tree, {loop: 5 if loop.index == batch else 64 for loop in loops(tree)}, 0, 0.0))
    assert len(re.findall(r"= lax\.scatter_\w+\(scatter_", code.source)) == 1
    np.testing.assert_allclose(jax.jit(code.function)(h, d)[0], jax.jit(f)(h, d), rtol=1e-4)
