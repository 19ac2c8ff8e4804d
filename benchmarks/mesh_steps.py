"""Losses with gradients and training steps for a mesh, and what an expert writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.mesh_shapes import GRID, f32


def contrast(a: Any, b: Any) -> Any:
    """A contrastive loss (InfoNCE) of pairs of rows, with its gradients."""

    def loss(a: Any, b: Any) -> Any:
        a, b = (u / jnp.linalg.norm(u, axis=-1, keepdims=True) for u in (a, b))
        scores = 20.0 * a @ b.T
        return jnp.mean(jax.nn.logsumexp(scores, axis=1) + jax.nn.logsumexp(scores, axis=0) - 2.0 * jnp.diag(scores))

    return jax.value_and_grad(loss, argnums=(0, 1))(a, b)


def words(h: Any, w: Any, labels: Any) -> Any:
    """The loss of predicting one of many words, with its gradients."""

    def loss(h: Any, w: Any) -> Any:
        scores = h @ w
        return jnp.mean(jax.nn.logsumexp(scores, -1) - jnp.take_along_axis(scores, labels[:, None], -1)[:, 0])

    return jax.value_and_grad(loss, argnums=(0, 1))(h, w)


def two_layers(params: Any, x: Any, y: Any) -> Any:
    def loss(p: Any) -> Any:
        return jnp.mean((jax.nn.gelu(x @ p["w1"]) @ p["w2"] - y) ** 2)

    value, slope = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, slope)


def two_layers_by_hand(params: Any, x: Any, y: Any) -> Any:
    """The hidden layer is computed again in the second pass; sums are over hidden units for results, and over data for gradients."""
    size = y.size * GRID["data"]
    w1, w2 = params["w1"], params["w2"]
    hidden = jax.checkpoint(lambda w, x: jax.nn.gelu(x @ w))
    out = lax.psum(hidden(w1, x) @ w2, "model")
    value = lax.psum(jnp.sum((out - y) ** 2), "data") / size
    _, back = jax.vjp(lambda w1, w2: hidden(w1, x) @ w2, w1, w2)
    slope = dict(zip(("w1", "w2"), lax.psum(back(2.0 * (out - y) / size), "data"), strict=True))
    return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, slope)


def block(p: Any, x: Any) -> Any:
    """A transformer block of [batch, time, feature] with a causal mask."""

    def norm(u: Any) -> Any:
        return (u - u.mean(-1, keepdims=True)) * lax.rsqrt(u.var(-1, keepdims=True) + 1e-5)

    h, t = norm(x), x.shape[1]
    q, k, v = (jnp.einsum("btd,dhe->bhte", h, p[name]) for name in ("q", "k", "v"))
    s = jnp.einsum("bhte,bhse->bhts", q, k) / jnp.sqrt(q.shape[-1])
    s = jnp.where(jnp.tril(jnp.ones((t, t), bool)), s, -jnp.inf)
    x = x + jnp.einsum("bhts,bhse,hed->btd", jax.nn.softmax(s, -1), v, p["o"])
    return x + jax.nn.gelu(norm(x) @ p["w1"]) @ p["w2"]


def language_model(params: Any, tokens: Any, layer_of: Callable[..., Any] = block) -> Any:
    """One step of gradient descent on the next token."""

    def loss(p: Any) -> Any:
        x = p["embed"][tokens[:, :-1]]
        for layer in p["layers"]:
            x = layer_of(layer, x)
        logits = x @ p["embed"].T
        own = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - own)

    value, slope = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, slope)


def language_model_checkpointed(params: Any, tokens: Any) -> Any:
    return language_model(params, tokens, jax.checkpoint(block))


def language_model_arguments(layers: int, batch: int, length: int, d: int, heads: int, words: int) -> tuple[Any, Any]:
    head = f32(d, heads, d // heads)
    layer = {"q": head, "k": head, "v": head, "o": f32(heads, d // heads, d), "w1": f32(d, 4 * d), "w2": f32(4 * d, d)}
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    return {"embed": f32(words, d), "layers": [layer] * layers}, tokens
