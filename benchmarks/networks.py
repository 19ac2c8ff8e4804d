"""Training steps of networks, for :mod:`benchmarks.applications`: losses of a batch, written as anybody would.

A loss takes weights, arrays whose leading axis is the batch, and is a mean over it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Weights = Any


def weights(seed: int, **shapes: tuple[int, ...]) -> Weights:
    """Arrays of normal numbers, scaled by their second to last axis."""
    rng = np.random.default_rng(seed)
    return {name: (rng.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32) for name, shape in shapes.items()}


def normal(*shape: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def whole(most: int, *shape: int) -> Any:
    return np.random.default_rng(2).integers(0, most, shape).astype(np.int32)


def norm(x: jax.Array) -> jax.Array:
    return (x - jnp.mean(x, -1, keepdims=True)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def attend(q: jax.Array, k: jax.Array, v: jax.Array, heads: int, causal: bool = False) -> jax.Array:
    """Attention between the positions of each sequence: arrays of shape (batch, length, width)."""
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q, k, v))
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) / jnp.sqrt(1.0 * q.shape[-1])
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    out = jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(scores, -1), v)
    return out.reshape(*out.shape[:2], -1)


# --- language, images ----------------------------------------------------------------------------------


def language_arguments(batch: int, length: int, width: int = 128, layers: int = 4, words: int = 4_000) -> tuple[Any, ...]:
    layer = {"qkv": (width, 3 * width), "o": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    stacked = {name: (layers, *shape) for name, shape in layer.items()}
    return weights(0, table=(words, width), **stacked), whole(words, batch, length + 1)


def language_loss(w: Weights, tokens: jax.Array, block_of: Any = lambda block: block) -> jax.Array:
    """A transformer whose layers are a scan."""

    def block(x: jax.Array, w: Weights) -> tuple[jax.Array, None]:
        q, k, v = jnp.split(norm(x) @ w["qkv"], 3, -1)
        x = x + attend(q, k, v, 4, causal=True) @ w["o"]
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], None

    layers = {name: w[name] for name in ("qkv", "o", "up", "down")}
    x, _ = lax.scan(block_of(block), w["table"][tokens[:, :-1]], layers)
    return cross_entropy(norm(x) @ w["table"].T, tokens[:, 1:])


def vision_arguments(batch: int, side: int, width: int = 192, layers: int = 4) -> tuple[Any, ...]:
    square = dict.fromkeys("qkvo", (width, width))
    blocks = [weights(k, **square, up=(width, 4 * width), down=(4 * width, width)) for k in range(layers)]
    ends = weights(9, patch=(192, width), place=((side // 8) ** 2, width), head=(width, 100))
    return {"blocks": blocks, **ends}, normal(batch, side, side, 3), whole(100, batch)


def vision_loss(w: Weights, images: jax.Array, labels: jax.Array, block_of: Any = lambda block: block) -> jax.Array:
    """A vision transformer on patches of 8 x 8."""
    batch, side = images.shape[:2]
    patches = images.reshape(batch, side // 8, 8, side // 8, 8, 3).transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, 192)

    def block(x: jax.Array, w: Weights) -> jax.Array:
        h = norm(x)
        x = x + attend(h @ w["q"], h @ w["k"], h @ w["v"], 6) @ w["o"]
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]

    x = patches @ w["patch"] + w["place"]
    for layer in w["blocks"]:
        x = block_of(block)(x, layer)
    return cross_entropy(norm(jnp.mean(x, 1)) @ w["head"], labels)


def unet_arguments(batch: int, side: int, c: int = 16) -> tuple[Any, ...]:
    ins, outs = (2, c, c, 2 * c, 2 * c, 4 * c, 6 * c, 3 * c, c), (c, c, 2 * c, 2 * c, 4 * c, 4 * c, 2 * c, c, 2)
    features = dict(zip("abcdefghi", zip(ins, outs, strict=True), strict=True))
    shapes = {name: (3, 3, *pair) for name, pair in features.items()}
    return jax.tree.map(lambda w: w / 3, weights(0, **shapes)), normal(batch, side, side, 2), normal(batch, side, side, 2, seed=3)


def unet_loss(w: Weights, images: jax.Array, noise: jax.Array, block_of: Any = lambda block: block) -> jax.Array:
    """The noise in images, told by a U-Net of three levels."""

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def block(x: jax.Array, *kernels: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = jax.nn.silu(convolve(x, kernel))
        return x

    def down(x: jax.Array) -> jax.Array:
        batch, height, width, features = x.shape
        return x.reshape(batch, height // 2, 2, width // 2, 2, features).mean((2, 4))

    def joined(x: jax.Array, skipped: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), skipped], -1)

    block = block_of(block)
    one = block(images + 0.5 * noise, w["a"], w["b"])
    two = block(down(one), w["c"], w["d"])
    three = block(down(two), w["e"], w["f"])
    out = block(joined(block(joined(three, two), w["g"]), one), w["h"])
    return jnp.mean((convolve(out, w["i"]) - noise) ** 2)


STRIP = 64
"""The rows of a picture that a person computes at once, besides those that the windows of all layers reach."""


def restoration_arguments(rows: int, columns: int, layers: int = 6, c: int = 16) -> tuple[Any, ...]:
    shapes = {"first": (3, 3, 3, c), **{f"layer{k}": (3, 3, c, c) for k in range(layers)}, "last": (3, 3, c, 3)}
    kernels = jax.tree.map(lambda w: w / 3, weights(0, **shapes))
    return kernels, normal(1, rows, columns, 3), normal(1, rows, columns, 3, seed=3)


def restored(w: Weights, picture: jax.Array, inside: jax.Array | float, block_of: Any) -> jax.Array:
    """One picture less its noise, told by convolutions that add to what they read; rows that are not ``inside`` are padding."""

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x * inside, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def block(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return x + convolve(jax.nn.silu(x), kernel)

    x = convolve(picture, w["first"])
    for k in range(len(w) - 2):
        x = block_of(block)(x, w[f"layer{k}"])
    return picture - convolve(x, w["last"])


def restoration_loss(w: Weights, picture: jax.Array, clean: jax.Array, block_of: Any = lambda block: block) -> jax.Array:
    return jnp.mean((restored(w, picture, 1.0, block_of) - clean) ** 2)


def restoration_loss_in_strips(w: Weights, picture: jax.Array, clean: jax.Array) -> jax.Array:
    """The same, of one strip after the other, each with the rows beside it that the windows of all layers reach."""
    (_, rows, *_), beside = picture.shape, len(w)
    strip = min(STRIP, rows)
    padded = jnp.pad(picture, ((0, 0), (beside, beside), (0, 0), (0, 0)))

    @jax.checkpoint
    def squares(start: jax.Array) -> jax.Array:
        place = start - beside + jnp.arange(strip + 2 * beside)
        inside = ((place >= 0) & (place < rows)).astype(picture.dtype)[:, None, None]
        found = restored(w, lax.dynamic_slice_in_dim(padded, start, strip + 2 * beside, 1), inside, lambda block: block)
        return jnp.sum((found[:, beside:-beside] - lax.dynamic_slice_in_dim(clean, start, strip, 1)) ** 2)

    return jnp.sum(lax.map(squares, jnp.arange(0, rows, strip))) / picture.size


# --- layers of other kinds -----------------------------------------------------------------------------


def experts_arguments(tokens: int, width: int = 128, experts: int = 8) -> tuple[Any, ...]:
    made = weights(0, router=(width, experts), up=(experts, width, 2 * width), down=(experts, 2 * width, width))
    return made, normal(tokens, width), normal(tokens, width, seed=3)


def experts_loss(w: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
    """A mixture of experts, two for each token, computed densely."""
    gates = jax.nn.softmax(x @ w["router"], -1)
    best, chosen = lax.top_k(gates, 2)
    shares = jnp.sum(jax.nn.one_hot(chosen, gates.shape[-1]) * (best / jnp.sum(best, -1, keepdims=True))[..., None], 1)
    hidden = jax.nn.gelu(jnp.einsum("td,edf->tef", x, w["up"]))
    return jnp.mean((jnp.einsum("te,ted->td", shares, jnp.einsum("tef,efd->ted", hidden, w["down"])) - y) ** 2)


def state_space_arguments(batch: int, length: int, width: int = 64, states: int = 8) -> tuple[Any, ...]:
    made = weights(0, decay=(width, states), inout=(width, 2 * states), step=(width, width), out=(width, width))
    return made, normal(batch, length, width), normal(batch, length, width, seed=3)


def state_space_loss(w: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
    """A selective state-space layer, its recurrence by ``lax.associative_scan``."""
    step = jax.nn.softplus(x @ w["step"])
    into, out_of = jnp.split(x @ w["inout"], 2, -1)
    decay = jnp.exp(-step[..., None] * jnp.exp(w["decay"]))
    driven = (step * x)[..., None] * into[:, :, None, :]
    _, h = lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, driven), axis=1)
    return jnp.mean((jnp.einsum("btdn,btn->btd", h, out_of) @ w["out"] - y) ** 2)


def flow_arguments(batch: int, width: int = 32, layers: int = 6) -> tuple[Any, ...]:
    return [weights(k, a=(width // 2, 128), b=(128, 128), c=(128, width)) for k in range(layers)], normal(batch, width)


def flow_loss(layers: Weights, x: jax.Array) -> jax.Array:
    """The negative log-likelihood of a normalising flow of affine couplings."""
    a, b = jnp.split(x, 2, -1)
    volume = jnp.zeros(x.shape[0])
    for w in layers:
        s, t = jnp.split(jnp.tanh(jnp.tanh(a @ w["a"]) @ w["b"]) @ w["c"], 2, -1)
        s = jnp.tanh(s)
        a, b, volume = b * jnp.exp(s) + t, a, volume + jnp.sum(s, -1)
    return jnp.mean(0.5 * jnp.sum(a * a + b * b, -1) - volume)


def policy_arguments(batch: int, seen: int = 64, width: int = 256, actions: int = 16) -> tuple[Any, ...]:
    made = weights(0, a=(seen, width), b=(width, width), policy=(width, actions), value=(width, 1))
    return made, normal(batch, seen), whole(actions, batch), *(normal(batch, seed=3 + k) for k in range(3))


def policy_loss(w: Weights, seen: jax.Array, action: jax.Array, before: jax.Array, advantage: jax.Array, returned: jax.Array) -> jax.Array:
    """The clipped objective of proximal policy optimisation, with the error of values and the entropy."""
    hidden = jnp.tanh(jnp.tanh(seen @ w["a"]) @ w["b"])
    chances = jax.nn.log_softmax(hidden @ w["policy"])
    ratio = jnp.exp(jnp.take_along_axis(chances, action[:, None], 1)[:, 0] - before)
    gain = jnp.mean(jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage))
    error = jnp.mean((returned - (hidden @ w["value"])[:, 0]) ** 2)
    return 0.5 * error - gain + 0.01 * jnp.mean(jnp.sum(jnp.exp(chances) * chances, -1))


def physics_arguments(points: int, width: int = 64) -> tuple[Any, ...]:
    return weights(0, a=(2, width), b=(width, width), c=(width, width), d=(width, 1)), normal(points, 2)


def physics_loss(w: Weights, points: jax.Array) -> jax.Array:
    """The residual of Burgers' equation of a network of place and time."""

    def u(point: jax.Array) -> jax.Array:
        return (jnp.tanh(jnp.tanh(jnp.tanh(point @ w["a"]) @ w["b"]) @ w["c"]) @ w["d"])[0]

    def residual(point: jax.Array) -> jax.Array:
        slope, curved = jax.jvp(jax.grad(u), (point,), (jnp.array([1.0, 0.0]),))
        return slope[1] + u(point) * slope[0] - 0.01 * curved[0]

    return jnp.mean(jax.vmap(residual)(points) ** 2)
