"""Names of indices, and the order in which a program lists them."""

from __future__ import annotations

from collections.abc import Sequence

_LETTERS = "ijklmnopqrstuvwxyzabcdefgh"


def index_names(count: int) -> list[str]:
    """``i, j, k ... h, i2, j2 ...``"""
    return [_LETTERS[n % 26] + (str(n // 26 + 1) if n >= 26 else "") for n in range(count)]


def index_order(indices: Sequence[int], layouts: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
    """The indices such that outer axes come before inner ones, in the largest arrays above all.

    ``layouts`` are ``(bytes, indices from the outermost axis to the innermost)``. Layouts are obeyed from the heaviest
    to the lightest, each as far as the heavier ones allow; ties keep the order of ``indices``.
    """
    weight: dict[tuple[int, ...], int] = {}
    for size, chain in layouts:
        key = tuple(chain)
        if len(key) > 1:
            weight[key] = weight.get(key, 0) + size
    before = dict.fromkeys(indices, 0)
    after = dict.fromkeys(indices, 0)
    bit = {v: 1 << k for k, v in enumerate(indices)}
    for chain in sorted(weight, key=lambda c: -weight[c]):
        for k, u in enumerate(chain):
            for v in chain[k + 1 :]:
                if not (before[v] & bit[u] or after[v] & bit[u]):
                    _precede(u, v, before, after, bit, indices)
    first = {v: k for k, v in enumerate(indices)}
    return sorted(indices, key=lambda v: (before[v].bit_count(), first[v]))


def _precede(u: int, v: int, before: dict[int, int], after: dict[int, int], bit: dict[int, int], indices: Sequence[int]) -> None:
    """Put ``u`` before ``v`` and keep both relations transitive."""
    sources, targets = before[u] | bit[u], after[v] | bit[v]
    for w in _members(targets, indices):
        before[w] |= sources
    for w in _members(sources, indices):
        after[w] |= targets


def _members(mask: int, indices: Sequence[int]) -> list[int]:
    out = []
    while mask:
        low = mask & -mask
        out.append(indices[low.bit_length() - 1])
        mask ^= low
    return out
