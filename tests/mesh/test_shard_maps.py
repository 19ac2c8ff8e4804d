"""``jax.shard_map`` inside of functions that are planned: the values of its collectives, limits, and what stays as written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eqsat_mem import MemoryLimitError, optimize
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.interpreter import evaluate
from tests.oracles.collectives import collectives

S, R = P("x"), P()
MIB = 2**20
LINE = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
GRID = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
X = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((32, 32)).astype(np.float32)
BOTH = ("x", "y")
XY, YX = P(BOTH), P(("y", "x"))
RING = [(k, (k + 1) % 8) for k in range(8)]


def scanned(a, b):
    def step(c, _):
        c = jnp.tanh(c @ b)
        return c - lax.pmean(c, "x"), lax.psum(c.sum(), "x")

    return lax.scan(step, a, None, length=3)[0]


def rings(a):
    def step(c, _):
        total, there = c
        return (total + a @ there.T, lax.ppermute(there, "x", RING)), None

    return lax.scan(step, (a @ a.T * 0, a), None, length=8)[0][0]


def branches(a):
    moved = lax.cond(lax.psum(a.sum(), "x") > 0, lambda a: a - lax.psum(a, "x"), lambda a: a * 2, a)
    return lax.cond(lax.axis_index("x") > 3, jnp.sin, lambda a: a * 2, moved)


def drawn(a, key):
    return a + jax.random.normal(jax.random.fold_in(key, lax.axis_index("x")), a.shape)


@jax.custom_vjp
def total(a):
    return lax.psum(a.sum(0), "x")


total.defvjp(lambda a: (total(a), a.shape), lambda shape, g: (jnp.broadcast_to(g, shape),))

CASES = {
    "psum": (LINE, S, S, lambda a: a - lax.psum(a.sum(0), "x")),
    "psum of the same": (LINE, S, S, lambda a: a + lax.psum(1, "x") + lax.psum(jnp.ones(32), "x")),
    "psum of booleans": (LINE, S, S, lambda a: jnp.where(lax.psum(a > 0, "x") > 4, a, 0)),
    "psum of rows": (LINE, S, S, lambda a: jax.vmap(lambda r: r - lax.psum(r.sum(), "x"))(a)),
    "psum, the same everywhere": (LINE, S, R, lambda a: lax.psum(a.sum(0), "x")),
    "pmean": (LINE, S, S, lambda a: a - lax.pmean(a, "x")),
    "pmax": (LINE, S, R, lambda a: lax.pmax(a, "x")),
    "pmin": (LINE, S, S, lambda a: a * lax.pmin(a.min(), "x")),
    "all_gather": (LINE, S, S, lambda a: a @ lax.all_gather(a, "x").sum(0).T),
    "all_gather, tiled": (LINE, S, S, lambda a: a @ lax.all_gather(a, "x", tiled=True).T),
    "all_gather of columns": (LINE, S, P(None, "x"), lambda a: lax.all_gather(a, "x", axis=1, tiled=True)[:, :64]),
    "psum_scatter": (LINE, P(None, "x"), S, lambda a: lax.psum_scatter(a.reshape(8, -1), "x")),
    "psum_scatter, tiled": (LINE, P(None, "x"), S, lambda a: lax.psum_scatter(a, "x", tiled=True)),
    "psum_scatter of integers": (LINE, P(None, "x"), S, lambda a: lax.psum_scatter((a * 9).astype(jnp.int32), "x", tiled=True)),
    "all_to_all": (LINE, S, P(None, "x"), lambda a: lax.all_to_all(a.reshape(8, 8, 4), "x", 1, 2).reshape(-1, 32)[:, :8]),
    "all_to_all, tiled": (LINE, S, P(None, "x"), lambda a: lax.all_to_all(a, "x", 1, 0, tiled=True)),
    "all_to_all along one axis": (LINE, S, S, lambda a: lax.all_to_all(a, "x", 0, 0, tiled=True)),
    "ppermute": (LINE, S, S, lambda a: lax.ppermute(a, "x", RING) * a),
    "ppermute of some": (LINE, S, S, lambda a: lax.ppermute(a, "x", [(0, 3), (3, 1), (7, 6)]) + a),
    "axis_index": (LINE, S, S, lambda a: a * lax.axis_index("x")),
    "axis_index without arguments": (LINE, (), S, lambda: lax.axis_index("x")[None]),
    "two axes": (GRID, P("x", "y"), P("x", "y"), lambda a: a - lax.psum(a.sum(), BOTH) + lax.pmax(a, "y")),
    "all_gather over two axes": (GRID, XY, XY, lambda a: lax.all_gather(a, BOTH, tiled=True)[:8] + lax.all_gather(a, BOTH).sum(0)),
    "all_gather the other way round": (GRID, YX, YX, lambda a: a @ lax.all_gather(a, ("y", "x"), tiled=True).T),
    "psum_scatter over two axes": (GRID, P(None, BOTH), XY, lambda a: lax.psum_scatter(a, BOTH, tiled=True)),
    "all_to_all over two axes": (GRID, XY, P(None, BOTH), lambda a: lax.all_to_all(a, BOTH, 1, 0, tiled=True)),
    "ppermute over two axes": (GRID, XY, XY, lambda a: lax.ppermute(a, BOTH, [(k, (3 * k + 1) % 8) for k in range(8)])),
    "axis_index of two axes": (GRID, XY, XY, lambda a: a * lax.axis_index(BOTH) + lax.axis_index("y")),
    "replicated operands": (LINE, (S, R), (S, R), lambda a, b: (a @ b, lax.psum((a @ b).sum(0), "x"))),
    "scan": (LINE, (S, R), S, scanned),
    "ring": (LINE, S, S, rings),
    "fori_loop": (LINE, S, S, lambda a: lax.fori_loop(0, 3, lambda k, c: c - lax.psum(c.sum(), "x") / 64 + k, a)),
    "while": (LINE, S, S, lambda a: lax.while_loop(lambda c: lax.psum(jnp.sum(c**2), "x") > 10.0, lambda c: c * 0.5, a)),
    "cond": (LINE, S, S, branches),
    "remat": (LINE, (S, R), S, lambda a, b: jax.checkpoint(lambda a: jnp.tanh(a @ b) - lax.pmean(a, "x"))(a)),
    "custom derivatives": (LINE, S, S, lambda a: jax.nn.relu(a) - total(jax.nn.silu(a))),
    "random numbers": (LINE, (S, R), S, drawn),
    "gradients inside": (LINE, (S, R), S, lambda a, b: jax.grad(lambda a: lax.psum(jnp.sum(jnp.tanh(a @ b) ** 2), "x"))(a)),
}
GRADIENTS = ["psum", "all_gather, tiled", "psum_scatter, tiled", "all_to_all, tiled", "ppermute", "scan", "ring", "remat"]
ARGUMENTS = {"axis_index without arguments": (), "random numbers": (X, jax.random.key(0))}


def case(name, checked):
    mesh, ins, outs, body = CASES[name]
    args = ARGUMENTS.get(name, (X, W) if isinstance(ins, tuple) and ins else (X,))
    return jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=checked), args


def assert_loads(f, args):
    """The program has the values of the function, and no map over devices."""
    closed = jax.make_jaxpr(f)(*args)
    program = load(closed, [f"x{k}" for k in range(len(args))])
    assert "shard_map" not in str(program)
    got = jax.jit(lambda *values: evaluate(program, values))(*args)
    for out, want in zip(got, jax.tree.leaves(jax.jit(f)(*args)), strict=True):
        assert (out.shape, out.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(out, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_all_shares_at_once(name, checked):
    assert_loads(*case(name, checked))


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize(
    "name", ["psum", "all_gather, tiled", "psum_scatter, tiled", "all_to_all, tiled", "ppermute", "scan", "ring", "remat"]
)
def test_gradients_through_it(name, checked):
    f, args = case(name, checked)
    assert_loads(jax.grad(lambda *values: jnp.sum(jnp.sin(f(*values)))), args)


def test_what_all_devices_have_is_that_of_the_first():
    same = jax.shard_map(lambda a: lax.all_gather(a, "x", tiled=True), mesh=LINE, in_specs=S, out_specs=R, check_vma=False)
    assert_loads(same, (X,))


def test_maps_over_one_axis_inside_of_maps_over_another():
    def outer(a):
        def inner(a):
            return a - lax.psum(a, "y") + lax.psum(a.sum(), "x")

        return jax.shard_map(inner, in_specs=P(None, "y"), out_specs=P(None, "y"), axis_names={"y"})(a) + lax.psum(a, "x")

    assert_loads(jax.shard_map(outer, mesh=GRID, in_specs=S, out_specs=S, axis_names={"x"}), (X,))


# --- plans ----------------------------------------------------------------------------------------------


def centred(x):
    return jax.shard_map(lambda a: a - lax.pmean(a.sum(0), "x"), mesh=LINE, in_specs=S, out_specs=S)(x)


def to_centres(x, c):
    return jnp.exp(-jnp.sum((x[:, None] - c[None]) ** 2, -1)) @ c


def arguments(rows, centres=1000):
    rng = np.random.default_rng(2)
    return tuple(rng.standard_normal((n, 8)).astype(np.float32) for n in (rows, centres))


ON_LINE = {"mesh": LINE, "in_shardings": (S, R), "out_shardings": S}


def received(f, args):
    shardings = NamedSharding(LINE, S), NamedSharding(LINE, R)
    text = jax.jit(f, in_shardings=shardings, out_shardings=shardings[0]).lower(*args).compile().as_text()
    return sum(each for _, each in collectives(text, 8).values())


def test_a_limit_on_each_device():
    """Of a million rows, each device has an eighth, which it reads in chunks; the map as one operation would hold 32 MiB on each."""

    def f(x, c):
        y = jax.shard_map(lambda x: x - lax.psum(x.sum(0), "x") / 2**20, mesh=LINE, in_specs=S, out_specs=S)(x)
        return jnp.exp(-jnp.sum((y[:, None] - c[None]) ** 2, -1)).sum(0)

    shapes = [jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (2**20, 1000)]
    plan = optimize(f, memory_limit="12MiB", mesh=LINE, in_shardings=(S, R), out_shardings=R).plan(*shapes)
    assert not plan.unchanged
    assert plan.compiled_peak_bytes <= 12 * MIB
    assert plan.received_bytes <= 8192


WAYS = {
    "once": lambda x, c: to_centres(centred(x), c),
    "in a scan": lambda x, c: lax.scan(lambda y, _: (to_centres(centred(y), c), None), x, None, length=2)[0],
    "in a branch": lambda x, c: lax.cond(c[0, 0] > 9, lambda y: y, lambda y: to_centres(centred(y), c), x),
    "under vmap": lambda x, c: to_centres(jax.vmap(centred)(x[None])[0], c),
    "in a gradient": lambda x, c: jax.grad(lambda x: jnp.sum(jnp.sin(to_centres(centred(x), c))))(x),
}


@pytest.mark.slow
@pytest.mark.parametrize("f", WAYS.values(), ids=WAYS)
def test_shares_of_the_map_are_those_of_the_plan(f):
    args = arguments(8192)
    planned = optimize(f, memory_limit="3MiB", **ON_LINE)
    plan = planned.plan(*args)
    assert not plan.unchanged
    assert plan.compiled_peak_bytes <= 3 * MIB
    assert plan.received_bytes <= received(f, args)
    np.testing.assert_allclose(planned(*args), jax.jit(f)(*args), rtol=1e-3, atol=1e-4)


def ring_attention(q, k, v):
    def step(c, _):
        k, v, level, total, o = c
        s = q @ k.T
        new = jnp.maximum(level, s.max(1))
        p, fall = jnp.exp(s - new[:, None]), jnp.exp(level - new)
        return (lax.ppermute(k, "x", RING), lax.ppermute(v, "x", RING), new, total * fall + p.sum(1), o * fall[:, None] + p @ v), None

    start = k, v, jnp.full(len(q), -jnp.inf), jnp.zeros(len(q)), jnp.zeros_like(q)
    (*_, total, o), _ = lax.scan(step, start, None, length=8)
    return o / total[:, None]


def test_shares_that_go_round_are_sent_to_the_next_device():
    """Each turn sends one share of keys and one of values, in the loop of the map as in that of the plan, whose rows are chunks."""
    ring = jax.shard_map(ring_attention, mesh=LINE, in_specs=S, out_specs=S, check_vma=False)
    q, k, v = (np.random.default_rng(n).standard_normal((8192, 16)).astype(np.float32) for n in range(3))
    f = optimize(ring, memory_limit="3MiB", mesh=LINE, in_shardings=S, out_shardings=S)
    plan = f.plan(q, k, v)
    assert not plan.unchanged
    assert plan.compiled_peak_bytes <= 3 * MIB
    assert plan.received_bytes <= k.nbytes + v.nbytes
    scores = jnp.exp(q @ k.T)
    np.testing.assert_allclose(f(q, k, v), scores @ v / scores.sum(1, keepdims=True), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_any_devices_send_to_any_others(seed):
    rng = np.random.default_rng(seed)
    senders = rng.permutation(8)[: rng.integers(2, 9)]
    pairs = [(int(of), int(to)) for of, to in zip(senders, rng.permutation(8) if seed % 2 else (senders + seed) % 8, strict=False)]
    moved = jax.shard_map(lambda x: lax.ppermute(x * 2, "x", pairs), mesh=LINE, in_specs=S, out_specs=S, check_vma=False)
    program = load(jax.make_jaxpr(moved)(X), ["x"])
    np.testing.assert_array_equal(evaluate(program, [X])[0], jax.jit(moved)(X))


def test_on_one_device():
    f, args = WAYS["once"], arguments(8192)
    planned = optimize(f, memory_limit="3MiB")
    plan = planned.plan(*args)
    assert not plan.unchanged
    assert plan.compiled_peak_bytes <= 3 * MIB
    np.testing.assert_allclose(planned(*args), jax.jit(f)(*args), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_derivatives_of_a_planned_function_that_has_one():
    f, args = WAYS["once"], arguments(8192)
    planned = optimize(f, memory_limit="3MiB", **ON_LINE)
    got, want = (jax.jit(jax.grad(lambda x, c, g=g: jnp.sum(jnp.sin(g(x, c)))))(*args) for g in (planned, f))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def test_the_mesh_of_set_mesh():
    args = arguments(8192)
    with jax.set_mesh(LINE):
        inner = jax.shard_map(lambda a: a - lax.pmean(a.sum(0), "x"), in_specs=S, out_specs=S)
        planned = optimize(lambda x, c: to_centres(inner(x), c), memory_limit="3MiB")
        assert not planned.plan(*args).unchanged
        np.testing.assert_allclose(planned(*args), jax.jit(WAYS["once"])(*args), rtol=1e-3, atol=1e-4)


def test_a_mesh_that_is_not_here():
    pod = AbstractMesh((64,), ("x",), axis_types=(AxisType.Auto,))
    inner = jax.shard_map(lambda a: a - lax.pmean(a.sum(0), "x"), mesh=pod, in_specs=S, out_specs=S)
    f = optimize(lambda x, c: to_centres(inner(x), c), memory_limit="2MiB", mesh=pod, in_shardings=(S, R), out_shardings=S)
    plan = f.plan(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments(2**16)))
    assert plan.peak_bytes <= 2 * MIB


# --- what stays as written --------------------------------------------------------------------------


def in_halves(a):
    return a - lax.psum(a.sum(0), "x", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]])


def with_a_print(a):
    jax.debug.callback(lambda total: None, a.sum())
    return a * 2


def around(body):
    inner = jax.shard_map(body, mesh=LINE, in_specs=S, out_specs=S, check_vma=False)
    return lambda x, c: lax.scan(lambda y, _: (to_centres(inner(y), c), None), x, None, length=2)[0]


@pytest.mark.parametrize("body", [in_halves, with_a_print])
def test_a_map_that_stays_as_it_is_keeps_the_program(body):
    f, args = around(body), arguments(8192)
    planned = optimize(f, memory_limit="8MiB", **ON_LINE)
    assert planned.plan(*args).unchanged
    np.testing.assert_allclose(planned(*args), jax.jit(f)(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("body", "names"), [(in_halves, "psum with axis_index_groups"), (with_a_print, "debug_callback")])
def test_such_a_program_that_does_not_fit_says_why(body, names):
    planned = optimize(around(body), memory_limit="64KiB", **ON_LINE)
    with pytest.raises(MemoryLimitError, match=f"(?s)on each of 8 devices.*test_shard_maps.py.*runs as written.*{names}"):
        planned.plan(*arguments(8192))
