"""The indices that are cut into tiles together: those of an image's rows, at every resolution that a network has it in."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from eqsat_mem.ir import Axis, Block, Program, Rename, bits, mask_of
from eqsat_mem.ir.ops import Window, block_op


@dataclass(frozen=True)
class Family:
    """Indices whose windows lie in one another.

    Attributes:
        base: the longest of them.
        rates: the elements of each for one of the base.
        nbytes: bytes of all values that have one of them.
    """

    base: int
    rates: Mapping[int, Fraction]
    nbytes: int

    @property
    def mask(self) -> int:
        return mask_of(self.rates)

    @property
    def unit(self) -> int:
        """The elements of the base of which each of the others has a whole number."""
        return math.lcm(*(rate.denominator for rate in self.rates.values()))


def windows(program: Program, term: Block) -> Sequence[Window]:
    """The windows of the first operand that an operation's elements read; none if they may read more of it."""
    row = block_op(term.call.prim.name)
    if row.windows is None or term.call.effects:
        return ()
    return row.windows.along(*shapes(program, term), term.call.params)


def is_aligned(term: Block) -> bool:
    """Whether an operation with windows reads its second operand at the places that its result has."""
    row = block_op(term.call.prim.name)
    return row.windows is not None and row.windows.aligned


def shapes(program: Program, term: Block) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The shapes of an operation's operands and results."""
    return [program.shape(axes) for axes in term.call.in_axes], [program.shape(axes) for axes in term.call.out_axes]


def axes_of(term: Block, window: Window) -> tuple[Axis, Axis]:
    """The axis that windows are read of, and the one whose elements read them."""
    side, k, a = window.other
    return term.call.in_axes[0][window.operand], (term.call.in_axes if side == "in" else term.call.out_axes)[k][a]


def families(program: Program) -> list[Family]:
    """The families of indices with windows of several elements, those of the most bytes first, then those of outer axes."""
    links: defaultdict[int, dict[int, Fraction]] = defaultdict(dict)
    wide: set[int] = set()
    every = list(_links(program))
    for i, j, rate, is_wide in every:
        links[i][j], links[j][i] = rate, 1 / rate
        wide |= {i, j} if is_wide else set()
    found, seen = [], 0
    for i in sorted(links):
        if seen >> i & 1:
            continue
        rates = _reached(links, i)
        seen |= mask_of(rates)
        if wide & rates.keys() and all(rates[k] == rates[j] * rate for j, k, rate, _ in every if j in rates):
            found.append(_family(program, rates))
    return sorted(found, key=lambda family: (-family.nbytes, family.base))


def _links(program: Program) -> Iterator[tuple[int, int, Fraction, bool]]:
    """Yield pairs of indices, the second with windows of the first and so many elements for one of it; and whether windows are wide."""
    for t in program.reachable():
        term = program.terms[t]
        if isinstance(term, Rename):
            yield from ((i, j, Fraction(1), False) for i, j in term.pairs)
        if not isinstance(term, Block):
            continue
        for window in windows(program, term):
            read, by = axes_of(term, window)
            if not read or not by:
                continue
            inner = [program.extent(mask_of(axis[1:])) for axis in (read, by)]
            yield read[0], by[0], Fraction(inner[0] * window.gap, inner[1] * window.step), window.span > 1
            if is_aligned(term) and (other := term.call.in_axes[1][window.operand]):
                yield other[0], by[0], Fraction(program.extent(mask_of(other[1:])), inner[1]), False


def _reached(links: Mapping[int, Mapping[int, Fraction]], start: int) -> dict[int, Fraction]:
    """The indices that belong to one, with their elements for one of it, as one way from the one to the other has them."""
    rates, waiting = {start: Fraction(1)}, [start]
    while waiting:
        i = waiting.pop()
        for j, rate in links[i].items():
            if j not in rates:
                rates[j] = rates[i] * rate
                waiting.append(j)
    return rates


def _family(program: Program, rates: Mapping[int, Fraction]) -> Family:
    base = max(rates, key=lambda i: (program.indices[i].extent, -i))
    mask = mask_of(rates)
    nbytes = sum(program.nbytes(t) for t in program.reachable() if program.free[t] & mask)
    return Family(base, {i: rates[i] / rates[base] for i in bits(mask)}, nbytes)
