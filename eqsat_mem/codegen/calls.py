"""Source of calls of primitives: an expression, with local functions for the bodies of loops, branches and reductions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jax.extend.core import ClosedJaxpr

from eqsat_mem.codegen.reads import Reader
from eqsat_mem.codegen.source import Scope, identifier, shape_of, tuple_text
from eqsat_mem.codegen.unknown import unknown
from eqsat_mem.ir import Call, Program
from eqsat_mem.ir.jaxprs import combination_of, consts_and_carries
from eqsat_mem.ir.ops import Operation, bind_call, block_op, block_text, param_text

STANDS_FOR = 7_000_000_000
"""This plus an index's number is a placeholder for the extent of a looped index, until its name in the source is substituted."""


@dataclass(frozen=True)
class Body:
    """A local function in the source.

    Attributes:
        word: its preferred name.
        jaxpr: the function as a jaxpr.
        schedule: its plan, or None if it has no plan of its own.
        closed_over: source of its first arguments, which it reads from the enclosing scope.
        parameters: the name and length of each tuple that it takes; together they hold the other arguments.
        results: returns the source of its return value from the sources of its results.
        inside: the function as a program, where it is run on chunks of some of its indices.
        pieces: source of the extent of a chunk, and the extent, for each of these.
    """

    word: str
    jaxpr: ClosedJaxpr
    schedule: Any
    closed_over: Sequence[str]
    parameters: Sequence[tuple[str, int]]
    results: Callable[[Sequence[str]], str]
    inside: Program | None = None
    pieces: Mapping[int, tuple[str, int]] = field(default_factory=dict)


class Functions(Protocol):
    """The functions that the source defines in addition to the one being written."""

    def local(self, body: Body, scope: Scope) -> str:
        """Write a function into ``scope`` and return its name."""
        ...

    def of_user(self, own: Operation, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...]) -> str:
        """Return the name of the function of a user's operation.

        Args:
            own: the operation.
            shapes: the shapes of its operands; a scalar one also takes arrays.
            dtypes: the dtypes of its operands.
        """
        ...


class CallWriter:
    """A writer of the source of calls."""

    def __init__(self, reads: Reader, functions: Functions):
        self.reads = reads
        self.functions = functions

    def results(self, call: Call, args: Sequence[str], scope: Scope, in_order: bool = False) -> list[str]:
        """Write the lines of a call that returns several arrays, and return the names of its results.

        Args:
            call: the call.
            args: source of its operands.
            scope: the scope to which lines are added.
            in_order: see :class:`eqsat_mem.schedule.idioms.BlockSource`.
        """
        word, several = call.prim.name, len(call.out_axes) > 1
        control = _CONTROL.get(word)
        if control is not None:
            text, target = control(self, call, list(args), scope)
        else:
            text, target = self.call_text(call, args, scope, in_order), _unpacked
        if call.effects and control is not None and not _returned(call):
            self.reads.line(scope, text)
            return ["jnp.zeros((), bool)"]
        names = [identifier(f"{word}_{k}" if several else word, self.reads.module.taken) for k in range(len(call.out_axes))]
        self.reads.line(scope, f"{target(names)} = {text}")
        return names

    def call_text(self, call: Call, args: Sequence[str], scope: Scope, in_order: bool) -> str:
        """Return the source of a call: a readable expression if there is one that is valid for every chunk, else a named function.

        ``in_order``: see :class:`eqsat_mem.schedule.idioms.BlockSource`.
        """
        text = self.readable(call, args, scope, in_order)
        if text is not None:
            self.carry_helpers((*self.reads.idioms.block(call.prim.name).helpers, *block_op(call.prim.name).helpers), text)
            return text
        return f"{self.opaque(call)}({', '.join(args)})"

    def vectorized(self, own: Operation, call: Call, args: Sequence[str], dtypes: tuple[Any, ...]) -> str:
        """Return source of a user's operation, vectorised over the axes that its function does not see."""
        extents = [i.extent for i in self.reads.program.indices]
        named = [axes[len(axes) - len(names) :] for axes, names in zip(call.in_axes, own.operands)]
        function = self.functions.of_user(own, tuple(shape_of(extents, axes) for axes in named), dtypes)
        for has in reversed(call.params["mapped"]):
            axes = "" if all(has) else f", {tuple(0 if one else None for one in has)}"
            function = f"jax.vmap({function}{axes})"
        return f"{function}({', '.join(args)})"

    def carry_helpers(self, helpers: Sequence[Callable[..., Any]], text: str) -> None:
        """Add to the source the definitions of those ``helpers`` that ``text`` calls, and of those that they call in turn."""
        for helper in helpers:
            if f"{helper.__name__}(" in text and helper.__name__ not in self.reads.module.helpers:
                self.reads.module.helpers[helper.__name__] = helper
                self.carry_helpers(helpers, inspect.getsource(helper))

    def once(self) -> str:
        """Return the name of a one that XLA does not know; the first time, write at the beginning of the source where it comes from."""
        module = self.reads.module
        if not module.once:
            text = "unknown(1, 2)[0]"
            self.carry_helpers((unknown,), text)
            module.once = identifier("once", module.taken)
            module.small.append(f"{module.once} = {text}")
        return module.once

    def readable(self, call: Call, args: Sequence[str], scope: Scope, in_order: bool) -> str | None:
        """Return the operation table's source, with the extents of chunks by their names; None if it depends on extents in another way."""
        full = [i.extent for i in self.reads.program.indices]
        looped = [i for i in range(len(full)) if self.reads.looped(i, scope)]
        idiom = self.reads.idioms.block(call.prim.name)
        write = idiom.in_order if in_order and idiom.in_order is not None else idiom.text

        def text(extents: Sequence[int]) -> str | None:
            return block_text(call, args, [shape_of(extents, axes) for axes in call.in_axes], write)

        if not looped:
            return text(full)
        general = text(_replaced(full, {i: STANDS_FOR + i for i in looped}))
        if general is None:
            return None
        for chunk in (full, _replaced(full, dict.fromkeys(looped, 1))):
            if _with_extents(general, {i: str(chunk[i]) for i in looped}) != text(chunk):
                return None
        return _with_extents(general, {i: self.reads.extent(i, scope) for i in looped})

    def opaque(self, call: Call) -> str:
        """Return the name of a function bound in the namespace, for a call that has no source."""
        name = self.reads.module.calls.get(id(call))
        if name is None:
            single = len(call.out_axes) == 1 and not call.prim.multiple_results

            def run(*arrays: Any) -> Any:
                outs = bind_call(call, list(arrays))
                return outs[0] if single else outs

            name = self.reads.module.calls[id(call)] = self.reads.bind(call.prim.name, run)
        return name

    # loops, branches and reductions

    def scan(self, call: Call, args: list[str], scope: Scope) -> tuple[str, Callable[[Sequence[str]], str]]:
        p = call.params
        consts, carry = consts_and_carries(call.params)
        init, xs = args[consts : consts + carry], args[consts + carry :]

        def halves(texts: Sequence[str]) -> str:
            return f"{tuple_text(texts[:carry])}, {tuple_text(texts[carry:])}"

        parameters = (("carry", carry), ("x", len(xs)))
        pieces = self.pieces(call, scope)
        inside = call.inside.program if pieces else None
        body = Body("scan_body", p["jaxpr"], _schedule(call, 0), args[:consts], parameters, halves, inside, pieces)
        name = self.functions.local(body, scope)
        options = "" if xs else f", length={p['length']}"
        options += ", reverse=True" if p["reverse"] else ""
        options += f", unroll={p['unroll']}" if p["unroll"] != 1 else ""
        return f"lax.scan({name}, {tuple_text(init)}, {tuple_text(xs) if xs else None}{options})", halves

    def pieces(self, call: Call, scope: Scope) -> dict[int, tuple[str, int]]:
        """Return the indices of a scan's body of which it is given chunks here, each with source of its extent, and the extent."""
        if call.inside is None:
            return {}
        reads = self.reads
        extents = call.inside.extents([shape_of(reads.extents(scope), axes) for axes in call.in_axes])
        axes = {i: call.in_axes[k][a] for i, (_, k, a) in call.inside.places.items()}
        return {
            i: (reads.product(axis, scope), extents.get(i, call.inside.program.indices[i].extent))
            for i, axis in axes.items()
            if i in extents or any(reads.looped(j, scope) for j in axis)
        }

    def while_loop(self, call: Call, args: list[str], scope: Scope) -> tuple[str, Callable[[Sequence[str]], str]]:
        p = call.params
        first, second = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        init = args[second:]
        parameters = (("carry", len(init)),)
        pieces = self.pieces(call, scope)
        whether, then = ((inside, pieces) for inside in (call.inside.functions if pieces else (None, None)))
        condition = Body("while_condition", p["cond_jaxpr"], _schedule(call, 0), args[:first], parameters, lambda texts: texts[0], *whether)
        body = Body("while_body", p["body_jaxpr"], _schedule(call, 1), args[first:second], parameters, tuple_text, *then)
        names = [self.functions.local(condition, scope), self.functions.local(body, scope)]
        return f"lax.while_loop({', '.join(names)}, {tuple_text(init)})", _unpacked

    def branches(self, call: Call, args: list[str], scope: Scope) -> tuple[str, Callable[[Sequence[str]], str]]:
        jaxprs = call.params["branches"]
        words = ["when_false", "when_true"] if len(jaxprs) == 2 else [f"branch_{k}" for k in range(len(jaxprs))]
        operands = [self.reads.named(a, scope) for a in args[1:]]
        pieces = self.pieces(call, scope)
        inside = call.inside.functions if pieces else [None] * len(jaxprs)
        every = enumerate(zip(words, jaxprs, inside, strict=True))
        bodies = [Body(word, jaxpr, _schedule(call, k), operands, (), tuple_text, own, pieces) for k, (word, jaxpr, own) in every]
        names = [self.functions.local(body, scope) for body in bodies]
        if len(names) == 2:
            return f"lax.cond({args[0]}, {names[1]}, {names[0]})", _unpacked
        return f"lax.switch({args[0]}, {tuple_text(names)})", _unpacked

    def reduce(self, call: Call, args: list[str], scope: Scope) -> tuple[str, Callable[[Sequence[str]], str]]:
        half, p = len(args) // 2, call.params
        operands = f"{tuple_text(args[:half])}, {tuple_text(args[half:])}, {self.combination(call, scope)}"
        if call.prim.name == "reduce":
            return f"lax.reduce({operands}, {tuple(map(int, p['dimensions']))})", _unpacked
        options = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
        return f"lax.reduce_window({operands}, {', '.join(f'{k}={param_text(p[k])}' for k in options)})", _unpacked

    def combination(self, call: Call, scope: Scope) -> str:
        """Write the function with which a call reduces, and return its name."""
        half, jaxpr = len(call.in_axes) // 2, combination_of(call.params)
        return self.functions.local(Body("combine", jaxpr, None, (), (("left", half), ("right", half)), tuple_text), scope)


_CONTROL = {
    "scan": CallWriter.scan,
    "while": CallWriter.while_loop,
    "cond": CallWriter.branches,
    "reduce": CallWriter.reduce,
    "reduce_window": CallWriter.reduce,
}


def _unpacked(names: Sequence[str]) -> str:
    return ", ".join(names) + ("," if len(names) == 1 else "")


def _schedule(call: Call, k: int) -> Any:
    """Return the plan of body ``k`` of a call, or None."""
    return call.bodies[k] if call.bodies else None


def _returned(call: Call) -> bool:
    """Whether a loop or branch has results; one that is called for its effects only has none."""
    p = call.params
    jaxpr = p.get("jaxpr") or p.get("body_jaxpr") or p["branches"][0]
    return bool(jaxpr.out_avals)


def _replaced(extents: Sequence[int], new: dict[int, int]) -> list[int]:
    return [new.get(i, n) for i, n in enumerate(extents)]


def _with_extents(text: str, extents: dict[int, str]) -> str:
    return re.sub(rf"\b{STANDS_FOR // 10**9}\d{{9}}\b", lambda found: extents[int(found[0]) - STANDS_FOR], text)
