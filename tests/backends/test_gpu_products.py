"""Products on a GPU that no library needs to compute, and those that none may."""

import jax
import jax.numpy as jnp
import pytest

import eqsat_mem
from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.backends.gpu import deviceless
from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.egraph.extract import original
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Dot, Fold
from eqsat_mem.schedule.search import straight
from tests.backends.test_gpu_deviceless import H100, compiler, f32


def planned(function, limit, *avals, verify=False):
    return eqsat_mem.optimize(function, memory_limit=limit, device="h100", verify=verify).plan(*avals)


def test_products_of_few_results_are_sums_where_there_is_no_room_for_a_library():
    plan = planned(lambda a, b, c: (a @ b) @ c, "2MiB", f32(20_000, 2), f32(2, 20_000), f32(20_000, 2))
    assert "dot-of-few-results" in plan.rules_fired
    assert not plan.loops
    assert not [term for term in plan.program.terms if isinstance(term, Dot)]
    assert any(isinstance(term, Fold) for term in plan.program.terms)
    assert "dot-of-few-results" in CpuBackend.needless_rules


def squared(a):
    return jnp.tanh(a @ a).sum(1)


@compiler
def test_products_are_by_triton_alone_where_a_library_does_not_fit():
    fixed = 4 * 1024**2
    for spare, options in ((9 * 2**20, {}), (5 * 2**20, deviceless.SETTINGS["triton"])):
        plan = eqsat_mem.optimize(squared, memory_limit=fixed + spare, device="h100", accuracy="bitwise").plan(f32(1024, 1024))
        assert plan.compiler_options == options
        assert plan.peak_bytes <= fixed + spare
        settings = deviceless.compile_for(plan.function, [f32(1024, 1024)], H100).settings
        assert [c.held_bytes <= fixed + spare for c in settings] == [True, not options]
        assert plan.compiled_peak_bytes <= fixed + spare


def test_without_a_compiler_nothing_is_promised_of_triton_alone():
    with pytest.raises(eqsat_mem.MemoryLimitError):
        eqsat_mem.optimize(squared, memory_limit="9MiB", device="h100", accuracy="bitwise", verify=False).plan(f32(1024, 1024))


def test_a_cautious_backend_holds_what_several_folds_read():
    def both(x, y):
        d = jnp.exp(jnp.sin(x[:, None] * y[None]))
        return d.sum(1), d.max(0)

    own = GpuBackend.of(H100)
    bold, cautious = (straight(original(load(jax.make_jaxpr(both)(f32(5000), f32(5000)), ["x", "y"])), b) for b in (own, own.cautious()))
    assert bold.peak_bytes < 4 * 5000**2 <= cautious.peak_bytes
    assert own.cautious().cautious() is None
