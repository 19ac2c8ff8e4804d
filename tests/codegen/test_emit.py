"""Emitted source: two plans as they were when somebody last looked, and what holds for every one."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqsat_mem.codegen.emit import emit
from eqsat_mem.codegen.source import number
from eqsat_mem.egraph.extract import Extraction, original
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block, Index
from eqsat_mem.ir.loop_tree import loops
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.search import straight
from eqsat_mem.schedule.split import Choices, region, split
from tests.oracles.targets import CPU
from tests.schedule.test_search import kernel_vector
from tests.schedule.test_split import index_of, nested, softmax, traced

GOLDEN = Path(__file__).parent / "golden"
RNG = np.random.default_rng(0)


def split_along(ex: Extraction, extent: int, chunk: int) -> Schedule:
    """The program in loops over the first index of an extent."""
    tree = split(ex, region(ex), index_of(ex.program, extent))
    assert tree is not None
    return Schedule(ex, CPU, tree, dict.fromkeys(loops(tree), chunk), 0, 0.0)


def alone(source: str) -> Any:
    """The function of a source that sees nothing else."""
    namespace: dict[str, Any] = {}
    exec(compile(source, "<alone>", "exec"), namespace)
    return namespace["program"]


PLANS = {
    "kernel_times_vector": lambda: split_along(traced(kernel_vector, (61, 3), (53, 3), (53, 2)), 61, 16),
    "attention_over_keys": lambda: split_along(traced(softmax, (11, 3), (7, 3), (7, 2)), 7, 3),
}


@pytest.mark.parametrize(
    ("shapes", "operands"),
    [
        (((9, 50), (9, 4)), "y, x"),  # the larger is on the left, its contracted axis first
        (((9, 4), (9, 50)), "x, y"),  # the smaller is
        (((9, 50), (9, 40)), "x, y"),  # the result is larger than either
    ],
)
def test_the_larger_operand_of_a_contraction_is_not_the_one_that_is_turned(shapes, operands):
    program = load(jax.make_jaxpr(lambda x, y: x.T @ y)(*(jnp.zeros(shape) for shape in shapes)), ["x", "y"])
    source = emit(straight(original(program), CPU)).source
    x, y = (RNG.standard_normal(shape).astype(np.float32) for shape in shapes)
    np.testing.assert_allclose(alone(source)(x, y)[0], x.T @ y, rtol=1e-5, atol=1e-5)
    assert re.findall(r'einsum\(".*?", (.*?)\)', source) == [operands]


@pytest.mark.parametrize(
    ("extent", "chunk", "operands"), [(50, 40, "b, a_2"), (50, 20, "a_2, b"), (60, 40, "b_2, a_2"), (60, 20, "a_2, b_2")]
)
def test_chunks_say_which_operand_of_a_contraction_is_the_larger(extent, chunk, operands):
    source = emit(split_along(traced(lambda x, y: x.T @ y, (60, 50), (60, 30)), extent, chunk)).source
    assert re.findall(r'einsum\(".*?", (.*?)\)', source) == [operands]


def weighted(x, y, w):
    return jnp.sum(jnp.exp(x - w[..., None]) * y, -1)


@pytest.mark.parametrize(("chunk", "axes"), [(1, "(0, 2)"), (2, "(2,)")])
def test_sums_in_loops_that_run_one_by_one_leave_no_axis_of_extent_one(chunk, axes):
    shapes = (5, 7, 9), (5, 7, 9), (5, 7)
    code = emit(split_along(traced(weighted, *shapes), 5, chunk))
    assert f"lax.reduce_sum(jnp.exp(a_2 - c_2[:, :, None]) * b_2, {axes})" in code.source
    args = [RNG.standard_normal(s).astype(np.float32) for s in shapes]
    np.testing.assert_allclose(jax.jit(code.function)(*args)[0], weighted(*args), rtol=1e-5)


@pytest.mark.parametrize("name", PLANS)
def test_plans_read_as_they_did(name, request):
    path = GOLDEN / f"{name}.py.txt"
    source = re.sub(r"(# test_\w+\.py):\d+ ", r"\1 ", emit(PLANS[name]()).source)  # in which lines of tests a plan's function stands
    if request.config.getoption("--update-golden"):
        path.write_text(source)
    assert source == path.read_text(), "if the change is meant: pytest tests/codegen --update-golden, and look at the difference"


@pytest.mark.parametrize("name", PLANS)
def test_source_stands_alone(name):
    made = PLANS[name]()
    args = [RNG.standard_normal(b.shape).astype(np.float32) for b in made.ex.program.inputs]
    want = emit(straight(made.ex, CPU)).function(*args)[0]
    np.testing.assert_allclose(alone(emit(made).source)(*args)[0], want, rtol=1e-4, atol=1e-5)


def test_arguments_may_have_the_names_of_keywords_modules_and_other_values():
    words = ["lambda", "jnp", "program", "a b", "1st", "exp", "lax"]
    args = [jax.ShapeDtypeStruct((3,), np.float32)] * len(words)
    program = load(jax.make_jaxpr(lambda *xs: sum(jnp.exp(x) for x in xs))(*args), words)
    code = emit(straight(original(program), CPU))
    names = [argument.arg for node in ast.parse(code.source).body if isinstance(node, ast.FunctionDef) for argument in node.args.args]
    assert len(set(names)) == len(words)
    values = [RNG.standard_normal(3).astype(np.float32) for _ in words]
    np.testing.assert_allclose(jax.jit(code.function)(*values)[0], sum(np.exp(v) for v in values), rtol=1e-5)


def check(fun: Any, *args: Any, extent: int | None = None, chunk: int = 2) -> str:
    """The source of a function's plan, which computes what the function computes, also under strict promotion of dtypes."""
    ex = original(load(jax.make_jaxpr(fun)(*args), "abcdefgh"[: len(args)]))
    code = emit(straight(ex, CPU) if extent is None else split_along(ex, extent, chunk))
    with jax.numpy_dtype_promotion("strict"):
        got = jax.jit(code.function)(*args)
    want = jax.tree.leaves(jax.jit(fun)(*args))
    assert len(got) == len(want)
    for a, b in zip(got, map(jnp.asarray, want)):
        assert (jnp.shape(a), jnp.result_type(a)) == (b.shape, b.dtype)
        wide = np.float64 if jnp.issubdtype(b.dtype, jnp.floating) else b.dtype
        np.testing.assert_allclose(np.asarray(a).astype(wide), np.asarray(b).astype(wide), rtol=1e-5)
    return code.source


A = RNG.standard_normal((7, 3)).astype(np.float32)


def test_literals_that_are_results_or_operands_of_calls_keep_their_dtype():
    check(lambda a: (jnp.zeros((2, 3), jnp.bfloat16), jnp.float16(2.5), jnp.full((), True), a), A)
    check(lambda a: lax.dynamic_update_slice(jnp.zeros((9, 3), a.dtype), a, (1, 0)), A)
    check(lambda a: jnp.pad(a, 1, constant_values=2), A)


@pytest.mark.parametrize("swapped", [False, True])
def test_an_axis_of_one_operand_is_summed_in_the_dtype_of_the_result(swapped):
    """``einsum`` sums it first: of half precision beyond its largest number, beside another dtype to one that strict promotion refuses."""

    def summed(a, b):
        operands = (jnp.broadcast_to(a[:, None], b.shape), b)
        return jnp.einsum("kl,kl->k", *operands[:: -1 if swapped else 1], preferred_element_type=jnp.float32)

    half = np.full((3, 4), 30_000, np.float16)
    check(summed, np.ones(3, np.float32), half)
    check(summed, np.ones(3, np.float16), half)
    check(summed, np.arange(3, dtype=np.int32), np.arange(12, dtype=np.int32).reshape(3, 4))


def test_sums_of_rows_in_half_precision_are_kept_in_float32():
    """What a chunk scatters is of the rows' dtype, and what is carried is wider."""
    rows, places = np.round(A).astype(jnp.bfloat16), np.arange(7) % 2
    source = check(lambda rows, places: jnp.zeros((2, 3), rows.dtype).at[places].add(rows + 1), rows, places, extent=7)
    assert "scatter_add" in source
    assert "jnp.float32" in source


def test_numbers_beside_calls_of_lax_keep_their_dtype():
    k = np.arange(12, dtype=np.int32)
    check(lambda k: lax.rem(k, jnp.int32(5)) != 3, k)
    check(lambda k: lax.rem(k, jnp.int32(5)) < 3, k)
    check(lambda k: (k // 5, k % 5, k >> 1), k)


def test_numbers_that_bare_integers_cannot_be():
    k = np.arange(12, dtype=np.uint32) * np.uint32(400_000_000)
    check(lambda k: (k >= jnp.uint32(2**31), k * jnp.uint32(2_654_435_761) ^ k, jnp.minimum(k, jnp.uint32(3 * 10**9))), k)


@pytest.mark.parametrize("name", ["pow", "rem", "atan2", "nextafter", "complex", "div"])
def test_operands_of_calls_of_lax_have_one_number_of_axes(name):
    """Elementwise operations of values that depend on different indices; functions of ``lax`` add no axes of their own."""
    function = getattr(lax, name)
    a, b = RNG.uniform(1, 2, 7).astype(np.float32), RNG.uniform(1, 2, 5).astype(np.float32)
    check(lambda a, b: function(*jnp.broadcast_arrays(a[:, None], b)), a, b)
    check(lambda a, b: jnp.abs(function(*jnp.broadcast_arrays(a, b[:, None]))).sum(1), a, b, extent=5)
    if name in ("rem", "div"):
        check(lambda i, j: function(*jnp.broadcast_arrays(i[:, None], j)), np.arange(7), np.arange(1, 4))
        check(lambda i, j: (i[:, None] // j, i % j[:, None], i << j[:, None]), np.arange(7), np.arange(1, 4))


def test_functions_applied_at_positions_are_applied():
    """They arrive as scatters, which otherwise write what they are given."""
    i, j = np.arange(3), np.array([0, 2, 1])
    square = jnp.asarray(A[:3])
    check(lambda x: x.at[1].apply(jnp.sin), square)
    check(lambda x: jnp.exp(x).at[i, i].apply(jnp.sin), square)
    check(lambda x: jnp.exp(x).at[i, j].apply(jnp.sin), square)


def test_reshapes_may_read_axes_in_another_order():
    check(lambda a: (jnp.reshape(a, (3, 7), order="F"), jnp.ravel(a, "F"), lax.reshape(a, (21,), (1, 0))), jnp.asarray(A))
    check(lambda a: jnp.reshape(jnp.exp(a), (3, 7), order="F").sum(1), jnp.asarray(A))


@pytest.mark.parametrize("fold", ["sum", "prod", "max", "min", "and", "or", "xor"])
def test_folds_of_computed_values_without_elements_are_identities(fold):
    reduce = getattr(lax, f"reduce_{fold}")
    check(lambda a: (reduce(a + 1, (0,)), reduce(a + 1, (0, 1))), np.zeros((0, 3), np.int32))
    if fold in ("and", "or"):
        check(lambda a: reduce(a > 0, (0,)), np.zeros((0, 3), np.float32))
    elif fold != "xor":
        check(lambda a: reduce(a + 1, (0,)), np.zeros((0, 3), np.float32))


def test_nan_and_infinity_are_written_so_that_python_reads_them():
    check(lambda a: jnp.where(a > 0, jnp.nan, -jnp.inf), A)
    check(lambda a: jnp.asarray(a).at[np.array([0, 3, 20])].get(mode="fill"), A)  # out of bounds is nan


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_sums_accumulate_in_float32(dtype):
    narrow = RNG.standard_normal((512, 3)).astype(jnp.dtype(dtype))
    ex = original(load(jax.make_jaxpr(lambda a: jnp.sum(a, 0, dtype=a.dtype))(narrow), "a"))
    code = emit(split_along(ex, 512, 4))
    assert "jnp.float32" in code.source
    exact = narrow.astype(np.float64).sum(0)
    np.testing.assert_allclose(
        np.asarray(jax.jit(code.function)(narrow)[0], np.float64), exact, atol=0.005 * np.abs(narrow.astype(np.float64)).sum(0).max()
    )


def test_a_fold_over_the_chunk_of_a_loop_is_not_written_out():
    """Positions of an unrolled index are those of the whole; inside a loop over it there are only those of a chunk."""
    check(lambda a: jnp.sum(jnp.exp(a[:, :, None] - a[:, None]) ** 2, 0), A, extent=7, chunk=3)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 6, 7])
def test_chunks_of_every_size_cover_an_index_once(chunk):
    check(lambda a: (jnp.sum(a, 0), jnp.sin(a), jnp.max(a), jnp.prod(a, 0), jnp.arange(7.0)[:, None] * a), A, extent=7, chunk=chunk)


def test_renamed_reads_take_the_whole_of_what_a_loop_slices():
    for chunk in (1, 3):
        for extent in (7, 3):
            check(lambda a: a @ a.T + (jnp.exp(a @ a.T).T + jnp.exp(a) @ a.T), A, extent=extent, chunk=chunk)


@pytest.mark.parametrize("chunk", [1, 3])
def test_what_stands_under_several_names_is_read_once(chunk):
    source = check(lambda a: (jnp.sum(jnp.exp(a[:, None] * a[None]), -1), jnp.sum(a[:, None] - a[None], 1)), A, extent=3, chunk=chunk)
    reads = [line.partition(" = ")[2] for line in source.splitlines() if "dynamic_slice_in_dim" in line or "[:, " in line.partition("=")[2]]
    assert reads
    assert len(set(reads)) == len(reads)


def test_user_lines_stand_above_what_they_made():
    assert "test_emit.py" in check(lambda a: jnp.exp(a) @ a.T, A)


def test_programs_may_have_more_indices_than_there_are_letters():
    extents = [2 + k % 3 for k in range(61)]
    matrices = [RNG.uniform(0.5, 1.0, shape).astype(np.float32) for shape in itertools.pairwise(extents)]

    def chain(*factors):
        left = functools.reduce(jnp.matmul, factors)
        return left, jnp.diagonal(factors[-2] @ factors[-2].T)

    ex = original(load(jax.make_jaxpr(chain)(*matrices), [f"factor_{k}" for k in range(len(matrices))]))
    assert len(ex.program.indices) > 52
    product, diagonal = emit(straight(ex, CPU)).function(*matrices)
    np.testing.assert_allclose(product, functools.reduce(np.matmul, matrices), rtol=1e-4)
    np.testing.assert_allclose(diagonal, np.sum(matrices[-2] ** 2, 1), rtol=1e-4)


def rows_with_ties(extent: int) -> np.ndarray[Any, Any]:
    """Rows of small whole numbers, so that equal ones stand in different chunks, and of what compares in its own way."""
    rows = RNG.integers(0, 9, (5, extent)).astype(np.float32)
    rows[1] = -np.inf
    rows[2, ::7] = np.nan
    rows[3, 1::5] = np.inf
    return rows


@pytest.mark.parametrize(("extent", "chunk"), [(64, 16), (61, 16), (66, 16), (61, 3), (2050, 1024)])
@pytest.mark.parametrize("results", [slice(0, 1), slice(1, 2), slice(0, 2)])
def test_the_largest_of_all_chunks_are_the_largest(extent, chunk, results):
    source = check(lambda x: lax.top_k(x, 3)[results], rows_with_ties(extent), extent=extent, chunk=chunk)
    assert "merge_top_k" in source


def test_results_of_a_selection_are_small_together():
    """Elements may take more bytes than their places, and be too large for what counts as small where the places are not."""
    rows = rows_with_ties(61)
    ex = original(load(jax.make_jaxpr(lambda x: lax.top_k(x + 0, 3))(rows), ["x"]))
    places = {t for t, term in enumerate(ex.program.terms) if isinstance(term, Block) and term.out == 1}
    small = places.union(t for t in ex.program.reachable() if not isinstance(ex.program.terms[t], Block))
    tree = split(ex, region(ex), index_of(ex.program, 61), Choices(small=frozenset(small)))
    assert tree is not None
    code = emit(Schedule(ex, CPU, tree, dict.fromkeys(loops(tree), 16), 0, 0.0))
    for got, want in zip(jax.jit(code.function)(rows), lax.top_k(rows, 3), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("result", [0, 1])
def test_one_result_of_a_selection_in_nested_loops_needs_the_other(result):
    """Places decide among equal elements, and elements among places: chunks combine both, whichever is used."""
    rows = rows_with_ties(61)
    ex = original(load(jax.make_jaxpr(lambda x: lax.top_k(x + 0, 3)[result])(rows), ["x"]))
    tree = nested(ex, 5, 61)
    code = emit(Schedule(ex, CPU, tree, {loop: 16 if loop.folds else 2 for loop in loops(tree)}, 0, 0.0))
    assert "merge_top_k" in code.source
    np.testing.assert_array_equal(jax.jit(code.function)(rows)[0], lax.top_k(rows, 3)[result])


def test_the_largest_along_any_axis_and_in_whole_numbers():
    x = RNG.integers(0, 9, (4, 40, 3)).astype(np.int32)
    check(lambda x: lax.top_k(x, 4, axis=1), x, extent=40, chunk=7)
    check(lambda x: lax.top_k(x.reshape(4, 120), 4), x, extent=4, chunk=2)


def test_searches_of_few_elements_are_written_out_with_the_sums_that_they_search():
    def nearest(x, c, w):
        return jnp.argmin(jnp.sum(jnp.abs(x[:, None] - c) * w, -1), 1), jnp.argmax(x[:, None] * c, 0)

    args = [jnp.asarray(a, np.float32) for a in (RNG.integers(-5, 6, (3000, 5)), RNG.integers(-5, 6, (6, 5)), np.arange(5))]
    ex = traced(nearest, *(a.shape for a in args))
    code = emit(Schedule(ex, CPU, region(ex), {}, 0, 0.0), "program")
    assert code.source.count("= first_place(") == 1
    for found, wanted in zip(alone(code.source)(*args), nearest(*args), strict=True):
        assert np.array_equal(found, wanted)


def test_places_found_element_by_element_lie_as_the_search_leaves_them():
    """The order of its axes is not that of the indices, which is that of what is larger."""

    def found(c, x):
        return jnp.argmax(c, 0).T[:, :, None] * x

    c, x = jnp.asarray(RNG.integers(-5, 6, (4, 3000, 5)), np.float32), jnp.asarray(RNG.standard_normal((5, 3000, 9)), np.float32)
    ex = traced(found, c.shape, x.shape)
    code = emit(Schedule(ex, CPU, region(ex), {}, 0, 0.0), "program")
    assert code.source.count("= first_place(") == 1
    np.testing.assert_array_equal(alone(code.source)(c, x)[0], found(c, x))


def test_contractions_over_several_indices_read_operands_as_they_lie():
    """XLA:CPU would write an operand anew whose contracted axes are in another order than einsum's, which is that of the alphabet."""
    heads, weights = RNG.standard_normal((40, 8, 6)).astype(np.float32), RNG.standard_normal((8, 6, 50)).astype(np.float32)
    ex = original(load(jax.make_jaxpr(lambda x, w: jnp.einsum("nhe,hed->nd", x, w))(heads, weights), ["heads", "weights"]))
    ex.program.indices[:] = [Index({8: "z", 6: "b"}.get(i.extent, i.name), i.extent) for i in ex.program.indices]
    code = emit(Schedule(ex, CPU, region(ex), {}, 0, 0.0))
    (left, right) = re.search(r'einsum\("(\w+),(\w+)->', code.source).groups()
    both = [c for c in left if c in right]
    assert both == [c for c in right if c in left] == sorted(both)
    text = jax.jit(code.function).lower(heads, weights).compile().as_text()
    assert " transpose(" not in text
    assert " copy(" not in text
    np.testing.assert_allclose(code.function(heads, weights)[0], np.einsum("nhe,hed->nd", heads, weights), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("real", [0.0, -0.0, 1.5, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("imag", [0.0, -0.0, 2.5, np.inf, -np.inf, np.nan])
def test_complex_numbers_are_written_with_every_bit(real, imag):
    value = np.complex64(complex(real, imag))
    text = number(value)
    again = np.complex64(eval(text, {"jnp": jnp}))
    assert np.array_equal(np.array([again]).view(np.float32), np.array([value]).view(np.float32), equal_nan=True)
    assert (np.signbit(again.real), np.signbit(again.imag)) == (np.signbit(value.real), np.signbit(value.imag))
    assert "jnp" in text or np.isfinite([real, imag]).all()
