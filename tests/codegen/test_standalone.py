"""Emitted source stands alone: run by itself it computes what the plan's function and plain JAX compute."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.codegen.emit import Emitted, emit
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.frontend.load import load
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.split import region
from tests.oracles.targets import CPU
from tests.tiers import tiered

RNG = np.random.default_rng(0)


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def spd(n: int) -> np.ndarray:
    a = f32(n, n)
    return a @ a.T + n * np.eye(n, dtype=np.float32)


def written(function: Callable[..., Any], *args: Any) -> Emitted:
    """A function as it is written, as source."""
    flat, tree = jax.tree.flatten(args)
    jaxpr = jax.make_jaxpr(lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves))))(*flat)
    ex = Extraction(load(jaxpr, [f"arg{k}" for k in range(len(flat))]))
    return emit(Schedule(ex, CPU, region(ex), {}, 0, 0.0))


def alone(code: Any, name: str = "program") -> Callable[..., Any]:
    """The function of a source that sees nothing but what its namespace says."""
    namespace = dict(code.namespace)
    exec(compile(code.source, "<alone>", "exec"), namespace)
    return namespace[name]


def same(got: Any, want: Any, rtol: float = 1e-5) -> None:
    assert jnp.shape(got) == jnp.shape(want)
    if jax.dtypes.issubdtype(want.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=rtol, atol=rtol)


def check(function: Callable[..., Any], *args: Any) -> Emitted:
    code = written(function, *args)
    leaves, want = jax.tree.leaves(args), jax.tree.leaves(jax.jit(function)(*args))
    for run in (jax.jit(alone(code)), code.function):
        for got, expected in zip(run(*leaves), want, strict=True):
            same(got, expected)
    return code


def _nested(x: Any, n: Any) -> Any:
    def grow(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.tanh(c[1] * x)), (0, x))[1]

    return lax.cond(x.sum() > 0, grow, lambda x: x * n, x)


def _scan_of_everything(x: Any, xs: Any) -> Any:
    table = jnp.asarray(TABLE)

    def step(c: Any, row: Any) -> Any:
        count, total = c
        picked = lax.switch(count % 3, [lambda r: r + 1, lambda r: r * total, jnp.sin], row["a"])
        return (count + 1, total + picked @ table), {"y": picked, "count": count}

    return lax.scan(step, (jnp.int32(0), x), xs, reverse=True, unroll=2)


def _keys_in_a_loop(key: Any) -> Any:
    def step(key: Any, _: Any) -> Any:
        key, sub = jax.random.split(key)
        return key, jax.random.normal(sub, (3,))

    return lax.scan(step, key, None, length=4)


def _batched_while(x: Any, n: Any) -> Any:
    def one(x: Any, n: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2 + x), (0, x))

    return jax.vmap(one)(x, n)


def _convolution(x: Any, w: Any) -> Any:
    y = lax.conv_general_dilated(x, w, (1, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _pooling_gradient(x: Any) -> Any:
    return jax.grad(lambda x: (lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID") ** 2).sum())(x)


TABLE = f32(4, 4)
LARGE = f32(20, 3)
KEYS = jax.random.split(jax.random.key(5), 3)
ROWS = {"a": f32(7, 4)}
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "cholesky solve": (lambda a, b: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), b), (spd(4), f32(4, 3))),
    "solve": (jnp.linalg.solve, (spd(4), f32(4, 3))),
    "inverse and determinant": (lambda a: (jnp.linalg.inv(a), jnp.linalg.slogdet(a)), (spd(4),)),
    "eigh": (lambda a: jnp.linalg.eigh(a)[0], (spd(4),)),
    "qr and svd": (lambda a: (jnp.linalg.qr(a), jnp.linalg.svd(a, compute_uv=False)), (spd(4),)),
    "fft": (lambda x: jnp.abs(jnp.fft.rfft(x)), (f32(3, 8),)),
    "convolution": (_convolution, (f32(2, 6, 6, 3), f32(3, 3, 3, 4))),
    "gradient of a pooling": (_pooling_gradient, (f32(3, 6),)),
    "random numbers": (lambda: jax.random.normal(jax.random.key(3), (4, 5)), ()),
    "random numbers of a key": (lambda k: (jax.random.gamma(k, 2.0, (4,)), jax.random.permutation(k, 7)), (jax.random.key(1),)),
    "random numbers of keys": (jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, 2), (4,))), (KEYS,)),
    "raw keys": (lambda k: jax.random.split(k), (jax.random.PRNGKey(1),)),
    "keys in a loop": (_keys_in_a_loop, (jax.random.key(1),)),
    "a while loop in a branch": (_nested, (np.abs(f32(4)), np.int32(3))),
    "the other branch": (_nested, (-np.abs(f32(4)), np.int32(3))),
    "scan": (_scan_of_everything, (f32(4), ROWS)),
    "scan without carry": (lambda x: lax.scan(lambda _, r: (None, jnp.sin(r)), None, x), (f32(3, 4),)),
    "gradient of a scan": (lambda x: jax.grad(lambda x: lax.scan(lambda c, r: (jnp.tanh(c * r), c), x[0], x)[1].sum())(x), (f32(6),)),
    "fori_loop": (lambda x: lax.fori_loop(0, 5, lambda i, c: c + i * x, x), (f32(3),)),
    "a loop of a batch": (_batched_while, (f32(3), np.array([2, 0, 5]))),
    "reduction by a function": (lambda x: lax.reduce(x, np.float32(1), lambda a, b: a * b + a, (1,)), (f32(3, 4),)),
    "two reductions by a function": (
        lambda x, y: lax.reduce((x, y), (np.float32(0), np.float32(1)), lambda a, b: (a[0] + b[1], a[1] + b[0]), (0,)), (f32(3), f32(3))),
    "windows by a function": (
        lambda x: lax.reduce_window(x, np.float32(1), lambda a, b: a * b + a, (1, 2), (1, 1), "SAME"), (f32(3, 5),)),
    "small arrays around it": (lambda x: x * jnp.array([1.0, 2.5, -3.0]) + np.array([1, 2, 3]), (f32(3),)),
    "a key around it": (lambda x: x + jax.random.uniform(KEYS[0]), (f32(3),)),
    "operations without a function": (lambda x: jax.scipy.special.i0e(x) + lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST), (f32(3),)),
    "keys chosen": (lambda p, k: jax.random.uniform(jnp.where(p, k, jax.random.key(0))), (np.bool_(True), jax.random.key(1))),
    "contractions of a given precision": (lambda x: jnp.dot(x, x.T, precision="highest"), (f32(3, 4),)),
}  # fmt: skip
SLOW = ("random numbers of a key", "inverse and determinant")


@pytest.mark.parametrize("name", tiered(CASES, [name for name in CASES if name not in SLOW]))
def test_source_stands_alone(name: str) -> None:
    function, args = CASES[name]
    code = check(function, *args)
    assert dict(code.namespace) == {}, code.source


@pytest.mark.parametrize("name", CASES)
def test_source_imports_jax_and_numpy_only(name: str) -> None:
    function, args = CASES[name]
    tree = ast.parse(written(function, *args).source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert all(alias.name in ("jax", "jax.numpy", "numpy") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module in ("jax", "jax.extend.core")


def test_large_arrays_around_a_program_stay_outside_of_its_source() -> None:
    code = check(lambda x: x @ jnp.asarray(LARGE).T, f32(3))
    assert list(code.namespace) == ["const"]
    assert code.source.splitlines()[0] == "# Not defined here, but in the plan's namespace: const (float32[20, 3])."


def test_operations_without_source_are_named() -> None:
    def callback(x: Any) -> Any:
        return jax.pure_callback(lambda x: np.sin(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    code = check(lambda x: lax.scan(lambda c, r: (callback(c + r), r), x[0], x), f32(3, 2))
    assert list(code.namespace) == ["pure_callback"]
    assert "pure_callback (operation without source)" in code.source.splitlines()[0]


def test_effects_inside_loops_happen_as_often(capfd: Any) -> None:
    def loud(x: Any) -> Any:
        def step(c: Any, r: Any) -> Any:
            lax.cond(r > 0, lambda: jax.debug.print("up {}", r), lambda: None)
            return c + r, None

        return lax.scan(step, x[0], x)[0]

    x = np.array([1.0, -2.0, 3.0], np.float32)
    code = written(loud, x)
    for run in (loud, alone(code)):
        jax.block_until_ready(run(x))
        jax.effects_barrier()
        assert capfd.readouterr().out.split("\n") == ["up 1.0", "up 3.0", ""]


def test_a_planned_body_stands_in_the_source() -> None:
    def kernels(x: Any, ys: Any) -> Any:
        def step(c: Any, y: Any) -> Any:
            distance = jnp.sum((c[:, None] - y[None]) ** 2, -1)
            return c + jnp.exp(-distance) @ y * 0.01, distance.max()

        return lax.scan(step, x, ys)

    x, ys = f32(1200, 3), f32(4, 1100, 3)
    plan = eqsat_mem.optimize(kernels, memory_limit="2MB").plan(x, ys)
    assert plan.stands_alone
    assert "lax.scan(scan_body" in plan.source
    assert "loop over" in plan.source
    want = jax.tree.leaves(kernels(x, ys))
    for got, expected in zip(alone(plan, plan.name)(x, ys), want, strict=True):
        same(got, expected, 1e-4)


def test_a_program_left_as_it_was_has_a_source_too() -> None:
    plan = eqsat_mem.optimize(jnp.linalg.cholesky, memory_limit="1MB").plan(spd(4))
    assert plan.unchanged
    a = spd(4)
    same(alone(plan, [n.name for n in ast.parse(plan.source).body if isinstance(n, ast.FunctionDef)][-1])(a)[0], jnp.linalg.cholesky(a))


def test_names_are_those_of_the_operations() -> None:
    source = written(lambda a: lax.linalg.qr(a)[1], spd(4)).source
    assert "qr_0, qr_1 = lax.linalg.qr(arg0" in source
    assert "return (qr_1,)" in source


@pytest.mark.parametrize(("columns", "flipped"), [(3, True), (1, False)], ids=["matrix", "vector"])
def test_lapack_is_given_the_rows_of_a_matrix(columns: int, flipped: bool) -> None:
    """The transpose of an array of rows is one of columns, so that nothing is laid out anew; of a vector there is nothing to lay out."""

    def solve(a: Any, b: Any) -> Any:
        return lax.linalg.triangular_solve(a, jnp.exp(b), left_side=True, lower=True)

    a, b = spd(4), f32(4, columns)
    code = written(solve, a, b)
    assert ("lax.optimization_barrier(jnp.swapaxes(lax.linalg.triangular_solve(arg0, jnp.swapaxes(" in code.source) is flipped
    same(alone(code)(a, b)[0], solve(a, b), 1e-5)


def test_comments_are_the_users_lines_only() -> None:
    def searched(x: Any) -> Any:
        return jnp.argmin(x, 1), x[jnp.arange(3), jnp.arange(3)], jax.grad(lambda x: jnp.sin(x).sum())(x)

    source = written(searched, f32(3, 4)).source
    comments = [line.strip() for line in source.splitlines() if line.strip().startswith("#")]
    assert comments
    assert all("test_standalone.py" in c for c in comments), comments
