"""Programs whose scans compute slice by slice what stood around them.

These are the forms of a program that :mod:`eqsat_mem.transforms.scan_analysis` allows.

A form is traced anew: every term is evaluated whole, as :mod:`eqsat_mem.ir.interpreter` does, but for the slices, which are evaluated with
scan axes of extent one in the body of the scan that reads them. *Checkpointed* scans run in blocks of steps: a scan that makes results
keeps its carry at the start of each block, and a scan that reads those results runs the first one again from there, block by block.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.egraph.rule_files import RuleSet
from eqsat_mem.frontend.inline import lines_of
from eqsat_mem.frontend.roll import strong
from eqsat_mem.ir import Axes, Fold, Iota, Program, bits, children
from eqsat_mem.ir.interpreter import evaluate_term, from_axes, to_axes
from eqsat_mem.ir.ops import MONOIDS, accumulator
from eqsat_mem.passes import SCANS
from eqsat_mem.transforms.control_flow import Choice, Scan, While
from eqsat_mem.transforms.retraced import retraced
from eqsat_mem.transforms.scan_analysis import How, Slices, Stage, Stages

Array = Any
Carry = tuple[list[Array], list[Array]]
"""The carry of a rewritten scan: its own carry, and the folds that accumulate in it."""


EVERY = tuple(stage for stage in Stage if stage >= Stage.FUSE)
"""The stages that hold less and less."""


def forms(ex: Extraction, rules: RuleSet, stages: Sequence[Stage] = EVERY) -> Iterator[Program]:
    """Programs that compute the same with less and less stacked by scans; none if there is nothing to gain."""
    if SCANS not in rules.passes:
        return
    seen = {Stages(ex, Stage.WRITTEN).decisions()}
    for stage in stages:
        found = Stages(ex, stage)
        if found.decisions() in seen:
            continue
        seen.add(found.decisions())
        program = retraced(ex.program, partial(_outputs, found), rules.passes)
        program.passes |= {SCANS.name}
        yield program


def _outputs(stages: Stages, args: Sequence[Array], consts: Sequence[Array]) -> list[Array]:
    """The results of a form; constants are its closed-over arrays, as before."""
    return _Form(stages, args, consts).outputs()


@dataclass
class _Run:
    """The result of running a scan: stacked carries, or those at the starts of blocks with the one after all whole blocks."""

    carries: list[Array]
    entries: list[Array] = field(default_factory=list)
    after_blocks: list[Array] = field(default_factory=list)


class _Form:
    """One form while it is traced: values of terms, whole, with their indices in ascending order, and runs of scans."""

    def __init__(self, stages: Stages, args: Sequence[Array], consts: Sequence[Array]):
        self.stages, self.args = stages, args
        self.program = replace(stages.program, consts=list(consts))
        self.values: dict[int, Array] = {}
        self.calls: dict[Any, list[Array]] = {}
        self.runs: dict[Scan, _Run] = {}
        self.checkpointed = frozenset(stages.checkpointed)

    def outputs(self) -> list[Array]:
        for node in self.stages.order():
            with lines_of(self.program.source.get(min(node.results.values()) if isinstance(node, Scan) else node)):
                if isinstance(node, Scan):
                    self.run(node)
                elif node not in self.values:
                    self.values[node] = evaluate_term(self.program, node, self.args, self.values, self.calls)
        return [self.laid_out(o.term, o.axes) for o in self.program.outputs]

    def laid_out(self, t: int, axes: Any) -> Array:
        return to_axes(self.program, self.values[t], self.program.free[t], axes)

    # scans

    def run(self, scan: Scan) -> None:
        """The values of a scan's results and of the folds that accumulate in it."""
        if not self.stages.changed(scan):
            for t in scan.results.values():
                self.values[t] = evaluate_term(self.program, t, self.args, self.values, self.calls)
            return
        if isinstance(scan, While | Choice):
            results = self.turns(scan) if isinstance(scan, While) else self.chosen(scan)
            self.values |= {t: from_axes(self.program, results[k], scan.call.out_axes[k]) for k, t in scan.results.items()}
            return
        folds = self.stages.folds(scan)
        start = self.init(scan), [_empty(self.program, t) for t in folds]
        if scan in self.checkpointed:
            (carry, sums), stacks = self.in_blocks(scan, start)
        else:
            (carry, sums), stacks, carries = self.steps(scan, folds, _Segment(self, scan, 0, scan.length), start)
            self.runs[scan] = _Run(carries)
        for k, t in scan.results.items():
            result = carry[k] if k < scan.carries else stacks[k - scan.carries]
            self.values[t] = from_axes(self.program, result, scan.call.out_axes[k])
        instead = self.stages.stacked_instead(scan)
        for t, result in zip(instead, stacks[len(stacks) - len(instead) :], strict=True):
            self.values[t] = from_axes(self.program, result, self.stepped(t, scan))
        for t, total in zip(folds, sums):
            self.values[t] = total.astype(self.program.terms[t].dtype)

    def init(self, scan: Scan) -> list[Array]:
        axes = scan.call.in_axes[scan.first_carry :]
        return [strong(self.laid_out(t, a)) for t, a in zip(scan.init, axes)]

    def steps(self, scan: Scan, folds: Sequence[int], segment: _Segment, start: Carry) -> tuple[Carry, list[Array], list[Array]]:
        """The steps of a scan in one segment: its last carry, its stacked results, and the carry before every step."""
        used = self.stages.slices(scan)
        stored = used.of(How.STORED)
        given = {
            "position": segment.start + lax.iota(np.int32, segment.length),
            "stored": [segment.stored(t) for t in stored],
            "bound": [segment.cut(x) for x in self.bound(scan).values()],
            "again": list(map(segment.again, used.again)),
        }

        def step(carry: Carry, x: dict[str, Any]) -> tuple[Carry, tuple[list[Array], list[Array]]]:
            own, sums = carry
            slices = _Slices(self, scan, used, dict(zip(stored, x["stored"])), x["position"])
            for other, (entering, bound, made) in zip(used.again, x["again"]):
                slices.prepare(other, entering, bound, made)
            slices.prepare(scan, own, x["bound"])
            results = slices.results(scan)
            new = [_combined(self.program, t, total, slices.fold(t)) for t, total in zip(folds, sums)]
            instead = [slices.whole_slice(t) for t in self.stages.stacked_instead(scan)]
            return (list(map(strong, results[: scan.carries])), new), ([*results[scan.carries :], *instead], own)

        unroll = scan.call.params["unroll"]
        carry, (stacks, carries) = lax.scan(step, start, given, length=segment.length, reverse=scan.reverse, unroll=unroll)
        return carry, stacks, carries

    def stepped(self, t: int, scan: Scan) -> Axes:
        """The axes of a value whose slices a scan reads or stacks: its steps, then its other indices."""
        scan_axis = bits(self.program.free[t] & scan.axes)[0]
        return ((scan_axis,), *((i,) for i in bits(self.program.free[t]) if i != scan_axis))

    def turns(self, loop: While) -> list[Array]:
        """The results of a ``while`` loop that computes what no turn changes in every turn."""

        def consts() -> list[Array]:
            slices = _Slices(self, loop, self.stages.slices(loop), {}, jnp.zeros((), np.int32))
            return slices.consts(loop)

        def runs(carry: list[Array]) -> Array:
            return jaxpr_as_fun(loop.condition)(*consts()[: loop.condition_consts], *carry)[0]

        def turn(carry: list[Array]) -> list[Array]:
            return list(map(strong, jaxpr_as_fun(loop.body)(*consts()[loop.condition_consts :], *carry)))

        return lax.while_loop(runs, turn, self.init(loop))

    def chosen(self, choice: Choice) -> list[Array]:
        """The results of a branch that computes what no other value needs."""

        def branch(body: ClosedJaxpr) -> list[Array]:
            slices = _Slices(self, choice, self.stages.slices(choice), {}, jnp.zeros((), np.int32))
            return list(map(strong, jaxpr_as_fun(body)(*slices.consts(choice))))

        (which,) = (self.laid_out(t, axes) for t, axes in zip(choice.init, choice.call.in_axes))
        chosen: list[Array] = lax.switch(which, [partial(branch, body) for body in choice.branches])
        return chosen

    def bound(self, scan: Scan) -> dict[int, Array]:
        """The operands read step by step that are laid out whole, by position."""
        axes = scan.call.in_axes[scan.first_carry + scan.carries :]
        return {k: self.laid_out(t, axes[k]) for k, t in scan.whole_xs.items()}

    # checkpoints

    def in_blocks(self, scan: Scan, start: Carry) -> tuple[Carry, list[Array]]:
        """All steps of a scan, block by block, and last (first, where it runs backwards) the steps that make no whole block."""
        size = self.stages.block_size(scan)
        blocks, rest = divmod(scan.length, size)
        folds = self.stages.folds(scan)
        record = self.runs[scan] = _Run([])

        def block(carry: Carry, b: Array) -> tuple[Carry, tuple[list[Array], list[Array]]]:
            after, stacks, _ = self.steps(scan, folds, _Segment(self, scan, b * size, size, b), carry)
            return after, (stacks, carry[0])

        def remainder(carry: Carry) -> tuple[Carry, list[Array]]:
            record.after_blocks = carry[0]
            after, stacks, _ = self.steps(scan, folds, _Segment(self, scan, blocks * size, rest), carry)
            return after, stacks

        tail: list[Array] = []
        if rest and scan.reverse:
            start, tail = remainder(start)
        start, (stacks, record.entries) = lax.scan(block, start, lax.iota(np.int32, blocks), reverse=scan.reverse)
        stacks = [x.reshape((blocks * size, *x.shape[2:])) for x in stacks]
        if rest and not scan.reverse:
            start, tail = remainder(start)
        if rest:
            stacks = [lax.concatenate([x, y], 0) for x, y in zip(stacks, tail)]
        return start, stacks


@dataclass(eq=False)
class _Segment:
    """Consecutive steps of a scan: ``length`` of them from ``start`` on, which are block ``block`` (None: no block)."""

    form: _Form
    scan: Scan
    start: Any
    length: int
    block: Any = None
    _again: dict[Scan, tuple[list[Array], list[Array]]] = field(default_factory=dict)

    def stored(self, t: int) -> Array:
        """The slices of a value, side by side along axis 0."""
        return self.cut(self.form.laid_out(t, self.form.stepped(t, self.scan)))

    def cut(self, array: Array) -> Array:
        if self.length == self.scan.length:
            return array
        start = [jnp.asarray(self.start, np.int32), *[jnp.zeros((), np.int32)] * (array.ndim - 1)]
        return lax.dynamic_slice(array, start, (self.length, *array.shape[1:]), allow_negative_indices=False)

    def again(self, scan: Scan) -> tuple[list[Array], list[Array], list[Array]]:
        """The values from which these steps of another scan run again, side by side: the carries before each and the operands that are laid
        out whole; or else the stacked results of the steps."""
        form = self.form
        bound = [self.cut(x) for x in form.bound(scan).values()]
        if scan not in form.checkpointed:
            return [self.cut(x) for x in form.runs[scan].carries], bound, []
        if scan not in self._again:
            _, stacks, carries = form.steps(scan, [], self, (self.entering(scan), []))
            self._again[scan] = carries, stacks[: len(scan.body.out_avals) - scan.carries]
        carries, stacks = self._again[scan]
        return ([], [], stacks) if form.stages.keeps_results(scan) else (carries, bound, [])

    def entering(self, scan: Scan) -> list[Array]:
        """The carry of another scan before the first of these steps."""
        run = self.form.runs[scan]
        if self.block is None:
            return self.form.init(scan) if scan.reverse else run.after_blocks
        return [lax.dynamic_index_in_dim(x, self.block, 0, keepdims=False, allow_negative_indices=False) for x in run.entries]


class _Slices:
    """The slices that one step of a scan sees: values of terms with scan axes of extent one."""

    def __init__(self, form: _Form, scan: Scan, used: Slices, stored: dict[int, Array], position: Array):
        self.form, self.used, self.position = form, used, position
        one = [replace(index, extent=1) if scan.axes >> i & 1 else index for i, index in enumerate(form.program.indices)]
        self.program, self.scan_axes = replace(form.program, indices=one), scan.axes
        self.values: dict[int, Array] = {}
        self.whole: dict[int, Array] = {}
        self.calls: dict[Any, list[Array]] = {}
        self.prepared: dict[Scan, tuple[list[Array], list[Array]]] = {}
        self.made: dict[Scan, list[Array]] = {}
        self.stored = stored
        self.order, self.next = list(used.how), 0

    def prepare(self, scan: Scan, carry: list[Array], bound: list[Array], made: list[Array] | None = None) -> None:
        """Say what a scan's step starts from, or the stacked results that it has ``made``."""
        self.prepared[scan] = carry, bound
        if made:
            self.made[scan] = [*[None] * scan.carries, *made]

    def value(self, t: int) -> Array:
        """A slice, after those before it."""
        while self.next < len(self.order) and self.order[self.next] <= t:
            u = self.order[self.next]
            self.next += 1
            with lines_of(self.program.source.get(u)):
                self.values[u] = self._value(u)
        return self.values[t]

    def whole_slice(self, t: int) -> Array:
        """A slice without its scan axis, of the dtype of the whole value."""
        return lax.squeeze(self.value(t), [_place(self.program.free[t], self.scan_axes)]).astype(self.program.terms[t].dtype)

    def fold(self, t: int) -> Array:
        """The summand that this step adds to a fold."""
        for c in children(self.program.terms[t]):
            self.value(c)
        with lines_of(self.program.source.get(t)):
            return evaluate_term(self.program, t, (), self.values, self.calls)

    def _value(self, t: int) -> Array:
        how, term, free = self.used.how[t], self.program.terms[t], self.program.free[t]
        if how is How.INVARIANT:
            return self.invariant(t)
        if how is How.STORED:
            return lax.expand_dims(self.stored[t], [_place(free, self.scan_axes)])
        if how in (How.OWN, How.AGAIN):
            scan = self.form.stages.scan_of[t]
            result = lax.expand_dims(self.results(scan)[term.out], [0])  # type: ignore[attr-defined]
            return from_axes(self.program, result, scan.call.out_axes[term.out])  # type: ignore[attr-defined]
        if isinstance(term, Iota):
            return lax.expand_dims(self.position.astype(term.dtype), [0])
        return evaluate_term(self.program, t, (), self.values, self.calls)

    def results(self, scan: Scan) -> list[Array]:
        """The results of this step of a scan."""
        if scan not in self.made:
            carry, bound = self.prepared[scan]
            axes, first = scan.call.in_axes, scan.first_carry + scan.carries
            whole = dict(zip(scan.whole_xs, bound))
            xs = [whole[k] if k in whole else self.read(t, a) for k, (t, a) in enumerate(zip(scan.xs, axes[first:]))]
            self.made[scan] = list(jaxpr_as_fun(scan.body)(*self.consts(scan), *carry, *xs))
        return self.made[scan]

    def consts(self, scan: Scan) -> list[Array]:
        """The operands of a scan that every step reads whole."""
        program = self.form.program
        return [to_axes(program, self.invariant(t), program.free[t], a) for t, a in zip(scan.consts, scan.const_axes)]

    def invariant(self, t: int) -> Array:
        """A value that does not depend on the step: from outside, or computed again here."""
        for u in self.form.stages.sunk(t)[0]:
            if u not in self.whole:
                with lines_of(self.program.source.get(u)):
                    known = ChainMap(self.whole, self.form.values)
                    self.whole[u] = evaluate_term(self.form.program, u, (), known, self.calls)
        return self.whole[t] if t in self.whole else self.form.values[t]

    def read(self, t: int, axes: Any) -> Array:
        return lax.squeeze(to_axes(self.program, self.value(t), self.program.free[t], axes), [0])


def _place(free: int, scan_axes: int) -> int:
    """The position of the scan axis among a value's indices."""
    return next(k for k, i in enumerate(bits(free)) if scan_axes >> i & 1)


def _empty(program: Program, t: int) -> Array:
    """A fold of nothing."""
    term = program.terms[t]
    monoid = term.monoid if isinstance(term, Fold) else "add"
    shape = [program.indices[i].extent for i in bits(program.free[t])]
    return jnp.full(shape, MONOIDS[monoid].identity(term.dtype), accumulator(monoid, term.dtype))


def _combined(program: Program, t: int, total: Array, part: Array) -> Array:
    term = program.terms[t]
    monoid = term.monoid if isinstance(term, Fold) else "add"
    return MONOIDS[monoid].combine(total, part.astype(total.dtype))
