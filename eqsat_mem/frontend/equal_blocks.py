"""A program with its equal blocks as loops, each of which is planned once for all blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from jax.extend.core import ClosedJaxpr

from eqsat_mem.frontend.load import load
from eqsat_mem.frontend.preferences import Preferences
from eqsat_mem.frontend.repeats import LEAST_SAVED
from eqsat_mem.frontend.roll import rolled
from eqsat_mem.ir import Program
from eqsat_mem.passes import ROLLS, Pass

PIECES = 1, 4, 16
"""The numbers of loops that a chain of equal blocks becomes, one after the other where there is no room for less."""


@dataclass(eq=False)
class EqualBlocks:
    """The programs that a jaxpr with equal blocks may be planned as; each is made when it is asked for.

    A loop of all blocks has what they read side by side: parameters are copied, all of them. Of several loops each has less.

    Attributes:
        closed: the jaxpr.
        loaded: the program that is loaded from it.
        preferences: how it is loaded.
        passes: the passes that may change it.
        made: the programs that have been made, by the number of loops; None where there are no equal blocks.
    """

    closed: ClosedJaxpr
    loaded: Program
    preferences: Preferences
    passes: Collection[Pass]
    made: dict[int, Program | None] = field(default_factory=dict)

    def programs(self) -> Iterator[Program]:
        """Yield the program with one loop of equal blocks, then those with several; none where it has none, or too few for more."""
        terms = 0
        for pieces in PIECES if ROLLS in self.passes and len(self.loaded.terms) >= LEAST_SAVED else ():
            if pieces not in self.made:
                self.made[pieces] = self._made(pieces)
            program = self.made[pieces]
            if program is None or len(program.terms) == terms:  # the same loops again: more of them are more terms
                break
            yield program
            terms = len(program.terms)

    def by(self, loaded: Program, passes: Collection[Pass]) -> EqualBlocks:
        """The same for a program that was loaded with some passes only; what none of the others has changed is kept."""
        names = {known.name for known in passes}
        made = {pieces: program for pieces, program in self.made.items() if program is None or program.passes <= names}
        return replace(self, loaded=loaded, passes=passes, made=made)

    def _made(self, pieces: int) -> Program | None:
        loops = rolled(self.closed, self.preferences, pieces, self.passes)
        if loops is None:
            return None
        program = load(loops, [b.name for b in self.loaded.inputs], self.preferences, self.passes)
        program.passes |= {ROLLS.name}
        program.outputs = [replace(o, weak_type=w.weak_type) for o, w in zip(program.outputs, self.loaded.outputs, strict=True)]
        return program
