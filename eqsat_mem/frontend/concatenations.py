"""Sums over concatenated axes as sums for each part: ``[a, b] @ [c, d].T = a @ c.T + b @ d.T``.

A concatenation holds all of its parts side by side, and what reads it needs it whole. Where it is only summed over, directly, in a product
or convolution, or after elementwise operations, each part is summed by itself: the parts may be computed in chunks then, or never, as where
they are products themselves (the rows of a Jacobian, above all). Other operands are read at the positions of the part.

What sums over other axes and is smaller than what it sums is put together of such sums, ``[a, b].T @ g = [a.T @ g, b.T @ g]``. Products of
which only the slices are read that stand for the parts, as gradients of concatenations are, are made slice by slice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.extend.core import primitives

from eqsat_mem.ir import (
    Axes,
    Axis,
    Block,
    Call,
    Dot,
    Fold,
    Iota,
    Literal,
    Map,
    Program,
    Rename,
    Take,
    Term,
    bits,
    call_with_indices,
    children,
    folded,
    mask_of,
    with_children,
)
from eqsat_mem.ir.ops import block_op
from eqsat_mem.ir.ops.blocks import no_parts, unchanged
from eqsat_mem.passes import EVERY, PARTS, Pass

MOST_PARTS = 16
"""A concatenation of more parts stays one: the program would have each operation so many times."""
COMBINED = {"add": "add", "mul": "mul", "max": "max", "min": "min", "and": "and", "or": "or", "xor": "xor"}
"""The elementwise operation that joins folds of parts, by monoid."""


def with_parts(program: Program, passes: Collection[Pass] = EVERY) -> Program | None:
    """The program with folds, contractions and convolutions over concatenated axes part by part, ``None`` where there are none."""
    return _Parting(program).run() if PARTS in passes else None


@dataclass(frozen=True)
class _Parts:
    """A value as its parts along an index: a term for each, which has the indices of the part's axis in place of it."""

    index: int
    terms: tuple[int, ...]


@dataclass
class _Parting:
    """One rewriting: the parts of the old program's terms, and for each concatenated index the axes of its parts; ``roots`` are the terms
    that are wanted whole."""

    old: Program
    parts: dict[int, _Parts] = field(default_factory=dict)
    axes: dict[int, tuple[Axis, ...]] = field(default_factory=dict)
    changed: bool = False
    roots: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.roots = frozenset(self.old.roots())

    def run(self) -> Program | None:
        new, _ = self.old.rewritten(self._rewritten)
        if not self.changed:
            return None
        new.passes |= {PARTS.name}
        return new

    def _rewritten(self, new: Program, t: int, ids: Mapping[int, int]) -> int | None:
        """The number of a fold over parts; of other terms that have parts, these are kept beside the terms themselves."""
        term = self.old.terms[t]
        if isinstance(term, Block) and term.call.prim is primitives.concatenate_p:
            self._concatenation(new, t, term, ids)
            return None
        if isinstance(term, Block) and term.call.prim.name in _CUTS:
            return self._piece(new, term, ids)
        over = folded(term)
        ways = [self.parts[c] for c in children(term) if c in self.parts]
        if not ways:
            return None
        known = next((parts for parts in ways if over >> parts.index & 1), ways[0])
        if isinstance(term, Rename):
            self._renamed(new, t, term, known)
            return None
        if not isinstance(term, Map | Fold | Dot) and not self._acts_on_parts(term, known.index):
            return None
        made = self._made_of_parts(new, term, over, known.index, ids)
        if not over >> known.index & 1:
            self.parts[t] = _Parts(known.index, tuple(made))
            is_smaller = self._size(t) < max(self._size(c) for c in children(term) if c in self.parts)
            return self._side_by_side(new, t, known.index, made) if is_smaller and not isinstance(term, Map) else None
        self.changed = True
        total, *others = made
        for other in others:
            total = new.add(Map(term.dtype, COMBINED[_monoid(term)], (total, other)))
        return total

    def _size(self, t: int) -> int:
        return self.old.extent(self.old.free[t])

    def _acts_on_parts(self, term: Term, index: int) -> bool:
        """Whether an operation that binds axes, on parts along an index, gives parts of its result or what combines to that."""
        if not isinstance(term, Block) or len(term.call.out_axes) > 1 or term.call.effects or term.call.bodies:
            return False
        call, row = term.call, block_op(term.call.prim.name)
        named = [axis for axes in (*call.in_axes, *call.out_axes) for axis in axes if index in axis]
        is_folded = call.folds >> index & 1 and row.monoid in COMBINED and not row.writes_into
        # an axis of one element is no index, of which parameters are not told, but for numbers of parts, which shapes tell
        least = 0 if row.resize is unchanged or row.parts is not no_parts else 1
        is_alone = all(axis == (index,) for axis in named) and all(least <= len(axis) <= 1 for axis in self.axes[index])
        return bool(is_alone and call.inside is None and (call.pointwise >> index & 1 or is_folded))

    def _made_of_parts(self, new: Program, term: Term, over: int, index: int, ids: Mapping[int, int]) -> list[int]:
        """An operation on each of the parts along an index."""
        operands = [self._parts_of(new, c, index, ids) for c in children(term)]
        return [self._part(new, term, over, index, k, [o[k] for o in operands]) for k in range(len(self.axes[index]))]

    def _side_by_side(self, new: Program, t: int, index: int, made: Sequence[int]) -> int:
        """A value put together of its parts along an index."""
        self.changed = True
        rest: Axes = tuple((i,) for i in bits(self.old.free[t]) if i != index)
        axes = tuple((axis, *rest) for axis in self.axes[index])
        dtype = self.old.terms[t].dtype
        whole: Axes = ((index,), *rest)
        call = Call(primitives.concatenate_p, {"dimension": 0}, axes, (whole,), (dtype,), mask_of(i for (i,) in rest))
        return new.add(Block(dtype, call, tuple(made), 0), self.old.source.get(t))

    def _piece(self, new: Program, term: Block, ids: Mapping[int, int]) -> int | None:
        """A slice as the part that it stands for, where its operand has parts or is made in parts."""
        (of,), found = term.args, self._which(new, term)
        if found is None:
            return None
        index, k, to = found
        parts = self._known_parts(new, of, index, ids, (Map, Dot, Block))
        if parts is None:
            return None
        self.changed = True
        return new.add(Rename(term.dtype, tuple(zip(self.axes[index][k], to)), parts[k]))

    def _known_parts(
        self, new: Program, t: int, index: int, ids: Mapping[int, int], kinds: tuple[type[Term], ...] = (Dot, Block)
    ) -> Sequence[int] | None:
        """The parts that a value has along an index; an operation of some kinds gets them where its value is read in parts alone: as
        slices, or by elementwise operations."""
        if (known := self.parts.get(t)) is not None:
            return known.terms if known.index == index else None
        term = self.old.terms[t]
        is_whole = t in self.roots or (isinstance(term, Block) and not self._acts_on_parts(term, index))
        if not isinstance(term, kinds) or is_whole or folded(term) >> index & 1:
            return None
        readers = [self.old.terms[r] for r in self.old.readers(t)]
        if not all(isinstance(r, Map) or (self._which(new, r) or (-1,))[0] == index for r in readers):
            return None
        made = tuple(self._made_of_parts(new, term, folded(term), index, ids))
        self.parts[t] = _Parts(index, made)
        return made

    def _which(self, new: Program, term: Term) -> tuple[int, int, Axis] | None:
        """The index whose parts are known, and which of them a slice is, with the axis that stands for it; None where it is none."""
        if not isinstance(term, Block) or term.call.prim.name not in _CUTS:
            return None
        cut = _CUTS[term.call.prim.name](term)
        if cut is None:
            return None
        d, start = cut
        before, after = term.call.in_axes[0][d], term.call.out_axes[term.out][d]
        index = before[0] if len(before) == 1 else -1
        for k, axis in enumerate(self.axes.get(index, ())):
            if not start and [new.indices[i].extent for i in axis] == [new.indices[i].extent for i in after]:
                return index, k, after
            start -= new.extent(mask_of(axis))
        return None

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
        if isinstance(term, Block):
            return new.add(Block(term.dtype, call_with_indices(term.call, {index: self.axes[index][k]}), tuple(operands), 0))
        return new.add(with_children(term, tuple(operands)))

    def _parts_of(self, new: Program, t: int, index: int, ids: Mapping[int, int]) -> Sequence[int]:
        """The parts of any value along an index."""
        if not self.old.free[t] >> index & 1:
            return [ids[t]] * len(self.axes[index])
        if (known := self._known_parts(new, t, index, ids)) is not None:
            return known
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


def _of_slice(term: Block) -> tuple[int, int] | None:
    """The one axis that is cut in steps of one, and where that starts."""
    call, params = term.call, term.call.params
    cut = [d for d, (before, after) in enumerate(zip(call.in_axes[0], call.out_axes[0], strict=True)) if before != after]
    steps = params["strides"] or (1,) * len(params["start_indices"])
    return (cut[0], params["start_indices"][cut[0]]) if len(cut) == 1 and steps[cut[0]] == 1 else None


def _of_split(term: Block) -> tuple[int, int]:
    """The axis that is split, and where this piece of it starts."""
    params = term.call.params
    return params["axis"], sum(params["sizes"][: term.out])


_CUTS: Mapping[str, Callable[[Block], tuple[int, int] | None]] = {"slice": _of_slice, "split": _of_split}
"""What reads pieces of an axis one after the other."""


def _monoid(term: Term) -> str:
    """The monoid by which a term folds."""
    match term:
        case Fold():
            return term.monoid
        case Block():
            return block_op(term.call.prim.name).monoid or "add"
        case _:
            return "add"


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
