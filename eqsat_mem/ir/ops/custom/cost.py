"""What the functions of users' operations are made of: their work, their largest values, whether a library knows them."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from eqsat_mem.errors import OptionError
from eqsat_mem.ir.ops.control import body_weight
from eqsat_mem.ir.ops.elementwise import MAPS

if TYPE_CHECKING:
    from eqsat_mem.ir.ops.custom.operation import Operation


Shapes = tuple[tuple[int, ...], ...]


@cache
def work(operation: Operation, shapes: Shapes) -> float:
    """Additions of one call on operands of these shapes: the table's for elementwise operations, one per element of other results.

    Raises:
        OptionError: if the function cannot be traced.
    """
    return _work(_traced(operation, shapes))


@cache
def largest_value(operation: Operation, shapes: Shapes) -> int:
    """Elements of the largest value that one call makes."""
    return max(_sizes(_traced(operation, shapes)), default=0)


def in_library(operation: Operation) -> bool:
    """Whether XLA:CPU's kernel library knows everything that an elementwise operation is made of."""
    return _in_library(_traced(operation, ((),) * len(operation.operands)))


def _traced(operation: Operation, shapes: Shapes) -> Any:
    """The jaxpr of an operation's function on operands of a dtype that it takes."""
    for dtype in (np.float32, np.int32, np.bool_, np.complex64):
        try:
            return jax.make_jaxpr(operation.fun)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)).jaxpr
        except TypeError:
            continue
    raise OptionError(f"the cost of operation {operation.name!r} cannot be counted: pass cost=, in additions per call of its function.")


def _work(jaxpr: Any) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        row, inside = MAPS.get(eqn.primitive.name), _inside(eqn)
        if row is not None:
            total += row.weight * math.prod(eqn.outvars[0].aval.shape)
        elif inside and "length" not in eqn.params:
            total += sum(map(_work, inside))
        else:
            total += body_weight(jaxpr.replace(eqns=[eqn]))
    return total


def _sizes(jaxpr: Any) -> list[int]:
    """Elements of each value that a jaxpr makes."""
    own = [math.prod(v.aval.shape) for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, "shape")]
    return own + [size for eqn in jaxpr.eqns for body in _inside(eqn) for size in _sizes(body)]


def _in_library(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        inside, row = _inside(eqn), MAPS.get(eqn.primitive.name)
        if not (all(map(_in_library, inside)) if inside else row is not None and row.library):
            return False
    return True


def _inside(eqn: Any) -> list[Any]:
    """The jaxprs that an equation holds."""
    return list(jaxprs_in_params(eqn.params))
