"""Values that elementwise kernels spread along other axes: whether they compute them there, as predicted and as XLA:GPU compiles them."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from eqsat_mem.backends.gpu import deviceless
from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.backends.gpu.products import Products
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.frontend.load import load
from eqsat_mem.schedule.search import straight
from tests.backends.test_gpu_deviceless import H100, compiler, f32

FUNCTIONS = {
    "exp": jnp.exp,
    "sqrt": jnp.sqrt,
    "logistic": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "gelu": jax.nn.gelu,
    "power": lambda x: x**1.3,
    "sine and cosine": lambda x: jnp.sin(x) + jnp.cos(x),
    "tanh of exp": lambda x: jnp.tanh(jnp.exp(x)),
}


def in_front(function):
    return lambda x, y: function(x) * y


def behind(function):
    return lambda x, y: function(x)[..., None] * y


def predicted(function, *avals):
    own = replace(GpuBackend.of(H100).without_tiles(), products=Products.COUNTED_BY_TRITON)
    program = load(jax.make_jaxpr(function)(*avals), ["x", "y"], own.preferences)
    return straight(Extraction(program), own, emitted=False).peak_bytes


def temporaries(function, rows, times):
    """The arrays of a size that are predicted to be held beside arguments and result, which is so many times as large."""
    x, y = f32(rows, rows), f32(times, rows, rows)
    return round(predicted(in_front(FUNCTIONS[function]), x, y) / (4 * rows * rows) - 1 - 2 * times)


def test_long_functions_of_large_arrays_are_written_out():
    assert temporaries("power", 1024, 2) == temporaries("tanh of exp", 256, 32) == 1
    assert temporaries("power", 256, 2) == temporaries("exp", 2048, 16) == temporaries("power", 1024, 1) == 0


def decays(q, k, v):
    """Retention, whose weights fall with the distance of two places at a rate of each head, for all rows of a batch."""
    heads, places = jnp.arange(q.shape[1]), jnp.arange(q.shape[2])
    apart = places[:, None] - places
    rate = 1 - 2.0 ** (-5 - heads)
    weights = jnp.where(apart >= 0, rate[:, None, None] ** apart, 0)
    return (jnp.einsum("bhid,bhjd->bhij", q, k) * weights) @ v


@compiler
def test_weights_of_all_rows_of_a_batch_are_written_out():
    avals = [f32(2, 4, 512, 64)] * 3
    own = GpuBackend.of(H100).without_tiles().narrowed()
    program = load(jax.make_jaxpr(decays)(*avals), ["q", "k", "v"], own.preferences)
    held = deviceless.compile_for(decays, avals, H100).held_bytes
    assert straight(Extraction(program), own, emitted=False).peak_bytes == pytest.approx(held, rel=0.01)


@compiler
@pytest.mark.parametrize("seed", range(12))
def test_xla_writes_out_the_same(seed):
    draw = random.Random(seed)
    function, rows, times = FUNCTIONS[draw.choice([*FUNCTIONS])], draw.choice([64, 256, 512, 1024]), draw.choice([2, 3, 4, 8, 16])
    spread, shape = draw.choice([(in_front, (times, rows, rows)), (behind, (rows, rows, times))])
    avals = f32(rows, rows), f32(*shape)
    held = deviceless.compile_for(spread(function), avals, H100, settings=("triton",)).held_bytes
    assert predicted(spread(function), *avals) == pytest.approx(held, abs=4 * rows * rows / 4)


def distances(x, y):
    return jnp.sum((x[:, None] - y[None]) ** 2, -1)


def folded_once(x, y):
    return jnp.sum(jnp.abs(distances(x[:, 1:], x[:, :-1])[..., None] * y), 1)


def folded_twice(x, y):
    """Distances that two sums read, each for all elements of a vector."""
    apart = distances(x[:, 1:], x[:, :-1])[..., None]
    return jnp.sum(jnp.abs(apart * y), 1), jnp.sum(jnp.abs(apart + y), 1)


FOLDED = [(folded_once, 3, 5, 0), (folded_once, 3, 9, 1), (folded_once, 7, 2, 0), (folded_once, 7, 3, 1), (folded_twice, 3, 3, 0),
          (folded_twice, 3, 5, 1), (folded_twice, 7, 2, 1), (folded_twice, 7, 33, 1)]  # fmt: skip
"""Folds, the dimensions of points, the elements for which each distance is read, and how often all distances are in memory."""


@pytest.mark.parametrize(("function", "dimensions", "times", "written"), FOLDED)
def test_short_folds_that_longer_ones_spread_are_written_out(function, dimensions, times, written):
    """By the same estimate as what is elementwise; folds along a middle axis have blocks for each element before it, and write nothing."""
    assert round(predicted(function, f32(2000, dimensions + 1), f32(times)) / (4 * 2000**2), 1) == pytest.approx(written, abs=0.15)


@compiler
@pytest.mark.parametrize(("function", "dimensions", "times", "written"), FOLDED)
def test_xla_writes_out_the_same_folds(function, dimensions, times, written):
    held = deviceless.compile_for(function, [f32(2000, dimensions + 1), f32(times)], H100, settings=("triton",)).held_bytes
    assert round(held / (4 * 2000**2), 1) == pytest.approx(written, abs=0.15)
