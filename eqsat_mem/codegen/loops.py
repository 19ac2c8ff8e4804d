"""Source of the regions of a loop tree: sequences of kernels, and loops with their carries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from eqsat_mem.codegen.calls import CallWriter
from eqsat_mem.codegen.expressions import ExpressionWriter
from eqsat_mem.codegen.reads import Reader
from eqsat_mem.codegen.source import Layout, Region, Scope, Value, identifier, number, tuple_text
from eqsat_mem.codegen.tiles import TileWriter
from eqsat_mem.codegen.unknown import zero_after
from eqsat_mem.ir import Block, Call, Dot, Fold, Literal, children
from eqsat_mem.ir.loop_tree import Loop, Seq, walk_regions
from eqsat_mem.ir.ops import MONOIDS, MonoidOp, accumulator, block_op, picks
from eqsat_mem.ir.ops.elementwise import atom
from eqsat_mem.schedule.donated import places, taking
from eqsat_mem.schedule.fusion import adds_to_sum, taken_apart
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.split import least_chunk, selection_of

DEEP = 100
"""Kernels of more terms than this are written term by term, because recursion through their operands would exceed Python's stack."""


class RegionWriter:
    """A writer of the sequences and loops of a schedule.

    Attributes:
        holds: for each variable whose value is a term of the program or a slice of one, that term.
    """

    def __init__(self, schedule: Schedule, reads: Reader, calls: CallWriter, expressions: ExpressionWriter, is_whole: bool = False):
        self.schedule = schedule
        self.reads = reads
        self.calls = calls
        self.expressions = expressions
        self.tiles = TileWriter(reads, calls, expressions)
        self.memory = Memory(schedule.ex, schedule.backend)
        self.holds: dict[str, int] = {}
        taken = taking(schedule.ex.program, schedule.backend.donated) if is_whole else {}
        self.begun = places(schedule.ex.program, schedule.seq, taken).begun

    def sequence(self, seq: Seq, scope: Scope, rescaled: Collection[int] = ()) -> None:
        """Write the lines of a region.

        Args:
            seq: the region.
            scope: the scope to which lines are added.
            rescaled: the folds of the region that the enclosing loop rescales when it combines them.
        """
        fused = self.memory.fused(seq)
        terms = [s for s in seq.steps if isinstance(s, int)]
        users = Counter(self.reads.program.source_of(c) for s in terms for c in children(self.reads.program.terms[s]))
        kept = frozenset(s for s in fused.kept if isinstance(s, int))
        region = Region(
            frozenset(terms),
            users,
            seq.outs,
            kept,
            self.reads.idioms.fences(self.reads.ex, seq, fused, rescaled, self.schedule.backend.is_cheap),
            taken_apart(self.reads.ex, fused, seq.outs),
            self.reads.idioms.repeated_apart(self.reads.ex, fused),
            {t: name for t, name in scope.sums.items() if self.adds_to_sum(t, seq, scope)},
        )
        place = {step: k for k, step in enumerate(seq.steps)}
        every = fused.members_at(self.reads.ex, self.reads.extents(scope), self.schedule.backend)
        for step, members in sorted(zip(fused.kept, every), key=lambda kernel: place[kernel[0]]):
            if isinstance(step, int):
                if step in region.apart:
                    continue
                term = self.reads.program.terms[step]
                known = isinstance(term, Block) and (id(term.call), term.args) in scope.calls
                tile = None if known else self.schedule.backend.tile(self.reads.ex, step, members, self.reads.extents(scope))
                if tile is not None:
                    self.tiles.tile(tile, scope, region)
                elif len(members) > DEEP and not fused.unrolled.intersection(members):
                    for t in members:  # operands first: the recursion through operands would otherwise be as deep as the kernel
                        self.expressions.value(t, scope, region)
                self.expressions.value(step, scope, region)
            elif isinstance(step, Seq):
                self.sequence(step, scope)
            else:
                self.loop(step, seq, scope)
        for t in seq.outs:
            if t in region.terms:
                self.expressions.value(t, scope, region)

    def loop(self, loop: Loop, seq: Seq, scope: Scope) -> None:
        """Write a loop of a region: a function of one chunk, and its calls for a first piece and for all other chunks."""
        extent, chunk = self.reads.program.indices[loop.index].extent, self.schedule.chunks[loop]
        first = self.first_size(loop)
        count = (extent - first) // chunk
        results = [*loop.folds, *loop.stacks]
        names = [identifier(self.reads.word(t), self.reads.taken) for t in results]
        body = identifier(f"chunk_of_{self.reads.indices[loop.index]}", self.reads.taken)
        index = self.reads.indices[loop.index]
        carry = identifier("carry", self.reads.taken)
        ind = scope.indent
        known = [self.reads.ex.rescales[t] for t in loop.rescaled]
        shifts, means = {r.shift: r.level for r in known if r.exponential}, {r.level: r.mean_over for r in known if r.mean_over}
        sums = dict(zip(loop.folds, names))
        inner = Scope(scope, loop.index, ind + "    ", shifts=shifts, means=means, chunk=chunk, sums=sums)
        self.reads.line(inner, f"{', '.join(names)}{',' if len(names) == 1 else ''} = {carry}")
        begun = self.begun.get(loop, {})
        for t, argument in begun.items():  # chunks of it that are still to be written over
            layout = self.reads.read(argument, scope).layout
            inner.values[argument] = self.reads.sliced(argument, Value(names[results.index(t)], layout), inner, inner)
        self.sequence(loop.body, inner, loop.rescaled)
        self.note_names(inner)
        self.holds |= {name: t for name, t in zip(names, results) if name not in self.holds}
        carried = dict(zip(results, names))
        returned = self.rescaled(carried, loop, inner) if loop.rescaled else self.updated(carried, loop, inner)
        returned |= self.selections(carried, loop, inner)
        self.reads.line(inner, f"return {tuple_text([returned.get(t, name) for t, name in carried.items()])}")
        self.reads.comment(scope, f"loop over {index}: {extent} in chunks of {chunk}")
        self.reads.line(scope, f"def {body}(start_{index}, {carry}, size_{index}):")
        scope.lines += inner.lines
        zero, late = self.late(loop, seq, scope)
        start = ", ".join(self.initial(t, loop, scope, zero if t in late else "") for t in results) + ("," if len(names) == 1 else "")
        state = identifier("state", self.reads.taken)
        self.reads.line(scope, f"{state} = ({start})")

        def piece(position: int, size: int) -> None:
            self.reads.line(scope, f"{state} = {self.piece(body, (position, size), (state, carry), loop, scope)}")

        if first:
            piece(0, first)
        if count == 1:
            piece(first, chunk)
        elif count:
            begin = f"{first} + t * {chunk}" if first else f"t * {chunk}"
            self.reads.line(scope, f"{state} = lax.fori_loop(0, {count}, lambda t, {carry}: {body}({begin}, {carry}, {chunk}), {state})")
        self.reads.line(scope, f"{', '.join(names)}{',' if len(names) == 1 else ''} = {state}")
        scope.values |= {t: self.outcome(t, carried, loop, scope) for t in results}

    def outcome(self, t: int, carried: Mapping[int, str], loop: Loop, scope: Scope) -> Value:
        """Return the value of a loop's result from its carry."""
        name = carried[t]
        if (block := self.selection(t, loop)) is not None:
            narrow = f".astype({self.reads.dtype(block.dtype)})" if self.accumulator(t) != block.dtype else ""
            return self.expressions.result(block, name + narrow, scope)
        exponential = t in loop.rescaled and self.reads.ex.rescales[t].exponential
        if exponential and not any(self.reads.ex.rescales[t].shift in holder.shifts for holder in scope.around()):
            level = self.level(t, {u: self.folded(u, carried[u]) for u in loop.folds}, loop, scope)
            name = self.reads.assign(
                self.expressions.with_helpers(f"without_elements({name}, {level})"), self.reads.layout(t), scope, self.reads.word(t)
            ).text
        return Value(name, self.stacked(t)) if t in loop.stacks else self.folded(t, name)

    def stacked(self, t: int) -> Layout:
        """Return the layout in which loops stack a result: that in which the program returns it, which XLA would copy it into."""
        return self.returned.get(t) or self.reads.layout(t)

    @cached_property
    def returned(self) -> dict[int, Layout]:
        """The layout in which the program returns a value, where it does so once; without those of other indices than the value has."""
        program = self.reads.program
        times = Counter(o.term for o in program.outputs)
        layouts = ((o.term, sum(o.axes, ())) for o in program.outputs if times[o.term] == 1)
        return {t: layout for t, layout in layouts if sorted(layout) == [*self.reads.layout(t)]}

    def folded(self, t: int, name: str) -> Value:
        """Return an accumulator as a value of the term's dtype."""
        dtype = self.reads.program.terms[t].dtype
        return Value(name if self.accumulator(t) == dtype else f"{name}.astype({self.reads.dtype(dtype)})", self.reads.layout(t))

    def updated(self, carried: Mapping[int, str], loop: Loop, inner: Scope) -> dict[int, str]:
        """Write the lines that combine the carried results with those of a chunk in place, and return no new names."""
        for t, name in carried.items():
            if self.selection(t, loop) is None:
                self.reads.line(inner, f"{name} = {self.combined(t, name, loop, inner)}")
        return {}

    def rescaled(self, carried: Mapping[int, str], loop: Loop, inner: Scope) -> dict[int, str]:
        """Combine the carried results with those of a chunk under new names, because rescaling reads the levels before and after.

        Returns:
            The new name of each result.
        """
        new: dict[int, str] = {}
        for t, name in carried.items():
            if self.selection(t, loop) is not None:
                continue
            if t not in loop.rescaled:
                text = self.combined(t, name, loop, inner)
            else:
                parts = {u: self.reads.read(u, inner) for u in loop.folds}
                before, after = ({u: self.folded(u, names[u]) for u in loop.folds if u in names} for names in (carried, new))
                text = self.expressions.with_helpers(self.rejoined(t, name, (before, parts, after), loop, inner))
            new[t] = self.reads.assign(text, self.reads.layout(t), inner, f"new_{self.reads.word(t)}").text
        return new

    def rejoined(self, t: int, name: str, folds: Sequence[Mapping[int, Value]], loop: Loop, inner: Scope) -> str:
        """Return source that combines a rescaled fold with that of a chunk.

        Args:
            t: the fold.
            name: the name of its carry.
            folds: the values of the loop's folds before the chunk, in the chunk, and after it.
            loop: the loop.
            inner: the scope of its body.
        """
        part, known = self.part(t, inner), self.reads.ex.rescales[t]
        if known.mean_over:
            total = children(self.reads.program.terms[known.level])[0]
            sums = [self.reads.aligned(values[total], self.reads.layout(t)).text for values in folds[:2]]
            counts = [self.reads.count(known.mean_over, inner, before) for before in (loop.index, None)]
            return f"joined({name}, {sums[0]}, {counts[0]}, {part}, {sums[1]}, {counts[1]})"
        before, here, after = (self.level(t, values, loop, inner) for values in folds)
        if known.extreme:
            term = self.reads.program.terms[t]
            monoid = MONOIDS[term.monoid if isinstance(term, Fold) else "add"]
            keep = "at_extreme_or_nan" if monoid.name == "min" else "at_extreme"
            none = number(monoid.identity(self.accumulator(t)))
            kept = (f"{keep}({value}, {level}, {after}, {none})" for value, level in ((name, before), (part, here)))
            return monoid.combine_text.format(*kept)
        return f"rescaled({name}, {before}, {after}) + rescaled({part}, {here}, {after})"

    def level(self, t: int, folds: Mapping[int, Value], loop: Loop, scope: Scope) -> str:
        """Return source of the level of a rescaled fold, aligned with its axes, given values of the folds that the level depends on."""
        level = self.reads.ex.rescales[t].level
        inside = {step for _, seq in walk_regions(loop.body) for step in seq.steps if isinstance(step, int)}
        there = Scope(scope, indent=scope.indent, values=dict(folds))
        region = Region(frozenset(inside - folds.keys()), Counter(inside), frozenset(), frozenset(), {})
        value = self.expressions.value(level, there, region)
        scope.lines += there.lines
        return self.reads.aligned(value, self.reads.layout(t)).text

    def first_size(self, loop: Loop) -> int:
        """Return the size of the piece that runs before the loop: the remainder of the extent.

        If the remainder is smaller than the least chunk of a selection, one chunk is added to it.
        """
        chunk = self.schedule.chunks[loop]
        rest = self.reads.program.indices[loop.index].extent % chunk
        least = least_chunk(self.reads.ex, loop)
        return rest if least == 1 or rest >= least else rest + chunk

    def piece(self, body: str, rows: tuple[int, int], names: tuple[str, str], loop: Loop, scope: Scope) -> str:
        """Return source of the state after a piece that is no turn of the loop with the others.

        Args:
            body: the function of a chunk.
            rows: the position at which the piece begins, and its size.
            names: those of the loop's state and of what its turns carry.
            loop: the loop.
            scope: the scope around it.
        """
        (position, size), (state, carry) = rows, names
        changes = any((block := self.selection(t, loop)) is not None and picks(block.call) for t in loop.folds)
        if changes or not self.reads.idioms.keeps_pieces_apart:
            return f"{body}({self.start(position, scope)}, {state}, {size})"
        begin = f"t + {position}" if position else "t"
        return f"lax.fori_loop(0, {self.calls.once()}, lambda t, {carry}: {body}({begin}, {carry}, {size}), {state})"

    def start(self, position: int, scope: Scope) -> str:
        """Return source of the position at which a piece outside of its own loop begins.

        Inside another loop, XLA would hoist everything that depends on a constant position out of that loop and hold it meanwhile. The
        position is therefore written so that XLA cannot see that it is constant.
        """
        if scope.index is None:
            return str(position)
        return f"jnp.minimum(start_{self.reads.indices[scope.index]}, 0)" + (f" + {position}" if position else "")

    def selection(self, t: int, loop: Loop) -> Block | None:
        """Return the block ``t`` if it is a result of an operation that selects or writes elements chunk by chunk, else None."""
        term = self.reads.program.terms[t]
        return term if t in loop.folds and isinstance(term, Block) else None

    def adds_to_sum(self, t: int, seq: Seq, scope: Scope) -> bool:
        """Whether a region, or a stretch of it, writes a chunk of a fold into what its loop has folded so far."""
        assert scope.index is not None, "only loops have sums"
        own = adds_to_sum(self.reads.program, t, scope.index, seq, self.memory.fused(seq))
        return own or any(self.adds_to_sum(t, step, scope) for step in seq.steps if isinstance(step, Seq))

    def selections(self, names: Mapping[int, str], loop: Loop, inner: Scope) -> dict[int, str]:
        """Write the lines that combine the elements selected or written so far with those of a chunk, all results of a call at once.

        Returns:
            The source of each result that blocks have written into.
        """
        written: dict[int, str] = {}
        calls: dict[Any, list[tuple[int, str, Block]]] = {}
        for t in loop.folds:
            if (block := self.selection(t, loop)) is not None:
                calls.setdefault((id(block.call), block.args), []).append((t, names[t], block))
        for group in calls.values():
            group.sort(key=lambda result: result[2].out)
            call = group[0][2].call
            more = [self.reads.in_axes(self.reads.read(t, inner), call.out_axes[term.out], inner).text for t, _, term in group]
            picked = [name for _, name, _ in group]
            if (monoid := self.combines(call)) is not None:
                for (t, name, _), part in zip(group, more):
                    if self.adds_to_sum(t, loop.body, inner):
                        written[t] = part
                        continue
                    self.reads.line(inner, f"{name} = {monoid.combine_text.format(name, self.widened(part, t))}")
                continue
            self.reads.line(inner, f"{', '.join(picked)}{',' if len(picked) == 1 else ''} = {self.merged(call, picked, more, loop, inner)}")
        return written

    @staticmethod
    def combines(call: Call) -> MonoidOp | None:
        """Return the monoid by which a call combines the elements that it folds; None if it picks some, or has a function for it."""
        name = block_op(call.prim.name).monoid
        return None if name is None else MONOIDS[name]

    def merged(self, call: Call, before: list[str], more: list[str], loop: Loop, inner: Scope) -> str:
        """Return source that combines the results of a call for the chunks so far with those of one more chunk."""
        write = selection_of(call).text
        if write is None:
            return f"{self.calls.combination(call, inner)}({tuple_text(before)}, {tuple_text(more)})"
        text = write(call.params, len(call.in_axes[0]), before, more, f"start_{self.reads.indices[loop.index]}")
        self.calls.carry_helpers(block_op(call.prim.name).helpers, text)
        return text

    def note_names(self, scope: Scope) -> None:
        """Record which variable of a scope holds which term."""
        for key, value in scope.values.items():
            if value.text.isidentifier():
                self.holds.setdefault(value.text, key if isinstance(key, int) else key[0])

    def accumulator(self, t: int) -> Any:
        """Return the dtype in which a fold is accumulated: float32 for sums of narrow floating-point numbers."""
        term = self.reads.program.terms[t]
        monoid = block_op(term.call.prim.name).monoid if isinstance(term, Block) else getattr(term, "monoid", "add")
        return term.dtype if monoid is None else accumulator(monoid, term.dtype)

    def part(self, t: int, inner: Scope) -> str:
        """Return source of a chunk's contribution to a fold, in the dtype of the accumulator."""
        return self.widened(self.reads.aligned(self.reads.read(t, inner), self.reads.layout(t)).text, t)

    def widened(self, part: str, t: int) -> str:
        """Return source of a value of a fold's dtype in the dtype of its accumulator."""
        wide = self.accumulator(t)
        return part if wide == self.reads.program.terms[t].dtype else f"{atom(part)}.astype({self.reads.dtype(wide)})"

    def combined(self, t: int, name: str, loop: Loop, inner: Scope) -> str:
        if t in loop.folds:
            term = self.reads.program.terms[t]
            if isinstance(term, Dot):
                return f"{name} + {self.part(t, inner)}"
            assert isinstance(term, Fold)
            return MONOIDS[term.monoid].combine_text.format(name, self.part(t, inner))
        axis, part = self.stacked(t).index(loop.index), self.reads.aligned(self.reads.read(t, inner), self.stacked(t))
        return f"lax.dynamic_update_slice_in_dim({name}, {part.text}, start_{self.reads.indices[loop.index]}, {axis})"

    def late(self, loop: Loop, seq: Seq, scope: Scope) -> tuple[str, Collection[int]]:
        """Write a zero that is known when what a loop reads is there; return its name, and the results of the loop that begin with it."""
        waits = self.memory.waiting(loop, seq) if scope.parent is None else None
        if waits is None:
            return "", ()
        value, late = waits
        zero = identifier("zero", self.reads.taken)
        text = f"zero_after({self.reads.read(value, scope).text})"
        self.calls.carry_helpers((zero_after,), text)
        self.reads.line(scope, f"{zero} = {text}")
        return zero, late

    def initial(self, t: int, loop: Loop, scope: Scope, zero: str) -> str:
        """Return source of the initial carry of a loop's result, with a ``zero`` from :meth:`late` added if there is one."""
        if (block := self.selection(t, loop)) is not None:
            return self.nothing_picked(block, scope)
        if t in (begun := self.begun.get(loop, {})):
            return self.reads.read(begun[t], scope).text
        term, layout = self.reads.program.terms[t], self.stacked(t) if t in loop.stacks else self.reads.layout(t)
        shape = self.reads.shape(layout, scope)
        dtype = self.reads.dtype(self.accumulator(t) if t in loop.folds else term.dtype)
        if t in loop.stacks or isinstance(term, Dot):
            return f"jnp.full({shape}, {zero}, {dtype})" if zero else f"jnp.zeros({shape}, {dtype})"
        assert isinstance(term, Fold)
        text = f"jnp.full({shape}, {number(MONOIDS[term.monoid].identity(term.dtype))}, {dtype})"
        return f"{text} + {zero}.astype({dtype})" if zero else text

    def nothing_picked(self, block: Block, scope: Scope) -> str:
        """Return source of the initial carry of a block: an empty array for a selection, else an array filled with the identity."""
        call, dtype = block.call, self.reads.dtype(block.dtype)
        extents = [self.reads.product(axis, scope) for axis in call.out_axes[block.out]]
        if picks(call):
            extents[selection_of(call).axis(call.params, len(call.in_axes[0]))] = "0"
            return f"jnp.zeros({tuple_text(extents)}, {dtype})"
        row, monoid = block_op(call.prim.name), self.combines(call)
        if monoid is not None and not row.writes_into:
            value = monoid.identity(block.dtype)
        else:
            start = self.reads.program.terms[block.args[0 if monoid is not None else len(block.args) // 2 + block.out]]
            assert isinstance(start, Literal)
            value = start.value
        wide = block.dtype if row.monoid is None else accumulator(row.monoid, block.dtype)
        return f"jnp.full({tuple_text(extents)}, {number(value)}, {self.reads.dtype(wide)})"
