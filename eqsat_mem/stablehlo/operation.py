"""One operation of a module, as the rows of the tables see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend.mlir import ir

from eqsat_mem.stablehlo.values import Uncompilable, aval_of, constant, integers, pairs, word

Row = Callable[..., Any]
"""Takes an :class:`Op` and its operands, and returns its result, or a list of them."""


class ModuleReader(Protocol):
    """The part of a reader that rows use."""

    rows: Mapping[str, Row]
    dtypes: Mapping[str, np.dtype[Any]]

    def call(self, name: str, values: Sequence[Any]) -> list[Any]:
        """The results of a function of the module."""
        ...

    def body_of(self, function: Callable[..., Any], arguments: Sequence[Any], name: str) -> str:
        """The body of the operation ``name`` that JAX lowers a function to, as :meth:`Op.body` gives it."""
        ...


class Op:
    """An operation with the shapes and dtypes of its results, and its regions as functions.

    Args:
        operation: the operation in MLIR.
        avals: the shapes and dtypes of its results.
        scope: the values computed so far, by their names in MLIR.
        reader: the module that it stands in.
    """

    def __init__(self, operation: Any, avals: Sequence[jax.ShapeDtypeStruct], scope: Mapping[Any, Any], reader: Any) -> None:
        self.operation = operation
        self.name: str = operation.name
        self.avals = avals
        self.scope = scope
        self.reader: ModuleReader = reader
        self.attributes: Any = operation.attributes
        self.regions: list[Callable[..., list[Any]]] = [
            lambda *values, block=region.blocks[0]: reader.run(block, values, scope) for region in operation.regions
        ]

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the only result."""
        (aval,) = self.avals
        return aval

    # attributes

    def has(self, name: str) -> bool:
        return name in self.attributes

    def integers(self, name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
        return integers(self.attributes[name]) if self.has(name) else tuple(default)

    def pairs(self, name: str, rank: int) -> tuple[tuple[int, int], ...]:
        """A row of two numbers for each of ``rank`` dimensions; zeros where nothing is said."""
        return pairs(self.attributes[name]) if self.has(name) else ((0, 0),) * rank

    def value(self, name: str, default: Any = None) -> Any:
        """A number, a flag or a text."""
        return self.attributes[name].value if self.has(name) else default

    def word(self, name: str) -> str:
        """A word of an enumeration; empty where it is not said."""
        return word(self.attributes[name]) if self.has(name) else ""

    def symbol(self, name: str) -> str:
        """The name of a function."""
        return str(ir.FlatSymbolRefAttr(self.attributes[name]).value)

    def with_attributes(self, name: str) -> Op:
        """The same operation with the attributes that one of its attributes holds."""
        other = Op(self.operation, self.avals, self.scope, self.reader)
        other.attributes = ir.DictAttr(self.attributes[name]) if self.has(name) else {}
        return other

    # values and regions

    def value_of(self, value: Any) -> Any:
        """A value that stands before the operation."""
        return self.scope[value]

    def known(self, value: Any) -> Any:
        """A constant, inside of a region or outside, as an array; None for any other value."""
        found = self.scope.get(value)
        if not isinstance(found, np.ndarray | np.generic) and getattr(getattr(value, "owner", None), "name", "") == "stablehlo.constant":
            found = constant(value.owner.operation, aval_of(value.type, self.reader.dtypes))
        return found if isinstance(found, np.ndarray | np.generic) else None

    def numbers(self, operand: int) -> np.ndarray:
        """The numbers of an operand that is a constant, for an operation that takes its shape from them.

        Raises:
            Uncompilable: if it is none.
        """
        value = self.operation.operands[operand]
        found = self.known(value)
        if found is None:
            raise Uncompilable(f"its operand {operand} says what shape it has, and is no constant: export the module once for each shape")
        return np.broadcast_to(found, aval_of(value.type, self.reader.dtypes).shape)

    def arguments(self, region: int) -> list[Any]:
        """The arguments of a region, in MLIR."""
        return list(self.operation.regions[region].blocks[0].arguments)

    def returned(self, region: int) -> list[Any]:
        """The results of a region, in MLIR."""
        return list(self.inner(region)[-1].operands)

    def inner(self, region: int) -> list[Any]:
        """The operations of a region, in MLIR."""
        return [op.operation for op in self.operation.regions[region].blocks[0].operations]

    def body(self, region: int) -> str:
        """A region as the text of a jaxpr: two that are equal compute the same."""
        avals = [aval_of(argument.type, self.reader.dtypes) for argument in self.arguments(region)]
        return str(jax.make_jaxpr(self.regions[region])(*avals))

    def combiner(self, region: int) -> str:
        """The operation that is all of a region of two arguments, if it does not mind their order; else an empty text."""
        operations, arguments = self.inner(region), self.arguments(region)
        if len(operations) != 2 or len(arguments) != 2:
            return ""
        first, last = operations
        name = first.name.removeprefix("stablehlo.")
        if (
            name not in COMMUTATIVE
            or list(first.operands) not in (arguments, arguments[::-1])
            or list(last.operands) != list(first.results)
        ):
            return ""
        return BOOLEAN.get(name, name) if str(arguments[0].type.element_type) == "i1" else name


COMMUTATIVE = ("add", "multiply", "maximum", "minimum", "and", "or", "xor")
BOOLEAN = {"add": "or", "multiply": "and", "maximum": "or", "minimum": "and"}
"""The operations of truth values that StableHLO writes as those of numbers."""


def is_number(value: Any, number: Any) -> bool:
    """Whether a value is known while it is read, and is ``number`` everywhere."""
    return isinstance(value, np.ndarray | np.generic) and bool(np.all(np.asarray(value) == np.asarray(number)))
