"""From a traced function to a plan: the stages in order. Read this first."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from eqsat_mem.backends.choose import backend_for
from eqsat_mem.backends.xla import constrained, devices_here, donations, named_shardings, partition_specs, shown_mesh
from eqsat_mem.candidates import Forms, SearchResult, rules_of
from eqsat_mem.codegen.emit import Emitted, emit
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.errors import DeviceCompilerError, MemoryLimitError, OptionError
from eqsat_mem.events import Began, Clock, Compiled, Ended, Loaded, tell
from eqsat_mem.frontend.load import load
from eqsat_mem.frontend.preferences import Preferences
from eqsat_mem.ir import Program, argument_bytes
from eqsat_mem.ir.jaxprs import aval_bytes
from eqsat_mem.ir.mesh import Placement, Spec
from eqsat_mem.options import Options, format_bytes, resolve_device, resolve_limit
from eqsat_mem.passes import Pass
from eqsat_mem.reports.outline import body_loops, exchanges, loop_summaries, output_bytes, peak_tensors, restrictions, spread_indices
from eqsat_mem.reports.plan import Plan
from eqsat_mem.reports.record import Record, Scheduler
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.checks import Check
from eqsat_mem.schedule.search import Schedule, fastest, unscheduled
from eqsat_mem.transforms.plan_bodies import has_plans

GAIN = 0.7
"""A plan replaces a program that fits only if it is predicted to take at most this share of its time: predictions are not closer."""
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
) -> Plan:
    """The fastest program found that computes ``jaxpr`` within the limit, on the device in use unless another backend is given.

    Outputs may take the memory of the ``donated`` arguments of their shape and dtype. With a ``placement`` several devices run the program,
    and limit and figures are those of each.

    Raises:
        MemoryLimitError: if no plan fits; it names the tensors of the smallest plan found.
    """
    backend = backend or backend_for(resolve_device(options))
    limit = resolve_limit(options, backend.capacity_bytes)
    _refuse_more_than_there_is(limit, backend)
    taken, shared_bytes = donations(jaxpr, donated, placement)
    if placement is not None:
        backend = backend.among(devices_here(placement))
    backend = backend.keeping_bits() if options.accuracy == "bitwise" else backend
    backend = backend if options.tiles and options.accuracy == "all" and placement is None else backend.without_tiles()
    request = _Request(jaxpr, tuple(arg_names), name, options, limit + shared_bytes, backend, taken, shared_bytes, placement)
    tell(Began(name, limit))
    made = None
    try:
        with _without_collections():
            made = _plan(request)
    finally:
        tell(Ended(name, made))
    return made


def _refuse_more_than_there_is(limit: int, backend: Backend) -> None:
    memory = backend.memory_bytes
    if memory is not None and limit > memory:
        raise OptionError(
            f"memory_limit = {format_bytes(limit)} is more than {backend.device.name} has, {format_bytes(memory)}: lower the limit, "
            "leave it out for all that a program may hold there, or name a larger device."
        )


@dataclass(frozen=True, eq=False)
class _Request:
    """The function to be planned: traced, with the limit in bytes and the backend that its options and the machine come to.

    Within a request, bytes are counted as if no output took the memory of an argument: the limit, predictions and what XLA holds alike.
    What leaves it (:meth:`held`) is less by ``shared_bytes``.
    """

    jaxpr: ClosedJaxpr
    arg_names: tuple[str, ...]
    name: str
    options: Options
    limit: int
    backend: Backend
    taken: tuple[int, ...]
    shared_bytes: int
    placement: Placement | None = None
    unchecked: list[str] = field(default_factory=list)
    """The reasons for which nothing can be compiled for the target here, once that has turned out."""

    def held(self, counted: int) -> int:
        """The bytes that are held at once, of bytes counted within the request."""
        return counted - self.shared_bytes

    def runnable(self, code: Emitted, checked: bool = False) -> Callable[..., Any]:
        """The function of a plan; on a mesh of several devices that of them all, to run or to be ``checked``."""
        if self.placement is None:
            return code.function
        return partial(code.function, mesh=None if self.placement.around and not checked else self.placement.mesh)

    def compiled(self, backend: Backend, run: Callable[..., Any], predicted: int, lying: Sequence[Spec | None] = ()) -> Check | None:
        """A function of the program's arguments as compiled for a backend; the bytes that it holds are told beside their prediction.

        On a mesh ``lying`` says how arguments lie, else as they were given. None where nothing is compiled: it is not asked for, or there
        is no compiler for the target here.
        """
        if not self.verifies:
            return None
        shardings = None if self.placement is None else named_shardings(self.placement, lying or self.placement.arguments)
        try:
            check = backend.check(run, self.jaxpr.in_avals, self.taken, limit=self.held(self.limit), shardings=shardings)
        except DeviceCompilerError as reason:
            self.unchecked.append(str(reason))
            return None
        tell(Compiled(check.held_bytes, self.held(predicted), self.held(self.limit)))
        return replace(check, held_bytes=check.held_bytes + self.shared_bytes)

    @property
    def verifies(self) -> bool:
        """Whether programs are compiled and compared with the limit: where there are devices to compile for."""
        return self.options.verify and not self.unchecked and (self.placement is None or self.placement.mesh is not None)

    @property
    def asks_for_loops(self) -> bool:
        """Whether sizes of values are bounded, whatever that costs."""
        return self.options.tensor_size_threshold is not None or self.options.tensor_split_size is not None


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


def _plan(request: _Request) -> Plan:
    clock = Clock()
    with clock("trace"):
        rules = rules_of(request.options, request.backend)
        preferences = request.backend.preferences
        loaded = load(request.jaxpr, request.arg_names, preferences, rules.passes)
        tell(Loaded(loaded))
    forms = Forms(loaded, rules, request.options, request.backend, _plan_body, clock, request.placement)
    found = forms.fastest(request.backend, request.limit)
    with clock("emit and verify"):
        chosen = _chosen(request, forms, found)
    programs = _Programs(request.jaxpr, request.arg_names, preferences, loaded)
    searched_for = chosen.backend, chosen.planned_limit
    again = partial(_again, request, programs, *searched_for)
    record = Record(found.before, *searched_for, again, request.options, request.jaxpr, request.arg_names, loaded, chosen.code.names)
    return _report(request, found, chosen, clock, record)


@dataclass(frozen=True, eq=False)
class _Programs:
    """A traced function as a program: as it was loaded, and as it loads without some of the passes that have changed it then."""

    jaxpr: ClosedJaxpr
    arg_names: tuple[str, ...]
    preferences: Preferences
    loaded: Program
    others: dict[frozenset[str], Program] = field(default_factory=dict)

    def by(self, passes: Sequence[Pass]) -> Program:
        """The program that only these passes may change."""
        names = frozenset(known.name for known in passes)
        if self.loaded.passes <= names:
            return self.loaded
        if names not in self.others:
            self.others[names] = load(self.jaxpr, self.arg_names, self.preferences, passes)
        return self.others[names]


def _again(
    request: _Request,
    programs: _Programs,
    backend: Backend,
    limit: int,
    without: frozenset[str] = frozenset(),
    scheduler: Scheduler = fastest,
) -> Schedule:
    """The best schedule that the same search finds without some rules and passes; it stops for other reasons than the clock."""
    left_out = (*request.options.without_rules, *sorted(without))
    patient = replace(request.options, max_seconds=PATIENCE_S, without_rules=left_out)
    rules = rules_of(patient, backend)
    forms = Forms(programs.by(rules.passes), rules, patient, backend, _plan_body, Clock(), request.placement)
    return forms.fastest(backend, limit, scheduler).best


def _plan_body(options: Options, backend: Backend, body: ClosedJaxpr, limit: int) -> tuple[Schedule | None, int, int]:
    """The body of a loop or branch planned under ``limit``: its schedule, and what it holds besides arguments, planned and as written."""
    names = [f"x{k}" for k in range(len(body.in_avals))]
    try:
        inner = plan(body, replace(options, memory_limit=max(limit, 1), verify=False), names, "body", backend)
    except MemoryLimitError as error:
        held = max(error.smallest_bytes - aval_bytes(body.in_avals), 0)
        return None, held, held
    written = inner.original_peak_bytes - inner.argument_bytes
    return (None if inner.unchanged else inner.schedule), inner.peak_bytes - inner.argument_bytes, written


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


def _chosen(request: _Request, forms: Forms, found: SearchResult) -> _Chosen:
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


def _keep(request: _Request, loaded: Program, before: Schedule) -> _Chosen | None:
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


def _emit_within(request: _Request, forms: Forms, best: Schedule) -> _Chosen:
    """Emit a program that holds no more than the limit once compiled.

    Where no prediction is low enough, XLA fuses less than the backend assumes: the search begins again with its cautious variant. Then
    with the compiler options under which programs hold least.
    """
    errors: list[MemoryLimitError] = []
    cautious = request.backend.cautious() if best.fits(request.limit) else None
    for backend in (request.backend, cautious, request.backend.narrowed() if request.verifies else None):
        if backend is not None:
            try:
                s = forms.fastest(backend, request.limit).best if errors else best
                return _verified(request, forms, backend, s)
            except MemoryLimitError as error:
                errors.append(error)
    raise min(errors, key=lambda error: error.smallest_bytes) from None


def _verified(request: _Request, forms: Forms, backend: Backend, best: Schedule) -> _Chosen:
    """Emit, compile, compare with the limit; plan for less while the compiled program holds more.

    Where nothing fits the next planned limit, it was too low a guess: the one after is halfway back to the last program that was compiled.
    Where nothing fits at all as predicted, but nearly, XLA is asked about the plan for what that holds.
    """
    limit = request.limit
    planned_limit, above = limit, 0
    smallest: tuple[int, Schedule] | None = None
    for attempt in range(ATTEMPTS):
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


def _too_large(request: _Request, forms: Forms, s: Schedule, smallest: int) -> MemoryLimitError:
    fixed = argument_bytes(s.ex.program) + output_bytes(s.ex.program)
    limit, smallest, fixed = map(request.held, (request.limit, smallest, fixed))
    known = peak_tensors(s), request.name, fixed, restrictions(s, request.options), request.shared_bytes
    devices = 1 if request.placement is None else request.placement.devices.total
    shapes = [aval.shape for aval in (*request.jaxpr.in_avals, *request.jaxpr.out_avals)]
    return MemoryLimitError(limit, smallest, *known, devices, forms.with_more_devices(request.limit, shapes, request.shared_bytes))


def _report(request: _Request, found: SearchResult, chosen: _Chosen, clock: Clock, record: Record) -> Plan:
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
        record=record,
    )
