"""Steps of two networks whose examples meet in a loss of all pairs: each runs in chunks of its own examples, and again for its gradient."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.testing import same_values
from tests.tiers import tiered

PAIRS, WIDTH = 64, 16


def array(rng, *shape):
    return jnp.asarray(np.random.RandomState(rng.randrange(1000)).standard_normal(shape).astype(np.float32) * 0.3)


def normalised(x):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def tower(rng):
    """A network of examples with several places each, and its weights and examples."""
    layers, places, hidden = rng.randint(2, 3), rng.choice([24, 40, 48]), rng.choice([96, 128])
    act, attends = rng.choice([jax.nn.gelu, jnp.tanh, jax.nn.silu]), rng.random() < 0.5
    pooled = rng.choice([lambda x: x.mean(1), lambda x: x[:, 0], lambda x: x.max(1)])

    def network(weights, x):
        for up, down in weights:
            if attends:
                h = normalised(x)
                x = x + jax.nn.softmax(h @ h.transpose(0, 2, 1)) @ h
            x = x + act(normalised(x) @ up) @ down
        x = pooled(x)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    weights = [(array(rng, WIDTH, hidden), array(rng, hidden, WIDTH)) for _ in range(layers)]
    return network, weights, array(rng, PAIRS, places, WIDTH)


def drawn(seed):
    """A step of two networks and its arguments."""
    rng = random.Random(seed)
    (one, first, x), (other, second, y) = tower(rng), tower(rng)

    def entropy(scores):
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), jnp.arange(len(scores))[:, None], -1).mean()

    def hinge(scores):
        return jnp.maximum(scores - jnp.diagonal(scores)[:, None] + 0.1, 0.0).mean()

    def logistic(scores):
        return jax.nn.softplus(jnp.where(jnp.eye(len(scores), dtype=bool), -scores, scores)).mean()

    loss, both = rng.choice([entropy, entropy, hinge, logistic]), rng.random() < 0.7

    def total(weights, x, y):
        scores = 5.0 * one(weights[0], x) @ other(weights[1], y).T
        return loss(scores) + loss(scores.T) if both else loss(scores)

    def step(weights, x, y):
        value, slope = jax.value_and_grad(total)(weights, x, y)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, slope)

    return step, ((first, second), x, y)


@pytest.mark.parametrize("seed", tiered(range(10), [3], [4]))
def test_steps_of_two_networks_fit_a_quarter_of_their_temporaries(seed):
    step, args = drawn(seed)
    known = jax.jit(step).lower(*args).compile().memory_analysis()
    limit = known.argument_size_in_bytes + known.output_size_in_bytes + known.temp_size_in_bytes // 4
    fast = eqsat_mem.optimize(step, memory_limit=limit)
    assert fast.plan(*args).held_bytes <= limit
    assert same_values(step, fast, args).same
