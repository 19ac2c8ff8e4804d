"""Equal blocks of a flat jaxpr that follow one another: the layers of a network, the steps of a loop that Python unrolled.

Blocks are equal if their equations are, one by one: primitives, parameters, shapes and dtypes, and the places in the block, or in blocks
before, where operands were made. Operands from outside may differ, literals among them. Equations of the first block that all others
share (a mask) come before it: they are moved, which no order of equations forbids. Time and memory are n log n in the equations.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from eqsat_mem.frontend.fingerprint import SMALL_BYTES, Same, fingerprint
from eqsat_mem.frontend.flat_jaxpr import Equation, Flat
from eqsat_mem.ir import itemsize
from eqsat_mem.ir.jaxprs import IMPURE, is_jaxpr

LEAST_BLOCKS = 4
"""Fewer equal blocks are left as they are."""
LEAST_SAVED = 48
"""Blocks are left as they are where one in place of all has not so many equations less: such programs are planned fast anyway."""
MOST_LAG = 3
"""Blocks read values of at most so many blocks before."""
POSITIONS = {"slice": ("start_indices", "limit_indices")}
"""Parameters that may differ from block to block, by primitive: the equation is then evaluated outside of the blocks."""
SPREADING = ("pad",)
"""Primitives by which the gradient of a slice is added to that of the whole array: they are moved after the blocks."""

Labels = Mapping[Equation, tuple[int, int]]
"""Numbers of equations by which they are compared."""


@dataclass(frozen=True)
class Made:
    """An operand that is result ``out`` of equation ``offset`` of a block: of the same block, or of the one ``lag`` blocks before.

    ``first`` has the values that the first ``lag`` blocks read instead.
    """

    offset: int
    out: int
    lag: int = 0
    first: tuple[int, ...] = ()


@dataclass(frozen=True)
class Given:
    """An operand from outside of the blocks: the value that each block reads."""

    values: tuple[int, ...]

    @property
    def is_same(self) -> bool:
        """Whether all blocks read one value."""
        return len(set(self.values)) == 1


@dataclass(frozen=True, eq=False)
class Chain:
    """``count`` equal blocks of ``period`` equations, which begin at equation ``start``.

    Attributes:
        operands: where each equation of a block has its operands from; None for an equation that is evaluated outside of the blocks.
    """

    start: int
    period: int
    count: int
    operands: tuple[tuple[Made | Given, ...] | None, ...]

    @property
    def end(self) -> int:
        return self.start + self.period * self.count

    @property
    def saved(self) -> int:
        """The number of equations less where one block stands in place of all."""
        return self.period * (self.count - 1)

    def given(self) -> list[Given]:
        """The operands from outside, each once, in order."""
        return list(dict.fromkeys(role for roles in self.operands for role in roles or () if isinstance(role, Given)))

    def places(self) -> Iterator[tuple[int, int]]:
        """The equations of all blocks in order: where each stands in its block, and in the jaxpr."""
        return ((k % self.period, self.start + k) for k in range(self.period * self.count))

    def carried(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The results that blocks read of blocks before, and the values that the first blocks read instead, the earliest first."""
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for role in (role for roles in self.operands for role in roles or ()):
            if isinstance(role, Made) and len(role.first) > len(found.get((role.offset, role.out), ())):
                found[role.offset, role.out] = role.first
        return found


def with_chains(flat: Flat) -> tuple[Flat, list[Chain]]:
    """A flat jaxpr with its equal blocks one after the other, and the chains of them in order; none overlap."""
    labels = _labels(flat)  # those of the same equations in another order too
    if any(eqn.effects for eqn in flat.equations):  # whose order is part of the program
        return flat, _Search(flat, labels).chains(LEAST_BLOCKS)
    found = _with_shared_first(flat, labels)
    if any(eqn.prim.name in SPREADING for eqn in flat.equations):
        found = max(found, _with_shared_first(_last(flat, SPREADING), labels), key=_saved)
    return found


def _with_shared_first(flat: Flat, labels: Labels) -> tuple[Flat, list[Chain]]:
    found = _Search(flat, labels).chains(LEAST_BLOCKS - 1)  # the first of which may have what all others share
    moved = _first(flat, {role.values[0] for chain in found for role in chain.given() if role.is_same})
    ways = [(one, _Search(one, labels).chains(LEAST_BLOCKS)) for one in ((moved, flat) if found else ())]
    return max(ways, key=_saved, default=(flat, []))


def _saved(found: tuple[Flat, list[Chain]]) -> int:
    return sum(chain.saved for chain in found[1] if chain.carried())


def _last(flat: Flat, names: Collection[str]) -> Flat:
    """The same with the equations of some primitives, and all that depends on them, after all others."""
    late: set[int] = set()
    for eqn in flat.equations:
        if eqn.prim.name in names or not late.isdisjoint(eqn.ins):
            late.update(eqn.outs)
    return replace(flat, equations=sorted(flat.equations, key=lambda eqn: not late.isdisjoint(eqn.outs)))


def _first(flat: Flat, values: set[int]) -> Flat:
    """The same with the equations that make some values, and all before them that they need, in front of all others."""
    needed, front = set(values), set()
    for k in range(len(flat.equations) - 1, -1, -1):
        if not needed.isdisjoint(flat.equations[k].outs):
            needed.update(flat.equations[k].ins)
            front.add(k)
    order = sorted(range(len(flat.equations)), key=lambda k: k not in front)
    return replace(flat, equations=[flat.equations[k] for k in order])


class _Search:
    """The search for chains in one flat jaxpr."""

    def __init__(self, flat: Flat, labels: Labels):
        self.flat = flat
        size = len(flat.shapes)
        self.producer, self.place = np.full(size, -1), np.zeros(size, int)
        for k, eqn in enumerate(flat.equations):
            for out, v in enumerate(eqn.outs):
                self.producer[v], self.place[v] = k, out
        self.alike, self.exact = np.array([labels[eqn] for eqn in flat.equations], np.int64).reshape(-1, 2).T

    def chains(self, least: int) -> list[Chain]:
        """Those of at least so many blocks, found from the one with the most equations saved on; in order."""
        taken = np.zeros(len(self.flat.equations), bool)
        found = []
        for start, end, period in sorted(_runs(self.alike), key=lambda run: (run[2] - (run[1] - run[0]), run)):
            start, end = _free(taken, start, end)
            if (end - start) // period < least or end - start - period < LEAST_SAVED:
                continue
            chain = self.best(start, end, period, least)
            if chain is not None and chain.count >= least and chain.saved >= LEAST_SAVED:
                taken[chain.start : chain.end] = True
                found.append(chain)
        return self.aligned(sorted(found, key=lambda chain: chain.start))

    def aligned(self, chains: list[Chain]) -> list[Chain]:
        """The same with fewer blocks of those of which another chain reads a part: layers without a gradient stand before the others."""
        for reader in reversed(chains):
            for k, maker in enumerate(chains):
                part = self.part_read(reader, maker)
                if part is not None and LEAST_BLOCKS <= part[1] - part[0] < maker.count:
                    start, period = maker.start + part[0] * maker.period, maker.period
                    trimmed = self._chain(start, period, part[1] - part[0])
                    if trimmed is not None and trimmed.count == part[1] - part[0]:
                        chains = [*chains[:k], trimmed, *chains[k + 1 :]]
        return chains

    def part_read(self, reader: Chain, maker: Chain) -> tuple[int, int] | None:
        """The blocks of one chain from the first to the last of which the blocks of another read most bytes, one each, in order."""
        parts: dict[tuple[int, int], int] = {}
        carried = maker.carried()
        for role in (role for role in reader.given() if not role.is_same):
            makers = self.producer[list(role.values)] - maker.start
            blocks, offsets = makers // maker.period, makers % maker.period
            steps = np.diff(blocks)
            one_each = (makers >= 0).all() and (makers < maker.end - maker.start).all() and (offsets == offsets[0]).all()
            if one_each and abs(steps[0]) == 1 and (steps == steps[0]).all():
                own = int(offsets[0]), int(self.place[role.values[0]])
                part = int(blocks.min()), int(blocks.max()) + 1
                parts[part] = parts.get(part, 0) + (0 if own in carried else self.nbytes(role.values[0])) + 1
        return max(parts, key=lambda part: parts[part], default=None)

    def nbytes(self, v: int) -> int:
        """The bytes of a value."""
        return math.prod(self.flat.shapes[v]) * itemsize(self.flat.dtypes[v])

    def best(self, start: int, end: int, period: int, least: int) -> Chain | None:
        """The chain in a run of equations alike whose blocks begin where least is carried from one to the next."""
        chain = self.chain(start, period, (end - start) // period)
        if chain is None:
            return None
        start, end = chain.start, end if end - chain.end < period else chain.end
        cut = self.cut_bytes(chain)
        most = (end - start) // period
        turns = [turn for turn in range(min(period, end - start - period)) if (end - start - turn) // period >= max(most - 1, least)]
        for turn in sorted(turns, key=lambda turn: (cut[turn], -((end - start - turn) // period), turn)):
            turned = self.chain(start + turn, period, (end - start - turn) // period)
            if turned is not None and turned.count >= chain.count - 1:
                return turned
        return chain

    def cut_bytes(self, chain: Chain) -> np.ndarray:
        """The bytes that are alive between two blocks, for blocks that begin at each offset."""
        alive: dict[tuple[int, int], int] = {}
        for k, roles in enumerate(chain.operands):
            for role in roles or ():
                if isinstance(role, Made):
                    key = role.offset, role.out
                    alive[key] = max(alive.get(key, 0), role.lag * chain.period + k - role.offset)
        cut = np.zeros(chain.period)
        for (offset, out), distance in alive.items():
            nbytes = self.nbytes(self.flat.equations[chain.start + offset].outs[out])
            whole, rest = divmod(distance, chain.period)
            cut += whole * nbytes
            cut[[(offset + 1 + k) % chain.period for k in range(rest)]] += nbytes
        return cut

    def chain(self, start: int, period: int, count: int) -> Chain | None:
        """The longest chain of consecutive blocks among some that are alike; without the first, if that is what differs."""
        found = self._chain(start, period, count)
        if found is None or found.count < min(count - 1, LEAST_BLOCKS - 1):
            found = self._chain(start + period, period, count - 1)
        return found

    def _chain(self, start: int, period: int, count: int) -> Chain | None:
        equations = self.flat.equations
        widths = [len(eqn.ins) for eqn in equations[start : start + period]]
        bounds = np.cumsum([0, *widths])
        blocks = [equations[start + b * period : start + (b + 1) * period] for b in range(count)]
        values = np.array([[v for eqn in block for v in eqn.ins] for block in blocks], int).reshape(count, -1)
        makers = self.producer[values]
        relative = makers - start
        lags = np.arange(count)[:, None] - relative // period
        several = 1 + int(self.place.max(initial=0))
        codes = np.where(relative >= 0, (lags * period + relative % period) * several + self.place[values], -1)
        exact = self.exact[start : start + count * period].reshape(count, period)
        outside = self._outside(exact, codes, widths, bounds, period, several)
        differs = (exact[1:] != exact[:-1])[:, [k not in outside for k in range(period)]].any(axis=1)
        inner = [c for k in range(period) if k not in outside for c in range(bounds[k], bounds[k + 1])]
        codes = self._from_outside(codes, outside, period, several)
        first, last = _longest(~(differs | (codes[1:, inner] != codes[:-1, inner]).any(axis=1)))
        steady = codes[last - 1]
        lag_of = np.where(steady >= 0, steady // several // period, 0)
        if lag_of[inner].max(initial=0) > MOST_LAG:
            return None
        reached = self._reached(codes[:, inner], makers[:, inner], steady[inner], lag_of[inner], start, period, first)
        exactly = [k for k in range(period) if k not in outside]
        while reached < first and (exact[reached:first, exactly] != exact[first, exactly]).any():
            reached += 1
        first, count = reached, last - reached
        if (lag_of[inner] >= count).any():
            return None

        def role(c: int) -> Made | Given:
            if steady[c] < 0:
                return Given(tuple(map(int, values[first:last, c])))
            place, out = divmod(int(steady[c]), several)
            lag, offset = divmod(place, period)
            return Made(offset, out, lag, tuple(map(int, values[first : first + lag, c])))

        operands = tuple(None if k in outside else tuple(map(role, range(bounds[k], bounds[k + 1]))) for k in range(period))
        return Chain(start + first * period, period, count, operands)

    def _outside(
        self, exact: np.ndarray, codes: np.ndarray, widths: Sequence[int], bounds: np.ndarray, period: int, several: int
    ) -> frozenset[int]:
        """The equations of a block that differ from block to block where they may, and read nothing that blocks make."""
        found: set[int] = set()
        for k in range(period):
            if (exact[:, k] == exact[0, k]).all():
                continue
            read = codes[:, bounds[k] : bounds[k] + widths[k]]
            if (read < 0).all() or all(code < 0 or code // several in found for code in read.ravel()):
                found.add(k)
        return frozenset(found)

    def _from_outside(self, codes: np.ndarray, outside: frozenset[int], period: int, several: int) -> np.ndarray:
        """The codes of operands with those that are evaluated outside of the blocks among what comes from there."""
        if not outside:
            return codes
        made_outside = (codes >= 0) & np.isin(codes // several % period, list(outside))
        return np.where(made_outside, -1, codes)

    def _reached(
        self, codes: np.ndarray, makers: np.ndarray, steady: np.ndarray, lags: np.ndarray, start: int, period: int, first: int
    ) -> int:
        """The block at which a chain may begin whose blocks are equal from ``first`` on: blocks before read other values from outside."""
        for begin in range(max(0, first - MOST_LAG), first):
            is_before = makers[begin:first] < start + begin * period
            turns = np.arange(first - begin)[:, None]
            if ((codes[begin:first] == steady) | (is_before & ((steady < 0) | (lags > turns)))).all():
                return begin
        return first


def _free(taken: np.ndarray, start: int, end: int) -> tuple[int, int]:
    """The longest stretch of a run that is not taken."""
    first, last = _longest(~taken[start:end], edges=False)
    return start + first, start + last


def _longest(equal: np.ndarray, edges: bool = True) -> tuple[int, int]:
    """The longest stretch of elements that are ``equal``: of those that meet where it says so if these are edges between them."""
    padded = np.concatenate([[False], equal, [False]])
    starts, ends = np.flatnonzero(~padded[:-1] & padded[1:]), np.flatnonzero(padded[:-1] & ~padded[1:])
    if not len(starts):
        return (0, 1) if edges else (0, 0)
    k = int(np.argmax(ends - starts))
    return int(starts[k]), int(ends[k]) + edges


def _runs(labels: np.ndarray) -> list[tuple[int, int, int]]:
    """The stretches (start, end, period) of labels that repeat with a period at least three times, each with its least period.

    Windows of 1, 2, 4, ... labels are numbered so that equal ones have one number (as in the construction of suffix arrays by doubling). A
    window that recurs after at most its own length repeats with that period.
    """
    found = []
    numbers, window = labels, 1
    while len(numbers) > window:
        order = np.argsort(numbers, kind="stable")
        again = numbers[order[1:]] == numbers[order[:-1]]
        if not again.any():
            break
        gaps = np.zeros(len(numbers), int)
        gaps[order[:-1][again]] = np.diff(order)[again]
        gaps[(gaps > window) | (2 * gaps <= window)] = 0
        edges = np.flatnonzero(np.diff(gaps, prepend=0, append=0))
        for first, last in pairwise(edges):
            if gaps[first]:
                found.append((int(first), int(last - 1 + window + gaps[first]), int(gaps[first])))
        pairs = numbers[:-window] * np.int64(len(labels) + 1) + numbers[window:]
        numbers, window = np.unique(pairs, return_inverse=True)[1].astype(np.int64), 2 * window
    return found


def _labels(flat: Flat) -> Labels:
    """Two numbers for each equation: equal for those alike but for their positions, and for those that are quite alike."""
    avals: list[Hashable] = [(shape, str(dtype)) for shape, dtype in zip(flat.shapes, flat.dtypes)]
    numbers: dict[Hashable, int] = {}
    known: dict[int, Hashable] = {}

    def number(key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    def labels(k: int, eqn: Equation) -> tuple[int, int]:
        if eqn.effects or eqn.prim.name in IMPURE:
            return number(k), number(k)
        apart = POSITIONS.get(eqn.prim.name, ())
        key = Same(eqn.prim), tuple(avals[v] for v in eqn.ins), tuple(avals[v] for v in eqn.outs)
        params = tuple((name, _value(value, known)) for name, value in sorted(eqn.params.items()) if name not in apart)
        return number((key, params)), number((key, params, tuple(map(eqn.params.get, apart))))

    return {eqn: labels(k, eqn) for k, eqn in enumerate(flat.equations)}


def _value(value: Any, known: dict[int, Hashable]) -> Hashable:
    """A key of a parameter, equal for parameters that mean the same."""
    if is_jaxpr(value):
        if id(value) not in known:
            known[id(value)] = fingerprint(value) if hasattr(value, "consts") else Same(value)
        return known[id(value)]
    if isinstance(value, tuple | list):
        return tuple(_value(item, known) for item in value)
    if isinstance(value, np.ndarray) and value.nbytes <= SMALL_BYTES and not value.dtype.hasobject:
        return value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, float | complex):
        return repr(value)
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return type(value), value
