"""Numbers that are known while a program is loaded: evaluated with NumPy, of iotas and literals alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eqsat_mem.frontend.flat_jaxpr import Equation, Flat

LARGEST = 1 << 22
"""Elements up to which positions are evaluated while loading."""


def known_number(flat: Flat, name: str, params: Mapping[str, Any], ins: Sequence[int], dtype: Any) -> Any:
    """The whole number or truth value that an operation makes of single ones; None where they are not known, or round.

    JAX counts places from the end of an axis so. NumPy computes modulo powers of two, as XLA does.
    """
    if name not in NUMPY or not ins or not all(v in flat.literals for v in ins):
        return None
    given = [np.asarray(flat.literals[v]) for v in ins]
    if not all(x.dtype.kind in "biu" for x in given):
        return None
    with np.errstate(over="ignore"):
        found = np.asarray(NUMPY[name](params, given))
    return found.astype(dtype) if not found.shape and found.dtype.kind in "biu" else None


class Constants:
    """Values that depend on iotas and literals only, evaluated with numpy."""

    def __init__(self, flat: Flat, producer: Mapping[int, Equation]):
        self.flat, self.producer = flat, producer

    def array(self, value: int) -> np.ndarray | None:
        if value in self.flat.literals:
            return np.asarray(self.flat.literals[value])
        eqn = self.producer.get(value)
        if eqn is None or eqn.prim.name not in NUMPY or math.prod(self.flat.shapes[value]) > LARGEST:
            return None
        operands = [self.array(v) for v in eqn.ins]
        if any(a is None for a in operands):
            return None
        return NUMPY[eqn.prim.name](eqn.params, operands)


def _numpy_iota(params: Any, operands: Sequence[Any]) -> np.ndarray:
    shape, dimension = params["shape"], params["dimension"]
    along = np.arange(shape[dimension], dtype=params["dtype"])
    return np.broadcast_to(along.reshape([-1 if d == dimension else 1 for d in range(len(shape))]), shape)


def _numpy_broadcast(params: Any, operands: Sequence[Any]) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for axis, extent in zip(params["broadcast_dimensions"], operands[0].shape):
        shape[axis] = extent
    return np.broadcast_to(operands[0].reshape(shape), params["shape"])


NUMPY: dict[str, Callable[[Any, Sequence[Any]], np.ndarray]] = {
    "iota": _numpy_iota,
    "broadcast_in_dim": _numpy_broadcast,
    "concatenate": lambda p, a: np.concatenate(a, p["dimension"]),
    "reshape": lambda p, a: a[0].reshape(p["new_sizes"]),
    "squeeze": lambda p, a: np.squeeze(a[0], tuple(p["dimensions"])),
    "convert_element_type": lambda p, a: a[0].astype(p["new_dtype"]),
    "select_n": lambda p, a: np.where(a[0], a[2], a[1]),
    "lt": lambda p, a: a[0] < a[1],
    "le": lambda p, a: a[0] <= a[1],
    "gt": lambda p, a: a[0] > a[1],
    "ge": lambda p, a: a[0] >= a[1],
    "eq": lambda p, a: a[0] == a[1],
    "ne": lambda p, a: a[0] != a[1],
    "and": lambda p, a: a[0] & a[1],
    "or": lambda p, a: a[0] | a[1],
    "max": lambda p, a: np.maximum(*a),
    "min": lambda p, a: np.minimum(*a),
    "add": lambda p, a: a[0] + a[1],
    "sub": lambda p, a: a[0] - a[1],
    "mul": lambda p, a: a[0] * a[1],
}
"""What operations make of whole numbers and truth values, by their parameters and operands."""
