"""Optimal transport between two sets of points by Sinkhorn's iteration, and its gradient: the costs, 64 MiB, are never held.

python examples/sinkhorn.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import eqsat_mem

N, M, TEMPERATURE, ITERATIONS, LIMIT = 4_000, 4_200, 1.0, 20, "16MiB"


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


def main():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((N, 2), dtype=np.float32), 0.7 * rng.standard_normal((M, 2), dtype=np.float32) + 1
    gradient = eqsat_mem.optimize(jax.value_and_grad(transport, has_aux=True), memory_limit=LIMIT)
    print(gradient.plan(x, y))
    (value, (f, g)), slope = gradient(x, y)

    def transported(rows, columns):
        """The mass that moves from some points to others, in float64."""
        cost = np.sum((np.asarray(x, np.float64)[rows, None] - y[columns]) ** 2, axis=-1)
        return np.exp((np.asarray(f)[rows, None] + np.asarray(g)[columns] - cost) / TEMPERATURE) / (N * M)

    some, every = np.arange(0, N, 500), np.arange(max(N, M))
    np.testing.assert_allclose(N * transported(some, every[:M]).sum(axis=1), 1, rtol=1e-3)
    np.testing.assert_allclose(M * transported(every[:N], some).sum(axis=0), 1, rtol=2e-2)
    moved = transported(some, every[:M])
    along = 2 * (moved.sum(axis=1, keepdims=True) * x[some] - moved @ y)  # the derivative at the optimum, where potentials do not count
    np.testing.assert_allclose(slope[some], along, rtol=2e-2, atol=2e-2 * np.abs(along).max())
    print(f"value {value:.4f}; marginals and gradient checked in float64")


if __name__ == "__main__":
    main()
