"""Kernel ridge regression by conjugate gradients: the kernel matrix, 900 MiB, is never held.

python examples/kernel_ridge_regression.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import eqsat_mem

N, DIMENSIONS, RIDGE, LIMIT = 15_000, 3, 1.0, "64MiB"


def kernel(x, y):
    """The squared exponential kernel of all pairs: (n, d), (m, d) -> (n, m)."""
    return jnp.exp(-0.5 * jnp.sum((x[:, None] - y[None]) ** 2, axis=-1))


@eqsat_mem.optimize(memory_limit=LIMIT)
def fit(x, y):
    """Weights w with (K + ridge I) w = y, to a hundredth of the norm of y."""
    gram = kernel(x, x) + RIDGE * jnp.eye(x.shape[0], dtype=x.dtype)
    return jax.scipy.sparse.linalg.cg(lambda w: gram @ w, y, tol=1e-2, maxiter=100)[0]


@eqsat_mem.optimize(memory_limit=LIMIT)
def predict(new, x, weights):
    """The regression at new points: (m, d), (n, d), (n,) -> (m,)."""
    return kernel(new, x) @ weights


def main():
    rng = np.random.default_rng(0)
    x, new = (rng.standard_normal((n, DIMENSIONS), dtype=np.float32) for n in (N, 1_000))
    truth = [np.sin(2 * points[:, 0]) * np.cos(points[:, 1]) for points in (x, new)]
    y = truth[0] + 0.1 * rng.standard_normal(N).astype(np.float32)
    print(fit.plan(x, y))

    weights = fit(x, y)
    residual = predict(x, x, weights) + RIDGE * weights - y
    assert jnp.linalg.norm(residual) < 0.011 * np.linalg.norm(y), "the equations are not solved"

    error = np.sqrt(np.mean((predict(new, x, weights) - truth[1]) ** 2))
    print(f"root mean square error at new points: {error:.3f}, where the data have noise of 0.1")
    assert error < 0.1


if __name__ == "__main__":
    main()
