"""What programs would hold with the scratch of cuBLAS that the card has, from the text that was compiled with less."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eqsat_mem.backends.gpu import library_scratch
from eqsat_mem.backends.gpu.products import Products
from tests.backends.test_gpu_deviceless import H100, compiler, f32

MIB = 2**20
MATRIX = "f32[1024,1024]{1,0}"


def squared(operand):
    return f'({MATRIX}, s8[4194304]{{0}}) custom-call(%{operand}, %{operand}), custom_call_target="__cublas$lt$matmul"'


def module(*lines):
    return "\n".join(["HloModule m, is_scheduled=true", "", f"ENTRY %main (a: {MATRIX}) -> f32[] {{", *lines, "}", ""])


def test_scratch_adds_nothing_where_other_values_are_at_their_most():
    """A product of 4 MiB with scratch, and then eleven arrays of 4 MiB at once, or one."""
    first = [f"  %a = {MATRIX} parameter(0)", f"  %p = {squared('a')}", f"  %g = {MATRIX} get-tuple-element(%p), index=0"]
    made = [f"  %m{k} = {MATRIX} fusion(%g), kind=kInput, calls=%f" for k in range(11)]
    read = ", ".join(f"%m{k}" for k in range(11))
    many = module(*first, *made, f"  ROOT %s = f32[] fusion({read}), kind=kInput, calls=%h")
    few = module(*first, made[0], "  ROOT %s = f32[] fusion(%m0), kind=kInput, calls=%h")
    assert library_scratch.more_with(many, 32 * MIB, 48 * MIB) == 0
    assert library_scratch.more_with(few, 32 * MIB, 8 * MIB) == 28 * MIB
    assert Products.TUNED.difference(many, H100, 48 * MIB) == 0
    assert Products.TUNED.difference(few, H100, 8 * MIB) == 28 * MIB


def test_scratch_that_cannot_be_placed_is_added():
    """Nothing is placed of a text that cannot be read, or whose values are not what XLA reports."""
    text = module(f"  %a = {MATRIX} parameter(0)", f"  ROOT %p = {squared('a')}")
    assert library_scratch.more_with(text, 32 * MIB, 100 * MIB) is None
    assert Products.TUNED.difference(text, H100, 100 * MIB) == 28 * MIB
    broken = module(f"  ROOT %p = {squared('nowhere')}")
    assert library_scratch.more_with(broken, 32 * MIB, 4 * MIB) is None


def softmax(q, k, v):
    return jax.nn.softmax(q @ k.T, -1) @ v


def gradient(q, k, v):
    return jax.grad(lambda q, k, v: jnp.sum(softmax(q, k, v) ** 2), (0, 1, 2))(q, k, v)


def layers(x, w):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), x, w)


def summed_in_turns(x, w):
    return lax.fori_loop(0, 8, lambda t, total: total + lax.dynamic_slice_in_dim(x, t * 512, 512, 0).T @ w, jnp.zeros((512, 700)))


def network(w, v, x):
    return jax.grad(lambda w, v: jnp.mean(jnp.tanh(x @ w) @ v), (0, 1))(w, v)


PROGRAMS = {
    softmax: [f32(2048, 64)] * 3,
    gradient: [f32(2048, 64)] * 3,
    layers: [f32(4096, 512), f32(6, 512, 512)],
    summed_in_turns: [f32(4096, 512), f32(512, 700)],
    network: [f32(64, 4096), f32(4096, 16), f32(8192, 64)],
}


@compiler
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_values_are_placed_as_the_compiler_places_them(function):
    from eqsat_mem.backends.gpu import deviceless

    (made,) = deviceless.each_setting(function, PROGRAMS[function], H100, (), ("cublas",))
    scratch = 4 * MIB
    assert library_scratch.more_with(made.text, scratch, made.temporaries) is not None, "what is placed is near what XLA reports"
    more = [library_scratch.more_with(made.text, n * MIB, made.temporaries) for n in (4, 16, 32, 64)]
    assert more[0] <= 0.01 * MIB
    assert more == sorted(more)
    assert more[-1] >= 64 * MIB - made.temporaries, "there is room for it"
