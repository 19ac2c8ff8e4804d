"""Loop trees: sequences of terms and loops, and the ways to walk and rebuild them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar


@dataclass(frozen=True, eq=False)
class Seq:
    """Steps in order: terms, loops and nested stretches.

    ``outs`` are the terms that are needed after it, ``reads`` those from outside whose arrays it reads.
    """

    steps: tuple[int | Loop | Seq, ...]
    outs: frozenset[int]
    reads: frozenset[int]


@dataclass(frozen=True, eq=False)
class Loop:
    """``body`` once per chunk of ``index``; ``folds`` are accumulated by their monoid, ``stacks`` written side by side.

    Those of ``rescaled`` are computed in the body with the level of the chunk (see
    :class:`eqsat_mem.egraph.online_folds.Rescaled`) and accumulated with the level of all chunks so far. Chunk sizes
    are not part of the tree: see :data:`Chunks`.
    """

    index: int
    body: Seq
    folds: tuple[int, ...]
    stacks: tuple[int, ...]
    rescaled: tuple[int, ...] = ()


Step = int | Loop | Seq
Chunks = Mapping[Loop, int]
"""The extent of one chunk of every loop in a tree."""
Path = tuple[int, ...]
"""Where a sequence stands in a tree: positions of steps, a loop standing for its body."""


Part = TypeVar("Part", Loop, Seq)


class Trees:
    """Trees as they were made first, so that what is known of their parts is found again for trees that are made alike later.

    Parts that stand in different loops stay apart, as do parts of one tree that are alike.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def first(self, seq: Seq) -> Seq:
        """The first tree that was like this one."""
        return self._seq(seq, (), Counter())

    def _seq(self, seq: Seq, around: tuple[Any, ...], seen: Counter[Any]) -> Seq:
        steps = tuple(step if isinstance(step, int) else self._part(step, around, seen) for step in seq.steps)
        return self._known_as((around, steps, seq.outs, seq.reads), seq if steps == seq.steps else replace(seq, steps=steps), seen)

    def _part(self, step: Loop | Seq, around: tuple[Any, ...], seen: Counter[Any]) -> Loop | Seq:
        if isinstance(step, Seq):
            return self._seq(step, around, seen)
        own = step.index, step.folds, step.stacks, step.rescaled
        body = self._seq(step.body, own, seen)
        return self._known_as((around, own, body), step if body is step.body else replace(step, body=body), seen)

    def _known_as(self, key: Any, part: Part, seen: Counter[Any]) -> Part:
        seen[key] += 1
        kept: Part = self._known.setdefault((key, seen[key]), part)
        return kept


def made(step: Step) -> set[int]:
    """The terms that a step defines for the steps after it (before ``outs`` restrict them)."""
    match step:
        case int():
            return {step}
        case Loop():
            return {*step.folds, *step.stacks}
        case Seq():
            return set().union(*(made(s) for s in step.steps))


def regions(seq: Seq, path: Path = ()) -> Iterator[tuple[Path, Seq]]:
    """Every sequence of a tree with its path: positions of steps, a loop standing for its body."""
    yield path, seq
    for k, step in enumerate(seq.steps):
        if isinstance(step, Loop):
            yield from regions(step.body, (*path, k))
        elif isinstance(step, Seq):
            yield from regions(step, (*path, k))


def loops(seq: Seq) -> Iterator[Loop]:
    """Every loop of a tree, outer before inner."""
    for step in seq.steps:
        if isinstance(step, Loop):
            yield step
            yield from loops(step.body)
        elif isinstance(step, Seq):
            yield from loops(step)


def at(seq: Seq, path: Path) -> Seq:
    """The sequence at a path."""
    for k in path:
        step = seq.steps[k]
        assert not isinstance(step, int)
        seq = step.body if isinstance(step, Loop) else step
    return seq


def with_region(seq: Seq, path: Path, new: Seq) -> Seq:
    """The tree with another sequence at ``path``."""
    if not path:
        return new
    step = seq.steps[path[0]]
    assert not isinstance(step, int)
    if isinstance(step, Loop):
        changed: Step = replace(step, body=with_region(step.body, path[1:], new))
    else:
        changed = with_region(step, path[1:], new)
    return replace(seq, steps=(*seq.steps[: path[0]], changed, *seq.steps[path[0] + 1 :]))


def enclosing(seq: Seq, path: Path) -> list[Loop]:
    """The loops around the sequence at a path, outermost first."""
    around: list[Loop] = []
    for k in path:
        step = seq.steps[k]
        assert not isinstance(step, int)
        if isinstance(step, Loop):
            around.append(step)
            seq = step.body
        else:
            seq = step
    return around
