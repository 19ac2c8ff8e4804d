"""Minimal sufficient sets of names, found by testing subsets.

Each name is first left out alone: those without which all the others do not suffice are needed. If the needed names do not suffice
together, a minimal set of the others is added by divide and conquer (QuickXplain, Junker 2004: adding k of n takes about 2 k log(n / k)
tests). This takes few tests, but assumes that a superset of a sufficient set suffices. That may be false for a bounded search with more
rules, so the result is tested, and if it does not suffice, names are removed from the full set one by one instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Enough = Callable[[frozenset[str]], bool]


def smallest(names: Sequence[str], enough: Enough) -> list[str]:
    """Return a minimal set of names that is ``enough``, in the order of ``names``.

    Without any one of them, either all other ``names`` or the others of the set are not enough.

    Args:
        names: the names; all of them together must be enough.
        enough: whether a set of names suffices. It is called for some sets more than once, so it should cache its results.

    >>> smallest("abcdef", lambda some: {"b", "e"} <= some)
    ['b', 'e']
    """
    every = frozenset(names)
    needed = frozenset(name for name in names if not enough(every - {name}))
    others = [name for name in names if name not in needed]
    chosen = needed.union(_fewest(needed, others, enough))
    if not enough(chosen):
        chosen = every
    for name in others:
        if name in chosen and enough(chosen - {name}):
            chosen -= {name}
    return [name for name in names if name in chosen]


def _fewest(given: frozenset[str], names: Sequence[str], enough: Enough) -> list[str]:
    """Return the names to be added to ``given``, which is enough together with all of ``names``."""
    if not names or enough(given):
        return []
    if len(names) == 1:
        return list(names)
    middle = len(names) // 2
    first = _fewest(given.union(names[middle:]), names[:middle], enough)
    return first + _fewest(given.union(first), names[middle:], enough)
