r"""# Private training

$$\frac{1}{n} \sum_i \min\left(1, \frac{c}{\lVert g_i \rVert}\right) g_i \qquad g_i = \nabla_\theta\, \ell(\theta; x_i, y_i)$$

Differentially private training clips the gradient of each example before it adds them up, and noise to the sum. `vmap` of `grad` has the
activations and the gradients of all examples at once. Here they are there for one example at a time, in a fraction of the time: XLA:CPU
computes the gradients of many kernels at once slowly.

    python examples/private_training.py
"""

# %%
import timeit

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import eqsat_mem

EXAMPLES, SIDE, FEATURES, CLASSES, CLIP, LIMIT = 96, 28, 32, 10, 1.0, "4MiB"
NHWC = ("NHWC", "HWIO", "NHWC")


def loss(parameters, image, label):
    """Cross entropy of a convolutional network on one image."""
    first, second, last = parameters
    x = jax.nn.relu(lax.conv_general_dilated(image[None], first, (1, 1), "SAME", dimension_numbers=NHWC))
    x = jax.nn.relu(lax.conv_general_dilated(x, second, (1, 1), "SAME", dimension_numbers=NHWC))
    logits = x.mean((0, 1, 2)) @ last
    return jax.nn.logsumexp(logits) - logits[label]


def clipped_gradient(parameters, images, labels):
    """The mean of the gradients of all examples, none longer than `CLIP`."""
    slopes = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(parameters, images, labels)
    norms = jnp.sqrt(sum(jnp.sum(slope**2, range(1, slope.ndim)) for slope in slopes))
    weights = jnp.minimum(1, CLIP / norms) / len(images)
    return [jnp.tensordot(weights, slope, 1) for slope in slopes]


# %% [markdown]
# ## The plan
#
# `vmap` makes one convolution with a group of features for each example out of the gradient of a kernel. Its groups are an index like any
# other: the plan has a loop over examples.

# %%
rng = np.random.default_rng(0)
shapes = [(3, 3, 3, FEATURES), (3, 3, FEATURES, FEATURES), (FEATURES, CLASSES)]
parameters = [rng.standard_normal(shape, dtype=np.float32) / np.sqrt(np.prod(shape[:-1], dtype=np.float32)) for shape in shapes]
images = rng.standard_normal((EXAMPLES, SIDE, SIDE, 3), dtype=np.float32)
labels = rng.integers(0, CLASSES, EXAMPLES)
fast = eqsat_mem.optimize(clipped_gradient, memory_limit=LIMIT)
plan = fast.plan(parameters, images, labels)
print(plan)

# %% [markdown]
# ## The same numbers
#
# Against the gradients of one example after the other, clipped and added in float64.

# %%
one = jax.jit(jax.grad(loss))
right = [np.zeros(shape) for shape in shapes]
for image, label in zip(images, labels):
    slopes = [np.float64(slope) for slope in one(parameters, image, label)]
    norm = np.sqrt(sum((slope**2).sum() for slope in slopes))
    right = [total + min(1, CLIP / norm) * slope / EXAMPLES for total, slope in zip(right, slopes)]
apart = max(np.abs(np.asarray(a) - b).max() / np.abs(b).max() for a, b in zip(fast(parameters, images, labels), right))
print(f"largest difference, relative to the largest entry: {apart:.1e}")
assert apart < 1e-4

# %% [markdown]
# ## Seconds

# %%
for name, run in {"as written": jax.jit(clipped_gradient), "planned": fast}.items():
    run(parameters, images, labels)
    seconds = timeit.repeat(lambda run=run: jax.block_until_ready(run(parameters, images, labels)), number=1, repeat=2)
    print(f"{name:10}  {min(seconds):.3f} s")

# %% [markdown]
# ## Memory over time

# %%
plan.show()
