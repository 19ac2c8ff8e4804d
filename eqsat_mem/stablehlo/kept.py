"""Operations that JAX has no primitive for: each is one, which is lowered to the operation as it stood in its module."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import mlir

from eqsat_mem.backends.cpu.custom_calls import prepare

kept_p = Primitive("stablehlo")
kept_p.multiple_results = True


def keep(operation: Any, operands: Sequence[Any], outside: Sequence[tuple[Any, Any]], avals: Sequence[Any], number: int) -> list[Any]:
    """The results of an operation that is kept as it is.

    Args:
        operation: the operation in MLIR.
        operands: the values of its operands.
        outside: what its regions read from outside of it, but for constants: the value in MLIR, and the value.
        avals: the shapes and dtypes of its results.
        number: which of the kept operations of the module it is. Equal ones are not merged: what they do is not known.
    """
    text = _alone(operation, [value for value, _ in outside])
    prepare(text)
    values = (*operands, *(value for _, value in outside))
    shapes = tuple((aval.shape, aval.dtype) for aval in avals)
    out: list[Any] = kept_p.bind(*values, name=operation.name, text=text, shapes=shapes, number=number)
    return out


def _alone(operation: Any, outside: Sequence[Any]) -> str:
    """A module of one function, whose body is an operation: of its operands, and of what its regions read besides."""
    with operation.context, ir.Location.unknown():
        module = ir.Module.create()
        types = [value.type for value in (*operation.operands, *outside)]
        with ir.InsertionPoint(module.body):
            function: Any = func.FuncOp("kept", (types, [value.type for value in operation.results]))
            function.attributes["sym_visibility"] = ir.StringAttr.get("private")
            block = function.add_entry_block()
        with ir.InsertionPoint(block):
            given = dict(zip(outside, list(block.arguments)[len(operation.operands) :], strict=True))
            given |= {
                value: value.owner.operation.clone().operation.results[0] for value in read_from_outside(operation) if is_constant(value)
            }
            clone = operation.clone().operation
            for k, argument in enumerate(list(block.arguments)[: len(operation.operands)]):
                clone.operands[k] = argument
            for inner in inside(clone):
                for k, value in enumerate(inner.operands):
                    if value in given:
                        inner.operands[k] = given[value]
            func.ReturnOp(list(clone.results))
        return str(module.operation.get_asm(enable_debug_info=False))


def is_constant(value: Any) -> bool:
    """Whether a value, in MLIR, is a constant: compilers want those of regions inside or beside them, and not as arguments."""
    return getattr(value.owner, "name", "") == "stablehlo.constant"


def inside(operation: Any) -> list[Any]:
    """The operations in the regions of one, however deep."""
    return [
        found
        for region in operation.regions
        for block in region.blocks
        for op in block.operations
        for found in (op.operation, *inside(op.operation))
    ]


def read_from_outside(operation: Any) -> list[Any]:
    """The values, in MLIR, that the regions of an operation read from outside of it, each once."""
    own = {
        value
        for region in operation.regions
        for block in region.blocks
        for value in (*block.arguments, *(r for op in block.operations for r in op.operation.results))
    }
    inner = inside(operation)
    for op in inner:
        own.update(op.results)
        own.update(value for region in op.regions for block in region.blocks for value in block.arguments)
    return list(dict.fromkeys(value for op in inner for value in op.operands if value not in own))


def _avals(*_: Any, shapes: Sequence[Any], **__: Any) -> list[ShapedArray]:
    return [ShapedArray(shape, dtype) for shape, dtype in shapes]


def _run(*args: Any, **params: Any) -> Any:
    return jax.jit(partial(kept_p.bind, **params))(*args)


def _lower(ctx: mlir.LoweringRuleContext, *args: Any, text: str, **_: Any) -> Sequence[Any]:
    into = ctx.module_context
    module = ir.Module.parse(text)
    moved = module.body.operations[0].operation.clone(ip=ir.InsertionPoint(into.module.body))
    name = into.symbol_table.insert(moved)  # under a name of its own
    function_type: Any = moved.attributes["function_type"]
    call = func.CallOp(function_type.value.results, ir.FlatSymbolRefAttr.get(name.value), list(args))
    return list(call.operation.results)


kept_p.def_abstract_eval(_avals)
kept_p.def_impl(_run)
mlir.register_lowering(kept_p, _lower)
