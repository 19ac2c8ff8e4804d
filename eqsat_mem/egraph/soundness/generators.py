"""Left sides of rules filled in at random: indices, dtypes and constants for variables, leaves for terms of which nothing is said."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives

from eqsat_mem import ir
from eqsat_mem.egraph.encode import Encoder, Node
from eqsat_mem.egraph.language import COMPARISONS, primitive_of, roles
from eqsat_mem.egraph.soundness.patterns import App, Shape
from eqsat_mem.errors import RuleError
from eqsat_mem.ir import Program, bits, mask_of
from eqsat_mem.ir.ops import MONOIDS, Monoid, Operation, call_on, foldable, map_row

FLOATS = ("float32", "float64")
DTYPES = (*FLOATS, *FLOATS, "int32", "bool")
"""Dtypes of left sides, floats twice as often."""
NUMBERS = (0.0, 1.0, 2.0, -1.0, 0.5, -3.0)
DEEPEST = 12


class IllFormed(Exception):
    """A node that means nothing: two indices become one, extents differ, an operation has no such dtype."""


@dataclass
class Builder:
    """The terms of nodes, with dtypes that follow from those of operands, and the program that they stand in."""

    program: Program
    encoder: Encoder

    def term(self, node: Node, args: Sequence[int]) -> int:
        """The id of a node's term on operands ``args``.

        Raises:
            IllFormed: if it means nothing.
        """
        program, payload = self.program, node.payload
        match node.constructor:
            case "Ren":
                return self._rename(payload, args[0])
            case "Take":
                return self._take(payload, *args)
            case "Delta":
                i, j = self._pair(payload)
                return self._where_equal(i, j, args[0])
            case "Diag":
                return self._diagonal(*self._pair(payload), args[0])
            case "Leaf" | "Block" | "Map1" | "Map2" | "Map3":
                raise IllFormed(f"{node.constructor} stands for an operation of the program, which no rule can make")
        if node.constructor in self.encoder.own:
            return self._operation(node, args)
        term = self._decoded(node, args)
        match term:
            case ir.Map():
                dtypes = tuple(str(program.terms[a].dtype) for a in args)
                term = ir.Map(np.dtype(_result(replace(term, args=()), dtypes)), term.op, term.args, term.params)
            case ir.Fold():
                dtype = program.terms[term.arg].dtype
                if term.monoid not in MONOIDS or not _folds(term.monoid, str(dtype)):
                    raise IllFormed(f"no fold {term.monoid!r} of {dtype}")
                term = ir.Fold(dtype, term.monoid, term.over, term.arg)
            case ir.Dot() | ir.DotPlus():
                term = replace(term, dtype=self._contracted(args))
        return program.add(term)

    def _contracted(self, args: Sequence[int]) -> Any:
        """The dtype of a contraction of these operands."""
        first, *others = (self.program.terms[a].dtype for a in args)
        if any(other != first for other in others) or first.kind == "b":
            raise IllFormed(f"no contraction of {', '.join(map(str, (first, *others)))}")
        return first

    def _operation(self, node: Node, args: Sequence[int]) -> int:
        """An operation of the user's, if its function takes such operands."""
        operation, program = self.encoder.own[node.constructor], self.program
        if operation.monoid is None and len({self._index(bit) for bit in node.payload}) < len(node.payload):
            raise IllFormed("two axes of an operation are one index")
        extents = tuple(program.extent(self.encoder.indices_of(mask)) for mask in node.payload)
        dtype = _result_of(operation, extents, tuple(str(program.terms[a].dtype) for a in args))
        try:
            return program.add(self.encoder.decode(node, tuple(args), dtype, program))
        except RuleError as error:
            raise IllFormed(str(error)) from error

    def _decoded(self, node: Node, args: Sequence[int]) -> ir.Term:
        try:
            return self.encoder.decode(node, tuple(args), self._dtype_hint(node, args), self.program)
        except OverflowError as error:
            raise IllFormed(f"{node.payload[0]} is no number of its dtype") from error

    def leaf(self, free: int, dtype: str) -> int:
        """A further argument that depends on the indices ``free``."""
        axes = tuple((i,) for i in bits(free))
        self.program.inputs.append(ir.Buffer(f"x{len(self.program.inputs)}", self.program.shape(axes), np.dtype(dtype)))
        return self.program.add(ir.Input(np.dtype(dtype), len(self.program.inputs) - 1, axes))

    def _dtype_hint(self, node: Node, args: Sequence[int]) -> str:
        return str(self.program.terms[args[0]].dtype) if args else "float32"

    def _pair(self, payload: Sequence[int]) -> tuple[int, int]:
        """Two different indices of one extent."""
        i, j = (self._index(bit) for bit in payload)
        if i == j or self.program.indices[i].extent != self.program.indices[j].extent:
            raise IllFormed("two different indices of one extent are needed")
        return i, j

    def _index(self, bit: int) -> int:
        found = list(bits(self.encoder.indices_of(bit))) if bit > 0 else []
        if len(found) != 1:
            raise IllFormed("a set of indices stands where one index must")
        return found[0]

    def _rename(self, payload: Sequence[int], arg: int) -> int:
        free = self.program.free[arg]
        s, d = (self._index(bit) for bit in payload)
        if s == d or not free >> s & 1:
            return arg
        self._pair(payload)
        if free >> d & 1:
            raise IllFormed("a renamed index meets another")
        return self.program.add(ir.Rename(self.program.terms[arg].dtype, ((s, d),), arg))

    def _take(self, payload: Sequence[int], positions: int, arg: int) -> int:
        index, terms = self._index(payload[0]), self.program.terms
        if np.dtype(terms[positions].dtype).kind not in "iu":
            raise IllFormed("positions are integers")
        return self.program.add(ir.Take(terms[arg].dtype, index, positions, arg)) if self.program.free[arg] >> index & 1 else arg

    def _where_equal(self, i: int, j: int, arg: int) -> int:
        add, dtype = self.program.add, self.program.terms[arg].dtype
        positions = [add(ir.Iota(np.dtype("int32"), k)) for k in (i, j)]
        mask = add(ir.Map(np.dtype(bool), "eq", tuple(positions)))
        return add(ir.Map(dtype, "select_n", (mask, add(ir.Literal.of(np.zeros((), dtype)[()], dtype)), arg)))

    def _diagonal(self, j: int, i: int, arg: int) -> int:
        """``arg`` with ``j`` read as ``i``, bit for bit: its bits along the diagonal, joined with zeros."""
        add, dtype, free = self.program.add, np.dtype(self.program.terms[arg].dtype), self.program.free[arg]
        if not free >> j & 1:
            return arg
        if not free >> i & 1:
            return add(ir.Rename(dtype, ((j, i),), arg))
        whole = np.dtype(f"uint{8 * dtype.itemsize}") if dtype.kind == "f" else dtype
        if whole != dtype:
            arg = add(ir.Map(whole, "bitcast_convert_type", (arg,), (("new_dtype", whole),)))
        out = add(ir.Fold(whole, "or", 1 << j, self._where_equal(i, j, arg)))
        return out if whole == dtype else add(ir.Map(dtype, "bitcast_convert_type", (out,), (("new_dtype", dtype),)))


@cache
def _result(term: ir.Map, dtypes: tuple[str, ...]) -> str:
    """The dtype of an elementwise operation, whose operands do not matter, for operands of these dtypes."""
    values = [jax.ShapeDtypeStruct((2,), np.dtype(d)) for d in dtypes]
    try:
        return str(jax.eval_shape(lambda *a: map_row(term).bind(*a, **dict(term.params)), *values).dtype)
    except (TypeError, ValueError) as error:
        raise IllFormed(f"no {term.op} of {', '.join(dtypes)}") from error


@cache
def _result_of(operation: Operation, extents: tuple[int, ...], dtypes: tuple[str, ...]) -> str:
    """The dtype of the user's operation for named axes of these extents and operands of these dtypes."""
    extent = dict(zip(operation.dimensions, extents))
    shapes = [tuple(extent[name] for name in names) for names in operation.operands]
    try:
        with np.errstate(all="ignore"):
            return str(jax.eval_shape(operation.evaluate, *map(jax.ShapeDtypeStruct, shapes, map(np.dtype, dtypes))).dtype)
    except (TypeError, ValueError) as error:
        raise IllFormed(f"no {operation.name} of {', '.join(dtypes)}") from error


def _takes_one_dtype(operation: Operation, dtype: str) -> bool:
    """Whether all operands of the user's operation may have one dtype."""
    try:
        _result_of(operation, (2,) * len(operation.dimensions), (dtype,) * len(operation.operands))
    except IllFormed:
        return False
    return True


@cache
def _folds(monoid: str, dtype: str) -> bool:
    kind = np.dtype(dtype).kind
    if monoid in ("and", "or", "xor"):
        return kind in "biu"
    return foldable(monoid, np.dtype(dtype)) and not (kind == "b" and monoid in ("add", "mul"))


@dataclass
class Draw:
    """One left side in the making: the values of variables, and where to add nodes.

    ``nodes`` are the nodes made so far by key, of the whole batch; leaves are terms of the program and have their keys.
    """

    shape: Shape
    builder: Builder
    rng: random.Random
    nodes: dict[Node, int]
    terms: dict[int, int]
    dtype: str
    values: dict[Any, Any] = field(default_factory=dict)
    leaves: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.universe = list(range(len(self.builder.program.indices)))
        self.last = self.rng.choice(self.universe)
        self.density = self.rng.choice((0.25, 0.45, 0.65))
        self.free = {self.shape.resolve(term): self.shape.resolve(name) for name, term in self.shape.free}
        self.sets: dict[Any, int] = {}

    def fill(self) -> list[int]:
        """The keys of the roots.

        Raises:
            IllFormed: if this draw has no meaning.
        """
        return [self._term(root, self.dtype, 0) for root in self.shape.roots or [("e", 0)]]

    def _term(self, term: Any, dtype: str, depth: int) -> int:
        term = self.shape.resolve(term)
        if not isinstance(term, App):
            if term not in self.values:
                self.values[term] = self._anything(dtype) if term not in self.free else self._with_indices(self.free[term], dtype)
            return self.values[term]
        if depth > DEEPEST:
            raise IllFormed("a term that contains itself")
        return self._node(
            term.head, [self._argument(term, k, role, dtype, depth) for k, role in enumerate(self._roles(term.head, len(term.args)))]
        )

    def _node(self, head: str, args: Sequence[Any]) -> int:
        meanings = self._roles(head, len(args))
        payload = tuple(a for a, role in zip(args, meanings) if role != "T")
        children = tuple(a for a, role in zip(args, meanings) if role == "T")
        node = Node(head, payload, children)
        if node not in self.nodes:
            term = self.builder.term(node, [self.terms[c] for c in children])
            self.nodes[node] = KEYS + len(self.nodes)
            self.terms[self.nodes[node]] = term
        return self.nodes[node]

    def _roles(self, head: str, arity: int) -> tuple[str, ...]:
        return roles(head, arity, self.builder.encoder.own)

    def _argument(self, app: App, k: int, role: str, dtype: str, depth: int) -> Any:
        arg = self.shape.resolve(app.args[k])
        if role == "T":
            return self._term(arg, self._operand_dtype(app, k, dtype), depth + 1)
        if isinstance(arg, str):
            return _atom(arg, role)
        if arg not in self.values:
            self.values[arg] = self._constant(role, dtype)
        return self.values[arg]

    def _operand_dtype(self, app: App, k: int, dtype: str) -> str:
        """The dtype that an operand is to have for its operation to have ``dtype``."""
        if app.head == "Select" and k == 0:
            return "bool"
        if app.head == "Take" and k == 1:
            return "int32"
        if app.head in COMPARISONS or app.head == "Convert":
            return self.values.setdefault(("operands of", id(app)), self.rng.choice(FLOATS if app.head == "IsFinite" else DTYPES[:-1]))
        operation = self.builder.encoder.own.get(app.head)
        if operation is not None and k - len(operation.dimensions) != operation.dtype and not _takes_one_dtype(operation, dtype):
            return self.rng.choice(DTYPES)
        return dtype

    def _constant(self, role: str, dtype: str) -> Any:
        rng = self.rng
        match role:
            case "set":
                size = rng.choice((0, 1, 1, 1, 1, 2, 2, 3))
                return self.builder.encoder.bits_of(mask_of(rng.sample(self.universe, min(size, len(self.universe)))))
            case "index":
                self.last = rng.choice(self._alike() if rng.random() < 0.8 else self.universe)
                return self.builder.encoder.bits_of(1 << self.last)
            case "monoid":
                return rng.choice([name for name in MONOIDS if _folds(name, dtype)])
            case "number":
                return rng.choice(NUMBERS)
            case "power":
                return rng.choice((-2, -1, 0, 1, 2, 3, 4))
            case "position":
                return rng.choice(("int32", dtype if dtype != "bool" else "int32"))
        return dtype

    def _alike(self) -> list[int]:
        """The indices of the extent of the one drawn last, for constructors that take two of one extent."""
        indices = self.builder.program.indices
        return [i for i in self.universe if i != self.last and indices[i].extent == indices[self.last].extent] or self.universe

    def _anything(self, dtype: str) -> int:
        """A leaf, or a small term of leaves; now and then one that stands there already."""
        rng = self.rng
        if self.leaves and rng.random() < 0.12:
            return rng.choice(self.leaves)
        if rng.random() < 0.2:
            head = rng.choice(("Neg", "Mul", "Max", "Fold", "Dot"))
            arity = {"Neg": 1, "Fold": 1}.get(head, 2)
            operands = [self._leaf(dtype) for _ in range(arity)]
            constants = {"Fold": ["monoid", "set"], "Dot": ["set"]}.get(head, [])
            return self._node(head, [*(self._constant(role, dtype) for role in constants), *operands])
        return self._leaf(dtype)

    def _with_indices(self, name: Any, dtype: str) -> int:
        """A term that depends on the indices that premises have a name for: the same wherever they use it."""
        if name in self.sets:
            return self._leaf(dtype, self.sets[name])
        new = self._anything(dtype)
        self.sets[name] = self.builder.program.free[self.terms[new]]
        return new

    def _leaf(self, dtype: str, free: int | None = None) -> int:
        free = mask_of(i for i in self.universe if self.rng.random() < self.density) if free is None else free
        leaf = self.builder.leaf(free, dtype)
        if "summed" in self.shape.functions and dtype == "float64":
            leaf = self._mixed(free)
        if "combined" in self.shape.functions and dtype in FLOATS and free:
            leaf = self._combination(leaf, free, dtype)
        if "selected" in self.shape.functions and dtype in FLOATS and free:
            leaf = self._selection(leaf, free, dtype)
        if "searched" in self.shape.functions and dtype == "int32" and free:
            leaf = self._search(free)
        self.terms[leaf] = leaf
        self.leaves.append(leaf)
        return leaf

    def _mixed(self, free: int) -> int:
        """A contraction of narrow numbers to wide ones, into which rules do not look."""
        one, two = self.builder.leaf(free, "float32"), self.builder.leaf(free, "float32")
        over = free & -free
        return self.builder.program.add(ir.Dot(np.dtype("float64"), over, one, two))

    def _combination(self, leaf: int, free: int, dtype: str) -> int:
        """A fold by a monoid of the user's along an index."""
        call = call_on(_TOTAL.operation, [(next(bits(free)),)], [free], np.dtype(dtype))
        return self.builder.program.add(ir.Block(np.dtype(dtype), call, (leaf,), 0))

    def _search(self, free: int) -> int:
        """Where the largest element along an index stands."""
        axes, place = tuple((i,) for i in bits(free)), np.dtype("int32")
        params = {"axes": (0,), "index_dtype": place}
        call = ir.Call(primitives.argmax_p, params, (axes,), (axes[1:],), (place,), free & (free - 1))
        return self.builder.program.add(ir.Block(place, call, (self.builder.leaf(free, "float32"),), 0))

    def _selection(self, leaf: int, free: int, dtype: str) -> int:
        """The largest element along an index, as an operation that picks elements."""
        program, *rest = self.builder.program, *bits(free)
        axes = tuple((i,) for i in rest)
        params = {"k": 1, "axis": len(axes) - 1}
        kept, over = mask_of(rest[:-1]), 1 << rest[-1]
        call = ir.Call(primitives.top_k_p, params, (axes,), ((*axes[:-1], ()),) * 2, (np.dtype(dtype), np.dtype("int32")), kept, over)
        return program.add(ir.Block(np.dtype(dtype), call, (leaf,), 0))


_TOTAL = Monoid("total", 0, lambda a, b: a + b)

KEYS = 1_000_000
"""The first key of nodes that are no terms of the program."""
SMALL = {"Neg", "Mul", "Max"}
"""Constructors of the terms that stand for anything, besides folds and contractions."""


def _atom(text: str, role: str) -> Any:
    if role in ("monoid", "dtype", "position"):
        return text.strip('"')
    return float(text) if role == "number" else int(text)


def arities() -> dict[str, int]:
    """The elementwise constructors that stand for anything, with their arities."""
    return {name: 1 if name == "Neg" else 2 for name in sorted(SMALL) if name in primitive_of()}
