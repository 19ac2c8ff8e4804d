"""The forms of a program: others that compute the same and hold less, or take less time, each saturated and searched anew."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from eqsat_mem.egraph.extract import Extraction, original
from eqsat_mem.egraph.rule_files import RuleSet
from eqsat_mem.frontend.concatenations import with_parts
from eqsat_mem.frontend.scatters import with_scatters
from eqsat_mem.frontend.shifts import with_shifts
from eqsat_mem.frontend.takes import with_takes
from eqsat_mem.ir import Program
from eqsat_mem.passes import PARTS, SCANS, SUMS, TILES
from eqsat_mem.transforms.counted_steps import with_counted_steps
from eqsat_mem.transforms.overlapping_tiles import with_tiles
from eqsat_mem.transforms.prefix_blocks import with_prefix_blocks
from eqsat_mem.transforms.ranks import with_ranks
from eqsat_mem.transforms.scan_analysis import Stage
from eqsat_mem.transforms.step_sums import with_step_sums
from eqsat_mem.transforms.steps_at_once import with_segments, with_steps_at_once


@dataclass(eq=False)
class Further:
    """The forms of a program besides itself.

    Attributes:
        loaded: the program.
        rules: the rules and passes that may change it.
        on_mesh: whether several devices run it.
    """

    loaded: Program
    rules: RuleSet
    on_mesh: bool
    _in_segments: list[Program] = field(default_factory=list, init=False)
    _originals: dict[int, tuple[Program, Extraction]] = field(default_factory=dict, init=False)

    @cached_property
    def in_blocks(self) -> Program | None:
        """The program with its prefix sums by blocks, if it has large ones."""
        return with_prefix_blocks(self.loaded, self.rules.passes)

    @cached_property
    def counted(self) -> Program:
        """The program with scans over the rows that their steps read and write, if they do so one after the other."""
        return with_counted_steps(self.loaded, self.rules.passes) or self.loaded

    @cached_property
    def at_once(self) -> Program | None:
        """The program with what steps compute apart from their carries outside of its scans, if that is anything."""
        return with_steps_at_once(self.counted, self.rules.passes)

    @cached_property
    def _at_once(self) -> list[Program]:
        """The same, with elementwise values computed by the scans that read them, and for segments of steps."""
        if self.at_once is None:
            return []
        from eqsat_mem.transforms.scan_rewrite import forms

        sliced = forms(self.original(self.at_once), self.rules, [Stage.SLICES])
        return [self.at_once, *sliced, *filter(None, [with_segments(self.counted, self.rules.passes)])]

    def original(self, program: Program) -> Extraction:
        """A program as it is, with what rules allow for its terms; found once."""
        if id(program) not in self._originals:
            self._originals[id(program)] = program, original(program, self.rules)
        return self._originals[id(program)][1]

    def is_at_once(self, form: Program) -> bool:
        """Whether a form is one with what steps compute at once that is searched before those that stack less."""
        return any(form is other for other in self._at_once)

    @cached_property
    def summed(self) -> Program | None:
        """The program with sums over steps behind what is linear in them, if any are."""
        return with_step_sums(self.loaded, self.rules.passes)

    def is_eager(self, form: Program) -> bool:
        """Whether a form is searched also where the program as written fits: it may be faster."""
        return form is self.in_blocks or self.is_at_once(form) or SUMS.name in form.passes

    def is_needless(self, form: Program, fitting: Collection[frozenset[str]]) -> bool:
        """Whether a form need not be searched where such fit that these passes have made: it stacks no less, or among them is the same with
        concatenations in parts, which holds no more."""
        return form.passes.isdisjoint([SCANS.name, TILES.name]) or (PARTS.name not in form.passes and form.passes | {PARTS.name} in fitting)

    def has_eager_after(self, form: Program, fits: bool) -> bool:
        """Whether such a form comes after one that fits or does not; of those with sums of steps one that fits is enough."""
        if form is self.loaded:
            return self.in_blocks is not None or bool(self._at_once) or self.summed is not None
        if form is self.in_blocks:
            return bool(self._at_once) or self.summed is not None
        if self.is_at_once(form):
            is_last = form is self._at_once[-1] or (fits and SCANS.name in form.passes)
            return not is_last or self.summed is not None
        return SUMS.name in form.passes and not fits

    @cached_property
    def in_tiles(self) -> list[Program]:
        """The program in tiles that overlap."""
        return [] if self.on_mesh else list(with_tiles(self.loaded, self.rules.passes))

    def is_untiled(self, form: Program) -> bool:
        """Whether forms in tiles come after one, which may be faster where that takes long."""
        return TILES.name not in form.passes and bool(self.in_tiles)

    def is_in_segments(self, form: Program) -> bool:
        """Whether a form is one in segments that comes before the same without: the one or the other is faster."""
        return any(form is other for other in self._in_segments)

    def programs(self, apart: Callable[[Program], Extraction]) -> Iterator[Program]:
        """Yield the forms in the order in which they are searched: those that may be faster, those that stack less, those with takes.

        Args:
            apart: gives a program with takes, with rows computed alone wherever rules allow that.
        """
        from eqsat_mem.transforms.scan_rewrite import forms

        yield from filter(None, [self.in_blocks])
        yield from self._at_once
        made = () if self.on_mesh else (with_ranks, with_scatters)
        for program in filter(None, [self.loaded, *(make(self.loaded, self.rules.passes) for make in made)]):
            if program is not self.loaded:
                yield program
            summed = self.summed if program is self.loaded else with_step_sums(program, self.rules.passes)
            if summed is not None:
                yield from forms(self.original(summed), self.rules)
            parted = None if self.on_mesh else with_parts(program, self.rules.passes)
            if parted is not None:
                yield parted
                yield from forms(self.original(parted), self.rules)
            for form in forms(self.original(program), self.rules):
                in_segments = with_segments(form, self.rules.passes)
                if in_segments is not None:
                    self._in_segments.append(in_segments)
                    yield in_segments
                yield form
            if program is self.loaded and self.at_once is not None:
                yield from forms(self.original(self.at_once), self.rules, [stage for stage in Stage if stage >= Stage.BLOCKS])
            if program is self.loaded:
                yield from self.in_tiles
            taken = with_takes(program) if self.rules.names("Take") else None
            shifted = None if self.on_mesh else with_shifts(program, self.rules.passes)
            for reading in filter(None, (taken, shifted)):
                alone = apart(reading)
                yield alone.program if self.on_mesh else reading
                yield from forms(alone, self.rules)
