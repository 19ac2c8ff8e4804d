r"""# The neural tangent kernel

$$\Theta(x, x') = \left\langle \frac{\partial f(x; \theta)}{\partial \theta}, \frac{\partial f(x'; \theta)}{\partial \theta} \right\rangle$$

The derivatives of a network at all points by all parameters are a large matrix, of which only the products of rows are wanted. It is never
held.

    python examples/neural_tangent_kernel.py
"""

# %%
import timeit

import jax
import jax.numpy as jnp
import numpy as np

import eqsat_mem

POINTS, INPUTS, WIDTH, LIMIT = 400, 16, 256, "16MiB"


def network(parameters, x):
    """A perceptron with two hidden layers: (inputs,) -> ()."""
    first, second, last = parameters
    return jnp.tanh(jnp.tanh(x @ first) @ second) @ last


def tangent_kernel(parameters, x):
    """Products of the gradients by all parameters at all pairs of points: (points, inputs) -> (points, points)."""
    slopes = jax.vmap(jax.grad(network), in_axes=(None, 0))(parameters, x)
    rows = [slope.reshape(len(x), -1) for slope in slopes]
    return sum(row @ row.T for row in rows)


# %% [markdown]
# ## The plan
#
# Rules find what is known of such kernels: the gradient by a matrix is an outer product, and inner products of outer products are products
# of inner products. No loop is needed.

# %%
rng = np.random.default_rng(0)
shapes = [(INPUTS, WIDTH), (WIDTH, WIDTH), (WIDTH,)]
parameters = [rng.standard_normal(shape, dtype=np.float32) / np.sqrt(np.float32(shape[0])) for shape in shapes]
x = rng.standard_normal((POINTS, INPUTS), dtype=np.float32)
fast = eqsat_mem.optimize(tangent_kernel, memory_limit=LIMIT)
plan = fast.plan(parameters, x)
print(plan)

# %% [markdown]
# ## The same numbers
#
# Against the formula in float64, layer by layer: the gradient by a matrix is the outer product of what comes in and what goes back.

# %%
kernel = np.asarray(fast(parameters, x))
first, second, last = (np.float64(p) for p in parameters)
one = np.tanh(x @ first)
two = np.tanh(one @ second)
back_two = (1 - two**2) * last
back_one = (1 - one**2) * (back_two @ second.T)
right = (x @ x.T) * (back_one @ back_one.T) + (one @ one.T) * (back_two @ back_two.T) + two @ two.T
apart = np.abs(kernel - right).max() / np.abs(right).max()
print(f"largest difference, relative to the largest entry: {apart:.1e}")
assert apart < 1e-4

# %% [markdown]
# ## Seconds

# %%
for name, run in {"as written": jax.jit(tangent_kernel), "planned": fast}.items():
    run(parameters, x)
    seconds = timeit.repeat(lambda run=run: jax.block_until_ready(run(parameters, x)), number=1, repeat=2)
    print(f"{name:10}  {min(seconds):.3f} s")

# %% [markdown]
# ## Memory over time

# %%
plan.show()
