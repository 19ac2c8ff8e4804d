"""Elementwise operations, one row each: meaning, JAX source, and name in rule files."""

from __future__ import annotations

import ast
import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives

from eqsat_mem.ir import Params

Text = str | Callable[[Sequence[str], Mapping[str, Any], Any], str | None] | None


@dataclass(frozen=True)
class MapOp:
    """The meaning of an elementwise primitive; backends have its costs and the compilers' behaviour.

    Attributes:
        name: the primitive's name.
        text: a template over operands ``{0}``, ``{1}`` and parameters, or a function of ``(args, params, dtype)``; None if the
            primitive has no readable source.
        prim: JAX's primitive.
        constructor: its name in rule files.
        defaults: the parameters that a term may omit, with their values.
        arity: the number of operands.
    """

    name: str
    text: Text
    prim: Any
    constructor: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    arity: int = 1

    def bind(self, *args: Any, **params: Any) -> Any:
        """Apply the operation to arrays of one shape."""
        return self.prim.bind(*args, **{**self.defaults, **params})


def map_params(op: str, params: Mapping[str, Any]) -> Params:
    """Return the parameters of a primitive that a ``Map`` term keeps: those that affect its meaning and are not defaults."""
    row = MAPS[op]
    kept = {k: v for k, v in params.items() if not (k in row.defaults and row.defaults[k] == v) and k not in _MEANINGLESS}
    return tuple(sorted(kept.items()))


def map_text(op: str, params: Params | Mapping[str, Any], args: Sequence[str], dtype: Any) -> str | None:
    """Return JAX source of an elementwise operation, bitwise equal to its primitive.

    Args:
        op: the name of the operation.
        params: its parameters.
        args: source of its operands, whose shapes broadcast. An operand may be a Python number if another operand is an array of the
            intended dtype.
        dtype: the dtype of the result.

    Returns:
        The source; None if the operation has no readable source.
    """
    row, given = MAPS.get(op), dict(params)
    if row is None or row.text is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return None
    text = _render(row, args, given, dtype)
    if text is not None and _is_call(row, len(args), given, dtype) and any(map(_is_number, args)):
        kind = np.zeros((), dtype).real.dtype if op == "complex" else dtype
        text = _render(row, [f"{dtype_text(kind)}({a})" if _is_number(a) else a for a in args], given, dtype)
    return text


def of_one_rank(op: str, params: Params | Mapping[str, Any], arity: int, dtype: Any) -> bool:
    """Whether the operands in the source of an operation must have the same number of axes, as those of ``lax`` functions."""
    row = MAPS.get(op)
    return row is None or row.text is None or _is_call(row, arity, dict(params), dtype)


def _is_call(row: MapOp, arity: int, given: Mapping[str, Any], dtype: Any) -> bool:
    """Whether a row's source itself, whatever its operands, is a call of a ``lax`` function, which converts no operand."""
    return str(_render(row, ["x"] * arity, given, dtype)).startswith("lax.")


def _render(row: MapOp, args: Sequence[str], given: Mapping[str, Any], dtype: Any) -> str | None:
    """Return a row's source for these operands, or None."""
    assert row.text is not None
    if callable(row.text):
        return row.text(args, given, dtype)
    used = {name for _, name, _, _ in string.Formatter().parse(row.text) if name}
    if not set(given) <= used:
        return None
    infix = not row.text.startswith(("lax.", "jnp."))
    operands = [atom(a) if infix else a for a in args]
    return row.text.format(*operands, **{k: value_text(v) for k, v in given.items()})


def _is_number(source: str) -> bool:
    """Whether source is a bare Python number, to which functions of ``lax`` would give the default dtype."""
    sign = ast.UnaryOp | ast.BinOp | ast.unaryop | ast.operator
    nodes = list(ast.walk(ast.parse(source, mode="eval").body))
    names = {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    plain = all(isinstance(n, ast.Constant | ast.Attribute | ast.Name | ast.expr_context | sign) for n in nodes)
    return plain and names <= {"jnp", "np", "inf", "nan"}


def atom(source: str) -> str:
    """Return ``source``, in parentheses unless it binds tighter than any operator."""
    tight = ast.Call | ast.Subscript | ast.Attribute | ast.Constant
    return source if source.isidentifier() or isinstance(ast.parse(source, mode="eval").body, tight) else f"({source})"


def value_text(value: Any) -> str:
    """Return source of a parameter that is a number, a string, a dtype, or a tuple of these."""
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return dtype_text(value)
    if isinstance(value, np.generic):
        return value_text(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return "jnp.nan" if math.isnan(value) else "jnp.inf" if value > 0 else "-jnp.inf"
    if isinstance(value, complex) and any(not math.isfinite(v) or (v == 0 and math.copysign(1, v) < 0) for v in (value.real, value.imag)):
        return f"complex({value_text(value.real)}, {value_text(value.imag)})"  # a sum of the two loses signs of zero
    if isinstance(value, tuple):
        return "(" + ", ".join(map(value_text, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)


def dtype_text(dtype: Any) -> str:
    """Return source of a dtype, for instance ``jnp.float32``."""
    name = np.dtype(dtype).name
    return "jnp.bool_" if name == "bool" else f"jnp.{name}"


def _infix(symbol: str, function: str, only: Any = np.number) -> Text:
    """Return the text of an operator for dtypes of kind ``only``, and of a ``lax`` function for others."""

    def text(args: Sequence[str], params: Mapping[str, Any], dtype: Any) -> str | None:
        if params:
            return None
        if jax.dtypes.issubdtype(dtype, only):
            return f" {symbol} ".join(map(atom, args))
        return f"lax.{function}({', '.join(args)})"

    return text


def _in_total_order(name: str) -> Text:
    """Return the text of a comparison that ``lax`` has as a primitive only: a number has to be an array of the other operand's dtype."""

    def text(args: Sequence[str], params: Mapping[str, Any], dtype: Any) -> str | None:
        return None if any(map(_is_number, args)) else f"lax.{name}_p.bind(*jnp.broadcast_arrays({', '.join(args)}))"

    return text


def _select(args: Sequence[str], params: Mapping[str, Any], dtype: Any) -> str | None:
    return f"jnp.where({args[0]}, {args[2]}, {args[1]})" if len(args) == 3 else None


def _convert(args: Sequence[str], params: Mapping[str, Any], dtype: Any) -> str:
    return f"lax.convert_element_type({args[0]}, {dtype_text(dtype)})"


def _bitcast(args: Sequence[str], params: Mapping[str, Any], dtype: Any) -> str:
    return f"lax.bitcast_convert_type({args[0]}, {dtype_text(dtype)})"


def _round(args: Sequence[str], params: Mapping[str, Any], dtype: Any) -> str:
    return f"lax.round({args[0]}, lax.RoundingMethod.{lax.RoundingMethod(params['rounding_method']).name})"


def _conj(args: Sequence[str], params: Mapping[str, Any], dtype: Any) -> str | None:
    return f"lax.conj({args[0]})" if jax.dtypes.issubdtype(params["input_dtype"], np.complexfloating) else None


def _polygamma(args: Sequence[str], params: Mapping[str, Any], dtype: Any) -> str:
    return f"lax.polygamma({', '.join(args)})"


def camel(name: str) -> str:
    """Return the constructor of an operation: its name in camel case."""
    return "".join(part.capitalize() for part in name.split("_"))


def _row(name: str, text: Text = "lax", constructor: str | None = None, **defaults: Any) -> MapOp:
    arity = 2 if name in _BINARY else 3 if name in _TERNARY else 1
    if text == "lax":
        text = f"lax.{name}(" + ", ".join(f"{{{k}}}" for k in range(arity)) + ")"
    return MapOp(name, text, getattr(primitives, f"{name}_p"), constructor or camel(name), defaults, arity)


_MEANINGLESS = frozenset({"sharding", "out_sharding", "weak_type"})
_BINARY = frozenset({"add", "sub", "mul", "div", "max", "min", "eq", "ne", "lt", "le", "gt", "ge", "lt_to", "le_to", "and", "or",
                     "xor", "pow", "rem", "atan2", "nextafter", "igamma", "igammac", "igamma_grad_a", "polygamma", "shift_left",
                     "shift_right_logical", "shift_right_arithmetic", "complex", "zeta"})  # fmt: skip
_TERNARY = frozenset({"select_n", "clamp", "regularized_incomplete_beta"})
_ACCURATE = {"accuracy": None}

_ROWS = [
    # arithmetic
    _row("add", _infix("+", "add")),
    _row("sub", _infix("-", "sub")),
    _row("mul", _infix("*", "mul"), out_dtype=None),
    _row("div", _infix("/", "div", np.inexact)),
    _row("rem"),
    _row("neg", "-{0}"),
    _row("abs", "jnp.abs({0})"),
    _row("sign"),
    _row("square", "jnp.square({0})"),
    _row("integer_pow", "{0} ** {y}"),
    _row("max", "jnp.maximum({0}, {1})"),
    _row("min", "jnp.minimum({0}, {1})"),
    _row("clamp", "jnp.minimum(jnp.maximum({1}, {0}), {2})"),
    _row("floor", "jnp.floor({0})"),
    _row("ceil", "jnp.ceil({0})"),
    _row("round", _round),
    _row("nextafter"),
    # comparison and choice
    _row("eq", "{0} == {1}"),
    _row("ne", "{0} != {1}"),
    _row("lt", "{0} < {1}"),
    _row("le", "{0} <= {1}"),
    _row("gt", "{0} > {1}"),
    _row("ge", "{0} >= {1}"),
    _row("lt_to", _in_total_order("lt_to")),
    _row("le_to", _in_total_order("le_to")),
    _row("is_finite"),
    _row("select_n", _select, constructor="Select"),
    # bits
    _row("and", "{0} & {1}"),
    _row("or", "{0} | {1}"),
    _row("xor", "{0} ^ {1}"),
    _row("not", "~{0}"),
    _row("shift_left"),
    _row("shift_right_logical"),
    _row("shift_right_arithmetic"),
    _row("population_count"),
    _row("clz"),
    # types
    _row("convert_element_type", _convert, constructor="Convert", weak_type=False, sharding=None),
    _row("bitcast_convert_type", _bitcast, constructor="Bitcast"),
    _row("reduce_precision", "lax.reduce_precision({0}, {exponent_bits}, {mantissa_bits})"),
    _row("real"),
    _row("imag"),
    _row("conj", _conj),
    _row("complex"),
    # powers, exponentials, logarithms
    _row("pow"),
    _row("sqrt", "jnp.sqrt({0})", **_ACCURATE),
    _row("rsqrt", **_ACCURATE),
    _row("cbrt", **_ACCURATE),
    _row("exp", "jnp.exp({0})", **_ACCURATE),
    _row("exp2", **_ACCURATE),
    _row("expm1", "jnp.expm1({0})", **_ACCURATE),
    _row("log", "jnp.log({0})", **_ACCURATE),
    _row("log1p", "jnp.log1p({0})", **_ACCURATE),
    _row("logistic", **_ACCURATE),
    # trigonometry
    _row("sin", "jnp.sin({0})", **_ACCURATE),
    _row("cos", "jnp.cos({0})", **_ACCURATE),
    _row("tan", "jnp.tan({0})", **_ACCURATE),
    _row("asin"),
    _row("acos"),
    _row("atan"),
    _row("atan2"),
    _row("sinh"),
    _row("cosh"),
    _row("tanh", "jnp.tanh({0})", **_ACCURATE),
    _row("asinh"),
    _row("acosh"),
    _row("atanh"),
    # special functions
    _row("erf"),
    _row("erfc"),
    _row("erf_inv"),
    _row("lgamma"),
    _row("digamma"),
    _row("polygamma", _polygamma),
    _row("zeta"),
    _row("igamma"),
    _row("igammac"),
    _row("igamma_grad_a"),
    _row("regularized_incomplete_beta", "lax.betainc({0}, {1}, {2})", constructor="BetaInc"),
    _row("bessel_i0e", None),
    _row("bessel_i1e"),
]

MAPS: dict[str, MapOp] = {row.name: row for row in _ROWS}

ALIASES = {"add_any": "add"}
"""Primitives with the same meaning as a row of :data:`MAPS`, and the name of that row."""

IDENTITIES = frozenset({"copy", "copy_p", "name", "pvary", "stop_gradient"})
"""Primitives whose value is their operand."""
