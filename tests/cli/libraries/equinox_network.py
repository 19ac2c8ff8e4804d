"""A network of equinox, trained by optax on random images."""

import equinox as eqx
import jax
import optax


class Net(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        sizes = [(64, 512), (512, 512), (512, 10)]
        self.layers = [eqx.nn.Linear(*size, key=key) for size, key in zip(sizes, keys)]

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jax.nn.gelu(layer(x))
        return self.layers[-1](x)


def loss(net, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(net)(images), labels).mean()


@eqx.filter_jit
def step(net, state, images, labels):
    value, grads = eqx.filter_value_and_grad(loss)(net, images, labels)
    updates, state = optimizer.update(grads, state, net)
    return eqx.apply_updates(net, updates), state, value


key_net, key_images, key_labels = jax.random.split(jax.random.key(0), 3)
images = jax.random.normal(key_images, (20_000, 64))
labels = jax.random.randint(key_labels, (20_000,), 0, 10)
net = Net(key_net)
optimizer = optax.adam(1e-3)
state = optimizer.init(eqx.filter(net, eqx.is_array))
for _ in range(3):
    net, state, value = step(net, state, images, labels)
    print(value)
