"""Blocks that sum along an axis that they share, chunk by chunk: convolutions and the gradients of their kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import original
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block, folded
from eqsat_mem.ir.loop_tree import loops
from eqsat_mem.schedule.search import Search, schedule
from tests.oracles.targets import CPU

IMAGES, KERNEL = (12, 7, 6, 4), (3, 3, 4, 5)


def convolved(x, w, **params):
    return lax.conv_general_dilated(x, w, (1, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **params)


def kernel_gradient(x, w):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(convolved(x, w)) ** 2))(w)


def loaded(function, *args):
    return load(jax.make_jaxpr(function)(*args), [f"x{k}" for k in range(len(args))])


def arrays(dtype):
    return [jnp.asarray(np.random.RandomState(k).standard_normal(shape), dtype) for k, shape in enumerate((IMAGES, KERNEL))]


def folds(program):
    blocks = (program.terms[t] for t in program.reachable() if isinstance(program.terms[t], Block))
    return [[program.indices[i].extent for i in range(len(program.indices)) if folded(b) >> i & 1] for b in blocks]


def test_convolutions_fold_their_features_and_gradients_of_kernels_the_batch():
    x, w = arrays(np.float32)
    assert folds(loaded(convolved, x, w)) == [[KERNEL[2]]]
    assert [IMAGES[0]] in folds(loaded(kernel_gradient, x, w))
    grouped = loaded(lambda x, w: convolved(x, w, feature_group_count=2), x, w[:, :, :2, :4])
    assert folds(grouped) == [[2]]  # those of a group


def test_features_of_groups_are_summed_chunk_by_chunk():
    """With whole groups in each chunk: parts of the features of every group."""
    x, w = (
        jnp.asarray(np.random.RandomState(k).standard_normal(shape), np.float32) for k, shape in enumerate([(2, 7, 6, 12), (3, 3, 6, 4)])
    )

    def grouped(x, w):
        return convolved(jnp.sin(x), w, feature_group_count=2)

    program = loaded(grouped, x, w)
    (conv,) = (term for term in map(program.terms.__getitem__, program.reachable()) if isinstance(term, Block))
    (index,) = (i for i in range(len(program.indices)) if folded(conv) >> i & 1)
    search = Search(original(program), 1, CPU)
    tree = next(search.ways(search.straight.seq, search.full, index, frozenset()))
    for chunk in (1, 2, 4, 6):
        s = search.evaluate(tree, dict.fromkeys(loops(tree), chunk), ())
        np.testing.assert_allclose(jax.jit(emit(s).function)(x, w)[0], grouped(x, w), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_gradient_of_a_kernel_is_summed_chunk_by_chunk(dtype):
    """In float32, whatever the dtype: the bound for bfloat16 is one rounding of the result and of the elements that are summed."""
    x, w = arrays(dtype)
    s = schedule(original(loaded(kernel_gradient, x, w)), 1, CPU)
    assert s.chunks
    code = emit(s)
    assert "float32" in code.source.split("fori_loop")[0] or dtype is np.float32
    got = np.asarray(jax.jit(code.function)(x, w)[0], np.float64)
    want = np.asarray(kernel_gradient(*(a.astype(np.float32) for a in (x, w))), np.float64)
    np.testing.assert_allclose(got, want, atol=(1e-5 if dtype is np.float32 else 2e-2) * np.abs(want).max())
