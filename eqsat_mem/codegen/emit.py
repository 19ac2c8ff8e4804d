"""A schedule as readable JAX source, and the function it defines.

Values are arrays whose axes are indices in ascending order unless a read says otherwise. A loop becomes ``lax.fori_loop`` over a body that
takes the start of its chunk; what an extent leaves over runs once before the loop with the same body (first, so that the loop continues
in its
buffers). Reads inside a loop are slices of what stands outside.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from eqsat_mem.codegen.calls import Body
from eqsat_mem.codegen.source import Module, Region, Scope, Value, identifier, number, tuple_text, wrap
from eqsat_mem.codegen.tiles import Tiles
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Axes, Block, Call, Dot, Fold, Input, Literal, Map, Program, children
from eqsat_mem.ir.loop_tree import Loop, Seq, regions
from eqsat_mem.ir.ops import MONOIDS, Operation, accumulator, block_op, picks
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.search import Schedule, unscheduled
from eqsat_mem.schedule.split import least_chunk, selection_of

DEEP = 100
"""Kernels of more terms than this are written term by term, since Python's stack is not deep."""


@dataclass(frozen=True)
class Emitted:
    """The source of a program and the function it defines: flat arrays in, a tuple of flat arrays out.

    ``namespace`` is what the source names but does not define: large closed-over arrays, and operations that have no source.
    ``names`` has the term of each variable of the source that holds a value of the program or a slice of one.
    """

    source: str
    function: Callable[..., tuple[Any, ...]]
    namespace: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, int] = field(default_factory=dict)


def emit(schedule: Schedule, name: str = "program") -> Emitted:
    """Write a schedule as source and compile it."""
    module = Module(dict.fromkeys(("jax", "jnp", "lax", "np", "primitives", name), 1))
    writer = _Writer(schedule, name, module)
    source = writer.program()
    namespace = dict(module.namespace)
    exec(compile(source, f"<eqsat_mem {name}>", "exec"), namespace)
    return Emitted(source, namespace[name], module.namespace, writer.holds)


class _Writer(Tiles):
    """Sequences and loops."""

    def __init__(self, schedule: Schedule, name: str, module: Module, arguments: Sequence[str] | None = None):
        super().__init__(schedule.ex, schedule.backend.idioms, name, module, arguments)
        self.schedule = schedule
        self.memory = Memory(schedule.ex, schedule.backend)
        self.holds: dict[str, int] = {}

    # the whole program

    def program(self) -> str:
        top = Scope()
        results = self.statements(top)
        self.note_names(top)
        inputs = ((t, term) for t, term in enumerate(self.program_ir.terms) if isinstance(term, Input))
        self.holds |= {self.arguments[term.slot]: t for t, term in inputs}
        lines = [f"def {self.name}({', '.join(self.arguments)}):", *(f"    {line}" for line in self.module.small), *top.lines]
        lines += [f"    return {tuple_text(results)}", ""]
        helpers = self.module.helpers
        head = [*_outside(self.module.namespace), "import jax", "import jax.numpy as jnp", "import numpy as np", "from jax import lax"]
        if any("primitives." in line for line in lines):
            head.append("from jax.extend.core import primitives")
        head += ["", "", *(line for name in sorted(helpers) for line in (*_plain_source(helpers[name]), "", ""))]
        return "\n".join(head + lines)

    def statements(self, scope: Scope) -> list[str]:
        """Everything that is computed; the sources of the results."""
        self.sequence(self.schedule.seq, scope)
        return [self.output(o.term, o.axes, scope) for o in self.program_ir.outputs]

    def function(self, body: Body, scope: Scope) -> str:
        labels = getattr(body.jaxpr.jaxpr.debug_info, "arg_names", None) or ()
        wanted = [label or "x" for label in labels] if len(labels) == len(body.jaxpr.in_avals) else ["x"] * len(body.jaxpr.in_avals)
        name = identifier(body.word, self.taken)
        arguments = [self.named(text, scope) for text in body.closed_over]
        lines, taken = [], []
        for word, length in body.parameters:
            taken.append(identifier(word, self.taken))
            given = [identifier(label, self.taken) for label in wanted[len(arguments) : len(arguments) + length]]
            if given:
                lines.append(f"{', '.join(given)}{',' if len(given) == 1 else ''} = {taken[-1]}")
            arguments += given
        writer = _Writer(body.schedule or _unplanned(body.jaxpr, arguments, self.schedule.backend), name, self.module, arguments)
        inner = Scope(indent=scope.indent + "    ")
        for line in lines:
            writer.line(inner, line)
        writer.line(inner, f"return {body.results(writer.statements(inner))}")
        self.line(scope, f"def {name}({', '.join(taken)}):")
        scope.lines += inner.lines
        return name

    def user_function(self, own: Operation, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...]) -> str:
        key = own, shapes, dtypes
        if key not in self.module.functions:
            jaxpr = jax.make_jaxpr(own.evaluate)(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes)))
            name = identifier(own.name, self.taken)
            arguments = [identifier(label, self.taken) for label in own.parameters]
            writer = _Writer(_unplanned(jaxpr, arguments, self.schedule.backend), name, self.module, arguments)
            inner = Scope()
            writer.line(inner, f"return {writer.statements(inner)[0]}")
            self.module.small += [f"def {name}({', '.join(arguments)}):", *inner.lines]
            direct = any(shapes) or own.dimensions or _is_elementwise(writer.program_ir)
            self.module.functions[key] = name if direct else f"jnp.vectorize({name})"
        return self.module.functions[key]

    def output(self, t: int, axes: Axes, scope: Scope) -> str:
        return self.in_axes(self.read(t, scope), axes, scope).text

    def sequence(self, seq: Seq, scope: Scope, rescaled: Collection[int] = ()) -> None:
        """The lines of a region; values that are ``rescaled`` are multiplied where a loop combines them."""
        fused = self.memory.fused(seq)
        terms = [s for s in seq.steps if isinstance(s, int)]
        users = Counter(self.program_ir.source_of(c) for s in terms for c in children(self.program_ir.terms[s]))
        kept = frozenset(s for s in fused.kept if isinstance(s, int))
        region = Region(
            frozenset(terms),
            users,
            seq.outs,
            kept,
            self.idioms.fenced(self.ex, seq, fused, rescaled),
        )
        place = {step: k for k, step in enumerate(seq.steps)}
        for step, members in sorted(zip(fused.kept, fused.members), key=lambda kernel: place[kernel[0]]):
            if isinstance(step, int):
                tile = self.schedule.backend.tile(self.ex, step, members, self.extents(scope))
                if tile is not None:
                    self.tile(tile, scope, region)
                elif len(members) > DEEP and not fused.unrolled.intersection(members):
                    for t in members:  # operands first: expressions that call for theirs would nest as deep as the kernel is long
                        self.value(t, scope, region)
                self.value(step, scope, region)
            elif isinstance(step, Seq):
                self.sequence(step, scope)
            else:
                self.loop(step, scope)
        for t in seq.outs:
            if t in region.terms:
                self.value(t, scope, region)

    # loops

    def loop(self, loop: Loop, scope: Scope) -> None:
        extent, chunk = self.program_ir.indices[loop.index].extent, self.schedule.chunks[loop]
        first = self.first_size(loop)
        count = (extent - first) // chunk
        results = [*loop.folds, *loop.stacks]
        names = [identifier(self.word(t), self.taken) for t in results]
        body = identifier(f"chunk_of_{self.indices[loop.index]}", self.taken)
        index = self.indices[loop.index]
        carry = identifier("carry", self.taken)
        ind = scope.indent
        known = [self.ex.rescales[t] for t in loop.rescaled]
        shifts, means = {r.shift: r.level for r in known if r.exponential}, {r.level: r.mean_over for r in known if r.mean_over}
        inner = Scope(scope, loop.index, ind + "    ", shifts=shifts, means=means, chunk=chunk)
        self.line(inner, f"{', '.join(names)}{',' if len(names) == 1 else ''} = {carry}")
        self.sequence(loop.body, inner, loop.rescaled)
        self.note_names(inner)
        self.holds |= {name: t for name, t in zip(names, results) if name not in self.holds}
        carried = dict(zip(results, names))
        returned = self.rescaled(carried, loop, inner) if loop.rescaled else self.updated(carried, loop, inner)
        self.selections(carried, loop, inner)
        self.line(inner, f"return {tuple_text([returned.get(t, name) for t, name in carried.items()])}")
        self.comment(scope, f"loop over {index}: {extent} in chunks of {chunk}")
        self.line(scope, f"def {body}(start_{index}, {carry}, size_{index}):")
        scope.lines += inner.lines
        start = ", ".join(self.initial(t, loop, scope) for t in results) + ("," if len(names) == 1 else "")
        state = identifier("state", self.taken)
        self.line(scope, f"{state} = ({start})")
        if first:
            self.line(scope, f"{state} = {body}({self.start(0, scope)}, {state}, {first})")
        if count == 1:
            self.line(scope, f"{state} = {body}({self.start(first, scope)}, {state}, {chunk})")
        elif count:
            begin = f"{first} + t * {chunk}" if first else f"t * {chunk}"
            self.line(scope, f"{state} = lax.fori_loop(0, {count}, lambda t, {carry}: {body}({begin}, {carry}, {chunk}), {state})")
        self.line(scope, f"{', '.join(names)}{',' if len(names) == 1 else ''} = {state}")
        scope.values |= {t: self.outcome(t, carried, loop, scope) for t in results}

    def outcome(self, t: int, carried: Mapping[int, str], loop: Loop, scope: Scope) -> Value:
        """A result of a loop, from what it has carried."""
        name = carried[t]
        if (block := self.selection(t, loop)) is not None:
            return self.result(block, name, scope)
        exponential = t in loop.rescaled and self.ex.rescales[t].exponential
        if exponential and not any(self.ex.rescales[t].shift in holder.shifts for holder in scope.around()):
            level = self.level(t, {u: self.folded(u, carried[u]) for u in loop.folds}, loop, scope)
            name = self.assign(self.with_helpers(f"without_elements({name}, {level})"), self.layout(t), scope, self.word(t)).text
        return Value(name, self.layout(t)) if t in loop.stacks else self.folded(t, name)

    def folded(self, t: int, name: str) -> Value:
        """What is accumulated, as a value of its dtype."""
        dtype = self.program_ir.terms[t].dtype
        return Value(name if self.accumulator(t) == dtype else f"{name}.astype({self.dtype(dtype)})", self.layout(t))

    def updated(self, carried: Mapping[int, str], loop: Loop, inner: Scope) -> dict[int, str]:
        """Results with those of a chunk; the lines that compute them."""
        for t, name in carried.items():
            if self.selection(t, loop) is None:
                self.line(inner, f"{name} = {self.combined(t, name, loop, inner)}")
        return {}

    def rescaled(self, carried: Mapping[int, str], loop: Loop, inner: Scope) -> dict[int, str]:
        """Results with those of a chunk, under new names: what is rescaled reads levels before and after."""
        new: dict[int, str] = {}
        for t, name in carried.items():
            if self.selection(t, loop) is not None:
                continue
            if t not in loop.rescaled:
                text = self.combined(t, name, loop, inner)
            else:
                parts = {u: self.read(u, inner) for u in loop.folds}
                before, after = ({u: self.folded(u, names[u]) for u in loop.folds if u in names} for names in (carried, new))
                text = self.with_helpers(self.rejoined(t, name, (before, parts, after), loop, inner))
            new[t] = self.assign(text, self.layout(t), inner, f"new_{self.word(t)}").text
        return new

    def rejoined(self, t: int, name: str, folds: Sequence[Mapping[int, Value]], loop: Loop, inner: Scope) -> str:
        """A sum with that of a chunk, for the values of folds before, in the chunk and after."""
        part, known = self.part(t, inner), self.ex.rescales[t]
        if known.mean_over:
            total = children(self.program_ir.terms[known.level])[0]
            sums = [self.aligned(values[total], self.layout(t)).text for values in folds[:2]]
            counts = [self.count(known.mean_over, inner, before) for before in (loop.index, None)]
            return f"joined({name}, {sums[0]}, {counts[0]}, {part}, {sums[1]}, {counts[1]})"
        before, here, after = (self.level(t, values, loop, inner) for values in folds)
        if known.extreme:
            term = self.program_ir.terms[t]
            monoid = MONOIDS[term.monoid if isinstance(term, Fold) else "add"]
            keep = "at_extreme_or_nan" if monoid.name == "min" else "at_extreme"
            none = number(monoid.identity(self.accumulator(t)))
            kept = (f"{keep}({value}, {level}, {after}, {none})" for value, level in ((name, before), (part, here)))
            return monoid.combine_text.format(*kept)
        return f"rescaled({name}, {before}, {after}) + rescaled({part}, {here}, {after})"

    def level(self, t: int, folds: Mapping[int, Value], loop: Loop, scope: Scope) -> str:
        """The level of a rescaled sum for these values of the folds that it is made of, against the axes of the sum."""
        level = self.ex.rescales[t].level
        inside = {step for _, seq in regions(loop.body) for step in seq.steps if isinstance(step, int)}
        there = Scope(scope, indent=scope.indent, values=dict(folds))
        region = Region(frozenset(inside - folds.keys()), Counter(inside), frozenset(), frozenset(), frozenset())
        value = self.value(level, there, region)
        scope.lines += there.lines
        return self.aligned(value, self.layout(t)).text

    def first_size(self, loop: Loop) -> int:
        """What runs before the loop: what its chunks leave over; where elements are picked, the chunk they are first picked from."""
        chunk = self.schedule.chunks[loop]
        rest = self.program_ir.indices[loop.index].extent % chunk
        least = least_chunk(self.ex, loop)
        return rest if least == 1 or rest >= least else rest + chunk

    def start(self, position: int, scope: Scope) -> str:
        """Where a piece outside of its own loop begins.

        XLA would compute ahead of the loop around it, and hold all along, what that loop does not change. So it is not told that this
        number is always the same.
        """
        if scope.index is None:
            return str(position)
        return f"jnp.minimum(start_{self.indices[scope.index]}, 0)" + (f" + {position}" if position else "")

    def selection(self, t: int, loop: Loop) -> Block | None:
        """The operation that picks or writes elements chunk by chunk whose result ``t`` is, if it is one."""
        term = self.program_ir.terms[t]
        return term if t in loop.folds and isinstance(term, Block) else None

    def selections(self, names: Mapping[int, str], loop: Loop, inner: Scope) -> None:
        """What operations have picked or written for the chunks so far, combined with this one's: all results of a call at once."""
        calls: dict[Any, list[tuple[int, str, Block]]] = {}
        for t in loop.folds:
            if (block := self.selection(t, loop)) is not None:
                calls.setdefault((id(block.call), block.args), []).append((t, names[t], block))
        for group in calls.values():
            group.sort(key=lambda result: result[2].out)
            call = group[0][2].call
            more = [self.in_axes(self.read(t, inner), call.out_axes[term.out], inner).text for t, _, term in group]
            picked = [name for _, name, _ in group]
            monoid = block_op(call.prim.name).monoid
            if monoid is not None:
                self.line(inner, f"{picked[0]} = {MONOIDS[monoid].combine_text.format(picked[0], more[0])}")
                continue
            self.line(inner, f"{', '.join(picked)}{',' if len(picked) == 1 else ''} = {self.merged(call, picked, more, loop, inner)}")

    def merged(self, call: Call, before: list[str], more: list[str], loop: Loop, inner: Scope) -> str:
        """The results of a call for the chunks so far and for one more."""
        write = selection_of(call).text
        if write is None:
            return f"{self.combination(call, inner)}({tuple_text(before)}, {tuple_text(more)})"
        text = write(call.params, len(call.in_axes[0]), before, more, f"start_{self.indices[loop.index]}")
        self.carry_helpers(block_op(call.prim.name).helpers, text)
        return text

    def note_names(self, scope: Scope) -> None:
        """Keep which variable of a scope holds which term."""
        for key, value in scope.values.items():
            if value.text.isidentifier():
                self.holds.setdefault(value.text, key if isinstance(key, int) else key[0])

    def accumulator(self, t: int) -> Any:
        """The dtype that a fold is accumulated in: sums of narrow floating-point numbers are kept in float32."""
        term = self.program_ir.terms[t]
        return accumulator(getattr(term, "monoid", "add"), term.dtype)

    def part(self, t: int, inner: Scope) -> str:
        """What a chunk adds to a fold, in the dtype that it is accumulated in."""
        part = self.aligned(self.read(t, inner), self.layout(t))
        if self.accumulator(t) == self.program_ir.terms[t].dtype:
            return part.text
        return f"{wrap(part)}.astype({self.dtype(self.accumulator(t))})"

    def combined(self, t: int, name: str, loop: Loop, inner: Scope) -> str:
        if t in loop.folds:
            term = self.program_ir.terms[t]
            if isinstance(term, Dot):
                return f"{name} + {self.part(t, inner)}"
            assert isinstance(term, Fold)
            return MONOIDS[term.monoid].combine_text.format(name, self.part(t, inner))
        axis, part = self.layout(t).index(loop.index), self.aligned(self.read(t, inner), self.layout(t))
        return f"lax.dynamic_update_slice_in_dim({name}, {part.text}, start_{self.indices[loop.index]}, {axis})"

    def initial(self, t: int, loop: Loop, scope: Scope) -> str:
        """A result of a loop before the first chunk."""
        if (block := self.selection(t, loop)) is not None:
            return self.nothing_picked(block, scope)
        term, shape = self.program_ir.terms[t], self.shape(self.layout(t), scope)
        if t in loop.stacks or isinstance(term, Dot):
            return f"jnp.zeros({shape}, {self.dtype(self.accumulator(t) if t in loop.folds else term.dtype)})"
        assert isinstance(term, Fold)
        identity = MONOIDS[term.monoid].identity(term.dtype)
        return f"jnp.full({shape}, {number(identity)}, {self.dtype(self.accumulator(t))})"

    def nothing_picked(self, block: Block, scope: Scope) -> str:
        """What an operation has picked from no element: an array without any; what it has written to: the identity everywhere."""
        call, dtype = block.call, self.dtype(block.dtype)
        extents = [self.product(axis, scope) for axis in call.out_axes[block.out]]
        if picks(call):
            extents[selection_of(call).axis(call.params, len(call.in_axes[0]))] = "0"
            return f"jnp.zeros({tuple_text(extents)}, {dtype})"
        written = block_op(call.prim.name).monoid is not None
        identity = self.program_ir.terms[block.args[0 if written else len(block.args) // 2 + block.out]]
        assert isinstance(identity, Literal)
        return f"jnp.full({tuple_text(extents)}, {number(identity.value)}, {dtype})"


def _unplanned(body: ClosedJaxpr, names: Sequence[str], backend: Backend) -> Schedule:
    """A function as it is written."""
    return unscheduled(Extraction(load(body, names, backend.lowering)), backend)


def _is_elementwise(program: Program) -> bool:
    """Whether a program of scalars computes the same element by element: of elementwise operations only, and of every argument."""
    terms = [program.terms[t] for t in program.reachable()]
    return all(isinstance(t, Input | Literal | Map) for t in terms) and len(program.inputs) == sum(isinstance(t, Input) for t in terms)


def _outside(namespace: Mapping[str, Any]) -> list[str]:
    """A comment on the names that the source does not define."""

    def what(value: Any) -> str:
        if hasattr(value, "dtype"):
            return f"{value.dtype}{list(value.shape)}"
        return "operation without source" if callable(value) else repr(value)

    names = [f"{name} ({what(value)})" for name, value in namespace.items()]
    return [f"# Not defined here, but in the plan's namespace: {', '.join(names)}."] if names else []


def _plain_source(function: Callable[..., Any]) -> list[str]:
    """The source of a helper, less the annotations, whose names an emitted program does not have."""
    tree = ast.parse(inspect.getsource(function))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(tree).splitlines()
