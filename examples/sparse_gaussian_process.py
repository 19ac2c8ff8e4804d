r"""# A sparse Gaussian process

$$\log p(y) \ge \log \mathcal N\left(y \mid 0,\; K_{xz} K_{zz}^{-1} K_{zx} + \sigma^2 I\right)
- \frac{1}{2 \sigma^2} \operatorname{tr}\left(K_{xx} - K_{xz} K_{zz}^{-1} K_{zx}\right)$$

The evidence bound of [Titsias (2009)](https://proceedings.mlr.press/v5/titsias09a.html) is fitted by its gradients.
No matrix between inducing points and data is ever whole: the backward pass solves with each chunk of data again.

    python examples/sparse_gaussian_process.py
"""

# %%
import timeit

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

import eqsat_mem

jax.config.update("jax_enable_x64", True)
N, INDUCING, LIMIT, STEPS, RATE = 4_000, 100, "4MiB", 10, 0.2


def kernel(parameters, x, y):
    """The squared exponential kernel: (n, d), (m, d) -> (n, m)."""
    x, y = x / jnp.exp(parameters["length"]), y / jnp.exp(parameters["length"])
    return jnp.exp(parameters["variance"] - 0.5 * jnp.sum((x[:, None] - y[None]) ** 2, axis=-1))


def bound(parameters, z, x, y):
    """The lower bound of the log density of y, of shape (n,), for inducing points z of shape (m, d), divided by n."""
    noise = jnp.exp(parameters["noise"])
    low = jnp.linalg.cholesky(kernel(parameters, z, z) + 1e-6 * jnp.eye(len(z)))
    a = solve_triangular(low, kernel(parameters, z, x), lower=True) / jnp.sqrt(noise)
    low_b = jnp.linalg.cholesky(jnp.eye(len(z)) + a @ a.T)
    c = solve_triangular(low_b, a @ y, lower=True) / jnp.sqrt(noise)
    fit = len(x) * jnp.log(2 * jnp.pi * noise) + jnp.sum(y**2) / noise - jnp.sum(c**2)
    size = 2 * jnp.sum(jnp.log(jnp.diag(low_b))) + len(x) * jnp.exp(parameters["variance"]) / noise - jnp.sum(a**2)
    return -0.5 * (fit + size) / len(x)


def log_density(parameters, x, y):
    """The log density itself, divided by n, by the dense matrix of all pairs."""
    covariance = kernel(parameters, x, x) + jnp.exp(parameters["noise"]) * jnp.eye(len(x))
    return jax.scipy.stats.multivariate_normal.logpdf(y, jnp.zeros(len(x)), covariance) / len(x)


# %% [markdown]
# ## The plan

# %%
rng = np.random.default_rng(0)
x = rng.uniform(-3, 3, (N, 2))
y = np.sin(2 * x[:, 0]) + np.cos(3 * x[:, 1]) + 0.2 * rng.standard_normal(N)
z = x[:INDUCING]
start = {"length": jnp.zeros(2), "variance": jnp.zeros(()), "noise": jnp.zeros(())}

program = jax.value_and_grad(bound)
fast = eqsat_mem.optimize(program, memory_limit=LIMIT)
plan = fast.plan(start, z, x, y)
print(plan)

# %% [markdown]
# ## The same numbers
#
# The bound is the log density where every point is an inducing point. Planned and written gradients agree, and following them finds the
# noise of the data.

# %%
few = slice(0, 300)
np.testing.assert_allclose(jax.jit(bound)(start, x[few], x[few], y[few]), jax.jit(log_density)(start, x[few], y[few]), rtol=1e-4)

ours, written = fast(start, z, x, y), jax.jit(program)(start, z, x, y)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), ours, written)

found, parameters = [], start
for _ in range(STEPS):
    value, slope = fast(parameters, z, x, y)
    found.append(float(value))
    parameters = jax.tree.map(lambda p, g: p + RATE * g / (1e-12 + jnp.abs(g).max()), parameters, slope)
noise = float(jnp.exp(0.5 * parameters["noise"]))
print(f"bound per point: {found[0]:.3f} at first, {found[-1]:.3f} after {STEPS} steps; noise {noise:.2f}, where the data have 0.2")
assert found[-1] > found[0] + 0.3

# %% [markdown]
# ## Seconds

# %%
for name, run in {"as written": jax.jit(program), "planned": fast}.items():
    jax.block_until_ready(run(start, z, x, y))
    seconds = timeit.repeat(lambda run=run: jax.block_until_ready(run(start, z, x, y)), number=1, repeat=2)
    print(f"{name:10}  {min(seconds):.3f} s")

# %% [markdown]
# ## Memory over time

# %%
plan.show()
