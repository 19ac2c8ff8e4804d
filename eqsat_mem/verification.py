"""Emitting and verifying: the program as it was, or the first plan that holds no more than the limit once XLA has compiled it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jax.extend.core import jaxpr_as_fun

from eqsat_mem.backends.xla import constrained
from eqsat_mem.candidates import LONG, Forms
from eqsat_mem.codegen.emit import Emitted, emit
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.errors import MemoryLimitError
from eqsat_mem.events import Clock
from eqsat_mem.ir import Program, argument_bytes
from eqsat_mem.ir.loop_tree import loops
from eqsat_mem.ir.mesh import Devices
from eqsat_mem.passes import AT_ONCE
from eqsat_mem.ranking import GAIN, GAIN_AT_ONCE
from eqsat_mem.reports.outline import exchange_seconds, output_bytes, peak_tensors, restrictions
from eqsat_mem.request import Request, narrowing
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.checks import Check
from eqsat_mem.schedule.schedules import Schedule, unscheduled
from eqsat_mem.searches import SearchResult
from eqsat_mem.transforms.plan_bodies import has_plans
from eqsat_mem.units import format_bytes

CLOSE, NEAR = 1.25, 1.1
"""A plan may fit though up to so many times the limit is predicted; up to the second XLA is asked about long programs before
other forms are searched."""
LONG_ASKED_UP_TO = 1.5
"""Predicted peak over limit up to which the compiler is asked about a long program as written, in place of :attr:`Backend.asked_up_to`: of
many values the sum is predicted better than of few, and compilations take long."""
ATTEMPTS = 6
"""The number of searches and compilations for one limit, each for a lower planned limit than the one before."""
FAR_SLOWER = 2.0
"""Times as written, or as a plan that held too much, from which on plans are tried that are predicted to hold more than one that fits."""
HOPELESS = 100.0
"""Times as written from which on a plan that fits is no better than none, so that any compiler options are tried."""
ROOMY = 8
"""Plans that may hold more than so many times the scratch of libraries, beside arguments and outputs, gain little from doing without it:
guessed."""
SLOWER = 1.2
"""The same where one that fits leaves half of the room."""
ROOM = 1.5
"""Such plans are predicted to hold up to so many times the limit."""
MUCH = 0.25
"""The part of a plan's time in exchanges from which on XLA is asked about the program as written on a mesh, whatever is predicted of it."""
TRIED = 3
"""The number of searches for them."""


@dataclass(frozen=True, eq=False)
class Chosen:
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


def choose(request: Request, forms: Forms, found: SearchResult, written_s: float, only_written: str = "") -> Chosen:
    """The program as it was, which is predicted to take ``written_s``, where it fits and a plan gains too little; else the plan that fits.

    With a sentence about why the program can run ``only_written``, it is as it was, or too large.
    """
    limit, best, before = request.limit, found.best, found.before
    if only_written:
        return _only_written(request, forms, before, only_written)
    asked_for_loops = bool(best.chunks) and request.asks_for_loops
    fits_nearly = before.fits(asked_up_to(request, forms.loaded))
    gain = GAIN_AT_ONCE if request.is_body and AT_ONCE.name in best.ex.program.passes else GAIN
    if best.fits(limit):
        may_stay = fits_nearly and best.seconds > gain * written_s and not asked_for_loops
    else:  # whatever is predicted of the program as written: XLA is asked before there is an error
        may_stay = fits_nearly or (request.verifies and not best.fits(near(request, forms)))
    kept = keep(request, forms.loaded, before) if may_stay else None
    if kept is not None and not (best.fits(limit) and best.seconds <= gain * _as_exchanged(request, kept, written_s)):
        return kept
    is_near = best.is_complete and limit < best.peak_bytes <= near(request, forms)
    closest = compiled(request, request.backend, best, best.peak_bytes) if is_near else None
    if closest is not None:
        if closest.compiled_bytes is not None and closest.compiled_bytes <= limit:
            return _fastest_that_holds_less(request, forms, closest, written_s, 0)
        found = found if request.deadline.passed() else forms.fastest(request.backend, limit)
    try:
        planned = _emit_within(request, forms, found, written_s)
    except MemoryLimitError as error:  # as predicted, something would have fitted
        asks = request.verifies and not may_stay and (fits_nearly or not request.deadline.passed())
        kept = keep(request, forms.loaded, before) if asks else None
        if kept is not None:
            return kept
        if closest is None or closest.compiled_bytes is None or request.held(closest.compiled_bytes) >= error.smallest_bytes:
            raise
        raise _too_large(request, forms, closest.schedule, closest.compiled_bytes) from None
    stays = before.fits(limit) and _as_held(planned) > gain * written_s
    exchanges_much = exchange_seconds(planned.schedule) > MUCH * planned.schedule.seconds  # XLA may know of others
    if not may_stay and not asked_for_loops and (stays or exchanges_much):
        kept = keep(request, forms.loaded, before)
        if kept is not None and _as_held(planned) > gain * _as_exchanged(request, kept, written_s):
            return kept
    return planned


def asked_up_to(request: Request, loaded: Program) -> int:
    """The predicted peak up to which XLA is asked about a program as written."""
    factor = LONG_ASKED_UP_TO if len(loaded.terms) > LONG else request.backend.asked_up_to
    return int(factor * request.limit) if request.verifies else request.limit


def near(request: Request, forms: Forms) -> int:
    """The predicted peak up to which a long program may fit once compiled, so that XLA is asked before other forms of it are searched."""
    is_asked = request.verifies and len(forms.loaded.terms) > LONG
    return int(NEAR * request.limit) if is_asked else request.limit


def keep(request: Request, loaded: Program, before: Schedule) -> Chosen | None:
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
    return Chosen(before, emitted, check, request.backend, limit, unchanged=True)


def _as_exchanged(request: Request, kept: Chosen, written_s: float) -> float:
    """The seconds of the program as written, which were predicted for exchanges as a plan has them, with those that XLA's partitioner has
    put into it."""
    shares = kept.schedule.ex.program.shares
    if shares is None or kept.check is None or kept.check.compiled is None:
        return written_s
    from eqsat_mem.backends.collectives import exchanged, exchanged_s

    found = exchanged(kept.check.compiled.as_text(), shares.devices.total)
    return written_s - exchange_seconds(kept.schedule) + exchanged_s(found, kept.backend, shares.devices)


def _only_written(request: Request, forms: Forms, before: Schedule, reason: str) -> Chosen:
    """The program as it was, of which a sentence says why there is no other."""
    kept = keep(request, forms.loaded, before)
    if kept is not None:
        return kept
    devices = 1 if request.placement is None else request.placement.devices.total
    smallest = request.compared[-1][1] if request.compared else before.peak_bytes
    limit, smallest = map(request.held, (request.limit, smallest))
    raise MemoryLimitError(
        limit, smallest, function=request.name, restrictions=[reason], shared_bytes=request.shared_bytes, devices=devices
    )


def _as_held(chosen: Chosen) -> float:
    """The predicted seconds of a plan, with those that new memory takes if XLA holds so much more than was predicted that it is new."""
    s, fixed = chosen.schedule, _fixed(chosen.schedule.ex.program)
    predicted, held = (chosen.backend.device.fresh_s(total - fixed) for total in (s.peak_bytes, chosen.compiled_bytes or s.peak_bytes))
    return s.seconds + max(held - predicted, 0.0)


def _emit_within(request: Request, forms: Forms, first: SearchResult, as_written_s: float) -> Chosen:
    """Emit a program that holds no more than the limit once compiled: that of a ``first`` search, if it does; ``as_written_s`` is the time
    of the program as written.

    Where no prediction is low enough, or where one that is leaves most of the room, XLA fuses less than the backend assumes: the search
    begins again with its cautious variants. Then, also where what fits is slower than the program as written, with compiler options under
    which programs hold less: first of all with these where they promise more speed. With those under which they hold least where it would
    take for ever.
    """
    errors: list[MemoryLimitError] = []
    found: Chosen | None = None
    best, results = first.best, {request.backend: first}
    cautious = [*_cautious(request.backend)] if best.fits(request.limit) else []
    narrowed = tuple(narrowing(request.backend)) if request.verifies else ()
    order = [request.backend, *cautious, *narrowed]
    if narrowed and best.fits(request.limit) and best.seconds > as_written_s and _is_narrow(request, best):
        results[narrowed[0]] = other = forms.fastest(narrowed[0], request.limit)
        if other.best.fits(request.limit) and other.best.seconds < best.seconds:
            order = [narrowed[0], request.backend, *cautious, *narrowed[1:]]

    def is_tried_after(found: Chosen, backend: Backend) -> bool:
        if backend in cautious:
            return backend == cautious[0] and _leaves_room(found, request.limit)
        if backend is request.backend:
            return best.seconds < found.schedule.seconds
        slowest = 1.0 if _is_narrow(request, best) and backend.narrowed() is not None else HOPELESS
        return found.schedule.seconds > slowest * as_written_s

    for backend in order:
        if (errors or found) and request.deadline.passed():
            continue
        if found is not None and not is_tried_after(found, backend):
            continue
        try:
            result = results.get(backend) or forms.fastest(backend, request.limit)
            s = result.best
            is_known = backend in cautious and s.peak_bytes == best.peak_bytes  # XLA holds more of it, whatever is assumed
            if found is None or (s.fits(request.limit) and s.seconds < found.schedule.seconds and not is_known):
                new = _verified(request, forms, backend, result, as_written_s)
                found = new if found is None or new.schedule.seconds < found.schedule.seconds else found
        except MemoryLimitError as error:
            errors.append(error)
    if found is not None:
        return found
    try:
        raise min(errors, key=lambda error: error.smallest_bytes) from None
    finally:
        errors.clear()  # its frames hold them, and they all that was planned, until cyclic garbage is looked for


def _cautious(backend: Backend) -> Iterator[Backend]:
    """The variants of a backend with fewer and fewer assumptions about fusion."""
    while (variant := backend.cautious()) is not None:
        yield variant
        backend = variant


def _is_narrow(request: Request, s: Schedule) -> bool:
    """Whether the scratch of libraries takes much of what a program may hold beside arguments and outputs."""
    return _room(s.ex.program, request.limit) <= ROOMY * request.backend.library_bytes


def _leaves_room(chosen: Chosen, limit: int) -> bool:
    """Whether a program that was planned for less than the limit holds less than half of what it may beside arguments and outputs."""
    return chosen.planned_limit < limit and _is_half_empty(chosen, limit)


def _is_half_empty(chosen: Chosen, limit: int) -> bool:
    held = chosen.compiled_bytes
    program = chosen.schedule.ex.program
    return held is not None and 2 * _room(program, held) < _room(program, limit)


def _room(program: Program, total: int) -> int:
    """The rest of so many bytes beside arguments and outputs."""
    return total - _fixed(program)


def _fixed(program: Program) -> int:
    """The bytes of arguments and outputs."""
    return argument_bytes(program) + output_bytes(program)


def _verified(request: Request, forms: Forms, backend: Backend, first: SearchResult, as_written_s: float) -> Chosen:
    """Emit, compile, compare with the limit; plan for less while the compiled program holds more. Where it does because values are computed
    again, what fits without is asked about before anything slower, and where there is no time for another search.

    The next planned limit is a guess: a search ends with what is predicted to hold less than halfway from it to the last program that was
    compiled, before other forms are searched. Where nothing does, that is the limit after it.
    Where nothing fits at all as predicted, but nearly, XLA is asked about the plan for what that holds.
    """
    limit, planned_limit, above = request.limit, request.limit, 0
    smallest: tuple[int, Schedule] | None = None
    quick = as_written_s
    best, in_loops = first.best, first.in_loops
    for attempt in range(ATTEMPTS):
        most = (planned_limit + above) // 2 if above else planned_limit
        new = _next(request, forms, backend, planned_limit, most, in_loops) if attempt else best
        if new is None:
            break
        best = new
        if best is in_loops or best.fits(most if best.is_complete else planned_limit):
            planned_limit, in_loops = max(planned_limit, best.peak_bytes), None if best is in_loops else in_loops
            found = compiled(request, backend, best, planned_limit)
            if smallest is None and found.compiled_bytes is not None and found.compiled_bytes > limit and best.chunks:
                found = _gathering(request, found)
                backend, best = found.backend, found.schedule
            held = found.compiled_bytes
            if held is None or held <= limit:
                return _fastest_that_holds_less(request, forms, found, quick, above)
            quick = min(quick, best.seconds)
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


def _next(request: Request, forms: Forms, backend: Backend, planned_limit: int, most: int, in_loops: Schedule | None) -> Schedule | None:
    """The schedule to ask XLA about after one that held too much: what a search finds that is predicted to hold ``most`` at most, or
    what fits ``in_loops`` where that is no slower or there is no time for a search; None where there is neither."""
    found = None if request.deadline.passed() else forms.fastest(backend, planned_limit, near=most).best
    if in_loops is not None and (found is None or not found.fits(most) or found.seconds >= in_loops.seconds):
        return in_loops
    return found


def _fastest_that_holds_less(request: Request, forms: Forms, fitting: Chosen, quick: float, above: int) -> Chosen:
    """A plan that fits, or where it takes far longer than it has to, one that is predicted to hold more and holds less once compiled; where
    it takes longer than the program as written, one that fits if as much less is held than predicted of it as of the plan that fits.

    Args:
        request: what is planned.
        forms: the forms of the program.
        fitting: the plan that fits.
        quick: seconds of the program as written, or of a plan that held too much.
        above: the predicted peak of the last plan that held too much; 0 where there is none.
    """
    backend, limit, fixed = fitting.backend, request.limit, _fixed(fitting.schedule.ex.program)
    held, seconds = fitting.compiled_bytes, fitting.schedule.seconds
    is_far_slower = seconds > (SLOWER if _is_half_empty(fitting, limit) else FAR_SLOWER) * quick
    is_slower = not above and seconds > (SLOWER if request.placement is None else 1.0) * quick  # devices may exchange far more than written
    if held is None or not (is_far_slower or is_slower):
        return fitting
    low, most = fitting.schedule.peak_bytes, request.most_predicted(fixed)
    if not is_far_slower:
        most = min(most, fixed + (limit - fixed) * (low - fixed) / max(held - fixed, 1))
    high = max(int(min(above or ROOM * limit, most)), low)
    planned = (low + high) // 2 if above else high
    for _ in range(TRIED):
        if request.deadline.passed() or low == high:
            break
        s = forms.fastest(backend, planned, slowest=fitting.schedule.seconds / SLOWER).best
        if not s.fits(planned) or fitting.schedule.seconds <= SLOWER * s.seconds:
            if planned == high:
                break
            low = planned
        else:
            found = compiled(request, backend, s, planned)
            if found.compiled_bytes is not None and found.compiled_bytes <= limit:
                fitting, low = found, planned
            else:
                high = min(s.peak_bytes, planned)
        planned = (low + high) // 2
    return fitting


def compiled(request: Request, backend: Backend, s: Schedule, planned_limit: int) -> Chosen:
    """A schedule as code, compiled to be compared with the limit where programs are."""
    code, shares = emit(s, request.name), s.ex.program.shares
    run = request.runnable(code, checked=True)
    return Chosen(s, code, request.compiled(backend, run, s.peak_bytes, () if shares is None else shares.arguments), backend, planned_limit)


def _gathering(request: Request, found: Chosen) -> Chosen:
    """The same schedule with slices gathered, if the backend has that and XLA then holds less: it may where copies of all that loops slice
    are more than what is held above the limit."""
    backend, own = found.backend.gathering(), found.schedule.backend.gathering()
    if backend is None or own is None or found.compiled_bytes is None:
        return found
    program = found.schedule.ex.program
    sliced = {t for loop in loops(found.schedule.seq) for t in loop.body.reads if program.free[t] >> loop.index & 1}
    if sum(map(program.nbytes, sliced)) < found.compiled_bytes - request.limit:
        return found
    other = compiled(request, backend, replace(found.schedule, backend=own), found.planned_limit)
    return other if other.compiled_bytes is not None and other.compiled_bytes < found.compiled_bytes else found


def _tighter(s: Schedule, held: int, limit: int) -> int:
    """The peak to plan for so that temporaries, should they exceed their prediction by as much again, fit."""
    fixed = _fixed(s.ex.program)
    predicted, real = max(s.peak_bytes - fixed, 1), max(held - fixed, 1)
    return min(s.peak_bytes - 1, fixed + int(0.95 * predicted * max(limit - fixed, 0) / real))


def _too_large(request: Request, forms: Forms, s: Schedule, smallest: int) -> MemoryLimitError:
    fixed = _fixed(s.ex.program)
    limit, smallest, fixed = map(request.held, (request.limit, smallest, fixed))
    known = peak_tensors(s), request.name, fixed, (*restrictions(s, request.options), *request.stopped), request.shared_bytes
    devices = 1 if request.placement is None else request.placement.devices.total
    return MemoryLimitError(limit, smallest, *known, devices, _with_more_devices(request, forms))


def _with_more_devices(request: Request, forms: Forms) -> str:
    """The peaks predicted for twice and four times as many devices along the longest mesh axis, up to where the program fits: a sentence,
    empty where nothing is known."""
    shapes = [aval.shape for aval in (*request.jaxpr.in_avals, *request.jaxpr.out_avals)]  # which the devices have to divide
    found: list[tuple[Devices, Schedule]] = []
    for times in (2, 4):
        larger = None if request.placement is None else request.placement.with_more(times, shapes)
        if larger is None or (found and found[-1][1].fits(request.limit)) or forms.deadline.passed():
            break
        wider = Forms(forms.loaded, forms.rules, forms.options, forms.backend, forms.planner, Clock(), larger, forms.deadline)
        found.append((larger.devices, wider.fastest(request.backend, request.limit).best))
    texts = [f"with {devices} {format_bytes(best.peak_bytes - request.shared_bytes, round_up=True)}" for devices, best in found]
    end = ", which fits" if found and found[-1][1].fits(request.limit) else ""
    return f"On more devices the smallest peak is predicted to be: {', '.join(texts)}{end}." if texts else ""
