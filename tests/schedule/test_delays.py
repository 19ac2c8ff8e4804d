"""Values that XLA:CPU computes long before their first use, computed there: less held once compiled, and the same results."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqsat_mem.backends.xla import compiled_peak
from eqsat_mem.codegen.emit import emit
from eqsat_mem.deadline import NEVER
from eqsat_mem.egraph.extract import original
from eqsat_mem.frontend.load import load
from eqsat_mem.schedule.delays import delayed
from eqsat_mem.schedule.moves import written
from eqsat_mem.schedule.remat import AfterMoves, Moved
from eqsat_mem.schedule.search import straight
from tests.oracles.targets import CPU

STEPS, SIZE = 6, 96


def sorted_weights(x, *weights):
    """Sorting waits for nothing but arguments; each step needs one sorted array."""
    for w in weights:
        x = jnp.tanh(x @ jnp.sort(w, 0))
    return x


@pytest.fixture(scope="module")
def case():
    args = [np.random.RandomState(k).standard_normal((SIZE, SIZE)).astype(np.float32) for k in range(STEPS + 1)]
    jaxpr = jax.make_jaxpr(sorted_weights)(*args)
    return args, straight(original(load(jaxpr, [f"x{k}" for k in range(len(args))])), CPU)


def test_what_is_early_is_delayed_until_the_program_fits(case):
    args, s = case
    in_order = written(s).total(s.seq, s.chunks)
    assert in_order < 0.85 * s.peak_bytes
    for limit in (int(1.01 * in_order), (in_order + s.peak_bytes) // 2):
        made = delayed(s, limit, NEVER)
        assert made.fits(limit)
        held = compiled_peak(emit(made).function, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args], optimise=False)[0]
        assert held <= 1.02 * limit
    np.testing.assert_allclose(jax.jit(emit(made).function)(*args)[0], jax.jit(sorted_weights)(*args), rtol=1e-4, atol=1e-4)
    assert Moved(s).fitting(limit).fits(limit), "moves go on with delays"


def test_what_runs_in_order_stays(case):
    _, s = case
    assert delayed(s, s.peak_bytes, NEVER) is s


def test_delays_that_did_not_help_are_tried_again_when_moves_have_saved_half_of_what_was_too_much(monkeypatch):
    def with_peak(peak):
        return SimpleNamespace(peak_bytes=peak, seconds=1.0, fits=lambda limit: peak <= limit)

    tried = []
    monkeypatch.setattr("eqsat_mem.schedule.remat.delayed", lambda s, *_: tried.append(s.peak_bytes) or with_peak(s.peak_bytes - 10))
    moved = Moved(with_peak(100))
    moved.made, moved.further = [AfterMoves(with_peak(peak), frozenset(), 40) for peak in (100, 99, 81, 79, 60, 55)], iter(())
    assert moved.fitting(50).peak_bytes == 50
    assert tried == [100, 79, 60]  # 40 bytes too many are left of 100, 19 of 79
