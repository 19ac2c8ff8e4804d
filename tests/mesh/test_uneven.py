"""Extents that devices do not divide: each takes as many positions as the others, the last ones fewer that count."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize
from eqsat_mem.egraph.extract import original
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Fold, Map
from eqsat_mem.ir.interpreter import evaluate
from eqsat_mem.ir.mesh import Devices, Placement, Spreading
from eqsat_mem.mesh.invariant import check
from eqsat_mem.mesh.localise import localise
from eqsat_mem.mesh.padding import padded
from tests.oracles.collectives import KINDS, collectives
from tests.oracles.targets import TINY
from tests.tiers import tiered

S, R = P("x"), P()
DEVICES = Devices((("x", 8),))


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T / 8.0, -1) @ v


def gradients(q, k, v):
    return jax.grad(lambda *heads: jnp.sum(attention(*heads) ** 2), argnums=(0, 1, 2))(q, k, v)


def nearest(x, y):
    """Sums, first places, largest values and their gradient along 1,001 points."""
    d = jnp.sum((x[:, None] - y[None]) ** 2, -1)
    slope = jax.grad(lambda y: jnp.sum(jnp.max(x @ y.T, 1)))(y)
    return jnp.argmin(d, 1), jnp.min(d, 0), jnp.prod(jnp.cos(d), 1), slope


def heads(x, w, u):
    """Twelve heads of a layer, and the difference of neighbours of a series."""
    h = jnp.tanh(jnp.einsum("td,dhe->hte", x, w))
    return jnp.einsum("hte,hed->td", h, u)[1:] - x[:-1]


def whole(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32) / 2


PROGRAMS = {
    "attention": (attention, (whole(1001, 64), whole(1003, 64), whole(1003, 64)), R, 2),
    "attention, gradients": (gradients, (whole(1001, 64), whole(1003, 64), whole(1003, 64)), R, 4),
    "keys of sharded queries": (gradients, (whole(1000, 64), whole(1003, 64), whole(1003, 64)), (S, R, R), 4),
    "nearest": (nearest, (whole(301, 8), whole(1001, 8)), R, 2),
    "heads": (heads, (whole(64, 60), whole(60, 12, 250), whole(12, 250, 60)), R, 3),
}


MESHES = {"8": {"x": 8}, "2 x 4": {"y": 2, "x": 4}, "2": {"x": 2}, "1": {"x": 1}}


@pytest.mark.parametrize(
    ("name", "devices"), tiered(product(PROGRAMS, MESHES), [("attention", "8"), ("heads", "2 x 4")], [*product(PROGRAMS, ["8"])][1:])
)
def test_values_are_those_of_one_device_within_the_limit(name, devices):
    function, args, ins, limit = PROGRAMS[name]
    shape = MESHES[devices]
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    f = optimize(function, memory_limit=limit * 2**20, mesh=mesh, in_shardings=ins, out_shardings=R if mesh.size > 1 else None)
    plan = f.plan(*args)
    assert plan.compiled_peak_bytes <= limit * 2**20
    if mesh.size == 8:
        assert plan.spread
        text = f.lower(*args).compile().as_text()
        listed = {sent.kind.replace("pmax", "psum").replace("pmin", "psum") for sent in plan.collectives}
        assert {KINDS[kind] for kind in collectives(text, 8)} <= listed
    for got, want in zip(jax.tree.leaves(f(*args)), jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5 * np.max(np.abs(want)))


def test_the_plan_says_how_many_positions_there_are():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    f = optimize(attention, memory_limit="2MiB", mesh=mesh, in_shardings=R, out_shardings=R)
    plan = f.plan(*PROGRAMS["attention"][1])
    assert [(own.extent, own.share) for own in plan.spread] == [(1001, 126)]
    assert "at most 126 of 1,001 on each device" in str(plan)


def summed(x):
    return jnp.sum(jnp.exp(x), 0), jnp.max(x, 0)


def local():
    """The program of one of eight devices of sums along 13 rows."""
    ex = original(load(jax.make_jaxpr(summed)(jax.ShapeDtypeStruct((13, 4), jnp.float32)), ["x"]))
    (rows,) = (i for i, index in enumerate(ex.program.indices) if index.extent == 13)
    way = Spreading(((rows, ("x",)),))
    placement = Placement(DEVICES, ((((), ())),), ((((),)), (((),))))
    whole, divided, order = padded(ex, {rows: ("x",)}, way, DEVICES)
    return localise(whole, placement, divided, order, TINY)


def test_sums_take_nothing_beyond_the_last_position_and_extremes_take_it_again():
    program = local().program
    folds = {term.monoid: program.terms[term.arg] for term in program.terms if isinstance(term, Fold)}
    assert isinstance(folds["add"], Map)
    assert folds["add"].op == "select_n"
    assert getattr(folds["max"], "op", "") != "select_n"


def test_the_invariant_finds_sums_of_positions_beyond_the_last():
    program = local().program
    check(program)
    fold = next(t for t, term in enumerate(program.terms) if isinstance(term, Fold) and term.monoid == "add")
    program.terms[fold] = Fold(program.terms[fold].dtype, "add", program.terms[fold].over, program.terms[program.terms[fold].arg].args[2])
    with pytest.raises(AssertionError, match="beyond the last"):
        check(program)


def layers(x, w):
    return jax.lax.scan(lambda h, wt: (jnp.tanh(h @ wt), None), x, w)[0]


@pytest.mark.parametrize("rows", [1000, 1001])
def test_scans_of_rows_that_are_not_looked_into_run_in_shares(rows):
    mesh, x, w = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)), whole(rows, 64), whole(3, 64, 64)
    lying = (S, R) if rows % 8 == 0 else (R, R)
    planned = optimize(layers, memory_limit="64MiB", mesh=mesh, in_shardings=lying)(x, w)
    np.testing.assert_allclose(planned, layers(x, w), rtol=1e-5, atol=1e-6)


def test_rows_of_what_a_large_scan_leaves_are_read_wherever_they_lie():
    def summed(x, c):
        y = jnp.exp(jnp.sin(jnp.exp(jnp.cos(x))))
        return jax.lax.scan(lambda h, ct: (jnp.exp(jnp.sin(h * ct)), None), y, c)[0].sum()

    mesh, x, c = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)), whole(400_001), whole(3)
    np.testing.assert_allclose(optimize(summed, memory_limit="1GiB", mesh=mesh)(x, c), summed(x, c), rtol=1e-5)


def test_what_a_scan_sums_over_rows_is_not_padded():
    """Rows of zeros count where the body has other values of them: it takes the exponential."""

    def sums(x, w):
        def step(carry, wt):
            h = jnp.tanh(carry[0] @ wt)
            return (h, carry[1] + jnp.exp(h).sum(0)), None

        return jax.lax.scan(step, (x, jnp.zeros(64)), w)[0][1]

    x, w = whole(1001, 64), whole(3, 64, 64)
    ex = original(load(jax.make_jaxpr(sums)(x, w), ["x", "w"]))
    i = next(k for k, index in enumerate(ex.program.indices) if index.extent == 1001)
    wide, _, _ = padded(ex, {i: ("x",)}, Spreading(((i, ("x",)),)), DEVICES)
    np.testing.assert_allclose(evaluate(wide.program, [x, w])[0], sums(x, w), rtol=1e-5)


def test_a_scan_of_rows_that_devices_do_not_divide_runs_in_chunks_of_them():
    def slopes(w, x):
        def energy(w):
            last, each = jax.lax.scan(lambda h, _: (h_new := jnp.tanh(h @ w), jnp.sum(h_new**2)), x, None, length=6)
            return jnp.sum(last**2) + jnp.sum(each)

        return jax.value_and_grad(energy)(w)

    x, w = whole(1001, 63), whole(63, 63) / 4
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    f = optimize(slopes, memory_limit="640KiB", mesh=mesh, in_shardings=R)
    assert f.plan(w, x).compiled_peak_bytes <= 640 * 2**10
    for mine, plain in zip(jax.tree.leaves(f(w, x)), jax.tree.leaves(jax.jit(slopes)(w, x)), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-4, atol=1e-3)
