"""The values of an image that are made in tiles, with the rows that they need beside these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from eqsat_mem.ir import Axis, Block, Map, Program, Rename, Take, axes_mask, bits, children, folded, mask_of
from eqsat_mem.ir.ops import Place, Window, block_op, parts_at
from eqsat_mem.transforms.tile_families import Family, axes_of, is_aligned, shapes, windows

SMALL = 1 / 8
"""The share of the largest value that has an index which is cut, up to which values are put together: those of low resolution."""

Sides = tuple[int, int]
"""How many elements a value has of a tile before its own, and after them."""
NONE: Sides = (0, 0)


class UnfitError(Exception):
    """A program that cannot be cut into tiles along a family of indices."""


@dataclass(frozen=True)
class Way:
    """The way in which an operation acts on tiles: along its window, or row by row where that is None.

    Tiles are a part of the axes at some ``places``, after so many indices of each; along windows, the second operand may be read at the
    places of the result (``aligned``).
    """

    window: Window | None
    places: Mapping[Place, int]
    aligned: bool


@dataclass
class Needs:
    """The values of a program that are made in tiles, by the rows that they need on either side; ``together`` are those among them that are
    put together, so that readers read of the whole.

    Raises:
        UnfitError: where a value has two of the indices that are cut.
    """

    program: Program
    family: Family
    sides: dict[int, Sides] = field(default_factory=dict)
    together: set[int] = field(default_factory=set)
    _ways: dict[int, Way | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for t in self.program.reachable():
            if self.cut(t).bit_count() > 1:
                raise UnfitError
            if self._is_made_in_tiles(t):
                self.sides[t] = NONE
                if self.program.nbytes(t) <= self._small and not isinstance(self.program.terms[t], Map | Rename):
                    self.together.add(t)
        for t in reversed(self.program.reachable()):
            self._need(t)

    def cut(self, t: int) -> int:
        """The index of a value that is cut, as a set."""
        return self.program.free[t] & self.family.mask

    def index(self, t: int) -> int:
        """The index of a value that is cut."""
        (found,) = bits(self.cut(t))
        return found

    def is_tiled(self, t: int) -> bool:
        """Whether what reads a value reads its tiles."""
        return t in self.sides and t not in self.together

    def reads_tiles(self, t: int) -> bool:
        """Whether a value is made of tiles."""
        return any(self.is_tiled(c) for c in children(self.program.terms[t]))

    @cached_property
    def _small(self) -> float:
        return SMALL * max(self.program.nbytes(t) for t in self.program.reachable() if self.cut(t))

    def _is_made_in_tiles(self, t: int) -> bool:
        """Whether a value is: one of tiles, unless it needs them together, and one that is large and has windows."""
        term = self.program.terms[t]
        if not self.cut(t) or not (self.reads_tiles(t) or (isinstance(term, Block) and self.program.nbytes(t) > self._small)):
            return False
        return self.way(t) is not None if isinstance(term, Block) else not (isinstance(term, Take) and term.index in self.family.rates)

    def way(self, t: int) -> Way | None:
        """The way in which an operation that binds axes acts on tiles; None where it needs what it reads together."""
        if t not in self._ways:
            term = self.program.terms[t]
            self._ways[t] = self._way(term) if isinstance(term, Block) else None
        return self._ways[t]

    def _way(self, term: Block) -> Way | None:
        call, mask = term.call, self.family.mask
        if call.effects or call.inside is not None or call.bodies:
            return None
        ways = [w for w in windows(self.program, term) if all(axis and mask >> axis[0] & 1 for axis in axes_of(term, w))]
        cut = mask_of(i for axes in (*call.in_axes, *call.out_axes) for i in bits(axes_mask(axes) & mask))
        if len(ways) > 1 or not (ways or (cut and not cut & ~call.pointwise)):
            return None
        window = ways[0] if ways else None
        aligned = window is not None and is_aligned(term)
        has = {("in", k) for k, a in enumerate(term.args) if self.cut(a)}
        if window is not None and ("in", 1) in has and window.other[0] == "out" and not aligned:
            return None
        if window is not None and window.other[0] == "in":  # the second operand may be the same in all rows, which are summed
            has.add(("in", 1))
        places = self._places(term, has | {("out", k) for k, axes in enumerate(call.out_axes) if axes_mask(axes) & mask})
        return None if places is None else Way(window, places, aligned)

    def _places(self, term: Block, has: set[tuple[str, int]]) -> Mapping[Place, int] | None:
        """The axes of all arrays that have tiles which these may be a part of: axes of one element, else of a batch."""
        row, call, (ins, outs) = block_op(term.call.prim.name), term.call, shapes(self.program, term)
        parts, fitting = parts_at(row, ins, outs, call.params), []
        arrays = {"in": call.in_axes, "out": call.out_axes}
        for group in (*row.pointwise(ins, outs, call.params), *row.shared(ins, outs, call.params)):
            places = {place: self._before(arrays[place[0]][place[1]][place[2]], parts.get(place, 1)) for place in group}
            axes = {arrays[side][k][a][before:] for (side, k, a), before in places.items()}
            if has <= {(side, k) for side, k, _ in group} and len(axes) == 1 and not axes_mask(tuple(axes)) & self.family.mask:
                fitting.append((len(next(iter(axes))), places))
        return min(fitting, key=lambda found: found[0])[1] if fitting else None

    def _before(self, axis: Axis, parts: int) -> int:
        """The indices of an axis that number its parts, which come first: how many there are."""
        return next(n for n in range(len(axis) + 1) if self.program.extent(mask_of(axis[:n])) == parts)

    def _need(self, t: int) -> None:
        """Have the operands of a value, whose readers have been seen, reach as far as it needs."""
        term, way = self.program.terms[t], self.way(t)
        if way is not None and way.aligned and t in self.sides:
            low, high = self.reach(t)
            assert way.window is not None, "an operation with windows"
            self.sides[t] = low * way.window.gap, high * way.window.gap
        for k, c in enumerate(children(term)):
            if self.is_tiled(c):
                low, high = self.of_operand(t, k)
                self.sides[c] = max(self.sides[c][0], low), max(self.sides[c][1], high)

    def of_operand(self, t: int, k: int) -> Sides:
        """The rows that a value needs of an operand on either side of a tile."""
        term, way, own = self.program.terms[t], self.way(t), self.sides.get(t, NONE)
        if isinstance(term, Block) and (way is None or (t not in self.sides and self.cut(t))):
            return NONE
        if way is None or way.window is None:
            return NONE if folded(term) & self.family.mask else own
        return self.reach(t) if k == 0 else own if way.aligned else NONE

    def reach(self, t: int) -> Sides:
        """The rows that the windows of a value reach on either side of a tile."""
        window, (low, high) = self.window(t), self.dilated(t)
        read, _ = axes_of(self._block(t), window)
        inner = self.program.extent(mask_of(read[1:]))
        first, last = low // window.gap, (high - 1) // window.gap + 1
        return max(-(-first // inner), 0), max(-(-last // inner), 0)

    def dilated(self, t: int) -> Sides:
        """The same in places of the dilated operand."""
        window = self.window(t)
        _, by = axes_of(self._block(t), window)
        inner = self.program.extent(mask_of(by[1:]))
        own = self.sides.get(t, NONE)
        return window.reach(own[0] * inner, own[1] * inner)

    def window(self, t: int) -> Window:
        """The window along the index that is cut of an operation that has one."""
        way = self.way(t)
        assert way is not None, "an operation on tiles"
        assert way.window is not None, "an operation with windows"
        return way.window

    def _block(self, t: int) -> Block:
        term = self.program.terms[t]
        assert isinstance(term, Block), "an operation that binds axes"
        return term
