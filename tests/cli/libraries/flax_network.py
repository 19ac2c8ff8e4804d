"""A network of flax (nnx), trained by optax on random numbers."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(32, 1024, rngs=rngs)
        self.out = nnx.Linear(1024, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


@nnx.jit
def step(net, optimizer, x, y):
    value, grads = nnx.value_and_grad(lambda net: jnp.mean((net(x) - y) ** 2))(net)
    optimizer.update(net, grads)
    return value


x = jax.random.normal(jax.random.key(0), (20_000, 32))
y = jnp.sin(x.sum(axis=1, keepdims=True))
net = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)
for _ in range(3):
    print(step(net, optimizer, x, y))
