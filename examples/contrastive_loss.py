r"""# A contrastive loss: InfoNCE

$$\ell = -\frac1n \sum_i \log \frac{e^{a_i \cdot b_i / \tau}}{\sum_j e^{a_i \cdot b_j / \tau}}$$

Each pair of a batch is told from all other pairs, so that the batch is to be large. The logits of all pairs and their gradient are never
held ([van den Oord and others, 2018](https://arxiv.org/abs/1807.03748)).

    python examples/contrastive_loss.py
"""

# %%
import timeit

import jax
import jax.numpy as jnp
import numpy as np

import eqsat_mem

BATCH, WIDTH, TEMPERATURE, LIMIT = 3_072, 128, 0.1, "32MiB"


def loss(a, b):
    """Two views of a batch, both of shape (batch, width), to a scalar."""
    a = a / jnp.linalg.norm(a, axis=1, keepdims=True)
    b = b / jnp.linalg.norm(b, axis=1, keepdims=True)
    logits = a @ b.T / TEMPERATURE
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits, axis=1)))


# %% [markdown]
# ## The plan

# %%
rng = np.random.default_rng(0)
a = rng.standard_normal((BATCH, WIDTH), dtype=np.float32)
b = a + rng.standard_normal((BATCH, WIDTH), dtype=np.float32)
program = jax.value_and_grad(loss, argnums=(0, 1))
fast = eqsat_mem.optimize(program, memory_limit=LIMIT)
plan = fast.plan(a, b)
print(plan)

# %% [markdown]
# ## The same numbers
#
# The loss in float64 with numpy, and the gradients as written.

# %%
value, slopes = fast(a, b)
a_64, b_64 = (np.float64(x) / np.linalg.norm(np.float64(x), axis=1, keepdims=True) for x in (a, b))
logits = a_64 @ b_64.T / TEMPERATURE
right = np.mean(np.log(np.sum(np.exp(logits), axis=1)) - np.diag(logits))
np.testing.assert_allclose(value, right, rtol=1e-5)
for ours, written in zip(slopes, jax.jit(program)(a, b)[1]):
    apart = np.abs(ours - written).max() / np.abs(written).max()
    print(f"loss {value:.4f}; largest difference of a gradient, relative to its largest entry: {apart:.1e}")
    assert apart < 1e-4

# %% [markdown]
# ## Seconds

# %%
for name, run in {"as written": jax.jit(program), "planned": fast}.items():
    seconds = timeit.repeat(lambda run=run: jax.block_until_ready(run(a, b)), number=1, repeat=2)
    print(f"{name:10}  {min(seconds):.3f} s")

# %% [markdown]
# ## Memory over time

# %%
plan.show()
