"""Equal expressions that only results depend on become calls of one operation, which computes what they did, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import eqsat_mem
from eqsat_mem.frontend.equal_updates import LEAST_EQUAL, LEAST_SAVED
from eqsat_mem.frontend.inline import flatten
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.bitwise import compared
from eqsat_mem.ir.interpreter import evaluate
from eqsat_mem.ir.ops import operation_of
from eqsat_mem.passes import UPDATES

SHAPES = [(3, 4), (4,), (4, 2), (2,), (2, 3, 2), (5,)]


def f32(*shape, seed=0):
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32) * np.float32(0.5)


def arrays(seed, dtype=np.float32):
    return [f32(*shape, seed=seed + k).astype(dtype) for k, shape in enumerate(SHAPES)]


def adam(p, m, v, g, t):
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)
    rate = 1e-3 * jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return jax.tree.map(lambda p, m, v: p - rate * (m / (jnp.sqrt(v) + 1e-8) + 0.01 * p), p, m, v), m, v


def clipped(p, m, v, g, t):
    """The gradients, scaled, are read twice; the norm reads them as they were."""
    norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(g)))
    return adam(p, m, v, jax.tree.map(lambda x: x * jnp.minimum(1.0, 1.0 / norm), g), t)


def guarded(p, m, v, g, t):
    """Nothing changes where a gradient is no number."""
    fine = jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in g]))
    new = adam(p, m, v, g, t)
    return jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, (p, m, v))


def narrow(p, m, v, g, t):
    """Parameters of two bytes beside moments of four."""
    changed, m, v = adam([x.astype(jnp.float32) for x in p], m, v, g, t)
    return [x.astype(jnp.bfloat16) for x in changed], m, v


def operations(function, *args, passes=frozenset({UPDATES})):
    """The number of equations of a function, and of those that are calls of each operation."""
    flat = flatten(jax.make_jaxpr(function)(*args), passes=passes)
    found = [own for eqn in flat.equations if (own := operation_of(eqn.params)) is not None]
    return len(flat.equations), sorted(found.count(own) for own in set(found))


def run(function, args, passes):
    closed = jax.make_jaxpr(function)(*args)
    program = load(closed, [f"x{k}" for k in range(len(closed.in_avals))], passes=passes)
    with jax.disable_jit():  # one operation after the other: a compiler joins products and sums
        return evaluate(program, jax.tree.leaves(args)), program


@pytest.mark.parametrize("optimiser", [adam, clipped, guarded, narrow])
def test_updates_are_operations_that_compute_the_same_bits(optimiser):
    p = [x.astype(jnp.bfloat16) for x in arrays(0)] if optimiser is narrow else arrays(0)
    args = (p, arrays(10), [x**2 for x in arrays(20)], arrays(30), np.float32(3))
    before, none = operations(optimiser, *args, passes=())
    after, counts = operations(optimiser, *args)
    assert none == []
    assert counts == [len(SHAPES)] * 3
    assert before - after >= 8 * len(SHAPES)
    want, _ = run(optimiser, args, ())
    got, program = run(optimiser, args, {UPDATES})
    assert UPDATES.name in program.passes
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_what_is_read_besides_is_no_part_of_an_operation():
    def shrunk(p, g):
        new = [jnp.tanh(0.9 * x - 0.1 * y) * 2.0 + jnp.exp(x) / 3.0 - jnp.cos(y) for x, y in zip(p, g)]
        return [jnp.sin(x) * 0.5 + 1.0 for x in new], sum(jnp.sum(x) for x in new)

    before, _ = operations(shrunk, arrays(0), arrays(1), passes=())
    after, counts = operations(shrunk, arrays(0), arrays(1))
    assert (before, counts) == (after, [])  # two equations after what is summed are too few
    without_sum = lambda p, g: shrunk(p, g)[0]  # noqa: E731
    assert operations(without_sum, arrays(0), arrays(1))[1] == [len(SHAPES)]


def test_few_or_short_expressions_stay():
    update = lambda x, y: jnp.tanh(0.9 * x - 0.1 * y) * 2.0  # noqa: E731
    few = lambda p, g: [update(x, y) for x, y in list(zip(p, g))[: LEAST_EQUAL - 1]]  # noqa: E731
    short = lambda p, g: [0.9 * x + y for x, y in zip(p, g)]  # noqa: E731
    assert len(SHAPES) < LEAST_SAVED
    assert operations(few, arrays(0), arrays(1))[1] == []
    assert operations(short, arrays(0), arrays(1))[1] == []


def test_numbers_that_differ_are_other_operations():
    def stepped(p, g):
        return [x - (0.1 if k % 2 else 0.2) * jnp.tanh(y) / (jnp.sqrt(y * y) + jnp.abs(y) + 1e-3) for k, (x, y) in enumerate(zip(p, g))]

    assert operations(stepped, arrays(0) + arrays(2), arrays(1) + arrays(3))[1] == [len(SHAPES)] * 2


UNARY = [jnp.tanh, jnp.sin, jnp.square, lambda x: 0.5 * x, lambda x: x + 1.0, jnp.abs]
BINARY = [jnp.add, jnp.multiply, jnp.maximum, lambda x, y: jnp.where(x > y, x, 0.3), jnp.subtract]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_random_expressions_of_many_arrays_are_computed_bit_for_bit(data):
    """Expressions with values that are read twice, numbers that are arguments, and results that others are made of."""
    steps = data.draw(
        st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 99), st.integers(0, 99)), min_size=9, max_size=16)
    )
    returned = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=3))
    scale = data.draw(st.booleans())

    def one(p, g, s):
        values = [p, g, jnp.broadcast_to(s, p.shape)]
        for is_unary, which, a, b in steps:
            a, b = values[-1 - a % len(values)], values[b % len(values)]
            values.append(UNARY[which](a) if is_unary else BINARY[which](a, b))
        return [values[-1], *(values[k % len(values)] for k in returned)]

    def every(ps, gs, s):
        return [one(p, g * s if scale else g, s) for p, g in zip(ps, gs)]

    args = arrays(0), arrays(50), np.float32(0.7)
    want, _ = run(every, args, ())
    got, _ = run(every, args, {UPDATES})
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    before, _ = operations(every, *args, passes=())
    after, counts = operations(every, *args)
    assert after == before if not counts else before - after >= LEAST_SAVED


def parameters(depth, seed):
    return [x for k in range(depth) for x in (f32(8, 8, seed=seed + k), f32(8, seed=seed - k - 1))]


@pytest.mark.parametrize("optimiser", [adam, clipped, guarded])
def test_a_training_step_names_its_updates_and_computes_the_same(optimiser):
    def step(ws, m, v, x, t):
        def loss(ws):
            h = x
            for w, b in zip(ws[::2], ws[1::2]):
                h = h + jnp.tanh(h @ w + b)
            return jnp.mean(h**2)

        value, g = jax.value_and_grad(loss)(ws)
        return value, optimiser(ws, m, v, g, t)

    args = parameters(9, 20), parameters(9, 40), [x**2 for x in parameters(9, 60)], f32(4000, 8), np.float32(2)
    planned = eqsat_mem.optimize(step, memory_limit="600KiB")
    plan = planned.plan(*args)
    assert UPDATES.name in plan.rules_fired
    assert plan.source.count("    def update") == 3
    for mine, theirs in zip(jax.tree.leaves(planned(*args)), jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_bodies_of_loops_have_updates_too():
    """Steps of training in a scan."""

    def training(p, m, v, g):
        return lax.scan(lambda c, t: (adam(*c, g, t), None), (p, m, v), jnp.arange(1.0, 4.0))[0]

    closed = jax.make_jaxpr(training)(arrays(0), arrays(10), arrays(20), arrays(30))
    (scan,) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan")
    flat = flatten(scan.params["jaxpr"], passes={UPDATES})
    assert sum(operation_of(eqn.params) is not None for eqn in flat.equations) == 3 * len(SHAPES)


def winners(xs):
    """Elements that equal their row's largest, or that far exceed a function of themselves: what is compared has to be seen."""

    def one(x):
        y = (x * 0.5 + 1.0) * x - 2.0
        return (x == jnp.max(x, 1, keepdims=True)) | (jnp.abs(y) * 0.25 + 0.125 < -5.0) | (jnp.sin(y) * 2.0 + y == jnp.inf)

    return [one(x) for x in xs]


def test_comparisons_of_what_rounds_are_no_part_of_an_operation():
    xs = [jnp.sin(f32(5, 7, seed=k)) * 2.0 for k in range(20)]
    closed = jax.make_jaxpr(lambda *xs: winners([jnp.sin(x) * 2.0 for x in xs]))(*xs)
    names = [f"x{k}" for k in range(len(xs))]
    every = [compared(load(closed, names, passes=passes)) for passes in ((), {UPDATES})]
    assert len(every[0]) == len(every[1]) == len(xs)
    _, counts = operations(winners, xs)
    assert counts == [] or sum(counts) <= 2 * len(xs)


def test_sums_over_steps_stay_sums():
    """What is only added to an argument is found by other passes, and added in place; so are sums of contractions."""
    accumulate = lambda c, g: [a + x / 4.0 for a, x in zip(c, g)]  # noqa: E731
    many = [f32(3, 4, seed=k) for k in range(60)]
    assert operations(accumulate, many, many)[1] == []
    products = lambda a, b: [jnp.tanh((x @ y.T + y @ x.T) * 2.0) - 1.0 for x, y in zip(a, b)]  # noqa: E731
    flat = flatten(jax.make_jaxpr(products)(many, many), passes={UPDATES})
    assert sum(eqn.prim.name == "add" for eqn in flat.equations) == len(many)
    assert operations(products, many, many)[1] == [len(many)]


def test_keys_are_compared_as_they_are():
    """Comparisons of random keys, which are no numbers, among many results."""
    keys = jax.random.split(jax.random.key(0), 60)
    closed = jax.make_jaxpr(lambda keys: [(keys == keys[k]) for k in range(60)])(keys)
    assert not any(operation_of(eqn.params) for eqn in flatten(closed, passes={UPDATES}).equations)
