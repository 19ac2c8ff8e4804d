"""Random programs that read and write slices at computed positions, of squares whose axes are taken for each other easily."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.oracles import stepwise
from tests.oracles.differential import Case


def _stepped(rng: random.Random, x: Any, places: Any) -> Any:
    """A value of the same shape, made with a slice of one or of several positions along an axis."""
    axis, place, n = rng.randrange(2), places[rng.randrange(len(places))], x.shape[0]
    size = rng.choice((1, 1, 2, 5, n // 2))
    part = lax.dynamic_slice_in_dim(x, place, size, axis)
    match rng.randrange(5):
        case 0:
            return x * jnp.sum(part, axis, keepdims=True)
        case 1:
            return lax.dynamic_update_slice_in_dim(x, jnp.sin(part), places[rng.randrange(len(places))], axis)
        case 2:
            other = lax.slice_in_dim(jnp.swapaxes(x, 0, 1), 0, size, 1, axis)
            return lax.dynamic_update_slice_in_dim(x, 0.5 * other, place, axis) - x
        case 3:
            row = lax.dynamic_index_in_dim(x, place, axis, keepdims=False)
            return jnp.outer(row, row) * 0.1 + x if rng.random() < 0.5 else x + row[None] - row[:, None]
    return jnp.tanh(part @ x if axis == 0 else part.T @ x).sum(0) + x


def sliced(seed: int) -> Case:
    """The random program of a seed, with arguments; every third is a gradient."""
    rng = random.Random(seed)
    rows, values = rng.choice((16, 24, 32, 48)), np.random.default_rng(seed)
    args = [values.standard_normal((rows, rows)), values.integers(-3, rows + 5, 4).astype(rng.choice((np.int32, np.int32, np.int8)))]

    def program(x: Any, places: Any) -> Any:
        own = random.Random(seed)
        for _ in range(own.randrange(1, 4)):
            x = _stepped(own, x, places)
        return x

    function = jax.grad(lambda x, places: jnp.sum(jnp.sin(program(x, places)))) if seed % 3 == 0 else program
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(function(*args)))(*args)
    return Case(jaxpr, args, stepwise.run(jaxpr, args), ["x", "places"])
