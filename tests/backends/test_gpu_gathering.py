"""Loops on a GPU that gather slices where XLA would copy arrays whole for them, and comparisons within one kernel."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

import eqsat_mem
from eqsat_mem.backends.gpu import deviceless
from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.schedule.checks import Check
from eqsat_mem.verification import Chosen, _gathering
from tests.backends.test_gpu_deviceless import H100, compiler, f32
from tests.backends.test_gpu_siblings import predicted

MIB = 2**20


def embedding(y, p):
    """The loss of t-SNE, of which the gradient reads rows of ``p`` beside sums along both axes."""
    q = (1.0 - jnp.eye(y.shape[0])) / (1.0 + jnp.sum((y[:, None] - y[None]) ** 2, -1))
    return jnp.sum(p * jnp.log(jnp.maximum(p, 1e-12) / jnp.maximum(q / jnp.sum(q), 1e-12)))


def quantiles(w, x, y):
    """A loss of many quantiles at once: ``jnp.maximum`` is compared with what it is selected from, in both sums that read it."""
    tau = jnp.linspace(0.01, 0.99, 99)
    e = y[:, None, None] - jnp.tanh(x @ w)[:, :, None] * tau
    return jnp.mean(jnp.maximum(tau * e, (tau - 1) * e))


@compiler
def test_rows_are_gathered_where_slices_would_be_of_a_copy():
    avals = f32(1500, 2), f32(1500, 1500)
    fixed, matrix = sum(4 * int(np.prod(a.shape)) for a in avals) + 4 * 3001, 4 * 1500 * 1500
    plan = eqsat_mem.optimize(jax.value_and_grad(embedding), memory_limit=fixed + matrix // 2, device="h100").plan(*avals)
    assert plan.schedule.backend.gathers
    assert "jnp.take(p, start_" in plan.source
    assert plan.compiled_peak_bytes <= fixed + matrix // 2
    assert min(plan.schedule.chunks.values()) >= 100  # not rows few enough for a copy of the whole matrix beside them


@compiler
def test_plans_that_fit_read_slices(monkeypatch):
    asked = []
    monkeypatch.setattr("eqsat_mem.verification._gathering", lambda request, found: asked.append(found) or _gathering(request, found))
    avals = f32(4000, 3), f32(4000, 3), f32(4000)
    kernel = lambda x, y, v: jnp.cumsum(jnp.exp(-jnp.sum((x[:, None] - y) ** 2, -1)), 1) @ v  # noqa: E731
    plan = eqsat_mem.optimize(kernel, memory_limit=20 * MIB, device="h100").plan(*avals)
    assert "lax.dynamic_slice_in_dim(" in plan.source
    assert not plan.schedule.backend.gathers
    assert asked == []


def test_copies_of_what_loops_slice_are_looked_for_where_they_may_be_what_is_held_too_much(monkeypatch):
    """Points of 48 kB each cannot be why 30 MiB too much are held."""
    avals = f32(4000, 3), f32(4000, 3), f32(4000)
    kernel = lambda x, y, v: jnp.cumsum(jnp.exp(-jnp.sum((x[:, None] - y) ** 2, -1)), 1) @ v  # noqa: E731
    plan = eqsat_mem.optimize(kernel, memory_limit=20 * MIB, device="h100", verify=False).plan(*avals)
    asked = []

    def compiled(request, backend, schedule, planned_limit):
        asked.append(backend)
        return replace(found, check=Check(20 * MIB))

    monkeypatch.setattr("eqsat_mem.verification.compiled", compiled)
    for held in (50 * MIB, 20 * MIB + 10_000):
        found = Chosen(plan.schedule, plan, Check(held), plan.schedule.backend, 20 * MIB)
        chosen = _gathering(SimpleNamespace(limit=20 * MIB), found)
        assert chosen.compiled_bytes == (held if held == 50 * MIB else 20 * MIB)
    assert [backend.gathers for backend in asked] == [True]


def test_a_backend_gathers_once():
    backend = GpuBackend.of(H100)
    assert backend.gathering().gathers
    assert backend.gathering().gathering() is None
    text = "x", "start_i", "size_i", 0, jnp.float32, False
    assert backend.idioms.slice(*text).startswith("lax.dynamic_slice")
    assert backend.gathering().idioms.slice(*text).startswith("jnp.take(")


@compiler
def test_kernels_compare_what_they_select_themselves():
    avals = f32(20, 32), f32(2000, 20), f32(2000)
    gradient = jax.value_and_grad(quantiles)
    held = deviceless.compile_for(lambda *a: jax.tree.leaves(gradient(*a)), avals, H100).held_bytes
    assert held < 5 * MIB  # scratch of a library, and not 25 for each error of each quantile
    assert predicted(gradient, avals) < 1.2 * held
