"""Programs of terms, their text form, and the check that they are well formed.

A program is a list of hash-consed terms in topological order. Sharing a term is sharing its value. The terms themselves are in
:mod:`eqsat_mem.ir.terms`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from eqsat_mem.ir.mesh import Shares
from eqsat_mem.ir.source import Source
from eqsat_mem.ir.terms import (
    Axes,
    Axis,
    Block,
    Call,
    Const,
    Dot,
    DotPlus,
    Fold,
    Index,
    Input,
    Iota,
    Literal,
    Map,
    Rename,
    Take,
    Term,
    axes_mask,
    bits,
    children,
    mask_of,
    shortest,
    with_children,
)

# --- programs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Buffer:
    """An argument of the program: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True)
class Output:
    """A result of the program: a term laid out along ``axes`` (indices not free in the term are broadcast)."""

    term: int
    axes: Axes
    weak_type: bool = False


@dataclass
class Program:
    """Terms in topological order with inputs, constants, outputs and effects (roots that must run, in order).

    A program with ``shares`` is what each device of a mesh runs; its inputs and indices are those of one device.
    ``passes`` are the names of the passes that have changed it (:mod:`eqsat_mem.passes`), ``matched`` those of the rules that matched
    anything in the e-graph that it was extracted from. ``repeated`` are the indices along which products repeat themselves in the function
    that was traced: they have these axes there and do not depend on them.
    """

    indices: list[Index] = field(default_factory=list)
    inputs: list[Buffer] = field(default_factory=list)
    consts: list[Any] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    effects: list[int] = field(default_factory=list)
    source: dict[int, Source] = field(default_factory=dict)
    shares: Shares | None = None
    passes: frozenset[str] = frozenset()
    matched: frozenset[str] = frozenset()
    repeated: dict[int, int] = field(default_factory=dict)
    _ids: dict[Term, int] = field(default_factory=dict, repr=False)
    _operands: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False)
    _readers: list[list[int]] = field(default_factory=list, repr=False, compare=False)
    _made_of: list[int] = field(default_factory=list, repr=False, compare=False)

    # building

    def new_index(self, name: str, extent: int) -> int:
        taken = {i.name for i in self.indices}
        unique, count = name, 2
        while unique in taken:
            unique, count = f"{name}{count}", count + 1
        self.indices.append(Index(unique, extent))
        return len(self.indices) - 1

    def add(self, term: Term, source: Source | None = None) -> int:
        """The id of ``term``, which is new or stood here already."""
        if isinstance(term, Rename):
            simpler = self._rename(term)
            if not isinstance(simpler, Term):
                return simpler
            term = simpler
        known = self._ids.get(term)
        if known is None:
            known = len(self.terms)
            self.terms.append(term)
            self.free.append(self.free_of(term))
            self._ids[term] = known
        if source is not None:
            self.source.setdefault(known, source)
        return known

    def _rename(self, term: Rename) -> Term | int:
        """A rename of a leaf is another read; of a rename, one rename; of nothing, nothing."""
        inner = self.terms[term.arg]
        pairs = tuple(sorted((s, d) for s, d in term.pairs if s != d and self.free[term.arg] >> s & 1))
        to = dict(pairs)
        if not pairs:
            return term.arg
        match inner:
            case Input() | Const():
                axes = tuple(tuple(to.get(i, i) for i in axis) for axis in inner.axes)
                return type(inner)(inner.dtype, inner.slot, axes)
            case Iota():
                return Iota(inner.dtype, to[inner.index])
            case Rename():
                first = dict(inner.pairs)
                whole = {s: to.get(d, d) for s, d in first.items()}
                whole |= {s: d for s, d in to.items() if s not in first.values()}
                return self._rename(Rename(term.dtype, tuple(whole.items()), inner.arg))
        return Rename(term.dtype, pairs, term.arg)

    # reading

    def free_of(self, term: Term) -> int:
        """The indices that the value of ``term`` depends on."""
        match term:
            case Input() | Const():
                return axes_mask(term.axes)
            case Literal():
                return 0
            case Iota():
                return 1 << term.index
            case Map():
                return self._read(term)
            case Fold():
                return self.free[term.arg] & ~term.over
            case Dot():
                return (self.free[term.lhs] | self.free[term.rhs]) & ~term.over
            case DotPlus():
                return self._read(term) & ~term.over
            case Take():
                return self.free[term.arg] & ~(1 << term.index) | self.free[term.positions]
            case Rename():
                to = dict(term.pairs)
                return mask_of(to.get(i, i) for i in bits(self.free[term.arg]))
            case Block():
                return axes_mask(term.call.out_axes[term.out])
        raise TypeError(f"not a term: {term!r}")

    def _read(self, term: Term) -> int:
        """The indices that operands of a term depend on."""
        out = 0
        for c in children(term):
            out |= self.free[c]
        return out

    def extent(self, mask: int) -> int:
        """The product of the extents of an index set."""
        return math.prod(self.indices[i].extent for i in bits(mask))

    def nbytes(self, term: int) -> int:
        """Bytes of the whole value of a term."""
        return self.extent(self.free[term]) * itemsize(self.terms[term].dtype)

    def shape(self, axes: Axes) -> tuple[int, ...]:
        return tuple(math.prod(self.indices[i].extent for i in axis) for axis in axes)

    def source_of(self, t: int) -> int:
        """The term whose array a term is a view of: a rename reads its operand under other names, and is never computed."""
        term = self.terms[t]
        return term.arg if isinstance(term, Rename) else t

    def operands(self, t: int) -> tuple[int, ...]:
        """The terms whose arrays a term reads; looked up often."""
        known = self._operands.get(t)
        if known is None:
            known = self._operands[t] = tuple(self.source_of(c) for c in children(self.terms[t]))
        return known

    def readers(self, t: int) -> list[int]:
        """The terms that read the array of a term; looked up often, and made anew for a program that has grown."""
        if len(self._readers) != len(self.terms):
            self._readers = [[] for _ in self.terms]
            for reader in range(len(self.terms)):
                for c in set(self.operands(reader)):
                    self._readers[c].append(reader)
        return self._readers[t]

    def made_of(self, t: int) -> int:
        """The terms that a term is computed from, a bit for each; looked up often."""
        for u in range(len(self._made_of), len(self.terms)):
            found = 0
            for c in children(self.terms[u]):
                found |= self._made_of[c] | 1 << c
            self._made_of.append(found)
        return self._made_of[t]

    def input_bytes(self) -> list[int]:
        """Bytes of each argument."""
        return [math.prod(b.shape) * itemsize(b.dtype) for b in self.inputs]

    def roots(self) -> list[int]:
        return [o.term for o in self.outputs] + self.effects

    def reachable(self) -> list[int]:
        """The terms that outputs and effects need, in topological order."""
        seen: set[int] = set()
        stack = self.roots()
        while stack:
            t = stack.pop()
            if t not in seen:
                seen.add(t)
                stack.extend(children(self.terms[t]))
        return sorted(seen)

    # writing anew

    def rewritten(
        self, rewrite: Rewrite, terms: Iterable[int] | None = None, into: Program | None = None
    ) -> tuple[Program, dict[int, int]]:
        """The program with some of its terms replaced, and the number of each old term in the new program.

        Args:
            rewrite: called as ``rewrite(new, t, ids)`` for each term ``t`` of this program, operands first; ``ids`` has the numbers of
                the terms before. It returns a term of ``new`` or the number of one that it has added there; ``None`` copies the term.
            terms: the terms to go through, in ascending order: those that outputs and effects need unless others are given.
            into: the program to add terms to: :meth:`empty_like` unless another is given.
        """
        out = self.empty_like() if into is None else into
        ids: dict[int, int] = {}
        for t in self.reachable() if terms is None else terms:
            new = rewrite(out, t, ids)
            ids[t] = new if isinstance(new, int) else out.add(self.on(t, ids) if new is None else new, self.source.get(t))
        out.take_roots(self, ids.__getitem__)
        return out, ids

    def on(self, t: int, ids: Mapping[int, int]) -> Term:
        """The operation of a term on the operands that ``ids`` has for its own."""
        return with_children(self.terms[t], tuple(ids[c] for c in children(self.terms[t])))

    def take_roots(self, old: Program, number: Callable[[int], int]) -> None:
        """Have the outputs and effects of ``old``, of whose terms ``number`` tells the number here."""
        self.outputs = [replace(o, term=number(o.term)) for o in old.outputs]
        self.effects = [number(t) for t in old.effects]

    def replace_calls(self, new: Mapping[Call, Call]) -> Program:
        """The same program with other calls in place of some."""

        def called(_: Program, t: int, ids: Mapping[int, int]) -> Term | None:
            term = self.on(t, ids)
            return Block(term.dtype, new[term.call], term.args, term.out) if isinstance(term, Block) and term.call in new else None

        return self.rewritten(called)[0]

    def empty_like(self) -> Program:
        """A program with the same indices, inputs and constants, changed by the same passes and rules, and no terms."""
        fixed = list(self.indices), list(self.inputs), list(self.consts)
        return Program(*fixed, shares=self.shares, passes=self.passes, matched=self.matched)

    def __str__(self) -> str:
        return "\n".join(
            [f"%{t} = {describe(self, t)}" for t in self.reachable()]
            + [f"return %{o.term} as {axes_text(self, o.axes)}" for o in self.outputs]
        )


Rewrite = Callable[[Program, int, Mapping[int, int]], Term | int | None]
"""The function that gives :meth:`Program.rewritten` the replacement of a term."""


def itemsize(dtype: Any) -> int:
    """Bytes of one element; a typed random key counts as the 32-bit words it holds."""
    size = getattr(dtype, "itemsize", None)
    return int(size) if size is not None else 8


def argument_bytes(program: Program) -> int:
    """Bytes of all arguments and closed-over arrays."""
    buffers = sum(math.prod(b.shape) * itemsize(b.dtype) for b in program.inputs)
    return buffers + sum(math.prod(getattr(c, "shape", ())) * itemsize(c.dtype) for c in program.consts)


def output_sizes(program: Program) -> tuple[int, ...]:
    """Bytes of each result."""
    return tuple(math.prod(program.shape(o.axes)) * itemsize(program.terms[o.term].dtype) for o in program.outputs)


def names(program: Program, mask: int) -> str:
    return " ".join(program.indices[i].name for i in bits(mask))


def axes_text(program: Program, axes: Axes) -> str:
    def one(axis: Axis) -> str:
        text = " ".join(program.indices[i].name for i in axis)
        return text if len(axis) == 1 else f"({text})" if axis else "1"

    return "[" + ", ".join(map(one, axes)) + "]"


def describe(program: Program, t: int) -> str:
    """One line of a program's text form."""
    term = program.terms[t]
    args = ", ".join(f"%{a}" for a in children(term))
    tail = f" : {term.dtype}[{names(program, program.free[t])}]"
    match term:
        case Input():
            return f"input {program.inputs[term.slot].name} {axes_text(program, term.axes)}{tail}"
        case Const():
            return f"const {term.slot} {axes_text(program, term.axes)}{tail}"
        case Literal():
            return f"{shortest(term.value, term.dtype)!r}{tail}"
        case Iota():
            return f"iota {program.indices[term.index].name}{tail}"
        case Map():
            params = "".join(f" {k}={v}" for k, v in term.params if k != "operation")
            return f"{term.op}({args}){params}{tail}"
        case Fold():
            return f"{term.monoid}[{names(program, term.over)}]({args}){tail}"
        case Dot():
            return f"dot[{names(program, term.over)}]({args}){tail}"
        case DotPlus():
            return f"dot_plus[{names(program, term.over)}]({args}){tail}"
        case Take():
            return f"take[{program.indices[term.index].name}]({args}){tail}"
        case Rename():
            pairs = ", ".join(f"{program.indices[s].name}->{program.indices[d].name}" for s, d in term.pairs)
            return f"rename[{pairs}]({args}){tail}"
        case Block():
            name = getattr(term.call.params.get("operation"), "name", term.call.prim.name)
            return f"{name}.{term.out}({args}) {axes_text(program, term.call.out_axes[term.out])}{tail}"
    return f"{term}{tail}"


# --- checks -----------------------------------------------------------------------------------------


def check(program: Program) -> None:
    """Raise ``AssertionError`` naming the term if a program is not well formed."""
    for t, term in enumerate(program.terms):
        try:
            _check(program, t, term)
        except AssertionError as error:
            raise AssertionError(f"{error} of %{t}: {term}") from error  # terms with jaxprs take long to print
    for o in program.outputs:
        assert not program.free[o.term] & ~axes_mask(o.axes), f"an index of output %{o.term} has no axis"


def _check(program: Program, t: int, term: Term) -> None:
    """Raise ``AssertionError`` if a term is not well formed."""
    for c in children(term):
        assert c < t, "an operand after its use"
    assert program.free[t] == program.free_of(term), "free indices"
    match term:
        case Input():
            assert program.shape(term.axes) == tuple(program.inputs[term.slot].shape), "shape"
        case Const():
            assert program.shape(term.axes) == np.shape(program.consts[term.slot]), "shape"
        case Rename():
            targets = [d for _, d in term.pairs]
            assert len(set(targets)) == len(targets), "two indices become one"
            stay = program.free[term.arg] & ~mask_of(s for s, _ in term.pairs)
            assert not stay & mask_of(targets), "a renamed index meets another"
            for s, d in term.pairs:
                assert program.indices[s].extent == program.indices[d].extent, "extents"
        case DotPlus():
            assert not program.free[term.left] & ~(program.free[term.lhs] | term.over), "indices of the left sum"
            assert not program.free[term.right] & ~(program.free[term.rhs] | term.over), "indices of the right sum"
        case Take():
            assert program.free[term.arg] >> term.index & 1, "an index that is not there"
            dtype = np.dtype(program.terms[term.positions].dtype)
            assert dtype.kind in "iu", "dtype of positions"
            assert dtype.itemsize >= 4, "dtype of positions"
        case Block():
            call = term.call
            assert len(call.in_axes) == len(term.args), "operands"
            for axes, a in zip(call.in_axes, term.args):
                assert not program.free[a] & ~axes_mask(axes), "an operand's index has no axis"
