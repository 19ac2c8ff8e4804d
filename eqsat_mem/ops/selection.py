"""Exact selection of the largest elements by blocks, which emitted programs carry with them as source."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax


def top_k_by_blocks(x: Any, k: int, block: int) -> Any:
    """``lax.top_k(x, k)`` along the last axis, ties included.

    The k largest elements lie in the k blocks with the largest maxima: each other block has k elements ahead of all of its own, the
    blocks' maxima (where two are equal, the earlier block's comes first, as its element does in ``x``). Candidates stay in the order of ``x``.
    Where something is not a number (a sum tells; XLA:CPU's maxima pass over it) all elements are searched.
    """

    def search(x: Any) -> Any:
        count = x.shape[-1] // block
        head, tail = x[..., : count * block], x[..., count * block :]
        head = head.reshape(*x.shape[:-1], count, block)
        found = lax.sort(lax.top_k(lax.reduce_max(head, (x.ndim,)), k)[1])
        candidates = jnp.take_along_axis(head, found[..., None], axis=-2).reshape(*x.shape[:-1], k * block)
        places = (found[..., None] * block + jnp.arange(block, dtype=jnp.int32)).reshape(candidates.shape)
        candidates = jnp.concatenate([candidates, tail], axis=-1)
        rest = jnp.arange(count * block, x.shape[-1], dtype=jnp.int32)
        places = jnp.concatenate([places, jnp.broadcast_to(rest, tail.shape)], axis=-1)
        values, chosen = lax.top_k(candidates, k)
        return [values, jnp.take_along_axis(places, chosen, axis=-1)]

    if not jnp.issubdtype(x.dtype, jnp.floating):
        return search(x)
    return lax.cond(jnp.isnan(jnp.sum(x)), lambda x: lax.top_k(x, k), search, x)


def block_length(n: int, k: int) -> int | None:
    """The block for ``k`` of ``n`` elements that leaves the fewest to be sorted; None where that is not much less than all of them."""
    if not 0 < k or n < 1024:
        return None
    block = 1 << max(4, round(math.log2(math.sqrt(n / k))))
    sorted_elements = n // block + k * block + n % block
    return block if n // block >= k and sorted_elements * 4 <= n else None
