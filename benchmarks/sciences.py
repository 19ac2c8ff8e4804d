"""Programs of the sciences, for :mod:`benchmarks.applications`: values of rows (pixels, particles, sites, sequences), as one writes them.

Each is a sum over rows of a function of one row and of what all rows share, so that a person cuts it by mapping rows in chunks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _f32(x: Any) -> Any:
    return np.asarray(x, np.float32)


def splatting_arguments(splats: int, side: int) -> tuple[Any, ...]:
    rng = _rng()
    shapes = 0.3 * (np.eye(2) + 0.1 * rng.standard_normal((splats, 2, 2)))
    scene = rng.uniform(0, side, (splats, 2)), shapes, rng.uniform(0, 1, (splats, 3)), rng.uniform(0, 1, splats)
    pixels = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"), -1).reshape(-1, 2)
    return tuple(map(_f32, scene)), _f32(pixels), _f32(rng.uniform(0, 1, (side * side, 3)))


def splatting(scene: Any, pixel: jax.Array, colour: jax.Array) -> jax.Array:
    """The squared error of one pixel of an image that Gaussian splats make, the first in front."""
    middle, shape, colours, opacity = scene
    away = jnp.einsum("gij,gi->gj", shape, pixel - middle)
    alpha = jax.nn.sigmoid(opacity) * jnp.exp(-0.5 * jnp.sum(away**2, -1))
    behind = jnp.cumprod(1 - alpha)
    light = alpha * jnp.concatenate([jnp.ones(1), behind[:-1]])
    return jnp.sum((light @ colours - colour) ** 2)


def particles_arguments(count: int) -> tuple[Any, ...]:
    places = _f32(_rng().uniform(0, 12, (count, 3)))
    return places, np.arange(count, dtype=np.int32)


def particles(places: jax.Array, one: jax.Array) -> jax.Array:
    """The Lennard-Jones energy of one particle in a periodic box."""
    away = places[one] - places
    away = away - 12 * jnp.round(away / 12)
    squared = jnp.sum(away**2, -1) + jnp.where(jnp.arange(places.shape[0]) == one, 1e6, 0.0)
    sixth = (1 / jnp.maximum(squared, 0.6)) ** 3
    return 0.5 * jnp.sum(jnp.where(squared < 6.25, 4 * (sixth * sixth - sixth), 0.0))


def bodies_arguments(count: int) -> tuple[Any, ...]:
    rng = _rng()
    return (_f32(rng.standard_normal((count, 3))), _f32(rng.uniform(0.1, 1, count))), np.arange(count, dtype=np.int32)


def bodies(all_of: Any, one: jax.Array) -> jax.Array:
    """The squared acceleration of one of many bodies that attract each other."""
    places, masses = all_of
    away = places[one] - places
    pull = masses / (jnp.sum(away**2, -1) + 0.01) ** 1.5
    return jnp.sum((pull @ away) ** 2)


def pairs_arguments(count: int, radii: int = 24) -> tuple[Any, ...]:
    rng = _rng()
    known = rng.uniform(0, 1, (count, 3)), rng.uniform(0.1, 1, count), np.linspace(0.02, 0.5, radii)
    return tuple(map(_f32, known)), np.arange(count, dtype=np.int32)


def pairs(all_of: Any, one: jax.Array) -> jax.Array:
    """The soft counts of the weighted neighbours of a galaxy within some radii: a two-point correlation, weighed by radius."""
    places, weights, radii = all_of
    distance = jnp.sqrt(jnp.sum((places[one] - places) ** 2, -1) + 1e-12)
    counts = jax.nn.sigmoid((radii[:, None] - distance) / 0.02) @ weights
    return weights[one] * jnp.sum(counts / radii)


def spectrum_arguments(lines: int, grid: int) -> tuple[Any, ...]:
    rng = _rng()
    known = rng.uniform(0, 10, lines), rng.uniform(0.1, 1, lines), rng.uniform(0.01, 0.1, lines)
    return tuple(map(_f32, known)), _f32(np.linspace(0, 10, grid)), _f32(rng.uniform(0, 1, grid))


def spectrum(lines: Any, frequency: jax.Array, seen: jax.Array) -> jax.Array:
    """The squared error of the light that passes at one frequency, line by line."""
    centre, strength, width = lines
    absorbed = jnp.sum(strength * width / np.pi / ((frequency - centre) ** 2 + width**2))
    return (jnp.exp(-0.1 * absorbed) - seen) ** 2


def tree_arguments(sites: int, taxa: int = 8, states: int = 4) -> tuple[Any, ...]:
    rng = _rng()
    leaves = np.eye(states)[rng.integers(0, states, (sites, taxa))]
    return (_f32(rng.uniform(0.05, 0.3, 2 * taxa - 2)), _f32(rng.standard_normal((states, states)))), _f32(leaves)


def tree(model: Any, leaves: jax.Array) -> jax.Array:
    """The log-likelihood of one site of a phylogenetic tree, for four rates."""
    lengths, rates = model
    q = jax.nn.softplus(rates)
    q = q - jnp.diag(jnp.sum(q, 1))
    speeds = jnp.array([0.2, 0.6, 1.2, 2.0])
    changes = jax.vmap(lambda t: jax.vmap(lambda r: jax.scipy.linalg.expm(q * t * r))(speeds))(lengths)
    parts, branch = [jnp.broadcast_to(leaf, (4, leaf.shape[0])) for leaf in leaves], 0
    while len(parts) > 1:
        moved = [jnp.einsum("rst,rt->rs", changes[branch + k], part) for k, part in enumerate(parts)]
        branch += len(parts)
        parts = [one * other for one, other in zip(moved[::2], moved[1::2], strict=True)]
    return jnp.log(jnp.mean(jnp.sum(parts[0] * 0.25, -1)))


def chain_arguments(batch: int, length: int, states: int = 128, letters: int = 32) -> tuple[Any, ...]:
    rng = _rng()
    model = rng.standard_normal((states, states)), rng.standard_normal((states, letters))
    return tuple(map(_f32, model)), rng.integers(0, letters, (batch, length)).astype(np.int32)


def chain(model: Any, letters: jax.Array) -> jax.Array:
    """The log-likelihood of one sequence of a hidden Markov model, forward; its gradient is the pass backward."""
    move, show = (jax.nn.log_softmax(x, -1) for x in model)

    def step(state: jax.Array, letter: jax.Array) -> tuple[jax.Array, None]:
        return jax.nn.logsumexp(state[:, None] + move, 0) + show[:, letter], None

    return jax.nn.logsumexp(lax.scan(step, show[:, letters[0]], letters[1:])[0])


def alignment_arguments(batch: int, length: int, words: int, labels: int = 20) -> tuple[Any, ...]:
    rng = _rng()
    table = rng.standard_normal((64, words)) / 8
    return _f32(table), _f32(rng.standard_normal((batch, length, 64))), rng.integers(1, words, (batch, labels)).astype(np.int32)


def alignment(table: jax.Array, hidden: jax.Array, labels: jax.Array) -> jax.Array:
    """The connectionist temporal classification loss of one sequence over a vocabulary, whose first word is blank."""
    around = jnp.zeros(2 * labels.shape[0] + 1, jnp.int32).at[1::2].set(labels)
    chances = jax.nn.log_softmax(hidden @ table, -1)[:, around]
    same = jnp.concatenate([jnp.ones(2, bool), around[2:] == around[:-2]])
    never = jnp.full(2, -1e9)

    def step(state: jax.Array, chance: jax.Array) -> tuple[jax.Array, None]:
        one, two = jnp.concatenate([never[:1], state[:-1]]), jnp.concatenate([never, state[:-2]])
        return jax.nn.logsumexp(jnp.stack([state, one, jnp.where(same, -1e9, two)]), 0) + chance, None

    start = jnp.where(jnp.arange(around.shape[0]) < 2, chances[0], -1e9)
    return -jax.nn.logsumexp(lax.scan(step, start, chances[1:])[0][-2:])
