"""The search for the fastest schedule of a program and its forms: each is saturated once, and searched for every limit that is asked."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from typing import TYPE_CHECKING

from jax.extend.core import ClosedJaxpr

from eqsat_mem.deadline import NEVER, Deadline
from eqsat_mem.egraph.extract import Extraction, extract, original, run_as_is
from eqsat_mem.egraph.rule_files import RuleSet
from eqsat_mem.egraph.saturate import Limits, attributed, saturate
from eqsat_mem.equal_programs import ROWS_PRICE, Candidates, extracted_of
from eqsat_mem.events import Clock, Searched, tell
from eqsat_mem.frontend.equal_blocks import EqualBlocks
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Call, Program
from eqsat_mem.ir.jaxprs import share_bytes
from eqsat_mem.ir.mesh import Placement
from eqsat_mem.options import Options
from eqsat_mem.passes import ROLLS
from eqsat_mem.ranking import GAIN, order
from eqsat_mem.reports.record import Scheduler
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.cost_model import term_seconds
from eqsat_mem.schedule.loop_bodies import settled, slow_in_chunks
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.search import Search, fastest, straight
from eqsat_mem.searches import Once, Other, Planner, SearchResult, best_of, nothing, with_search
from eqsat_mem.transforms.further import Further
from eqsat_mem.transforms.plan_bodies import BodyPlan, Fingerprints, Frontier, calls, floor_bytes, plan_bodies

if TYPE_CHECKING:  # what few programs need is imported where they do: a first plan would take a tenth longer
    from eqsat_mem.mesh.bodies import Bodies, BodySpecs

LONG, LONGEST = 500, 1_200
"""Terms beyond which a program with equal blocks is searched as it was written only where its loops do not fit or are dear, and those
beyond which only where they do not fit: that takes seconds."""
SHORTER = 2 / 3
"""The share of a long program's terms that it has at most with loops over its equal blocks where these are searched first: with more, that
takes as long as the program itself."""
DEAR = 1.3
"""Times as long as the program as written from which on loops over its equal blocks are dear, which copy what blocks read and make, or
values that are computed again."""
FAR = 3
"""Times the limit that loops over equal blocks hold whose forms with less stacked are not searched, where something fits without them."""
TIGHTENED = 2
"""Times that bodies of loops get less room where one of them holds the peak and that does not fit: they are told what lies around them
before that is planned."""


@dataclass(eq=False)
class Forms:
    """A program, its forms with less and less stacked by scans, and both again with takes in place of gathers and slices.

    Each is made when it is asked for, and kept for other limits.
    """

    loaded: Program
    rules: RuleSet
    options: Options
    backend: Backend
    planner: Planner
    clock: Clock
    placement: Placement | None = None
    """The specs of arguments and results where several devices run the program."""
    deadline: Deadline = NEVER
    equal: EqualBlocks | None = None
    """The program with its equal blocks planned as one; None for such a program itself."""

    def __post_init__(self) -> None:
        self.made = [self.loaded]
        self.of_blocks: list[Forms] = []
        self.others: Iterator[Program] | None = None
        self.candidates: dict[int, Candidates] = {}
        self.bodies: dict[Hashable, Forms] = {}
        self.fingerprints = Fingerprints()
        self.frontiers: defaultdict[Hashable, Frontier] = defaultdict(Frontier)
        self.planned: dict[Hashable, tuple[Program, dict[Call, Call]]] = {}
        self.unfit: defaultdict[Hashable, list[tuple[int, int, float]]] = defaultdict(list)
        self.searched: dict[Backend, tuple[int, Schedule]] = {}

    def fastest(
        self, backend: Backend, limit: int, scheduler: Scheduler = fastest, near: int = 0, instead: Other = nothing, slowest: float = inf
    ) -> SearchResult:
        """The fastest schedule of the first form that fits, else the smallest of all or of those that there is time for.

        A schedule predicted to hold at most ``near`` bytes ends the search as one that fits does: XLA may hold less, and can be asked.
        What was written is the first form. A program with equal blocks is searched with these as loops where no form of it fits or what
        fits is slow; where it is long and they make it much shorter, loops come first, unless they are dear and it fits without them, or
        their first form does not fit. ``instead`` is for such loops: what is asked for where their first form does not fit. What takes
        more than ``slowest`` seconds is of no use.
        """
        size, found, near = len(self.loaded.terms), None, max(limit, near)
        is_first = size <= LONG or not self._is_shorter_in_loops()
        without: Other = nothing
        if is_first:
            found = slow = self._fastest_form(backend, limit, scheduler, near, instead, slowest)
            before = found.before
            if (found.best.fits(near) and found.best.seconds * GAIN <= before.seconds) or self.deadline.passed():
                return found
            without = Once(lambda smallest: slow if slow.best.fits(near) and smallest > FAR * limit else None)
        else:
            before = self.written(backend, limit)
            if size <= LONGEST and self.placement is None:
                unrolled = partial(self._without_loops, before, backend, limit, scheduler)
                if self._are_loops_dear(before, backend, limit) and (quick := unrolled(again=False)) is not None:
                    return quick
                without = Once(lambda _: unrolled())
        for blocks in self._with_equal_blocks():
            if found is not None and blocks._was_no_faster(backend, limit, found.best):
                break
            of_blocks = blocks.fastest(backend, limit, scheduler, near, without, slowest)
            blocks.searched[backend] = limit, of_blocks.best
            if of_blocks.best.ex.program.passes.isdisjoint([ROLLS.name]):
                return of_blocks
            without = nothing
            if before.fits(limit) and of_blocks.best.seconds > GAIN * of_blocks.before.seconds:  # the same loops: their prices compare
                return found or SearchResult(straight(before.ex, backend), before)
            if found is None or order(of_blocks.best, limit) < order(found.best, limit):
                found = of_blocks.of(before)
            if found.best.fits(near) or self.deadline.passed():
                break
        if found is not None and (is_first or found.best.fits(near) or self.deadline.passed()):
            return found
        own = self._fastest_form(backend, limit, scheduler, near, nothing, slowest)
        return own if found is None or order(own.best, limit) <= order(found.best, limit) else found.of(own.before)

    def _was_no_faster(self, backend: Backend, limit: int, than: Schedule) -> bool:
        """Whether nothing faster than a schedule that fits was found where there was as much room or more."""
        room, best = self.searched.get(backend, (0, than))
        return than.fits(limit) and limit <= room and (than.seconds <= best.seconds or not best.fits(room))

    def _is_shorter_in_loops(self) -> bool:
        """Whether loops over equal blocks make the program much shorter."""
        blocks = next(self._with_equal_blocks(), None)
        return blocks is not None and len(blocks.loaded.terms) <= SHORTER * len(self.loaded.terms)

    def _are_loops_dear(self, before: Schedule, backend: Backend, limit: int) -> bool:
        """Whether loops over equal blocks take much longer than the program as written, of which this is the schedule."""
        blocks = next(self._with_equal_blocks(), None)
        return blocks is not None and blocks.written(backend, limit).seconds > DEAR * before.seconds

    def _without_loops(
        self, before: Schedule, backend: Backend, limit: int, scheduler: Scheduler, again: bool = True
    ) -> SearchResult | None:
        """The fastest schedule without loops over equal blocks, if it fits and is not slow; if asked with values computed ``again``, where
        that is not dear."""
        found = self._fastest_of(*self._planned(self.loaded, backend, limit), backend, limit, scheduler, again)
        is_dear = again and found.best.seconds > DEAR * before.seconds
        return found if found.best.fits(limit) and not is_dear and not slow_in_chunks(found.best, before) else None

    def _with_equal_blocks(self) -> Iterator[Forms]:
        """The forms of the program with its equal blocks planned as one."""
        programs = iter(()) if self.equal is None else self.equal.programs()
        for k in itertools.count():
            with self.clock("trace"):
                program = next(programs, None)
            if program is None:
                return
            if k == len(self.of_blocks):
                self.of_blocks.append(replace(self, loaded=program, equal=None))
            self.of_blocks[k].clock, self.of_blocks[k].deadline = self.clock, self.deadline
            yield self.of_blocks[k]

    def _fastest_form(self, backend: Backend, limit: int, scheduler: Scheduler, near: int, instead: Other, slowest: float) -> SearchResult:
        """The fastest schedule of the first form that fits or is ``near`` enough, without loops over equal blocks.

        Forms that cannot fit, or did not where there was more room, are searched last, and only where they may be the smallest; those that
        stack less also where chunks take long, and those that may be faster than what was written also where that fits. Where the first
        that may or might have does not fit, or none may, what is found ``instead`` is asked for, if anything, before others are searched.
        Of each, what takes longer than one that fits, or than ``slowest``, is of no use.
        """
        found, is_settled = dict[int, SearchResult](), False
        hopeless: list[tuple[int, int, Program]] = []
        for k, form in enumerate(self._forms()):
            is_eager = self.further.is_eager(form)
            if is_settled and not is_eager:
                break
            fitting = [self.made[n].passes for n, f in found.items() if f.best.fits(near)]
            if fitting and not is_eager and self.further.is_needless(form, fitting):
                continue
            result, smallest = self._attempt(k, form, backend, limit, scheduler, near, slowest)
            if smallest and (other := instead(smallest)) is not None:
                return other
            if result is None:
                hopeless.append((k, max(self._floor_bytes(form), smallest), form))
                continue
            slowest = min(slowest, result.best.seconds) if result.best.fits(limit) else slowest
            found[k], fits, slow = result, not smallest, slow_in_chunks(result.best, result.before, partial(self.further.is_untiled, form))
            if fits and is_eager:
                slow = result.best.seconds * GAIN > (found[0].before if 0 in found else self.written(backend, limit)).seconds
            is_settled = is_settled or (fits and not slow and not self.further.is_in_segments(form))
            if (is_settled and not self.further.has_eager_after(form, fits)) or self.deadline.passed():
                break
        else:
            if not found and (other := instead(hopeless[0][1])) is not None:
                return other
            for k, smallest, form in hopeless:
                if not found or (smallest < min(f.best.peak_bytes for f in found.values()) and not self.deadline.passed()):
                    found[k] = self._fastest(form, backend, limit, scheduler, near, slowest)
        best = min(found.values(), key=lambda f: order(f.best, limit))
        return replace(best, before=found[0].before if 0 in found else self.written(backend, limit))

    def _attempt(
        self, k: int, form: Program, backend: Backend, limit: int, scheduler: Scheduler, near: int, slowest: float
    ) -> tuple[SearchResult | None, int]:
        """The fastest schedule of a form, and the bytes of the smallest known where none is near enough; no schedule where none can fit
        that is not too slow."""
        known = self.unfit[k, backend, self.placement, scheduler]
        smallest = next((held for room, held, bound in known if limit <= room and slowest <= bound), 0)
        if self._floor_bytes(form) > limit or smallest:
            return None, smallest
        found = self._fastest(form, backend, limit, scheduler, near, slowest)
        if not found.best.fits(near):
            known.append((limit, found.best.peak_bytes, slowest))
        return found, 0 if found.best.fits(near) else found.best.peak_bytes

    def _floor_bytes(self, form: Program) -> int:
        """The bytes that every schedule of a form holds, on each of several devices."""
        return floor_bytes(form) // (1 if self.placement is None else self.placement.devices.total)

    def written(self, backend: Backend, limit: int) -> Schedule:
        """The program run as its author wrote it, bodies of its loops as written too; on a mesh along what lies in shares."""
        if self.placement is not None:
            from eqsat_mem.mesh.choose import as_it_lies

            loops = self._loops(self.placement, backend, limit, search=False)
            return straight(as_it_lies(self._original(self.loaded), self.placement, backend, loops), backend, emitted=False)
        ex = self._as_is
        written = partial(self.planner.written, self.options, backend)
        program, _ = plan_bodies(ex.program, limit, written, written)
        return straight(replace(ex, program=program), backend, emitted=False)

    @cached_property
    def _as_is(self) -> Extraction:
        """The program to be run as it was loaded."""
        return run_as_is(self.loaded, self._original)

    @cached_property
    def further(self) -> Further:
        """The forms of the program besides itself."""
        return Further(self.loaded, self.rules, self.placement is not None)

    def _apart(self, reading: Program) -> Extraction:
        """A program with takes, with rows computed alone wherever rules allow that."""
        return extract(self._candidates(reading).view, partial(term_seconds, backend=self.backend), ROWS_PRICE)

    def _original(self, program: Program) -> Extraction:
        """A program as it is, with what rules allow for its terms; kept for the one that was loaded."""
        return self.further.original(program) if program is self.loaded else original(program, self.rules)

    def _forms(self) -> Iterator[Program]:
        yield from self.made
        self.others = self.others or self.further.programs(self._apart)
        while True:
            with self.clock("trace"):
                program = next(self.others, None)
            if program is None:
                return
            self.made.append(program)
            yield program

    def _fastest(self, form: Program, backend: Backend, limit: int, scheduler: Scheduler, near: int, slowest: float) -> SearchResult:
        if self.placement is not None:
            return self._fastest_spread(form, self.placement, backend, limit, scheduler)
        program, written = self._planned(form, backend, limit)
        again = not self.further.is_at_once(form)  # what holds less by computing values again is a form that comes later
        found, room = self._fastest_of(program, written, backend, limit, scheduler, again, slowest), limit
        for _ in range(TIGHTENED):
            s, last, over = found.best, program, found.best.peak_bytes - limit
            if s.fits(near) or s.seconds > slowest or not Memory(s.ex, s.backend).peaks_inside(s.seq, s.chunks) or self.deadline.passed():
                break
            while program is last and over < room:  # bodies may hold less than they may
                room, over = room - over, 2 * over
                program, written = self._planned(form, backend, room)
            tighter = self._fastest_of(program, written, backend, limit, scheduler, again, slowest)
            found = min(found, tighter, key=lambda f: order(f.best, limit))
        return found

    def _planned(self, form: Program, backend: Backend, room: int) -> tuple[Program, dict[Call, Call]]:
        """A form with plans of its bodies for so much room, and the calls that have such plans as they were written."""
        with self.clock("bodies"):
            plan = partial(self.planner.plan, self.options, backend, self.deadline.part(1 / 2))
            program, written = plan_bodies(form, room, plan, partial(self.planner.written, self.options, backend))
            if not written:
                return form, written
            known = id(form), tuple((tuple(map(id, call.bodies)), call.scratch_bytes) for call in calls(program))
            return self.planned.setdefault(known, (program, written))  # the form that had the same plans before, if any

    def _fastest_of(
        self,
        program: Program,
        written: dict[Call, Call],
        backend: Backend,
        limit: int,
        scheduler: Scheduler,
        again: bool = True,
        slowest: float = inf,
    ) -> SearchResult:
        """The fastest schedule of a form whose bodies are planned, calls with such bodies being ``written`` otherwise; if asked, in half of
        the time, without values that are computed ``again``."""
        known = self._candidates(program)
        deadline = self.deadline if again else self.deadline.part(1 / 2)
        with self.clock("schedule"):
            searches = sorted(self._searches(known.every, known, backend, limit, deadline), key=lambda search: search.straight.seconds)
            found, in_loops = best_of(searches, scheduler, known, slowest) if again else (with_search(searches, scheduler)[0], None)
            best = settled(found)
            tell(Searched(best, known.view))
            before = replace(known.written, program=known.written.program.replace_calls(written)) if written else known.written
            return SearchResult(best, straight(before, backend, emitted=False), in_loops and settled(in_loops))

    def _searches(self, every: Sequence[Extraction], known: Candidates, backend: Backend, limit: int, deadline: Deadline) -> list[Search]:
        """The searches of programs that compute the same, each on all variants of a backend that may help it."""
        knobs = self.options.tensor_size_threshold, self.options.tensor_split_size
        return [Search(ex, limit, own, *knobs, known.of(ex, own), deadline) for ex in every for own in backend.variants(ex)]

    def _fastest_spread(self, form: Program, placement: Placement, backend: Backend, limit: int, scheduler: Scheduler) -> SearchResult:
        """The fastest schedule of one device, in the first group of ways to spread the program that has one; what cannot fit comes last."""
        known, loops = self._candidates(form), self._loops(placement, backend, limit)
        before, found, hopeless = None, list[Schedule](), list[Search]()
        with self.clock("schedule"):
            for group in known.spread_on(placement, backend, loops, self.deadline):
                searches = self._searches([s.local for s in group], known, backend, limit, self.deadline)
                if before is None:
                    own = next(s.local for s in group if s.of is known.written)
                    written = next(search for search in searches if search.ex is own)
                    planned = form is self.loaded and any(loops.are_large(call, form) for call in calls(form))
                    before = self.written(backend, limit) if planned else written.unmodified()
                able = [search for search in searches if floor_bytes(search.ex.program) <= limit]
                hopeless += [] if able else searches
                found += [settled(best_of(able, scheduler, known)[0])] if able else []
                if (found and found[-1].fits(limit)) or self.deadline.passed():
                    break
            alone = [] if found else [min(hopeless, key=lambda search: floor_bytes(search.ex.program))]
            best = min(found or [settled(best_of(alone, scheduler, known)[0])], key=partial(order, limit=limit))
            assert before is not None, "the program as written is in the first group"
            tell(Searched(best, known.view))
        return SearchResult(best, before)

    def _loops(self, placement: Placement, backend: Backend, limit: int, search: bool = True) -> Bodies:
        """The bodies of loops and branches on a mesh, searched for under a limit or as they are written."""
        from eqsat_mem.mesh.choose import asking

        asked = asking(placement, backend, limit, lambda body: self._inside(body).loaded)
        return replace(asked, planner=partial(self._body, placement, backend, search), known={})

    def _body(
        self, placement: Placement, backend: Backend, search: bool, body: ClosedJaxpr, lies: BodySpecs, room: int
    ) -> tuple[Schedule, int]:
        """The body of a loop or branch as each device runs it, and what it holds besides its arguments."""
        forms, placed = self._inside(body), placement.of(lies.ins, lies.outs, lies.sums)
        sides = (body.in_avals, lies.ins), (body.out_avals, lies.outs)
        given, left = (share_bytes(avals, specs, placement.devices) for avals, specs in sides)

        def planner(limit: int) -> BodyPlan:
            forms.placement, forms.deadline = placed, self.deadline.part(1 / 2)
            own = backend.inside()
            best = forms.fastest(own, limit).best if search and given + left <= limit else forms.written(own, limit)
            held = max(best.peak_bytes - given, 0)
            return BodyPlan(best, held, held, best.peak_bytes, best.seconds, best.fits(limit))

        plan = self.frontiers[id(forms), placed, backend, search].within(room + given, planner)
        return plan.schedule, plan.held

    def _inside(self, body: ClosedJaxpr) -> Forms:
        """The forms of a body of a loop or branch, which equal bodies share, however their arguments lie."""
        key = self.fingerprints.of(body)
        if key not in self.bodies:
            names = [f"x{k}" for k in range(len(body.in_avals))]
            loaded = load(body, names, self.backend.preferences, self.rules.passes)
            self.bodies[key] = replace(self, loaded=loaded, clock=Clock(), equal=None)
        return self.bodies[key]

    def _candidates(self, program: Program) -> Candidates:
        """The programs equal to one under the rules: kept for forms, and for those with plans of their bodies."""
        if (known := self.candidates.get(id(program))) is not None:
            return known
        rules, options = self.rules, self.options
        unrolled = self.backend.unrolled_elements
        limits = Limits(options.max_rows, options.max_iterations, options.max_seconds, unrolled_elements=unrolled, deadline=self.deadline)

        def extracted(rules: RuleSet) -> Candidates:
            with self.clock("saturate"):
                alike = (made.view.with_calls(program) for made in self.candidates.values()) if rules is self.rules else ()
                view = next(filter(None, alike), None) or saturate(program, rules, limits, self.backend.rounds_operands)
            with self.clock("extract"):
                return extracted_of(view, rules, self.backend, self.deadline.part(1 / 2))

        known = attributed(rules, extracted)
        if any(program is form for form in (*self.made, *(planned for planned, _ in self.planned.values()))):
            self.candidates[id(program)] = known
        return known
