"""Attention and the loss of a large vocabulary, forward and backward: ``python -m benchmarks.attention``

Plans of what is written down plainly, against the same in plain JAX, ``jax.nn.dot_product_attention``, and chunks by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.racing import Contest, Question, contests, main, table

CASES = {"tiny": [(2, 96, 16, False)], "small": [(8, 2_048, 64, False), (8, 2_048, 64, True)], "full": [(8, 8_192, 64, False)]}
"""Heads, length, width of a head, whether causal."""
VOCABULARY = {"tiny": [(64, 500, 16)], "small": [(4_096, 32_000, 64)], "full": [(4_096, 32_000, 64), (8_192, 128_000, 256)]}
"""Positions, words, width."""
ROWS = 256


def attend(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = False) -> jax.Array:
    """Arrays of shape (heads, length, width)."""
    scores = jnp.einsum("hqc,hkc->hqk", q, k) / np.sqrt(q.shape[-1], dtype=np.float32)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
    return jax.nn.softmax(scores, -1) @ v


def library(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = False) -> jax.Array:
    """The same by ``jax.nn.dot_product_attention``, which wants heads in the middle."""
    out = jax.nn.dot_product_attention(*(x.transpose(1, 0, 2) for x in (q, k, v)), is_causal=causal)
    return out.transpose(1, 0, 2)


def attend_in_chunks(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = False, rows: int = ROWS) -> jax.Array:
    """Queries in chunks of as many rows, or less where that divides them; each is computed again for its gradient."""
    length = q.shape[1]
    rows = next(fewer for fewer in range(min(rows, length), 0, -1) if length % fewer == 0)

    @jax.checkpoint
    def chunk(start: jax.Array) -> jax.Array:
        scores = jnp.einsum("hqc,hkc->hqk", lax.dynamic_slice_in_dim(q, start, rows, 1), k) / np.sqrt(q.shape[-1], dtype=np.float32)
        if causal:
            scores = jnp.where(start + jnp.arange(rows)[:, None] >= jnp.arange(length), scores, -jnp.inf)
        return jax.nn.softmax(scores, -1) @ v

    return jnp.moveaxis(lax.map(chunk, jnp.arange(0, length, rows)), 0, 1).reshape(q.shape)


def loss(hidden: jax.Array, words: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy of a linear layer over a vocabulary."""
    logits = jax.nn.log_softmax(hidden @ words.T, -1)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1))


def loss_by_hand(hidden: jax.Array, words: jax.Array, labels: jax.Array) -> jax.Array:
    """Positions in chunks, each computed again for its gradient."""

    @jax.checkpoint
    def one(position: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = words @ position[0]
        return jax.nn.logsumexp(logits) - logits[position[1]]

    return jnp.mean(lax.map(one, (hidden, labels), batch_size=ROWS))


def gradient(function: Callable[..., jax.Array], causal: bool = False) -> Callable[..., Any]:
    """The gradients of a loss of attention with respect to all of its arguments."""

    def of(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jax.grad(lambda *args: jnp.sum(function(*args, causal) ** 2), argnums=(0, 1, 2))(q, k, v)

    return of


def make(scale: str) -> Iterator[Contest]:
    """Attention and its gradient, then the loss and its."""
    for heads, length, width, causal in CASES[scale]:
        rng = np.random.default_rng(0)
        args = tuple(rng.standard_normal((heads, length, width)).astype(np.float32) for _ in range(3))
        case = f"{heads} x {length:,} x {width}{', causal' if causal else ''}"
        size, limit = {"heads": heads, "length": length, "width": width, "causal": causal}, _limit(args, 64)
        versions = {"by hand": attend_in_chunks, "jax.nn": library}
        forward = {name: partial(f, causal=causal) for name, f in versions.items()}
        yield Contest(f"attention, {case}", size, args, limit, partial(attend, causal=causal), forward)
        backward = {name: gradient(f, causal) for name, f in versions.items()}
        yield Contest(f"its gradient, {case}", size, args, _limit((*args, *args), 64), gradient(attend, causal), backward)
    for positions, count, width in VOCABULARY[scale]:
        rng = np.random.default_rng(0)
        hidden, words = (rng.standard_normal((rows, width)).astype(np.float32) for rows in (positions, count))
        args = (hidden, words / np.sqrt(width, dtype=np.float32), rng.integers(0, count, positions))
        case, size = f"{positions:,} x {count:,} x {width}", {"positions": positions, "words": count, "width": width}
        yield Contest(f"cross-entropy, {case}", size, args, _limit(args, 64), loss, {"by hand": loss_by_hand})
        both = (jax.value_and_grad(f, argnums=(0, 1)) for f in (loss, loss_by_hand))
        yield Contest(f"its gradient, {case}", size, args, _limit((*args, *args), 64), next(both), {"by hand": next(both)})


def _limit(arrays: tuple[np.ndarray, ...], mib: int) -> int:
    """Bytes of these arrays, of an output as large as the first, and so many MiB."""
    return sum(a.nbytes for a in arrays) + arrays[0].nbytes + mib * 2**20


QUESTION = Question("attention", "Attention and the loss of a large vocabulary", contests(make, turns=5), table)

if __name__ == "__main__":
    main(QUESTION)
