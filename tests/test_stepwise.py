"""The oracle that runs jaxprs in numpy computes what XLA computes, primitive by primitive."""

from __future__ import annotations

import itertools
import math
import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.oracles import stepwise
from tests.tiers import tiered

RNG = np.random.default_rng(0)
MATRICES = RNG.standard_normal((2, 4, 4))
ROUNDING = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""A few units in the last place, of results of at most a few operations."""


def check(function, *args):
    """The results of a function in numpy are those of XLA."""
    with jax.enable_x64(True):
        got = stepwise.run(jax.make_jaxpr(function)(*args), jax.tree.leaves(args))
        wanted = jax.tree.leaves(jax.jit(function)(*args))
    for mine, theirs in zip(got, map(np.asarray, wanted), strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        wide = np.complex128 if jnp.issubdtype(mine.dtype, jnp.inexact) else mine.dtype
        rtol = max((tolerance for name, tolerance in ROUNDING.items() if mine.dtype == name), default=0)
        np.testing.assert_allclose(mine.astype(wide), theirs.astype(wide), rtol=rtol, atol=rtol)


FLOATING = {
    "pad": lambda x: lax.pad(x, jnp.zeros((), x.dtype), ((1, 2, 1), (-1, 1, 0))),
    "pad of less": lambda x: lax.pad(x, jnp.ones((), x.dtype), ((-1, -1, 2), (3, -2, 1))),
    "round": lambda x: jnp.round(3 * x),
    "as float16": lambda x: lax.reduce_precision(x, 5, 10),
    "as bfloat16": lambda x: lax.reduce_precision(x, 8, 7),
    "to bfloat16": lambda x: x.astype(jnp.bfloat16),
    "to float16": lambda x: x.astype(jnp.float16),
    "to truth": lambda x: x.astype(bool),
    "to integers": lambda x: x.astype(jnp.int32),
    "any": lambda x: jnp.any(x > 0, 1),
    "all": lambda x: jnp.all(x > 0),
    "split": lambda x: jnp.split(x, [1, 3], 1),
    "stack": lambda x: jnp.stack([x, -x], 1),
    "argmax": lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 0)),
    "cumulative": lambda x: (lax.cumsum(x, 1, reverse=True), lax.cummax(x, 0), lax.cummin(x, 1), lax.cumprod(x, 0)),
    "finite": lambda x: jnp.isfinite(x / jnp.maximum(x, 0)),
    "functions": lambda x: (jnp.log1p(abs(x)), jnp.expm1(x), jnp.sign(x), jnp.floor(x), jnp.ceil(x), jax.nn.sigmoid(x), jnp.tan(x)),
    "bits": lambda x: lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"),
    "barrier": lambda x: lax.optimization_barrier((x, 2 * x)),
}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", FLOATING)
def test_floating_point_numbers(name, dtype):
    check(FLOATING[name], RNG.standard_normal((3, 5)).astype(dtype))


INTEGERS = {
    "narrowed": lambda x: (x.astype(jnp.int8), x.astype(jnp.uint8)),
    "as numbers": lambda x: (x.astype(jnp.float32), x.astype(bool)),
    "rest": lambda x: (lax.rem(x, x + 1), lax.rem(x, x)),
    "bits": lambda x: (x & 3, x | 3, x ^ 5, ~x, lax.reduce_or(x, (0,)), lax.reduce_and(x, (0, 1)), lax.reduce_or(x, (0, 1))),
    "cumulative": lambda x: lax.cumsum(x, 0),
}


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int32", "int64"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name, dtype):
    check(INTEGERS[name], RNG.integers(0, 100, (3, 4)).astype(dtype))


@pytest.mark.parametrize("options", [*itertools.product([False, True], repeat=4)])
def test_triangular_systems(options):
    names = ("left_side", "lower", "transpose_a", "unit_diagonal")
    shape = (2, 4, 3) if options[0] else (2, 3, 4)
    check(partial(lax.linalg.triangular_solve, **dict(zip(names, options))), MATRICES, RNG.standard_normal(shape))


def test_factors():
    check(jnp.linalg.cholesky, MATRICES @ MATRICES.swapaxes(-1, -2))
    check(jnp.linalg.cholesky, -MATRICES @ MATRICES.swapaxes(-1, -2))  # no number


def check_in_numpy(drawn, seed, dtype, cases=6):
    """Random equations of a primitive each compute in numpy what XLA computes, in one program."""
    rng = random.Random(seed)
    functions, args = zip(*(drawn(rng, dtype) for _ in range(cases)), strict=True)

    def together(*args):
        return [function(*own) for function, own in zip(functions, args, strict=True)]

    for eqn, own in zip(jax.make_jaxpr(together)(*args).eqns, args, strict=True):
        assert stepwise.SIMPLE[eqn.primitive.name](eqn.params, *own) is not NotImplemented
    check(together, *args)


def numbers(rng, shape, dtype):
    """Random numbers, small integers where the dtype has none between them."""
    drawn = np.random.default_rng(rng.randrange(2**32))
    made = drawn.standard_normal(shape) if jnp.issubdtype(dtype, jnp.inexact) else drawn.integers(0, 5, shape)
    return made.astype(dtype)


def convolution(rng, dtype):
    spatial, groups = rng.randrange(4), rng.choice([1, 1, 2, 3])
    by_batch = groups > 1 and rng.random() < 0.5
    channels, features, batch = rng.randrange(1, 4), groups * rng.randrange(1, 3), (groups if by_batch else 1) * rng.randrange(1, 3)
    kernel = [rng.randrange(1, 4) for _ in range(spatial)]
    sizes = [rng.randrange(1, 7) for _ in range(spatial)]
    specs = [tuple(rng.sample(range(spatial + 2), spatial + 2)) for _ in range(3)]

    def laid_out(shape, spec):
        return [shape[spec.index(axis)] for axis in range(len(shape))]

    lhs = laid_out([batch, channels if by_batch else groups * channels, *sizes], specs[0])
    options = {
        "window_strides": [rng.randrange(1, 4) for _ in range(spatial)],
        "padding": [(rng.randrange(-1, 4), rng.randrange(4)) for _ in range(spatial)],
        "lhs_dilation": [rng.choice([1, 1, 2, 3]) for _ in range(spatial)],
        "rhs_dilation": [rng.choice([1, 1, 2, 3]) for _ in range(spatial)],
        "dimension_numbers": lax.ConvDimensionNumbers(*specs),
        "feature_group_count": 1 if by_batch else groups,
        "batch_group_count": groups if by_batch else 1,
        "preferred_element_type": rng.choice([None, np.float32]) if np.dtype(dtype).itemsize == 2 else None,
    }
    args = numbers(rng, lhs, dtype), numbers(rng, laid_out([features, channels, *kernel], specs[1]), dtype)
    return partial(lax.conv_general_dilated, **options), args


@pytest.mark.parametrize("seed", tiered(range(4), [0]))
@pytest.mark.parametrize("dtype", ROUNDING)
def test_convolutions(dtype, seed):
    check_in_numpy(convolution, seed, dtype)


def places(rng, shape, sizes, dtype, outside):
    """What a random gather and the scatter that is its transpose have in common: axes of windows and indices, and these, some ``outside``.

    Some axis is indexed: of several updates that no index places, XLA takes the last.
    """
    lanes = [rng.randrange(4) for _ in range(rng.randrange(3))] if rng.random() < 0.9 else [0]
    batched = [axis for axis in range(1, len(shape)) if sizes[axis] == 1 and shape[axis] in lanes and rng.random() < 0.5][:1]
    gone = [axis for axis in range(len(shape)) if sizes[axis] == 1 and axis not in batched and rng.random() < 0.6]
    free = [axis for axis in range(len(shape)) if axis not in batched]
    indexed = rng.sample(free, rng.randrange(1, len(free) + 1))
    bounds = [(-2, shape[axis] + 2) if outside else (0, shape[axis] - sizes[axis] + 1) for axis in indexed]
    indices = [[rng.randrange(*bound) for bound in bounds] for _ in range(math.prod(lanes))]
    window = len(shape) - len(gone) - len(batched)
    axes = {
        "operand_batching_dims": tuple(batched),
        "offset_dims": tuple(sorted(rng.sample(range(len(lanes) + window), window))),
        "collapsed_slice_dims": tuple(gone),
        "start_index_map": tuple(indexed),
        "start_indices_batching_dims": tuple(lanes.index(shape[axis]) for axis in batched),
    }
    return axes, np.asarray(indices, dtype).reshape(*lanes, len(indexed))


def windowed(rng, dtype, outside):
    shape = [rng.randrange(1, 5) for _ in range(rng.randrange(1, 4))]
    sizes = [rng.choice([1, n, rng.randrange(1, n + 1), 0]) if rng.random() < 0.9 else 1 for n in shape]
    return numbers(rng, shape, dtype), sizes, *places(rng, shape, sizes, rng.choice([np.int8, np.int32, np.int64]), outside)


def gathered(rng, dtype):
    options = rng.choice([{"mode": "clip"}, {"mode": "fill"}, {"mode": "fill", "fill_value": 3}, {"mode": "promise_in_bounds"}])
    x, sizes, axes, indices = windowed(rng, dtype, options["mode"] != "promise_in_bounds")
    return partial(lax.gather, dimension_numbers=lax.GatherDimensionNumbers(**axes), slice_sizes=sizes, **options), (x, indices)


@pytest.mark.parametrize("seed", tiered(range(4), [0]))
@pytest.mark.parametrize("dtype", ["float32", "complex64", "uint32", "bool"])
def test_gathers(dtype, seed):
    check_in_numpy(gathered, seed, dtype, cases=20)


SCATTERS = [lax.scatter_add, lax.scatter_mul, lax.scatter_max, lax.scatter_min, lax.scatter]


def scattered(rng, dtype):
    mode = rng.choice(["clip", "drop", "promise_in_bounds"])
    x, sizes, axes, indices = windowed(rng, dtype, mode != "promise_in_bounds")
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=axes["offset_dims"],
        inserted_window_dims=axes["collapsed_slice_dims"],
        scatter_dims_to_operand_dims=axes["start_index_map"],
        operand_batching_dims=axes["operand_batching_dims"],
        scatter_indices_batching_dims=axes["start_indices_batching_dims"],
    )
    gone = {*axes["collapsed_slice_dims"], *axes["operand_batching_dims"]}
    window, lanes = iter([n for axis, n in enumerate(sizes) if axis not in gone]), iter(indices.shape[:-1])
    axes_of_updates = range(len(axes["offset_dims"]) + indices.ndim - 1)
    updates = numbers(rng, [next(window if axis in axes["offset_dims"] else lanes) for axis in axes_of_updates], dtype)
    merge = rng.choice(SCATTERS)
    return partial(merge, dimension_numbers=dimensions, mode=mode), (x, indices, updates)


@pytest.mark.parametrize("seed", tiered(range(4), [0]))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_scatters(dtype, seed):
    check_in_numpy(scattered, seed, dtype, cases=15)


def test_updates_by_functions_of_users():
    function = partial(lax.scatter_apply, func=jnp.sin, update_shape=(2,), dimension_numbers=lax.ScatterDimensionNumbers((), (0,), (0,)))
    check(function, RNG.standard_normal(4), np.asarray([[1], [3]]))
