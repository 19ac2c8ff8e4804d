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
    Behind barriers, since XLA takes a ``top_k`` whose results are read in slices for a sort of all elements; one for each result, since
    a barrier around both ends the process where a program runs on several devices.
    """
    block = block_length(x.shape[-1], k)
    if block is None or (x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating)):  # of those XLA:CPU orders what it makes of them
        largest, places = lax.top_k(x, k)
        return lax.optimization_barrier(largest), lax.optimization_barrier(places)
    count = x.shape[-1] // block
    head, tail = x[..., : count * block], x[..., count * block :]
    head = head.reshape(*x.shape[:-1], count, block)
    largest = lax.reduce_max(head, (x.ndim,))
    if jnp.issubdtype(x.dtype, jnp.floating):
        largest = in_order(head, largest)
    found = lax.sort(lax.top_k(largest, k)[1])
    candidates = jnp.take_along_axis(head, found[..., None], axis=-2).reshape(*x.shape[:-1], k * block)
    places = (found[..., None] * block + jnp.arange(block, dtype=jnp.int32)).reshape(candidates.shape)
    rest = jnp.arange(count * block, x.shape[-1], dtype=jnp.int32)
    candidates = jnp.concatenate([candidates, tail], axis=-1)
    places = jnp.concatenate([places, jnp.broadcast_to(rest, tail.shape)], axis=-1)
    values, chosen = lax.top_k(candidates, k)
    return lax.optimization_barrier(values), jnp.take_along_axis(places, lax.optimization_barrier(chosen), axis=-1)


def in_order(x: Any, largest: Any) -> Any:
    """The maxima of ``x`` along the last axis in the order of ``lax.top_k``: ``-nan < -inf < -0.0 < 0.0 < inf < nan``.

    ``largest`` are the maxima as numbers, which may be ``-0.0`` beside ``0.0``, and may pass over what is not a number: a sum tells.
    """
    integer = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}[x.dtype.itemsize]
    low, high = jnp.iinfo(integer).min, jnp.iinfo(integer).max

    def rank(v: Any) -> Any:
        bits = lax.bitcast_convert_type(v, integer)
        return bits ^ (bits >> (8 * x.dtype.itemsize - 1) & high)

    def positive_zero(x: Any) -> Any:
        return lax.reduce_max(1 / x, (x.ndim - 1,)) == jnp.inf

    def by_rank(x: Any) -> Any:
        return lax.bitcast_convert_type(rank(lax.reduce_max(rank(x), (x.ndim - 1,))), x.dtype)

    def row_by_row(function: Any) -> Any:  # what these make of a row is held for one only
        return lambda x: lax.map(function, x) if x.ndim > 2 else function(x)

    def with_zeros(x: Any) -> Any:
        return jnp.where(zero & row_by_row(positive_zero)(x), 0, largest)

    zero = lax.bitcast_convert_type(largest, integer) == low
    no_number = jnp.any(jnp.isnan(lax.reduce_sum(x, (x.ndim - 1,))))
    return lax.switch(jnp.where(no_number, 2, jnp.any(zero).astype(jnp.int32)), [lambda x: largest, with_zeros, row_by_row(by_rank)], x)


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
