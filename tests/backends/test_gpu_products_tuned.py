"""Products on a card that is here: what is asked of its compiler, and what counts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import eqsat_mem
from eqsat_mem.api.saved_plans import taken_up
from eqsat_mem.backends.gpu import workspaces
from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.backends.gpu.options import ALWAYS, NATIVE_FUSIONS
from eqsat_mem.backends.gpu.products import Products
from eqsat_mem.backends.gpu.targets import named
from eqsat_mem.ir import Dot
from eqsat_mem.request import narrowing

H100, A100 = named("h100"), named("a100-80gb")
MIB = 2**20
CALL = '%x = (f32[8,8]{{1,0}}, s8[{0}]{{0}}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={{}}'


class Here(GpuBackend):
    """A card that is said to be the device in use, which is a CPU: its jaxlib knows the options of GPUs, and has no use for them."""

    is_here = True


@pytest.fixture
def compiled_with(monkeypatch):
    """The options of programs that are compiled."""
    seen = []
    compile_ = jax.stages.Lowered.compile

    def compile_and_tell(self, compiler_options=None, **kwargs):
        seen.append(dict(compiler_options or {}))
        return compile_(self, compiler_options, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_and_tell)
    return seen


def here(products):
    own = GpuBackend.of(H100)
    return Here(own.device, own.target, products=products)


def product(a, b):
    return a @ b


SQUARES = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2


def of_settings(seen):
    """The compilations without trying kernels, and all others but those that ask for an option."""
    untuned = [options for options in seen if len(options) > 1 and "xla_gpu_autotune_level" in options]
    return untuned, [options for options in seen if options not in untuned and len(options) != 1]


@pytest.mark.parametrize("products", Products)
def test_kernels_are_tried_on_a_card_only_for_what_fits_otherwise(products, compiled_with):
    own = here(products)
    held = own.check(product, SQUARES).held_bytes
    compiled_with.clear()
    own.check(product, SQUARES, limit=held - 1)
    untuned, tuned = of_settings(compiled_with)
    assert len(untuned) == 1
    assert tuned == []
    assert all(NATIVE_FUSIONS.items() <= options.items() for options in untuned)
    assert all(options["xla_gpu_enable_triton_gemm"] for options in untuned) or products is not Products.COUNTED_BY_TRITON
    compiled_with.clear()
    assert own.check(product, SQUARES, limit=2**30).held_bytes == held
    assert own.compiler_options in compiled_with


def test_what_is_run_is_tuned(compiled_with):
    here(Products.TUNED).check(product, SQUARES, optimise=True, limit=2**30)
    assert compiled_with == [{}]


@pytest.mark.parametrize(("target", "scratch"), [(H100, 32 * MIB), (A100, 4 * MIB)])
def test_scratch_of_cublas_is_what_the_card_has(target, scratch):
    small, large = CALL.format(4 * MIB), CALL.format(32 * MIB)
    assert workspaces.cublaslt_bytes(f"{small}\n{large}") == [4 * MIB, 32 * MIB]
    assert Products.TUNED.difference(small, target, 2**40) == scratch - 4 * MIB
    assert Products.TUNED.difference(large, target, 2**40) == 0
    assert Products.BY_TRITON.difference(small, target, 2**40) == 0
    assert Products.BY_TRITON.difference(large, target, 2**40) == -28 * MIB
    assert all(products.difference("no products", target, 2**40) == 0 for products in Products)
    assert Products.COUNTED_BY_TRITON.difference(large, target, 2**40) == 0
    assert Products.TUNED.scratch_bytes(target) == GpuBackend.of(target).library_bytes == scratch
    assert Products.BY_TRITON.scratch_bytes(target) == 4 * MIB
    assert Products.COUNTED_BY_TRITON.scratch_bytes(target) is None


def options_of(limit):
    """The compiler options of a plan of a product that fits easily."""
    plan = eqsat_mem.optimize(lambda a, b: jnp.tanh(a @ b), memory_limit=limit, device="h100", verify=False).plan(*SQUARES)
    return dict(plan.schedule.backend.compiler_options)


def test_products_are_left_to_triton_where_scratch_would_take_half_of_the_limit():
    assert "xla_gpu_cublas_fallback" in options_of(64 * MIB - 1)
    assert options_of(64 * MIB) == dict(ALWAYS)


def test_products_by_triton_are_tried_in_turn():
    own = GpuBackend.of(H100)
    levels = [own, *narrowing(own)]
    assert [level.products for level in levels] == [*Products]
    assert all("xla_gpu_cublas_fallback" in level.compiler_options for level in levels[1:])
    assert dict(own.compiler_options) == dict(ALWAYS)
    assert [level.library_bytes for level in levels[1:]] == [0, 0]


def test_plans_that_are_taken_up_keep_the_options_that_they_were_made_with():
    """Also those that were tried where nothing else fitted."""

    def function(a, b):
        return jnp.sin(a @ b)

    plan = eqsat_mem.optimize(function, memory_limit=2**30, device="h100", verify=False).plan(*SQUARES)
    request = SimpleNamespace(backend=GpuBackend.of(H100))
    options = dict(next(narrowing(request.backend)).compiler_options)
    kept = replace(plan, unchanged=False, compiler_options={**options, "of_another_device": "1"})
    assert dict(taken_up(kept, request, lambda plan: plan).compiler_options) == options


def test_products_by_triton_are_slower():
    own = GpuBackend.of(H100)
    for dtype in ("float32", "float64"):
        term = Dot(jnp.dtype(dtype), 4, 0, 1, None)
        assert replace(own, products=Products.BY_TRITON).contraction_rate(term) < own.contraction_rate(term)
