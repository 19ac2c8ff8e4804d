"""``eqsat-mem run`` for functions of arrays that lie on several devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eqsat_mem.api.planning_jit import ScriptRun, planning_jit
from eqsat_mem.api.run_report import Ledger

LIMIT = 2**18


@pytest.fixture
def ledger(monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", str(LIMIT))
    return Ledger()


@pytest.fixture
def jit(ledger):
    return planning_jit(ScriptRun(ledger, strict=True))


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()), ("x",))


def kernel(x, y, v):
    return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


def step(w, x, y):
    def loss(w):
        return jnp.mean((jnp.tanh(kernel(x, y, w)) - 1) ** 2)

    return w - 0.1 * jax.grad(loss)(w), loss(w)


def arrays(mesh, *specs):
    rng = np.random.default_rng(0)
    made = (rng.standard_normal(shape).astype(np.float32) for shape in ((2048, 3), (2048, 3), (2048, 2)))
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(made, specs, strict=True)]


def test_arrays_in_shares_are_planned_on_their_mesh(mesh, jit, ledger):
    given = arrays(mesh, P("x"), P(), P())
    fast, plain = jit(kernel), jax.jit(kernel)
    got, want = fast(*given), plain(*given)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert got.sharding.is_equivalent_to(want.sharding, 2)
    (entry,) = ledger.entries
    assert entry.outcome == "planned"
    assert entry.peak_bytes <= LIMIT < entry.original_peak_bytes
    whole = arrays(mesh, P(), P("x"), P("x"))
    np.testing.assert_allclose(fast(*whole), want, rtol=1e-4, atol=1e-4)
    assert [e.outcome for e in ledger.entries] == ["planned", "planned"], "arrays that lie otherwise have a plan of their own"
    fast(*given)
    assert len(ledger.entries) == 2


def test_a_training_step_with_shardings_and_donation(mesh, jit, ledger):
    x, y, w = arrays(mesh, P("x"), P(), P())
    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    options = {"in_shardings": (whole, rows, whole), "out_shardings": (whole, None), "donate_argnums": 0}
    fast, plain = jit(step, **options), jax.jit(step, **{**options, "donate_argnums": ()})
    want = got = w
    for _ in range(2):
        want, far = plain(want, x, y)
        got, near = fast(jnp.array(got), x, y)
        np.testing.assert_allclose(near, far, rtol=1e-4)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
    assert got.sharding.is_equivalent_to(want.sharding, 2)
    (entry,) = ledger.entries
    assert (entry.outcome, entry.peak_bytes <= LIMIT) == ("planned", True)


def test_meshes_with_shardings_in_types_are_left_alone(jit, ledger):
    explicit = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    given = arrays(explicit, P("x"), P(), P())
    got, want = jit(kernel)(*given), jax.jit(kernel)(*given)
    np.testing.assert_array_equal(got, want)
    assert got.sharding == want.sharding
    (entry,) = ledger.entries
    assert (entry.outcome, "of type Explicit" in entry.reason) == ("left alone", True)
