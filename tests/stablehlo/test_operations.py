"""Operations in forms that JAX does not write: the same module compiled as it stands is what they are compared with."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem import from_stablehlo
from eqsat_mem.stablehlo.elementwise import BROADCASTS
from eqsat_mem.stablehlo.kept import kept_p
from eqsat_mem.stablehlo.table import ROWS
from tests.tiers import tiered

RNG = np.random.default_rng(0)


def value_of(aval):
    drawn = RNG.uniform(-0.9, 0.9, aval.shape) if aval.dtype.kind == "f" else RNG.integers(0, 7, aval.shape)
    return np.asarray(drawn).astype(aval.dtype)


def as_it_stands(text, args, avals):
    """The values of a module of one function, without having been read."""
    shapes = tuple((aval.shape, aval.dtype) for aval in avals)
    private = re.sub(r"func.func (public )?@main", "func.func private @main", text)
    return jax.jit(lambda *xs: kept_p.bind(*xs, name="oracle", text=private, shapes=shapes, number=0))(*args)


def module(body, arguments, results):
    """A module of one function; ``body`` assigns %r or %r:2 and the like."""
    given = ", ".join(f"%{name}: tensor<{type_}>" for name, type_ in arguments.items())
    types = ", ".join(f"tensor<{type_}>" for type_ in results)
    names = ", ".join(["%r"] if len(results) == 1 else [f"%r#{k}" for k in range(len(results))])
    return f"func.func @main({given}) -> ({types}) {{\n{body}\nreturn {names} : {types}\n}}"


X, Y, I, P = "4x6xf32", "4x6xf32", "4x6xi32", "4x6xi1"


def simple(name, operands, result=X):
    arguments = dict(zip("xyz", operands))
    types = ", ".join(f"tensor<{type_}>" for type_ in operands)
    return module(f'%r = "{name}"({", ".join("%" + a for a in arguments)}) : ({types}) -> tensor<{result}>', arguments, [result])


def folded(body, init, n=1):
    region = f"({{ ^bb0(%a: tensor<f32>, %b: tensor<f32>): {body} stablehlo.return %s : tensor<f32> }})"
    return module(
        f"%i = stablehlo.constant dense<{init}> : tensor<f32>\n"
        f'%r = "stablehlo.reduce"(%x, %i) {region} {{dimensions = array<i64: 1>}} : (tensor<{X}>, tensor<f32>) -> tensor<4xf32>',
        {"x": X},
        ["4xf32"],
    )


def sorted_by(compared):
    return module(
        '%r = "stablehlo.sort"(%x) ({ ^bb0(%a: tensor<f32>, %b: tensor<f32>):\n'
        f"  {compared}\n  stablehlo.return %c : tensor<i1> }}) {{dimension = 1 : i64}} : (tensor<{X}>) -> tensor<{X}>",
        {"x": X},
        [X],
    )


def scattered(body, n="4x6xf32", axis=1, indices="3x1xi32"):
    return module(
        f"""%r = "stablehlo.scatter"(%x, %at, %u) ({{ ^bb0(%a: tensor<f32>, %b: tensor<f32>): {body} }}) {{
  scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
  index_vector_dim = {axis}>}} : (tensor<{X}>, tensor<{indices}>, tensor<3x6xf32>) -> tensor<{X}>""",
        {"x": X, "at": indices, "u": "3x6xf32"},
        [X],
    )


def gathered(axis, indices):
    return module(
        f"""%r = "stablehlo.gather"(%x, %at) {{dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0],
  start_index_map = [0], index_vector_dim = {axis}>, slice_sizes = array<i64: 1, 6>}} : (tensor<{X}>, tensor<{indices}>) -> tensor<3x6xf32>""",
        {"x": X, "at": indices},
        ["3x6xf32"],
    )


def convolved(reversal):
    return module(
        "%r = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], "
        f"window = {{stride = [1, 2], pad = [[1, 0], [2, 2]], reverse = {reversal}}} "
        "{feature_group_count = 1 : i64, batch_group_count = 1 : i64} : (tensor<2x5x6x3xf32>, tensor<3x2x3x4xf32>) -> tensor<2x4x5x4xf32>",
        {"x": "2x5x6x3xf32", "k": "3x2x3x4xf32"},
        ["2x4x5x4xf32"],
    )


def chosen(k):
    branches = ", ".join(
        f"({{ %s = stablehlo.{f} %x : tensor<{X}> stablehlo.return %s : tensor<{X}> }})" for f in ("sine", "cosine", "abs")
    )
    return module(
        f'%i = stablehlo.constant dense<{k}> : tensor<i32>\n%j = stablehlo.add %i, %k : tensor<i32>\n%r = "stablehlo.case"(%j) ({branches[1:-1]}) '
        f": (tensor<i32>) -> tensor<{X}>",
        {"x": X, "k": "i32"},
        [X],
    )


ADD = "%s = stablehlo.add %a, %b : tensor<f32>"
MODULES = {
    **{f"{name} total order": module(f"%r = stablehlo.compare {name}, %x, %y, TOTALORDER : (tensor<{X}>, tensor<{X}>) -> tensor<{P}>",
                                     {"x": X, "y": Y}, [P]) for name in ("LT", "LE", "GT", "GE", "EQ", "NE")},
    "add of booleans": simple("stablehlo.add", [P, P], P),
    "multiply of booleans": simple("stablehlo.multiply", [P, P], P),
    "away from zero": simple("stablehlo.round_nearest_afz", [X]),
    "is infinite": simple("chlo.is_inf", [X], P),
    "is minus infinite": simple("chlo.is_neg_inf", [X], P),
    "broadcast add": module(f"%r = chlo.broadcast_add %x, %y : (tensor<{X}>, tensor<6xf32>) -> tensor<{X}>", {"x": X, "y": "6xf32"}, [X]),
    "broadcast along": module(f"%r = chlo.broadcast_subtract %x, %y {{broadcast_dimensions = array<i64: 0>}} : (tensor<{X}>, tensor<4xf32>) -> "
                              f"tensor<{X}>", {"x": X, "y": "4xf32"}, [X]),
    "constant like": module(f'%r = "chlo.constant_like"(%x) {{value = 2.5 : f32}} : (tensor<{X}>) -> tensor<{X}>', {"x": X}, [X]),
    "map": module(f'%r = "stablehlo.map"(%x, %y) ({{ ^bb0(%a: tensor<f32>, %b: tensor<f32>): {ADD}\n%t = stablehlo.tanh %s : tensor<f32>\n'
                  f'stablehlo.return %t : tensor<f32> }}) {{dimensions = array<i64: 0, 1>}} : (tensor<{X}>, tensor<{X}>) -> tensor<{X}>',
                  {"x": X, "y": Y}, [X]),
    "batch norm": module('%r = "stablehlo.batch_norm_inference"(%x, %a, %b, %c, %d) {epsilon = 1.5 : f32, feature_index = 1 : i64} : '
                         f"(tensor<{X}>, tensor<6xf32>, tensor<6xf32>, tensor<6xf32>, tensor<6xf32>) -> tensor<{X}>",
                         {"x": X, **dict.fromkeys("abcd", "6xf32")}, [X]),
    "dot": module("%r = stablehlo.dot %x, %y, precision = [HIGHEST, HIGHEST] : (tensor<4x6xf32>, tensor<6x3xf32>) -> tensor<4x3xf32>",
                  {"x": X, "y": "6x3xf32"}, ["4x3xf32"]),
    "sum from two": folded(ADD, 2.0),
    "sum, the other way": folded("%s = stablehlo.add %b, %a : tensor<f32>", 0.0),
    "maximum from two": folded("%s = stablehlo.maximum %a, %b : tensor<f32>", 2.0),
    "sum of squares": folded("%t = stablehlo.multiply %b, %b : tensor<f32>\n%s = stablehlo.add %a, %t : tensor<f32>", 0.0),
    "replacing scatter": scattered("stablehlo.return %b : tensor<f32>"),
    "scatter at a vector": scattered(f"{ADD}\nstablehlo.return %s : tensor<f32>", indices="3xi32"),
    "scatter, vectors first": scattered(f"{ADD}\nstablehlo.return %s : tensor<f32>", axis=0, indices="1x3xi32"),
    "gather at a vector": gathered(1, "3xi32"),
    "gather, vectors first": gathered(0, "1x3xi32"),
    "convolution": convolved("[false, false]"),
    "turned convolution": convolved("[true, false]"),
    "if": module(f'%r = "stablehlo.if"(%p) ({{ stablehlo.return %x : tensor<{X}> }}, {{ stablehlo.return %y : tensor<{X}> }}) '
                 f": (tensor<i1>) -> tensor<{X}>", {"p": "i1", "x": X, "y": Y}, [X]),
    **{f"case {k}": chosen(k) for k in (-12, -4, -3, 9)},
    "dynamic reshape": module("%s = stablehlo.constant dense<[3, 8]> : tensor<2xi32>\n"
                              f"%r = stablehlo.dynamic_reshape %x, %s : (tensor<{X}>, tensor<2xi32>) -> tensor<3x8xf32>", {"x": X}, ["3x8xf32"]),
    "dynamic broadcast": module("%s = stablehlo.constant dense<[2, 4, 6]> : tensor<3xi32>\n%r = stablehlo.dynamic_broadcast_in_dim %x, %s, "
                                f"dims = [1, 2] : (tensor<{X}>, tensor<3xi32>) -> tensor<2x4x6xf32>", {"x": X}, ["2x4x6xf32"]),
    "size": module(f"%r = stablehlo.get_dimension_size %x, dim = 1 : (tensor<{X}>) -> tensor<i32>", {"x": X}, ["i32"]),
    "upper cholesky": module("%z = stablehlo.constant dense<[[3.0, 1.0], [1.0, 2.0]]> : tensor<2x2xf32>\n%y = stablehlo.add %x, %z : "
                             "tensor<2x2xf32>\n%t = stablehlo.transpose %y, dims = [1, 0] : (tensor<2x2xf32>) -> tensor<2x2xf32>\n"
                             "%v = stablehlo.dot %t, %y : (tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<2x2xf32>\n"
                             "%r = stablehlo.cholesky %v, lower = false : tensor<2x2xf32>", {"x": "2x2xf32"}, ["2x2xf32"]),
    "window of sums, dilated": module(
        f'%i = stablehlo.constant dense<1.0> : tensor<f32>\n%r = "stablehlo.reduce_window"(%x, %i) ({{ ^bb0(%a: tensor<f32>, %b: tensor<f32>): {ADD}'
        "\nstablehlo.return %s : tensor<f32> }) {window_dimensions = array<i64: 2, 3>, base_dilations = array<i64: 2, 1>, "
        "window_dilations = array<i64: 1, 2>, padding = dense<[[0, 1], [2, 0]]> : tensor<2x2xi64>} : (tensor<4x6xf32>, tensor<f32>) -> "
        "tensor<7x4xf32>", {"x": X}, ["7x4xf32"]),
    "loop that counts down": module(
        "%one = stablehlo.constant dense<1> : tensor<i32>\n%zero = stablehlo.constant dense<0> : tensor<i32>\n%n = stablehlo.constant dense<5> : "
        f"tensor<i32>\n%r:2 = stablehlo.while(%i = %n, %c = %x) : tensor<i32>, tensor<{X}> cond {{\n %t = stablehlo.compare GT, %i, %zero : "
        "(tensor<i32>, tensor<i32>) -> tensor<i1>\n stablehlo.return %t : tensor<i1> } do {\n %j = stablehlo.subtract %i, %one : tensor<i32>\n"
        f" %d = stablehlo.tanh %c : tensor<{X}>\n stablehlo.return %j, %d : tensor<i32>, tensor<{X}> }}", {"x": X}, ["i32", X]),
    "loop in steps of three": module(
        "%three = stablehlo.constant dense<3> : tensor<i32>\n%zero = stablehlo.constant dense<1> : tensor<i32>\n%n = stablehlo.constant dense<9> : "
        f"tensor<i32>\n%r:2 = stablehlo.while(%i = %zero, %c = %x) : tensor<i32>, tensor<{X}> cond {{\n %t = stablehlo.compare LT, %i, %n : "
        "(tensor<i32>, tensor<i32>) -> tensor<i1>\n stablehlo.return %t : tensor<i1> } do {\n %j = stablehlo.add %i, %three : tensor<i32>\n"
        f" %d = stablehlo.sine %c : tensor<{X}>\n stablehlo.return %j, %d : tensor<i32>, tensor<{X}> }}", {"x": X}, ["i32", X]),
}  # fmt: skip


def compared(text, tolerance=0.0):
    """A module read and as it stands, on random arguments; gives the function that was read."""
    read = from_stablehlo(text)
    args = [value_of(aval) for aval in read.args]
    want = as_it_stands(text, args, read.jaxpr.out_avals)
    for x, y in zip(jax.tree.leaves(jax.jit(read)(*args)), want, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
    return read


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", MODULES)
def test_operations_compute_what_they_do_as_they_stand(name):
    assert compared(MODULES[name], 1e-6 if name in ("upper cholesky", "batch norm", "turned convolution") else 0.0).kept == ()


KEPT = {
    "sort with a comparison of its own": sorted_by("%c = stablehlo.compare GT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>"),
    "scatter that combines in its own way": scattered("%s = stablehlo.subtract %a, %b : tensor<f32>\nstablehlo.return %s : tensor<f32>"),
    "sort by what stands outside": sorted_by(
        "%s = stablehlo.multiply %a, %k : tensor<f32>\n%c = stablehlo.compare LT, %s, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>"
    ).replace("%x: tensor<4x6xf32>", "%x: tensor<4x6xf32>, %k: tensor<f32>"),
}


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", KEPT)
def test_what_jax_has_no_words_for_is_kept_and_said(name):
    read = compared(KEPT[name])
    (kept,) = read.kept
    assert re.fullmatch(r"stablehlo\.(sort|scatter) at module:\d \(main\)", kept)


def test_a_plan_has_what_is_kept_whole_and_splits_the_rest():
    text = module(
        '%t = "stablehlo.sort"(%v) ({ ^bb0(%a: tensor<f32>, %b: tensor<f32>):\n'
        "  %c = stablehlo.compare GT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>\n  stablehlo.return %c : tensor<i1> })"
        " {dimension = 0 : i64} : (tensor<2000xf32>) -> tensor<2000xf32>\n"
        "%p = stablehlo.broadcast_in_dim %t, dims = [0] : (tensor<2000xf32>) -> tensor<2000x2000xf32>\n"
        "%q = stablehlo.broadcast_in_dim %t, dims = [1] : (tensor<2000xf32>) -> tensor<2000x2000xf32>\n"
        "%m = stablehlo.multiply %p, %q : tensor<2000x2000xf32>\n%e = stablehlo.tanh %m : tensor<2000x2000xf32>\n"
        "%r = stablehlo.dot %e, %v : (tensor<2000x2000xf32>, tensor<2000xf32>) -> tensor<2000xf32>",
        {"v": "2000xf32"},
        ["2000xf32"],
    )
    read = from_stablehlo(text)
    planned = eqsat_mem.optimize(read, memory_limit="1MiB")
    plan = planned.plan(*read.args)
    assert plan.loops
    assert not plan.stands_alone
    assert "stablehlo" in plan.source.splitlines()[0]
    v = RNG.standard_normal(2000, dtype=np.float32)
    down = np.sort(v)[::-1]
    np.testing.assert_allclose(planned(v), np.tanh(down[:, None] * down) @ v, rtol=1e-3, atol=1e-3)


def test_two_kept_operations_that_are_equal_are_both_run():
    text = module(
        "%low = stablehlo.constant dense<0.0> : tensor<f32>\n%high = stablehlo.constant dense<1.0> : tensor<f32>\n"
        "%n = stablehlo.constant dense<[5]> : tensor<1xi64>\n"
        '%a = "stablehlo.rng"(%low, %high, %n) {rng_distribution = #stablehlo<rng_distribution UNIFORM>} '
        ": (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<5xf32>\n"
        '%b = "stablehlo.rng"(%low, %high, %n) {rng_distribution = #stablehlo<rng_distribution UNIFORM>} '
        ": (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<5xf32>\n"
        "%r = stablehlo.subtract %a, %b : tensor<5xf32>",
        {},
        ["5xf32"],
    )
    assert np.any(jax.jit(from_stablehlo(text))() != 0)


UNARY_FLOAT = [name for name in ROWS if name.startswith("chlo.") and "broadcast" not in name]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", tiered(BROADCASTS.split(), ["add", "power"]))
def test_broadcasting_operations_of_chlo(name):
    element, result = ("i32", "i32") if name in ("and", "or", "xor") or name.startswith("shift") else ("f32", "f32")
    if name == "compare":
        attributes, result = " {comparison_direction = #chlo<comparison_direction LT>}", "i1"
    else:
        attributes, result = "", "complex<f32>" if name == "complex" else result
    if name == "select":
        body = f'%r = "chlo.broadcast_select"(%p, %x, %y) : (tensor<4x1xi1>, tensor<6xf32>, tensor<f32>) -> tensor<{X}>'
        read = from_stablehlo(module(body, {"p": "4x1xi1", "x": "6xf32", "y": "f32"}, [X]))
        p, x, y = map(value_of, read.args)
        np.testing.assert_array_equal(read(p, x, y), np.where(p, x, y))
        return
    types = f"tensor<4x1x{element}>, tensor<6x{element}>"
    text = module(
        f'%r = "chlo.broadcast_{name}"(%x, %y){attributes} : ({types}) -> tensor<4x6x{result}>',
        {"x": f"4x1x{element}", "y": f"6x{element}"},
        [f"4x6x{result}"],
    )
    read = from_stablehlo(text)
    x, y = map(value_of, read.args)
    assert read.kept == ()
    row = {"complex": jnp.add, "power": lambda a, b: a**b, "remainder": jnp.fmod, "shift_right_logical": jnp.right_shift,
           "shift_right_arithmetic": jnp.right_shift, "shift_left": jnp.left_shift, "atan2": jnp.arctan2, "compare": jnp.less,
           "and": jnp.bitwise_and, "or": jnp.bitwise_or, "xor": jnp.bitwise_xor}.get(name) or getattr(jnp, name)  # fmt: skip
    want = row(x, 1j * y) if name == "complex" else row(x, y)
    np.testing.assert_allclose(read(x, y), want, rtol=1e-6)
