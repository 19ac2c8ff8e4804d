"""Convolutions along three axes that emitted source for a CPU has plane by plane. No time is judged."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.backends import hlo
from eqsat_mem.backends.cpu import weights
from eqsat_mem.backends.cpu.convolutions import convolution_bytes
from eqsat_mem.backends.cpu.idioms import CpuIdioms
from eqsat_mem.backends.cpu.planes import convolved_by_planes, held_elements
from eqsat_mem.ir.ops import BLOCKS
from tests.tiers import tiered

LAYOUT = ("NDHWC", "DHWIO", "NDHWC")
PADDED, ONES = ((1, 1),) * 3, (1, 1, 1)
CASES = {
    "padded": ((2, 6, 5, 4, 3), (3, 2, 3, 3, 4), {"padding": PADDED}),
    "strided": ((2, 7, 5, 6, 3), (3, 3, 2, 3, 4), {"padding": ((0, 1), (2, 0), (1, 1)), "window_strides": (2, 1, 2)}),
    "cropped": ((1, 8, 5, 6, 2), (2, 2, 2, 2, 3), {"padding": ((-2, -1), (-1, 2), (0, 0))}),
    "gaps in the window": ((2, 8, 7, 6, 2), (3, 2, 3, 2, 3), {"padding": PADDED, "rhs_dilation": (2, 3, 1), "window_strides": (2, 1, 1)}),
    "elements apart": ((2, 4, 3, 5, 3), (3, 3, 3, 3, 2), {"padding": ((2, 1),) * 3, "lhs_dilation": (2, 2, 2)}),
    "elements far apart": ((2, 3, 3, 2, 3), (2, 3, 2, 3, 2), {"padding": ((1, 4), (2, 2), (1, 0)), "lhs_dilation": (4, 1, 3)}),
    "elements apart, cropped": ((1, 5, 3, 3, 2), (3, 2, 2, 2, 2), {"padding": ((-3, -1), (0, 1), (1, 1)), "lhs_dilation": (3, 2, 1)}),
    "single elements apart": ((2, 4, 3, 3, 3), (1, 1, 1, 3, 4), {"padding": ((0, 1),) * 3, "lhs_dilation": (2, 2, 2)}),
    "a single plane": ((2, 1, 5, 5, 3), (3, 3, 3, 3, 2), {"padding": PADDED}),
    "gradient of a kernel": ((3, 6, 5, 4, 2), (6, 5, 4, 2, 4), {"padding": PADDED}),
}
LARGE = {
    "padded": ((2, 12, 12, 12, 32), (3, 3, 3, 32, 32)),
    "strided": ((2, 24, 24, 24, 16), (3, 3, 3, 16, 32)),
    "elements apart": ((2, 12, 12, 12, 32), (3, 3, 3, 32, 16)),
    "gradient of a kernel": ((32, 12, 12, 12, 2), (12, 12, 12, 2, 32)),
}
WHOLE = {
    "single elements": ((2, 4, 3, 3, 3), (1, 1, 1, 3, 4), {"padding": ((0, 0),) * 3}),
    "groups": ((2, 4, 4, 4, 4), (3, 3, 3, 1, 8), {"padding": PADDED, "feature_group_count": 4}),
    "groups of the batch": ((4, 4, 4, 4, 3), (3, 3, 3, 3, 4), {"padding": PADDED, "batch_group_count": 2}),
    "elements apart, and steps": (
        (2, 4, 3, 3, 3),
        (3, 3, 3, 3, 4),
        {"padding": PADDED, "lhs_dilation": (2, 1, 1), "window_strides": (2, 1, 1)},
    ),
}


def convolution(options, layout=LAYOUT):
    return partial(lax.conv_general_dilated, **{"window_strides": ONES, "dimension_numbers": layout, **options})


def traced(options, *shapes, layout=LAYOUT):
    """The equation of a convolution, the shapes of its operands, and that of its result."""
    (eqn,) = jax.make_jaxpr(convolution(options, layout))(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).eqns
    return eqn, shapes, [eqn.outvars[0].aval.shape]


def texts(eqn, shapes, idioms):
    """The source of a backend, and that of the operation table."""
    write = idioms.block(eqn.primitive.name).text
    assert write is not None
    return write(eqn.params, ["x", "w"], shapes), BLOCKS[eqn.primitive.name].text(eqn.params, ["x", "w"], shapes)


def computed(text, arrays):
    given = dict(zip("xw", map(jnp.asarray, arrays)), lax=lax, jnp=jnp, jax=jax, convolved_by_planes=convolved_by_planes)
    return jax.jit(lambda: eval(text, dict(given)))()


@pytest.mark.parametrize("layout", tiered(["NDHWC-DHWIO-NDHWC", "NCDHW-OIDHW-NCDHW", "HWNDC-IWHDO-DCHNW"], ["HWNDC-IWHDO-DCHNW"]))
@pytest.mark.parametrize("case", CASES)
def test_planes_give_the_same(case, layout):
    rng, (data, kernel, options) = np.random.default_rng(5), CASES[case]
    layouts = layout.split("-")
    arrays = []
    for shape, usual, asked in zip((data, kernel), LAYOUT, layouts):
        array = rng.integers(-4, 5, shape).astype(np.float32)
        arrays.append(np.transpose(array, [usual.index(c) for c in asked]))
    eqn, shapes, _ = traced(options, *(a.shape for a in arrays), layout=layouts)
    text, plain = texts(eqn, shapes, CpuIdioms())
    assert "convolved_by_planes(" in text
    np.testing.assert_array_equal(computed(text, arrays), computed(plain, arrays))


@pytest.mark.parametrize("case", WHOLE)
def test_what_has_no_planes_stays_whole(case):
    data, kernel, options = WHOLE[case]
    eqn, shapes, outs = traced(options, data, kernel)
    text, _ = texts(eqn, shapes, CpuIdioms())
    assert "convolved_by_planes(" not in text
    costs, written = (weights.table(1.0, emitted).blocks[eqn.primitive.name](shapes, outs, eqn.params) for emitted in (True, False))
    assert costs == written


def test_where_bits_stay_convolutions_are_whole():
    data, kernel, options = CASES["padded"]
    eqn, shapes, _ = traced(options, data, kernel)
    text, _ = texts(eqn, shapes, CpuIdioms(keeps_apart=False, keeps_bits=True))
    assert "convolved_by_planes(" not in text


@pytest.mark.parametrize("case", LARGE)
def test_planes_cost_less_in_emitted_source(case):
    eqn, shapes, outs = traced(CASES[case][2], *LARGE[case])
    emitted, written = (weights.table(1.0, has).blocks[eqn.primitive.name](shapes, outs, eqn.params) for has in (True, False))
    assert emitted < written


def network(kernels, x):
    for k, kernel in enumerate(kernels):
        x = jnp.tanh(convolution({"padding": "SAME", "window_strides": (1 + k % 2,) * 3})(x, kernel))
    return jnp.sum(x**2)


def test_gradients_of_a_network_in_space_keep_to_their_limit():
    """Its gradient computes convolutions of elements that lie apart, and those of kernels."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((4, 12, 12, 12, 2), np.float32)
    kernels = [rng.standard_normal((3, 3, 3, a, b), np.float32) / 8 for a, b in ((2, 8), (8, 8), (8, 4))]
    step = jax.value_and_grad(network)
    written = jax.jit(step).lower(kernels, x).compile().memory_analysis()
    assert written is not None
    outside = written.argument_size_in_bytes + written.output_size_in_bytes
    fast: Any = eqsat_mem.optimize(step, memory_limit=outside + written.temp_size_in_bytes // 2)
    made = fast.plan(kernels, x)
    assert "convolved_by_planes(" in made.source
    assert "lhs_dilation=(2, 2, 2)" in made.source
    for got, want in zip(jax.tree.leaves(fast(kernels, x)), jax.tree.leaves(jax.jit(step)(kernels, x)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("case", LARGE)
def test_what_planes_hold_is_predicted(case):
    """What XLA reports, and what the library copies besides."""
    options = CASES[case][2]
    eqn, shapes, outs = traced(options, *LARGE[case])
    run = partial(convolved_by_planes, **{"window_strides": ONES, "dimension_numbers": LAYOUT, **options})
    compiled = jax.jit(run).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    held = memory.temp_size_in_bytes + convolution_bytes(hlo.read(compiled))
    assert 0.6 * held <= 4 * held_elements(shapes, outs, eqn.params) <= 1.6 * held
