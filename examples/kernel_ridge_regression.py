r"""# Kernel ridge regression

$$w = (K + \lambda I)^{-1} y, \qquad K_{ij} = e^{-\frac12 \lVert x_i - x_j \rVert^2}$$

JAX's own conjugate gradients solve it. The kernel matrix is never held: each step computes what it needs of it.

    python examples/kernel_ridge_regression.py
"""

# %%
import timeit

import jax
import jax.numpy as jnp
import numpy as np

import eqsat_mem

N, DIMENSIONS, RIDGE, LIMIT = 3_000, 3, 1.0, "8MiB"


def kernel(x, y):
    """The squared exponential kernel of all pairs: (n, d), (m, d) -> (n, m)."""
    return jnp.exp(-0.5 * jnp.sum((x[:, None] - y[None]) ** 2, axis=-1))


def fit(x, y):
    """Weights w of shape (n,) with (K + ridge I) w = y, to a hundredth of the norm of y."""
    gram = kernel(x, x) + RIDGE * jnp.eye(x.shape[0], dtype=x.dtype)
    return jax.scipy.sparse.linalg.cg(lambda w: gram @ w, y, tol=1e-2, maxiter=100)[0]


def predict(new, x, weights):
    """The regression at new points: (m, d), (n, d), (n,) -> (m,)."""
    return kernel(new, x) @ weights


# %% [markdown]
# ## The plan
#
# The matrix is made before the loop of conjugate gradients and read in each of its turns. To keep to the limit, the plan computes it anew
# in each, a chunk at a time.

# %%
rng = np.random.default_rng(0)
x, new = (rng.standard_normal((n, DIMENSIONS), dtype=np.float32) for n in (N, 1_000))
truth = [np.sin(2 * points[:, 0]) * np.cos(points[:, 1]) for points in (x, new)]
y = truth[0] + 0.1 * rng.standard_normal(N).astype(np.float32)

fast = eqsat_mem.optimize(fit, memory_limit=LIMIT)
plan = fast.plan(x, y)
print(plan)

# %% [markdown]
# ## The same numbers
#
# The weights solve the equations, in float64, and the regression is right at new points.

# %%
weights = fast(x, y)
some = slice(0, 500)
square = np.sum((x[some, None].astype(np.float64) - x[None]) ** 2, axis=-1)
residual = np.exp(-0.5 * square) @ np.float64(weights) + RIDGE * weights[some] - y[some]
print(f"residual relative to the data: {np.linalg.norm(residual) / np.linalg.norm(y[some]):.1e}")
assert np.linalg.norm(residual) < 0.02 * np.linalg.norm(y[some])

found = eqsat_mem.optimize(predict, memory_limit=LIMIT)(new, x, weights)
error = np.sqrt(np.mean((found - truth[1]) ** 2))
print(f"root mean square error at new points: {error:.3f}, where the data have noise of 0.1")
assert error < 0.1

# %% [markdown]
# ## Seconds

# %%
for name, run in {"as written": jax.jit(fit), "planned": fast}.items():
    run(x, y)
    seconds = timeit.repeat(lambda run=run: jax.block_until_ready(run(x, y)), number=1, repeat=2)
    print(f"{name:10}  {min(seconds):.3f} s")

# %% [markdown]
# ## Memory over time

# %%
plan.show()
