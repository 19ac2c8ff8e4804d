"""Sums over concatenated axes as sums for each part: ``[a, b] @ [c, d].T = a @ c.T + b @ d.T``.

A concatenation holds all of its parts side by side, and what reads it needs it whole. Where it is only summed over, directly, in a product
or after elementwise operations, each part is summed by itself: the parts may be computed in chunks then, or never, as where they are
products themselves (the rows of a Jacobian, above all). Other operands are read at the positions of the part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.extend.core import primitives

from eqsat_mem.ir import Axis, Block, Dot, Fold, Iota, Literal, Map, Program, Rename, Take, Term, children, folded, mask_of, with_children
from eqsat_mem.passes import EVERY, PARTS, Pass

MOST_PARTS = 16
"""A concatenation of more parts stays one: the program would have each operation so many times."""
COMBINED = {"add": "add", "mul": "mul", "max": "max", "min": "min", "and": "and", "or": "or", "xor": "xor"}
"""The elementwise operation that joins folds of parts, by monoid."""


def with_parts(program: Program, passes: Collection[Pass] = EVERY) -> Program | None:
    """The program with folds and contractions over concatenated axes part by part, ``None`` where there are none."""
    return _Parting(program).run() if PARTS in passes else None


@dataclass(frozen=True)
class _Parts:
    """A value as its parts along an index: a term for each, which has the indices of the part's axis in place of it."""

    index: int
    terms: tuple[int, ...]


@dataclass
class _Parting:
    """One rewriting: the parts of the old program's terms, and for each concatenated index the axes of its parts."""

    old: Program
    parts: dict[int, _Parts] = field(default_factory=dict)
    axes: dict[int, tuple[Axis, ...]] = field(default_factory=dict)
    changed: bool = False

    def run(self) -> Program | None:
        new, _ = self.old.rewritten(self._rewritten)
        if not self.changed:
            return None
        new.passes |= {PARTS.name}
        return new

    def _rewritten(self, new: Program, t: int, ids: Mapping[int, int]) -> int | None:
        """The number of a fold over parts; of other terms that have parts, these are kept beside the terms themselves."""
        term = self.old.terms[t]
        if isinstance(term, Block):
            if term.call.prim is primitives.concatenate_p:
                self._concatenation(new, t, term, ids)
            return None
        over = folded(term)
        ways = [self.parts[c] for c in children(term) if c in self.parts]
        if not ways:
            return None
        known = next((parts for parts in ways if over >> parts.index & 1), ways[0])
        if isinstance(term, Rename):
            self._renamed(new, t, term, known)
            return None
        if not isinstance(term, Map | Fold | Dot):
            return None
        operands = [self._parts_of(new, c, known.index, ids) for c in children(term)]
        made = [self._part(new, term, over, known.index, k, [o[k] for o in operands]) for k in range(len(known.terms))]
        if not over >> known.index & 1:
            self.parts[t] = _Parts(known.index, tuple(made))
            return None
        self.changed = True
        op = COMBINED[term.monoid] if isinstance(term, Fold) else "add"
        total, *others = made
        for other in others:
            total = new.add(Map(term.dtype, op, (total, other)))
        return total

    def _part(self, new: Program, term: Term, over: int, index: int, k: int, operands: Sequence[int]) -> int:
        """An operation on the parts of its operands; a fold over the index is one over the axis of the part."""
        if over >> index & 1:
            over = over & ~(1 << index) | mask_of(self.axes[index][k])
        if isinstance(term, Fold):
            return new.add(Fold(term.dtype, term.monoid, over, operands[0])) if over else operands[0]
        if isinstance(term, Dot):
            if over or any(new.terms[o].dtype != term.dtype for o in operands):
                return new.add(Dot(term.dtype, over, operands[0], operands[1], term.precision))
            return new.add(Map(term.dtype, "mul", tuple(operands)))
        return new.add(with_children(term, tuple(operands)))

    def _parts_of(self, new: Program, t: int, index: int, ids: Mapping[int, int]) -> Sequence[int]:
        """The parts of any value along an index."""
        known = self.parts.get(t)
        if known is not None and known.index == index:
            return known.terms
        if not self.old.free[t] >> index & 1:
            return [ids[t]] * len(self.axes[index])
        found, start = [], 0
        for axis in self.axes[index]:
            found.append(new.add(Take(self.old.terms[t].dtype, index, _positions(new, start, axis), ids[t])))
            start += new.extent(mask_of(axis))
        return found

    def _concatenation(self, new: Program, t: int, term: Block, ids: Mapping[int, int]) -> None:
        call, d = term.call, term.call.params["dimension"]
        axis, parts = call.out_axes[0][d], [axes[d] for axes in call.in_axes]
        if len(axis) != 1 or len(parts) > MOST_PARTS or any(new.extent(mask_of(part)) == 0 for part in parts):
            return
        if (own := self._own(new, axis[0], parts)) is not None:
            renamed = [Rename(term.dtype, tuple(zip(part, to)), ids[a]) for a, part, to in zip(term.args, parts, own)]
            self.parts[t] = _Parts(axis[0], tuple(new.add(r) for r in renamed))

    def _renamed(self, new: Program, t: int, term: Rename, known: _Parts) -> None:
        """Parts under other names; where the index of the parts changes, so do those of their axes."""
        to = dict(term.pairs)
        before, index = self.axes[known.index], to.pop(known.index, known.index)
        own = self._own(new, index, before)
        if own is not None:
            pairs = [(*to.items(), *zip(part, after)) for part, after in zip(before, own)]
            self.parts[t] = _Parts(index, tuple(new.add(Rename(term.dtype, p, a)) for p, a in zip(pairs, known.terms)))

    def _own(self, new: Program, index: int, parts: Sequence[Axis]) -> tuple[Axis, ...] | None:
        """The axes of the parts of an index, of which no other value has an index; ``None`` where it has been cut otherwise."""
        extents = [[new.indices[i].extent for i in part] for part in parts]
        if index not in self.axes:
            self.axes[index] = tuple(tuple(new.new_index(new.indices[i].name, new.indices[i].extent) for i in part) for part in parts)
        own = self.axes[index]
        return own if extents == [[new.indices[i].extent for i in part] for part in own] else None


def _positions(new: Program, start: int, axis: Axis) -> int:
    """The positions of a part from ``start`` on, outermost index first."""
    counts = np.dtype(np.int32)

    def number(n: int) -> int:
        return new.add(Literal.of(n, counts))

    place, stride = number(start), new.extent(mask_of(axis))
    for i in axis:
        stride //= new.indices[i].extent
        along = new.add(Map(counts, "mul", (new.add(Iota(counts, i)), number(stride))))
        place = new.add(Map(counts, "add", (along, place)))
    return place
