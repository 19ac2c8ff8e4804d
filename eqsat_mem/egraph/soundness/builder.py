"""The terms that nodes of rules stand for, with dtypes that follow from those of operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqsat_mem import ir
from eqsat_mem.egraph.encode import Encoder, Node
from eqsat_mem.egraph.language import primitive_of
from eqsat_mem.egraph.soundness.values import kind
from eqsat_mem.errors import RuleError
from eqsat_mem.ir import Program, bits
from eqsat_mem.ir.ops import MAPS, MONOIDS, Operation, foldable, map_row


class IllFormed(Exception):
    """A node that means nothing: two indices become one, extents differ, an operation has no such dtype."""


class NotTaken(IllFormed):
    """An operation of the user's takes no operands of these dtypes: rules about it say nothing of them."""


@dataclass
class Builder:
    """The terms of nodes, and the program that they stand in."""

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
        dtypes = tuple(dtype_name(program.terms[a].dtype) for a in args)
        if node.constructor in primitive_of():
            op = primitive_of()[node.constructor]
            return program.add(ir.Map(np.dtype(dtype_of_map(op, dtypes)), op, tuple(args)))
        return program.add(self._typed(self._decoded(node, args), args, dtypes))

    def _typed(self, term: ir.Term, args: Sequence[int], dtypes: tuple[str, ...]) -> ir.Term:
        """A term with the dtype that follows from those of its operands, if it takes such."""
        match term:
            case ir.Map():
                return ir.Map(np.dtype(_result(replace(term, args=()), dtypes)), term.op, term.args, term.params)
            case ir.Fold():
                if term.monoid not in MONOIDS or not folds(term.monoid, dtypes[0]):
                    raise IllFormed(f"no fold {term.monoid!r} of {dtypes[0]}")
                return ir.Fold(self.program.terms[args[0]].dtype, term.monoid, term.over, term.arg)
            case ir.Dot() | ir.DotPlus():
                if len(set(dtypes)) > 1 or dtypes[0] == "bool":
                    raise IllFormed(f"no contraction of {', '.join(dtypes)}")
                return replace(term, dtype=self.program.terms[args[0]].dtype)
        return term

    def leaf(self, free: int, dtype: str) -> int:
        """A further argument that depends on the indices ``free``."""
        axes = tuple((i,) for i in bits(free))
        self.program.inputs.append(ir.Buffer(f"x{len(self.program.inputs)}", self.program.shape(axes), np.dtype(dtype)))
        return self.program.add(ir.Input(np.dtype(dtype), len(self.program.inputs) - 1, axes))

    def _operation(self, node: Node, args: Sequence[int]) -> int:
        """An operation of the user's, if its function takes such operands."""
        operation, program = self.encoder.own[node.constructor], self.program
        if operation.monoid is None and len({self._index(bit) for bit in node.payload}) < len(node.payload):
            raise IllFormed("two axes of an operation are one index")
        extents = tuple(program.extent(self.encoder.indices_of(mask)) for mask in node.payload)
        dtype = dtype_of_operation(operation, extents, tuple(str(program.terms[a].dtype) for a in args))
        try:
            return program.add(self.encoder.decode(node, tuple(args), dtype, program))
        except RuleError as error:
            raise IllFormed(str(error)) from error

    def _decoded(self, node: Node, args: Sequence[int]) -> ir.Term:
        hint, number = str(self.program.terms[args[0]].dtype) if args else "float32", node.payload[0]
        if node.constructor == "Lit" and not _is_number_of(number, node.payload[1]):
            raise IllFormed(f"{number} is no number of {node.payload[1]}")
        try:
            return self.encoder.decode(node, tuple(args), hint, self.program)
        except RuleError as error:
            raise IllFormed(str(error)) from error

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
        dtype = np.dtype(terms[positions].dtype)
        if dtype.kind not in "iu" or dtype.itemsize < 4:
            raise IllFormed("positions are integers of at least 32 bits")
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
        whole = np.dtype(f"uint{8 * dtype.itemsize}") if kind(dtype) == "f" else dtype
        if whole != dtype:
            arg = add(ir.Map(whole, "bitcast_convert_type", (arg,), (("new_dtype", whole),)))
        out = add(ir.Fold(whole, "add" if kind(dtype) == "c" else "or", 1 << j, self._where_equal(i, j, arg)))
        return out if whole == dtype else add(ir.Map(dtype, "bitcast_convert_type", (out,), (("new_dtype", dtype),)))


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name of a dtype, which numpy puts together each time that it is asked."""
    return str(dtype)


def _is_number_of(number: float, dtype: str) -> bool:
    """Whether a number of a rule is one of a dtype, if only rounded."""
    if kind(dtype) in "fc":
        return not math.isfinite(number) or abs(number) <= float(jnp.finfo(dtype).max)
    if kind(dtype) == "b":
        return number in (0.0, 1.0)
    info = np.iinfo(dtype)
    return number.is_integer() and info.min <= number <= info.max


def dtype_of_map(op: str, dtypes: tuple[str, ...]) -> str:
    """The dtype of an elementwise operation without parameters.

    Raises:
        IllFormed: if it takes no such operands.
    """
    found = _dtype_of_map(op, dtypes)
    if found is None:
        raise IllFormed(f"no {op} of {', '.join(dtypes)}")
    return found


@cache
def _dtype_of_map(op: str, dtypes: tuple[str, ...]) -> str | None:
    row = MAPS[op]
    return _traced(lambda *a: row.bind(*a), tuple((2,) for _ in dtypes), dtypes)


def _result(term: ir.Map, dtypes: tuple[str, ...]) -> str:
    """The dtype of an elementwise operation, whose operands do not matter, for operands of these dtypes."""
    found = _result_of(term, dtypes)
    if found is None:
        raise IllFormed(f"no {term.op} of {', '.join(dtypes)}")
    return found


@cache
def _result_of(term: ir.Map, dtypes: tuple[str, ...]) -> str | None:
    return _traced(lambda *a: map_row(term).bind(*a, **dict(term.params)), tuple((2,) for _ in dtypes), dtypes)


def dtype_of_operation(operation: Operation, extents: tuple[int, ...], dtypes: tuple[str, ...]) -> str:
    """The dtype of the user's operation for named axes of these extents and operands of these dtypes.

    Raises:
        NotTaken: if its function takes no such operands.
    """
    found = _dtype_of_operation(operation, extents, dtypes)
    if found is None:
        raise NotTaken(f"no {operation.name} of {', '.join(dtypes)}")
    return found


def takes_one_dtype(operation: Operation, dtype: str) -> bool:
    """Whether all operands of the user's operation may have one dtype."""
    try:
        dtype_of_operation(operation, (2,) * len(operation.dimensions), (dtype,) * len(operation.operands))
    except IllFormed:
        return False
    return True


@cache
def _dtype_of_operation(operation: Operation, extents: tuple[int, ...], dtypes: tuple[str, ...]) -> str | None:
    extent = dict(zip(operation.dimensions, extents))
    return _traced(operation.evaluate, tuple(tuple(extent[name] for name in names) for names in operation.operands), dtypes)


def _traced(function: Any, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]) -> str | None:
    """The dtype of a function's result, traced and lowered; None where it takes no such operands, or lacks a parameter."""
    try:
        with np.errstate(all="ignore"):
            return str(jax.jit(function).lower(*map(jax.ShapeDtypeStruct, shapes, map(np.dtype, dtypes))).out_info.dtype)
    except (TypeError, ValueError, NotImplementedError):
        return None


@cache
def folds(monoid: str, dtype: str) -> bool:
    """Whether a monoid folds values of a dtype."""
    of = kind(dtype)
    if monoid in ("and", "or", "xor"):
        return of in "biu"
    return foldable(monoid, np.dtype(dtype)) and not (of == "b" and monoid in ("add", "mul"))
