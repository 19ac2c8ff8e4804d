"""A schedule in words: its loops, and what it holds at its peak."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from eqsat_mem.errors import Tensor
from eqsat_mem.ir import Axes, Block, Dot, Fold, Input, Program, Rename, Term, itemsize, output_sizes
from eqsat_mem.ir.loop_tree import Loop, Seq, walk_regions
from eqsat_mem.ir.ops import collectives
from eqsat_mem.ir.ops.collectives import EXCHANGES, REDUCTIONS, SENT_BY
from eqsat_mem.ir.ops.control import LOOPS
from eqsat_mem.options import Options
from eqsat_mem.reports.exchanges import Exchange, SpreadIndex
from eqsat_mem.reports.plan import LoopSummary
from eqsat_mem.reports.words import (
    KINDS,
    array_type,
    at_place,
    axis_names,
    bodies_of,
    computed,
    describe,
    largest_first,
    lines_of,
    loop_name,
    names_in_body,
    of_a_step,
    operation,
    pieces,
    place_of,
    spans,
    told,
    whole_bytes,
)
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.units import format_bytes

PRICED = {**dict.fromkeys(REDUCTIONS.values(), "all_reduce"), **{called: SENT_BY.get(name, name) for name, called in KINDS.items()}}
"""The collectives at whose prices functions of ``jax.lax`` send."""


def outline(s: Schedule) -> str:
    """The loop tree in one line: ``i/128 (k/64), j/256`` is a loop over k inside one over i, then one over j, each with its chunk."""
    return _outline(s, s.seq) or "no loops"


def _outline(s: Schedule, seq: Seq) -> str:
    parts = []
    for step in seq.steps:
        if isinstance(step, Loop):
            inside = _outline(s, step.body)
            parts.append(f"{s.ex.program.indices[step.index].name}/{s.chunks[step]:,}" + (f" ({inside})" if inside else ""))
        elif isinstance(step, Seq) and (nested := _outline(s, step)):
            parts.append(nested)
    return ", ".join(parts)


def loop_summaries(s: Schedule, names: Mapping[int, str] | None = None) -> list[LoopSummary]:
    """The loops of a schedule, outer ones before those inside: the order of ``loops.loops``. ``names`` are those of indices."""
    return list(_loop_summaries(s, axis_names(s.ex.program) if names is None else names, s.seq, 0))


def _loop_summaries(
    s: Schedule, names: Mapping[int, str], seq: Seq, depth: int, known: frozenset[int] = frozenset()
) -> Iterator[LoopSummary]:
    program = s.ex.program
    for step in seq.steps:
        if isinstance(step, Loop):
            index = program.indices[step.index]
            folds, stacks = ([told(program, t) for t in largest_first(program, ts)] for ts in (step.folds, step.stacks))
            cut = [t for t in pieces(program, s.seq, step) if t not in known]
            axis, words = loop_name(program, names, s.seq, step), _lines_first(program, cut)
            lines = spans(program, computed(step))
            yield LoopSummary(index.name, index.extent, s.chunks[step], depth, folds, stacks, axis, "", words, lines)
            yield from _loop_summaries(s, names, step.body, depth + 1, known.union(cut))
        elif isinstance(step, Seq):
            yield from _loop_summaries(s, names, step, depth, known)


def _lines_first(program: Program, terms: Sequence[int]) -> list[str]:
    """Values in words, the first of each line before others of that line."""
    first = {program.source.get(t): t for t in reversed(terms)}
    ordered = sorted(terms, key=lambda t: first[program.source.get(t)] != t)
    return [f"{format_bytes(whole_bytes(program, t))} {told(program, t)}" for t in ordered]


def body_loops(s: Schedule, names: Mapping[int, str] | None = None) -> Iterator[LoopSummary]:
    """The loops that a schedule puts into the bodies of the user's own loops and branches."""
    program = s.ex.program
    names = axis_names(program) if names is None else names
    for t in program.reachable():
        term = program.terms[t]
        if isinstance(term, Block) and term.out == 0:
            source = program.source.get(t)
            equal = 1 if source is None else source.blocks
            inside = f"each of {equal} equal blocks" if equal > 1 else operation(program, t) + at_place(program, t)
            for body in bodies_of(program, t):
                own = names_in_body(program, names, term, body.ex.program)
                found = (*loop_summaries(body, own), *body_loops(body, own))
                yield from (replace(loop, inside=loop.inside or inside) for loop in found)


def computed_again(s: Schedule) -> list[str]:
    """The results of contractions, folds and calls that several loops compute, each again, in words: the largest first."""
    program = s.ex.program
    regions: defaultdict[Hashable, set[int]] = defaultdict(set)
    results: defaultdict[Hashable, list[int]] = defaultdict(list)
    for number, (_, seq) in enumerate(walk_regions(s.seq)):
        for t in seq.steps:
            if isinstance(t, int) and isinstance(term := program.terms[t], Block | Dot | Fold):
                run = (id(term.call), term.args) if isinstance(term, Block) else t
                regions[run].add(number)
                results[run].append(t)
    several = sorted(
        (results[run] for run, places in regions.items() if len(places) > 1), key=lambda ts: -max(whole_bytes(program, t) for t in ts)
    )
    return [_as_run(program, ts) for ts in several]


def _as_run(program: Program, results: Sequence[int]) -> str:
    """The computation of some results: a loop of the user's by its name and line, another by its largest result."""
    first, t = min(results), largest_first(program, results)[0]
    if operation(program, first) in LOOPS:
        return operation(program, first) + at_place(program, first)
    return f"{format_bytes(whole_bytes(program, t))} {told(program, t)}"


def peak_tensors(s: Schedule) -> list[Tensor]:
    """The values that are held at the peak, largest first: arguments, and values with the user's lines.

    The values inside a loop or branch of the user's that has a plan of its own are listed too. The rest of the peak is scratch of
    operations.
    """
    program = s.ex.program
    arguments = [
        (f"{array_type(b.shape, b.dtype)} argument {b.name}", nbytes, None)
        for b, nbytes in zip(program.inputs, program.input_bytes(), strict=True)
    ]
    return sorted([*arguments, *_values_at_peak(s, "")], key=lambda tensor: -tensor[1])


def _values_at_peak(s: Schedule, inside: str) -> Iterator[Tensor]:
    program, memory = s.ex.program, Memory(s.ex, s.backend)
    live, running = memory.at_peak(s.seq, memory.full_extents(), s.chunks)
    over = sum(nbytes for _, nbytes, _ in live) + sum(program.input_bytes()) - s.peak_bytes
    for t, nbytes, extents in live:
        own = max(nbytes - max(int(over), 0), 0) if t == running else nbytes  # it may be written where an operand stood
        if own:
            yield inside + describe(program, t, extents), own, place_of(program, t)
    if running is None or operation(program, running) not in LOOPS:
        return
    where = f"{inside}in {operation(program, running)}: "
    if bodies := bodies_of(program, running):
        yield from _values_at_peak(max(bodies, key=lambda body: int(body.peak_bytes)), where)
    else:  # it runs as written, and of its steps no more is known than their bytes
        rest = int(s.peak_bytes) - sum(nbytes for _, nbytes, _ in live) - int(sum(program.input_bytes()))
        yield where + of_a_step(operation(program, running)), max(rest, 0), place_of(program, running)


def lines_at_peak(s: Schedule, tensors: Iterable[Tensor]) -> dict[str, str]:
    """The user's lines of the ``tensors`` that are held at the peak by their sources, as far as they can be read."""
    places = {place for *_, place in tensors}
    return {place: line for program in _with_bodies(s) for place, line in lines_of(program).items() if place in places}


def _with_bodies(s: Schedule) -> Iterator[Program]:
    """The program of a schedule and those of the planned bodies of its loops and branches, at any depth."""
    yield s.ex.program
    for t in s.ex.program.reachable():
        for body in bodies_of(s.ex.program, t):
            yield from _with_bodies(body)


def restrictions(s: Schedule, options: Options) -> tuple[str, ...]:
    """The options that may be why tensors of a schedule are whole, each with what to change."""
    program, memory, threshold = s.ex.program, Memory(s.ex, s.backend), options.tensor_size_threshold
    found = []
    if options.accuracy == "bitwise" and any(_rounds_by_shape(program.terms[t]) for t in program.reachable()):
        advice = '"reassociate" allows chunks of them'
        found.append(f'accuracy = "bitwise" computes contractions and floating-point sums in one piece: {advice}.')
    held, _ = memory.at_peak(s.seq, memory.full_extents(), s.chunks)
    if threshold is not None and all(value.nbytes <= threshold for value in held):
        found.append(
            f"tensor_size_threshold = {format_bytes(threshold)} keeps tensors of up to that size whole: lower it, or leave it out."
        )
    left_out = [name for name in ("only_rules", "without_rules") if getattr(options, name)]
    if left_out:
        found.append(f"Rules that {' and '.join(left_out)} leave out may be those that split these tensors.")
    return tuple(found)


def _rounds_by_shape(term: Term) -> bool:
    """Whether a result depends on the order in which elements are added or multiplied."""
    summed = isinstance(term, Dot) or (isinstance(term, Fold) and term.monoid in ("add", "mul"))
    return summed and np.dtype(term.dtype).kind not in "biu"


def output_bytes(program: Program) -> int:
    """Bytes of all results."""
    return sum(output_sizes(program))


# --- several devices -----------------------------------------------------------------------------------


def spread_indices(program: Program) -> list[SpreadIndex]:
    """The indices that a program of one device has shares of."""
    shares = program.shares
    if shares is None:
        return []
    used = 0
    for t in program.reachable():
        used |= shares.dealt_out(program.free[t])
    own = [(i, names) for i, names in shares.spread.items() if used >> i & 1]
    axes, indices, devices = axis_names(program), program.indices, shares.devices
    return [
        SpreadIndex(indices[i].name, names, devices.count(names), indices[i].extent, axes.get(i, ""), shares.padded.get(i))
        for i, names in own
    ]


def exchanges(s: Schedule) -> list[Exchange]:
    """The collectives of a schedule in the order in which they run."""
    extents = [index.extent for index in s.ex.program.indices]
    return list(_exchanges(s, s.seq, extents, 1))


def received_bytes(s: Schedule) -> int:
    """The bytes that a device receives from others in one call."""
    return sum(exchange.received for exchange in exchanges(s)) if s.ex.program.shares is not None else 0


def exchange_seconds(s: Schedule) -> float:
    """The predicted seconds in which devices exchange values in one call."""
    shares = s.ex.program.shares
    if shares is None:
        return 0.0
    return sum(e.times * s.backend.exchange_s(PRICED[e.kind], e.received / max(e.times, 1), e.axes, shares.devices) for e in exchanges(s))


def _exchanges(s: Schedule, seq: Seq, extents: Sequence[int], times: int) -> Iterator[Exchange]:
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for step in seq.steps:
        if isinstance(step, Seq):
            yield from _exchanges(s, step, extents, times)
        elif isinstance(step, Loop):
            chunk, extent = s.chunks[step], extents[step.index]
            inside = [*extents[: step.index], chunk, *extents[step.index + 1 :]]
            yield from _exchanges(s, step.body, inside, times * -(-extent // chunk))
        else:
            term = s.ex.program.terms[step]
            if isinstance(term, Block) and (call := (id(term.call), term.args)) not in seen:
                seen.add(call)  # whichever of its results is the first that is needed
                if term.call.prim.name in EXCHANGES and collectives.rounds(term.call.prim.name, term.call.params):
                    yield _exchange(s.ex.program, step, term, extents, times)
                for body in filter(None, term.call.bodies):  # of a while loop one turn counts
                    inside = [index.extent for index in body.ex.program.indices]
                    yield from _exchanges(body, body.seq, inside, times * int(term.call.params.get("length", 1)))


def _exchange(program: Program, t: int, term: Block, extents: Sequence[int], times: int) -> Exchange:
    def size(axes: Axes, dtype: object) -> int:
        return math.prod(extents[i] for axis in axes for i in axis) * itemsize(dtype)

    call, name = term.call, term.call.prim.name
    read = sum(size(axes, program.terms[a].dtype) for axes, a in zip(call.in_axes, term.args, strict=True))
    made = sum(size(axes, dtype) for axes, dtype in zip(call.out_axes, call.out_dtypes, strict=True))
    kind = REDUCTIONS[call.params["monoid"]] if name == "all_reduce" else KINDS[name]
    source, of = program.source.get(t), _operand(program, term)
    received = int(collectives.received_bytes(name, call.params, read, made)) * times
    return Exchange(kind, tuple(call.params["names"]), of, made, received, times, None if source is None else str(source))


def _operand(program: Program, term: Block) -> str:
    """The operand of an exchange: an argument by its name, else the operation that made it."""
    t = term.args[0]
    while isinstance(other := program.terms[t], Rename):
        t = other.arg
    return program.inputs[other.slot].name if isinstance(other, Input) else describe(program, t)
