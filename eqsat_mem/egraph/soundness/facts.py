"""Facts that a rule states, tested for what they claim: pieces, levels, places, means, and what files say that their relations mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from eqsat_mem import ir
from eqsat_mem.egraph import language
from eqsat_mem.egraph.online_folds import Rescaled, chain, with_higher_level
from eqsat_mem.egraph.soundness.compare import first_difference
from eqsat_mem.egraph.soundness.evaluation import Values, arguments, evaluated, over
from eqsat_mem.egraph.soundness.split_checks import able, wrong_piece
from eqsat_mem.egraph.soundness.stream_checks import Streams
from eqsat_mem.egraph.soundness.values import kind
from eqsat_mem.ir import Program, bits, children

NEAR = ("whole", "normal", "equal")
NUMBERS = (*NEAR, "offset")
"""The kinds of values on which chunks are joined; not those on which squares hold the rounding of their mean."""
LEVEL = "level"
"""The relation of levels, as ``rules/streaming.egg`` declares it."""
BUILT_IN = frozenset({*language.FACTS, language.LEVELS, language.MEANS, language.PLACES, LEVEL, "want"})
"""The facts whose meaning is known here; that of others stands above their declaration."""

Checked = tuple[str, int | None, int | None, Mapping[int, np.ndarray], int] | None
"""A difference, the terms between which it is, their arguments, and the sample; None where there is none."""


@dataclass
class Facts:
    """The terms of an e-graph by class, and what was stated of them."""

    program: Program
    terms_of: Mapping[int, Sequence[int]]
    streams: Streams
    rng: np.random.Generator
    claim: str

    def check(self, head: str, row: Sequence[int], kinds: Sequence[str]) -> Iterator[Checked]:
        """Each test of one fact."""
        if head in language.FACTS:
            yield from self._pieces(head, row[0], row[1], kinds)
        elif head == "want":
            yield None  # asks for a size; index sets that hold no index are refused where they are read
        else:
            for t in self.terms_of.get(row[0], ()):
                for other in self.terms_of.get(row[1], ()):
                    yield from self._level(t, other) if head == LEVEL else self._related(head, t, other)

    # pieces

    def _pieces(self, fact: str, c: int, mask: int, kinds: Sequence[str]) -> Iterator[Checked]:
        program = self.program
        terms = [t for t in self.terms_of.get(c, ()) if children(program.terms[t]) and not isinstance(program.terms[t], ir.Rename)]
        for index in bits(mask):
            fit = [t for t in terms if able(program, t, fact) >> index & 1]
            if terms and not fit:
                known = able(program, terms[0], fact)
                names = [ir.names(program, m) or "no index" for m in (1 << index, known)]
                verb = "depends on" if fact.startswith("splits") else "folds"
                yield f"it states ({fact}) of {names[0]}, where the term {verb} {names[1]}", terms[0], None, {}, 0
            for t in fit:
                args = {} if isinstance(program.terms[t], ir.Block) else arguments(program, kinds, self.rng, [t])
                values = evaluated(program, args, [t], len(kinds)) if args else Values({}, {}, {})
                found = wrong_piece(program, t, fact, index, values, self.claim, kinds) if args else None
                yield None if found is None else (found[0], t, None, args, found[1])

    # folds of what depends on other folds

    def _level(self, level: int, elements: int) -> Iterator[Checked]:
        made = self.streams.sum_less(level, elements)
        if made is not None:
            yield from self._streamed(*made, (*NUMBERS, "spread", "masked"))

    def _related(self, head: str, t: int, other: int) -> Iterator[Checked]:
        if head == language.PLACES:
            yield from self._places(t, other)
            return
        if head == language.LEVELS and self.program.terms[t].dtype == np.bool_:
            yield from self._at_extreme(t, other)
            return
        known = self.streams.shrunk(t, other) if head == language.LEVELS else self.streams.squared(t, other)
        if known is None:
            return
        yield from self._with_another(t, other, known)
        if isinstance(self.program.terms[t], ir.Fold | ir.Dot):
            yield from self._streamed(t, known, NEAR if known.mean_over else NUMBERS)

    def _at_extreme(self, t: int, extreme: int) -> Iterator[Checked]:
        """A sum of elements where a condition holds that tells which of them are an extreme."""
        program, term = self.program, self.program.terms[extreme]
        bound = ir.folded(term) & program.free[t]
        if not isinstance(term, ir.Fold) or not bound or kind(term.dtype) == "c" or term.dtype == np.bool_:
            return
        dtype = np.dtype(term.dtype)
        zero = program.add(ir.Literal.of(dtype.type(0), dtype))
        chosen = program.add(ir.Map(dtype, "select_n", (t, zero, term.arg)))
        total = program.add(ir.Fold(dtype, "add", bound, chosen))
        streams = replace(self.streams, levels={**self.streams.levels, chosen: [extreme], total: [extreme]})
        known = chain(program, total, extreme, streams.levels)
        if known is not None:
            yield from replace(self, streams=streams)._streamed(total, known)

    def _streamed(self, t: int, known: Rescaled, kinds: Sequence[str] = NUMBERS) -> Iterator[Checked]:
        args = arguments(self.program, kinds, self.rng, [t])
        values = evaluated(self.program, args, [t], len(kinds))
        for found in self.streams.wrong(t, known, values):
            yield None if found is None else (found[0], t, None, args, found[1])

    def _with_another(self, t: int, other: int, known: Rescaled) -> Iterator[Checked]:
        """With a higher level the term is less by an exponential; about another number than the mean, squares are more by its square for
        each of them; with an extreme that no element is, it is nothing.
        """
        program, dtype = self.program, np.dtype(self.program.terms[t].dtype)

        def number(value: float) -> int:
            return program.add(ir.Literal.of(dtype.type(value), dtype))

        if known.extreme:
            extreme = program.terms[other]
            assert isinstance(extreme, ir.Fold)
            beyond = with_higher_level(program, t, known, 1.0 if extreme.monoid == "max" else -1.0)
            pair = program.add(ir.Map(dtype, "mul", (t, number(0.0)))) if dtype != np.bool_ else None, beyond
        elif known.mean_over:
            more = number(0.25 * program.extent(known.mean_over))
            pair = program.add(ir.Map(dtype, "add", (t, more))), with_higher_level(program, t, known, 0.5)
        else:
            pair = t, program.add(ir.Map(dtype, "mul", (with_higher_level(program, t, known, 0.5), number(np.exp(0.5)))))
        if pair[0] is not None:
            yield self._compared(pair[0], pair[1])

    def _compared(self, left: int, right: int) -> Checked:
        kinds = ("whole", "normal", "positive", "negative", "zeros", "equal")
        args = arguments(self.program, kinds, self.rng, [left, right])
        values = evaluated(self.program, args, [left, right], len(kinds))
        free = self.program.free[left] | self.program.free[right]
        sides = [over(self.program, values.of[t], self.program.free[t], free) for t in (left, right)]
        scale = np.maximum(values.scale[left], values.scale[right])
        found = first_difference("real", sides[0], sides[1], scale, values.finite[left] & values.finite[right], kinds)
        return None if found is None else (found[0], left, right, args, found[1])

    def _places(self, t: int, extreme: int) -> Iterator[Checked]:
        """The first of places where elements are an extreme, where it is computed in the only way that the planner uses.

        Places are less than what stands elsewhere, and the first of them is the least; so it is in two chunks.
        """
        program, term = self.program, self.program.terms[extreme]
        if not isinstance(term, ir.Fold):
            return
        elements, bound, fold = term.arg, term.over & program.free[term.arg], program.terms[t]
        each = fold.arg if isinstance(fold, ir.Fold) else t
        first = t if each != t else program.add(ir.Fold(program.terms[t].dtype, "min", bound, t))
        known = self.streams.place(first, extreme) if bound else None
        if known is None:
            return
        kinds = ("whole", "normal", "equal")
        args = arguments(program, kinds, self.rng, [first])
        values = evaluated(program, args, [first], len(kinds)).of
        free = program.free[each] | program.free[elements]
        place, element, most = (over(program, values[u], program.free[u], free) for u in (each, elements, extreme))
        at, wide = (element == most) | (element != element), place.astype(np.float64)
        axes = tuple(1 + k for k, i in enumerate(bits(free)) if bound >> i & 1)
        bad = np.where(at, wide, -np.inf).max(axes, initial=-np.inf) > np.where(at, np.inf, wide).min(axes, initial=np.inf)
        what = "places where elements are the extreme are not less than what stands elsewhere"
        yield (what, each, None, args, int(np.argwhere(bad)[0][0])) if bad.any() else None
        yield from self._streamed(first, known)
