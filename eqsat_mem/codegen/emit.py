"""A schedule as readable JAX source, and the function it defines.

Values are arrays whose axes are indices in ascending order unless a read says otherwise. A loop becomes ``lax.fori_loop`` over a body
that takes the start of its chunk; the remainder of an extent runs once before the loop with the same body, so that the loop continues in
its buffers. Reads inside a loop are slices of outer values. Each function of the source is written by parts that are given what
they need: :class:`Reader`, :class:`CallWriter`, :class:`ExpressionWriter`, :class:`RegionWriter`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
from jax import jit as real_jit
from jax.extend.core import ClosedJaxpr

from eqsat_mem.codegen.calls import Body, CallWriter
from eqsat_mem.codegen.expressions import ExpressionWriter
from eqsat_mem.codegen.loops import RegionWriter
from eqsat_mem.codegen.on_mesh import on_mesh
from eqsat_mem.codegen.reads import Reader
from eqsat_mem.codegen.source import Scope, SourceModule, identifier, tuple_text
from eqsat_mem.codegen.unstacked import unstacked
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Input, Literal, Map, Program
from eqsat_mem.ir.ops import Operation
from eqsat_mem.ir.source import EMITTED
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.schedules import Schedule, unscheduled


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

    @cached_property
    def inlined(self) -> Callable[..., tuple[Any, ...]]:
        """The function, which JAX traces once for the same arguments: whoever traces it then gets the same operations sooner."""
        return real_jit(self.function, inline=True)


def emit(schedule: Schedule, name: str = "program") -> Emitted:
    """Write a schedule as source and compile it.

    Args:
        schedule: the loop tree to write, with chunk sizes and its backend.
        name: the name of the function, an identifier.
    """
    module = SourceModule(dict.fromkeys(("jax", "jnp", "lax", "np", "primitives", name), 1))
    writer = _FunctionWriter(schedule, module)
    source = _text(name, writer, module)
    namespace = dict(module.namespace)
    exec(compile(source, EMITTED.format(name), "exec"), namespace)
    return Emitted(source, namespace[name], module.namespace, writer.regions.holds)


class _FunctionWriter:
    """The statements of one function: a schedule's program, with the parts that write it."""

    def __init__(
        self,
        schedule: Schedule,
        module: SourceModule,
        arguments: Sequence[str] | None = None,
        pieces: Mapping[int, tuple[str, int]] = MappingProxyType({}),
    ):
        self.schedule = schedule
        self.reads = Reader(schedule.ex, schedule.backend.idioms, module, arguments, pieces)
        calls = CallWriter(self.reads, _Functions(self.reads, schedule.backend))
        is_whole = arguments is None and schedule.backend.idioms.compiles_equal_kernels_once
        elements = unstacked(schedule.ex.program) if is_whole else {}
        self.regions = RegionWriter(schedule, self.reads, calls, ExpressionWriter(self.reads, calls, elements), arguments is None)

    def statements(self, scope: Scope) -> list[str]:
        """Write everything that is computed into ``scope``; return the sources of the results."""
        self.regions.sequence(self.schedule.seq, scope)
        return [self.reads.in_axes(self.reads.read(o.term, scope), o.axes, scope).text for o in self.reads.program.outputs]


class _Functions:
    """Functions beside the one that ``reads`` belongs to: bodies of loops and branches, and operations of the user's."""

    def __init__(self, reads: Reader, backend: Backend):
        self.reads = reads
        self.backend = backend

    def local(self, body: Body, scope: Scope) -> str:
        reads = self.reads
        labels = getattr(body.jaxpr.jaxpr.debug_info, "arg_names", None) or ()
        wanted = [label or "x" for label in labels] if len(labels) == len(body.jaxpr.in_avals) else ["x"] * len(body.jaxpr.in_avals)
        name = identifier(body.word, reads.taken)
        arguments = [reads.named(text, scope) for text in body.closed_over]
        lines, taken = [], []
        for word, length in body.parameters:
            taken.append(identifier(word, reads.taken))
            given = [identifier(label, reads.taken) for label in wanted[len(arguments) : len(arguments) + length]]
            if given:
                lines.append(f"{', '.join(given)}{',' if len(given) == 1 else ''} = {taken[-1]}")
            arguments += given
        if body.inside is not None:
            schedule = unscheduled(Extraction(body.inside), self.backend)
        else:
            schedule = body.schedule or self._unplanned(body.jaxpr, arguments)
        writer = _FunctionWriter(schedule, reads.module, arguments, body.pieces)
        inner = Scope(indent=scope.indent + "    ")
        for line in lines:
            reads.line(inner, line)
        reads.line(inner, f"return {body.results(writer.statements(inner))}")
        reads.line(scope, f"def {name}({', '.join(taken)}):")
        scope.lines += inner.lines
        return name

    def of_user(self, own: Operation, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...]) -> str:
        key, module = (own, shapes, dtypes), self.reads.module
        if key not in module.functions:
            jaxpr = jax.make_jaxpr(own.evaluate)(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes)))
            name = identifier(own.name, module.taken)
            arguments = [identifier(label, module.taken) for label in own.parameters]
            writer = _FunctionWriter(self._unplanned(jaxpr, arguments), module, arguments)
            inner = Scope()
            self.reads.line(inner, f"return {writer.statements(inner)[0]}")
            direct = any(shapes) or own.dimensions or _is_elementwise(writer.reads.program)
            traced_once = ["@jax.jit"] if direct and own.elementwise else []
            module.small += [*traced_once, f"def {name}({', '.join(arguments)}):", *inner.lines]
            module.functions[key] = name if direct else f"jnp.vectorize({name})"
        return module.functions[key]

    def _unplanned(self, body: ClosedJaxpr, names: Sequence[str]) -> Schedule:
        """A function as it is written: no pass changes it, since options may not allow that."""
        return unscheduled(Extraction(load(body, names, self.backend.preferences, passes=())), self.backend)


def _text(name: str, writer: _FunctionWriter, module: SourceModule) -> str:
    """A whole source: imports, helpers, and the function ``name`` that ``writer`` writes."""
    reads, top = writer.reads, Scope()
    results = writer.statements(top)
    writer.regions.note_names(top)
    inputs = ((t, term) for t, term in enumerate(reads.program.terms) if isinstance(term, Input))
    writer.regions.holds |= {reads.arguments[term.slot]: t for t, term in inputs}
    shares = reads.program.shares
    local = name if shares is None else identifier(f"{name}_on_each_device", module.taken)
    lines = [f"def {local}({', '.join(reads.arguments)}):", *(f"    {line}" for line in module.small), *top.lines]
    lines += [f"    return {tuple_text(results)}", ""]
    lines += [] if shares is None else ["", *on_mesh(name, local, reads.arguments, shares)]
    helpers = module.helpers
    head = [*_outside(module.namespace), "import jax", "import jax.numpy as jnp", "import numpy as np", "from jax import lax"]
    if any("primitives." in line for line in lines):
        head.append("from jax.extend.core import primitives")
    if shares is not None:
        head.append("from jax.sharding import PartitionSpec as P")
    head += ["", "", *(line for name in sorted(helpers) for line in (*_plain_source(helpers[name]), "", ""))]
    return "\n".join(head + lines)


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
