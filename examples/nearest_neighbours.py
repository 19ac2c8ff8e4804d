"""The ten nearest of 100,000 points to each of 2,000 queries: neither distances nor their order, 800 MiB each, are held whole.

python examples/nearest_neighbours.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import eqsat_mem

POINTS, QUERIES, DIMENSIONS, NEIGHBOURS, LIMIT = 100_000, 2_000, 32, 10, "64MiB"


@eqsat_mem.optimize(memory_limit=LIMIT)
def nearest(queries, points):
    """Distances and positions of the nearest points, nearest first, each of shape (queries, neighbours)."""
    squared = jnp.sum((queries[:, None] - points[None]) ** 2, axis=-1)
    values, positions = jax.lax.top_k(-squared, NEIGHBOURS)
    return jnp.sqrt(-values), positions


def main():
    rng = np.random.default_rng(0)
    points, queries = (rng.standard_normal((n, DIMENSIONS), dtype=np.float32) for n in (POINTS, QUERIES))
    print(nearest.plan(queries, points))
    distances, positions = nearest(queries, points)

    for query in range(0, QUERIES, 400):
        apart = np.linalg.norm(points.astype(np.float64) - queries[query], axis=1)
        np.testing.assert_allclose(distances[query], np.sort(apart)[:NEIGHBOURS], rtol=1e-4)
        np.testing.assert_allclose(apart[positions[query]], distances[query], rtol=1e-4)
    print(f"checked in float64; the mean distance of the nearest point is {distances[:, 0].mean():.3f}")


if __name__ == "__main__":
    main()
