"""Sums of which devices have parts: what is exchanged for them, and that it is exchanged once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize
from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.egraph.extract import original
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block
from eqsat_mem.ir.mesh import Devices, Placement
from eqsat_mem.ir.ops.collectives import EXCHANGES
from eqsat_mem.mesh.invariant import check
from eqsat_mem.mesh.localise import localise
from eqsat_mem.mesh.spreading import spreadings

ROWS, INNER = 48, 64
LEFT, RIGHT = ((), ("x",)), (("x",), ())


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def three(a, b, c, u, v, w):
    """A sum of three products whose inner dimensions lie in shares, as in the gradient of three projections of one value."""
    return jnp.tanh(a @ u - b @ v + -(c @ w))


def one_read_again(a, b, c, u, v, w):
    product = a @ u
    return jnp.tanh(product + b @ v) * jnp.cos(product) + c @ w


def added_to_the_whole(a, b, c, u, v, w):
    return a @ u + b[:1] @ v + jnp.sin(c[0, 0])


def with_other_names(a, u, v):
    """Rows are queries and keys, so that one of the products has them under another name."""
    q, k = a @ u, a @ v
    s = jnp.tanh(q @ k.T)
    return jnp.tanh((s @ k) @ u.T + (s.T @ q) @ v.T)


SIX = [(ROWS, INNER)] * 3 + [(INNER, 32)] * 3
SIX_LIE = (LEFT,) * 3 + (RIGHT,) * 3


def exchanges(function, result, shapes=SIX, lie=SIX_LIE):
    """The exchanges of what one device runs, for each way to deal indices out."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    ex = original(load(jax.make_jaxpr(function)(*arrays), [f"x{k}" for k in range(len(arrays))]))
    placement = Placement(Devices((("x", 8),)), tuple(lie), (result,))
    found = []
    for way, divided in spreadings(ex, placement, idle=False):
        program = localise(ex, placement, divided, way, CpuBackend.built_in()).program
        check(program)
        terms = (program.terms[t] for t in program.reachable())
        found.append(sorted(term.call.prim.name for term in terms if isinstance(term, Block) and term.call.prim.name in EXCHANGES))
    return found


def test_parts_are_added_before_they_are_combined():
    assert exchanges(three, ((), ()))[0] == ["all_reduce"]
    assert exchanges(one_read_again, ((), ()))[0] == ["all_reduce"] * 3
    assert exchanges(added_to_the_whole, ((), ()))[0] == ["all_reduce", "gather_shares"]
    features = [(ROWS, INNER), (INNER, 32), (INNER, 32)]
    assert exchanges(with_other_names, ((), ()), features, (((), ()), ((), ("x",)), ((), ("x",))))[0] == ["all_reduce"] * 2


@pytest.mark.parametrize("function", [three, one_read_again, added_to_the_whole])
def test_values_of_sums_of_parts(function, mesh):
    def distances(*args):
        y = function(*args)
        return jnp.sum(jnp.cumsum(jnp.abs(y[:, None] - y), 2), (1, 2))

    rng = np.random.default_rng(0)
    args = [rng.standard_normal(shape).astype(np.float32) for shape in [(ROWS, INNER)] * 3 + [(INNER, 32)] * 3]
    specs = (P(None, "x"),) * 3 + (P("x"),) * 3
    f = optimize(distances, memory_limit="300KiB", mesh=mesh, in_shardings=specs)
    assert not f.plan(*args).unchanged
    np.testing.assert_allclose(f(*args), jax.jit(distances)(*args), rtol=1e-4)


def test_the_gradient_of_projections_is_summed_once_in_every_turn(mesh):
    def loss(layers, x):
        def layer(x, w):
            q, k = (jnp.sin(x @ w[n]) for n in ("q", "k"))
            return x + (q * k) @ w["o"], None

        return jnp.sum(lax.scan(layer, x, layers)[0] ** 2)

    rng = np.random.default_rng(0)
    shapes = {"q": (5, 32, 64), "k": (5, 32, 64), "o": (5, 64, 32)}
    layers = {n: rng.standard_normal(s).astype(np.float32) / 8 for n, s in shapes.items()}
    x = rng.standard_normal((4096, 32)).astype(np.float32)
    specs = {"q": P(None, None, "x"), "k": P(None, None, "x"), "o": P(None, "x")}
    f = optimize(jax.grad(loss), memory_limit="6MiB", mesh=mesh, in_shardings=(specs, P()), out_shardings=specs)
    activations = [sent for sent in f.plan(layers, x).collectives if sent.kind == "psum" and sent.bytes * sent.times >= x.nbytes]
    assert sum(sent.bytes * sent.times for sent in activations) <= 3 * 5 * x.nbytes  # forward, again, and backward through q and k at once
    got, want = f(layers, x), jax.jit(jax.grad(loss))(layers, x)
    for n in shapes:
        np.testing.assert_allclose(got[n], want[n], rtol=1e-3, atol=1e-3 * float(jnp.max(jnp.abs(want[n]))))
