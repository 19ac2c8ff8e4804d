"""From a traced function to a plan: the stages in order. Read this first."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from eqsat_mem.backends.choose import backend_for
from eqsat_mem.backends.xla import constrained, partition_specs, shown_mesh
from eqsat_mem.candidates import GAIN, Forms, SearchResult, rules_of
from eqsat_mem.codegen.emit import Emitted, emit
from eqsat_mem.deadline import NEVER, Deadline
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.errors import MemoryLimitError
from eqsat_mem.events import Began, Clock, Ended, Loaded, tell
from eqsat_mem.frontend.fingerprint import fingerprint
from eqsat_mem.frontend.load import load
from eqsat_mem.frontend.preferences import Preferences
from eqsat_mem.frontend.roll import load_rolled
from eqsat_mem.ir import Program, argument_bytes
from eqsat_mem.ir.jaxprs import aval_bytes
from eqsat_mem.ir.mesh import Placement, Spec
from eqsat_mem.options import Options, resolve_device
from eqsat_mem.passes import Pass
from eqsat_mem.reports.outline import body_loops, exchanges, loop_summaries, output_bytes, peak_tensors, restrictions, spread_indices
from eqsat_mem.reports.plan import Plan
from eqsat_mem.reports.record import Record, Scheduler
from eqsat_mem.request import Request, request_of
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.checks import Check
from eqsat_mem.schedule.search import Schedule, fastest, unscheduled
from eqsat_mem.transforms.plan_bodies import BodyPlan, Frontier, has_plans

CLOSE = 1.25
"""A plan may fit though up to so many times the limit is predicted."""
PATIENCE_S = 3600.0
"""Seconds for saturation when a plan is explained, so many that rows or iterations stop it, which do not depend on the machine."""
ATTEMPTS = 6
"""The number of searches and compilations for one limit, each for a lower planned limit than the one before."""


def plan(
    jaxpr: ClosedJaxpr,
    options: Options,
    arg_names: Sequence[str],
    name: str = "program",
    backend: Backend | None = None,
    donated: Sequence[int] = (),
    placement: Placement | None = None,
    deadline: Deadline | None = None,
) -> Plan:
    """The fastest program found that computes ``jaxpr`` within the limit, on the device in use unless another backend is given.

    Outputs may take the memory of the ``donated`` arguments of their shape and dtype. With a ``placement`` several devices run the program,
    and limit and figures are those of each. The ``deadline`` is that of the options unless another is given.

    Raises:
        MemoryLimitError: if no plan fits, or none was found in time; it names the tensors of the smallest plan found.
    """
    request = request_of(jaxpr, options, arg_names, name, backend or backend_for(resolve_device(options)), donated, placement, deadline)
    return _told(request, partial(_plan, request, BodyPlans()))


def _told(request: Request, planning: Callable[[], Plan]) -> Plan:
    """The plan of a request, of whose beginning and end those who listen are told."""
    tell(Began(request.name, request.held(request.limit)))
    made = None
    try:
        with _without_collections():
            made = planning()
    finally:
        tell(Ended(request.name, made))
    return made


@contextmanager
def _without_collections() -> Iterator[None]:
    """No cyclic garbage is looked for meanwhile: planning leaves hardly any, and keeps so many objects that looking takes a fifth of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plan(request: Request, bodies: BodyPlans, known: Forms | None = None) -> Plan:
    """The plan of a request; its bodies' plans are kept in ``bodies``. What is ``known`` has been found for other limits."""
    clock = Clock()
    forms = known or _forms(request, bodies, clock)
    forms.clock, forms.deadline, loaded = clock, request.deadline, forms.loaded
    found = forms.fastest(request.backend, request.limit)
    with clock("emit and verify"):
        chosen = _chosen(request, forms, found)
    programs = _Programs(
        request.jaxpr, request.arg_names, request.backend.preferences, loaded, None if forms.loops is None else forms.loops.loaded
    )
    searched_for = chosen.backend, chosen.planned_limit
    again = partial(_again, request, programs, *searched_for)
    traced, names, donated = request.jaxpr, request.arg_names, request.taken
    record = Record(found.before, *searched_for, again, request.options, traced, names, donated, loaded, chosen.code.names)
    return _report(request, found, chosen, clock, record)


def _forms(request: Request, bodies: BodyPlans, clock: Clock) -> Forms:
    """The program of a request, loaded."""
    with clock("trace"):
        rules = rules_of(request.options, request.backend)
        loaded = load(request.jaxpr, request.arg_names, request.backend.preferences, rules.passes)
        tell(Loaded(loaded))
        loops = None if request.placement is not None else load_rolled(request.jaxpr, loaded, request.backend.preferences, rules.passes)
    forms = Forms(loaded, rules, request.options, request.backend, bodies, clock, request.placement, request.deadline)
    if loops is not None:
        forms.loops = replace(forms, loaded=loops)
    return forms


@dataclass(eq=False)
class BodyPlans:
    """BodyPlans of the loops and branches of one program: each is loaded and saturated once, and planned for few limits.

    Equal bodies are one: those of several forms of the program, of its retries, and of loops inside of loops.
    """

    forms: dict[Hashable, Forms] = field(default_factory=dict)
    frontiers: defaultdict[Hashable, Frontier] = field(default_factory=partial(defaultdict, Frontier))
    keys: dict[int, tuple[ClosedJaxpr, Hashable]] = field(default_factory=dict)

    def plan(self, options: Options, backend: Backend, deadline: Deadline, body: ClosedJaxpr, limit: int) -> BodyPlan:
        """The plan of a body for a backend, made until a deadline, under a limit in bytes."""

        def planner(limit: int) -> BodyPlan:
            request = self._request(options, backend, body, limit, deadline)
            try:
                inner = _told(request, lambda: _plan(request, self, self._forms(key, request)))
            except MemoryLimitError as error:
                held = max(error.smallest_bytes - aval_bytes(body.in_avals), 0)
                return BodyPlan(None, held, held, error.smallest_bytes, fits=False)
            held, written = (peak - inner.argument_bytes for peak in (inner.peak_bytes, inner.original_peak_bytes))
            assert inner.predicted_s is not None, "a body is searched"
            return BodyPlan(None if inner.unchanged else inner.schedule, held, written, inner.peak_bytes, inner.predicted_s)

        key = self._key(options, backend, body)
        return self.frontiers[key].within(max(limit, 1), planner)

    def written(self, options: Options, backend: Backend, body: ClosedJaxpr, limit: int) -> BodyPlan:
        """The body as written, without a search."""
        request = self._request(options, backend, body, limit, NEVER)
        s = self._forms(self._key(options, backend, body), request).written(request.backend, max(limit, 1))
        held = s.peak_bytes - argument_bytes(s.ex.program)
        return BodyPlan(None, held, held, s.peak_bytes, s.seconds)

    def _request(self, options: Options, backend: Backend, body: ClosedJaxpr, limit: int, deadline: Deadline) -> Request:
        names = [f"x{k}" for k in range(len(body.in_avals))]
        return request_of(body, replace(options, memory_limit=max(limit, 1), verify=False), names, "body", backend, deadline=deadline)

    def _forms(self, key: Hashable, request: Request) -> Forms:
        if key not in self.forms:
            self.forms[key] = _forms(request, self, Clock())
        return self.forms[key]

    def _key(self, options: Options, backend: Backend, body: ClosedJaxpr) -> Hashable:
        if id(body) not in self.keys:
            self.keys[id(body)] = body, fingerprint(body)
        return self.keys[id(body)][1], replace(options, memory_limit=None), backend


@dataclass(frozen=True, eq=False)
class _Programs:
    """A traced function as a program: as it was loaded, and as it loads without some of the passes that have changed it then."""

    jaxpr: ClosedJaxpr
    arg_names: tuple[str, ...]
    preferences: Preferences
    loaded: Program
    rolled: Program | None = None
    others: dict[frozenset[str], tuple[Program, Program | None]] = field(default_factory=dict)

    def by(self, passes: Sequence[Pass]) -> tuple[Program, Program | None]:
        """The program that only these passes may change, and with its equal blocks as loops, where it has any."""
        names = frozenset(known.name for known in passes)
        if self.loaded.passes <= names and (self.rolled is None or self.rolled.passes <= names):
            return self.loaded, self.rolled
        if names not in self.others:
            loaded = load(self.jaxpr, self.arg_names, self.preferences, passes)
            self.others[names] = loaded, self.rolled and load_rolled(self.jaxpr, loaded, self.preferences, passes)
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
    loaded, loops = programs.by(rules.passes)
    forms = Forms(loaded, rules, patient, backend, BodyPlans(), Clock(), request.placement, request.deadline.again())
    if loops is not None:
        forms.loops = replace(forms, loaded=loops)
    return forms.fastest(backend, limit, scheduler).best


# --- emitting and verifying ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Chosen:
    """A schedule as code and as compiled (None: it was not), and the backend and limit that it was searched for."""

    schedule: Schedule
    code: Emitted
    check: Check | None
    backend: Backend
    planned_limit: int
    unchanged: bool = False

    @property
    def compiled_bytes(self) -> int | None:
        return None if self.check is None else self.check.held_bytes


def _chosen(request: Request, forms: Forms, found: SearchResult) -> _Chosen:
    """The program as it was where it fits and a plan gains too little; else the plan that fits."""
    limit, best, before = request.limit, found.best, found.before
    asked_for_loops = bool(best.chunks) and request.asks_for_loops
    if best.fits(limit):
        fits_nearly = before.fits(limit * request.backend.asked_up_to if request.verifies else limit)
        may_stay = fits_nearly and best.seconds > GAIN * before.seconds and not asked_for_loops
    else:  # whatever is predicted of the program as written: XLA is asked before there is an error
        may_stay = request.verifies or before.fits(limit)
    kept = _keep(request, forms.loaded, before) if may_stay else None
    if kept is not None:
        return kept
    try:
        planned = _emit_within(request, forms, best)
    except MemoryLimitError:  # as predicted, something would have fitted
        kept = _keep(request, forms.loaded, before) if request.verifies and not may_stay else None
        if kept is None:
            raise
        return kept
    if not may_stay and before.fits(limit) and not asked_for_loops and _as_held(planned) > GAIN * before.seconds:
        return _keep(request, forms.loaded, before) or planned
    return planned


def _keep(request: Request, loaded: Program, before: Schedule) -> _Chosen | None:
    """The program as it was, if it holds no more than the limit once compiled; its source is the same written out."""
    function, limit = jaxpr_as_fun(request.jaxpr), request.limit
    placement = request.placement
    placed = function if placement is None or placement.mesh is None else constrained(function, placement)
    check = request.compiled(request.backend, placed, before.peak_bytes)
    if check is None and (has_plans(before.ex.program) or not before.fits(limit)):
        return None  # nothing but the prediction tells, which counts plans of its loops' bodies
    if check is not None and check.held_bytes > limit:
        return None
    ex = Extraction(loaded)
    code = emit(unscheduled(ex, request.backend), request.name)
    source = f"# {request.name} runs as it was written; this is the same, written out.\n{code.source}"
    run = function if placement is None or placement.around else placed
    emitted = Emitted(source, lambda *args: tuple(run(*args)), code.namespace, code.names)
    return _Chosen(before, emitted, check, request.backend, limit, unchanged=True)


def _as_held(chosen: _Chosen) -> float:
    """The predicted seconds of a plan, with those that new memory takes if XLA holds so much more than was predicted that it is new."""
    s = chosen.schedule
    fixed = argument_bytes(s.ex.program) + output_bytes(s.ex.program)
    predicted, held = (chosen.backend.device.fresh_s(total - fixed) for total in (s.peak_bytes, chosen.compiled_bytes or s.peak_bytes))
    return s.seconds + max(held - predicted, 0.0)


def _emit_within(request: Request, forms: Forms, best: Schedule) -> _Chosen:
    """Emit a program that holds no more than the limit once compiled.

    Where no prediction is low enough, XLA fuses less than the backend assumes: the search begins again with its cautious variant. Then
    with the compiler options under which programs hold least.
    """
    errors: list[MemoryLimitError] = []
    cautious = request.backend.cautious() if best.fits(request.limit) else None
    for backend in (request.backend, cautious, request.backend.narrowed() if request.verifies else None):
        if backend is not None and not (errors and request.deadline.passed()):
            try:
                s = forms.fastest(backend, request.limit).best if errors else best
                return _verified(request, forms, backend, s)
            except MemoryLimitError as error:
                errors.append(error)
    raise min(errors, key=lambda error: error.smallest_bytes) from None


def _verified(request: Request, forms: Forms, backend: Backend, best: Schedule) -> _Chosen:
    """Emit, compile, compare with the limit; plan for less while the compiled program holds more.

    Where nothing fits the next planned limit, it was too low a guess: the one after is halfway back to the last program that was compiled.
    Where nothing fits at all as predicted, but nearly, XLA is asked about the plan for what that holds.
    """
    limit = request.limit
    planned_limit, above = limit, 0
    smallest: tuple[int, Schedule] | None = None
    for attempt in range(ATTEMPTS):
        if attempt and request.deadline.passed():
            break
        if attempt:
            best = forms.fastest(backend, planned_limit).best
        if best.fits(planned_limit):
            code = emit(best, request.name)
            shares = best.ex.program.shares
            run = request.runnable(code, checked=True)
            check = request.compiled(backend, run, best.peak_bytes, () if shares is None else shares.arguments)
            if check is None or check.held_bytes <= limit:
                return _Chosen(best, code, check, backend, planned_limit)
            held = check.held_bytes
            if smallest is None or held < smallest[0]:
                smallest = held, best
            if planned_limit > limit:
                break
            planned_limit, above = _tighter(best, held, limit), best.peak_bytes
        elif smallest is None and request.verifies and best.fits(int(CLOSE * limit)):
            planned_limit = best.peak_bytes
        elif best.peak_bytes < above:
            planned_limit = (best.peak_bytes + above) // 2
        else:
            break
    closest_bytes, closest = smallest or (best.peak_bytes, best)
    raise _too_large(request, forms, closest, closest_bytes)


def _tighter(s: Schedule, held: int, limit: int) -> int:
    """The peak to plan for so that temporaries, should they exceed their prediction by as much again, fit."""
    fixed = argument_bytes(s.ex.program) + output_bytes(s.ex.program)
    predicted, real = max(s.peak_bytes - fixed, 1), max(held - fixed, 1)
    return min(s.peak_bytes - 1, fixed + int(0.95 * predicted * max(limit - fixed, 0) / real))


def _too_large(request: Request, forms: Forms, s: Schedule, smallest: int) -> MemoryLimitError:
    fixed = argument_bytes(s.ex.program) + output_bytes(s.ex.program)
    limit, smallest, fixed = map(request.held, (request.limit, smallest, fixed))
    known = peak_tensors(s), request.name, fixed, (*restrictions(s, request.options), *request.stopped), request.shared_bytes
    devices = 1 if request.placement is None else request.placement.devices.total
    shapes = [aval.shape for aval in (*request.jaxpr.in_avals, *request.jaxpr.out_avals)]
    return MemoryLimitError(limit, smallest, *known, devices, forms.with_more_devices(request.limit, shapes, request.shared_bytes))


def _report(request: Request, found: SearchResult, chosen: _Chosen, clock: Clock, record: Record) -> Plan:
    s, program, placement = chosen.schedule, chosen.schedule.ex.program, request.placement
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
        predicted_s=s.seconds,
        original_predicted_s=found.before.seconds,
        seconds=clock.seconds,
        loops=[*loop_summaries(s), *body_loops(s)],
        rules_fired=() if chosen.unchanged else found.fired,
        peak_tensors=peak_tensors(s),
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
        record=record,
    )
