"""Elementwise kernels that XLA:GPU makes one of, and products of what repeats itself along an axis: as predicted and as compiled."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.backends.gpu.products import Products
from eqsat_mem.backends.gpu.targets import named
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Dot, Map
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.search import straight

missing = pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs pip install 'eqsat-mem[gpu]'")
H100 = named("h100")
N = 4096
MATRIX = 4 * N * N


def f32(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def loaded(function, avals):
    own = replace(GpuBackend.of(H100).without_tiles(), products=Products.BY_TRITON)  # no scratch of cuBLAS as on the card
    program = load(jax.make_jaxpr(function)(*avals), [f"x{k}" for k in range(len(avals))], own.preferences)
    return own, Extraction(program)


def as_written(function, avals):
    own, ex = loaded(function, avals)
    return straight(ex, own, emitted=False)


def predicted(function, avals):
    return as_written(function, avals).peak_bytes


def two_of_one(x, c, a, b):
    z = x @ c
    t = jnp.tanh(z)
    return (z * (t + 1)) @ a, (z - t * 2) @ b


def one_after_the_other(x, c, a, b):
    z = x @ c
    first = jnp.sin(z) @ a
    return first, jnp.cos(z + jnp.sum(first)) @ b


def beside_a_vector(x, y, first, second, c, a):
    """Maps that read a vector and nothing else in common, and have as many elements."""
    return (jnp.tanh(x @ first) * c) @ a, (jnp.sin(y @ second) + c) @ a


def beside_a_vector_in_turn(x, y, first, second, c, a):
    """One more, that needs the first of them."""
    made = (jnp.tanh(x @ first) * c) @ a
    return made, (jnp.sin(y @ second) + c) @ a, (jnp.cos((x + jnp.sum(made)) @ second) * c) @ a


def beside_a_number(x, y, first, second, c, a):
    return beside_a_vector(x, y, first, second, c[0], a)


def network(first, second, x, loss):
    return jax.grad(lambda *layers: loss(jax.nn.gelu(x @ layers[0]) @ layers[1]), (0, 1))(first, second)


def per_example(first, second, x):
    return jax.vmap(jax.grad(lambda f, s, x: jnp.sum(jnp.tanh(x @ f) @ s), (0, 1)), (None, None, 0))(first, second, x)


def deep(first, second, third, x):
    def loss(*layers):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ layers[0]) @ layers[1]) @ layers[2])

    return jax.grad(loss, (0, 1, 2))(first, second, third)


def of_one_matrix(w, x, y):
    """Products of one matrix, each folded: one after the other they would be there one at a time."""
    return jnp.tanh(x @ w).sum(0), jnp.tanh(y @ w).sum(0)


def of_one_matrix_in_turn(w, x, y):
    first = jnp.tanh(x @ w).sum(0)
    return first, jnp.tanh(jnp.sin(y + first[0]) @ w).sum(0)


SMALL, MERGED, APART = f32((128, 8000), (1024, 128), (1024, 128)), 4 * 1024 * 8000, f32((128, 16_500), (1024, 128), (1024, 128))
OPERANDS = f32((N, 64), (64, N), (N, 32), (N, 32))
BESIDE = f32((N, 64), (N, 64), (64, N), (64, N), (N,), (N, 32))
LAYERS = f32((64, 2048), (2048, 16), (8192, 64))
PROGRAMS = {
    "two_of_one": (two_of_one, OPERANDS),
    "one_after_the_other": (one_after_the_other, OPERANDS),
    "beside_a_vector": (beside_a_vector, BESIDE),
    "beside_a_vector_in_turn": (beside_a_vector_in_turn, BESIDE),
    "sum": (lambda *a: network(*a, jnp.sum), LAYERS),
    "mean": (lambda *a: network(*a, jnp.mean), LAYERS),
    "per_example": (per_example, f32((32, 512), (512, 4), (512, 32))),
    "of_one_matrix": (of_one_matrix, SMALL),
    "of_one_matrix_in_turn": (of_one_matrix_in_turn, SMALL),
    "of_one_large_matrix": (of_one_matrix, APART),
    "deep": (deep, f32((32, 512), (512, 512), (512, 4), (20_480, 32))),
}


def test_results_of_one_kernel_are_there_at_once():
    """Both maps of the product, and the product; what both compute inside is in memory for neither."""
    assert 3 * MATRIX < predicted(two_of_one, OPERANDS) < 3.1 * MATRIX


def test_kernels_of_which_one_needs_the_other_are_two():
    assert 2 * MATRIX < predicted(one_after_the_other, OPERANDS) < 2.5 * MATRIX


def test_kernels_that_read_one_vector_are_one():
    """Both products and both maps are there at once; of kernels that have a single number in common, or need one another, two arrays."""
    assert 4 * MATRIX < predicted(beside_a_vector, BESIDE) < 4.2 * MATRIX
    assert 4 * MATRIX < predicted(beside_a_vector_in_turn, BESIDE) < 4.2 * MATRIX
    assert 2 * MATRIX < predicted(beside_a_number, [*BESIDE[:4], *f32((1,)), BESIDE[5]]) < 2.2 * MATRIX


def test_every_kernel_may_be_one_with_every_other_that_reads_its_array():
    """Two of three need the first, and are one all the same."""

    def program(x, c, a):
        first = jnp.tanh(x * c)
        second, third = first @ a, (x + 1) @ a
        return first, jnp.sin(second) + c, jnp.cos(third) * c

    own, ex = loaded(program, f32((64, 64), (64,), (64, 64)))
    fused = Memory(ex, own).fused(straight(ex, own).seq)
    *_, second, third = (k for k, step in enumerate(fused.kept) if isinstance(ex.program.terms[step], Map))
    assert third == second + 1
    assert fused.operands[second] == frozenset(), "the last of them reads everything"


@pytest.mark.parametrize(
    ("function", "avals", "most"),
    [(of_one_matrix, SMALL, 2 * MERGED), (of_one_matrix_in_turn, SMALL, MERGED), (of_one_matrix, APART, 2 * MERGED)],
)
def test_small_products_of_one_matrix_are_one_product(function, avals, most):
    """Both are there until neither is read. Where one needs the other, or both are large, they are not one."""
    given = sum(4 * math.prod(a.shape) for a in avals)
    assert most < predicted(function, avals) - given < 1.2 * most


def test_an_array_is_there_until_none_of_its_parts_is_read():
    own, ex = loaded(of_one_matrix, SMALL)
    fused = Memory(ex, own).fused(straight(ex, own).seq)
    (array,) = fused.arrays
    assert len(array) == 2
    assert all(isinstance(ex.program.terms[t], Dot) for t in array)
    (last,) = {fused.last_use[t] for t in array}
    assert last == max(p for p, operands in enumerate(fused.operands) if operands & array)
    assert array <= set(fused.read_last[last])
    assert sorted(t for read in fused.read_last for t in read) == sorted(fused.last_use), "each dies once"


def test_kernels_that_are_one_stand_side_by_side():
    own, ex = loaded(*PROGRAMS["two_of_one"])
    fused = Memory(ex, own).fused(straight(ex, own).seq)
    places = [k for k, step in enumerate(fused.kept) if isinstance(ex.program.terms[step], Map)]
    assert len(places) == 2
    assert places[1] == places[0] + 1
    made = set()
    for step, operands in zip(fused.kept, fused.operands):
        computed = {t for t in operands if t in fused.kept}
        assert computed <= made, "every kernel runs after those that it needs"
        made.add(step)


def test_a_product_of_what_repeats_itself_is_as_large_as_written():
    """The derivative of a mean is one number, repeated; its product with the second layer has a row for each example."""
    own, ex = loaded(*PROGRAMS["mean"])
    sizes = [Memory(ex, own, as_written=written) for written in (False, True)]
    (product,) = (t for t, free in ex.program.repeated.items() if ex.program.indices[free.bit_length() - 1].extent == 8192)
    small, large = (memory.size(product, memory.full_extents()) for memory in sizes)
    assert (small, large) == (4 * 2048, 4 * 2048 * 8192)


@missing
@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_peaks_of_programs_as_written_are_those_of_the_compiler(name):
    from eqsat_mem.backends.gpu import deviceless

    function, avals = PROGRAMS[name]
    held = deviceless.compile_for(function, avals, H100).held_bytes
    assert 0.95 * held < predicted(function, avals) < 1.15 * held
