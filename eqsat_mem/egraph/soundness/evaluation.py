"""Values of terms for many samples at once, and how large the numbers were that were met on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from eqsat_mem import ir
from eqsat_mem.egraph.soundness.compare import change
from eqsat_mem.egraph.soundness.sequential_interpreter import Sequential
from eqsat_mem.egraph.soundness.values import NUDGES, kind, nudged, samples
from eqsat_mem.ir import Program, bits, children, mask_of
from eqsat_mem.ir.interpreter import evaluate_term, from_axes
from eqsat_mem.ir.ops import call_on, named_axes, operation_of

Arrays = Mapping[int, np.ndarray]


@dataclass(frozen=True)
class Values:
    """By term: its values, samples first; per sample the largest number met on the way to it, and whether none was infinite."""

    of: dict[int, np.ndarray]
    scale: dict[int, np.ndarray]
    finite: dict[int, np.ndarray]


def below(program: Program, wanted: Sequence[int], known: Arrays = MappingProxyType({})) -> list[int]:
    """Terms and what they are made of, operands first; not what those are made of that are known."""
    seen, stack = set(wanted), list(wanted)
    while stack:
        t = stack.pop()
        for c in () if t in known else children(program.terms[t]):
            if c not in seen:
                seen.add(c)
                stack.append(c)
    return sorted(seen)


def arguments(program: Program, kinds: Sequence[str], rng: np.random.Generator, wanted: Sequence[int]) -> dict[int, np.ndarray]:
    """An array for each input that the terms ``wanted`` read, by its slot; the first axis counts the kinds of values."""
    slots = sorted({term.slot for t in below(program, wanted) if isinstance(term := program.terms[t], ir.Input)})
    return {slot: samples(program.inputs[slot].shape, program.inputs[slot].dtype, kinds, rng) for slot in slots}


def evaluated(
    program: Program,
    args: Arrays,
    wanted: Sequence[int],
    count: int,
    known: Arrays = MappingProxyType({}),
    extents: Mapping[int, int] = MappingProxyType({}),
) -> Values:
    """All terms that ``wanted`` need, for ``count`` samples; ``known`` are values of some of them. Indices may have other ``extents``."""
    many = program.empty_like()
    for i, extent in extents.items():
        many.indices[i] = ir.Index(many.indices[i].name, extent)
    sample = many.new_index("sample", count)
    machine, results = Sequential(), {}  # type: ignore[var-annotated]
    ids: dict[int, int] = {}
    values: dict[int, np.ndarray] = {}  # as the interpreter has them: samples last
    order = below(program, wanted, known)
    with np.errstate(all="ignore"):
        for t in order:
            term = program.terms[t]
            if t in known or isinstance(term, ir.Input):
                axes, given = _given(program, t, args, known)
                many.inputs.append(ir.Buffer(f"v{t}", given.shape, term.dtype))
                ids[t] = many.add(ir.Input(term.dtype, len(many.inputs) - 1, ((sample,), *axes)))
                values[ids[t]] = from_axes(many, given, ((sample,), *axes))
                continue
            term = ir.with_children(term, tuple(ids[c] for c in children(term)))
            if isinstance(term, ir.Block) and (own := operation_of(term.call.params)) is not None:
                named = tuple(named_axes(own, term.call).values())
                term = ir.Block(term.dtype, call_on(own, named, [many.free[a] for a in term.args], term.dtype), term.args, 0)
            ids[t] = many.add(term)
            if ids[t] not in values:
                values[ids[t]] = _value(many, ids[t], values, results, machine)
    of = {t: np.moveaxis(values[ids[t]], -1, 0) if many.free[ids[t]] >> sample & 1 else _repeated(values[ids[t]], count) for t in order}
    return _measured(program, order, of, known)


def _given(program: Program, t: int, args: Arrays, known: Arrays) -> tuple[ir.Axes, np.ndarray]:
    """The axes, less that of samples, and the values of a term that is known, or of an argument."""
    if t in known:
        return tuple((i,) for i in bits(program.free[t])), known[t]
    term = program.terms[t]
    assert isinstance(term, ir.Input)
    return term.axes, args[term.slot]


def _value(many: Program, t: int, values: dict[int, np.ndarray], results: dict[Any, list[Any]], machine: Sequential) -> np.ndarray:
    term = many.terms[t]
    match term:
        case ir.Literal():
            return np.asarray(term.value, term.dtype)
        case ir.Iota():
            return np.arange(many.indices[term.index].extent).astype(term.dtype)
    return np.asarray(evaluate_term(many, t, (), values, results, machine))


def _repeated(value: np.ndarray, count: int) -> np.ndarray:
    return np.broadcast_to(value, (count, *value.shape))


def over(program: Program, value: np.ndarray, have: int, want: int) -> np.ndarray:
    """Samples over the indices ``have``, repeated along those of ``want``."""
    inner = dict(zip(bits(have), value.shape[1:]))
    kept = [inner.get(i, 1) for i in bits(want)]
    shape = [inner.get(i, program.indices[i].extent) for i in bits(want)]
    return np.broadcast_to(value.reshape([len(value), *kept]), [len(value), *shape])


def moved(program: Program, args: Arrays, wanted: Sequence[int], sides: Sequence[np.ndarray]) -> np.ndarray:
    """The farthest that terms move, each from its values over the indices of all of them, when last bits of the arguments change."""
    free, farthest = mask_of(i for t in wanted for i in bits(program.free[t])), np.zeros(sides[0].shape)
    for by in NUDGES:
        values = evaluated(program, {slot: nudged(a, by) for slot, a in args.items()}, wanted, len(sides[0])).of
        for t, side in zip(wanted, sides):
            farthest = np.maximum(farthest, change(side, over(program, values[t], program.free[t], free)))
    return farthest


def cut(program: Program, t: int, value: np.ndarray, index: int, positions: Sequence[int]) -> np.ndarray:
    """Samples of a term at some positions along an index, if it depends on that."""
    inner = list(bits(program.free[t]))
    return np.take(value, positions, axis=1 + inner.index(index)) if index in inner else value


def _measured(program: Program, order: Sequence[int], of: dict[int, np.ndarray], known: Arrays) -> Values:
    scale: dict[int, np.ndarray] = {}
    finite: dict[int, np.ndarray] = {}
    for t in order:
        value, operands = of[t], () if t in known else children(program.terms[t])
        count = len(value)
        if kind(value.dtype) in "fc":
            met = np.abs(value.astype(np.complex128 if kind(value.dtype) == "c" else np.float64)).reshape(count, -1)
            usual, ends = np.where(np.isfinite(met), met, 0.0).max(1, initial=0.0), ~np.isinf(met).any(1)
        else:
            usual, ends = np.zeros(count), np.ones(count, bool)
        scale[t] = np.max([usual, *(scale[c] for c in operands)], axis=0)
        finite[t] = np.all([ends, *(finite[c] for c in operands)], axis=0)
    return Values(of, scale, finite)
