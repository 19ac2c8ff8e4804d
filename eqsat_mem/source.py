"""The pieces that emitted source is put together from: expressions with named axes, scopes, names and numbers."""

from __future__ import annotations

import keyword
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eqsat_mem.ir import Axes
from eqsat_mem.ops.maps import atom

Layout = tuple[int, ...]
"""The index of each axis of an array."""
Fixed = tuple[tuple[int, int], ...]
"""Indices that are written out element by element, each with its position."""


@dataclass(frozen=True)
class Value:
    """An expression whose axes are ``layout``; ``atom`` if it needs no parentheses.

    ``picked`` is an array and the positions at which it is read, where that is the whole expression: ``x[:, 2]``.
    """

    text: str
    layout: Layout
    atom: bool = True
    picked: tuple[str, tuple[str, ...]] | None = None


@dataclass(eq=False)
class Scope:
    """Values by term, inside the body of a loop over ``index`` or (``index`` None) of the whole program."""

    parent: Scope | None = None
    index: int | None = None
    indent: str = "    "
    values: dict[Any, Value] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Region:
    """The terms that a sequence computes, how often each is used in it, and which of them leave it or are kept."""

    terms: frozenset[int]
    users: Counter[int]
    outs: frozenset[int]
    kept: frozenset[int]


def identifier(text: str, taken: set[str]) -> str:
    """A fresh Python name made from ``text``."""
    base = re.sub(r"\W+", "_", text).strip("_") or "x"
    if base[0].isdigit() or keyword.iskeyword(base):
        base = f"_{base}"
    unique, count = base, 2
    while unique in taken:
        unique, count = f"{base}_{count}", count + 1
    taken.add(unique)
    return unique


def shape_of(extents: Sequence[int], axes: Axes) -> tuple[int, ...]:
    return tuple(math.prod(extents[i] for i in axis) for axis in axes)


def number(value: Any) -> str:
    value = np.asarray(value).item()
    if isinstance(value, float) and not np.isfinite(value):
        return "jnp.nan" if value != value else "jnp.inf" if value > 0 else "-jnp.inf"
    return repr(value)


def wrap(value: Value) -> str:
    """The expression, in parentheses unless it binds tighter than any operator."""
    return value.text if value.atom else atom(value.text)


def letters(names: list[str]) -> list[str]:
    """One letter per index for einsum: its own name where that is one letter."""
    pool = [c for c in "ijklmnopqrstuvwxyzabcdefghABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in names]
    return [n if len(n) == 1 and n.isalpha() and n.isascii() else (pool.pop(0) if pool else "?") for n in names]
