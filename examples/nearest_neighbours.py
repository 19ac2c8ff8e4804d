r"""# Nearest neighbours

$$\operatorname{nearest}(q) = \operatorname{arg\,min}^{10}_{j} \; \lVert q - p_j \rVert$$

Neither the distances of all queries to all points nor their order are ever held whole: the ten best are kept while points pass by.

    python examples/nearest_neighbours.py
"""

# %%
import timeit

import jax
import jax.numpy as jnp
import numpy as np

import eqsat_mem

POINTS, QUERIES, DIMENSIONS, NEIGHBOURS, LIMIT = 20_000, 1_000, 16, 10, "16MiB"


def nearest(queries, points):
    """Distances and positions of the nearest points, nearest first, each of shape (queries, neighbours)."""
    squared = jnp.sum((queries[:, None] - points[None]) ** 2, axis=-1)
    values, positions = jax.lax.top_k(-squared, NEIGHBOURS)
    return jnp.sqrt(-values), positions


# %% [markdown]
# ## The plan

# %%
rng = np.random.default_rng(0)
points, queries = (rng.standard_normal((n, DIMENSIONS), dtype=np.float32) for n in (POINTS, QUERIES))
fast = eqsat_mem.optimize(nearest, memory_limit=LIMIT)
plan = fast.plan(queries, points)
print(plan)

# %% [markdown]
# ## The same numbers
#
# Against numpy in float64, which sorts all distances of some queries.

# %%
distances, positions = fast(queries, points)
for query in range(0, QUERIES, 100):
    apart = np.linalg.norm(points.astype(np.float64) - queries[query], axis=1)
    np.testing.assert_allclose(distances[query], np.sort(apart)[:NEIGHBOURS], rtol=1e-4)
    np.testing.assert_allclose(apart[positions[query]], distances[query], rtol=1e-4)
print(f"right for {len(range(0, QUERIES, 100))} queries; the mean distance of the nearest point is {distances[:, 0].mean():.3f}")

# %% [markdown]
# ## Seconds

# %%
for name, run in {"as written": jax.jit(nearest), "planned": fast}.items():
    run(queries, points)
    seconds = timeit.repeat(lambda run=run: jax.block_until_ready(run(queries, points)), number=1, repeat=3)
    print(f"{name:10}  {min(seconds):.3f} s")

# %% [markdown]
# ## Memory over time

# %%
plan.show()
