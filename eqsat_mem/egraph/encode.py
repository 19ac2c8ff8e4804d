"""A program as e-graph nodes and back: bits for indices, constructors for operations, a table for what rules do not look into.

Index sets are ``i64`` bitmasks in the e-graph, so it holds at most 63 indices. A program with more keeps those of its largest values; a
term with an index that has no bit stands in the e-graph as an opaque `Block`, which no rule rewrites.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain, permutations
from typing import Any

import numpy as np

from eqsat_mem import ir
from eqsat_mem.egraph import language
from eqsat_mem.egraph.names import copied, passed_down
from eqsat_mem.errors import RuleError
from eqsat_mem.ir import Program, bits, mask_of
from eqsat_mem.ir.ops import Operation, call_on, named_axes, operation_of, picks, searched
from eqsat_mem.ir.precision import is_graded

MAX_BITS = 62
SPARE_BITS = 4
"""Bits kept for names that a swap of two names goes through: one per extent."""
RENAMED_TERMS = 64
"""A change of names passes down to the leaves, which copies what lies between, unless that is more terms than this: residual networks
read each layer's result under two names, and all layers below it once per name would be quadratically many."""


@dataclass(frozen=True)
class Node:
    """An operation of a class: its constructor, its literal arguments and the classes of its operands."""

    constructor: str
    payload: tuple[Any, ...]
    children: tuple[int, ...]


@dataclass(frozen=True)
class Encoded:
    """A node whose operands are keys of other encoded terms, and what is known of its value.

    ``summed`` is None for what is no contraction, and 0 for one over indices that have no bits.
    """

    node: Node
    free: int
    dtype: str
    pointwise: int = 0
    summed: int | None = None
    selected: int = 0
    combined: int = 0
    searched: int = 0


def called(term: ir.Term, new: Mapping[ir.Call, ir.Call]) -> ir.Term:
    """A term with another call, if there is one in place of its own."""
    return replace(term, call=new[term.call]) if isinstance(term, ir.Block) and term.call in new else term


class Encoder:
    """The encoding of a program: bits for indices, table entries for the terms that rules do not look into."""

    def __init__(self, program: Program, own: language.Own = language.NOTHING) -> None:
        self.program = program
        self.own = own
        self._calls: dict[Any, ir.Call] = {}
        self._opaque_terms: list[ir.Term] = []
        self._keys: dict[tuple[str, ir.Params], int] = {}
        self._dtypes = {str(program.terms[t].dtype): program.terms[t].dtype for t in range(len(program.terms))}
        self._converts: dict[str, ir.Params] = {}
        self._bit = _choose_indices(program)
        self._spares: list[ir.Index] = []
        self._sets: dict[int, int] = {}
        self._encoded: dict[int, Encoded] = {}
        self._same: list[tuple[int, Node]] = []

    def encode(self) -> dict[int, Encoded]:
        """Every reachable term by its id, operands first. A rename of several names at once takes further, negative, keys."""
        written = self.program.reachable()
        for t in written:
            self._encode(t)
        for t in written:
            term = self.program.terms[t]
            if isinstance(term, ir.Rename) and self._encoded[t].node.constructor == "Block":
                self._pass_down(t, term)
        return self._encoded

    def with_calls(self, program: Program, new: Mapping[ir.Call, ir.Call]) -> Encoder:
        """The encoding of a program that has other calls in place of some, which rules do not look into."""
        other = copy(self)
        other.program, other._opaque_terms = program, [called(term, new) for term in self._opaque_terms]
        return other

    def _encode(self, t: int) -> None:
        term = self.program.terms[t]
        known = all(i in self._bit for i in bits(_mentions(self.program, t)))
        node = (self._transparent(t, term) if known else None) or self._opaque(term)
        free, opaque = self.bits_of(self.program.free[t]), node.constructor in ("Leaf", "Block")
        contracts = contracting(term)
        slices = self.bits_of(pointwise(self.program, t)) if opaque and not contracts else 0  # else rules tell
        summed = self.bits_of(ir.folded(term)) if contracts and opaque else None
        folds = self.bits_of(ir.folded(term)) if isinstance(term, ir.Block) and not contracts else 0
        selected, combined = (folds, 0) if isinstance(term, ir.Block) and picks(term.call) else (0, folds)
        search = self.bits_of(searched(term.call)) if isinstance(term, ir.Block) else 0
        self._encoded[t] = Encoded(node, free, str(term.dtype), slices, summed, selected, combined, search)

    def _pass_down(self, t: int, term: ir.Rename) -> None:
        """Another form of a change of names that would copy too much below: values that depend on fewer indices are renamed as they are."""
        indices = self.program.free[t].bit_count()
        if copied(self.program, term, self._opens, RENAMED_TERMS, indices) > RENAMED_TERMS:
            return
        made = passed_down(self.program, term, self._opens, indices)
        new = [u for u in made if u not in self._encoded]
        if len(new) > RENAMED_TERMS:  # with those of changes of names on the way
            return
        for u in new:
            self._encode(u)
        if made[-1] != t:
            self._same.append((t, self._encoded[made[-1]].node))

    def _opens(self, t: int) -> bool:
        """Whether rules change names below a term."""
        return self._encoded[t].node.constructor not in ("Leaf", "Block", "Take")

    def bits_of(self, mask: int) -> int:
        """An index set of the program as bits of the e-graph, less what has no bit."""
        return mask_of(self._bit[i] for i in bits(mask) if i in self._bit)

    def indices_of(self, mask: int) -> int:
        """Bits of the e-graph as an index set."""
        known = self._sets.get(mask)
        if known is None:
            index = {b: i for i, b in self._bit.items()}
            if mask < 0 or mask >> len(index):
                raise RuleError(
                    f"a rule made the index set {mask:#x}, which holds what is no index: take the complement of a set within another."
                )
            known = self._sets[mask] = mask_of(index[b] for b in bits(mask))
        return known

    def indices(self) -> list[ir.Index]:
        """The program's indices and the spare ones."""
        return self.program.indices + self._spares

    def extents(self) -> Iterator[tuple[int, int]]:
        indices = self.indices()
        return ((1 << b, indices[i].extent) for i, b in self._bit.items())

    def others(self) -> Iterator[tuple[int, Node]]:
        """Other nodes of terms: reads of arrays under one other name are renamed reads, and of changes of names some pass further down."""
        yield from self._same
        reads: dict[tuple[type, int], list[tuple[int, ir.Input | ir.Const]]] = {}
        for t in [t for t in self._encoded if t >= 0]:
            if isinstance(term := self.program.terms[t], ir.Input | ir.Const):
                reads.setdefault((type(term), term.slot), []).append((t, term))
        for (one, before), (other, after) in chain.from_iterable(permutations(same, 2) for same in reads.values()):
            changed = {(s, d) for s, d in zip(sum(before.axes, ()), sum(after.axes, ())) if s != d}
            if len(changed) == 1 and self.program.add(ir.Rename(before.dtype, tuple(changed), one)) == other:
                ((source, destination),) = changed
                if source in self._bit and destination in self._bit:
                    yield other, Node("Ren", (1 << self._bit[source], 1 << self._bit[destination]), (one,))

    # program -> nodes

    def _transparent(self, t: int, term: ir.Term) -> Node | None:
        """The node of a term that rules may look into; None for any other."""
        match term:
            case ir.Literal() if _is_plain_number(term):
                return Node("Lit", (float(term.value), str(term.dtype)), ())
            case ir.Iota():
                return Node("Iota", (1 << self._bit[term.index], str(term.dtype)), ())
            case ir.Map():
                return self._map(term)
            case ir.Fold() if term.dtype == self.program.terms[term.arg].dtype:
                return Node("Fold", (term.monoid, self.bits_of(term.over)), (term.arg,))
            case ir.Dot() if self._is_ordinary(term):
                return Node("Dot", (self.bits_of(term.over),), (term.lhs, term.rhs))
            case ir.Rename() if copied(self.program, term, self._opens, RENAMED_TERMS) <= RENAMED_TERMS:
                return self._rename(term)
            case ir.Take():
                return Node("Take", (1 << self._bit[term.index],), (term.positions, term.arg))
            case ir.Block():
                return self._operation(term)
        return None

    def _opaque(self, term: ir.Term) -> Node:
        self._opaque_terms.append(term)
        children = ir.children(term)
        return Node("Block" if children else "Leaf", (len(self._opaque_terms) - 1,), children)

    def _map(self, term: ir.Map) -> Node | None:
        if term.op == "convert_element_type" and self._converts.setdefault(str(term.dtype), term.params) == term.params:
            return Node("Convert", (str(term.dtype),), term.args)
        if term.op == "integer_pow":
            return Node("IntegerPow", (dict(term.params)["y"],), term.args)
        own = operation_of(dict(term.params))
        if own is not None and self.own.get(own.constructor) is own:
            return Node(own.constructor, (), term.args)
        constructor = language.constructor_of().get(term.op)
        if not term.params and constructor is not None:
            return Node(constructor, (), term.args)
        if len(term.args) > 3:
            return None
        key = self._keys.setdefault((term.op, term.params), len(self._keys))
        return Node(f"Map{len(term.args)}", (key,), term.args)

    def _operation(self, term: ir.Block) -> Node | None:
        """A call of the user's operation, each of whose named axes is one index, or of the user's monoid, which folds a set of them."""
        operation = operation_of(term.call.params)
        if operation is None or self.own.get(operation.constructor) is not operation:
            return None
        named = named_axes(operation, term.call)
        sets = [mask_of(axis) for axis in named.values()]
        if operation.monoid is None and (len(set(sets)) < len(sets) or not all(mask.bit_count() == 1 for mask in sets)):
            return None
        return Node(operation.constructor, tuple(map(self.bits_of, sets)), term.args)

    def _is_ordinary(self, term: ir.Dot) -> bool:
        """Whether rules may take a contraction apart: one dtype throughout, and a precision that can be compared with others."""
        dtypes = {term.dtype, self.program.terms[term.lhs].dtype, self.program.terms[term.rhs].dtype}
        return len(dtypes) == 1 and is_graded(term.precision)

    def _rename(self, term: ir.Rename) -> Node | None:
        """One name at a time; a cycle of names goes through a spare index."""
        steps = self._steps(term)
        if steps is None:
            return None
        arg, free = term.arg, self.program.free[term.arg]
        for k, (source, destination) in enumerate(steps):
            node = Node("Ren", (1 << self._bit[source], 1 << self._bit[destination]), (arg,))
            if k == len(steps) - 1:
                return node
            free = free & ~(1 << source) | 1 << destination
            arg = -1 - len(self._encoded)
            self._encoded[arg] = Encoded(node, self.bits_of(free), str(term.dtype))
        return None

    def _steps(self, term: ir.Rename) -> list[tuple[int, int]] | None:
        free, pending, steps = self.program.free[term.arg], dict(term.pairs), []
        while pending:
            source = next((s for s, d in pending.items() if not free >> d & 1), None)
            if source is None:
                source = min(pending)
                target = self._spare(self.program.indices[source].extent)
                if target is None:
                    return None
                pending[target] = pending.pop(source)
            else:
                target = pending.pop(source)
            steps.append((source, target))
            free = free & ~(1 << source) | 1 << target
        return steps

    def _spare(self, extent: int) -> int | None:
        """An index of no term, with this extent; None if there are no bits left."""
        base = len(self.program.indices)
        for k, spare in enumerate(self._spares):
            if spare.extent == extent:
                return base + k
        if len(self._spares) == SPARE_BITS:
            return None
        self._spares.append(ir.Index(f"spare_{extent}", extent))
        self._bit[base + len(self._spares) - 1] = len(self._bit)
        return base + len(self._spares) - 1

    # nodes -> terms

    def decode(self, node: Node, args: tuple[int, ...], dtype: str, program: Program, precision: Any = None) -> ir.Term:
        """The term of a node on operands ``args``, terms of ``program``; ``dtype`` is that of its class, ``precision`` a contraction's."""
        kind, payload, value = node.constructor, node.payload, self._dtype(dtype)
        match kind:
            case "Leaf" | "Block":
                return ir.with_children(self._opaque_terms[payload[0]], args)
            case "Lit":
                return _literal(payload[0], self._dtype(payload[1]))
            case "Iota":
                return ir.Iota(self._dtype(payload[1]), self._one(payload[0]))
            case "Fold":
                return ir.Fold(value, payload[0], self.indices_of(payload[1]), args[0])
            case "Dot":
                return ir.Dot(value, self.indices_of(payload[0]), args[0], args[1], precision)
            case "DotPlus":
                return ir.DotPlus(value, self.indices_of(payload[0]), *args)
            case "Take":
                return ir.Take(value, self._one(payload[0]), *args)
            case "Ren":
                return ir.Rename(value, ((self._one(payload[0]), self._one(payload[1])),), args[0])
        if kind in self.own:
            return self._called(self.own[kind], payload, args, value, program)
        return self._elementwise(kind, payload, args, value)

    def _elementwise(self, kind: str, payload: tuple[Any, ...], args: tuple[int, ...], dtype: Any) -> ir.Map:
        match kind:
            case "Convert":
                target = self._dtype(payload[0])
                return ir.Map(target, "convert_element_type", args, self._converts.get(payload[0], (("new_dtype", target),)))
            case "IntegerPow":
                return ir.Map(dtype, "integer_pow", args, (("y", payload[0]),))
            case "Map1" | "Map2" | "Map3":
                op, params = list(self._keys)[payload[0]]
                return ir.Map(dtype, op, args, params)
        return ir.Map(dtype, language.primitive_of()[kind], args)

    def _called(self, operation: Operation, payload: tuple[int, ...], args: tuple[int, ...], dtype: Any, program: Program) -> ir.Term:
        """The user's operation on operands; equal calls are one, so that equal terms are."""
        if operation.elementwise:
            return ir.Map(dtype, operation.name, args, (("operation", operation),))
        key = operation, payload, tuple(program.free[a] for a in args), dtype
        if key not in self._calls:
            named = [tuple(bits(self.indices_of(mask))) if operation.monoid is not None else (self._one(mask),) for mask in payload]
            self._calls[key] = call_on(operation, named, key[2], dtype)
        return ir.Block(dtype, self._calls[key], args, 0)

    def _one(self, bit: int) -> int:
        found = tuple(bits(self.indices_of(bit)))
        if len(found) != 1:
            raise RuleError(f"a rule made a set of {len(found)} indices where one index must stand, as in (Ren i j a) and (Iota i t).")
        return found[0]

    def _dtype(self, name: str) -> Any:
        return self._dtypes.get(name) or np.dtype(name)


def contracting(term: ir.Term) -> bool:
    """Whether a term is a contraction, or a scan with one inside: a library may sum in another order for another shape."""
    inside = term.call.inside if isinstance(term, ir.Block) else None
    return isinstance(term, ir.Dot | ir.DotPlus) or (inside is not None and inside.contracts)


def pointwise(program: Program, t: int) -> int:
    """The free indices along which the operation of a term gives the slice of its value from slices of its operands."""
    term = program.terms[t]
    if not isinstance(term, ir.Block):
        return program.free[t]
    return 0 if term.call.effects else term.call.pointwise & program.free[t]


def _literal(value: float, dtype: Any) -> ir.Literal:
    kind = np.dtype(dtype).kind
    return ir.Literal.of(bool(value) if kind == "b" else int(value) if kind in "iu" else value, dtype)


def _is_plain_number(term: ir.Literal) -> bool:
    """Whether egglog's f64 keeps the number: NaN has no equal, and -0.0 is 0.0 there."""
    value = term.value
    if not isinstance(value, bool | int | float) or str(term.dtype).startswith("key"):
        return False
    negative_zero = value == 0 and math.copysign(1.0, value) < 0
    return abs(value) <= 2**53 or math.isinf(value) if not negative_zero and value == value else False


def _mentions(program: Program, t: int) -> int:
    """Every index that a term names, depends on, or whose operands depend on it."""
    term = program.terms[t]
    mask = program.free[t]
    for c in ir.children(term):
        mask |= program.free[c]
    match term:
        case ir.Fold() | ir.Dot():
            mask |= term.over
        case ir.Rename():
            mask |= mask_of(i for pair in term.pairs for i in pair)
        case ir.Take():
            mask |= 1 << term.index
    return mask


def _choose_indices(program: Program) -> dict[int, int]:
    """A bit for each index; where there are too many, for those of the largest values."""
    reachable = program.reachable()
    chosen = 0
    for t in sorted(reachable, key=lambda t: (-program.extent(_mentions(program, t)), t)):
        more = chosen | _mentions(program, t)
        if more.bit_count() <= MAX_BITS - SPARE_BITS:
            chosen = more
    return {i: b for b, i in enumerate(bits(chosen))}
