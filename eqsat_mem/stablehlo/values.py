"""Types, constants and attributes of a module as NumPy and Python know them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.interpreters import mlir

_NAMES = (
    "bool int2 int4 int8 int16 int32 int64 uint2 uint4 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn"
)


class Unreadable(Exception):
    """A part of a module says something that JAX has no words for; the message says what."""


class Uncompilable(Exception):
    """A part of a module says something that no compiler takes as it stands; the message says what."""


def dtypes() -> dict[str, np.dtype[Any]]:
    """The dtype of each element type that JAX has, by the type's name in MLIR. There has to be an MLIR context."""
    known = [np.dtype(getattr(jnp, name)) for name in _NAMES.split() if hasattr(jnp, name)]
    return {str(mlir.dtype_to_ir_type(dtype)): dtype for dtype in known}


def aval_of(type_: Any, known: Mapping[str, np.dtype[Any]]) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a tensor type.

    Raises:
        Unreadable: if its shape is not made of numbers, or JAX has no such dtype.
    """
    if not isinstance(type_, ir.RankedTensorType):
        raise Unreadable(f"a value of type {type_}, which is no array")
    if not type_.has_static_shape:
        raise Unreadable(f"a value of type {type_}, whose shape is not made of numbers: export the module once for each shape")
    element = str(type_.element_type)
    if element not in known:
        raise Unreadable(f"a value of type {type_}, whose elements JAX has no dtype for")
    return jax.ShapeDtypeStruct(tuple(type_.shape), known[element])


# --- constants ---------------------------------------------------------------------------------------

_TEXT = re.compile(r"dense<(.*)> : tensor<[^<>]*(?:<[^<>]*>)?[^<>]*>", re.DOTALL)
_ELEMENT = re.compile(r"\(([^(),]+),([^(),]+)\)|([^\s,()\[\]]+)")


def constant(operation: Any, aval: jax.ShapeDtypeStruct) -> Any:
    """The value of a constant: an array of its shape, or a scalar where all elements are the same."""
    try:
        attribute = operation.attributes["value"]
        if getattr(attribute, "is_splat", False) and aval.shape:
            attribute = attribute.get_splat_value()
            return _elements(str(attribute).split(" : ")[0], aval.dtype)[0]
        found = np.array(attribute)
        if found.dtype == aval.dtype:
            return found
    except TypeError:  # the bindings give neither complex numbers nor what NumPy has no letter for
        pass
    text = operation.get_asm(enable_debug_info=False)
    inside = _TEXT.search(text)
    if inside is None:
        raise Unreadable(f"a constant that is not dense: {text[:60]}")
    values = _elements(inside[1], aval.dtype)
    return values[0] if values.size == 1 and aval.shape else values.reshape(aval.shape)


def _elements(text: str, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The elements of a constant that MLIR wrote as text: one after the other, or the bytes of all of them as one string."""
    if text.startswith('"0x'):
        return np.frombuffer(bytes.fromhex(text[3:-1]), dtype)
    made: list[Any] = []
    for real, imaginary, single in _ELEMENT.findall(text):
        parts = [_number(word, dtype) for word in ((real, imaginary) if real else (single,))]
        made.append(parts[0] if len(parts) == 1 else complex(*map(float, parts)))
    return np.array(made, dtype)


def _number(word: str, dtype: np.dtype[Any]) -> Any:
    """A number as MLIR writes it: the bits of a floating-point number stand for those that no decimal does, such as NaN."""
    if word in ("true", "false"):
        return word == "true"
    if jnp.issubdtype(dtype, jnp.integer):
        return int(word, 0)
    if not word.startswith("0x"):
        return float(word)
    part = np.zeros((), dtype).real.dtype if dtype.kind == "c" else dtype
    return np.array(int(word, 16), f"uint{8 * part.itemsize}").view(part)[()]


# --- attributes --------------------------------------------------------------------------------------


def integers(attribute: Any) -> tuple[int, ...]:
    """The numbers of an array attribute, dense or not."""
    return tuple(int(getattr(item, "value", item)) for item in np.array(attribute).ravel())


def pairs(attribute: Any) -> tuple[tuple[int, int], ...]:
    """The rows of a dense attribute of shape (n, 2)."""
    flat = integers(attribute)
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def word(attribute: Any) -> str:
    """The word of an enumeration, such as LT of ``#stablehlo<comparison_direction LT>``."""
    return str(attribute).removesuffix(">").rpartition(" ")[2]
