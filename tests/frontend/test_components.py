"""Values of few components are computed component by component where all that is read of them are components and folds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr

import eqsat_mem
from eqsat_mem.frontend.inline import flatten
from eqsat_mem.frontend.load import load
from eqsat_mem.passes import COMPONENTS, EVERY
from tests.oracles.evaluation import values
from tests.tiers import tiered

OTHERS = [known for known in EVERY if known != COMPONENTS]


def f32(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def slopes(function, *which):
    return jax.value_and_grad(function, which or 0)


def forces(x, q):
    d = x[:, None] - x
    far = jnp.exp(-(d[..., 0] ** 2)) * jnp.cos(d[..., 1])
    return q @ (far @ q)


def product_kernel(x, v, scale):
    return v @ (jnp.prod(jnp.exp(-jnp.abs(x[:, None] - x) * scale), -1) @ v)


def directions(x, q):
    """A norm over all components, and components of what it divides."""
    d = x[:, None] - x
    u = d / jnp.sqrt(jnp.sum(d**2, -1, keepdims=True) + 0.1)
    return jnp.sum(jnp.tanh(u[..., 0] * u[..., 1] - u[..., 2]) @ q)


def by_products(x, q):
    """Components that are contracted with a vector, with each other, and put side by side first."""
    d = jnp.stack([x[:, None, 0] - x[:, 1], jnp.sin(x[:, None, 1] * x[:, 0]), x[:, None, 1] + x[:, 1]], -1)
    return jnp.einsum("ijk,j->ik", d, q), jnp.einsum("ijk,ijk->ij", d, jnp.cos(d)), jnp.einsum("ijk,k->ij", d, q[:3])


def extremes(x, y):
    d = jnp.round(8 * (x[:, None] - y)).astype(np.int32)
    first = lax.pad(d[..., 1:], np.int32(7), ((0, 0, 0), (0, 0, 0), (1, 0, 0)))
    both = first | d
    return jnp.max(both, (1, 2)), jnp.any(both > 5, (0, 2)), jnp.all(first > -9, (1, 2)), jnp.sum(first, (0, 2)), jnp.min(both, -1)


APART = {
    "cotangents of components": (slopes(forces), [f32(90, 2), f32(90, seed=1)]),
    "a gradient of a product": (slopes(product_kernel, 0, 2), [f32(90, 3), f32(90, seed=1), f32(3, seed=2)]),
    "a gradient of a product of many": (slopes(product_kernel, 0, 2), [f32(80, 7), f32(80, seed=1), f32(7, seed=2)]),
    "norms of directions": (slopes(directions), [f32(90, 3), f32(90, seed=1)]),
    "contractions": (by_products, [f32(90, 2), f32(90, seed=1)]),
    "other folds": (extremes, [f32(90, 3), f32(80, 3, seed=1)]),
}


def read_whole(x, w):
    d = jnp.sin(x[:, None] - x)
    return jnp.sum(d[..., 0] * d[..., 1], 1), d @ w


def returned(x):
    d = jnp.sin(x[:, None] - x)
    return jnp.concatenate([d[..., :1], d], -1)


def computed_whole(x, w):
    """Components of a product that stays are read elementwise as it is."""
    z = jnp.tanh(x @ w)
    return jnp.sum(jnp.pad(z[:, :3] ** 2, ((0, 0), (1, 0))) * z, 0)


def with_steps(x, y):
    d = x[:, None] - y
    return jnp.sum(d[..., ::2] * lax.pad(d[..., :1], np.float32(0), ((0, 0, 0), (0, 0, 0), (0, 1, 0))), (1, 2))


def of_many(x):
    d = x[:, None] - x
    return jnp.sum(jnp.pad(d[..., 1:], ((0, 0), (0, 0), (0, 1))) * d, 1)


def never_cut(x, y):
    return jnp.exp(-jnp.sum((x[:, None] - y) ** 2, -1)) @ y


STAY = {
    "read whole, too": (read_whole, [f32(90, 2), f32(2, 5)]),
    "results": (returned, [f32(90, 2)]),
    "of a product as large": (computed_whole, [f32(3000, 9), f32(9, 4)]),
    "strided": (with_steps, [f32(90, 3), f32(80, 3, seed=1)]),
    "of many components": (of_many, [f32(40, 20)]),
    "small": (slopes(forces), [f32(30, 2), f32(30, seed=1)]),
    "never cut": (never_cut, [f32(90, 2), f32(80, 2, seed=1)]),
}


def largest(closed: ClosedJaxpr, passes):
    flat = flatten(closed, passes=passes)
    return max(np.prod(flat.shapes[v]) for eqn in flat.equations for v in eqn.outs)


def assert_equal_programs(closed: ClosedJaxpr, args):
    """Both forms, of which the first is returned, compute the same up to roundings."""
    apart, whole = (load(closed, [f"x{k}" for k in range(len(args))], passes=passes) for passes in (EVERY, OTHERS))
    for got, want in zip(*values(args, apart, whole), strict=True):
        scale = np.max(np.abs(want), initial=0).astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * scale if got.dtype == np.float32 else 0)
    return apart


@pytest.mark.parametrize("name", APART)
def test_values_of_all_components_are_not_made(name):
    function, args = APART[name]
    closed = jax.make_jaxpr(function)(*args)
    assert largest(closed, EVERY) <= largest(closed, OTHERS) / 2
    assert COMPONENTS.name in assert_equal_programs(closed, args).passes


@pytest.mark.parametrize("name", STAY)
def test_values_that_are_needed_together_stay(name):
    function, args = STAY[name]
    program = load(jax.make_jaxpr(function)(*args), [f"x{k}" for k in range(len(args))])
    assert COMPONENTS.name not in program.passes


@pytest.mark.parametrize("seed", tiered(range(40), range(8), range(8, 16)))
def test_random_programs_compute_the_same(seed):
    """Values of pairs are computed, cut, padded, joined and folded at random along a short axis, wherever it stands, gradients too."""
    rng = np.random.default_rng(seed)
    n, m, k, axis = 70, 60, int(rng.integers(2, 5)), int(rng.integers(3))
    choices = rng.integers(0, 2**31, 40)

    def padded(a, low, high):
        config = [(int(low), int(high), 0) if other == axis else (0, 0, 0) for other in range(3)]
        return lax.pad(a, np.float32(choices[0] % 2), config)

    def function(x, y):
        draw = iter(choices)
        d = jnp.moveaxis(x[:, None] - y, -1, axis)
        values = [d, jnp.sin(d)]
        for _ in range(5):
            a, b = (values[next(draw) % len(values)] for _ in range(2))
            low = next(draw) % k
            kind = next(draw) % 5
            if kind == 0:
                values.append(padded(lax.slice_in_dim(a, low, k, axis=axis), 0, low))
            elif kind == 1:
                values.append(padded(padded(a, -low, 1), low, -1))
            elif kind == 2:
                values.append(lax.concatenate([lax.slice_in_dim(a, low, k, axis=axis), lax.slice_in_dim(b, 0, low, axis=axis)], axis))
            else:
                values.append(a * b if kind == 3 else jnp.where(a > b, a, jnp.tanh(b)))
        one = lax.index_in_dim(values[-1], next(draw) % k, axis, keepdims=False)
        folds = [jnp.sum, jnp.max, jnp.prod]
        folded = folds[next(draw) % 3](values[-2], axis)
        other = jnp.sum(values[-3] * values[-1], [a for a in range(3) if a != (axis + 1) % 3])
        return jnp.sum(jnp.sin(one * folded)) + jnp.sum(jnp.cos(other))

    args = f32(n, k, seed=seed), f32(m, k, seed=seed + 1)
    assert_equal_programs(jax.make_jaxpr(slopes(function, 0, 1) if seed % 2 else function)(*args), args)


def test_plans_pad_no_cotangents():
    plan = eqsat_mem.optimize(slopes(product_kernel, 0, 2), memory_limit="300KiB").plan(f32(500, 3), f32(500), f32(3))
    assert COMPONENTS.name in plan.rules_fired
    assert "pad(" not in plan.source


def test_sums_keep_their_order_where_that_is_asked():
    plan = eqsat_mem.optimize(slopes(forces), memory_limit="4MiB", accuracy="bitwise").plan(f32(500, 2), f32(500))
    assert COMPONENTS.name not in plan.rules_fired


def box_distances(p, b):
    d = jnp.concatenate([b[None, :, :2] - p[:, None], p[:, None] - b[None, :, 2:]], -1)
    outside = jnp.maximum(jnp.maximum(d[..., :2], d[..., 2:]), 0)
    return jnp.min(jnp.sqrt(jnp.sum(outside**2, -1)), 1)


def test_a_program_that_fits_is_predicted_to_make_what_it_makes():
    """It does not stay as written because its components would be fast enough."""
    args = f32(900, 2), f32(800, 4)
    limited = {"memory_limit": "1GiB", "verify": False}
    apart = eqsat_mem.optimize(box_distances, **limited).plan(*args)
    whole = eqsat_mem.optimize(box_distances, **limited, without_rules=[COMPONENTS.name]).plan(*args)
    assert not apart.unchanged
    assert apart.original_predicted_s == whole.original_predicted_s
    assert apart.predicted_s < whole.predicted_s
