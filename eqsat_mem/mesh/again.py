"""Whether a value that others have in shares is exchanged, or computed once more: from what is whole, or in the shares that are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eqsat_mem.ir import Input, Rename, bits, children, folded, mask_of
from eqsat_mem.mesh.rows import read, with_table
from eqsat_mem.schedule.cost_model import arithmetic_s

if TYPE_CHECKING:
    from eqsat_mem.mesh.localise import Localiser

PATIENCE = 4.0
"""Computing a value once more may take so many times as long as gathering it: no device waits for another then."""
DEPTH = 8
"""A value that is computed once more is at most so many operations away from values that are there whole."""


def is_made_again(at: Localiser, t: int, shares: int) -> bool:
    """Whether a value that is computed in more shares than these had better be computed once more than gathered.

    What a walk before has gathered stays gathered: others count on it. So does what is compared with values selected from it, which would
    have other bits.
    """
    if (t, shares) in at.given or t in at.ex.exact:
        return False
    gathering = gathering_s(at, t, shares)
    return again_s(at, t, shares, PATIENCE * gathering, DEPTH) <= PATIENCE * gathering


def once_more(at: Localiser, t: int, shares: int) -> int:
    """The indices of which a value that is wanted in these shares is computed in shares, if it is computed once more for that."""
    have = at.natural(t)
    kept = at.computed(t) & ~(have & ~shares)
    taken = {name for i in bits(kept) for name in at.divided[i]}
    for i in bits(shares & ~have & at.able(t) & at.old.free[t]):
        if not taken.intersection(at.divided[i]):
            taken.update(at.divided[i])
            kept |= 1 << i
    return with_table(at, t, kept)


def gathering_s(at: Localiser, t: int, shares: int) -> float:
    """Seconds to gather the shares of a value that others have."""
    missing, total, seconds = at.natural(t) & ~shares, float(at.old.nbytes(t)), 0.0
    for i in bits(shares):
        total /= at.local.devices.count(at.divided[i])
    for i in bits(missing):
        count = at.local.devices.count(at.divided[i])
        seconds += at.backend.exchange_s("gather_shares", total * (count - 1) / count, at.divided[i], at.local.devices)
    return seconds


def again_s(at: Localiser, t: int, shares: int, most: float, depth: int) -> float:
    """Seconds to compute a value in these shares from what is there, or more than ``most``."""
    term, missing = at.old.terms[t], at.natural(t) & ~shares
    if not missing or (t, shares) in at.given or (t, shares) in at.values:
        return 0.0
    if isinstance(term, Rename):
        to = {j: i for i, j in term.pairs}
        return again_s(at, term.arg, mask_of(to.get(j, j) for j in bits(shares)) & at.old.free[term.arg], most, depth)
    if isinstance(term, Input) or depth == 0:
        first = at.arrays.get(term.slot) if isinstance(term, Input) else None
        known = first is not None and any(s == first for s, _ in at.given)
        return 0.0 if known else gathering_s(at, t, shares)
    left = once_more(at, t, shares)
    if left & (folded(term) | read(term)) or t in at.ex.exact:
        return most + 1.0
    extents = [index.extent // (at.local.devices.count(at.divided[i]) if left >> i & 1 else 1) for i, index in enumerate(at.old.indices)]
    seconds = arithmetic_s(at.old, t, extents, at.backend)
    for c in children(term):
        if seconds > most:
            break
        own = left & at.old.free[c]
        again = again_s(at, c, own, most - seconds, depth - 1)
        seconds += min(again, gathering_s(at, c, own)) if at.natural(c) & ~own else again
    return seconds
