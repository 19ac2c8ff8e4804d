"""Optimal transport between two clouds of points with ott-jax, whose batching (batch_size) is off."""

import jax
import jax.numpy as jnp
from ott.geometry import pointcloud
from ott.solvers import linear

key_x, key_y = jax.random.split(jax.random.key(0))
x = jax.random.normal(key_x, (2000, 3))
y = jax.random.normal(key_y, (2500, 3)) + 1.0


@jax.jit
def cost(x, y):
    out = linear.solve(pointcloud.PointCloud(x, y, epsilon=0.5), max_iterations=20)
    return out.reg_ot_cost


print(cost(x, y))
print(jnp.linalg.norm(jax.jit(jax.grad(cost))(x, y)))
