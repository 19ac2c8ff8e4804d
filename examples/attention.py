"""Causal attention as its formula says, with its gradients: the scores, 512 MiB for each of the two, are never held.

python examples/attention.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import eqsat_mem

HEADS, LENGTH, WIDTH, LIMIT = 8, 4_096, 64, "128MiB"


def attend(q, k, v):
    """Arrays of shape (heads, length, width)."""
    scores = jnp.einsum("hqc,hkc->hqk", q, k) / jnp.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones(scores.shape[1:], bool))
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1) @ v


def loss(q, k, v, target):
    return jnp.mean((attend(q, k, v) - target) ** 2)


def one_head_in_numpy(q, k, v):
    """The same for one head in float64: (length, width) three times."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    scores = np.where(np.tril(np.ones((len(q), len(k)), bool)), q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v


def main():
    rng = np.random.default_rng(0)
    q, k, v, target = (rng.standard_normal((HEADS, LENGTH, WIDTH), dtype=np.float32) for _ in range(4))
    fast = eqsat_mem.optimize(attend, memory_limit=LIMIT)
    print(fast.plan(q, k, v))
    np.testing.assert_allclose(fast(q, k, v)[0], one_head_in_numpy(q[0], k[0], v[0]), rtol=1e-3, atol=1e-4)

    gradient = eqsat_mem.optimize(jax.value_and_grad(loss, argnums=(0, 1, 2)), memory_limit=LIMIT)
    print(gradient.plan(q, k, v, target))
    before, slopes = gradient(q, k, v, target)
    promised = 0.001 * before
    rate = promised / sum(jnp.sum(slope**2) for slope in slopes)
    after, _ = gradient(*(a - rate * slope for a, slope in zip((q, k, v), slopes)), target)
    print(f"a short step against the gradient: the loss falls by {before - after:.2e}, its slope promises {promised:.2e}")
    assert abs(before - after - promised) < 0.1 * promised


if __name__ == "__main__":
    main()
