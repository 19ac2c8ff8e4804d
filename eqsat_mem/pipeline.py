"""From a traced function to a plan: the stages in order. Read this first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from jax.extend.core import ClosedJaxpr

from eqsat_mem.backends.choose import backend_for
from eqsat_mem.backends.xla import partition_specs, shown_mesh
from eqsat_mem.candidates import Forms
from eqsat_mem.deadline import NEVER, Deadline
from eqsat_mem.errors import MemoryLimitError
from eqsat_mem.events import Began, Clock, Ended, Loaded, listening, tell
from eqsat_mem.frontend.equal_blocks import EqualBlocks
from eqsat_mem.frontend.fingerprint import program_fingerprint
from eqsat_mem.frontend.load import load
from eqsat_mem.frontend.whole_maps import whole_map
from eqsat_mem.garbage import without_collections
from eqsat_mem.ir import argument_bytes
from eqsat_mem.ir.jaxprs import aval_bytes
from eqsat_mem.ir.mesh import Placement, Spec
from eqsat_mem.options import Options, resolve_device
from eqsat_mem.passes import OF_ELEMENTS, Pass
from eqsat_mem.reports.measured import Tuning
from eqsat_mem.reports.outline import (
    body_loops,
    computed_again,
    exchanges,
    lines_at_peak,
    loop_summaries,
    output_bytes,
    peak_tensors,
    spread_indices,
)
from eqsat_mem.reports.plan import Plan
from eqsat_mem.reports.record import Record, Scheduler
from eqsat_mem.request import Request, request_of, rules_of
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.search import fastest
from eqsat_mem.searches import SearchResult
from eqsat_mem.transforms.plan_bodies import BodyPlan, Fingerprints, Frontier
from eqsat_mem.verification import Chosen, choose, near

if TYPE_CHECKING:  # few plans are tuned
    from eqsat_mem.tuning import Tuner

PATIENCE_S = 3600.0
"""Seconds for saturation when a plan is explained, so many that rows or iterations stop it, which do not depend on the machine."""


def plan(
    jaxpr: ClosedJaxpr,
    options: Options,
    arg_names: Sequence[str],
    name: str = "program",
    backend: Backend | None = None,
    donated: Sequence[int] = (),
    placement: Placement | None = None,
    deadline: Deadline | None = None,
    tuner: Tuner | None = None,
) -> Plan:
    """The fastest program found that computes ``jaxpr`` within the limit, on the device in use unless another backend is given.

    Outputs may take the memory of the ``donated`` arguments of their shape and dtype. With a ``placement`` several devices run the program,
    and limit and figures are those of each. The ``deadline`` is that of the options unless another is given. Where the options ask to tune,
    plans are run on arguments that are made up, unless a ``tuner`` has others.

    Raises:
        MemoryLimitError: if no plan fits, or none was found in time; it names the tensors of the smallest plan found.
        OptionError: if plans for a device that is not here were to be run.
    """
    request = request_of(jaxpr, options, arg_names, name, backend or backend_for(resolve_device(options)), donated, placement, deadline)
    if tuner is None and options.tune is not None:
        from eqsat_mem.tuning import Tuner

        tuner = Tuner(options.tune)
    bodies = BodyPlans()
    try:
        return _told(request, partial(_plan, request, bodies, tuner=tuner))
    finally:
        bodies.forms.clear()  # which have it as their planner: collecting such garbage would take a tenth as long as planning


def _told(request: Request, planning: Callable[[], Plan]) -> Plan:
    """The plan of a request, of whose beginning and end those who listen are told."""
    tell(Began(request.name, request.held(request.limit)))
    made = None
    try:
        with without_collections():
            made = planning()
    finally:
        tell(Ended(request.name, made))
    return made


def _plan(request: Request, bodies: BodyPlans, known: Forms | None = None, tuner: Tuner | None = None) -> Plan:
    """The plan of a request; its bodies' plans are kept in ``bodies``. What is ``known`` has been found for other limits.

    A ``tuner`` runs the best of what the search finds.
    """
    clock = Clock()
    forms = known or _forms(request, bodies, clock)
    forms.clock, forms.deadline, loaded = clock, request.deadline, forms.loaded
    tuning = None
    with clock("schedule"), listening(*filter(None, [tuner])):
        found = forms.fastest(request.backend, request.limit, near=near(request, forms))
        written_s = _written_s(request, forms, found.before)
        with clock("emit and verify"):
            chosen = choose(request, forms, found, written_s, "" if request.placement is None else whole_map(request.jaxpr))
    if tuner is not None:
        with clock("tune"):
            chosen, tuning = tuner.choose(request, found, chosen, loaded)
    assert forms.equal is not None, "the forms of the program as loaded"
    programs = _Programs(request.arg_names, forms.equal)
    searched_for = chosen.backend, chosen.planned_limit
    again = partial(_again, request, programs, *searched_for)
    traced, names, donated = request.jaxpr, request.arg_names, request.taken
    record = Record(found.before, *searched_for, again, request.options, traced, names, donated, loaded, chosen.code.names)
    return _report(request, found, written_s, chosen, clock, record, tuning)


def _written_s(request: Request, forms: Forms, before: Schedule) -> float:
    """The predicted time of the program as written: with whole values, where passes compute elements of them before the search."""
    if forms.loaded.passes.isdisjoint(known.name for known in OF_ELEMENTS) or request.placement is not None:
        return before.seconds
    others = [known for known in forms.rules.passes if known not in OF_ELEMENTS]
    loaded = load(request.jaxpr, request.arg_names, request.backend.preferences, others)
    whole = Forms(loaded, forms.rules, request.options, request.backend, forms.planner, forms.clock, deadline=request.deadline)
    return whole.written(request.backend, request.limit).seconds


def _forms(request: Request, bodies: BodyPlans, clock: Clock) -> Forms:
    """The program of a request, loaded."""
    with clock("trace"):
        rules = rules_of(request.options, request.backend)
        loaded = load(request.jaxpr, request.arg_names, request.backend.preferences, rules.passes)
        tell(Loaded(loaded))
    equal = EqualBlocks(request.jaxpr, loaded, request.backend.preferences, rules.passes)
    return Forms(loaded, rules, request.options, request.backend, bodies, clock, request.placement, request.deadline, equal)


@dataclass(eq=False)
class BodyPlans:
    """BodyPlans of the loops and branches of one program: each is loaded and saturated once, and planned for few limits.

    Equal bodies are one: those of several forms of the program, of its retries, and of loops inside of loops. So are bodies that load as
    one program: forms are traced anew, and differ in axes of extent one that come and go.
    """

    forms: dict[Hashable, Forms] = field(default_factory=dict)
    keys: dict[Hashable, Hashable] = field(default_factory=dict)
    frontiers: defaultdict[Hashable, Frontier] = field(default_factory=partial(defaultdict, Frontier))
    fingerprints: Fingerprints = field(default_factory=Fingerprints)

    def plan(self, options: Options, backend: Backend, deadline: Deadline, body: ClosedJaxpr, limit: int) -> BodyPlan:
        """The plan of a body for a backend, made until a deadline, under a limit in bytes."""

        def planner(limit: int) -> BodyPlan:
            if aval_bytes(body.in_avals) + aval_bytes(body.out_avals) > limit:  # nothing fits
                return replace(self.written(options, backend, body, limit), fits=False)
            request = self._request(options, backend, body, limit, deadline)
            try:
                inner = _told(request, lambda: _plan(request, self, self.forms[key]))
            except MemoryLimitError as error:
                least = error.smallest_bytes
                held = max(least - aval_bytes(body.in_avals), 0)
                return replace(self.written(options, backend, body, limit), held=held, peak_bytes=least, fits=False, least=least)
            held, written = (peak - inner.argument_bytes for peak in (inner.peak_bytes, inner.original_peak_bytes))
            assert inner.predicted_s is not None, "a body is searched"
            schedule, written_s = None if inner.unchanged else inner.schedule, inner.original_predicted_s or 0.0
            return BodyPlan(schedule, held, written, inner.peak_bytes, inner.predicted_s, written_s=written_s)

        key = self._key(options, backend, body)
        return self.frontiers[key].within(max(limit, 1), planner)

    def written(self, options: Options, backend: Backend, body: ClosedJaxpr, limit: int) -> BodyPlan:
        """The body as written, without a search."""
        s = self.forms[self._key(options, backend, body)].written(backend.inside(), max(limit, 1))
        held = s.peak_bytes - argument_bytes(s.ex.program)
        return BodyPlan(None, held, held, s.peak_bytes, s.seconds, written_s=s.seconds)

    def _request(self, options: Options, backend: Backend, body: ClosedJaxpr, limit: int, deadline: Deadline) -> Request:
        names = [f"x{k}" for k in range(len(body.in_avals))]
        own = replace(options, memory_limit=max(limit, 1), verify=False, tune=None)
        return replace(request_of(body, own, names, "body", backend.inside(), deadline=deadline), is_body=True)

    def _key(self, options: Options, backend: Backend, body: ClosedJaxpr) -> Hashable:
        """The key of a body, by which its forms are known: of all that load as one program it is that of the first."""
        around = replace(options, memory_limit=None), backend
        own = self.fingerprints.of(body), *around
        if own not in self.keys:
            forms = _forms(self._request(options, backend, body, 0, NEVER), self, Clock())
            self.keys[own] = key = program_fingerprint(forms.loaded, partial(self._key, options, backend.inside())), *around
            self.forms.setdefault(key, forms)
        return self.keys[own]


@dataclass(frozen=True, eq=False)
class _Programs:
    """A traced function as a program: as it was loaded, and as it loads without some of the passes that have changed it then."""

    arg_names: tuple[str, ...]
    equal: EqualBlocks
    others: dict[frozenset[str], EqualBlocks] = field(default_factory=dict)

    def by(self, passes: Sequence[Pass]) -> EqualBlocks:
        """The program that only these passes may change, with its equal blocks planned as one."""
        names = frozenset(known.name for known in passes)
        if names not in self.others:
            is_kept = self.equal.loaded.passes <= names
            loaded = self.equal.loaded if is_kept else load(self.equal.closed, self.arg_names, self.equal.preferences, passes)
            self.others[names] = self.equal.by(loaded, passes)
        return self.others[names]


def _again(
    request: Request,
    programs: _Programs,
    backend: Backend,
    limit: int,
    without: frozenset[str] = frozenset(),
    scheduler: Scheduler = fastest,
) -> Schedule:
    """The best schedule that the same search finds without some rules and passes; saturation stops for other reasons than the clock."""
    left_out = (*request.options.without_rules, *sorted(without))
    patient = replace(request.options, max_seconds=PATIENCE_S, without_rules=left_out)
    rules = rules_of(patient, backend)
    equal = programs.by(rules.passes)
    forms = Forms(equal.loaded, rules, patient, backend, BodyPlans(), Clock(), request.placement, request.deadline.again(), equal)
    return forms.fastest(backend, limit, scheduler).best


# --- the report ----------------------------------------------------------------------------------------


def _report(
    request: Request, found: SearchResult, written_s: float, chosen: Chosen, clock: Clock, record: Record, tuning: Tuning | None
) -> Plan:
    s, program, placement = chosen.schedule, chosen.schedule.ex.program, request.placement
    tensors = peak_tensors(s)
    lying: tuple[Sequence[Spec | None], Sequence[Spec | None]] = ((), ()) if placement is None else (placement.arguments, placement.results)
    if program.shares is not None and not chosen.unchanged:
        lying = program.shares.arguments, program.shares.results
    return Plan(
        name=request.name,
        source=chosen.code.source,
        function=chosen.code.function if chosen.unchanged else request.runnable(chosen.code),
        namespace=chosen.code.namespace,
        limit_bytes=request.held(request.limit),
        peak_bytes=request.held(s.peak_bytes),
        compiled_peak_bytes=None if chosen.compiled_bytes is None else request.held(chosen.compiled_bytes),
        original_peak_bytes=request.held(found.before.peak_bytes),
        argument_bytes=argument_bytes(program),
        output_bytes=output_bytes(program),
        unchanged=chosen.unchanged,
        predicted_s=written_s if chosen.unchanged else s.seconds,
        original_predicted_s=written_s,
        seconds=clock.seconds,
        loops=[*loop_summaries(s), *body_loops(s)],
        computed_again=computed_again(s),
        rules_fired=() if chosen.unchanged else tuple(sorted(program.matched | program.passes)),
        peak_tensors=tensors,
        lines=lines_at_peak(s, tensors),
        program=program,
        schedule=s,
        device=chosen.backend.device.name,
        doubts=tuple(request.unchecked) if chosen.check is None else chosen.check.doubts,
        mesh=None if request.placement is None else shown_mesh(request.placement),
        in_specs=partition_specs(lying[0]),
        out_specs=partition_specs(lying[1]),
        spread=() if chosen.unchanged else spread_indices(program),
        collectives=() if chosen.unchanged else exchanges(s),
        compiler_options={} if chosen.unchanged else dict(chosen.backend.compiler_options),
        planning_bound_s=request.deadline.seconds if request.deadline.struck else None,
        tuning=tuning,
        record=record,
    )
