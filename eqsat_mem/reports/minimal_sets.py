"""The names that something needs, found by leaving names out and asking again.

Each name is left out alone: those without which all the others do not suffice are needed. If these do not suffice together, the fewest of
the others are added by halving (Junker's QuickXplain: to add k of n takes about 2 k log(n / k) questions). That asks for little, but
supposes that more names never suffice less. A bounded search can be led astray by more rules, so the answer is checked, and where it does
not suffice names are dropped one by one instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Enough = Callable[[frozenset[str]], bool]


def smallest(names: Sequence[str], enough: Enough) -> list[str]:
    """Names that are ``enough`` together, in the order of ``names``: each is missed if it is left out, of all names or of these.

    All ``names`` together must be enough. ``enough`` is asked for some sets more than once and should remember.

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
    """The names that ``given`` lacks, given that with all of ``names`` it is enough."""
    if not names or enough(given):
        return []
    if len(names) == 1:
        return list(names)
    middle = len(names) // 2
    first = _fewest(given.union(names[middle:]), names[:middle], enough)
    return first + _fewest(given.union(first), names[middle:], enough)
