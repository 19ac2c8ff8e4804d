"""Operations in forms that JAX does not write: the same module compiled as it stands is what they are compared with."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem import StableHLOError, from_stablehlo
from eqsat_mem.stablehlo.elementwise import BROADCASTS
from eqsat_mem.stablehlo.kept import kept_p
from tests.tiers import tiered


def modules_of(name):
    """The modules of a file, by the comment that stands above each."""
    text = (Path(__file__).parent / name).read_text()
    return dict(re.findall(r"^// (.*)\n(func\.func(?s:.)*?\n})$", text, re.MULTILINE))


FORMS, KEPT = modules_of("forms.mlir"), modules_of("kept.mlir")
CORNERS = (np.nan, -0.0, np.inf, 0.0, -np.inf, np.nan)


def values_for(avals, corners=False):
    rng = np.random.default_rng(0)
    made = []
    for k, aval in enumerate(avals):
        drawn = np.asarray(rng.uniform(-0.9, 0.9, aval.shape) if aval.dtype.kind == "f" else rng.integers(0, 7, aval.shape))
        if corners and aval.dtype.kind == "f":
            drawn.flat[k : 12 + k : 2] = CORNERS
        made.append(drawn.astype(aval.dtype))
    return made


def as_it_stands(text, args, avals):
    """The values of a module of one function, without having been read."""
    shapes = tuple((aval.shape, aval.dtype) for aval in avals)
    private = re.sub(r"func.func (public )?@main", "func.func private @main", text)
    return jax.jit(lambda *xs: kept_p.bind(*xs, name="oracle", text=private, shapes=shapes, number=0))(*args)


def compared(text, corners=False):
    """A module read and as it stands, on the same arguments; gives the function that was read."""
    read = from_stablehlo(text)
    args = values_for(read.args, corners)
    want = as_it_stands(text, args, read.jaxpr.out_avals)
    for x, y in zip(jax.tree.leaves(jax.jit(read)(*args)), want, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        rounding = 1e-6 if x.dtype.kind == "f" else 0
        np.testing.assert_allclose(x, y, rtol=rounding, atol=rounding)
    return read


@pytest.mark.parametrize("name", FORMS)
def test_operations_compute_what_they_do_as_they_stand(name):
    assert compared(FORMS[name], corners="order" in name or "infinite" in name).kept == ()


@pytest.mark.parametrize("name", KEPT)
def test_what_jax_has_no_words_for_is_kept_and_said(name):
    (kept,) = compared(KEPT[name]).kept
    assert re.fullmatch(r"stablehlo\.(sort|scatter|custom_call lapack_spotrf_ffi) at module:\d \(main\)", kept)


def test_a_call_is_told_from_one_of_a_function_of_the_module_whose_name_begins_it():
    (call,) = (text for name, text in KEPT.items() if "outside of the module" in name)
    own = "func.func private @lapack(%x: tensor<f32>) -> tensor<f32> { return %x : tensor<f32> }"
    assert len(from_stablehlo(f"{call}\n{own}").kept) == 1


@pytest.mark.parametrize("name", tiered(BROADCASTS.split(), ["add", "power", "compare", "select"]))
def test_broadcasting_operations_of_chlo(name):
    element = "i32" if name in ("and", "or", "xor") or name.startswith("shift") else "f32"
    said = " {comparison_direction = #chlo<comparison_direction LT>}" if name == "compare" else ""
    result = {"compare": "i1", "complex": "complex<f32>"}.get(name, element)
    given = {"p": "4x1xi1"} if name == "select" else {}
    given |= {"x": f"4x1x{element}", "y": f"6x{element}"}
    types = ", ".join(f"tensor<{type_}>" for type_ in given.values())
    text = f"""
func.func @main({", ".join(f"%{x}: tensor<{type_}>" for x, type_ in given.items())}) -> tensor<4x6x{result}> {{
  %r = "chlo.broadcast_{name}"({", ".join(f"%{x}" for x in given)}){said} : ({types}) -> tensor<4x6x{result}>
  return %r : tensor<4x6x{result}>
}}"""
    assert compared(text).kept == ()


def test_a_broadcast_along_named_axes():
    read = from_stablehlo(
        """
func.func @main(%x: tensor<4x6xf32>, %y: tensor<4xf32>) -> tensor<4x6xf32> {
  %r = chlo.broadcast_subtract %x, %y {broadcast_dimensions = array<i64: 0>} : (tensor<4x6xf32>, tensor<4xf32>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}"""
    )
    x, y = values_for(read.args)
    np.testing.assert_array_equal(read(x, y), x - y[:, None])


OUTER = """
func.func @main(%v: tensor<2000xf32>) -> tensor<2000xf32> {
  %t = "stablehlo.sort"(%v) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.compare GT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  }) {dimension = 0 : i64} : (tensor<2000xf32>) -> tensor<2000xf32>
  %p = stablehlo.broadcast_in_dim %t, dims = [0] : (tensor<2000xf32>) -> tensor<2000x2000xf32>
  %q = stablehlo.broadcast_in_dim %t, dims = [1] : (tensor<2000xf32>) -> tensor<2000x2000xf32>
  %m = stablehlo.multiply %p, %q : tensor<2000x2000xf32>
  %e = stablehlo.tanh %m : tensor<2000x2000xf32>
  %r = stablehlo.dot %e, %v : (tensor<2000x2000xf32>, tensor<2000xf32>) -> tensor<2000xf32>
  return %r : tensor<2000xf32>
}"""


def test_a_plan_has_what_is_kept_whole_and_splits_the_rest():
    read = from_stablehlo(OUTER)
    planned = eqsat_mem.optimize(read, memory_limit="1MiB")
    plan = planned.plan(*read.args)
    assert plan.loops
    assert not plan.stands_alone
    assert "stablehlo" in plan.source.splitlines()[0]
    (v,) = values_for(read.args)
    down = np.sort(v)[::-1]
    np.testing.assert_allclose(planned(v), np.tanh(down[:, None] * down) @ v, rtol=1e-3, atol=1e-3)


DRAWS = """
func.func @main() -> tensor<5xf32> {
  %low = stablehlo.constant dense<0.0> : tensor<f32>
  %high = stablehlo.constant dense<1.0> : tensor<f32>
  %n = stablehlo.constant dense<[5]> : tensor<1xi64>
  %a = "stablehlo.rng"(%low, %high, %n) {rng_distribution = #stablehlo<rng_distribution UNIFORM>}
    : (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<5xf32>
  %b = "stablehlo.rng"(%low, %high, %n) {rng_distribution = #stablehlo<rng_distribution UNIFORM>}
    : (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<5xf32>
  %r = stablehlo.subtract %a, %b : tensor<5xf32>
  return %r : tensor<5xf32>
}"""


def test_two_kept_operations_that_are_equal_are_both_run():
    read = from_stablehlo(DRAWS)
    assert np.any(jax.jit(read)() != 0)
    assert np.any(eqsat_mem.optimize(read, memory_limit="1MiB")() != 0)


def padded(x):
    out = np.zeros((10, 14), x.dtype)
    out[1:8:2, 1:12:2] = x
    return out


GATHER = "#stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>"
SHAPED = {
    "dynamic_pad": ("%x, %zero, %one, %two, %one", "tensor<4x6xf32>, tensor<f32>, PAIR, PAIR, PAIR", "tensor<10x14xf32>", padded),
    "real_dynamic_slice": ("%x, %one, %four, %two", "tensor<4x6xf32>, PAIR, PAIR, PAIR", "tensor<2x2xf32>", lambda x: x[1:4:2, 1:4:2]),
    "dynamic_gather": ("%x, %rows, %size", "tensor<4x6xf32>, tensor<3x1xi32>, PAIR", "tensor<3x6xf32>", lambda x: x[[2, 0, 3]]),
}


def with_shapes(operation, more=""):
    operands, types, result, _ = SHAPED[operation]
    size = "%size = stablehlo.constant dense<[1, 6]> : PAIR"
    return f"""
func.func @main(%x: tensor<4x6xf32>{more}) -> {result} {{
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %one = stablehlo.constant dense<1> : PAIR
  {"" if more else "%two = stablehlo.constant dense<2> : PAIR"}
  %four = stablehlo.constant dense<4> : PAIR
  %rows = stablehlo.constant dense<[[2], [0], [3]]> : tensor<3x1xi32>
  {"" if more else size}
  %r = "stablehlo.{operation}"({operands}) {{dimension_numbers = {GATHER}}} : ({types}) -> {result}
  return %r : {result}
}}""".replace("PAIR", "tensor<2xi32>")


@pytest.mark.parametrize("operation", SHAPED)
def test_shapes_that_constants_say_are_read_and_others_are_refused(operation):
    """XLA compiles neither, so that numpy is the oracle."""
    read = from_stablehlo(with_shapes(operation))
    assert read.kept == ()
    (x,) = values_for(read.args)
    np.testing.assert_array_equal(read(x), SHAPED[operation][-1](x))
    with pytest.raises(StableHLOError, match=rf"stablehlo.{operation} at module:\d+ \(main\) cannot be read: its operand \d says what"):
        from_stablehlo(with_shapes(operation, ", %two: PAIR, %size: PAIR"))


def test_a_convolution_whose_padding_is_a_constant():
    groups = "batch_group_count = 1 : i64, feature_group_count = 1 : i64"
    numbers = f"{{{groups}, dimension_numbers = #stablehlo.conv<[b, 0, f]x[0, i, o]->[b, 0, f]>}}"
    read = from_stablehlo(
        f"""
func.func @main(%x: tensor<1x8x1xf32>, %k: tensor<3x1x1xf32>) -> tensor<1x9x1xf32> {{
  %p = stablehlo.constant dense<[[2, 1]]> : tensor<1x2xi32>
  %r = "stablehlo.dynamic_conv"(%x, %k, %p) {numbers} : (tensor<1x8x1xf32>, tensor<3x1x1xf32>, tensor<1x2xi32>) -> tensor<1x9x1xf32>
  return %r : tensor<1x9x1xf32>
}}"""
    )
    x, k = values_for(read.args)
    np.testing.assert_allclose(np.ravel(read(x, k)), np.correlate(np.pad(np.ravel(x), (2, 1)), np.ravel(k)), rtol=1e-6)
