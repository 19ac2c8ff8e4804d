"""Elementwise operations: one row each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from eqsat_mem.stablehlo.operation import BOOLEAN, Op, Row
from eqsat_mem.stablehlo.values import Unreadable


def plain(function: Callable[..., Any]) -> Row:
    """The row of an operation that a function of ``jax.lax`` is, operand for operand."""

    def row(op: Op, *operands: Any) -> Any:
        if op.has("result_accuracy") and "mode = #stablehlo.result_accuracy_mode<DEFAULT>" not in str(op.attributes["result_accuracy"]):
            raise Unreadable("an accuracy that is asked for")
        return function(*operands)

    return row


def arithmetic(name: str, function: Callable[..., Any]) -> Row:
    """The row of an operation of numbers which is another one of truth values."""

    def row(op: Op, *operands: Any) -> Any:
        return (_LOGIC[BOOLEAN[name]] if op.aval.dtype == bool else function)(*operands)

    return row


_LOGIC = {"or": lax.bitwise_or, "and": lax.bitwise_and}


def broadcast(row: Row) -> Row:
    """The row of one of CHLO's operations that broadcast their operands, from the row for operands of one shape."""

    def wide(op: Op, *operands: Any) -> Any:
        shape = op.aval.shape
        dims = op.integers("broadcast_dimensions")

        def whole(x: Any) -> Any:
            rank = np.ndim(x)
            to = dims if dims and rank < len(shape) else tuple(range(len(shape) - rank, len(shape)))
            return lax.broadcast_in_dim(x, shape, to)

        return row(op, *map(whole, operands))

    return wide


_COMPARISONS = {"EQ": lax.eq, "NE": lax.ne, "LT": lax.lt, "LE": lax.le, "GT": lax.gt, "GE": lax.ge}


def compare(op: Op, x: Any, y: Any) -> Any:
    direction = op.word("comparison_direction")
    kind = op.word("compare_type")
    if kind != "TOTALORDER" or not jnp.issubdtype(x.dtype, jnp.floating):
        return _COMPARISONS[direction](x, y)
    match direction:
        case "LT" | "LE":
            return (primitives.lt_to_p if direction == "LT" else primitives.le_to_p).bind(x, y)
        case "GT" | "GE":
            return (primitives.lt_to_p if direction == "GT" else primitives.le_to_p).bind(y, x)
    equal = primitives.eq_to_p.bind(x, y)
    return equal if direction == "EQ" else lax.bitwise_not(equal)


def convert(op: Op, x: Any) -> Any:
    if x.dtype == op.aval.dtype:
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(op.aval.dtype, jnp.complexfloating):
        x = lax.real(x)
    return lax.convert_element_type(x, op.aval.dtype)


def mapped(op: Op, *operands: Any) -> Any:
    """A function of scalars on every element."""
    function = op.regions[0]
    for _ in op.aval.shape:
        function = jax.vmap(function)
    return function(*operands)


def batch_norm_inference(op: Op, x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Any:
    feature = (op.value("feature_index"),)

    def whole(per_feature: Any) -> Any:
        return lax.broadcast_in_dim(per_feature, x.shape, feature)

    deviation = lax.sqrt(whole(variance + np.asarray(op.value("epsilon"), x.dtype)))
    return (x - whole(mean)) / deviation * whole(scale) + whole(offset)


UNARY: dict[str, Callable[..., Any]] = {
    "abs": lax.abs,
    "cbrt": lax.cbrt,
    "ceil": lax.ceil,
    "cosine": lax.cos,
    "count_leading_zeros": lax.clz,
    "exponential": lax.exp,
    "exponential_minus_one": lax.expm1,
    "floor": lax.floor,
    "imag": lax.imag,
    "is_finite": lax.is_finite,
    "log": lax.log,
    "log_plus_one": lax.log1p,
    "logistic": lax.logistic,
    "negate": lax.neg,
    "not": lax.bitwise_not,
    "popcnt": lax.population_count,
    "real": lax.real,
    "round_nearest_afz": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "round_nearest_even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "rsqrt": lax.rsqrt,
    "sign": lax.sign,
    "sine": lax.sin,
    "sqrt": lax.sqrt,
    "tan": lax.tan,
    "tanh": lax.tanh,
}

BINARY: dict[str, Callable[..., Any]] = {
    "and": lax.bitwise_and,
    "atan2": lax.atan2,
    "complex": lax.complex,
    "divide": lax.div,
    "or": lax.bitwise_or,
    "power": lax.pow,
    "remainder": lax.rem,
    "shift_left": lax.shift_left,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
    "shift_right_logical": lax.shift_right_logical,
    "subtract": lax.sub,
    "xor": lax.bitwise_xor,
}

ARITHMETIC: dict[str, Callable[..., Any]] = {"add": lax.add, "multiply": lax.mul, "maximum": lax.max, "minimum": lax.min}

OTHERS: dict[str, Row] = {
    "batch_norm_inference": batch_norm_inference,
    "bitcast_convert": lambda op, x: lax.bitcast_convert_type(x, op.aval.dtype),
    "clamp": lambda op, low, x, high: lax.clamp(low, x, high),
    "compare": compare,
    "convert": convert,
    "map": mapped,
    "reduce_precision": lambda op, x: lax.reduce_precision(x, op.value("exponent_bits"), op.value("mantissa_bits")),
    "select": lambda op, which, yes, no: lax.select(which, yes, no),
}

CHLO: dict[str, Callable[..., Any]] = {
    "acos": lax.acos,
    "acosh": lax.acosh,
    "asin": lax.asin,
    "asinh": lax.asinh,
    "atan": lax.atan,
    "atanh": lax.atanh,
    "bessel_i1e": lax.bessel_i1e,
    "conj": lax.conj,
    "cosh": lax.cosh,
    "digamma": lax.digamma,
    "erf": lax.erf,
    "erf_inv": lax.erf_inv,
    "erfc": lax.erfc,
    "is_inf": lambda x: lax.eq(lax.abs(x), lax.full_like(x, np.inf)),
    "is_neg_inf": lambda x: lax.eq(x, lax.full_like(x, -np.inf)),
    "is_pos_inf": lambda x: lax.eq(x, lax.full_like(x, np.inf)),
    "lgamma": lax.lgamma,
    "next_after": lax.nextafter,
    "polygamma": lax.polygamma,
    "sinh": lax.sinh,
    "square": lax.square,
    "tan": lax.tan,
    "zeta": lax.zeta,
}

BROADCASTS = (
    "add and atan2 compare complex divide maximum minimum multiply or power remainder select shift_left shift_right_arithmetic "
    "shift_right_logical subtract xor"
)
"""Operations that CHLO has a form of that broadcasts."""

_STABLEHLO: dict[str, Row] = {
    **{name: plain(function) for name, function in {**UNARY, **BINARY}.items()},
    **{name: arithmetic(name, function) for name, function in ARITHMETIC.items()},
    **OTHERS,
}

ELEMENTWISE: dict[str, Row] = {
    **{f"stablehlo.{name}": row for name, row in _STABLEHLO.items()},
    **{f"chlo.{name}": plain(function) for name, function in CHLO.items()},
    **{f"chlo.broadcast_{name}": broadcast(_STABLEHLO[name]) for name in BROADCASTS.split()},
    "chlo.constant_like": lambda op, x: lax.full(op.aval.shape, op.attributes["value"].value, op.aval.dtype),
}
