"""The facts that rules state of folds of values that depend on another fold, carried out: in two chunks, joined as emitted programs do.

A chunk has a level, an extreme or a mean of its own. Those of both chunks are what the level's terms give for all of their elements.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np

from eqsat_mem import ir
from eqsat_mem.egraph.online_folds import Rescaled, chain, first_place, squares
from eqsat_mem.egraph.soundness.compare import close
from eqsat_mem.egraph.soundness.evaluation import Values, cut, evaluated, over
from eqsat_mem.egraph.soundness.sequential_interpreter import WIDTH, Sequential
from eqsat_mem.egraph.soundness.values import kind
from eqsat_mem.ir import Program, bits, children
from eqsat_mem.ir.ops import MONOIDS
from eqsat_mem.ir.ops.online_rescaling import at_extreme, at_extreme_or_nan, joined, proper, rescaled

Pairs = Mapping[int, Sequence[int]]
"""For some terms, others of which a rule has stated something together with them."""
Found = tuple[str, int] | None


@dataclass
class Streams:
    """A program with what rules stated of its terms: the levels that they hold the exponential of, the extremes that they are places of."""

    program: Program
    levels: Pairs
    places: Pairs

    # what rules state

    def shrunk(self, t: int, level: int) -> Rescaled | None:
        """The dependence of a term on a level, if it is of the only kind that the planner uses."""
        found = chain(self.program, t, level, self.levels)
        same = found is not None and self.program.terms[t].dtype == self.program.terms[level].dtype
        return found if same and kind(self.program.terms[t].dtype) == "f" else None

    def place(self, t: int, extreme: int) -> Rescaled | None:
        """The dependence of the first place of an extreme on that, likewise."""
        return first_place(self.program, t, extreme, self.levels, self.places)

    def squared(self, t: int, mean: int) -> Rescaled | None:
        """The dependence of a sum of squares on a mean, likewise."""
        return squares(self.program, t, mean)

    def sum_less(self, level: int, elements: int) -> tuple[int, Rescaled] | None:
        """The sum of the exponentials of elements less their level; None if that is none of what folds them."""
        program, dtype = self.program, self.program.terms[level].dtype
        folds = [ir.folded(program.terms[t]) for t in _inside(program, level) if isinstance(program.terms[t], ir.Fold)]
        bound = max(folds, default=0) & program.free[elements] & ~program.free[level]
        if not bound or program.terms[elements].dtype != dtype or kind(dtype) != "f":
            return None
        shift = program.add(ir.Map(dtype, "sub", (elements, level)))
        power = program.add(ir.Map(dtype, "exp", (shift,)))
        total = program.add(ir.Fold(dtype, "add", bound, power))
        return total, Rescaled(level, shift, frozenset({total, power}))

    # what comes of it

    def wrong(self, t: int, known: Rescaled, values: Values) -> Iterator[Found]:
        """The differences, with their samples, that chunks make along each index along which a fold and the fold that it depends on
        have chunks."""
        folds = [f for f in _inside(self.program, known.level) if isinstance(self.program.terms[f], ir.Fold)]
        together = ir.folded(self.program.terms[t])
        for index in bits(together):
            extent = self.program.indices[index].extent
            if extent > 1 and any(ir.folded(self.program.terms[f]) >> index & 1 for f in folds):
                yield self._wrong_along(t, known, values, index)

    def _wrong_along(self, t: int, known: Rescaled, values: Values, index: int) -> Found:
        extent = self.program.indices[index].extent
        parts = [_Part(self, values, index, positions) for positions in (range(extent // 2), range(extent // 2, extent), range(extent))]
        with np.errstate(all="ignore"):
            whole, done = values.of[t], self._joined(t, known, parts)
            level = self._along(known.level, values.of[known.level], t)
            if kind(whole.dtype) in "fc":
                bad = (
                    np.isfinite(whole)
                    & np.isfinite(np.where(level == -np.inf, 0, level))
                    & ~close(whole, done, np.maximum(values.scale[t], 1.0))
                )
            else:
                bad = whole != done
        if not bad.any():
            return None
        at = tuple(int(k) for k in np.argwhere(bad)[0])
        where = self.program.indices[index].name
        return f"in two chunks along {where}: {whole[at]!r} of all elements, {done[at]!r} joined", at[0]

    def _joined(self, t: int, known: Rescaled, parts: Sequence[_Part]) -> np.ndarray:
        one, other = parts[:2]
        first, second = one.fold(t, known), other.fold(t, known)
        if known.mean_over:
            total = children(self.program.terms[known.level])[0]
            counts = [self.program.extent(known.mean_over) * len(p.positions) // self.program.indices[p.index].extent for p in parts]
            sums = [self._along(total, p.fold(total, None), t) for p in (one, other)]
            return _by_jax(joined, [first, sums[0], np.full_like(first, counts[0]), second, sums[1], np.full_like(first, counts[1])])
        levels = [self._along(known.level, p.level(known.level), t) for p in parts]
        if not known.extreme:
            scaled = [_by_jax(rescaled, [part, level, levels[2]]) for part, level in zip((first, second), levels)]
            return np.asarray(scaled[0] + scaled[1])
        term = self.program.terms[t]
        monoid = term.monoid if isinstance(term, ir.Fold) else "add"
        keep = at_extreme_or_nan if monoid == "min" else at_extreme
        none = np.full_like(first, MONOIDS[monoid].identity(first.dtype))
        kept = [_by_jax(keep, [part, level, levels[2], none]) for part, level in zip((first, second), levels)]
        return np.asarray(Sequential().combine(monoid, *kept))

    def _along(self, t: int, value: np.ndarray, other: int) -> np.ndarray:
        return over(self.program, value, self.program.free[t], self.program.free[other])

    def rescales(self, t: int) -> Rescaled | None:
        """The dependence of a sum of exponentials inside a level on a level of its own."""
        program, total = self.program, self.program.terms[t]
        power = program.terms[total.arg] if isinstance(total, ir.Fold) and total.monoid == "add" else None
        shift = program.terms[power.args[0]] if isinstance(power, ir.Map) and power.op == "exp" else None
        if not isinstance(total, ir.Fold) or not isinstance(power, ir.Map) or not isinstance(shift, ir.Map) or shift.op != "sub":
            return None
        return Rescaled(shift.args[1], power.args[0], frozenset({t, total.arg}))


@dataclass
class _Part:
    """Some positions along an index: folds over it of those alone, and what else there is at those."""

    streams: Streams
    values: Values
    index: int
    positions: Sequence[int]

    def fold(self, t: int, known: Rescaled | None) -> np.ndarray:
        """A fold over the index, with the level of these positions."""
        if known is None:
            return self._evaluated(t, {t}, {})
        level = self.level(known.level)
        if known.exponential:
            level = _by_jax(proper, [level])
        elif known.mean_over:
            program = self.streams.program
            total = children(program.terms[known.level])[0]
            count = program.extent(known.mean_over) * len(self.positions) // program.indices[self.index].extent
            level = (self.fold(total, None) / count).astype(level.dtype)
        return self._evaluated(t, {*known.chain, known.shift}, {known.level: level})

    def level(self, t: int) -> np.ndarray:
        """A level, from the folds over these positions."""
        program = self.streams.program
        moving, folds, stack = set(), {}, [t]
        while stack:
            c = stack.pop()
            if c in moving or c in folds:
                continue
            term = program.terms[c]
            if ir.folded(term) >> self.index & 1 and isinstance(term, ir.Fold | ir.Dot):
                folds[c] = self.fold(c, self.streams.rescales(c))
            elif isinstance(term, ir.Map):
                moving.add(c)
                stack.extend(children(term))
        if t in folds:
            return folds[t]
        return self._evaluated(t, moving, folds) if t in moving else cut(program, t, self.values.of[t], self.index, self.positions)

    def _evaluated(self, t: int, moving: Collection[int], known: Mapping[int, np.ndarray]) -> np.ndarray:
        """A term whose ``moving`` operands are computed anew; others are as they are of the whole, at these positions."""
        program = self.streams.program
        given = dict(known)
        for u in moving:
            for c in children(program.terms[u]):
                if c not in moving and c not in given:
                    given[c] = cut(program, c, self.values.of[c], self.index, self.positions)
        return evaluated(program, {}, [t], len(self.values.of[t]), given, {self.index: len(self.positions)}).of[t]


def _inside(program: Program, t: int) -> list[int]:
    """A term and what elementwise operations make it of: down to folds, which are among them."""
    seen, stack = {t}, [t]
    while stack:
        term = program.terms[stack.pop()]
        for c in children(term) if isinstance(term, ir.Map) else ():
            if c not in seen:
                seen.add(c)
                stack.append(c)
    return sorted(seen, reverse=True)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function)


def _by_jax(function: Callable[..., Any], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """An elementwise function of JAX's on arrays, whatever their shape: few shapes are compiled."""
    arrays = np.broadcast_arrays(*arrays)
    size = arrays[0].size
    flat = [np.ones(-(-max(size, 1) // WIDTH) * WIDTH, a.dtype) for a in arrays]
    for out, a in zip(flat, arrays):
        out[:size] = np.ravel(a)
    return np.asarray(_compiled(function)(*flat))[:size].reshape(arrays[0].shape)
