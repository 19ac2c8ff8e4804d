"""Loading: programs mean what their functions mean, and the indices, terms and order are those that one expects."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.linalg import solve_triangular

import eqsat_mem
from eqsat_mem import ir
from eqsat_mem.frontend import load as loading
from eqsat_mem.ir import interpreter
from tests.oracles.evaluation import results, values

RNG = np.random.default_rng(0)
Terms = type[ir.Term]


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def load(function: Callable[..., Any], *args: Any) -> ir.Program:
    closed = jax.make_jaxpr(function)(*args)
    program = loading.load(closed, [f"arg{k}" for k in range(len(jax.tree.leaves(args)))])
    ir.check(program)
    return program


def check(function: Callable[..., Any], *args: Any) -> ir.Program:
    """The program of a function, which computes what the function computes."""
    args = jax.tree.map(jnp.asarray, args)
    program = load(function, *args)
    (got,), want = values(jax.tree.leaves(args), program), results(function, *args)
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if jax.dtypes.issubdtype(a.dtype, np.inexact):
            tolerance = 1e-10 if a.dtype in (np.float64, np.complex128) else 2e-2 if a.dtype.itemsize == 2 else 2e-5
            np.testing.assert_allclose(np.asarray(a, b.dtype), np.asarray(b), rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    return program


def kinds(program: ir.Program) -> list[str]:
    return [type(program.terms[t]).__name__ for t in program.reachable()]


# --- the programs that the library is for -----------------------------------------------------------


def sq_dist(x: Any, y: Any) -> Any:
    return jnp.sum((x[:, None, :] - y[None, :, :]) ** 2, axis=-1)


def se(x: Any, y: Any, ls: Any = 1.0, var: Any = 1.0) -> Any:
    return var * jnp.exp(-0.5 * sq_dist(x / ls, y / ls))


def attention(q: Any, k: Any, v: Any) -> Any:
    s = jnp.einsum("hqd,hkd->hqk", q, k) / jnp.sqrt(q.shape[-1])
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(s, axis=-1), v)


def multihead(x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
    t, d = x.shape
    q, k, v = ((x @ w).reshape(t, 2, d // 2).transpose(1, 0, 2) for w in (wq, wk, wv))
    return x + attention(q, k, v).transpose(1, 0, 2).reshape(t, d) @ wo


def elbo(x: Any, y: Any, z: Any, ls: Any, var: Any, noise: Any) -> Any:
    eye = jnp.eye(z.shape[0], dtype=x.dtype)
    low = jnp.linalg.cholesky(se(z, z, ls, var) + 1e-3 * eye)
    a = solve_triangular(low, se(z, x, ls, var), lower=True) / jnp.sqrt(noise)
    low_b = jnp.linalg.cholesky(eye + a @ a.T)
    c = solve_triangular(low_b, a @ y, lower=True) / jnp.sqrt(noise)
    return -jnp.sum(jnp.log(jnp.diag(low_b))) - 0.5 * jnp.sum(y**2) / noise + 0.5 * jnp.sum(c**2) + 0.5 * jnp.sum(a**2)


def network(x: Any, w1: Any, b: Any, w2: Any) -> Any:
    return jnp.mean(jax.nn.relu(x @ w1 + b) @ w2)


def conjugate_gradients(x: Any, b: Any) -> Any:
    def step(state: Any, _: Any) -> Any:
        u, r, p = state
        kp = se(x, x) @ p + 0.5 * p
        a = jnp.sum(r * r) / jnp.sum(p * kp)
        u, rn = u + a * p, r - a * kp
        return (u, rn, rn + jnp.sum(rn * rn) / jnp.sum(r * r) * p), jnp.sum(rn * rn)

    return lax.scan(step, (jnp.zeros_like(b), b, b), None, length=3)


ELBO = (f32(17, 3), f32(17, 1), f32(5, 3), np.full(3, 1.5, np.float32), np.float32(0.8), np.float32(0.5))
HEADS = (f32(2, 6, 4), f32(2, 7, 4), f32(2, 7, 4))

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "kernel": (lambda x, y, v: se(x, y) @ v, (f32(7, 3), f32(5, 3), f32(5, 2))),
    "kernel with itself": (lambda x, v: (se(x, x) + 0.1 * jnp.eye(7)) @ v, (f32(7, 3), f32(7, 1))),
    "nearest neighbours": (lambda x, q: lax.top_k(-sq_dist(q, x), 3), (f32(9, 3), f32(4, 3))),
    "nearest centre": (lambda x, c: jnp.argmin(sq_dist(x, c), axis=1), (f32(9, 3), f32(4, 3))),
    "bound": (elbo, ELBO),
    "attention": (attention, HEADS),
    "heads": (multihead, (f32(5, 6), f32(6, 6), f32(6, 6), f32(6, 6), f32(6, 6))),
    "network": (network, (f32(6, 5), f32(5, 8), f32(8), f32(8, 3))),
    "conjugate gradients": (conjugate_gradients, (f32(6, 3), f32(6, 1))),
    "chain": (lambda a, b, c, d: ((a @ b.T) @ c) @ d.T, (f32(7, 3), f32(6, 3), f32(6, 2), f32(5, 2))),
    "trace of a product": (lambda a, b: jnp.trace(a @ b), (f32(4, 6), f32(6, 4))),
    "self dot": (lambda a, b: jnp.exp(a @ b.T).T @ jnp.exp(a @ b.T), (f32(6, 2), f32(4, 2))),
    "hausdorff": (lambda x, y: jnp.maximum(sq_dist(x, y).min(0).max(), sq_dist(x, y).min(1).max()), (f32(6, 2), f32(4, 2))),
    "logsumexp": (lambda h, w: jax.scipy.special.logsumexp(h @ w, axis=-1), (f32(6, 4), f32(4, 9))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    function, args = PROGRAMS[name]
    check(function, *args)


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in ("nearest neighbours", "nearest centre")])
def test_gradients(name: str) -> None:
    function, args = PROGRAMS[name]

    def loss(*args: Any) -> Any:
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(function(*args)))

    check(jax.grad(loss, argnums=tuple(range(len(args)))), *args)


# --- every other shape of program -------------------------------------------------------------------

X, S, V, I = f32(6, 4), f32(4, 4), f32(4, 2), np.array([2, 0, 2], np.int32)  # noqa: E741
SPD = (S @ S.T + 4 * np.eye(4)).astype(np.float32)


@jax.custom_jvp
def custom(x: Any) -> Any:
    return jnp.sin(x)


custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0]))

FEATURES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "gram": (lambda x: x @ x.T, (X,)),
    "square": (lambda s: s @ s, (S,)),
    "power": (lambda s: s @ s @ s.T @ s, (S,)),
    "symmetric": (lambda s: s + s.T, (S,)),
    "outer": (lambda x: x[:, None] - x[None], (X,)),
    "outer product": (lambda x, y: jnp.einsum("i,j->ij", x, y), (X[0], X[1])),
    "merge": (lambda x: x.reshape(-1) * 2, (X,)),
    "split": (lambda x: x.reshape(2, 3, 4).sum(1), (X,)),
    "merge and split": (lambda x: x.reshape(-1).reshape(6, 2, 2) + x.reshape(6, 2, 2), (X,)),
    "incompatible": (lambda x: x.reshape(8, 3) + x.reshape(3, 8).T, (X,)),
    "reversed factors": (lambda x: x.reshape(-1) + x.T.reshape(-1), (X,)),
    "iota of a product": (lambda x: jnp.arange(24.0).reshape(6, 4) + x + jnp.arange(24).reshape(6, 4), (X,)),
    "broadcast sum": (lambda x: jnp.broadcast_to(x, (3, 6, 4)).sum((0, 2)), (X,)),
    "tile": (lambda x: jnp.tile(x, (2, 3)) * jnp.tile(x, (2, 3)), (X,)),
    "repeat": (lambda x: jnp.repeat(x, 2, axis=0), (X,)),
    "einsum trace": (lambda s: jnp.einsum("ii->", s), (S,)),
    "einsum diagonal": (lambda s: jnp.einsum("ii->i", s), (S,)),
    "einsum three": (lambda x, v, s: jnp.einsum("ij,jk,jl->ikl", x, v, s), (X, V, S)),
    "einsum batch": (lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (f32(2, 3, 4), f32(2, 5, 4))),
    "einsum lone": (lambda x, v: jnp.einsum("ij,kl->k", x, v), (X, V)),
    "mixed dot": (lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float32), (X.astype(jnp.bfloat16), V.astype(jnp.bfloat16))),
    "integer dot": (lambda a, b: lax.dot(a, b, preferred_element_type=jnp.int32), (np.ones((3, 4), np.int8), np.ones((4, 2), np.int8))),
    "softmax": (jax.nn.softmax, (X,)),
    "layer norm": (lambda x: (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True), (X,)),
    "softmax gradient": (jax.grad(lambda x: (jax.nn.log_softmax(x) ** 2).sum()), (X,)),
    "diag": (jnp.diag, (S,)),
    "diag of vector": (lambda x: jnp.diag(x[0]), (S,)),
    "diagonal": (lambda x: jnp.diagonal(x, 1), (X.T,)),
    "diagonal gradient": (jax.grad(lambda s: (jnp.diag(s) ** 2).sum()), (S,)),
    "add to diagonal": (lambda s: s.at[jnp.diag_indices(4)].add(jnp.float32(2)), (S,)),
    "set diagonal": (lambda x: x.at[jnp.arange(4), jnp.arange(4)].set(jnp.arange(4.0)), (X,)),
    "batched diagonal": (lambda x: jnp.diagonal(x, axis1=0, axis2=2), (f32(4, 3, 4),)),
    "boolean diagonal": (lambda x: jnp.diag(x > 0), (S,)),
    "cholesky": (jnp.linalg.cholesky, (SPD,)),
    "cholesky gradient": (jax.grad(lambda s: jnp.linalg.cholesky(s).sum()), (SPD,)),
    "solve": (jnp.linalg.solve, (SPD, V)),
    "triangular solve": (lambda s, v: solve_triangular(s, v, trans=1), (SPD, V)),
    "eigh": (lambda s: jnp.abs(jnp.linalg.eigh(s)[1]), (SPD,)),
    "svd": (lambda x: jnp.linalg.svd(x, compute_uv=False), (X,)),
    "qr": (lambda x: jnp.abs(jnp.linalg.qr(x)[1]), (X,)),
    "slogdet": (jnp.linalg.slogdet, (SPD,)),
    "gather rows": (lambda x, i: x[i] * 2, (X, I)),
    "gather by itself": (lambda i: i[i], (I,)),
    "gather columns": (lambda x, i: x[:, i] + x[:, i], (X, I)),
    "take along": (lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1), (X,)),
    "gather gradient": (jax.grad(lambda x, i: (x[i] ** 2).sum()), (X, I)),
    "scatter": (lambda x, i: (x.at[i].add(1.0), x.at[i, 1].mul(2.0), x.at[:, 1:].set(0.0), x.at[2].set(3.0)), (X, I)),
    "segment sum": (lambda x, i: jax.ops.segment_sum(x[:3], i, num_segments=4), (X, I)),
    "slices": (lambda x: (x[1:3], x[::2], x[::-1], x[:, 1], x[-1], x[1:] - x[:-1]), (X,)),
    "dynamic slice": (lambda x, i: lax.dynamic_slice_in_dim(x, i, 2) + lax.dynamic_index_in_dim(x, i, keepdims=False), (X, np.int32(3))),
    "joins": (lambda x: (jnp.concatenate([x, x]), jnp.stack([x, x + 1], 1), jnp.pad(x, 1), jnp.roll(x, 2), jnp.split(x, 3)), (X,)),
    "sorts": (lambda x: (jnp.sort(x, 0), jnp.argsort(x), lax.top_k(x, 2), jnp.median(x, 1), jnp.argmax(x)), (X,)),
    "running": (lambda x: (jnp.cumsum(x, 1) - x, jnp.cumprod(x), lax.cummax(x), lax.cumlogsumexp(x)), (X,)),
    "convolution": (lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME"), (f32(2, 3, 8), f32(4, 3, 3))),
    "pooling": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"), (X,)),
    "pooling gradient": (jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID").sum()), (X,)),
    "fft": (lambda x: jnp.fft.irfft(jnp.fft.rfft(x)), (X,)),
    "scan": (lambda x: lax.scan(lambda c, r: (c + r, c * r), x[0], x), (X,)),
    "scan gradient": (jax.grad(lambda x: lax.scan(lambda c, r: (jnp.sin(c + r), None), x[0], x)[0].sum()), (X,)),
    "while": (lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x)), (X,)),
    "fori": (lambda x: lax.fori_loop(0, 3, lambda i, c: c + i, x), (X,)),
    "cond": (lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), (X,)),
    "switch on a constant": (lambda x: lax.switch(1, [jnp.sin, jnp.cos], x), (X,)),
    "platform": (lambda x: lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.tan, default=jnp.cos), (X,)),
    "map": (lambda x: lax.map(lambda r: r.sum(), x), (X,)),
    "random": (lambda k: (jax.random.normal(k, (3, 2)), jax.random.permutation(k, 5), jax.random.bernoulli(k)), (jax.random.key(3),)),
    "old random": (lambda k: jax.random.uniform(jax.random.split(k)[0], (3,)), (jax.random.PRNGKey(3),)),
    "keys": (lambda k: (jax.random.split(k, 3), jax.random.key_data(k), jax.random.fold_in(k, 2)), (jax.random.key(3),)),
    "batch of keys": (lambda k: jax.vmap(lambda k: jax.random.normal(k, (2,)))(jax.random.split(k, 3)), (jax.random.key(3),)),
    "gamma": (lambda k: jax.random.gamma(k, jnp.full(3, 2.0)), (jax.random.key(3),)),
    "nested jit": (lambda x: jax.jit(lambda y: jax.jit(jnp.sin)(y) * 2)(x) + jax.jit(jnp.sin)(x), (X,)),
    "custom derivative": (jax.grad(lambda x: custom(x).sum()), (X,)),
    "checkpoint": (jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum()), (X,)),
    "callback": (lambda x: jax.pure_callback(np.sin, x, x) * 2, (X,)),
    "barrier": (lambda x: lax.optimization_barrier((x, x + 1)), (X,)),
    "integers": (lambda a: (a // 3, a % 3, a << 1, a & 5, ~a, jnp.bitwise_count(a), a.sum(), a.max(), -a, a**2), (np.arange(12),)),
    "booleans": (lambda x: ((x > 0).all(), (x > 0).any(0), (x > 0) ^ (x < 1), ~(x > 0), jnp.where(x > 0, x, -x)), (X,)),
    "complex": (lambda x: (jnp.abs(lax.complex(x, x)), (lax.complex(x, -x) ** 2).real, jnp.conj(lax.complex(x, x)).sum()), (X,)),
    "complex maximum": (lambda x: lax.reduce_max(lax.complex(x, x), (0,)), (X,)),
    "bfloat16": (lambda x: (x * 2).sum(1) + x.max(), (X.astype(jnp.bfloat16),)),
    "bitcasts": (lambda x: (lax.bitcast_convert_type(x, np.int32), lax.bitcast_convert_type(x, np.int16)), (X,)),
    "special": (lambda x: (jax.scipy.special.gammaln(x), lax.erf(x), jnp.sinc(x), jax.nn.gelu(x), jnp.arctan2(x, x + 1)), (X,)),
    "empty": (lambda x: (x[:0] @ x[:0].T, x[:0].sum(0), x[:, :0].max(1, initial=0.0), jnp.zeros((0, 3)), x[:0].T @ x[:0]), (X,)),
    "empty argument": (lambda x: (x.sum(), x.sum(0), x.reshape(3, 0), x.reshape(0), jnp.concatenate([x, x])), (f32(0, 3),)),
    "extent one": (lambda x: (x * x.T, x @ x.T, x.sum(0), x.reshape(3), jnp.sort(x, 1), x[0]), (f32(3, 1),)),
    "scalars": (lambda a, b: (a * b, jnp.maximum(a, 2.0), jnp.full((2, 3), a)), (np.float32(1.5), np.float32(0.5))),
    "constants": (lambda: (jnp.zeros(3), jnp.arange(4), jnp.float32(2), jnp.eye(3)), ()),
    "closed over": (lambda x: x @ jnp.asarray(X).T + X.sum(), (X,)),
    "same twice": (lambda x: (x, x, x.T), (X,)),
    "polynomial": (lambda c, x: jnp.polyval(c, x), (f32(4), f32(5))),
    "percentile": (lambda x: jnp.percentile(x, 30.0, axis=0), (X,)),
    "convolve": (lambda a, b: jnp.convolve(a, b), (f32(6), f32(3))),
    "kron": (jnp.kron, (f32(2, 3), f32(3, 2))),
    "vmap of a solve": (jax.vmap(jnp.linalg.solve), (np.stack([SPD, 2 * SPD]), f32(2, 4, 3))),
    "hessian": (jax.hessian(lambda x: jnp.sum(jnp.tanh(x) ** 3)), (f32(4),)),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str) -> None:
    function, args = FEATURES[name]
    check(function, *args)


def test_double_precision() -> None:
    with jax.enable_x64(True):
        function, args = PROGRAMS["bound"]
        check(function, *(np.asarray(a, np.float64) for a in args))


def test_strict_promotion() -> None:
    with jax.numpy_dtype_promotion("strict"):
        check(lambda x, v: jnp.exp(-0.5 * sq_dist(x, x)) @ v + jnp.cumsum(v, 0), f32(5, 3), f32(5, 2))


# --- what the terms look like -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.T, lambda x: x[:, None], lambda x: x.reshape(2, 3, 2, 2), lambda x: x.reshape(-1), lambda x: x.reshape(2, 12),
        lambda x: jnp.broadcast_to(x, (3, 6, 4)), lambda x: jnp.tile(x, (2, 1)), lambda x: jnp.squeeze(x[None], 0), lax.stop_gradient,
        lambda x: jnp.split(x, 1)[0], lambda x: lax.concatenate([x], 0), lambda x: lax.pad(x, 0.0, [(0, 0, 0)] * 2),
    ],
)  # fmt: skip
def test_views_are_no_term(function: Callable[..., Any]) -> None:
    assert kinds(check(function, X)) == ["Input"]


def test_a_matrix_times_its_transpose_reads_it_twice() -> None:
    program = check(lambda x: x @ x.T, X)
    assert kinds(program) == ["Input", "Input", "Dot"]
    assert [program.indices[i].extent for i in ir.bits(program.free[program.outputs[0].term])] == [6, 6]


def test_a_sum_over_a_broadcast_axis_folds_its_index() -> None:
    program = check(lambda x: jnp.broadcast_to(x, (3, 6, 4)).sum(0), X)
    fold = program.terms[program.outputs[0].term]
    assert isinstance(fold, ir.Fold)
    assert not fold.over & program.free[fold.arg]


def test_arrays_that_nothing_reads_are_no_part_of_a_program() -> None:
    """Constants of library functions whose other results are not used, such as positions of a gather that is a slice here."""
    large = np.ones((500, 500), np.float32)
    program = check(lambda x: jax.jit(lambda x: (jnp.sin(x), large @ x))(x)[0], f32(500))
    assert program.consts == []
    assert ir.argument_bytes(program) == 4 * 500


def test_a_computed_matrix_plus_its_transpose_is_a_renaming() -> None:
    assert kinds(check(lambda x: jnp.exp(x) + jnp.exp(x).T, S)) == ["Input", "Map", "Rename", "Map"]


@pytest.mark.parametrize("name", ["diag", "diagonal", "add to diagonal", "set diagonal", "batched diagonal", "diagonal gradient"])
def test_diagonals_are_plain_terms(name: str) -> None:
    function, args = FEATURES[name]
    assert "Block" not in kinds(check(function, *args))


COMPOUND: dict[str, tuple[Callable[..., Any], Any]] = {
    "gradient of tanh": (jax.grad(lambda x: jnp.sum(jnp.tanh(x))), X),
    "gradient of atanh": (jax.grad(lambda x: jnp.sum(jnp.arctanh(x / 10))), X),
    "log2": (lambda x: jnp.log2(jnp.abs(x)), X),
    "log2 of complex numbers": (jnp.log2, X + 1j * X[::-1]),
    "polynomial": (lambda x: polynomial(x, [1.0, jnp.max(x, 0, keepdims=True), -0.5, 2.0]), X),
}


def polynomial(x: Any, coefficients: Any) -> Any:
    """That of JAX, where it has one."""
    if hasattr(lax, "polynomial"):
        return lax.polynomial(x, coefficients)
    return sum(c * x**k for k, c in enumerate(coefficients))


@pytest.mark.parametrize("name", COMPOUND)
def test_what_is_lowered_to_elementwise_operations_is_plain_terms(name: str) -> None:
    """Whether this version of JAX has one primitive for it or traces several."""
    function, x = COMPOUND[name]
    assert "Block" not in kinds(check(function, x))


@pytest.mark.parametrize("count", [2, 8, 9, 30])
def test_polynomials_of_few_and_many_terms(count: int) -> None:
    check(lambda x: polynomial(x, [jnp.cos(k) for k in range(count)]), X)


def test_off_diagonal_values_do_not_reach_the_diagonal() -> None:
    s = np.full((3, 3), np.inf, np.float32)
    s[np.arange(3), np.arange(3)] = [1.0, 2.0, np.nan]
    check(jnp.diag, s)


def test_equal_equations_are_one_term() -> None:
    program = check(lambda x: jnp.sort(x) + jnp.sort(x) + jnp.exp(x) * jnp.exp(x), X)
    assert kinds(program).count("Block") == 1
    assert [program.terms[t].op for t in program.reachable() if isinstance(program.terms[t], ir.Map)] == ["add", "exp", "mul", "add"]


def test_pointwise_axes_of_blocks_keep_their_index() -> None:
    program = check(lambda x, y: lax.top_k(-sq_dist(x, y), 2), f32(6, 3), f32(5, 3))
    block = program.terms[program.outputs[0].term]
    assert isinstance(block, ir.Block)
    assert ir.names(program, block.call.pointwise) == "i"
    rows = program.outputs[0].axes[0]
    assert block.call.in_axes[0][0] == rows


def test_a_bound_axis_never_has_a_pointwise_name() -> None:
    program = check(lambda i: i[i], I)
    block = next(t for t in program.terms if isinstance(t, ir.Block))
    assert block.call.pointwise
    assert not ir.axes_mask(block.call.in_axes[0]) & block.call.pointwise


def test_indices_come_in_the_order_of_the_largest_arrays() -> None:
    program = check(lambda x, a: jnp.exp(x).sum(0) + a.sum(), f32(3, 40, 50), f32(50, 3))
    ((_, big),) = [(t, term) for t, term in enumerate(program.terms) if isinstance(term, ir.Map) and term.op == "exp"]
    assert program.shape(program.terms[big.args[0]].axes) == (3, 40, 50)  # type: ignore[attr-defined]
    axes = [axis[0] for axis in program.terms[big.args[0]].axes]  # type: ignore[attr-defined]
    assert axes == sorted(axes)


def pair_update(z: Any, w: Any, spec: str) -> Any:
    """The update of pairs along triangles (Jumper et al. 2021), without gates: both operands have the names of ``z``."""
    return z + jnp.einsum(spec, jnp.tanh(z @ w), jnp.sin(z @ w))


@pytest.mark.parametrize(("spec", "kept"), [("ikc,jkc->ijc", 0), ("jkc,ikc->ijc", 0), ("kic,kjc->ijc", 1), ("kjc,kic->ijc", 1)])
def test_of_two_operands_with_axes_of_one_name_that_keeps_it_whose_axis_stays_in_place(spec: str, kept: int) -> None:
    """So that a loop over the argument's rows, or columns, makes those of the result, to which they are added."""
    program = check(lambda z, w: pair_update(z, w, spec), f32(5, 5, 3), f32(3, 3))
    (pairs,) = [term.axes for term in program.terms if isinstance(term, ir.Input) and len(term.axes) == 3]
    (product,) = [t for t, term in enumerate(program.terms) if isinstance(term, ir.Dot) and len(ir.bits(program.free[term.rhs])) == 3]
    assert pairs[kept][0] in ir.bits(program.free[product])
    (before_adding,) = [dict(term.pairs) for term in program.terms if isinstance(term, ir.Rename) and term.arg == product]
    assert pairs[kept][0] not in before_adding
    assert pairs[1 - kept][0] in before_adding.values()


def batch_and_rest(program: ir.Program) -> tuple[tuple[int, ...], ...]:
    """The batch axes, and the other axes, of a program's contractions of two batches of matrices."""
    dots = [term for term in program.terms if isinstance(term, ir.Dot) and program.free[term.lhs] & program.free[term.rhs] & ~term.over]
    batch, every = 0, 0
    for dot in dots:
        batch |= program.free[dot.lhs] & program.free[dot.rhs] & ~dot.over
        every |= program.free[dot.lhs] | program.free[dot.rhs]
    return tuple(ir.bits(batch)), tuple(ir.bits(every & ~batch))


def test_batches_of_computed_matrices_come_first() -> None:
    """Libraries take matrices one after the other, and what lies otherwise is copied for them."""
    batch, rest = batch_and_rest(check(lambda z, w: pair_update(z, w, "ikc,jkc->ijc"), f32(5, 5, 3), f32(3, 3)))
    assert max(batch) < min(rest)


def test_axes_of_arguments_keep_their_order_though_they_are_batches() -> None:
    batch, rest = batch_and_rest(check(lambda a, b: jnp.einsum("ikc,jkc->ijc", jnp.tanh(a), b), f32(5, 5, 3), f32(5, 5, 3)))
    assert min(batch) > max(rest)


def test_effects_keep_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    def noisy(x: Any) -> Any:
        jax.debug.callback(lambda _: sys.stdout.write("first "), x[0, 0], ordered=True)
        jax.debug.callback(lambda _: sys.stdout.write("second "), x[0, 1], ordered=True)
        return x * 2

    program = load(noisy, X)
    assert len(program.effects) == 2
    interpreter.evaluate(program, [X])
    jax.effects_barrier()
    printed = capsys.readouterr().out
    assert 0 <= printed.index("first") < printed.index("second")


def test_terms_know_their_line() -> None:
    program = load(lambda x: jnp.sum(jnp.exp(x)), X)
    lines = {str(program.source[t]) for t in program.reachable() if t in program.source}
    assert lines
    assert all("test_load.py" in line for line in lines)


def test_library_functions_belong_to_the_line_that_calls_them() -> None:
    def first(x: Any) -> Any:
        return jnp.linalg.norm(x)

    def second(x: Any) -> Any:
        return jnp.linalg.norm(x)

    load(first, X)
    program = load(second, X)
    assert {source.function for source in program.source.values()} == {"second"}


def test_wrong_number_of_names_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        loading.load(jax.make_jaxpr(lambda x: x)(1.0), [])


def test_weak_types_are_kept() -> None:
    program = load(lambda x: (x * 2, jnp.asarray(x, jnp.float32)), 1.0)
    assert [output.weak_type for output in program.outputs] == [True, False]


def test_loading_takes_work_linear_in_the_equations() -> None:
    def deep(x: Any, steps: int) -> Any:
        for _ in range(steps):
            x = jnp.sin(x @ x.T) * x + x.reshape(-1).reshape(8, 8)
        return x

    def calls(steps: int) -> int:
        """Calls of Python functions: work that no other process changes."""
        closed = jax.make_jaxpr(lambda x: deep(x, steps))(f32(8, 8))
        count = 0

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            loading.load(closed, ["x"])
        finally:
            sys.setprofile(None)
        return count

    calls(10)
    assert calls(400) < 6 * calls(100)


# --- random programs --------------------------------------------------------------------------------

SHAPES = [(24,), (4, 6), (6, 4), (2, 12), (12, 2), (3, 8), (8, 3), (2, 3, 4), (4, 3, 2), (2, 2, 6), (1, 24), (4, 1, 6)]


def random_program(seed: int) -> Callable[[Any], Any]:
    """Reshapes, transposes, products and sums of earlier values, all of 24 elements."""

    def run(x: Any) -> Any:
        rng = np.random.default_rng(seed)
        values = [x]
        for _ in range(8):
            a, b = (values[k] for k in rng.integers(len(values), size=2))
            shape = SHAPES[rng.integers(len(SHAPES))]
            match rng.integers(5):
                case 0:
                    values.append(a.reshape(shape))
                case 1:
                    values.append(jnp.transpose(a, rng.permutation(a.ndim)))
                case 2:
                    values.append(jnp.tanh(a.reshape(shape)) + b.reshape(shape))
                case 3:
                    rows, columns = a.reshape(shape[0], -1), b.reshape(-1, shape[0])
                    values.append(jnp.tanh(rows @ columns) @ rows)
                case 4:
                    values.append(jnp.cumsum(a, axis=int(rng.integers(a.ndim))) + a.sum(0))
        return values[-3:]

    return run


@pytest.mark.parametrize("seed", range(12))
def test_random_reshapes(seed: int) -> None:
    check(random_program(seed), f32(24))


@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("shape", [(20_000,), (7, 50, 60), (1, 16_384, 1)])
def test_random_bits_are_those_of_their_positions(shape: tuple[int, ...], width: int) -> None:
    key, dtype = jax.random.key(17), f"uint{width}"
    program = check(lambda key: jax.random.bits(key, shape, dtype), key)
    drawn = {t.call.prim.name: ir.axes_mask(t.call.out_axes[0]) & ~t.call.pointwise for t in program.terms if isinstance(t, ir.Block)}
    assert drawn["threefry2x32"] == 0
    assert "random_bits" not in drawn


def test_few_random_bits_and_those_of_other_generators_are_drawn_whole() -> None:
    for program in (
        loading.load(jax.make_jaxpr(lambda key: jax.random.bits(key, (100,)))(jax.random.key(0)), ["key"]),
        loading.load(jax.make_jaxpr(lambda key: jax.random.bits(key, (20_000,)))(jax.random.key(0, impl="rbg")), ["key"]),
    ):
        assert "random_bits" in {t.call.prim.name for t in program.terms if isinstance(t, ir.Block)}


def test_a_device_put_to_nowhere_is_its_operand():
    program = loading.load(jax.make_jaxpr(lambda x: jax.device_put(jnp.exp(x)))(1.0), ["x"])
    assert [type(term).__name__ for term in program.terms] == ["Input", "Map"]


def least_pair(one, other):
    """The lesser of two numbers with its place, the first of equal ones."""
    (x, i), (y, j) = one, other
    first = (x < y) | ((x == y) & (i < j))
    return jnp.where(first, x, y), jnp.where(first, i, j)


def both_ways(start):
    def searched(x, y):
        """Least numbers of rows and of columns, with their places, by a function of one's own."""
        d = jnp.abs(x[:, None] - y)
        places = [lax.broadcasted_iota(np.int32, d.shape, axis) for axis in (1, 0)]
        return [lax.reduce((d, at), start, least_pair, (axis,)) for at, axis in zip(places, (1, 0))]

    return searched


def test_reductions_by_a_function_run_in_chunks_where_they_begin_with_an_identity():
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(n).astype(np.float32) for n in (700, 900))
    identity, number = (np.float32(np.inf), np.int32(2**31 - 1)), (np.float32(0.001), np.int32(5))
    fast = eqsat_mem.optimize(both_ways(identity), memory_limit="200KiB")
    assert fast.plan(x, y).compiled_peak_bytes <= 200 * 2**10 < 4 * 700 * 900
    for mine, plain in zip(jax.tree.leaves(fast(x, y)), jax.tree.leaves(both_ways(identity)(x, y)), strict=True):
        np.testing.assert_array_equal(mine, plain)
    folds = [
        {term.call.folds for term in loading.load(jax.make_jaxpr(both_ways(start))(x, y), "xy").terms if isinstance(term, ir.Block)}
        for start in (identity, number)
    ]
    assert len(folds[0]) == 2
    assert folds[1] == {0}


@pytest.mark.parametrize(("dtype", "n"), [("float16", 3000), ("bfloat16", 700), ("int8", 700), ("uint8", 700), ("float32", 700)])
def test_positions_of_a_chunk_are_rounded_once(dtype, n):
    """Of positions beyond what a dtype counts, that of the chunk and those in it would be rounded, and their sum once more."""

    def f(x, y):
        where = lax.iota(dtype, n)
        return jnp.max(jnp.where(x[:, None] * y > where[:, None].astype(jnp.float32), 0, where[:, None]), 1)

    args = [jnp.zeros(n), jnp.zeros(n)]
    planned = eqsat_mem.optimize(f, memory_limit=80 * n, verify=False)
    assert planned.plan(*args).loops
    assert np.array_equal(planned(*args), jax.jit(f)(*args))


def test_choices_among_more_cases_than_calls_may_nest():
    def chosen(n, a):
        return jax.lax.select_n(n, *(a + k for k in range(1200)))

    args = np.array([0, 700, 1199, 5], np.int32), np.arange(4, dtype=np.float32)
    program = loading.load(jax.make_jaxpr(chosen)(*args), ["n", "a"])
    ((got,),) = values(args, program)
    np.testing.assert_array_equal(got, [0, 701, 1201, 8])
