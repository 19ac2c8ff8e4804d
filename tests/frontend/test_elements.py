"""Elements of elementwise values are computed from elements, where nothing reads the values otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr

import eqsat_mem
from eqsat_mem.frontend.inline import flatten
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.interpreter import evaluate
from eqsat_mem.passes import COMPONENTS, ELEMENTS, EVERY

OTHERS = [known for known in EVERY if known not in (ELEMENTS, COMPONENTS)]
SINGLE = [*OTHERS, ELEMENTS]


def f32(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def overlaps(b):
    sides = jnp.clip(jnp.minimum(b[:, None, 2:], b[:, 2:]) - jnp.maximum(b[:, None, :2], b[:, :2]), 0)
    return jnp.max(sides[..., 0] * sides[..., 1], 1)


def turned(x, y):
    """Two coordinates of differences, one of them as a row of a transposed array."""
    d = jnp.sin(x[:, None] - y[None])
    return jnp.sum(d[:, :, 0] * jnp.cos(d[:, :, 2]), 1)


def of_argument(x):
    y = jnp.tanh(x)
    return y[0] - y[1] * 2.0


def chosen(x, y):
    d = jnp.where(x[:, None, :1] > 0, x[:, None] - y, 1.0)
    return jnp.sum(d[..., 1:2] + d[..., 0:1], 1)


def repeated(x, y):
    """One number of each point of ``y`` for both coordinates."""
    d = jnp.sin(x[:, None] - y[:, :1])
    return jnp.sum(d[..., 0] * d[..., 1], 1)


def read_whole(x, y):
    d = jnp.sin(x[:, None] - y)
    return jnp.sum(d[..., 0] * d[..., 1], 1), jnp.sum(d**2, (1, 2))


def along_two_axes(x, y):
    d = x[:, None] - y
    return d[..., 0] + jnp.sum(d[0]), d[1]


def of_a_product(x, y):
    z = jnp.tanh(x @ y)
    return z[:, 0] + z[:, 1]


def many(x):
    y = jnp.exp(x)
    return y[:, 3] + y[:, 19]


def as_bytes(x):
    """The axis of the bytes is none of the numbers."""
    y = lax.bitcast_convert_type(jnp.sin(x), jnp.uint8)
    return y[..., 0] + y[..., 1]


def long(x):
    """Operations of which there would be sixteen times as many."""
    for k in range(100):
        x = jnp.sin(x) + x * (k + 0.5)
    return sum(x[:, k] * (k + 1.5) for k in range(16))


APART = {
    "boxes": (overlaps, [f32(100, 4)]),
    "differences": (turned, [f32(90, 3), f32(80, 3, seed=1)]),
    "of an argument": (of_argument, [f32(2, 3000)]),
    "repeated": (repeated, [f32(120, 2), f32(80, 2, seed=1)]),
    "chosen": (chosen, [f32(120, 2), f32(80, 2, seed=1)]),
}
STAY = {
    "read whole, too": (read_whole, [f32(90, 2), f32(80, 2, seed=1)]),
    "along two axes": (along_two_axes, [f32(90, 2), f32(80, 2, seed=1)]),
    "of a product as large": (of_a_product, [f32(3000, 9), f32(9, 2)]),
    "of many": (many, [f32(1000, 20)]),
    "small": (overlaps, [f32(40, 4)]),
    "bytes": (as_bytes, [f32(90, 80)]),
    "of long programs": (long, [f32(1000, 16)]),
}


def shapes(closed: ClosedJaxpr, passes):
    flat = flatten(closed, passes=passes)
    return {flat.shapes[v] for eqn in flat.equations for v in eqn.outs}


@pytest.mark.parametrize("name", APART)
def test_values_that_are_read_one_position_at_a_time_are_not_made(name):
    function, args = APART[name]
    closed = jax.make_jaxpr(function)(*args)
    largest = max(map(np.prod, shapes(closed, OTHERS)))
    assert max(map(np.prod, shapes(closed, SINGLE))) <= largest / 2
    apart, whole = (load(closed, [f"x{k}" for k in range(len(args))], passes=passes) for passes in (SINGLE, OTHERS))
    assert ELEMENTS.name in apart.passes
    assert ELEMENTS.name not in whole.passes
    for got, want in zip(evaluate(apart, args), evaluate(whole, args), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", STAY)
def test_values_that_are_needed_whole_stay(name):
    function, args = STAY[name]
    program = load(jax.make_jaxpr(function)(*args), [f"x{k}" for k in range(len(args))])
    assert ELEMENTS.name not in program.passes


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_compute_the_same_bits(seed):
    """Elementwise operations of pairs, cut and read at random positions of a short axis, wherever it stands."""
    rng = np.random.default_rng(seed)
    n, m, k = 80, 60, int(rng.integers(2, 5))
    axis = int(rng.integers(3))

    def function(x, y):
        values = [jnp.moveaxis(x[:, None] + jnp.zeros((1, m, 1)), -1, axis), jnp.moveaxis(jnp.broadcast_to(y, (n, m, k)), -1, axis)]
        if rng.random() < 0.5:
            values[0] = lax.slice_in_dim(values[0], 1, k, axis=axis)
            values[1] = lax.slice_in_dim(values[1], 0, k - 1, axis=axis)
        for _ in range(int(rng.integers(1, 6))):
            a, b = (values[int(i)] for i in rng.integers(0, len(values), 2))
            values.append(
                [jnp.sin, jnp.negative, jnp.add, jnp.maximum, jnp.multiply][kind := int(rng.integers(5))](*[a, b][: 1 + (kind > 1)])
            )
        last = values[-1]
        picked = [lax.index_in_dim(last, int(p), axis, keepdims=False) for p in rng.integers(0, last.shape[axis], 2)]
        more = [jnp.sum(values[int(rng.integers(len(values)))])] if rng.random() < 0.3 else []
        return picked[0] * picked[1], picked[0], *more

    args = f32(n, k, seed=seed), f32(m, k, seed=seed + 1)
    closed = jax.make_jaxpr(function)(*args)
    programs = [load(closed, ["x", "y"], passes=passes) for passes in (SINGLE, OTHERS)]
    for got, want in zip(*(evaluate(program, args) for program in programs), strict=True):
        np.testing.assert_array_equal(got, want)


def test_plans_name_no_array_of_all_coordinates():
    plan = eqsat_mem.optimize(overlaps, memory_limit="256KiB").plan(f32(500, 4))
    assert "[:, None, :]" not in plan.source
    assert ELEMENTS.name in plan.rules_fired
