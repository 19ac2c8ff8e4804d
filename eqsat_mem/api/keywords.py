"""Misspelt keywords: the option that somebody who wrote another name most likely meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import ParamSpec, TypeVar

ALIKE = 0.6
"""The least likeness of a name to one that is offered for it: a share of equal letters, and one for each word that no other name has."""
SHORTEST = 3
"""Letters of the shortest beginning of a word that stands for it: ``mem`` for ``memory``."""

P = ParamSpec("P")
R = TypeVar("R")


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that is most like another one, if any is.

    >>> nearest("limit", ["memory_limit", "max_rows", "max_seconds"])
    'memory_limit'
    >>> nearest("--max-memory", ["--memory-limit", "--max-planning-seconds"])
    '--memory-limit'
    >>> nearest("colour", ["memory_limit", "max_rows"])
    """
    asked = _words(name)

    def likeness(other: str) -> float:
        shared = [word for word in _words(other) if _has(asked, word)]
        return difflib.SequenceMatcher(None, name, other).ratio() + sum(1 / sum(_has(_words(k), word) for k in known) for word in shared)

    best = max(known, key=likeness, default=None)
    return best if best is not None and likeness(best) >= ALIKE else None


def _words(name: str) -> list[str]:
    return [word for word in name.strip("-").replace("-", "_").split("_") if word]


def _has(words: Sequence[str], word: str) -> bool:
    return any(len(one) >= SHORTEST and (word.startswith(one) or one.startswith(word)) for one in words)


def with_hints(fun: Callable[P, R]) -> Callable[P, R]:
    """The same function, which offers the nearest keyword where it is called with one that it has not, or with options without theirs."""
    parameters = inspect.signature(fun).parameters
    known = [name for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    positions = len(parameters) - len(known)

    @functools.wraps(fun)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > positions:
            raise TypeError(f"{fun.__name__} takes options as keywords, as in {fun.__name__}(f, {known[0]}={args[positions]!r}).")
        for name in kwargs:
            if name not in parameters:
                near = nearest(name, known)
                raise TypeError(f"{fun.__name__} has no option {name}" + (f": did you mean {near}?" if near else "."))
        return fun(*args, **kwargs)

    return checked
