"""Whether a value that others have in shares is exchanged, or computed once more: from what is whole, or in the shares that are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eqsat_mem.ir import Input, Rename, bits, children, folded, mask_of
from eqsat_mem.mesh.rows import read, with_table
from eqsat_mem.schedule.cost_model import arithmetic_s

if TYPE_CHECKING:
    from eqsat_mem.mesh.localise import Localiser

PATIENCE = 4.0
"""Computing a value once more may take so many times as long as gathering it, if devices exchange no more for it: none waits for another
then."""
EQUAL = 1e-6
"""The share by which seconds of equal exchanges may differ, added up in another order."""
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
    own, exchanged = again_s(at, t, shares, (PATIENCE * gathering, gathering * (1 + EQUAL)), DEPTH)
    return exchanged <= gathering * (1 + EQUAL) and own + exchanged <= PATIENCE * gathering


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


def again_s(at: Localiser, t: int, shares: int, most: tuple[float, float], depth: int) -> tuple[float, float]:
    """Seconds to compute a value in these shares from what is there, and those to exchange what is not; the walk ends where both together
    are more than the first of ``most``, or exchanges than the second."""
    term, missing = at.old.terms[t], at.natural(t) & ~shares
    if not missing or (t, shares) in at.given or (t, shares) in at.values:
        return 0.0, 0.0
    if isinstance(term, Rename):
        to = {j: i for i, j in term.pairs}
        named = mask_of(to.get(j, j) for j in bits(shares)) & at.old.free[term.arg]
        if any(i not in at.divided for i in bits(named)):
            return most[0] + 1.0, 0.0  # nobody has shares under that name
        return again_s(at, term.arg, named, most, depth)
    if isinstance(term, Input) or depth == 0:
        first = at.arrays.get(term.slot) if isinstance(term, Input) else None
        known = first is not None and any(s == first for s, _ in at.given)
        return 0.0, 0.0 if known else gathering_s(at, t, shares)
    left = once_more(at, t, shares)
    if left & (folded(term) | read(term)) or t in at.ex.exact:
        return most[0] + 1.0, 0.0
    extents = [index.extent // (at.local.devices.count(at.divided[i]) if left >> i & 1 else 1) for i, index in enumerate(at.old.indices)]
    seconds, exchanged = arithmetic_s(at.old, t, extents, at.backend), 0.0
    for c in children(term):
        if seconds + exchanged > most[0] or exchanged > most[1]:
            break
        own = left & at.old.free[c]
        again = again_s(at, c, own, (most[0] - seconds - exchanged, most[1] - exchanged), depth - 1)
        if at.natural(c) & ~own:
            again = min(again, (0.0, gathering_s(at, c, own)), key=sum)
        seconds, exchanged = seconds + again[0], exchanged + again[1]
    return seconds, exchanged
