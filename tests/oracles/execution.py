"""Loop trees run step by step: the slow, obvious meaning of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from eqsat_mem.ir import Block, Dot, Fold, Index, Program, Rename, bits, children, interpreter, is_leaf
from eqsat_mem.ir.loop_tree import Loop, Seq, walk_regions
from eqsat_mem.ir.ops import MONOIDS, block_op
from eqsat_mem.schedule.schedules import Schedule
from tests.oracles import stepwise

Ranges = dict[int, slice]
"""The positions of the current chunk of each index that is looped over."""


# --- values -----------------------------------------------------------------------------------------


def execute(made_by: Schedule, args: Sequence[Any]) -> list[Any]:
    """The outputs of a program, computed chunk by chunk in the order of its loop tree."""
    run = _Execution(made_by, args)
    run.sequence(made_by.seq, top := _Frame({}))
    program = run.program
    return [np.asarray(interpreter.to_axes(program, run.fetch(o.term, top, {}), program.free[o.term], o.axes)) for o in program.outputs]


@dataclass
class _Frame:
    """The values that one turn of a body has made; axes are indices in ascending order."""

    ranges: Ranges
    outer: _Frame | None = None
    values: dict[Any, Any] = field(default_factory=dict)
    shifts: dict[int, int] = field(default_factory=dict)
    means: dict[int, int] = field(default_factory=dict)

    def around(self) -> Iterator[_Frame]:
        yield self
        if self.outer is not None:
            yield from self.outer.around()


@dataclass
class _Execution:
    schedule: Schedule
    args: Sequence[Any]
    jaxprs: dict[Any, Any] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        return self.schedule.ex.program

    def sequence(self, seq: Seq, frame: _Frame) -> None:
        for step in seq.steps:
            if isinstance(step, int):
                frame.values[step] = self.compute(step, frame)
            elif isinstance(step, Seq):
                self.sequence(step, frame)
            else:
                self.loop(step, frame)

    def loop(self, loop: Loop, frame: _Frame) -> None:
        extent, chunk = self.program.indices[loop.index].extent, self.schedule.chunks[loop]
        stacked: dict[int, list[Any]] = {t: [] for t in loop.stacks}
        folded: dict[int, Any] = {}
        for start in range(0, extent, chunk):
            inner = _Frame({**frame.ranges, loop.index: slice(start, min(start + chunk, extent))}, frame)
            known = [self.schedule.ex.rescales[t] for t in loop.rescaled]
            inner.shifts = {r.shift: r.level for r in known if r.exponential}
            inner.means = {r.level: r.mean_over for r in known if r.mean_over}
            self.sequence(loop.body, inner)
            before = dict(folded)
            for t in loop.stacks:
                stacked[t].append(inner.values[t])
            for t in loop.folds:
                if self.picks(t):
                    stacked.setdefault(t, []).append((inner.values[t], start))
                    continue
                so_far, part = before.get(t), inner.values[t]
                if t in loop.rescaled and so_far is not None and self.schedule.ex.rescales[t].mean_over:
                    folded[t] = self.joined(t, (so_far, part), (before, inner.values), loop, inner, start)
                    continue
                if t in loop.rescaled and so_far is not None:
                    levels = [self.level(t, values, loop, inner) for values in (before, inner.values, folded)]
                    so_far, part = self.rescaled(t, so_far, levels[0], levels[2]), self.rescaled(t, part, levels[1], levels[2])
                folded[t] = part if so_far is None else self.combine(t, so_far, part)
        sums = dict(folded)
        for t in loop.rescaled:
            if not self.schedule.ex.rescales[t].exponential:
                continue
            if not any(self.schedule.ex.rescales[t].shift in around.shifts for around in frame.around()):
                folded[t] = np.where(np.isneginf(self.level(t, sums, loop, frame)), np.nan, folded[t]).astype(folded[t].dtype)
        picked = [t for t in stacked if t in loop.folds]
        frame.values.update({t: self.picked(t, {u: stacked[u] for u in picked}) for t in picked})
        for t, parts in stacked.items():
            if t in picked:
                continue
            frame.values[t] = np.concatenate(parts, list(bits(self.program.free[t])).index(loop.index))
        frame.values.update(folded)

    def picks(self, t: int) -> bool:
        """Whether a fold picks some elements of each chunk, rather than combine the results of chunks by a monoid."""
        term = self.program.terms[t]
        return isinstance(term, Block) and block_op(term.call.prim.name).monoid is None

    def picked(self, t: int, parts: dict[int, list[Any]]) -> Any:
        """The largest of what ``top_k`` has picked from every chunk, or their places: the largest first, of equal ones the first."""
        program, term = self.program, self.program.terms[t]
        both = {program.terms[u].out: u for u in parts if _same_call(program.terms[u], term)}  # type: ignore[attr-defined]
        (own,) = set(bits(program.free[both[0]])) - set(bits(program.free[both[1]]))
        axis = list(bits(program.free[both[0]])).index(own)
        values = np.concatenate([part for part, _ in parts[both[0]]], axis)
        order = np.argsort(-values, axis, kind="stable").take(range(program.indices[own].extent), axis)
        if term.out == 0:  # type: ignore[attr-defined]
            return np.take_along_axis(values, order, axis)
        (place,) = set(bits(program.free[both[1]])) - set(bits(program.free[both[0]]))
        axis_of_places = list(bits(program.free[both[1]])).index(place)
        places = np.concatenate([part + start for part, start in parts[both[1]]], axis_of_places)
        found = np.take_along_axis(np.moveaxis(places, axis_of_places, -1), np.moveaxis(order, axis, -1), -1)
        return np.moveaxis(found, -1, axis_of_places)

    def level(self, t: int, folds: dict[Any, Any], loop: Loop, frame: _Frame) -> Any:
        """The level of a rescaled sum for these values of the folds that it is made of, with an axis for each index of the sum."""
        program, level = self.program, self.schedule.ex.rescales[t].level
        inside = {step for _, seq in walk_regions(loop.body) for step in seq.steps if isinstance(step, int)}
        there = _Frame(frame.ranges, frame, {u: folds[u] for u in loop.folds if u in folds})

        def value(u: int) -> None:
            if u in inside and u not in there.values:
                for c in children(program.terms[u]):
                    value(c)
                there.values[u] = self.compute(u, there)

        value(level)
        axes = [k for k, i in enumerate(bits(program.free[t])) if not program.free[level] >> i & 1]
        return np.expand_dims(self.fetch(level, there, frame.ranges), axes)

    def rescaled(self, t: int, total: Any, level: Any, new: Any) -> Any:
        """The result of elements for a former level, rescaled to the present one."""
        if not self.schedule.ex.rescales[t].extreme:
            return rescale(total, level, new)
        monoid = getattr(self.program.terms[t], "monoid", "add")
        stays = (level == new) | (level != level) | ((monoid == "min") & (total < 0))
        return np.where(stays, total, MONOIDS[monoid].identity(total.dtype))

    def joined(self, t: int, squares: Any, folds: Any, loop: Loop, frame: _Frame, start: int) -> Any:
        """The sum of squared differences of two parts from their common mean, in float64."""
        known = self.schedule.ex.rescales[t]
        (total, _), over = children(self.program.terms[known.level]), known.mean_over
        each = self.count(over & ~(1 << loop.index), frame)
        counts = [start * each, len(range(*frame.ranges[loop.index].indices(self.program.indices[loop.index].extent))) * each]
        sums = [np.asarray(values[total], np.float64) for values in folds]
        with np.errstate(all="ignore"):
            together = (sums[0] + sums[1]) / sum(counts)
            apart = [n * (s / n - together) ** 2 for n, s in zip(counts, sums)]
        axes = [k for k, i in enumerate(bits(self.program.free[t])) if not self.program.free[total] >> i & 1]
        return np.asarray(sum(squares) + np.expand_dims(sum(apart), axes), squares[0].dtype)

    def count(self, over: int, frame: _Frame) -> int:
        """The elements of the current chunks along an index set."""
        sizes = [len(range(self.program.indices[i].extent)[frame.ranges.get(i, slice(None))]) for i in bits(over)]
        return int(np.prod(sizes, dtype=np.int64))

    def combine(self, t: int, left: Any, right: Any) -> Any:
        term = self.program.terms[t]
        monoid = "add" if isinstance(term, Dot) else term.monoid if isinstance(term, Fold) else block_op(term.call.prim.name).monoid  # type: ignore[attr-defined]
        return np.asarray(MONOIDS[monoid].combine(left, right))

    def compute(self, t: int, frame: _Frame) -> Any:
        term = self.program.terms[t]
        if isinstance(term, Rename):
            return self.fetch(t, frame, frame.ranges)
        if isinstance(term, Block):
            key = (id(term.call), term.args)
            if key not in frame.values:
                frame.values[key] = self.bind(t, frame, lambda program, values: _all_outputs(program, term, values))
            return frame.values[key][term.out]
        return self.bind(t, frame, lambda program, values: [interpreter._operation(program, term, program.free[t], values, {})])[0]

    def bind(self, t: int, frame: _Frame, meaning: Any) -> list[Any]:
        """A term's operation at the extents of the current chunks."""
        sizes = [
            len(range(*frame.ranges[k].indices(i.extent))) if k in frame.ranges else i.extent for k, i in enumerate(self.program.indices)
        ]
        program = replace(self.program, indices=[Index(i.name, n) for i, n in zip(self.program.indices, sizes)])
        operands = {c: self.fetch(c, frame, frame.ranges) for c in children(self.program.terms[t])}
        for around in frame.around():
            if t in around.means:
                _, count = children(self.program.terms[t])
                operands[count] = np.asarray(self.count(around.means[t], frame), operands[count].dtype)
            if t in around.shifts:
                level = around.shifts[t]
                operands[level] = np.where(np.isneginf(operands[level]), 0, operands[level]).astype(operands[level].dtype)
        key = (t, *sizes, *(v.shape for v in operands.values()))  # the result of scalars has the extents of chunks, too
        if key not in self.jaxprs:
            structs = {c: jax.ShapeDtypeStruct(v.shape, v.dtype) for c, v in operands.items()}
            self.jaxprs[key] = jax.make_jaxpr(lambda values: meaning(program, values))(structs)
        return stepwise.run(self.jaxprs[key], [operands[c] for c in sorted(operands)])

    def fetch(self, t: int, frame: _Frame, ranges: Ranges) -> Any:
        """The value of a term at these ranges of its indices, from the innermost frame that holds it that wide."""
        program, free = self.program, list(bits(self.program.free[t]))
        if isinstance(program.terms[t], Rename):
            return self.renamed(program.terms[t], frame, ranges)
        if is_leaf(program.terms[t]):
            value, have = np.asarray(interpreter._leaf(program, program.terms[t], self.args)), {}
        else:
            holder: _Frame | None = frame
            while holder is not None and (t not in holder.values or any(i in free and i not in ranges for i in holder.ranges)):
                holder = holder.outer
            assert holder is not None, f"%{t} is read before it is computed"
            value, have = holder.values[t], holder.ranges
        return value[tuple(ranges[i] if i in ranges and i not in have else slice(None) for i in free)]

    def renamed(self, term: Rename, frame: _Frame, ranges: Ranges) -> Any:
        """The operand whole along every old and new name, its axes called by the new ones, then sliced along those."""
        to, touched = dict(term.pairs), {i for pair in term.pairs for i in pair}
        whole = self.fetch(term.arg, frame, {i: r for i, r in ranges.items() if i not in touched})
        names = [to.get(i, i) for i in bits(self.program.free[term.arg])]
        value = np.transpose(whole, sorted(range(len(names)), key=names.__getitem__))
        return value[tuple(ranges[i] if i in ranges and i in touched else slice(None) for i in sorted(names))]


def rescale(total: Any, level: Any, new: Any) -> Any:
    """Nothing where there was no element; else exp(level - new) times the total, a level that falls being none yet, or infinite."""
    with np.errstate(all="ignore"):
        factor = np.where(level <= new, np.exp(np.where(level == new, 0, level - new)), 1)
        return np.asarray(np.where(np.isneginf(level), total, total * factor), total.dtype)


def _same_call(one: Any, other: Any) -> bool:
    return isinstance(one, Block) and one.call is other.call and one.args == other.args


def _all_outputs(program: Program, term: Block, values: Any) -> list[Any]:
    results: dict[Any, list[Any]] = {}
    interpreter._block(program, term, values, results)
    return [interpreter.from_axes(program, r, axes) for r, axes in zip(results[term.call, term.args], term.call.out_axes)]
