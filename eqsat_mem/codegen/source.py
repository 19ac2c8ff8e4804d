"""The pieces that emitted source is put together from: expressions with named axes, scopes, names and numbers."""

from __future__ import annotations

import builtins
import keyword
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqsat_mem.ir import Axes, shortest
from eqsat_mem.ir.ops import is_key, value_text
from eqsat_mem.ir.ops.elementwise import atom, dtype_text

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
    """Values by term and results by call, inside the body of a loop over ``index`` or (``index`` None) of the whole program.

    ``shifts`` are the terms that subtract a level, which stands for a chunk only, and that level; ``means`` those that are the mean of a
    chunk here, and the indices that they are means over. ``reads`` are the names of what is read here, by how it is read. ``chunk``
    is how many positions of the index one turn computes, one that is left over aside. Of indices ``at`` one position, axes here have
    one element. ``sums`` are the names of what the loop has folded so far.
    """

    parent: Scope | None = None
    index: int | None = None
    indent: str = "    "
    values: dict[Any, Value] = field(default_factory=dict)
    calls: dict[Any, list[str]] = field(default_factory=dict)
    reads: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    shifts: dict[int, int] = field(default_factory=dict)
    means: dict[int, int] = field(default_factory=dict)
    chunk: int = 0
    at: frozenset[int] = frozenset()
    sums: Mapping[int, str] = field(default_factory=dict)

    def around(self) -> Iterator[Scope]:
        """This scope and those around it, innermost first."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent


@dataclass
class SourceModule:
    """The state that all functions of one emitted source share.

    Attributes:
        taken: names in use, and how many were made from each.
        namespace: the values that the source names but does not define: large closed-over arrays, and operations without source.
        helpers: functions of ours that the source calls, which it carries with it.
        constants: the name of each closed-over array.
        small: lines that come first: closed-over arrays that are written out, functions of the user's operations.
        calls: the name of each call without source.
        functions: the name of each function of the user's, by operation and types of operands.
        once: the name of a one that XLA does not know; empty where nothing asks for it.
    """

    taken: dict[str, int]
    namespace: dict[str, Any] = field(default_factory=dict)
    helpers: dict[str, Callable[..., Any]] = field(default_factory=dict)
    constants: dict[int, str] = field(default_factory=dict)
    small: list[str] = field(default_factory=list)
    calls: dict[int, str] = field(default_factory=dict)
    functions: dict[Any, str] = field(default_factory=dict)
    once: str = ""


@dataclass(frozen=True)
class Region:
    """The terms that a sequence computes, how often each is used in it, which of them leave it or are kept, source around those where
    fusions end, and which are taken ``apart``: made for one element of an unrolled fold at a time. ``hidden`` are reads (the term, its
    operand) of values that the compiler must not know for what another kernel reads, by the kernel that reads. ``sums`` are the names of
    those that blocks write into."""

    terms: frozenset[int]
    users: Counter[int]
    outs: frozenset[int]
    kept: frozenset[int]
    ends: Mapping[int, str]
    apart: frozenset[int] = frozenset()
    hidden: Mapping[tuple[int, int], int] = field(default_factory=dict)
    sums: Mapping[int, str] = field(default_factory=dict)


def identifier(text: str, taken: dict[str, int]) -> str:
    """A fresh Python name made from ``text``, none of Python's own; ``taken`` counts how many names were made from each."""
    base = re.sub(r"_*\W+_*", "_", text).strip("_") or "x"
    if base[0].isdigit() or keyword.iskeyword(base):
        base = f"_{base}"
    unique, count = f"{base}_" if hasattr(builtins, base) else base, taken.get(base, 1)
    while unique in taken:
        count += 1
        unique = f"{base}_{count}"
    taken[base] = count
    taken.setdefault(unique, 1)
    return unique


def tuple_text(items: Sequence[str]) -> str:
    return "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"


def shape_of(extents: Sequence[int], axes: Axes) -> tuple[int, ...]:
    return tuple(math.prod(extents[i] for i in axis) for axis in axes)


def number(value: Any, dtype: Any = None) -> str:
    """A number, of a dtype or of its own, in as few digits as float32 or float64 needs."""
    return value_text(shortest(value, dtype))


SMALL = 16
"""Elements of a closed-over array that is written out."""


def array_text(value: Any) -> str | None:
    """Source of a small array of numbers or keys; ``None`` where it is large, or known only while something is traced."""
    if isinstance(value, jax.core.Tracer) or np.size(value) > SMALL:
        return None
    if is_key(value.dtype):
        text = array_text(jax.random.key_data(value))
        return None if text is None else f"jax.random.wrap_key_data({text}, impl={str(jax.random.key_impl(value))!r})"
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" and array.dtype != jnp.bfloat16:
        return None
    numbers = array.reshape(-1).tolist()
    if 0 in array.shape or not all(map(math.isfinite, numbers)):
        return None
    return f"jnp.array({array.tolist()}, {dtype_text(array.dtype)})"


def wrap(value: Value) -> str:
    """The expression, in parentheses unless it binds tighter than any operator."""
    return value.text if value.atom else atom(value.text)


LETTERS = "ijklmnopqrstuvwxyzabcdefghABCDEFGHIJKLMNOPQRSTUVWXYZ"


def letters(names: list[str]) -> list[str]:
    """One letter per index for einsum: its own name where that is one letter, none where letters have run out."""
    pool = [c for c in LETTERS if c not in names]
    return [n if len(n) == 1 and n.isalpha() and n.isascii() else (pool.pop(0) if pool else "") for n in names]


def spelled(layouts: Sequence[Sequence[int]], letter_of: Sequence[str], ascending: Sequence[int] = ()) -> list[str]:
    """Layouts in letters; an index that has none takes one that nothing else in these layouts has.

    Indices that are to be ``ascending`` have their letters among them in the order of the alphabet.
    """
    used = dict.fromkeys(i for layout in layouts for i in layout)
    spare = iter(sorted(set(LETTERS) - {letter_of[i] for i in used}))
    own = {i: letter_of[i] or next(spare) for i in used}
    own |= zip(ascending, sorted(own[i] for i in ascending))
    return ["".join(own[i] for i in layout) for layout in layouts]
