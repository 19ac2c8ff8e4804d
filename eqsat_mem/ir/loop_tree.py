"""Loop trees: sequences of terms and loops, and functions to traverse and rebuild them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar


@dataclass(frozen=True, eq=False)
class Seq:
    """A sequence of steps: terms, loops and nested sequences.

    Attributes:
        steps: the steps in order.
        outs: the terms computed here that are needed afterwards.
        reads: the terms computed elsewhere whose arrays it reads.
    """

    steps: tuple[int | Loop | Seq, ...]
    outs: frozenset[int]
    reads: frozenset[int]

    @cached_property
    def made(self) -> frozenset[int]:
        """The terms that its steps compute (:func:`made`)."""
        return frozenset().union(*([step] if isinstance(step, int) else made(step) for step in self.steps))


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop that runs its body once per chunk of an index. Chunk sizes are not part of the tree: see :data:`Chunks`.

    Attributes:
        index: the number of the index.
        body: the body.
        folds: the terms whose chunks are accumulated by their monoid.
        stacks: the terms whose chunks are written next to each other into a whole array.
        rescaled: those of ``folds`` that the body computes with the level of the chunk (see
            :class:`eqsat_mem.egraph.online_folds.Rescaled`) and that are accumulated with the level of all chunks so far.
    """

    index: int
    body: Seq
    folds: tuple[int, ...]
    stacks: tuple[int, ...]
    rescaled: tuple[int, ...] = ()


Step = int | Loop | Seq
Chunks = Mapping[Loop, int]
"""The chunk size of every loop in a tree."""
Path = tuple[int, ...]
"""The place of a sequence in a tree: the positions of the steps that lead to it, where a loop's position leads to its body."""


Part = TypeVar("Part", Loop, Seq)


class Trees:
    """Hash-consing of trees: equal trees made later share the objects of the first, and thereby all results cached for them.

    Equal parts of different loops are not shared, and neither are equal parts of one tree.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def first(self, seq: Seq) -> Seq:
        """Return the first tree that was equal to this one."""
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


def made(step: Step) -> frozenset[int]:
    """Return the terms that a step computes for the steps after it, before ``outs`` restricts them."""
    match step:
        case int():
            return frozenset((step,))
        case Loop():
            return frozenset((*step.folds, *step.stacks))
        case Seq():
            return step.made


def walk_regions(seq: Seq, path: Path = ()) -> Iterator[tuple[Path, Seq]]:
    """Yield every sequence of a tree with its path, outer before inner."""
    yield path, seq
    for k, step in enumerate(seq.steps):
        if isinstance(step, Loop):
            yield from walk_regions(step.body, (*path, k))
        elif isinstance(step, Seq):
            yield from walk_regions(step, (*path, k))


def loops(seq: Seq) -> Iterator[Loop]:
    """Yield every loop of a tree, outer before inner."""
    for step in seq.steps:
        if isinstance(step, Loop):
            yield step
            yield from loops(step.body)
        elif isinstance(step, Seq):
            yield from loops(step)


def at(seq: Seq, path: Path) -> Seq:
    """Return the sequence at a path."""
    for k in path:
        step = seq.steps[k]
        assert not isinstance(step, int)
        seq = step.body if isinstance(step, Loop) else step
    return seq


def with_region(seq: Seq, path: Path, new: Seq) -> Seq:
    """Return the tree with the sequence at ``path`` replaced by ``new``."""
    if not path:
        return new
    step = seq.steps[path[0]]
    assert not isinstance(step, int)
    if isinstance(step, Loop):
        changed: Step = replace(step, body=with_region(step.body, path[1:], new))
    else:
        changed = with_region(step, path[1:], new)
    return replace(seq, steps=(*seq.steps[: path[0]], changed, *seq.steps[path[0] + 1 :]))


def dissolved(seq: Seq, loop: Loop) -> Seq | None:
    """Return the tree in which the body of ``loop`` runs once, for all of its index; None if it computes what is computed beside it."""
    steps: list[Step] = []
    for step in seq.steps:
        inside = step.body if isinstance(step, Loop) else step
        if step is loop:
            inner = tuple(replace(s) if isinstance(s, Seq) else s for s in loop.body.steps)  # not the stretches of a loop any more
            steps.append(replace(loop.body, steps=inner, outs=made(loop)))
        elif isinstance(inside, int):
            steps.append(inside)
        else:
            new = dissolved(inside, loop)
            if new is None:
                return None
            steps.append(step if new is inside else replace(step, body=new) if isinstance(step, Loop) else new)
    if all(new is old for new, old in zip(steps, seq.steps)):
        return seq
    changed = _joined(steps, seq)
    return changed if max(Counter(_made_beside(changed)).values(), default=1) == 1 else None


def _joined(steps: list[Step], whole: Seq) -> Seq:
    """Return ``whole`` with other steps, sequences that follow one another as one: compilers order their terms together."""
    if any(isinstance(step, int) for step in steps):
        return replace(whole, steps=tuple(inner for step in steps for inner in (step.steps if isinstance(step, Seq) else (step,))))
    joined: list[Step] = []
    for step in steps:
        if joined and isinstance(step, Seq) and isinstance(before := joined[-1], Seq):
            joined[-1] = Seq(before.steps + step.steps, before.outs | step.outs, before.reads | step.reads - made(before))
        else:
            joined.append(step)
    return with_outs(joined, whole)


def with_outs(steps: list[Step], whole: Seq) -> Seq:
    """Return ``whole`` with other steps, where the ``outs`` of nested sequences are exactly the terms that later steps read."""
    needed = set(whole.outs)
    done: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, Seq):
            step = replace(step, outs=made(step) & needed)
            needed |= step.reads
        elif isinstance(step, Loop):
            needed |= step.body.reads
        done.append(step)
    return replace(whole, steps=tuple(reversed(done)))


def _made_beside(seq: Seq) -> Iterator[int]:
    """Yield the terms that the steps of a sequence compute outside of loops, and those that its loops make."""
    for step in seq.steps:
        yield from _made_beside(step) if isinstance(step, Seq) else made(step)


def enclosing(seq: Seq, path: Path) -> list[Loop]:
    """Return the loops around the sequence at a path, outermost first."""
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
