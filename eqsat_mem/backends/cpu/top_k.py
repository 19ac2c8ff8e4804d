"""Exact selection of the largest elements by blocks, which emitted programs carry with them as source.

benchmarks/calibration/searches.py compares it with selections from all elements.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def top_k_by_blocks(x: Any, k: int) -> Any:
    """``lax.top_k(x, k)`` along the last axis, ties included, by blocks where that leaves much less to sort.

    The k largest elements lie in the k blocks with the largest maxima: each other block has k elements ahead of all of its own, the
    blocks' maxima (where two are equal, the earlier block's comes first, as its element does in ``x``). Candidates stay in the order of
    ``x``.
    A maximum may pass over what is not a number (XLA:CPU's does), which comes before all numbers: a sum tells. (It also tells of a block
    with both infinities, or whose sums overflow both ways; then elements that are equal in more than k blocks may come in another order.)
    Behind barriers, since XLA takes a ``top_k`` whose results are read in slices for a sort of all elements.
    """
    block = block_length(x.shape[-1], k)
    if block is None:
        return lax.optimization_barrier(lax.top_k(x, k))
    count = x.shape[-1] // block
    head, tail = x[..., : count * block], x[..., count * block :]
    head = head.reshape(*x.shape[:-1], count, block)
    largest = lax.reduce_max(head, (x.ndim,))
    if jnp.issubdtype(x.dtype, jnp.floating):
        total = lax.reduce_sum(head, (x.ndim,))
        largest = jnp.where(jnp.isnan(total), jnp.nan, largest)
    found = lax.sort(lax.top_k(largest, k)[1])
    candidates = jnp.take_along_axis(head, found[..., None], axis=-2).reshape(*x.shape[:-1], k * block)
    places = (found[..., None] * block + jnp.arange(block, dtype=jnp.int32)).reshape(candidates.shape)
    rest = jnp.arange(count * block, x.shape[-1], dtype=jnp.int32)
    candidates = jnp.concatenate([candidates, tail], axis=-1)
    places = jnp.concatenate([places, jnp.broadcast_to(rest, tail.shape)], axis=-1)
    values, chosen = lax.optimization_barrier(lax.top_k(candidates, k))
    return values, jnp.take_along_axis(places, chosen, axis=-1)


def block_length(n: int, k: int) -> int | None:
    """The block for ``k`` of ``n`` elements that leaves few to be sorted; None where that is not much less than all of them.

    A divisor of ``n`` is preferred: then blocks are read where they stand.
    """
    if not k > 0 or n < 1024:
        return None
    best = 1.3 * np.sqrt(n / k)
    divisors = [b for b in range(max(8, int(best / 2)), int(best * 2) + 1) if n % b == 0]
    block = min(divisors, key=lambda b: (abs(b - best), b)) if divisors else 1 << max(4, round(np.log2(best)))
    sorted_elements = n // block + k * block + n % block
    return block if n // block >= k and sorted_elements * 4 <= n else None
