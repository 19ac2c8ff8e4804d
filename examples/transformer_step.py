r"""# A training step of a transformer

$$\theta \leftarrow \theta - \eta\, \nabla_\theta \left[ -\frac1n \sum_t \log p_\theta(x_{t+1} \mid x_{\le t}) \right]$$

A language model of four layers, written in JAX without a library, and one step of gradient descent. What the backward pass needs of a
layer is computed again where that saves memory, as with `jax.checkpoint`; attention and the logits of the vocabulary are cut into chunks
besides.

    python examples/transformer_step.py
"""

# %%
import timeit

import jax
import jax.numpy as jnp
import numpy as np

import eqsat_mem

LAYERS, BATCH, LENGTH, WIDTH, HEADS, VOCABULARY, RATE, LIMIT = 4, 4, 192, 128, 4, 4_096, 0.1, "56MiB"


def normal(x):
    """Each token's vector with mean 0 and variance 1: (..., width)."""
    return (x - x.mean(axis=-1, keepdims=True)) / jnp.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)


def layer(weights, x):
    """Causal attention and a perceptron: (batch, length, width) to the same."""
    q, k, v = (jnp.einsum("btd,dhc->bhtc", normal(x), weights[name]) for name in ("query", "key", "value"))
    scores = jnp.einsum("bhtc,bhsc->bhts", q, k) / jnp.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    attended = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1) @ v
    x = x + jnp.einsum("bhtc,hcd->btd", attended, weights["out"])
    return x + jax.nn.gelu(normal(x) @ weights["up"]) @ weights["down"]


def loss(parameters, tokens):
    """The mean cross-entropy of each next token: (batch, length) -> ()."""
    x = parameters["embedding"][tokens]
    x, _ = jax.lax.scan(lambda x, weights: (layer(weights, x), None), x, parameters["layers"])
    logits = normal(x) @ parameters["embedding"].T
    right = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
    return -jnp.mean(right)


def step(parameters, tokens):
    """Parameters after one step, and the loss before it."""
    value, slope = jax.value_and_grad(loss)(parameters, tokens)
    return jax.tree.map(lambda p, g: p - RATE * g, parameters, slope), value


# %% [markdown]
# ## The plan

# %%
rng = np.random.default_rng(0)


def weights_of(inputs, *shape):
    """Random weights, scaled by the number of inputs of each product."""
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(0.3 / np.sqrt(inputs))


projections = {name: weights_of(WIDTH, LAYERS, WIDTH, HEADS, WIDTH // HEADS) for name in ("query", "key", "value")}
parameters = {
    "embedding": weights_of(WIDTH, VOCABULARY, WIDTH),
    "layers": {
        **projections,
        "out": weights_of(WIDTH, LAYERS, HEADS, WIDTH // HEADS, WIDTH),
        "up": weights_of(WIDTH, LAYERS, WIDTH, 4 * WIDTH),
        "down": weights_of(4 * WIDTH, LAYERS, 4 * WIDTH, WIDTH),
    },
}
tokens = rng.integers(0, VOCABULARY, (BATCH, LENGTH))
fast = eqsat_mem.optimize(step, memory_limit=LIMIT)
plan = fast.plan(parameters, tokens)
print(plan)

# %% [markdown]
# ## The same numbers
#
# Parameters after a step as written and as planned, and the loss as it falls.

# %%
ours, written = fast(parameters, tokens)[0], jax.jit(step)(parameters, tokens)[0]
apart = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), ours, written)))
moved = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), written, parameters)))
print(f"a parameter moves by {moved:.1e} at most, and differs by {apart:.1e} at most")
assert apart < 1e-4 * moved

losses, moving = [], parameters
for _ in range(3):
    moving, value = fast(moving, tokens)
    losses.append(float(value))
print("losses", " ".join(f"{value:.4f}" for value in losses))
assert losses == sorted(losses, reverse=True)

# %% [markdown]
# ## Seconds

# %%
for name, run in {"as written": jax.jit(step), "planned": fast}.items():
    jax.block_until_ready(run(parameters, tokens))
    seconds = timeit.repeat(lambda run=run: jax.block_until_ready(run(parameters, tokens)), number=1, repeat=2)
    print(f"{name:10}  {min(seconds):.3f} s")

# %% [markdown]
# ## Memory over time

# %%
plan.show()
