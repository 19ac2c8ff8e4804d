r"""# Causal attention and its gradients

$$\operatorname{attend}(q, k, v)_i = \frac{\sum_{j \le i} e^{q_i \cdot k_j / \sqrt d}\, v_j}{\sum_{j \le i} e^{q_i \cdot k_j / \sqrt d}}$$

The scores of all pairs of tokens, and what their gradient keeps of them, are never held.

    python examples/attention.py
"""

# %%
import timeit

import jax
import jax.numpy as jnp
import numpy as np

import eqsat_mem

HEADS, LENGTH, WIDTH, LIMIT = 4, 2_048, 64, "32MiB"


def attend(q, k, v):
    """Arrays of shape (heads, length, width)."""
    scores = jnp.einsum("hqc,hkc->hqk", q, k) / jnp.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones(scores.shape[1:], bool))
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1) @ v


def loss(q, k, v, target):
    """The mean squared error of attention, a scalar."""
    return jnp.mean((attend(q, k, v) - target) ** 2)


# %% [markdown]
# ## The plan
#
# Forward and backward pass are planned as one program.

# %%
rng = np.random.default_rng(0)
q, k, v, target = (rng.standard_normal((HEADS, LENGTH, WIDTH), dtype=np.float32) for _ in range(4))
program = jax.value_and_grad(loss, argnums=(0, 1, 2))
fast = eqsat_mem.optimize(program, memory_limit=LIMIT)
plan = fast.plan(q, k, v, target)
print(plan)

# %% [markdown]
# ## The same numbers
#
# One head in float64 with numpy, and the gradients as written.


# %%
def one_head(q, k, v):
    """Attention of one head in float64, for arrays of shape (length, width)."""
    scores = np.where(np.tril(np.ones((len(q), len(k)), bool)), q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v


forward = eqsat_mem.optimize(attend, memory_limit=LIMIT)
np.testing.assert_allclose(forward(q, k, v)[0], one_head(*(np.float64(a[0]) for a in (q, k, v))), rtol=1e-3, atol=1e-5)
for ours, written in zip(fast(q, k, v, target)[1], jax.jit(program)(q, k, v, target)[1]):
    apart = np.abs(ours - written).max() / np.abs(written).max()
    print(f"largest difference of a gradient, relative to its largest entry: {apart:.1e}")
    assert apart < 1e-4

# %% [markdown]
# ## Seconds

# %%
for name, run in {"as written": jax.jit(program), "planned": fast}.items():
    seconds = timeit.repeat(lambda run=run: jax.block_until_ready(run(q, k, v, target)), number=1, repeat=2)
    print(f"{name:10}  {min(seconds):.3f} s")

# %% [markdown]
# ## Memory over time

# %%
plan.show()
