"""The bytes that a compiled program holds, and whether two functions agree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqsat_mem.backends import hlo
from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.backends.cpu.convolutions import convolution_bytes, copied_elements
from eqsat_mem.backends.cpu.hidden_scratch import LONE_AXIS, PACKED, STREAMED_ROWS, WEIGHTED_ROWS, hidden_scratch_bytes, partial_bytes
from eqsat_mem.backends.xla import compiled_peak, donations
from eqsat_mem.testing import same_values

try:
    from jaxlib import _hlo as jaxlib_hlo
except ImportError:  # versions that parse no text
    jaxlib_hlo = None

cpu_only = pytest.mark.skipif(jax.default_backend() != "cpu", reason="options and fusions are XLA:CPU's")


def shapes(*of):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in of]


def test_arguments_outputs_and_temporaries_count():
    held, compiled = compiled_peak(lambda x, unused: jnp.sort(x)[::-1] + 1, shapes((1000,), (500,)))
    assert held >= 4 * (1000 + 500 + 1000)
    assert compiled(jnp.zeros(1000), jnp.zeros(500)).shape == (1000,)


def test_donated_arguments_are_counted_once():
    assert compiled_peak(lambda x: x + 1, shapes((1000,)), donate=[0])[0] == 4000
    assert compiled_peak(lambda x: x + 1, shapes((1000,)))[0] == 8000


def test_each_output_takes_the_memory_of_one_donated_argument():
    jaxpr = jax.make_jaxpr(lambda a, b, c, d: (a + b, jnp.int32(c), d))(*(jnp.zeros(1000) for _ in range(4)))
    assert donations(jaxpr, []) == ((), 0)
    assert donations(jaxpr, [1, 2]) == ((1, 2), 8000)
    assert donations(jaxpr, [0, 1, 2, 3]) == ((0, 1), 8000)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)).sum(1),
        lambda x, y: jax.nn.softmax(x @ y.T) @ y,
        lambda x, y: jax.lax.fori_loop(0, 7, lambda t, c: jnp.tanh(c @ c.T @ x) + t, y),
        lambda x, y: jnp.linalg.solve(x.T @ x + jnp.eye(40), y.T),
        lambda x, y: jax.lax.map(lambda row: jnp.sort(y @ row)[:3], x),
        lambda x, y: jnp.cumsum(jnp.sin(x), 0) + jnp.where(y > 0, jnp.exp(y), y * x),
        lambda x, y: jnp.concatenate([jnp.sin(x), jnp.cos(y)]) @ y.T,
        lambda x, y: jax.grad(lambda x: jax.lax.scan(lambda c, v: (jnp.sin(v * c) + c, c.sum()), y[0], x)[1].sum())(x),
    ],
    ids=["distances", "attention", "loop", "solve", "map", "cumulated", "joined", "scan"],
)
def test_optimised_machine_code_holds_the_same(function):
    avals = shapes((700, 40), (700, 40))
    assert compiled_peak(function, avals)[0] == compiled_peak(function, avals, optimise=False)[0]


def test_scatters_hold_hardly_more_as_loops():
    def counted(x, y):
        return jnp.zeros(50).at[jnp.int32(50 * x)].add(jnp.sin(y))

    fused, looped = (compiled_peak(counted, shapes((700, 40), (700, 40)), optimise=optimise)[0] for optimise in (True, False))
    assert fused <= looped <= fused + 1024


@cpu_only
def test_a_jaxlib_without_these_options_compiles_in_full(monkeypatch):
    monkeypatch.setattr(CpuBackend, "check_options", {"xla_there_is_no_such_option": "0"})
    assert compiled_peak(lambda x: jnp.sort(x) + 1, shapes((1000,)), optimise=False)[0] >= 8000


def test_typed_keys_and_weak_types():
    key, number = jax.eval_shape(lambda: jax.random.key(0)), jax.make_jaxpr(lambda x: x)(2.0).in_avals[0]
    assert compiled_peak(lambda key, x: jax.random.normal(key) * x, [key, number])[0] >= 16


def scratch(compiled):
    """The estimate for a compiled program, which is the same for both ways of reading it."""
    modules = hlo.from_message(hlo.message_of(compiled)), hlo.from_text(compiled.as_text())
    assert [module.unread for module in modules] == [(), ()]
    structured, printed = map(hidden_scratch_bytes, modules)
    assert structured == printed
    return structured


def attention(q, k, v):
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k)), v)


@cpu_only
def test_scores_of_attention_are_held_although_not_reported():
    scores = 4 * 2 * 2048**2
    held, compiled = compiled_peak(attention, shapes(*[(2, 2048, 64)] * 3))
    assert held >= scores
    assert scores <= scratch(compiled) + compiled.memory_analysis().temp_size_in_bytes <= 1.3 * scores


HLO = """HloModule reduced

%add (x: bf16[], y: bf16[]) -> bf16[] {{
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %sum.1 = bf16[] add(%x, %y)
}}

%fused (param_0: bf16[{rows},64], param_1: bf16[4096,64]) -> {result} {{
  %param_0 = bf16[{rows},64]{{1,0}} parameter(0)
  %param_1 = bf16[4096,64]{{1,0}} parameter(1)
  {contraction}%scores.1 = bf16[{rows},4096]{{1,0}} dot(%param_0, %param_1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  %exp.0 = bf16[{rows},4096]{{1,0}} exponential(%scores.1), metadata={{op_name="exp(x), (twice), as {{it}} \\"is\\""}}{more}
  %zero = bf16[] constant(0)
  {sum}%sum = bf16[{rows}]{{0}} reduce(%exp.0, %zero), dimensions={{1}}, to_apply=%add
}}

ENTRY %main (a: bf16[{rows},64], b: bf16[4096,64]) -> {result} {{
  %a = bf16[{rows},64]{{1,0}} parameter(0)
  %b = bf16[4096,64]{{1,0}} parameter(1)
  ROOT %ynn_fusion = {result} fusion(%a, %b), kind=kCustom, calls=%fused, backend_config={{"fusion_config":{{"kind":"{kind}"}}}}
}}
"""


def written(rows, more="", root="sum", kind="__ynn_fusion"):
    """The estimate for a program by its text; the same if this jaxlib parses and serialises it."""
    result = f"bf16[{rows}]" if root == "sum" else f"bf16[{rows},4096]"
    marks = {name: "ROOT " if root == name else "" for name in ("sum", "contraction")}
    text = HLO.format(rows=rows, more=more, result=result, kind=kind, **marks)
    module = hlo.from_text(text)
    assert module.unread == ()
    estimate = hidden_scratch_bytes(module)
    parse = getattr(jaxlib_hlo, "hlo_module_from_text", None)
    if parse is not None:
        assert hidden_scratch_bytes(hlo.from_message(parse(text).as_serialized_hlo_module_proto())) == estimate
    return estimate


def test_a_reduced_contraction_is_held_by_blocks_of_rows():
    row = 4096 * 2
    assert written(rows=100) == 100 * row
    assert written(rows=9000) == STREAMED_ROWS * row


def test_a_contraction_used_twice_is_held_whole():
    assert written(rows=9000, more="\n  %again = bf16[9000,4096]{1,0} negate(%scores.1)") == 9000 * 4096 * 2


def test_a_contraction_that_is_the_result_is_not_scratch():
    assert written(rows=100, root="contraction") == 0 == written(rows=9, kind="another")


@cpu_only
@pytest.mark.parametrize(
    ("spec", "x", "y", "packed"),
    [
        ("bki,bkj->bij", (4, 512, 512), (4, 512, 64), 1),
        ("bki,bjk->bij", (4, 512, 512), (4, 64, 512), 1),
        ("bik,bkj->bij", (4, 512, 512), (4, 512, 64), 0),  # the kernel library runs it
        ("ki,kj->ij", (512, 512), (512, 64), 0),  # one at a time packs blocks
        ("bki,bkj->bij", (4, 64, 64), (4, 64, 64), 0),  # small ones are not packed
    ],
)
@pytest.mark.parametrize("turns", [1, 3])
def test_batched_contractions_of_turned_operands_are_packed_all_at_once(spec, x, y, packed, turns):
    def contract(a, b):
        return jax.lax.fori_loop(0, turns, lambda t, total: total + jnp.einsum(spec, a * (1.0 + t), b), jnp.einsum(spec, a, b))

    _, compiled = compiled_peak(contract, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x, y)])
    assert scratch(compiled) == packed * PACKED * 4 * (np.prod(x) + np.prod(y))


PICTURES = (32, 48, 48, 32)
"""Rows so long that the library leaves a partial result for each of the leading axis."""


@cpu_only
@pytest.mark.parametrize(
    ("fold", "held"),
    [
        (lambda x: jnp.sum(x, 0), 1),
        (lambda x: jnp.max(jnp.abs(x), 0), 1),
        (lambda x: jnp.sum(x, (0, 1)), 1 / 21),  # 32,768 elements are 21 rows of 48 x 32
        (lambda x: jnp.sum(x, 1), 0),  # pictures are distributed
        (lambda x: jnp.sum(x, 3), 0),
    ],
)
def test_folds_of_leading_axes_hold_rows_of_partial_results(fold, held):
    peak, compiled = compiled_peak(fold, shapes(PICTURES))
    module, memory = hlo.from_message(hlo.message_of(compiled)), compiled.memory_analysis()
    assert partial_bytes(module) == pytest.approx(held * 4 * np.prod(PICTURES), rel=0.05)
    assert peak >= memory.argument_size_in_bytes + memory.output_size_in_bytes + partial_bytes(module)
    assert partial_bytes(hlo.from_text(compiled.as_text())) == partial_bytes(module)


@cpu_only
def test_a_matrix_is_summed_with_weights_where_it_lies():
    _, compiled = compiled_peak(lambda x, w: jnp.sum(x * w[:, None], 0), shapes((64, 40_000), (64,)))
    assert scratch(compiled) == 0 == partial_bytes(hlo.read(compiled))


@cpu_only
def test_a_sum_that_is_added_to_an_array_copies_nothing():
    """The library begins with the array; what else reads a sum of many rows makes it copy them."""
    rows, columns = 2**16, 16
    added, negated, few = (
        scratch(compiled_peak(f, shapes((n, columns), (n,)))[1]) for f, n in ((_added, rows), (_negated, rows), (_negated, rows // 2))
    )
    assert (added, negated, few) == (0, 4 * rows * columns, 0)


def _added(x, y):
    return y + jnp.sum(jnp.abs(x), 1)


def _negated(x, y):
    return -(y * jnp.sum(jnp.abs(x), 1))


def convolution(**options):
    given = {"window_strides": (1, 1), "padding": [(0, 0)] * 2, "dimension_numbers": ("NHWC", "HWIO", "NHWC"), **options}
    return lambda x, k: lax.conv_general_dilated(x, k, **given)


def convolved(shape, kernel, **options):
    _, compiled = compiled_peak(convolution(**options), shapes(shape, kernel))
    structured, printed = hlo.from_message(hlo.message_of(compiled)), hlo.from_text(compiled.as_text())
    assert convolution_bytes(structured) == convolution_bytes(printed)
    return convolution_bytes(structured) / 2**20


PADDED = {"padding": [(1, 1)] * 2}
GRADIENT = {"dimension_numbers": lax.ConvDimensionNumbers((3, 0, 1, 2), (3, 0, 1, 2), (2, 3, 0, 1))}
"""What is convolved with what in the gradient of a kernel."""
SQUARES = 32 * (66 / 64) ** 2
"""32 pictures of 64 x 64 x 64 numbers, with padding, in MiB."""


@cpu_only
@pytest.mark.parametrize(
    ("shape", "kernel", "options", "expected"),
    [
        ((32, 64, 64, 64), (3, 3, 64, 64), PADDED, SQUARES + 9 / 64),
        ((32, 64, 64, 64), (3, 3, 64, 64), {"padding": [(0, 1)] * 2, "window_strides": (2, 2)}, 32 * (65 / 64) ** 2 + 9 / 64),
        ((32, 64, 64, 64), (3, 3, 64, 64), {}, 9 * 32 * (62 / 64) ** 2),
        ((32, 64, 64, 64), (3, 3, 64, 64), {"padding": [(-1, -1)] * 2}, 32 * (62 / 64) ** 2 + 9 / 64),
        ((32, 64, 64, 64), (1, 1, 64, 64), {}, 32),
        ((32, 64, 64, 64), (3, 3, 16, 64), PADDED | {"feature_group_count": 4}, SQUARES + 9 * 32 + 9 / 256),
        ((32, 64, 64, 64), (3, 3, 1, 64), PADDED | {"feature_group_count": 64}, SQUARES + 9 / 4096),
        ((16, 64, 64, 32), (64, 64, 32, 16), PADDED, 8 * (66 / 64) ** 2 + 8),
        ((16, 14, 14, 512), (3, 3, 512, 512), PADDED, 2 * 8 + 9),
        ((32, 32, 32, 64), (3, 3, 64, 64), {"padding": [(2, 2)] * 2, "lhs_dilation": (2, 2)}, 9 * 8),
        ((32, 64, 64, 16), (3, 3, 16, 16), PADDED, 0),
        ((64, 32, 32, 3), (64, 16, 16, 32), GRADIENT | PADDED | {"rhs_dilation": (2, 2)}, 0.75 * (34 / 32) ** 2 + 2),
        ((64, 16, 16, 32), (64, 32, 32, 3), GRADIENT | {"padding": [(2, 2)] * 2, "lhs_dilation": (2, 2)}, 0),
    ],
)
def test_what_convolutions_copy_is_held_although_not_reported(shape, kernel, options, expected):
    assert convolved(shape, kernel, **options) == pytest.approx(expected, rel=1e-6)
    (eqn,) = jax.make_jaxpr(convolution(**options))(*shapes(shape, kernel)).eqns
    assert 4 * copied_elements([shape, kernel], [eqn.outvars[0].aval.shape], eqn.params) / 2**20 == pytest.approx(expected, rel=1e-6)


@cpu_only
def test_the_limit_counts_what_convolutions_copy():
    def valid(x, k):
        return lax.conv_general_dilated(x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    held, compiled = compiled_peak(valid, shapes((4, 34, 34, 64), (3, 3, 64, 64)))
    memory = compiled.memory_analysis()
    outside = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert held >= outside + 9 * memory.output_size_in_bytes


def counted_bytes(function, avals):
    """Bytes that a compiled program is estimated to hold besides those that XLA reports; where there are none, those that it reports as
    temporary.

    XLA of jaxlib 0.10.0 computes elementwise values before its kernel library folds them, so it knows of them.
    """
    _, compiled = compiled_peak(function, avals)
    return scratch(compiled), compiled.memory_analysis().temp_size_in_bytes


@cpu_only
@pytest.mark.parametrize(
    ("function", "copies"),
    [
        (lambda x: -jnp.sum(jnp.abs(x), 1), 1),
        (lambda x: jnp.log(jnp.sum(jnp.exp(x), 1)), 1),
        (lambda x: -jnp.sum(x, 1), 0),
        (lambda x: jnp.sum(jnp.abs(x), 1), 0),
        (lambda x: jnp.sum(jnp.abs(x), 1, keepdims=True), 0),
        (lambda x: jnp.sqrt(jnp.sum(x * x, 1)), 0),
        (lambda x: jax.nn.softmax(x, 1), 0),
    ],
)
def test_a_fold_of_computed_values_that_goes_on_copies_what_it_reads(function, copies):
    hidden, reported = counted_bytes(function, shapes((60_000, 700)))
    assert hidden == copies * 60_000 * 700 * 4 or (hidden == 0 and reported >= copies * 60_000 * 700 * 4)


def distances(x, y):
    return jnp.abs(x[:, None] - y)


@cpu_only
@pytest.mark.parametrize(
    ("function", "held"),
    [
        (lambda x, y, v, w: jnp.sum(distances(x, y) * v, 1), WEIGHTED_ROWS * 700),
        (lambda x, y, v, w: jnp.sum(distances(x, y) * w[:, None], 0), 6000 * 700),
        (lambda x, y, v, w: jnp.sum(distances(x, y).reshape(60, 100, 700) * v, 2), 6000 * 700),
        (lambda x, y, v, w: jnp.sum(distances(x, y).reshape(60, 100, 700) * w[:60, None, None], 0), 2 * 6000 * 700),
        (lambda x, y, v, w: jnp.sum(distances(x, y) * w[:, None], 1), 0),
        (lambda x, y, v, w: jnp.max(distances(x, y) * v, 1), 0),
        (lambda x, y, v, w: jnp.sum(distances(x, y) * v), 0),
        (lambda x, y, v, w: jnp.sum(distances(x, y)[None] * w[None, :, None], 2), LONE_AXIS * 6000 * 700),
        (lambda x, y, v, w: jax.lax.reduce_sum(distances(x, y)[None] * w[None, :, None], (0, 2)), 0),
        (lambda x, y, v, w: jnp.sum(distances(x, y)[None] ** 2, 2), 0),
    ],
)
def test_a_weighted_sum_holds_what_it_weighs(function, held):
    hidden, reported = counted_bytes(function, shapes((6000,), (700,), (700,), (6000,)))
    assert hidden == 4 * held or (hidden == 0 and reported >= 4 * min(held, 6000 * 700))


# --- values ----------------------------------------------------------------------------------------


def test_equal_functions_agree():
    args = [jnp.arange(6.0), jax.random.key(3)]
    comparison = same_values(lambda x, k: {"a": x.sum(), "k": k}, jax.jit(lambda x, k: {"a": x[::-1].sum(), "k": k}), args)
    assert comparison.same
    assert str(comparison).startswith("agrees: ")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda x: x + 1e-2, "largest difference 0.01 where values reach 3"),
        (lambda x: x.astype(np.float64), "are not one type"),
        (lambda x: x[:-1], "are not one type"),
        (lambda x: np.where(x == 0, np.nan, x).astype(np.float32), "infinities and NaNs"),
        (lambda x: -x, "largest difference 6"),
    ],
)
def test_differences_are_found_and_named(wrong, why):
    comparison = same_values(lambda x: (1, {"y": x}), lambda x: (1, {"y": wrong(x)}), [np.arange(4, dtype=np.float32)])
    assert not comparison.same
    assert comparison.where == "result[1]['y']"
    assert why in comparison.why
    assert str(comparison).startswith("DIFFERS: ")


def test_infinities_must_have_the_same_sign_and_integers_the_same_value():
    x = np.array([np.inf, 1.0])
    assert same_values(lambda x: x, lambda x: x, [x]).same
    assert not same_values(lambda x: x, lambda x: -x, [x]).same
    assert not same_values(lambda x: x, lambda x: x + 1, [np.arange(3)]).same


def test_the_tolerance_is_the_callers():
    assert same_values(np.exp, lambda x: np.exp(x) * 1.01, [np.arange(3.0)], tolerance=0.02).same


def test_other_pytrees_are_an_error():
    with pytest.raises(ValueError, match="different pytrees"):
        same_values(lambda x: x, lambda x: (x,), [1.0])
