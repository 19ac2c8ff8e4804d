"""Weights of operations on XLA:CPU: what they must tell apart. No time is judged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eqsat_mem.backends.cpu import weights
from eqsat_mem.backends.cpu.convolutions import is_librarys
from eqsat_mem.backends.cpu.hidden_scratch import library_computations
from eqsat_mem.backends.hlo import read

LAYOUT = ("NHWC", "HWIO", "NHWC")


def convolution(data, kernel, pad=1):
    """A convolution of two shapes: the cost in additions, and whether XLA passes it to the kernel library."""

    def convolve(x, k):
        return lax.conv_general_dilated(x, k, (1, 1), ((pad, pad), (pad, pad)), dimension_numbers=LAYOUT)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (data, kernel)]
    (eqn,) = jax.make_jaxpr(convolve)(*shapes).eqns
    cost = weights.table(1.0).blocks["conv_general_dilated"]([data, kernel], [eqn.outvars[0].aval.shape], eqn.params)
    return cost, bool(library_computations(read(jax.jit(convolve).lower(*shapes).compile())))


def kernel_gradient(examples, before=64, after=3, side=32):
    return convolution((before, side, side, examples), (side, side, examples, after))


def test_gradients_of_kernels_cost_by_positions_where_few_examples_are_chunked():
    """Eight examples one by one take several times as long as together."""
    assert 8 * kernel_gradient(1)[0] > 3 * kernel_gradient(8)[0]


@pytest.mark.parametrize(("features", "results"), [(1, 1), (16, 16), (3, 17), (17, 3), (64, 3), (3, 64)])
def test_the_library_has_convolutions_of_more_features_than_few(features, results):
    _, in_library = convolution((4, 32, 32, features), (3, 3, features, results))
    assert in_library == is_librarys(2, features, results) == (max(features, results) > 16)


def test_in_the_library_examples_cost_the_same_one_by_one():
    one, eight = (kernel_gradient(n, after=32)[0] for n in (1, 8))
    assert 8 * one == pytest.approx(eight, rel=0.01)


def test_convolutions_in_groups_cost_by_their_places_and_not_by_products():
    """Of one feature to each result: as many places for each group, where one convolution would have products of all features at once."""

    def cost(groups, features=64):
        operand, kernel = (1, 16, 16, features), (3, 3, features // groups, features)

        def convolve(x, k):
            return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=LAYOUT, feature_group_count=groups)

        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (operand, kernel)]
        (eqn,) = jax.make_jaxpr(convolve)(*shapes).eqns
        return weights.table().blocks["conv_general_dilated"]([operand, kernel], [operand], eqn.params)

    assert cost(64) > 3 * cost(16) > 3 * cost(1)
