"""Primitives of other packages are the functions that their authors gave for them; what cannot be traced stays one operation."""

from __future__ import annotations

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

import eqsat_mem
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block

ROWS, WIDTH = 3_000, 64
NUMBERS = itertools.count()


def primitive(function, lowered=None):
    """A primitive as libraries define theirs: a function for arrays, which is also its lowering unless another is given."""
    made = Primitive(f"foreign_{next(NUMBERS)}")
    made.def_impl(function)
    made.def_abstract_eval(
        lambda *avals, **params: _aval(jax.eval_shape(lambda *xs: (lowered or function)(*xs, **params), *_shapes(avals)))
    )
    mlir.register_lowering(made, mlir.lower_fun(lowered or function, multiple_results=False))
    return made


def _shapes(avals):
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]


def _aval(shape):
    return jax.core.ShapedArray(shape.shape, shape.dtype)


def blocks(function, *args):
    program = load(jax.make_jaxpr(function)(*args), [f"x{k}" for k in range(len(args))])
    return [term.call.prim.name for t in program.reachable() if isinstance(term := program.terms[t], Block)]


def rows(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def test_an_operation_of_another_package_is_what_its_function_computes():
    p = primitive(lambda which, x, y, *, scale: jnp.where(which, x * scale, jnp.tanh(y)))
    x, y = rows(0, 5, 4), rows(1, 5, 4)
    plain = lambda x, y: jnp.sum(p.bind(x > y, x, y, scale=3.0), 1)  # noqa: E731
    assert blocks(plain, x, y) == []
    assert np.array_equal(eqsat_mem.optimize(plain, memory_limit="1MiB")(x, y), jax.jit(plain)(x, y))


def test_functions_inside_functions_are_looked_into():
    inner = primitive(lambda x: jnp.exp(-x))
    outer = primitive(lambda x, y: inner.bind(x) + inner.bind(inner.bind(y)))
    x = rows(2, 7)
    assert blocks(lambda x: outer.bind(x, 2 * x), x) == []


def reads_numbers(x):
    return x * x[0].item()


def is_for_numpy(x):
    return np.multiply(np.asarray(x), 2)


def fails(x):
    raise RuntimeError("for arrays only")


@pytest.mark.parametrize("function", [reads_numbers, is_for_numpy, fails])
def test_a_function_that_cannot_be_traced_leaves_one_operation(function):
    p = primitive(function, lowered=lambda x: x * x[0])
    x = rows(3, 6)
    f = lambda x: p.bind(x) + 1  # noqa: E731
    assert len(blocks(f, x)) == 1
    assert np.array_equal(eqsat_mem.optimize(f, memory_limit="1MiB")(x), jax.jit(f)(x))


def test_a_function_that_only_binds_its_primitive_leaves_one_operation():
    p = primitive(lambda x: jax.jit(lambda x: p.bind(x))(x), lowered=jnp.sin)
    x = rows(4, 6)
    assert blocks(lambda x: p.bind(x), x) == [p.name]
    np.testing.assert_allclose(eqsat_mem.optimize(lambda x: p.bind(x), memory_limit="1MiB")(x), np.sin(x), rtol=1e-6)


def test_operations_of_the_users_stay_theirs():
    halved = eqsat_mem.Operation("halved", lambda x: x / 2)
    program = load(jax.make_jaxpr(lambda x: halved(x) + 1)(rows(5, 6)), ["x"])
    assert any(getattr(program.terms[t], "op", "") == "halved" for t in program.reachable())


def test_a_batch_of_solves_runs_in_chunks():
    """Conjugate gradients behind a primitive, of which ``vmap`` makes one for all rows."""

    def solved(a, b):
        def step(_, state):
            x, r, p, rr = state
            ap = a @ p
            alpha = rr / (p @ ap)
            r = r - alpha * ap
            new = r @ r
            return x + alpha * p, r, r + new / rr * p, new

        return lax.fori_loop(0, 4, step, (jnp.zeros_like(b), b, b, b @ b))[0]

    one, many = primitive(solved), primitive(jax.vmap(solved))
    batching.primitive_batchers[one] = lambda args, axes: (many.bind(*args), 0)

    def f(x):
        def row(v):
            return one.bind(jnp.outer(v, v) + jnp.diag(8 + jnp.abs(v)), jnp.cos(v))

        return jnp.sum(jax.vmap(row)(x) ** 2, 1)

    x = rows(6, ROWS, WIDTH)
    whole = x.nbytes + 4 * ROWS * WIDTH * WIDTH
    planned = eqsat_mem.optimize(f, memory_limit=x.nbytes + whole // 10)
    assert planned.plan(x).compiled_peak_bytes <= x.nbytes + whole // 10
    np.testing.assert_allclose(planned(x), jax.jit(f)(x), rtol=2e-4)


STEPS = {
    "exp": lambda x: jnp.exp(-jnp.abs(x)),
    "centred": lambda x: x - jnp.mean(x, -1, keepdims=True),
    "chosen": lambda x: jnp.where(x > 0, x, 0.1 * x),
    "mixed": lambda x: x @ jnp.cos(jnp.arange(x.shape[-1] ** 2.0).reshape((x.shape[-1],) * 2)) / x.shape[-1],
    "summed": lambda x: jnp.cumsum(x, -1) / x.shape[-1],
    "paired": lambda x: jnp.sum(jnp.tanh(x[..., None] * x[..., None, :]), -1),
}


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_behind_primitives_are_those_without(seed):
    draw = random.Random(seed)
    names = [draw.choice([*STEPS]) for _ in range(4)] + ["paired"]
    hidden = [primitive(STEPS[name]).bind if draw.random() < 0.7 else STEPS[name] for name in names]

    def f(x):
        for step in hidden:
            x = step(x)
        return x

    def plain(x):
        for name in names:
            x = STEPS[name](x)
        return x

    x = rows(seed, ROWS, WIDTH)
    limit = 2 * x.nbytes + ROWS * WIDTH * WIDTH  # a quarter of all pairs
    assert blocks(f, x) == blocks(plain, x)
    planned = eqsat_mem.optimize(f, memory_limit=limit)
    assert planned.plan(x).compiled_peak_bytes <= limit
    np.testing.assert_allclose(planned(x), jax.jit(plain)(x), rtol=1e-4, atol=1e-5)
