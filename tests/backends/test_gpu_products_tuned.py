"""Products on a card that is here: what is asked of its compiler, and what counts."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from eqsat_mem.backends.gpu import workspaces
from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.backends.gpu.products import NATIVE_FUSIONS, Products
from eqsat_mem.backends.gpu.targets import named
from eqsat_mem.ir import Dot

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


@pytest.mark.parametrize("products", Products)
def test_no_kernels_are_tried_on_a_card_to_learn_what_a_plan_holds(products, compiled_with):
    check = here(products).check(product, SQUARES)
    asked = [options for options in compiled_with if "xla_gpu_enable_triton_gemm" in options and len(options) > 1]
    assert check.held_bytes >= 3 * 4 * 64 * 64
    assert asked
    assert all(options["xla_gpu_autotune_level"] == "0" and NATIVE_FUSIONS.items() <= options.items() for options in asked)
    assert all(options["xla_gpu_enable_triton_gemm"] for options in asked) or products is not Products.COUNTED_BY_TRITON


def test_what_is_run_is_tuned(compiled_with):
    here(Products.TUNED).check(product, SQUARES, optimise=True)
    assert compiled_with == [{}]


def test_convolutions_are_compiled_as_they_run(compiled_with):
    image, kernel = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 3, 16, 16), (4, 3, 3, 3)))
    here(Products.TUNED).check(lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"), [image, kernel])
    assert dict(NATIVE_FUSIONS) in compiled_with
    assert not any("xla_gpu_autotune_level" in options and len(options) > 1 for options in compiled_with)


@pytest.mark.parametrize(("target", "scratch"), [(H100, 32 * MIB), (A100, 4 * MIB)])
def test_scratch_of_cublas_is_what_the_card_has(target, scratch):
    text = CALL.format(4 * MIB)
    assert workspaces.tuned_bytes(text, target) == scratch - 4 * MIB
    assert workspaces.tuned_bytes(CALL.format(32 * MIB), target) == 0
    assert workspaces.tuned_bytes("no products", target) == 0
    assert Products.TUNED.library_bytes(target) == scratch
    assert Products.BY_TRITON.library_bytes(target) == 4 * MIB
    assert Products.COUNTED_BY_TRITON.library_bytes(target) is None


def test_products_are_left_to_triton_where_scratch_would_take_half_of_the_limit():
    own = GpuBackend.of(H100)
    assert own.within(63 * MIB).products is Products.BY_TRITON
    assert own.within(64 * MIB).products is Products.TUNED
    assert GpuBackend.of(A100).within(9 * MIB).products is Products.TUNED


def test_products_by_triton_are_tried_where_they_may_help():
    own = GpuBackend.of(H100)
    levels = [own]
    while (narrowed := levels[-1].narrowed(100 * MIB)) is not None:
        levels.append(narrowed)
    assert [level.products for level in levels] == [*Products]
    assert own.narrowed(2**30) is None
    assert all("xla_gpu_cublas_fallback" in level.compiler_options for level in levels[1:])
    assert dict(own.compiler_options) == dict(NATIVE_FUSIONS)


def test_products_by_triton_are_slower():
    own = GpuBackend.of(H100)
    for dtype in ("float32", "float64"):
        term = Dot(jnp.dtype(dtype), 4, 0, 1, None)
        assert replace(own, products=Products.BY_TRITON).contraction_rate(term) < own.contraction_rate(term)
