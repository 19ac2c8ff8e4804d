"""Reads of values across scopes: names, slices, layouts and shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from eqsat_mem.codegen.source import Fixed, Layout, Scope, SourceModule, Value, array_text, identifier, letters, number, spelled, wrap
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Axes, Block, Const, Fold, Input, Iota, Literal, Map, Rename, Term, bits
from eqsat_mem.ir.ops import operation_of
from eqsat_mem.schedule.idioms import Idioms


@dataclass(frozen=True)
class _Slice:
    """A slice that a loop reads: its source for a ``start``, the word that it is named after, and the scope that it is in.

    It has a name for each of the ``ways`` in which elementwise operations read it: the axis of the slice that each of theirs is, if any.
    """

    made: Callable[..., str]
    start: str
    word: str
    scope: Scope
    ways: dict[tuple[int | None, ...], str] = field(default_factory=dict)


class Reader:
    """Names, layouts and reads of one function's values.

    Args:
        ex: the program that the function computes.
        idioms: how the backend wants slices read.
        module: names and helpers of the whole source.
        arguments: names of the function's arguments, made from those of the program's inputs unless given.
        pieces: for the indices of which the function is given chunks, source of a chunk's extent, and the extent.
    """

    def __init__(
        self,
        ex: Extraction,
        idioms: Idioms,
        module: SourceModule,
        arguments: Sequence[str] | None = None,
        pieces: Mapping[int, tuple[str, int]] = MappingProxyType({}),
    ):
        self.ex, self.pieces = ex, pieces
        self.idioms, self.turned = idioms, idioms.turned(ex)
        self.program = ex.program
        self.module = module
        self.taken = module.taken
        self.arguments = arguments or [identifier(b.name, self.taken) for b in self.program.inputs]
        self.indices = [identifier(i.name, self.taken) for i in self.program.indices]
        self.letters = letters([i.name for i in self.program.indices])
        self.slices: dict[str, _Slice] = {}
        self.last_source = ""

    def bind(self, name: str, value: Any) -> str:
        unique = identifier(name, self.taken)
        self.module.namespace[unique] = value
        return unique

    def const(self, slot: int) -> str:
        """The name of a closed-over array: a small one is written out, a large one stays outside of the source."""
        value = self.program.consts[slot]
        name = self.module.constants.get(id(value))
        if name is None:
            text = array_text(value)
            name = self.bind("const", value) if text is None else identifier("const", self.taken)
            if text is not None:
                self.module.small.append(f"{name} = {text}")
            self.module.constants[id(value)] = name
        return name

    # values

    def read(self, t: int, scope: Scope) -> Value:
        """The value of a term as seen inside a scope: outer values are sliced by the loops between."""
        known = scope.values.get(t)
        if known is not None:
            return known
        term = self.program.terms[t]
        if isinstance(term, Literal):
            return Value(self.typed(term), ())
        if isinstance(term, Iota):
            value = self.iota(term, scope)
        elif isinstance(term, Rename) and not self.known_outside(t, scope, term):
            value = self.renamed(term, scope)
        elif scope.parent is None:
            value = self.argument(t, scope)
        else:
            value = self.sliced(t, self.read(t, scope.parent), scope, scope)
        scope.values[t] = value
        return value

    def known_outside(self, t: int, scope: Scope, term: Rename | None = None) -> bool:
        """Whether a scope around this one holds the value of a term, and none inside of that what it is another name of."""
        own = term is not None and term.arg in scope.values
        holder = scope.parent
        while holder is not None and t not in holder.values and not own:
            own = term is not None and term.arg in holder.values
            holder = holder.parent
        return holder is not None and not own

    def outer(self, t: int, scope: Scope, fixed: Fixed) -> Value:
        """A value from outside at fixed positions: taken apart where it stands, so that loops slice what lies side by side in memory."""
        term = self.program.terms[t]
        if not fixed:
            return self.read(t, scope)
        if isinstance(term, Iota):
            return Value(f"{self.dtype(term.dtype)}({fixed[0][1]})", ())
        known = scope.values.get((t, fixed))
        if known is not None:
            return known
        if isinstance(term, Rename):
            value = self.renamed(term, scope, fixed)
        elif scope.parent is not None and (isinstance(term, (Input, Const)) or self.known_outside(t, scope)):
            value = self.sliced(t, self.outer(t, scope.parent, fixed), scope, scope)
        else:
            value = self.pinned(self.read(t, scope), fixed)
            if value.layout:
                value = self.read_once(value.text, value.layout, scope, self.argument_word(t))
        scope.values[(t, fixed)] = value
        return value

    def argument_word(self, t: int) -> str:
        term = self.program.terms[t]
        return self.arguments[term.slot] if isinstance(term, Input) else self.word(t)

    def pinned(self, value: Value, fixed: Fixed) -> Value:
        if not fixed:
            return value
        at = dict(fixed)
        where = tuple(str(at[i]) if i in at else ":" for i in value.layout)
        base = wrap(value)
        return Value(f"{base}[{', '.join(where)}]", tuple(i for i in value.layout if i not in at), picked=(base, where))

    def renamed(self, term: Rename, scope: Scope, fixed: Fixed = ()) -> Value:
        """The operand's array outside of every loop over an old name, its axes called by the new ones, then sliced by the loops inside.

        Loops over a new name have not sliced the operand, wherever they stand.
        """
        chain = [scope]
        while chain[-1].parent is not None:
            chain.append(chain[-1].parent)
        old, new = ({pair[k] for pair in term.pairs} for k in (0, 1))
        inside = max((depth + 1 for depth, holder in enumerate(chain) if holder.index in old), default=0)
        home, pairs = chain[inside], dict(term.pairs)
        old_name = {new: old for old, new in term.pairs}
        value = self.outer(term.arg, home, tuple((old_name.get(i, i), position) for i, position in fixed))
        value = Value(value.text, tuple(pairs.get(i, i) for i in value.layout), value.atom)
        for holder in reversed(chain[inside:]):
            if holder.index in new:
                value = self.sliced(term.arg, value, holder, home)
        for holder in reversed(chain[:inside]):
            value = self.sliced(term.arg, value, holder, holder)
        return value

    def sliced(self, t: int, value: Value, loop: Scope, into: Scope) -> Value:
        """The chunk of a term's value that the loop of a scope is at, as a line of the scope ``into``."""
        if loop.index is None or loop.index not in value.layout:
            return value
        axis, index = value.layout.index(loop.index), self.indices[loop.index]
        turned = t in self.turned or list(value.layout) != sorted(value.layout)
        made = partial(self.idioms.slice, value.text, size=f"size_{index}", axis=axis, dtype=self.program.terms[t].dtype, turned=turned)
        chunk = self.read_once(made(start=f"start_{index}"), value.layout, into, value.text)
        self.slices.setdefault(chunk.text, _Slice(made, f"start_{index}", value.text, into))
        return chunk

    def apart(self, value: Value, layout: Layout) -> Value:
        """A loop's slice as a slice of its own, if an elementwise operation reads it along other axes of ``layout`` than one before.

        Where a compiler takes long for a slice that one kernel reads in two ways, the other begins at the same place, said otherwise.
        """
        own = self.slices.get(value.text)
        if own is None or not self.idioms.reads_slices_one_way or all(i in value.layout for i in layout):
            return value
        way = tuple(value.layout.index(i) if i in value.layout else None for i in layout)
        if way not in own.ways:
            start = f"jnp.maximum({own.start}, {1 - len(own.ways)})"  # which is never less than 0
            text = value.text if not own.ways else self.read_once(own.made(start=start), value.layout, own.scope, own.word).text
            own.ways[way] = text
        return Value(own.ways[way], value.layout, value.atom)

    def hidden(self, t: int, value: Value, kernel: int, scope: Scope) -> Value:
        """The value of a term behind a barrier, or behind one more for each kernel that reads it so: equal ones would be merged."""
        key = t, ("kernel", kernel)
        if key not in scope.values:
            last = scope.values.get((t, "hidden"), value)
            scope.values[t, "hidden"] = scope.values[key] = self.assign(
                f"lax.optimization_barrier({last.text})", value.layout, scope, value.text
            )
        return scope.values[key]

    def argument(self, t: int, scope: Scope) -> Value:
        """An argument or constant as an array with one axis per index."""
        term = self.program.terms[t]
        assert isinstance(term, (Input, Const)), f"%{t} is read before it is computed: {term}"
        name = self.arguments[term.slot] if isinstance(term, Input) else self.const(term.slot)
        flat = tuple(i for axis in term.axes for i in axis)
        text = name
        if any(len(axis) != 1 for axis in term.axes):
            text = f"{name}.reshape({self.shape(flat, scope)})"
        if len(set(flat)) != len(flat):
            kept = tuple(dict.fromkeys(flat))
            text = 'jnp.einsum("{}->{}", {})'.format(*self.spell(flat, kept), text)
            flat = kept
        return Value(name, flat) if text == name else self.read_once(text, flat, scope, name)

    def iota(self, term: Iota, scope: Scope) -> Value:
        index, dtype, extent = self.indices[term.index], self.dtype(term.dtype), self.extent(term.index, scope)
        text = f"lax.iota({dtype}, {extent})"
        if extent == f"size_{index}":  # a loop around this scope runs over the index
            text += f" + jnp.asarray(start_{index}, {dtype})"
        return self.read_once(text, (term.index,), scope, f"iota_{index}")

    # layouts and shapes

    def layout(self, t: int) -> Layout:
        return tuple(bits(self.program.free[t]))

    def aligned(self, value: Value, layout: Layout, whole: bool = False) -> Value:
        """``value`` with an axis (of extent one where it does not depend on it) for each index of ``layout``.

        Leading axes of extent one are left out, as broadcasting allows, unless the ``whole`` layout is asked for.
        """
        have = tuple(i for i in layout if i in value.layout)
        if not value.layout:
            return Value(value.text, (), value.atom)
        text, atom = value.text, value.atom
        if have != value.layout:
            order = tuple(value.layout.index(i) for i in have)
            text, atom = f"{wrap(Value(text, (), atom))}.transpose({', '.join(map(str, order))})", True
        first = 0 if whole else layout.index(have[0])
        where = [":" if i in have else "None" for i in layout[first:]]
        if "None" in where and value.picked is not None and have == value.layout:
            base, positions = value.picked
            text, atom = f"{base}[{', '.join(_with_new_axes(positions, where))}]", True
        elif "None" in where:
            text, atom = f"{wrap(Value(text, (), atom))}[{', '.join(where)}]", True
        return Value(text, layout, atom)

    def in_axes(self, value: Value, axes: Axes, scope: Scope) -> Value:
        """``value`` as an array with exactly these axes; indices that it does not depend on are broadcast."""
        flat = tuple(i for axis in axes for i in axis)
        if value.layout == flat and all(len(axis) == 1 for axis in axes):
            return value
        single = self.at_one(scope) if value.layout else frozenset[int]()
        missing = [i for i in flat if i not in value.layout and i not in single]
        result = self.aligned(value, flat, bool(single)) if value.layout else value
        text, atom = result.text, result.atom
        if missing:
            text, atom = f"jnp.broadcast_to({text}, {self.shape(flat, scope)})", True
        if any(len(axis) != 1 for axis in axes) and not (missing and all(len(axis) == 1 for axis in axes)):
            extents = [self.product(axis, scope) for axis in axes]
            text = f"jnp.reshape({text}, ({', '.join(extents)}{',' if len(extents) == 1 else ''}))"
            atom = True
        return Value(text, flat, atom)

    def extent(self, i: int, scope: Scope) -> str:
        if i in self.pieces:
            return self.pieces[i][0]
        if i in self.at_one(scope):
            return "1"
        return f"size_{self.indices[i]}" if self.looped(i, scope) else str(self.program.indices[i].extent)

    def looped(self, i: int, scope: Scope) -> bool:
        """Whether a scope stands inside a loop over index ``i``, in this function or around it, or at one position of it."""
        return i in self.pieces or i in self.at_one(scope) or any(holder.index == i for holder in scope.around())

    def at_one(self, scope: Scope) -> frozenset[int]:
        """The indices of which a scope computes one position."""
        return frozenset().union(*(holder.at for holder in scope.around()))

    def positions(self, indices: Iterable[int], scope: Scope) -> int:
        """The number of positions that some indices have together in a scope: those of a chunk where a loop runs over one."""
        extents = self.extents(scope)
        return math.prod(extents[i] for i in indices)

    def extents(self, scope: Scope) -> list[int]:
        """The extents of all indices in a scope: those of a chunk where a loop runs over one."""
        chunks = {holder.index: holder.chunk for holder in scope.around()} | {i: n for i, (_, n) in self.pieces.items()}
        chunks |= dict.fromkeys(self.at_one(scope), 1)
        return [chunks.get(i) or index.extent for i, index in enumerate(self.program.indices)]

    def single(self, i: int, scope: Scope) -> bool:
        """Whether a scope stands inside a loop over index ``i`` one by one."""
        return self.looped(i, scope) and self.positions([i], scope) == 1

    def product(self, axis: tuple[int, ...], scope: Scope) -> str:
        factors = [self.extent(i, scope) for i in axis]
        numbers = int(np.prod([int(f) for f in factors if f.isdigit()], dtype=np.int64))
        symbols = [f for f in factors if not f.isdigit()]
        return " * ".join(([str(numbers)] if numbers != 1 or not symbols else []) + symbols)

    def count(self, over: int, scope: Scope, before: int | None = None) -> str:
        """The elements of a chunk along an index set, or of all chunks ``before`` it along one of these indices.

        A number with a point: there may be more than an int32 holds.
        """
        others = tuple(i for i in bits(over) if i != before)
        text = self.product(others, scope) if others else "1"
        number, _, sizes = text.partition(" * ") if text[0].isdigit() else ("1", "", text)
        factors = [f"{number}.0", *([sizes] if sizes else []), *([f"start_{self.indices[before]}"] if before is not None else [])]
        return " * ".join(factors)

    def shape(self, layout: Layout, scope: Scope) -> str:
        parts = [self.extent(i, scope) for i in layout]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"

    def spell(self, *layouts: Layout, ascending: Layout = ()) -> list[str]:
        return spelled(layouts, self.letters, ascending)

    # text

    def assign(self, text: str, layout: Layout, scope: Scope, word: str) -> Value:
        name = identifier(word, self.taken)
        self.line(scope, f"{name} = {text}")
        return Value(name, layout)

    def named(self, text: str, scope: Scope) -> str:
        """A name for an expression that is read more than once."""
        return text if text.isidentifier() else self.assign(text, (), scope, "operand").text

    def read_once(self, text: str, layout: Layout, scope: Scope, word: str) -> Value:
        """A line for what is read, unless it is read already: one array may stand under several names of its axes."""
        for holder in scope.around():
            if text in holder.reads:
                return Value(holder.reads[text], layout)
        value = self.assign(text, layout, scope, word)
        scope.reads[text] = value.text
        return value

    def line(self, scope: Scope, text: str) -> None:
        scope.lines.append(scope.indent + text)

    def comment(self, scope: Scope, text: str) -> None:
        self.line(scope, f"# {text}")

    def where(self, t: int, scope: Scope) -> None:
        source = self.program.source.get(t)
        if source is not None and str(source) != self.last_source:
            self.last_source = str(source)
            self.comment(scope, self.last_source)

    def word(self, t: int) -> str:
        term = self.program.terms[t]
        match term:
            case Map():
                return term.op
            case Fold():
                return {"add": "sum", "mul": "prod", "and": "all", "or": "any"}.get(term.monoid, term.monoid)
            case Block():
                own = operation_of(term.call.params)
                if own is not None:
                    return own.name
                return f"{term.call.prim.name}_{term.out}" if len(term.call.out_axes) > 1 else str(term.call.prim.name)
        return type(term).__name__.lower()

    def dtype(self, dtype: Any) -> str:
        name = np.dtype(dtype).name if isinstance(dtype, (np.dtype, type)) else str(dtype)
        return f"jnp.{'bool_' if name == 'bool' else name}"

    def literal(self, term: Literal) -> str:
        return number(term.value, term.dtype)

    def typed(self, term: Term) -> str:
        assert isinstance(term, Literal)
        return f"{self.dtype(term.dtype)}({self.literal(term)})"


def _with_new_axes(positions: Sequence[str], where: Sequence[str]) -> list[str]:
    """``x[positions][where]`` as one index expression, ``where`` being of ``:`` and ``None`` only."""
    out, wanted = [], list(where)
    for position in positions:
        while position == ":" and wanted and wanted[0] == "None":
            out.append(wanted.pop(0))
        out.append(position)
        if position == ":":
            wanted.pop(0)
    return out + wanted
