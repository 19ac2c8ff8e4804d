"""Dtypes, weak types and empty arrays come out as the original's, also under a limit that takes loops and scans apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.backends.xla import compiled_peak

A = np.random.RandomState(0).standard_normal((64, 48)).astype(np.float32)
B = np.random.RandomState(1).standard_normal((48, 40)).astype(np.float32)
X = A.reshape(-1)[:300]
KEY = jax.random.key(0)
CASES = {
    "bfloat16 fold": (lambda a: (jnp.sum(a * a, 0), jnp.mean(a), jnp.argmax(a, 1)), [A.astype(jnp.bfloat16)]),
    "float16 softmax": (lambda a: jax.nn.softmax(a, -1) @ a.T, [A.astype(np.float16)]),
    "bfloat16 gradient": (jax.grad(lambda a: jnp.sum(jnp.tanh(a @ a.T).astype(jnp.float32))), [A.astype(jnp.bfloat16)]),
    "complex": (lambda a: jnp.sum(a * jnp.conj(a[:, None]), (0, 2)), [A[:20] + 1j * A[:20]]),
    "complex gradient": (jax.grad(lambda a: jnp.sum(jnp.abs(a @ a.T) ** 2)), [A + 1j * A]),
    "integers": (lambda a: (a[:, None] * a[None]).sum(-1) // 3 % 7, [np.arange(300, dtype=np.int32).reshape(30, 10)]),
    "small integers": (lambda a: (jnp.sum(a, dtype=jnp.uint8), jnp.max(a), a ^ 3), [np.arange(200, dtype=np.uint8)]),
    "four bits": (
        lambda k, u: (k + jnp.int4(1), k * 3 // jnp.int4(2), jnp.max(u, 1), u | jnp.uint4(9)),
        [(A > 0).astype(jnp.int4), (A > 1).astype(jnp.uint4)],
    ),
    "booleans": (lambda a: (jnp.any(a > 0), jnp.all(a > -9, 0), jnp.sum(a > 0)), [A]),
    "weak results": (lambda a: (2.0 * jnp.float32(1), jnp.asarray(3.0) + 0, 1.5, 2), [X]),
    "weak arguments": (lambda s, n, a: (s * 2, s + a, s, n + 1, a * n), [2.0, 3, X]),
    "weak carry": (lambda a: lax.scan(lambda c, r: (c, r * c), 2.0, a), [X]),
    "keys": (lambda k: (jax.random.normal(k, (20,)), jax.vmap(jax.random.uniform)(jax.random.split(k, 9))), [KEY]),
    "keys as results": (lambda k: jax.random.split(k, 3), [KEY]),
    "cases by number": (
        lambda a, n: (
            lax.select_n(n[:9] % 3, a[0, :9], a[1, :9], a[2, :9]),
            lax.select_n(n[4] % 4, a, a + 1, a * 2, -a),
            lax.select_n(n[0] > 0, a),
        ),
        [A, np.arange(64, dtype=np.int32)],
    ),
    "two cases by number": (lambda a, n: lax.select_n(n % 2, a[:, 0], a[:, 1]), [A, np.arange(64, dtype=np.int32)]),
    "no rows": (lambda a: (jnp.sum(a, 0), a * 2, a.T @ a, jnp.max(a, 1)), [np.zeros((0, 5), np.float32)]),
    "nothing contracted": (lambda a: a @ a.T, [np.zeros((5, 0), np.float32)]),
    "no steps": (lambda a: lax.scan(lambda c, r: (c + r.sum(), r), 0.0, a), [np.zeros((0, 5), np.float32)]),
    "an empty batch": (jax.vmap(lambda a: jnp.sum(a**2)), [np.zeros((0, 7), np.float32)]),
    "scalars": (lambda s, n: (s**n, s > n, n), [np.float32(2), np.int32(3)]),
    "no arguments": (lambda: jnp.arange(5.0) * 2, []),
    "no results": (lambda a: (), [X]),
    "no derivative by integers": (jax.grad(lambda i, w: jnp.sum(w * i), (0, 1), allow_int=True), [np.arange(300), X]),
    "eight bits": (lambda a: jnp.sum(a.astype(jnp.float32)), [A.astype(jnp.float8_e4m3fn)]),
}


def steps(h, r):
    return jnp.tanh(h * r.dtype.type(0.5) + r), h * h


SCANS = {
    "bfloat16": A.astype(jnp.bfloat16),
    "float16": A.astype(np.float16),
    "complex64": (A + 1j * A).astype(np.complex64),
    "float64": A.astype(np.float64),
}
WIDE = {
    "means": (lambda a: jnp.mean(jnp.exp(-jnp.sum((a[:, None] - a[None]) ** 2, -1)), 0), [A.astype(np.float64)]),
    "mixed": (lambda a, b: a.astype(jnp.float32) @ b, [A.astype(np.float64), B]),
    "integers": (lambda a: (jnp.sum(a), a * 2), [np.arange(100)]),
    "weak": (lambda s, a: (s * a, s * 2, 1.0, 2), [2.0, A]),
    "complex": (lambda a: jnp.abs(a @ a.T), [A + 1j * A.astype(np.float64)]),
}


def agree(function, args, limit):
    want, got = jax.jit(function)(*args), eqsat_mem.optimize(function, memory_limit=limit)(*args)
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert (a.shape, a.dtype, getattr(a, "weak_type", False)) == (b.shape, b.dtype, getattr(b, "weak_type", False))
        if a.dtype == jax.dtypes.float0:
            continue
        a, b = (jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        narrow = jnp.issubdtype(a.dtype, jnp.floating) and jnp.finfo(a.dtype).bits < 32
        wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
        a, b = (np.asarray(x).astype(wide) for x in (a, b))
        np.testing.assert_allclose(b, a, rtol=0, atol=(0.05 if narrow else 1e-4) * max(1.0, np.max(np.abs(a), initial=0.0)))


@pytest.mark.parametrize("name", CASES)
def test_types_are_those_of_the_original(name):
    agree(*CASES[name], "1GiB")


@pytest.mark.parametrize("name", WIDE)
def test_types_are_those_of_the_original_in_double_precision(name):
    with jax.enable_x64(True):
        agree(*WIDE[name], "1GiB")


@pytest.mark.parametrize("name", SCANS)
def test_scans_that_are_taken_apart_keep_their_types(name):
    xs = np.concatenate([SCANS[name]] * 3)

    def gradient(xs):
        return jax.grad(lambda xs: jnp.mean(jnp.abs(lax.scan(steps, xs[0], xs)[1]).astype(jnp.float32)))(xs)

    with jax.enable_x64(name == "float64"):
        limit = int(0.8 * compiled_peak(gradient, [xs], optimise=False)[0])
        agree(gradient, [xs], limit)
