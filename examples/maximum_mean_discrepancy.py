r"""# The maximum mean discrepancy of two samples

$$\operatorname{MMD}^2 = \frac{1}{n^2} \sum_{ij} k(x_i, x_j) - \frac{2}{nm} \sum_{ij} k(x_i, y_j) + \frac{1}{m^2} \sum_{ij} k(y_i, y_j)$$

With a sum of kernels of several widths, as it is used to train generators, with the gradient with respect to the sample. None of the three
matrices of pairs is ever held ([Gretton and others, 2012](https://jmlr.org/papers/v13/gretton12a.html)).

    python examples/maximum_mean_discrepancy.py
"""

# %%
import timeit

import jax
import jax.numpy as jnp
import numpy as np

import eqsat_mem

N, M, DIMENSIONS, WIDTHS, LIMIT = 1_500, 2_000, 4, (0.5, 1.0, 2.0), "8MiB"


def kernel(x, y):
    """The mean of Gaussian kernels: (n, d), (m, d) -> (n, m)."""
    squared = jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)
    return sum(jnp.exp(-0.5 * squared / (width**2 * x.shape[1])) for width in WIDTHS) / len(WIDTHS)


def discrepancy(x, y):
    """The squared discrepancy of (n, d) and (m, d), a scalar."""
    return jnp.mean(kernel(x, x)) - 2 * jnp.mean(kernel(x, y)) + jnp.mean(kernel(y, y))


# %% [markdown]
# ## The plan

# %%
rng = np.random.default_rng(0)
x = rng.standard_normal((N, DIMENSIONS), dtype=np.float32)
y = 1.2 * rng.standard_normal((M, DIMENSIONS), dtype=np.float32) + 0.3
program = jax.value_and_grad(discrepancy)
fast = eqsat_mem.optimize(program, memory_limit=LIMIT)
plan = fast.plan(x, y)
print(plan)

# %% [markdown]
# ## The same numbers
#
# The discrepancy in float64 with numpy, and the gradient against a step along it.

# %%
value, slope = fast(x, y)


def in_float64(x, y):
    """The same in float64, with a distance as squares and a product."""
    found = []
    for a, b in ((x, x), (x, y), (y, y)):
        squared = np.sum(a**2, axis=1)[:, None] + np.sum(b**2, axis=1) - 2 * a @ b.T
        found.append(np.mean([np.mean(np.exp(-0.5 * squared / (width**2 * DIMENSIONS))) for width in WIDTHS]))
    return found[0] - 2 * found[1] + found[2]


right = in_float64(np.float64(x), np.float64(y))
np.testing.assert_allclose(value, right, rtol=1e-4)
along = np.float64(slope) / np.linalg.norm(slope)
ahead, behind = (in_float64(x + sign * 1e-3 * along, np.float64(y)) for sign in (1, -1))
print(f"{value:.6f}, in float64 {right:.6f}; slope {np.linalg.norm(slope):.3e}, by differences {(ahead - behind) / 2e-3:.3e}")
np.testing.assert_allclose(np.linalg.norm(slope), (ahead - behind) / 2e-3, rtol=1e-2)

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
