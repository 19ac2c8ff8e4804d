"""Sparse Gaussian process regression as GPflow's SGPR has it, in plain JAX: nothing here knows of memory.

Titsias (2009), with the kernel Matern-3/2 and a length scale per dimension. Parameters are a dict of unconstrained arrays: ``scales`` of
shape (d,), ``variance``, ``noise`` and ``mean`` of shape (). x has shape (n, d), y (n,), z (m, d); all are float64.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

Parameters = dict[str, Any]

JITTER = 1e-6
LEAST_NOISE = 1e-6


def start(d: int) -> Parameters:
    """Unit length scales, a variance and a noise of 0.1, and no mean."""
    return {"scales": inverse_softplus(np.ones(d)), "variance": inverse_softplus(0.1), "noise": inverse_softplus(0.1), "mean": np.zeros(())}


def inverse_softplus(value: Any) -> np.ndarray:
    """The number that ``jax.nn.softplus`` maps to the value."""
    return np.asarray(np.log(np.expm1(value)))


def kernel(parameters: Parameters, a: jax.Array, b: jax.Array) -> jax.Array:
    """The Matern-3/2 kernel of all pairs, of shape (len(a), len(b))."""
    scales = jax.nn.softplus(parameters["scales"])
    squared = jnp.sum((a[:, None] / scales - b[None] / scales) ** 2, -1)
    r = jnp.sqrt(3.0 * jnp.maximum(squared, 1e-36))
    return jax.nn.softplus(parameters["variance"]) * (1.0 + r) * jnp.exp(-r)


def bound(parameters: Parameters, x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    """The lower bound on log p(y), with inducing points z.

    With L L^T = K_zz, A = L^-1 K_zx / sigma, B = I + A A^T and c = chol(B)^-1 A (y - mean) / sigma:

        -n/2 log(2 pi sigma^2) - log det B / 2 - |y - mean|^2 / (2 sigma^2) + |c|^2 / 2 - tr(K_xx) / (2 sigma^2) + tr(A A^T) / 2
    """
    n = x.shape[0]
    noise, error, a, _, factor_b, c = _factors(parameters, x, y, z)
    fit = -0.5 * n * jnp.log(2 * jnp.pi * noise) - 0.5 * jnp.sum(error**2) / noise + 0.5 * jnp.sum(c**2)
    trace = n * jax.nn.softplus(parameters["variance"]) / noise - jnp.sum(a**2)
    return fit - jnp.sum(jnp.log(jnp.diag(factor_b))) - 0.5 * trace


def loss(parameters: Parameters, x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    """The loss: the negative bound per point."""
    return -bound(parameters, x, y, z) / x.shape[0]


def loss_and_gradient(parameters: Parameters, x: jax.Array, y: jax.Array, z: jax.Array) -> tuple[jax.Array, Parameters]:
    """The loss and its derivatives by the parameters."""
    return jax.value_and_grad(loss)(parameters, x, y, z)


def predict(parameters: Parameters, x: jax.Array, y: jax.Array, z: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of the observations at new inputs, each of shape (len(new),)."""
    noise, _, _, factor, factor_b, c = _factors(parameters, x, y, z)
    first = solve_triangular(factor, kernel(parameters, z, new), lower=True)
    second = solve_triangular(factor_b, first, lower=True)
    variance = jax.nn.softplus(parameters["variance"]) + jnp.sum(second**2, 0) - jnp.sum(first**2, 0)
    return second.T @ c + parameters["mean"], variance + noise


def _factors(parameters: Parameters, x: jax.Array, y: jax.Array, z: jax.Array) -> tuple[jax.Array, ...]:
    """The noise, y - mean, A, L, chol(B) and c of :func:`bound`."""
    m = z.shape[0]
    noise = jax.nn.softplus(parameters["noise"]) + LEAST_NOISE
    error = y - parameters["mean"]
    factor = jnp.linalg.cholesky(kernel(parameters, z, z) + JITTER * jnp.eye(m, dtype=x.dtype))
    a = solve_triangular(factor, kernel(parameters, z, x), lower=True) / jnp.sqrt(noise)
    factor_b = jnp.linalg.cholesky(jnp.eye(m, dtype=x.dtype) + a @ a.T)
    c = solve_triangular(factor_b, a @ error, lower=True) / jnp.sqrt(noise)
    return noise, error, a, factor, factor_b, c


def greedy_points(parameters: Parameters, x: np.ndarray, m: int) -> np.ndarray:
    """m rows of x, of shape (m, d): each next one has the largest variance given those before (a pivoted Cholesky decomposition).

    The choice of Burt, Rasmussen and van der Wilk (2020). Holds m rows of len(x) numbers.
    """
    scales, variance = np.logaddexp(0, parameters["scales"]), float(np.logaddexp(0, parameters["variance"]))
    left = np.full(len(x), variance + JITTER)
    rows, chosen = np.empty((m, len(x))), np.empty(m, int)
    for k in range(m):
        chosen[k] = at = int(np.argmax(left))
        r = np.sqrt(3 * (((x - x[at]) / scales) ** 2).sum(1))
        column = variance * (1 + r) * np.exp(-r) - rows[:k, at] @ rows[:k]
        rows[k] = column / np.sqrt(max(left[at], JITTER))
        left = np.maximum(left - rows[k] ** 2, 0.0)
        left[at] = -1.0  # not again
    return x[chosen]
