"""Shifted copies of values, which are read at positions: differences of neighbours, rolls, stencils and their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.egraph.extract import as_written, extract
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.frontend.load import load
from eqsat_mem.frontend.shifts import with_shifts
from eqsat_mem.ir import Block, Input, Iota, Program
from eqsat_mem.ir.ops import shift_to_p, slice_at_p
from tests.oracles.evaluation import results, values
from tests.oracles.extraction import chaos
from tests.tiers import tiered

RULES = load_rules()


def made(*shape):
    return np.random.RandomState(0).standard_normal(shape).astype(np.float32)


def differences(x):
    return jnp.abs(x[1:] - x[:-1]), x[:, 2:] * x[:, :-2]


def strided(x):
    return jnp.sin(x)[1::3, 5:0:-2] + jnp.cos(x)[::3, ::2][:2]


def corners(x):
    return jnp.tanh(x)[1:-1, 2:] + jnp.tanh(x)[:-2, :-2]


def rolled(x):
    return jnp.roll(jnp.sin(x), 2, 0) + jnp.roll(jnp.cos(x), (-1, 3), (0, 1))


def rolled_twice(x):
    v = jnp.sin(jnp.roll(x, 1, 0) + jnp.roll(x, -1, 1))
    return jnp.roll(v, 1, 0) - jnp.roll(v, 1, 1)


def padded(x):
    return jnp.pad(jnp.exp(x), ((1, 2), (0, 3)), constant_values=2.0)[:-1]


def padded_and_cut(x):
    return lax.pad(jnp.exp(x), 2.5, ((-3, 5, 0), (2, -1, 0))) ** 2 + lax.pad(x, 0.0, ((4, -2, 0), (-1, 2, 0)))


def padded_at_edges(x):
    return jnp.pad(jnp.exp(x), 1, mode="edge")[2:, 2:] - jnp.pad(x, ((2, 0), (1, 1)), mode="wrap")[2:, 2:]


def split(x):
    a, b, c = jnp.split(jnp.exp(x), [1, 3])
    return a * c, b


def joined(x):
    return jnp.concatenate([x[3:], jnp.exp(x), x[:2] * x[0]])


def joined_corners(x):
    corner = lax.concatenate([jnp.exp(x)[2:, 1:]], 0)
    return jnp.concatenate([corner, x[:2, 1:]], 0), jnp.concatenate([x[2:, 3:], corner], 1)


def keys(x):
    made = jax.random.split(jax.random.key(3), 6)
    return jax.vmap(lambda k: jax.random.normal(k, (5,)))(jnp.concatenate([made[1:], made[:1]])) * jnp.roll(jnp.sin(x), 1, 1)[:6, 1:]


def of_rows(x):
    return jnp.concatenate([x[:1], jnp.sin(x)[-1:]]).sum(0)


def windows(x):
    return jnp.stack([jnp.sin(x)[i : i + 4] for i in range(4)]).max(0)


def total_variation_gradient(x):
    return jax.grad(lambda x: jnp.sum(jnp.sqrt((x[1:, 1:] - x[:-1, 1:]) ** 2 + (x[1:, 1:] - x[1:, :-1]) ** 2 + 1e-3)))(x)


def rolled_gradient(x):
    return jax.grad(lambda x: jnp.sum(jnp.sin(jnp.roll(x, 1, 0) * jnp.roll(x, -1, 1))))(x)


def padded_beside_itself(x):
    """The axes of the padding and of what it is padded from exchange their names in the gradient."""
    return jax.grad(lambda d: jnp.sum(jnp.tanh(jnp.einsum("ij,ki->jik", d, jnp.pad(d, 1)))))(x[:, :5])


PROGRAMS = [
    padded_beside_itself,
    differences,
    strided,
    corners,
    rolled,
    rolled_twice,
    padded,
    padded_and_cut,
    padded_at_edges,
    split,
    joined,
    joined_corners,
    keys,
    of_rows,
    windows,
    total_variation_gradient,
    rolled_gradient,
]


def shifted(fun, x) -> Program:
    program = with_shifts(load(jax.make_jaxpr(fun)(x), ["x"]))
    assert program is not None
    return program


def rows_price(program, t, unrolled):
    return 1e-6


@pytest.mark.parametrize("fun", tiered(PROGRAMS, [differences, rolled, padded, split, joined_corners, windows]), ids=lambda f: f.__name__)
def test_every_form_of_a_program_with_shifts_computes_the_same(fun):
    x = made(7, 6)
    program = shifted(fun, x)
    view = saturate(program, RULES, Limits(large_elements=0))
    assert view.stopped == "saturated"
    versions = [program, as_written(view).program, extract(view, rows_price, 1e-6).program, *(chaos(view, s).program for s in range(3))]
    wanted = results(fun, x)
    for found in values([x], *versions):
        for mine, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def reads(program: Program) -> set[type]:
    """What slices and gathers of a program read."""
    blocks = [term for t in program.reachable() if isinstance(term := program.terms[t], Block)]
    return {type(program.terms[program.source_of(b.args[0])]) for b in blocks if b.call.prim in (slice_at_p, shift_to_p)}


def test_stencils_of_stencils_read_the_argument():
    def fun(x):
        d = x[2:] - x[:-2]
        return sum((d * d)[i : i + 8, j : j + 8] for i in range(3) for j in range(3))

    program = extract(saturate(shifted(fun, made(12, 11)), RULES, Limits(large_elements=0)), rows_price, 1e-6).program
    assert reads(program) <= {Block, Input, Iota}  # columns are taken of rows, rows of the argument


def test_nothing_to_shift_is_no_other_form():
    assert with_shifts(load(jax.make_jaxpr(lambda x: jnp.sum(x @ x.T))(made(4, 4)), ["x"])) is None
    assert with_shifts(load(jax.make_jaxpr(differences)(made(4, 4)), ["x"]), passes=()) is None


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("axis", [0, 1])
def test_slices_at_positions_are_slices(axis, stride):
    x, positions = made(11, 13), np.arange(2, 11, stride, dtype=np.int32)
    for run in (slice_at_p.bind, jax.jit(slice_at_p.bind, static_argnames=("axis", "stride"))):
        np.testing.assert_array_equal(run(x, positions, axis=axis, stride=stride), np.take(x, positions, axis))


@pytest.mark.parametrize("start", tiered([-9, -3, -1, 0, 2, 4, 7, 12], [-1, 4]))
@pytest.mark.parametrize("count", [2, 9])
def test_positions_outside_stand_for_the_nearest_inside(start, count):
    x, positions = made(3, 5), np.arange(start, start + count, dtype=np.int32)
    wanted = np.take(x, np.clip(positions, 0, 4), 1)
    reach = {"before": max(-start, 0), "after": max(start + count - 5, 0)}
    np.testing.assert_array_equal(shift_to_p.bind(x, positions, axis=1, **reach), wanted)
    for c in range(1, count):  # chunks know what whole reads reach
        parts = [shift_to_p.bind(x, p, axis=1, **reach) for p in np.split(positions, range(c, count, c))]
        np.testing.assert_array_equal(np.concatenate(parts, 1), wanted)


def image_gradients(x):
    return jnp.mean(jnp.sqrt((x[1:, 1:] - x[:-1, 1:]) ** 2 + (x[1:, 1:] - x[1:, :-1]) ** 2 + 1e-6))


def corner_response(x):
    gx, gy = x[2:, 1:-1] - x[:-2, 1:-1], x[1:-1, 2:] - x[1:-1, :-2]

    def box(a):
        return sum(a[i : i + a.shape[0] - 2, j : j + a.shape[1] - 2] for i in range(3) for j in range(3))

    a, b, c = box(gx * gx), box(gx * gy), box(gy * gy)
    r = a * c - b * b - 0.05 * (a + c) ** 2
    return jnp.max(r), jnp.mean(r > 0)


def energy_on_a_torus(x):
    v = jnp.sin(sum(jnp.roll(x, s, d) for s in (1, -1) for d in (0, 1)) - 4 * x)
    return jnp.mean(jnp.tanh(sum(jnp.roll(v, s, d) for s in (1, -1) for d in (0, 1)) - 4 * v) ** 2)


@pytest.mark.parametrize("fun", tiered([image_gradients, corner_response, energy_on_a_torus], [image_gradients]), ids=lambda f: f.__name__)
def test_stencils_fit_in_chunks_of_rows(fun):
    x = made(403, 401)
    limit = x.nbytes + x.nbytes * 3 // 4
    with pytest.raises(eqsat_mem.MemoryLimitError):
        eqsat_mem.optimize(fun, memory_limit=limit, without_rules=["shifts-by-position"]).plan(x)
    plan = eqsat_mem.optimize(fun, memory_limit=limit if fun is not energy_on_a_torus else 2 * limit).plan(x)
    assert "shifts-by-position" in plan.rules_fired
    for mine, theirs in zip(jax.tree.leaves(jax.jit(plan.function)(x)), jax.tree.leaves(jax.jit(fun)(x)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4)


@pytest.mark.parametrize("seed", tiered(range(30), range(2), range(2, 10)))
def test_random_stencils(seed):
    """Random sums of random shifts of random functions, in chunks."""
    rng = np.random.RandomState(seed)
    n, m = rng.randint(40, 90, 2)

    def shift(x):
        d, s = rng.randint(2), rng.randint(1, 4)
        kind = rng.randint(5)
        if kind == 0:
            return jnp.roll(x, int(rng.choice([-s, s])), d)
        if kind == 1:
            return jnp.pad(lax.slice_in_dim(x, s, None, axis=d), [(0, s * (e == d)) for e in range(2)])
        if kind == 2:
            return jnp.pad(lax.slice_in_dim(x, 0, -s, axis=d), [(s * (e == d), 0) for e in range(2)], mode="edge")
        if kind == 3:
            first, second = jnp.split(x, [s], d)
            return jnp.concatenate([jnp.cos(second), first], d)
        return jnp.pad(x, [(s * (e == d), s * (e == d)) for e in range(2)], constant_values=float(s))[:n, :m]

    def level(x):
        terms = [shift(x) * float(rng.randint(1, 4)) for _ in range(rng.randint(1, 4))]
        return rng.choice([jnp.sin, jnp.tanh, jnp.abs])(sum(terms) - x)

    def fun(x):
        return jnp.sum(level(level(x) if rng.rand() < 0.6 else x) ** 2, 1), jnp.max(x)

    x = made(n, m)
    closed = jax.make_jaxpr(fun)(x)
    run = jax.extend.core.jaxpr_as_fun(closed)
    try:
        plan = eqsat_mem.optimize(lambda x: run(x), memory_limit=int(x.nbytes * rng.uniform(1.8, 3.5))).plan(x)
    except eqsat_mem.MemoryLimitError:
        plan = eqsat_mem.optimize(lambda x: run(x), memory_limit=x.nbytes * 6).plan(x)
    for mine, theirs in zip(jax.jit(plan.function)(x), run(x), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=1e-3)
