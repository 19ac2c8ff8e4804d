"""Numbers that are known while a program is loaded: evaluated with NumPy, of iotas and literals alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

from eqsat_mem.frontend.flat_jaxpr import Equation, Flat

LARGEST = 1 << 22
"""Elements up to which positions are evaluated while loading."""


def known_number(flat: Flat, name: str, params: Mapping[str, Any], ins: Sequence[int], dtype: Any) -> Any:
    """The number or truth value that an operation makes of single ones; None where they are not known, or round."""
    if name not in NUMPY or not ins or not all(v in flat.literals for v in ins):
        return None
    return number_of(name, params, [np.asarray(flat.literals[v]) for v in ins], dtype)


def number_of(name: str, params: Mapping[str, Any], given: Sequence[np.ndarray], dtype: Any) -> Any:
    """The number that an operation makes of these; None where it rounds, or is not looked at.

    JAX counts places from the end of an axis so, and libraries fill arrays with products of zero and one. NumPy computes modulo powers of
    two, as XLA does.
    """
    if name not in NUMPY:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        if any(jnp.issubdtype(x.dtype, np.floating) for x in given):
            return _exact(name, given, dtype)
        if not all(x.dtype.kind in "biu" for x in given):
            return None
        found = np.asarray(NUMPY[name](params, given))
    return found.astype(dtype) if not found.shape and found.dtype.kind in "biu" else None


def _exact(name: str, given: Sequence[np.ndarray], dtype: Any) -> Any:
    """The number that an operation makes of floating-point ones; None where it is rounded, or a device may flush it to zero."""
    if name not in _OF_FLOATS or not all(_is_plain(x) for x in given):
        return None
    found = np.asarray(NUMPY[name]({}, given)).astype(dtype)
    if not _is_plain(found):
        return None
    is_rounded = name in _OF_FRACTIONS and Fraction(float(found)) != _OF_FRACTIONS[name](*(Fraction(float(x)) for x in given))
    return None if is_rounded else found


def _is_plain(x: np.ndarray) -> bool:
    """Whether a number is finite, and neither below the normal ones nor a negative zero."""
    if not jnp.issubdtype(x.dtype, np.floating):
        return x.dtype.kind == "b"
    size = abs(float(x))
    return math.isfinite(size) and (size >= float(jnp.finfo(x.dtype).tiny) or (size == 0 and not np.signbit(x)))


_OF_FRACTIONS: dict[str, Callable[..., Fraction]] = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}
"""The arithmetic of numbers that are not rounded."""
_OF_FLOATS = frozenset({*_OF_FRACTIONS, "max", "min", "lt", "le", "gt", "ge", "eq", "ne", "select_n"})


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
