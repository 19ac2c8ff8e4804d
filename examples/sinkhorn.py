r"""# Optimal transport by Sinkhorn's iteration

$$f_i = -\varepsilon \log \frac1m \sum_j e^{(g_j - \lVert x_i - y_j \rVert^2) / \varepsilon}, \qquad
g_j = -\varepsilon \log \frac1n \sum_i e^{(f_i - \lVert x_i - y_j \rVert^2) / \varepsilon}$$

The matrix of costs is never held, neither by the iteration nor by the gradient with respect to the points.

    python examples/sinkhorn.py
"""

# %%
import timeit

import jax
import jax.numpy as jnp
import numpy as np

import eqsat_mem

N, M, TEMPERATURE, ITERATIONS, LIMIT = 2_000, 2_100, 1.0, 20, "4MiB"


def transport(x, y):
    """The dual value of entropic transport between (n, d) and (m, d), and its potentials, of shapes (n,) and (m,)."""

    def cost():
        return jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)

    def of_rows(g):
        return -TEMPERATURE * (jax.nn.logsumexp((g - cost()) / TEMPERATURE, axis=1) - jnp.log(y.shape[0]))

    def of_columns(f):
        return -TEMPERATURE * (jax.nn.logsumexp((f[:, None] - cost()) / TEMPERATURE, axis=0) - jnp.log(x.shape[0]))

    g, _ = jax.lax.scan(lambda g, _: (of_columns(of_rows(g)), None), jnp.zeros(y.shape[0]), None, length=ITERATIONS)
    g = jax.lax.stop_gradient(g)  # at the optimum the value does not change with the potentials
    f = of_rows(g)
    return jnp.mean(f) + jnp.mean(g), (f, g)


# %% [markdown]
# ## The plan

# %%
rng = np.random.default_rng(0)
x, y = rng.standard_normal((N, 2), dtype=np.float32), 0.7 * rng.standard_normal((M, 2), dtype=np.float32) + 1
program = jax.value_and_grad(transport, has_aux=True)
fast = eqsat_mem.optimize(program, memory_limit=LIMIT)
plan = fast.plan(x, y)
print(plan)

# %% [markdown]
# ## The same numbers
#
# The potentials move all mass, and the gradient is that of the mass they move, in float64.

# %%
(value, (f, g)), slope = fast(x, y)
x_64, y_64, f_64, g_64 = (np.asarray(a, np.float64) for a in (x, y, f, g))
cost = np.sum((x_64[:, None] - y_64) ** 2, axis=-1)
moved = np.exp((f_64[:, None] + g_64 - cost) / TEMPERATURE) / (N * M)
np.testing.assert_allclose(N * moved.sum(axis=1), 1, rtol=1e-3)
np.testing.assert_allclose(M * moved.sum(axis=0), 1, rtol=2e-2)
along = 2 * (moved.sum(axis=1, keepdims=True) * x_64 - moved @ y_64)
np.testing.assert_allclose(slope, along, rtol=2e-2, atol=2e-2 * np.abs(along).max())
print(f"value {value:.4f}; marginals and gradient agree with float64")

# %% [markdown]
# ## Seconds

# %%
for name, run in {"as written": jax.jit(program), "planned": fast}.items():
    jax.block_until_ready(run(x, y))
    seconds = timeit.repeat(lambda run=run: jax.block_until_ready(run(x, y)), number=1, repeat=2)
    print(f"{name:10}  {min(seconds):.3f} s")

# %% [markdown]
# ## Memory over time

# %%
plan.show()
