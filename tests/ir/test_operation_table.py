"""Every row of the operation table against JAX: values, sources, and that pointwise axes really are pointwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives

from eqsat_mem.backends.cpu.top_k import block_length, top_k_by_blocks
from eqsat_mem.ir import Call, ops
from eqsat_mem.ir.ops.collectives import COLLECTIVES
from eqsat_mem.schedule.backend import Backend
from tests.oracles.targets import CPU

RNG = np.random.default_rng(0)
FLOATS = np.array([0.25, -0.5, 0.75, 1.5, -2.5, 3.0, -0.0, np.inf, -np.inf, np.nan, 100.0, 1e-20], np.float32)
INTS = np.array([0, 1, -1, 2, 7, -8, 31, 2**31 - 1, -(2**31), 5, 12, 3], np.int32)
OPERANDS = {
    "float32": FLOATS,
    "int32": INTS,
    "uint32": INTS.view(np.uint32),
    "bool": np.arange(12) % 2 == 0,
    "complex64": np.array([complex(a, b) for a, b in zip(FLOATS[:6], FLOATS[5::-1])] * 2, np.complex64),
    "bfloat16": FLOATS.astype(jnp.bfloat16),
}
ARITY = {name: 3 if name in ("clamp", "select_n", "regularized_incomplete_beta") else 2 for name in (
    "add", "sub", "mul", "div", "rem", "max", "min", "nextafter", "eq", "ne", "lt", "le", "gt", "ge", "lt_to", "le_to", "and", "or", "xor",
    "shift_left", "shift_right_logical", "shift_right_arithmetic", "pow", "atan2", "complex", "igamma", "igammac", "igamma_grad_a",
    "polygamma", "zeta", "clamp", "select_n", "regularized_incomplete_beta")}  # fmt: skip
PARAMS: dict[str, dict[str, Any]] = {
    "integer_pow": {"y": 3},
    "round": {"rounding_method": lax.RoundingMethod.TO_NEAREST_EVEN},
    "convert_element_type": {"new_dtype": np.dtype(np.int32)},
    "reduce_precision": {"exponent_bits": 5, "mantissa_bits": 7},
}
SAMPLE_TEXTS = {
    "add": "(x * 2) + y", "exp": "jnp.exp(x * 2)", "max": "jnp.maximum(x * 2, y)", "neg": "-(x * 2)", "integer_pow": "(x * 2) ** 3",
}  # fmt: skip


def compiled(function: Callable[..., Any], *args: Any) -> Any:
    """The results of a function, compiled as one program, which takes a fraction of compiling each of its operations."""
    return jax.jit(function)(*args)


def same(a: Any, b: Any) -> None:
    """Equal shapes, dtypes and bits, any nan being any other."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    if a.dtype == jnp.bfloat16:
        a, b = a.astype(np.float32), b.astype(np.float32)
    np.testing.assert_array_equal(a, b)
    if a.dtype.kind == "f":
        here = ~np.isnan(a)
        np.testing.assert_array_equal(np.signbit(a)[here], np.signbit(b)[here])


def map_cases(name: str) -> list[tuple[list[np.ndarray], dict[str, Any]]]:
    """Operands and parameters of every dtype that the primitive takes."""
    row, cases = ops.MAPS[name], []
    for dtype, values in OPERANDS.items():
        if (name, dtype) == ("convert_element_type", "complex64"):
            continue  # numpy warns about the imaginary part, as it should
        args = [np.roll(values, 5 * k) for k in range(ARITY.get(name, 1))]
        params = dict(PARAMS.get(name, {}))
        if name == "select_n":
            args[0] = OPERANDS["bool"]
        if name == "bitcast_convert_type":
            params = {"new_dtype": np.dtype({"float32": np.int32, "int32": np.uint32, "uint32": np.float32}.get(dtype, args[0].dtype))}
        if name == "conj":
            params = {"input_dtype": args[0].dtype}
        try:
            jax.eval_shape(partial(row.bind, **params), *args)
        except (TypeError, ValueError, NotImplementedError):
            continue
        cases.append((args, params))
    return cases


@pytest.mark.parametrize("name", ops.MAPS)
def test_source_of_an_elementwise_operation_equals_its_primitive(name: str, request: pytest.FixtureRequest) -> None:
    if name == "clamp":  # only XLA's fusion emitters know it of booleans
        request.getfixturevalue("compiled_as_everybodys")
    cases = map_cases(name)
    assert cases, "the row takes no dtype"

    def both(every: list[Any]) -> Any:
        for args, (_, params) in zip(every, cases):
            want = ops.MAPS[name].bind(*args, **params)
            source = ops.map_text(name, params, [f"args[{k}]" for k in range(len(args))], want.dtype)
            assert source is not None or name in ("bessel_i0e", "conj")
            yield want, want if source is None else eval(source, {"jnp": jnp, "lax": lax, "np": np, "args": args})

    for want, got in compiled(lambda every: list(both(every)), [args for args, _ in cases]):
        same(got, want)


SLOW_TO_COMPILE = ("polygamma", "igamma_grad_a", "igamma", "igammac", "zeta")


@pytest.mark.parametrize("name", [n for n in ops.MAPS if ARITY.get(n, 1) == 2 and n not in SLOW_TO_COMPILE])
def test_source_broadcasts_axes_of_extent_one(name: str) -> None:
    args, params = map_cases(name)[0]
    a, b = jnp.asarray(args[0])[:, None], jnp.asarray(args[1])[None]
    want = jax.jit(lambda a, b: ops.MAPS[name].bind(*jnp.broadcast_arrays(a, b), **params))(a, b)
    source = ops.map_text(name, params, ["a", "b"], want.dtype)
    assert source is not None
    same(jax.jit(eval(f"lambda a, b: {source}", {"jnp": jnp, "lax": lax, "np": np}))(a, b), want)


@pytest.mark.parametrize(("name", "want"), SAMPLE_TEXTS.items())
def test_operands_of_operators_get_parentheses(name: str, want: str) -> None:
    assert ops.map_text(name, PARAMS.get(name, {}), ["x * 2", "y"], np.dtype(np.float32)) == want


@pytest.mark.parametrize("name", ["add", "max", "rem", "pow", "atan2", "nextafter", "div", "mul", "lt"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("x64", [False, True])
def test_numbers_may_stand_for_operands(name: str, dtype: str, x64: bool) -> None:
    with jax.enable_x64(x64):
        x = jnp.asarray([1, 2, 5], dtype)
        number = "2" if dtype == "uint8" else "2.0"
        try:
            want = ops.MAPS[name].bind(x, jnp.full_like(x, 2))
        except TypeError:
            return  # the primitive does not take this dtype
        source = ops.map_text(name, {}, ["x", number], want.dtype)
        assert source is not None
        same(eval(source, {"jnp": jnp, "lax": lax, "x": x}), want)


def test_parameters_that_the_source_cannot_say_leave_no_source() -> None:
    assert ops.map_text("mul", {"out_dtype": np.dtype(np.float32)}, ["x", "y"], np.dtype(np.float32)) is None
    assert ops.map_text("exp", {"accuracy": lax.AccuracyMode.HIGHEST}, ["x"], np.dtype(np.float32)) is None


def test_constructors_are_distinct() -> None:
    assert len({row.constructor for row in ops.MAPS.values()}) == len(ops.MAPS)


# --- monoids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ops.MONOIDS)
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint32", "bool", "bfloat16", "complex64"])
def test_monoid(name: str, dtype: str) -> None:
    row = ops.MONOIDS[name]
    if dtype in ("float32", "complex64", "bfloat16"):
        values = jnp.asarray(RNG.integers(-3, 4, (3, 5)).astype(np.float32)).astype(dtype)
    else:
        values = jnp.asarray(OPERANDS[dtype][:10].reshape(2, 5))
    if not ops.foldable(name, values.dtype):
        return
    try:
        jax.eval_shape(lambda x: (row.reduce(x, (1,)), row.combine(x, x)), values)
    except TypeError:
        return  # the primitive does not take this dtype

    def pairs(x: Any) -> Any:
        want = row.reduce(x, (1,))
        assert row.combine(x[:, :2], x[:, :2]).dtype == want.dtype == x.dtype
        yield eval(row.reduce_text.format("x", (1,)), {"lax": lax, "x": x}), want
        parts = {"a": row.reduce(x[:, :2], (1,)), "b": row.reduce(x[:, 2:], (1,))}
        yield eval(row.combine_text.format("a", "b"), {"jnp": jnp, **parts}), want
        yield row.combine(want, jnp.full_like(want, row.identity(x.dtype))), want
        yield row.reduce(x[:, :0], (1,)), jnp.full_like(want, row.identity(x.dtype))
        for n in (1, 2, 3):
            yield row.repeat(x, n), row.reduce(jnp.stack([x] * n), (0,))

    for got, want in compiled(lambda x: list(pairs(x)), values):
        same(got, want)


# --- blocks -----------------------------------------------------------------------------------------


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def spd(*batch: int) -> np.ndarray:
    a = f32(*batch, 4, 4)
    return a @ a.swapaxes(-1, -2) + 4 * np.eye(4, dtype=np.float32)


def _gather_batched(x: Any, i: Any) -> Any:
    return jax.vmap(lambda a, k: a[k])(x, i)


def _scatter_at(name: str) -> Callable[..., Any]:
    numbers = lax.ScatterDimensionNumbers(update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
    return partial(ops.scatters_at[name].bind, columns=(0,), ends=None, dimension_numbers=numbers)


def _scatter_batched(x: Any, i: Any, u: Any) -> Any:
    return jax.vmap(lambda a, k, w: a.at[k].add(w))(x, i, u)


def _window_gradient(x: Any) -> Any:
    def pool(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")

    return jax.vjp(pool, x)[1](pool(x))


def _window_tangent(x: Any) -> Any:
    def pool(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")

    return jax.jvp(pool, (x,), (x + 1,))


def _conv(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _grouped_conv(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=2)


def _dilated_conv(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 2, 1), ((1, 0), (0, 2), (1, 1)), (1, 2, 1), (2, 1, 1), ("DNHWC", "HDIOW", "CHNDW"),
                                    precision=lax.Precision.HIGHEST, preferred_element_type=np.float32)  # fmt: skip


WITH_BODIES = {"scan", "while", "cond", "reduce", "reduce_window", "operation"}
PIECES = (0, 0, 2, 0, 0), (1, 2, 5, -1, 1), (1, 5, 6, 4, 0)
INDICES = np.array([[0, 2], [3, 1], [2, 2]], np.int32)
KEYS = jax.random.split(jax.random.key(0), 3)

BLOCK_CASES: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("operation", ops.Operation("distance", lambda a, b: jnp.sum((a - b) ** 2), "(d),(d)->()"), (f32(3, 1, 5), f32(4, 5))),
    ("operation", jax.vmap(ops.Operation("outer", lambda a, b: b[:, None] * a, "(m),(n)->(n,m)"), (0, 1)), (f32(3, 5), f32(2, 3))),
    ("slice", lambda x: x[:, 1:4], (f32(3, 5),)),
    ("slice", lambda x: lax.slice(x, (0, 1), (3, 5), (1, 2)), (f32(3, 5),)),
    ("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, i), (3, 2)), (f32(3, 5), np.int32(2))),
    ("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)), (f32(3, 5), f32(3, 2), np.int32(2))),
    ("pad", lambda x: lax.pad(x, np.float32(2), ((0, 0, 0), (1, -2, 1))), (f32(3, 5),)),
    ("concatenate", lambda x, y: lax.concatenate([x, y], 1), (f32(3, 5), f32(3, 2))),
    ("split", lambda x: jnp.split(x, [1, 3], 1), (f32(3, 5),)),
    ("stack", lambda x, y: jnp.stack([x, y], 1), (f32(3, 5), f32(3, 5))),
    ("unstack", lambda x: jnp.unstack(x, axis=1), (f32(3, 2, 5),)),
    ("rev", lambda x: lax.rev(x, (1,)), (f32(3, 5),)),
    ("reshape", lambda x: lax.reshape(x, (5, 4, 3, 7)), (f32(5, 3, 4, 7),)),
    ("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, np.int16), (f32(3, 5),)),
    ("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), (f32(3, 5), f32(4))),
    ("slice_at", partial(ops.slice_at_p.bind, axis=1, stride=2), (f32(3, 5), np.arange(3, dtype=np.int32))),
    ("shift_to", partial(ops.shift_to_p.bind, axis=1, before=1, after=1), (f32(3, 2), np.arange(3, dtype=np.int32))),
    ("pieces", partial(ops.pieces_p.bind, pieces=PIECES, axis=0, beyond=1), (f32(1, 3), f32(5, 3))),
    ("with_sums", partial(ops.with_sums_p.bind, parts=1, first=True), (f32(3, 5), f32(3, 5))),
    ("with_sums", partial(ops.with_sums_p.bind, parts=2, first=False), (f32(4, 3, 20), f32(4, 3, 20))),
    ("gather", lambda x, i: x[i], (f32(5, 3), INDICES)),
    ("gather", lambda x, i: x[:, i], (f32(3, 5), INDICES)),
    ("gather", lambda x, i: x.at[i].get(mode="fill", fill_value=7.0), (f32(3, 5), INDICES)),
    ("gather", _gather_batched, (f32(3, 5, 4), INDICES)),
    ("scatter", lambda x, i, u: x.at[i].set(u), (f32(5, 3), np.array([4, 0], np.int32), f32(2, 3))),
    ("scatter-add", lambda x, i, u: x.at[:, i].add(u), (f32(3, 5), np.array([4, 0, 4], np.int32), f32(3, 3))),
    ("scatter-add", _scatter_batched, (f32(3, 5, 4), INDICES, f32(3, 2, 4))),
    ("scatter-sub", lambda x, i, u: x.at[i].subtract(u), (f32(5, 3), np.array([4, 0], np.int32), f32(2, 3))),
    ("scatter-mul", lambda x, i, u: x.at[i].mul(u), (f32(5, 3), np.array([4, 0], np.int32), f32(2, 3))),
    ("scatter-min", lambda x, i, u: x.at[i].min(u), (f32(5, 3), np.array([4, 0], np.int32), f32(2, 3))),
    ("scatter-max", lambda x, i, u: x.at[i].max(u), (f32(5, 3), np.array([4, 0], np.int32), f32(2, 3))),
    *((f.__name__, partial(f, axis=1, reverse=True), (f32(3, 5, 4),))
      for f in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)),
    ("argmax", lambda x: lax.argmax(x, 1, np.int32), (f32(3, 5, 4),)),
    ("argmin", lambda x: lax.argmin(x, 1, np.int32), (f32(3, 5, 4),)),
    ("sort", lambda x, y: lax.sort((x, y), dimension=1), (f32(3, 5), f32(3, 5))),
    ("top_k", lambda x: lax.top_k(x, 2), (f32(3, 5),)),
    ("approx_top_k", lambda x: lax.approx_max_k(x, 2), (f32(3, 5),)),
    ("cholesky", lax.linalg.cholesky, (spd(3),)),
    ("triangular_solve", lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True), (spd(), f32(4, 5))),
    ("triangular_solve", lambda a, b: lax.linalg.triangular_solve(a, b, transpose_a=True), (spd(3), f32(3, 5, 4))),
    ("lu", lax.linalg.lu, (spd(3),)),
    ("qr", lambda x: lax.linalg.qr(x, full_matrices=False), (spd(3),)),
    ("householder_product", lambda a, t: lax.linalg.householder_product(a, t), (f32(3, 4, 4), f32(3, 4))),
    ("ormqr", lambda a, t, c: lax.linalg.ormqr(a, t, c, transpose=True), (f32(3, 5, 4), f32(3, 4), f32(3, 5, 2))),
    ("symmetric_product", lambda a, c: lax.linalg.symmetric_product(a, c, alpha=2.0, beta=0.5), (f32(3, 5, 2), f32(3, 5, 5))),
    ("lu_pivots_to_permutation", lambda p: lax.linalg.lu_pivots_to_permutation(p, 5), (np.array([[1, 3, 2], [0, 2, 4]], np.int32),)),
    ("eigh", lax.linalg.eigh, (spd(3),)),
    ("eig", lambda x: lax.linalg.eig(x), (spd(3),)),
    ("svd", lambda x: lax.linalg.svd(x), (spd(3),)),
    ("schur", lambda x: lax.linalg.schur(x), (spd(3),)),
    ("hessenberg", lambda x: lax.linalg.hessenberg(x), (spd(3),)),
    ("tridiagonal", lambda x: lax.linalg.tridiagonal(x), (spd(3),)),
    ("tridiagonal_solve", lax.linalg.tridiagonal_solve, (f32(3, 4), f32(3, 4) + 4, f32(3, 4), f32(3, 4, 5))),
    ("conv_general_dilated", _conv, (f32(3, 5, 6, 2), f32(3, 3, 2, 4))),
    ("conv_general_dilated", _grouped_conv, (f32(3, 4, 6), f32(4, 2, 3))),
    ("conv_general_dilated", _dilated_conv, (f32(4, 5, 6, 2, 3), f32(2, 2, 3, 4, 3))),
    ("svd", lambda x: lax.linalg.svd(x, compute_uv=False), (spd(3),)),
    ("qr", lambda x: lax.linalg.qr(x, pivoting=True), (spd(),)),
    ("eigh", lambda x: lax.linalg.eigh(x, lower=False, sort_eigenvalues=False), (spd(),)),
    ("fft", lambda x: lax.fft(x, "RFFT", (6,)), (f32(3, 6),)),
    ("reduce_window", lambda x: lax.reduce_window(x, np.float32(1), lambda a, b: a * b + a, (1, 2), (1, 1), "VALID"), (f32(3, 5),)),
    ("reduce_window_sum", lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "SAME"), (f32(3, 5),)),
    ("reduce_window_max", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 1), "SAME"), (f32(3, 5),)),
    ("reduce_window_min", lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2), (1, 2), "VALID"), (f32(3, 5),)),
    *((f"{name}_at", _scatter_at(name), (f32(5, 3), np.array([[4], [0]], np.int32), f32(2, 3), np.arange(5, dtype=np.int32)))
      for name in ops.scatters_at),
    ("select_and_scatter_add", _window_gradient, (f32(3, 6),)),
    ("select_and_gather_add", _window_tangent, (f32(3, 6),)),
    ("reduce", lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b * a, (1,)), (f32(3, 5, 4),)),
    ("random_bits", jax.vmap(lambda k: jax.random.bits(k, (4,))), (KEYS,)),
    ("random_bits", lambda k: jax.random.bits(k, (4,), np.uint16), (KEYS[0],)),
    ("random_split", lambda k: jax.random.split(k, (2, 3)), (KEYS[0],)),
    ("random_seed", jax.random.key, (np.uint32(3),)),
    ("random_fold_in", jax.random.fold_in, (KEYS[0], np.uint32(5))),
    ("random_split", jax.vmap(lambda k: jax.random.split(k, 2)), (KEYS,)),
    ("random_seed", lambda s: jax.vmap(jax.random.key)(s), (np.arange(3, dtype=np.uint32),)),
    ("random_wrap", jax.random.wrap_key_data, (np.arange(6, dtype=np.uint32).reshape(3, 2),)),
    ("random_unwrap", jax.random.key_data, (KEYS,)),
    ("random_clone", jax.random.clone, (KEYS,)),
    ("random_fold_in", jax.vmap(jax.random.fold_in), (KEYS, np.arange(3, dtype=np.uint32))),
    ("random_gamma", jax.vmap(lambda k, a: jax.random.gamma(k, a)), (KEYS, np.full((3, 4), 2, np.float32))),
    ("random_gamma", lambda k: jax.random.gamma(k, jnp.full(3, 2.0)), (jax.random.key(1),)),
    ("threefry2x32", lambda k, x: primitives.threefry2x32_p.bind(k, k, x, x), (np.uint32(7), np.arange(4, dtype=np.uint32))),
    ("threefry2x32", lambda x: primitives.threefry2x32_p.bind(x, x, x, x), (np.arange(4, dtype=np.uint32),)),
    ("scan", lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x), (f32(3, 5),)),
    ("while", lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (jnp.int32(0), x)), (f32(3),)),
    ("cond", lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), (f32(3),)),
]  # fmt: skip

TIERED_CASES = [pytest.param(*c, marks=[pytest.mark.slow] if c[0] == "random_gamma" else []) for c in BLOCK_CASES]
"""The same; cases that take seconds to compile are of the second tier."""


def find(jaxpr: Any, name: str) -> Any:
    """The first equation of a primitive, in calls too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            return eqn
        for inner in eqn.params.values():
            inner = getattr(inner, "jaxpr", inner)
            if eqn.primitive.name in ("jit", "custom_jvp_call", "remat2") and hasattr(inner, "eqns"):
                found = find(inner, name)
                if found is not None:
                    return found
    return None


def operand(aval: Any) -> Any:
    """A value of this type: positive definite if it is square, keys if it holds keys."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(7), aval.shape)
    if aval.dtype == np.float32:
        square = aval.shape[-2:] == (4, 4)
        return jnp.asarray(spd(*aval.shape[:-2]) if square else f32(*aval.shape))
    return jnp.asarray(RNG.integers(0, 3, aval.shape), aval.dtype)


def operands_of(name: str, eqn: Any) -> list[Any]:
    """Values for an equation: positions of slices, and places that a scatter is told, ascend in even steps."""
    values = [operand(v.aval) for v in eqn.invars]
    steps = {"slice_at": (0, 2), "shift_to": (-1, 1)}
    if name in steps:
        start, stride = steps[name]
        values[1] = start + stride * jnp.arange(values[1].size, dtype=jnp.int32)
    if name.removesuffix("_at") in ops.scatters_at and name.endswith("_at"):
        values[3] = jnp.arange(values[3].size, dtype=jnp.int32)
    return values


def call_of(eqn: Any) -> tuple[Call, dict[int, int]]:
    """The call of an equation, with one index for each group, for each number of parts and for each bound axis; and their extents."""
    ins, outs = [v.aval.shape for v in eqn.invars], [v.aval.shape for v in eqn.outvars]
    row = ops.block_op(eqn.primitive.name)
    groups, parts = row.pointwise(ins, outs, eqn.params), row.parts(ins, outs, eqn.params)
    names = {place: g for g, group in enumerate(groups) for place in group}
    numbers = {place: len(groups) + n for n, (_, group) in enumerate(parts) for place in group}
    fresh, extents = iter(range(len(groups) + len(parts), 10_000)), {len(groups) + n: count for n, (count, _) in enumerate(parts)}

    def axis(place: ops.Place, extent: int) -> tuple[int, ...]:
        own = names.get(place, next(fresh))
        extents[own] = extent // extents.get(numbers.get(place, -1), 1)
        return (numbers[place], own) if place in numbers else (own,)

    def axes(side: str, shapes: list[Any]) -> Any:
        return tuple(tuple(axis((side, k, a), extent) for a, extent in enumerate(s)) for k, s in enumerate(shapes))

    dtypes = tuple(v.aval.dtype for v in eqn.outvars)
    pointwise = (1 << len(groups) + len(parts)) - 1
    return Call(eqn.primitive, dict(eqn.params), axes("in", ins), axes("out", outs), dtypes, pointwise), extents


def cut(array: Any, axes: Any, extents: dict[int, int], index: int, part: slice) -> Any:
    """The slice of an array along an index."""
    apart = array.reshape([extents[i] for axis in axes for i in axis])[
        tuple(part if i == index else slice(None) for axis in axes for i in axis)
    ]
    left = {**extents, index: len(range(*part.indices(extents[index])))}
    return apart.reshape([math.prod(left[i] for i in axis) for axis in axes])


def close(a: Any, b: Any) -> None:
    if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("name", "function", "args"), TIERED_CASES, ids=[f"{c[0]}{n}" for n, c in enumerate(BLOCK_CASES)])
def test_pointwise_axes_of_a_block_are_pointwise(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    eqn = find(jax.make_jaxpr(function)(*args).jaxpr, name)
    assert eqn is not None, "the function does not reach the primitive"
    (call, extents), operands = call_of(eqn), operands_of(name, eqn)

    def slices(operands: Any) -> Any:
        whole = ops.bind_call(call, operands)
        for index in range(call.pointwise.bit_count()):
            for part in (slice(0, 1), slice(0, extents[index] - 1), slice(1, extents[index])):
                sliced = ops.bind_call(call, [cut(a, axes, extents, index, part) for a, axes in zip(operands, call.in_axes)])
                yield from ((got, cut(want, axes, extents, index, part)) for got, want, axes in zip(sliced, whole, call.out_axes))

    for got, want in compiled(lambda operands: list(slices(operands)), operands):
        close(got, want)


@pytest.mark.parametrize(("name", "function", "args"), TIERED_CASES, ids=[f"{c[0]}{n}" for n, c in enumerate(BLOCK_CASES)])
def test_source_and_cost_of_a_block(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    eqn = find(jax.make_jaxpr(function)(*args).jaxpr, name)
    (call, _), operands = call_of(eqn), operands_of(name, eqn)
    shapes = [a.shape for a in operands]
    for backend in (Backend, CPU):
        assert backend.weights.of_block(call, shapes, [v.aval.shape for v in eqn.outvars]) >= 0
    source = ops.block_text(call, [f"args[{k}]" for k in range(len(operands))], shapes)
    if name in WITH_BODIES:
        assert source is None, "functions of the program: see test_standalone.py"
        return
    assert source is not None
    helpers = {f.__name__: f for f in ops.block_op(name).helpers}
    results = eval(source, {**helpers, "jax": jax, "jnp": jnp, "np": np, "lax": lax, "primitives": primitives, "args": operands})
    for got, want in zip(results if isinstance(results, tuple | list) else [results], ops.bind_call(call, operands), strict=True):
        assert got.dtype == want.dtype
        if jax.dtypes.issubdtype(want.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        if name == "cholesky":  # what the primitive leaves above the diagonal has no meaning
            want = jnp.tril(want)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_every_block_row_has_a_case() -> None:
    """Collectives have theirs in tests/mesh, where there are devices."""
    assert set(ops.BLOCKS) - {row.name for row in COLLECTIVES} == {name for name, _, _ in BLOCK_CASES}


def expected_groups(function: Callable[..., Any], name: str, *args: Any) -> int:
    call, _ = call_of(find(jax.make_jaxpr(function)(*args).jaxpr, name))
    return call.pointwise.bit_count()


def test_blocks_bind_no_more_axes_than_they_must() -> None:
    assert expected_groups(lambda x: x[:, 1:4], "slice", f32(3, 5)) == 1
    assert expected_groups(lambda x, i: x[i], "gather", f32(5, 3), INDICES) == 3
    assert expected_groups(_gather_batched, "gather", f32(3, 5, 4), INDICES) == 3
    assert expected_groups(lambda x: lax.top_k(x, 2), "top_k", f32(3, 5)) == 1
    assert expected_groups(_conv, "conv_general_dilated", f32(3, 5, 6, 2), f32(3, 3, 2, 4)) == 2
    assert expected_groups(_grouped_conv, "conv_general_dilated", f32(3, 4, 6), f32(4, 2, 3)) == 3
    assert expected_groups(lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), "triangular_solve", spd(3), f32(3, 4, 5)) == 2
    assert expected_groups(lambda x: lax.reshape(x, (5, 4, 3, 7)), "reshape", f32(5, 3, 4, 7)) == 2


def test_a_call_without_results_returns_a_token() -> None:
    eqn = jax.make_jaxpr(lambda x: jax.debug.callback(lambda _: None, x))(1.0).eqns[0]
    call = Call(eqn.primitive, dict(eqn.params), ((),), ((),), (np.dtype(bool),), effects=True)
    (token,) = ops.bind_call(call, [jnp.float32(1)])
    assert token.shape == ()
    assert not token


@pytest.mark.parametrize("left_side", [True, False])
@pytest.mark.parametrize("transpose_a", [True, False])
@pytest.mark.parametrize("conjugate_a", [True, False])
def test_a_triangular_solve_of_rows_is_the_same_solve(left_side: bool, transpose_a: bool, conjugate_a: bool) -> None:
    rng = np.random.default_rng(0)
    a = np.tril(rng.standard_normal((5, 5)) + 1j * rng.standard_normal((5, 5))).astype(np.complex64) + 4 * np.eye(5, dtype=np.complex64)
    b = rng.standard_normal((5, 5)).astype(np.complex64)
    params = {"left_side": left_side, "lower": True, "transpose_a": transpose_a, "conjugate_a": conjugate_a, "unit_diagonal": False}
    write = CPU.idioms.block("triangular_solve").in_order
    assert write is not None
    source = write(params, ["a", "b"], [(5, 5), (5, 5)])
    got = eval(source, {"jnp": jnp, "lax": lax, "a": a, "b": b})
    np.testing.assert_allclose(got, lax.linalg.triangular_solve(a, b, **params), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, row in ops.BLOCKS.items() if row.written_out is not None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_a_search_written_out_finds_the_same_places(name: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-2, 3, (200, 7)), dtype)
    if dtype in ("float32", "bfloat16"):
        x = jnp.where(jnp.asarray(rng.random(x.shape) < 0.2), jnp.asarray(rng.choice([np.nan, np.inf, -np.inf], x.shape), dtype), x)
    row, params = ops.block_op(name), {"axes": (1,), "index_dtype": np.dtype("int16")}
    text = row.written_out(params, [f"x[:, {k}]" for k in range(7)])
    names = {"x": x, "jnp": jnp, "lax": lax} | {helper.__name__: helper for helper in row.helpers}
    found = eval(text, names)
    assert found.dtype == np.int16
    assert np.array_equal(found, getattr(lax, name)(x, 1, np.int16))


@pytest.mark.parametrize(("extent", "searches"), [(200, 1), (3001, 2)])
def test_a_selection_whose_results_are_read_in_slices_stays_one(extent: int, searches: int) -> None:
    """XLA:CPU has a search for the largest, which it finds in a sort whose first elements are read together."""

    def largest_and_others(x: Any) -> Any:
        values, places = top_k_by_blocks(x, 4)
        return values[:, 0], jnp.exp(values[:, 1] - values[:, 0]) + values[:, 2] * values[:, 3], places

    text = jax.jit(largest_and_others).lower(f32(64, extent)).compile().as_text()
    assert text.count('custom_call_target="TopK"') == searches


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e4m3b11fnuz"]
)
@pytest.mark.parametrize(
    "special", [(0.0, -0.0), (-0.0,), (np.nan,), (-np.nan, np.nan, np.inf), (np.inf, -np.inf, -0.0, 0.0, -np.nan, 1e-45)]
)
@pytest.mark.parametrize("share", [0.01, 0.99])
def test_a_selection_by_blocks_is_that_of_all_elements(dtype: str, special: tuple[float, ...], share: float) -> None:
    """Also of zeros with signs, infinities, and what is not a number, in the order of their bits; other numbers are negative here."""
    rng = np.random.default_rng(0)
    plain = -rng.integers(0 if dtype == "int32" else 1, 5, (6, 2000)).astype(np.float32)
    drawn = np.where(rng.random(plain.shape) < share, rng.choice(np.float32(special), plain.shape), plain)
    x = jnp.asarray(np.clip(np.nan_to_num(drawn), -9, 9) if dtype == "int32" else drawn, dtype)
    assert block_length(x.shape[1], 3) is not None
    want, got = (jax.jit(f, static_argnums=1)(x, 3) for f in (lax.top_k, top_k_by_blocks))
    assert np.array_equal(want[1], got[1])
    assert np.array_equal(np.signbit(want[0]), np.signbit(got[0]))
    assert np.array_equal(want[0].astype("float32"), got[0].astype("float32"), equal_nan=True)
