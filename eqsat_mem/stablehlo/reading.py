"""The operations of a module, evaluated one after the other while JAX traces them."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir

from eqsat_mem.errors import StableHLOError
from eqsat_mem.frontend.inline import lines_of
from eqsat_mem.ir import Source
from eqsat_mem.stablehlo.kept import is_constant, keep, read_from_outside
from eqsat_mem.stablehlo.operation import Op, Row
from eqsat_mem.stablehlo.table import ROWS
from eqsat_mem.stablehlo.values import Uncompilable, Unreadable, aval_of, dtypes

_RETURNS = ("func.return", "stablehlo.return")
_SYMBOL = re.compile(r"@([\w$.-]+)")


class Reading:
    """The functions of a module, and which of its operations were kept as they are.

    Args:
        module: the module in MLIR.
        file: the file that it stands in, for lines and errors.
    """

    def __init__(self, module: Any, file: str) -> None:
        self.rows: Mapping[str, Row] = ROWS
        self.file = file
        self.functions = {op.name.value: op for op in module.body.operations if op.operation.name == "func.func"}
        self.kept: list[str] = []
        self._within: list[Source | None] = [None]
        self._function: list[str] = []
        self._bodies: dict[tuple[str, str], str] = {}
        with module.context:
            self.dtypes = dtypes()

    def main(self) -> Any:
        """The function that a module is run by, in MLIR: ``main``, or the only one that others may call.

        Raises:
            StableHLOError: if there is none.
        """
        public = [f for f in self.functions.values() if "private" not in str(f.attributes.get("sym_visibility", ""))]
        if "main" in self.functions:
            return self.functions["main"]
        if len(public) != 1:
            raise StableHLOError(f"{self.file} has no function main, and {len(public)} functions that could be meant.")
        return public[0]

    def avals(self, values: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of arguments or results of a function.

        Raises:
            StableHLOError: if JAX has no words for one of them.
        """
        try:
            return [aval_of(getattr(value, "type", value), self.dtypes) for value in values]
        except Unreadable as reason:
            raise StableHLOError(f"{self.file} cannot be read: its function takes or returns {reason}.") from None

    # for rows

    def call(self, name: str, values: Sequence[Any]) -> list[Any]:
        """The results of a function of the module."""
        self._function.append(name)
        try:
            return self.run(self.functions[name].regions[0].blocks[0], values, {})
        finally:
            self._function.pop()

    def body_of(self, function: Callable[..., Any], arguments: Sequence[Any], name: str) -> str:
        """The body of the operation ``name`` that JAX lowers a function to, as :meth:`Op.body` gives it."""
        key = str(jax.make_jaxpr(function)(*arguments)), name
        if key not in self._bodies:
            other = _BodyOf(jax.jit(function).lower(*arguments).compiler_ir("stablehlo"), name)
            jax.make_jaxpr(lambda *args: other.call("main", args))(*arguments)
            self._bodies[key] = other.found
        return self._bodies[key]

    # operations

    def run(self, block: Any, values: Sequence[Any], outer: Mapping[Any, Any]) -> list[Any]:
        """The values that a block returns."""
        scope = ChainMap(dict(zip(block.arguments, values, strict=True)), outer)  # type: ignore[arg-type]  # never written to
        for op in block.operations:
            operation = op.operation
            if operation.name in _RETURNS:
                return [scope[value] for value in operation.operands]
            source = self.source(operation.location) or self._within[-1]
            self._within.append(source)
            with lines_of(source):
                results = self.results(operation, scope)
            self._within.pop()
            scope.update(zip(operation.results, results, strict=True))
        raise AssertionError

    def results(self, operation: Any, scope: MutableMapping[Any, Any]) -> list[Any]:
        """The results of an operation: those of its row, or of the operation as it is."""
        try:
            avals = [aval_of(value.type, self.dtypes) for value in operation.results]
        except Unreadable as reason:
            raise self.refused(operation, reason) from None
        op = Op(operation, avals, scope, self)
        operands = [scope[value] for value in operation.operands]
        row = self.rows.get(op.name)
        if row is not None:
            try:
                made = row(op, *operands)
                found = made if isinstance(made, list) else [made]
                if [(np.shape(x), x.dtype) for x in found] == [(aval.shape, aval.dtype) for aval in avals]:
                    return found
            except (Unreadable, TypeError, ValueError, NotImplementedError):
                pass  # this form of the operation is not JAX's
            except Uncompilable as reason:
                raise self.refused(operation, reason) from None
        return self.keep(op, operands)

    def keep(self, op: Op, operands: Sequence[Any]) -> list[Any]:
        """The results of an operation that is kept as it is.

        Raises:
            StableHLOError: if that cannot be done.
        """
        text = op.operation.get_asm(enable_debug_info=False, large_elements_limit=8, large_resource_limit=8)
        if op.value("has_side_effect", False):
            raise self.refused(op.operation, "it has a side effect, which a plan cannot keep in its place")
        if not self.functions.keys().isdisjoint(_SYMBOL.findall(text)):
            raise self.refused(op.operation, "it calls a function of the module")
        outside = [(value, op.scope[value]) for value in read_from_outside(op.operation) if not is_constant(value)]
        try:
            made = keep(op.operation, operands, outside, op.avals, len(self.kept))
        except TypeError as error:
            raise self.refused(op.operation, error) from error
        self.kept.append(f"{self.title(op.operation)} at {self.place(op.operation)}")
        return made

    def refused(self, operation: Any, reason: Any) -> StableHLOError:
        return StableHLOError(f"{self.title(operation)} at {self.place(operation)} cannot be read: {reason}.")

    @staticmethod
    def title(operation: Any) -> str:
        target = operation.attributes["call_target_name"].value if "call_target_name" in operation.attributes else ""
        return f"{operation.name} {target}".rstrip()

    # places

    def place(self, operation: Any) -> str:
        source = self.source(operation.location) or self._within[-1]
        return self.file if source is None else f"{source.file}:{source.line} ({source.function})"

    def source(self, location: Any) -> Source | None:
        """The line that an operation was written in: that of a program, where the module keeps it, else its own in the module."""
        function = self._function[-1] if self._function else "main"
        while True:
            if isinstance(location, ir.FileLineColLoc):
                is_own = location.filename == "-"
                return Source(self.file if is_own else location.filename, location.start_line, function)
            if isinstance(location, ir.NameLoc):
                if isinstance(location.child_loc, ir.FileLineColLoc):
                    function = location.name_str.rpartition(".")[2]
                location = location.child_loc
            elif isinstance(location, ir.CallSiteLoc):
                location = location.callee
            elif isinstance(location, ir.FusedLoc):
                location = location.locations[0]
            else:
                return None


class _BodyOf(Reading):
    """A reading for the body of the first operation of a name."""

    def __init__(self, module: Any, name: str) -> None:
        super().__init__(module, name)
        self.name, self.found = name, ""

    def results(self, operation: Any, scope: MutableMapping[Any, Any]) -> list[Any]:
        if operation.name == self.name and not self.found:
            self.found = Op(operation, (), scope, self).body(0)
        if operation.name == self.name:
            return [np.zeros(aval.shape, aval.dtype) for aval in self.avals(operation.results)]
        return super().results(operation, scope)
