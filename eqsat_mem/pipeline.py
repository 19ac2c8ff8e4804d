"""From a traced function to a plan: the stages in order. Read this first."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from eqsat_mem.absorbed import absorbed
from eqsat_mem.chains import reordered
from eqsat_mem.config import Options, resolve_limit
from eqsat_mem.control import aval_bytes, has_plans, plan_bodies
from eqsat_mem.costs import Device, Folds, term_seconds
from eqsat_mem.emit import Emitted, emit
from eqsat_mem.errors import MemoryLimitError
from eqsat_mem.events import Began, Compiled, Ended, Extracted, Loaded, Searched, StageBegan, StageEnded, tell
from eqsat_mem.explain import Record, Scheduler
from eqsat_mem.extract import Extraction, as_written, extractions, original
from eqsat_mem.ir import Program
from eqsat_mem.lookups import looked_up
from eqsat_mem.loops import region
from eqsat_mem.memory import argument_bytes
from eqsat_mem.outline import loop_summaries, output_bytes, peak_tensors, restrictions
from eqsat_mem.profiles import device_in_use
from eqsat_mem.remat import least_bytes, rematerialise
from eqsat_mem.report import Plan
from eqsat_mem.rules import RuleSet, load_rules
from eqsat_mem.saturate import Limits, saturate
from eqsat_mem.schedule import Schedule, Search, fastest
from eqsat_mem.staging import forms
from eqsat_mem.trace import load
from eqsat_mem.verify import compiled_peak

MEMORY_PRICES = (0.0, 1e-10, 1e-8)
"""Seconds per byte of contractions, blocks and renamed values, for each of which a program is extracted: from fastest to smallest."""
GAIN = 0.7
"""A plan replaces a program that fits only if it is predicted to take at most this share of its time: predictions are not closer."""
NEARLY = 4.0
"""A program as written may fit though up to so many times the limit is predicted: XLA may fuse what the model holds. XLA is asked."""
PATIENCE_S = 3600.0
"""Seconds for saturation when a plan is explained: what stops it then is the number of rows or iterations, which repeats itself."""
RETRIES = 6
"""How often the limit is tightened because the compiled program holds more than was predicted."""


def plan(jaxpr: ClosedJaxpr, options: Options, arg_names: Sequence[str], name: str = "program", device: Device | None = None) -> Plan:
    """The fastest program found that computes ``jaxpr`` within the limit, on the device in use unless another is given.

    Raises:
        MemoryLimitError: if no plan fits; it names the tensors of the smallest plan found.
    """
    limit = resolve_limit(options)
    tell(Began(name, limit))
    made = None
    try:
        with _without_collections():
            made = _plan(jaxpr, options, arg_names, name, limit, device or device_in_use())
    finally:
        tell(Ended(name, made))
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


def _plan(jaxpr: ClosedJaxpr, options: Options, arg_names: Sequence[str], name: str, limit: int, device: Device) -> Plan:
    clock = _Clock()
    with clock("trace"):
        loaded = load(jaxpr, arg_names)
        tell(Loaded(loaded))
    find = partial(_fastest_form, _Forms(loaded, options), options, clock)
    best, before, fired = find(device, limit)
    with clock("emit and verify"):
        asked_for_loops = best.chunks and (options.tensor_size_threshold is not None or options.tensor_split_size is not None)
        if best.fits(limit):
            fits_nearly = before.fits(int(limit * NEARLY) if options.verify else limit)
            may_stay = fits_nearly and best.seconds > GAIN * before.seconds and not asked_for_loops
        else:  # whatever is predicted of the program as written: XLA is asked before there is an error
            may_stay = options.verify or before.fits(limit)
        keep = partial(_keep, jaxpr, loaded, before, device, limit, options, name)
        kept = keep() if may_stay else None
        chosen = kept or _emit_within(find, best, device, jaxpr, limit, options, name)
        if not may_stay and before.fits(limit) and not asked_for_loops and _as_held(chosen) > GAIN * before.seconds:
            kept = keep()
            chosen = kept or chosen
    again = partial(_again, loaded, options, chosen.device, chosen.target)
    record = Record(before, chosen.device, chosen.target, again, options, jaxpr, tuple(arg_names), loaded, chosen.code.names)
    return _report(chosen, before, limit, clock, name, () if kept is not None else fired, kept is not None, record)


class _Forms:
    """A program, the same with its lookups taken apart, and forms with less and less stacked by scans, each made when it is asked for."""

    def __init__(self, loaded: Program, options: Options):
        self.loaded, self.options = loaded, options
        self.made = [loaded]
        self.others: Iterator[Program] | None = None

    def __iter__(self) -> Iterator[Program]:
        yield from self.made
        if self.others is None:
            self.others = self.further()
        for program in self.others:
            self.made.append(program)
            yield program

    def further(self) -> Iterator[Program]:
        apart = looked_up(self.loaded)
        if apart is not None:
            yield apart
        yield from forms(original(apart or self.loaded, _rules(self.options)))


def _fastest_form(
    programs: _Forms, options: Options, clock: _Clock, device: Device, limit: int, scheduler: Scheduler = fastest
) -> tuple[Schedule, Schedule, tuple[str, ...]]:
    """The fastest schedule of the first form that fits (else the smallest of all), the program as written, and the rules that fired."""
    found = []
    for program in programs:
        found.append(_fastest(program, options, clock, device, limit, scheduler))
        if found[-1][0].fits(limit):
            break
    best, _, fired = min(found, key=lambda f: _order(f[0], limit))
    return best, found[0][1], fired


def _order(s: Schedule, limit: int) -> tuple[bool, float]:
    """What fits comes first, the fastest of it; of what does not, the smallest."""
    return not s.fits(limit), s.seconds if s.fits(limit) else s.peak_bytes


def _again(
    loaded: Program, options: Options, device: Device, limit: int, without: frozenset[str] = frozenset(), scheduler: Scheduler = fastest
) -> Schedule:
    """The best schedule that the same search finds without some rules; it stops for other reasons than the clock."""
    patient = replace(options, max_seconds=PATIENCE_S, without_rules=(*options.without_rules, *sorted(without)))
    return _fastest_form(_Forms(loaded, patient), patient, _Clock(), device, limit, scheduler)[0]


def _fastest(
    loaded: Program, options: Options, clock: _Clock, device: Device, limit: int, scheduler: Scheduler
) -> tuple[Schedule, Schedule, tuple[str, ...]]:
    """The fastest schedule found that fits (else the smallest), the program as written, and the rules that fired."""
    with clock("bodies"):
        program, saved = plan_bodies(loaded, limit, partial(_plan_body, options, device))
    with clock("saturate"):
        rules = _rules(options)
        view = saturate(program, rules, Limits(options.max_rows, options.max_iterations, options.max_seconds))
    with clock("extract"):
        seconds = partial(term_seconds, device=device)
        written = as_written(view)
        extracted = [written, *extractions(view, seconds, MEMORY_PRICES)]
        for ex, price in zip(extracted, (None, *MEMORY_PRICES)):
            tell(Extracted(ex, price))
        extracted += [new for ex in extracted if (new := reordered(ex, rules, seconds)) is not None]
        candidates = _distinct([written, *(absorbed(ex, rules) for ex in extracted)])
    with clock("schedule"):
        knobs = options.tensor_size_threshold, options.tensor_split_size
        searches = sorted((Search(c, limit, device, *knobs) for c in candidates), key=lambda search: search.straight.seconds)
        best = _best(searches, scheduler)
        if not best.fits(limit):  # the least memory counts only where none fits; the program that came closest is searched for it
            closest = next(search for search in searches if search.ex is best.ex)
            best = min(best, _best([closest.within(0)], scheduler), key=lambda s: s.peak_bytes)
        for s in [best, *(search.straight for search in searches)]:
            useful = limit if best.fits(limit) else best.peak_bytes - 1
            if not s.fits(limit) and (s.seconds < best.seconds or not best.fits(limit)) and least_bytes(s, device) <= useful:
                best = min(best, rematerialise(s, limit, device), key=partial(_order, limit=limit))
        tell(Searched(best, view))
        before = next(search for search in searches if search.ex is written).unmodified()
        return best, replace(before, peak_bytes=before.peak_bytes + saved), tuple(sorted(view.matches))


def _best(searches: Sequence[Search], scheduler: Scheduler) -> Schedule:
    """The best schedule of several programs that compute the same, each searched with the best of those before in sight."""
    best: Schedule | None = None
    for search in searches:
        found = scheduler(search, best)
        best = found if best is None else min(best, found, key=partial(_order, limit=search.limit))
    assert best is not None, "there is the program as written"
    return best


def _rules(options: Options) -> RuleSet:
    return load_rules(options.rules, options.accuracy, options.only_rules, options.without_rules, options.operations)


def _plan_body(options: Options, device: Device, body: ClosedJaxpr, limit: int) -> tuple[Schedule | None, int, int]:
    """The body of a loop or branch planned under ``limit``: its schedule, and what it holds besides arguments, planned and as written."""
    names = [f"x{k}" for k in range(len(body.in_avals))]
    try:
        inner = plan(body, replace(options, memory_limit=max(limit, 1), verify=False), names, "body", device)
    except MemoryLimitError as error:
        held = max(error.smallest_bytes - aval_bytes(body.in_avals), 0)
        return None, held, held
    written = inner.original_peak_bytes - inner.argument_bytes
    return (None if inner.unchanged else inner.schedule), inner.peak_bytes - inner.argument_bytes, written


@dataclass(frozen=True)
class _Chosen:
    """A schedule as code, what XLA holds for it (None: not compiled), and the device and limit that it was searched for."""

    schedule: Schedule
    code: Emitted
    compiled_bytes: int | None
    device: Device
    target: int


def _distinct(candidates: Sequence[Extraction]) -> list[Extraction]:
    """One extraction per program text."""
    return list({str(c.program): c for c in reversed(candidates)}.values())[::-1]


def _keep(jaxpr: ClosedJaxpr, loaded: Program, before: Schedule, device: Device, limit: int, options: Options, name: str) -> _Chosen | None:
    """The program as it was, if it holds no more than the limit once compiled; its source is the same written out."""
    if not options.verify and has_plans(before.ex.program):
        return None  # it was predicted to fit with the plans of its loops' bodies
    function = jaxpr_as_fun(jaxpr)
    held = compiled_peak(function, jaxpr.in_avals, optimise=False)[0] if options.verify else None
    if held is not None:
        tell(Compiled(held, before.peak_bytes, limit))
    if held is not None and held > limit:
        return None
    ex = Extraction(loaded)
    code = emit(Schedule(ex, region(ex), {}, 0, 0.0), name)
    source = f"# {name} runs as it was written; this is the same, written out.\n{code.source}"
    return _Chosen(before, Emitted(source, lambda *args: tuple(function(*args)), code.namespace, code.names), held, device, limit)


def _as_held(chosen: _Chosen) -> float:
    """The predicted seconds of a plan, with those that new memory takes if XLA holds so much more than was predicted that it is new."""
    s = chosen.schedule
    fixed = argument_bytes(s.ex.program) + output_bytes(s.ex.program)
    predicted, held = (chosen.device.fresh_s(total - fixed) for total in (s.peak_bytes, chosen.compiled_bytes or s.peak_bytes))
    return s.seconds + max(held - predicted, 0.0)


def _emit_within(find: Any, best: Schedule, device: Device, jaxpr: ClosedJaxpr, limit: int, options: Options, name: str) -> _Chosen:
    """What holds no more than the limit once compiled.

    Where no prediction is low enough, XLA holds what was to be computed on the way to folds: the search begins again without that.
    """
    devices = [device]
    if device.folds is Folds.LIBRARY and best.fits(limit):
        devices.append(replace(device, folds=Folds.ARRAYS))
    errors: list[MemoryLimitError] = []
    for used in devices:
        try:
            return _verified(partial(find, used), None if errors else best, used, jaxpr, limit, options, name)
        except MemoryLimitError as error:
            errors.append(error)
    raise min(errors, key=lambda error: error.smallest_bytes)


def _verified(find: Any, best: Schedule | None, device: Device, jaxpr: ClosedJaxpr, limit: int, options: Options, name: str) -> _Chosen:
    """Emit, compile, compare with the limit; plan for less while the compiled program holds more.

    Where nothing fits the next target, it was too low a guess: the one after is halfway back to the last program that was compiled.
    """
    best = best or find(limit)[0]
    target, smallest, above = limit, None, 0
    for _ in range(RETRIES):
        if best.fits(target):
            code = emit(best, name)
            if not options.verify:
                return _Chosen(best, code, None, device, target)
            held = compiled_peak(code.function, jaxpr.in_avals, optimise=False)[0]
            tell(Compiled(held, best.peak_bytes, limit))
            if held <= limit:
                return _Chosen(best, code, held, device, target)
            smallest = min(smallest or held, held)
            target, above = _tighter(best, held, limit), best.peak_bytes
        elif best.peak_bytes < above:
            target = (best.peak_bytes + above) // 2
        else:
            break
        best, *_ = find(target)
    raise _too_large(best, limit, smallest or best.peak_bytes, options, name)


def _tighter(s: Schedule, held: int, limit: int) -> int:
    """The peak to plan for so that temporaries, should they exceed their prediction by as much again, fit."""
    fixed = argument_bytes(s.ex.program) + output_bytes(s.ex.program)
    predicted, real = max(s.peak_bytes - fixed, 1), max(held - fixed, 1)
    return min(s.peak_bytes - 1, fixed + int(0.95 * predicted * max(limit - fixed, 0) / real))


def _too_large(s: Schedule, limit: int, smallest: int, options: Options, name: str) -> MemoryLimitError:
    fixed = argument_bytes(s.ex.program) + output_bytes(s.ex.program)
    return MemoryLimitError(limit, smallest, peak_tensors(s), name, fixed, restrictions(s, options))


def _report(
    chosen: _Chosen, before: Schedule, limit: int, clock: _Clock, name: str, fired: tuple[str, ...], unchanged: bool, record: Record
) -> Plan:
    s, program = chosen.schedule, chosen.schedule.ex.program
    return Plan(
        name=name,
        source=chosen.code.source,
        function=chosen.code.function,
        namespace=chosen.code.namespace,
        limit_bytes=limit,
        peak_bytes=s.peak_bytes,
        compiled_peak_bytes=chosen.compiled_bytes,
        original_peak_bytes=before.peak_bytes,
        argument_bytes=argument_bytes(program),
        output_bytes=output_bytes(program),
        unchanged=unchanged,
        predicted_s=s.seconds,
        original_predicted_s=before.seconds,
        seconds=clock.seconds,
        loops=loop_summaries(s),
        rules_fired=fired,
        peak_tensors=peak_tensors(s),
        program=program,
        schedule=s,
        record=record,
    )


@dataclass
class _Clock:
    """Seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        tell(StageBegan(stage))
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[stage] = self.seconds.get(stage, 0.0) + elapsed
            tell(StageEnded(stage, elapsed))
