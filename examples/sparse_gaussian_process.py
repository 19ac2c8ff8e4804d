"""A sparse Gaussian process fitted by gradients of its evidence bound (Titsias, 2009), each evaluation under a limit.

python examples/sparse_gaussian_process.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

import eqsat_mem

N, INDUCING, LIMIT, STEPS, RATE = 20_000, 100, "32MiB", 40, 0.1


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


def main():
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    x = rng.uniform(-3, 3, (N, 2))
    y = np.sin(2 * x[:, 0]) + np.cos(3 * x[:, 1]) + 0.2 * rng.standard_normal(N)
    z = x[:INDUCING]
    parameters = {"length": jnp.zeros(2), "variance": jnp.zeros(()), "noise": jnp.zeros(())}

    few = slice(0, 300)  # the bound is the log density where every point is an inducing point
    np.testing.assert_allclose(bound(parameters, x[few], x[few], y[few]), log_density(parameters, x[few], y[few]), rtol=1e-4)

    step = eqsat_mem.optimize(jax.value_and_grad(bound), memory_limit=LIMIT)
    print(step.plan(parameters, z, x, y))
    found = []
    for _ in range(STEPS):
        value, slope = step(parameters, z, x, y)
        found.append(float(value))
        parameters = jax.tree.map(lambda p, g: p + RATE * g / (1e-12 + jnp.abs(g).max()), parameters, slope)
    noise = float(jnp.exp(0.5 * parameters["noise"]))
    print(f"bound per point: {found[0]:.3f} at first, {found[-1]:.3f} after {STEPS} steps; noise {noise:.2f}, where the data have 0.2")
    assert found[-1] > found[0] + 0.3


if __name__ == "__main__":
    main()
