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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from eqsat_mem.expressions import Expressions
from eqsat_mem.ir import Axes, Dot, Fold, children
from eqsat_mem.loops import Loop, Seq, source_of
from eqsat_mem.memory import Memory
from eqsat_mem.ops import MONOIDS
from eqsat_mem.schedule import Schedule
from eqsat_mem.source import Region, Scope, Value, identifier, number, wrap

Layout = tuple[int, ...]
INLINE = 60
"""Expressions that are used once and are shorter than this stand inside their user."""


@dataclass(frozen=True)
class Emitted:
    """The source of a program and the function it defines: flat arrays in, a tuple of flat arrays out."""

    source: str
    function: Callable[..., tuple[Any, ...]]


def emit(schedule: Schedule, name: str = "program") -> Emitted:
    """Write a schedule as source and compile it."""
    writer = _Writer(schedule, name)
    source = writer.program()
    namespace = dict(writer.namespace)
    exec(compile(source, f"<eqsat_mem {name}>", "exec"), namespace)
    return Emitted(source, namespace[name])


class _Writer(Expressions):
    """Sequences and loops."""

    def __init__(self, schedule: Schedule, name: str):
        super().__init__(schedule.ex, name)
        self.schedule = schedule
        self.memory = Memory(schedule.ex)

    # the whole program

    def program(self) -> str:
        top = Scope()
        self.sequence(self.schedule.seq, top)
        results = [self.output(o.term, o.axes, top) for o in self.program_ir.outputs]
        head = ["import jax", "import jax.numpy as jnp", "import numpy as np", "from jax import lax", "", ""]
        head += [line for name in sorted(self.helpers) for line in (*_plain_source(self.helpers[name]), "", "")]
        head.append(f"def {self.name}({', '.join(self.arguments)}):")
        comma = "," if len(results) == 1 else ""
        return "\n".join([*head, *top.lines, f"    return ({', '.join(results)}{comma})", ""])

    def output(self, t: int, axes: Axes, scope: Scope) -> str:
        return self.in_axes(self.read(t, scope), axes, scope).text

    def sequence(self, seq: Seq, scope: Scope) -> None:
        fused = self.memory.fused(seq)
        terms = [s for s in seq.steps if isinstance(s, int)]
        users = Counter(source_of(self.program_ir, c) for s in terms for c in children(self.program_ir.terms[s]))
        kept = frozenset(s for s in fused.kept if isinstance(s, int))
        region = Region(frozenset(terms), users, seq.outs, kept)
        for step in fused.kept:
            if isinstance(step, int):
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
        count, rest = divmod(extent, chunk)
        results = [*loop.folds, *loop.stacks]
        names = [identifier(self.word(t), self.taken) for t in results]
        body = identifier(f"chunk_of_{self.indices[loop.index]}", self.taken)
        index = self.indices[loop.index]
        carry = identifier("carry", self.taken)
        ind = scope.indent
        inner = Scope(scope, loop.index, ind + "    ")
        self.line(inner, f"{', '.join(names)}{',' if len(names) == 1 else ''} = {carry}")
        self.sequence(loop.body, inner)
        for t, name in zip(results, names):
            self.line(inner, f"{name} = {self.combined(t, name, loop, inner)}")
        self.line(inner, f"return ({', '.join(names)}{',' if len(names) == 1 else ''})")
        self.comment(scope, f"loop over {index}: {extent} in chunks of {chunk}")
        self.line(scope, f"def {body}(start_{index}, {carry}, size_{index}):")
        scope.lines += inner.lines
        start = ", ".join(self.initial(t, loop, scope) for t in results) + ("," if len(names) == 1 else "")
        state = identifier("state", self.taken)
        self.line(scope, f"{state} = ({start})")
        if rest:
            self.line(scope, f"{state} = {body}(0, {state}, {rest})")
        if count == 1:
            self.line(scope, f"{state} = {body}({rest}, {state}, {chunk})")
        else:
            begin = f"{rest} + t * {chunk}" if rest else f"t * {chunk}"
            self.line(scope, f"{state} = lax.fori_loop(0, {count}, lambda t, {carry}: {body}({begin}, {carry}, {chunk}), {state})")
        self.line(scope, f"{', '.join(names)}{',' if len(names) == 1 else ''} = {state}")
        for t, name in zip(results, names):
            dtype = self.program_ir.terms[t].dtype
            text = name if t in loop.stacks or self.accumulator(t) == dtype else f"{name}.astype({self.dtype(dtype)})"
            scope.values[t] = Value(text, self.layout(t))

    def accumulator(self, t: int) -> Any:
        """The dtype that a fold is accumulated in: sums of narrow floating-point numbers are kept in float32."""
        term = self.program_ir.terms[t]
        narrow = jnp.issubdtype(term.dtype, jnp.floating) and jnp.finfo(term.dtype).bits < 32
        is_sum = isinstance(term, Dot) or (isinstance(term, Fold) and term.monoid == "add")
        return np.dtype(np.float32) if narrow and is_sum else term.dtype

    def combined(self, t: int, name: str, loop: Loop, inner: Scope) -> str:
        part = self.aligned(self.read(t, inner), self.layout(t))
        if t in loop.folds:
            term = self.program_ir.terms[t]
            if self.accumulator(t) != term.dtype:
                part = Value(f"{wrap(part)}.astype({self.dtype(self.accumulator(t))})", part.layout)
            if isinstance(term, Dot):
                return f"{name} + {part.text}"
            assert isinstance(term, Fold)
            return MONOIDS[term.monoid].combine_text.format(name, part.text)
        axis = self.layout(t).index(loop.index)
        return f"lax.dynamic_update_slice_in_dim({name}, {part.text}, start_{self.indices[loop.index]}, {axis})"

    def initial(self, t: int, loop: Loop, scope: Scope) -> str:
        term = self.program_ir.terms[t]
        shape = self.shape(self.layout(t), scope)
        if t in loop.stacks or isinstance(term, Dot):
            return f"jnp.zeros({shape}, {self.dtype(self.accumulator(t) if t in loop.folds else term.dtype)})"
        assert isinstance(term, Fold)
        identity = MONOIDS[term.monoid].identity(term.dtype)
        return f"jnp.full({shape}, {number(identity)}, {self.dtype(self.accumulator(t))})"


def _plain_source(function: Callable[..., Any]) -> list[str]:
    """The source of a helper, less the annotations, whose names an emitted program does not have."""
    tree = ast.parse(inspect.getsource(function))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.returns = None
    for argument in definition.args.args:
        argument.annotation = None
    return ast.unparse(tree).splitlines()
