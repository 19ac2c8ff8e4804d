"""Elementwise operations: meaning, cost, JAX source, and name in rule files, one row each."""

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
    """An elementwise primitive.

    ``weight`` is the cost of one element in additions (measured with XLA:CPU, which computes some functions one element at a time).
    ``cheap`` operations are repeated by XLA in each consumer
    instead of kept. ``text`` is a template over operands ``{0}``, ``{1}`` and parameters, or a function of
    ``(args, params, dtype)``; ``None`` where the primitive has no readable source. ``defaults`` are the parameters
    that a term need not mention. ``library`` operations are part of XLA:CPU's kernel library, which computes them inside a fold.
    """

    name: str
    weight: float
    cheap: bool
    text: Text
    prim: Any
    constructor: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    library: bool = False
    arity: int = 1

    def bind(self, *args: Any, **params: Any) -> Any:
        """The operation on arrays of one shape."""
        return self.prim.bind(*args, **{**self.defaults, **params})


def map_params(op: str, params: Mapping[str, Any]) -> Params:
    """The parameters of a primitive that a ``Map`` term keeps: those that change its meaning."""
    row = MAPS[op]
    kept = {k: v for k, v in params.items() if not (k in row.defaults and row.defaults[k] == v) and k not in _MEANINGLESS}
    return tuple(sorted(kept.items()))


def map_text(op: str, params: Params | Mapping[str, Any], args: Sequence[str], dtype: Any) -> str | None:
    """JAX source for one elementwise operation, bitwise equal to its primitive; ``None`` where there is none.

    ``args`` are source expressions whose shapes broadcast; a Python number may stand for an operand as long as some
    other operand is an array of the dtype that it means. ``dtype`` is that of the result.
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
    """Whether the source of an operation takes arrays of one number of axes only, as functions of ``lax`` do."""
    row = MAPS.get(op)
    return row is None or row.text is None or _is_call(row, arity, dict(params), dtype)


def _is_call(row: MapOp, arity: int, given: Mapping[str, Any], dtype: Any) -> bool:
    """Whether a row's source is a call of a ``lax`` function, which converts no operand; operands may themselves begin with one."""
    return str(_render(row, ["x"] * arity, given, dtype)).startswith("lax.")


def _render(row: MapOp, args: Sequence[str], given: Mapping[str, Any], dtype: Any) -> str | None:
    """The row's source for these operands."""
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
    """Whether a source is a bare Python number, which functions of ``lax`` would take for one of the default dtype."""
    sign = ast.UnaryOp | ast.BinOp | ast.unaryop | ast.operator
    nodes = list(ast.walk(ast.parse(source, mode="eval").body))
    names = {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    plain = all(isinstance(n, ast.Constant | ast.Attribute | ast.Name | ast.expr_context | sign) for n in nodes)
    return plain and names <= {"jnp", "np", "inf", "nan"}


def atom(source: str) -> str:
    """``source``, in parentheses unless it binds tighter than any operator."""
    tight = ast.Call | ast.Subscript | ast.Attribute | ast.Constant
    return source if source.isidentifier() or isinstance(ast.parse(source, mode="eval").body, tight) else f"({source})"


def value_text(value: Any) -> str:
    """Source of a parameter: a number, a string, a dtype, an enumeration, or a tuple of them."""
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return dtype_text(value)
    if isinstance(value, np.generic):
        return value_text(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return "jnp.nan" if math.isnan(value) else "jnp.inf" if value > 0 else "-jnp.inf"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(value_text, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)


def dtype_text(dtype: Any) -> str:
    """Source of a dtype, for instance ``jnp.float32``."""
    name = np.dtype(dtype).name
    return "jnp.bool_" if name == "bool" else f"jnp.{name}"


def _infix(symbol: str, function: str, only: Any = np.number) -> Text:
    """An operator for dtypes of kind ``only``, a ``lax`` function for others."""

    def text(args: Sequence[str], params: Mapping[str, Any], dtype: Any) -> str | None:
        if params:
            return None
        if jax.dtypes.issubdtype(dtype, only):
            return f" {symbol} ".join(map(atom, args))
        return f"lax.{function}({', '.join(args)})"

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
    """The constructor of an operation: its name in capitals where that has underscores."""
    return "".join(part.capitalize() for part in name.split("_"))


def _row(name: str, weight: float, text: Text = "lax", cheap: bool | None = None, constructor: str | None = None, **defaults: Any) -> MapOp:
    arity = 2 if name in _BINARY else 3 if name in _TERNARY else 1
    if text == "lax":
        text = f"lax.{name}(" + ", ".join(f"{{{k}}}" for k in range(arity)) + ")"
    cheap = weight <= 1.5 if cheap is None else cheap
    return MapOp(
        name, weight, cheap, text, getattr(primitives, f"{name}_p"), constructor or camel(name), defaults, name in _IN_LIBRARY, arity
    )


_MEANINGLESS = frozenset({"sharding", "out_sharding", "weak_type"})
_BINARY = frozenset({"add", "sub", "mul", "div", "max", "min", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "polygamma",
                     "pow", "rem", "atan2", "nextafter", "igamma", "igammac", "igamma_grad_a", "shift_left", "shift_right_logical",
                     "shift_right_arithmetic", "complex", "zeta"})  # fmt: skip
_TERNARY = frozenset({"select_n", "clamp", "regularized_incomplete_beta"})
_LIBRARY = {"accuracy": None}
_IN_LIBRARY = frozenset({"neg", "abs", "sign", "square", "floor", "ceil", "round", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log1p",
                         "logistic", "tanh", "erf", "integer_pow", "add", "sub", "mul", "div", "max", "min", "pow"})  # fmt: skip

_ROWS = [
    # arithmetic
    _row("add", 1, _infix("+", "add")),
    _row("sub", 1, _infix("-", "sub")),
    _row("mul", 1, _infix("*", "mul"), out_dtype=None),
    _row("div", 7.5, _infix("/", "div", np.inexact)),
    _row("rem", 600),
    _row("neg", 1, "-{0}"),
    _row("abs", 1, "jnp.abs({0})"),
    _row("sign", 1.5),
    _row("square", 1, "jnp.square({0})"),
    _row("integer_pow", 2, "{0} ** {y}", cheap=True),
    _row("max", 1, "jnp.maximum({0}, {1})"),
    _row("min", 1, "jnp.minimum({0}, {1})"),
    _row("clamp", 1.5, "jnp.minimum(jnp.maximum({1}, {0}), {2})"),
    _row("floor", 1, "jnp.floor({0})"),
    _row("ceil", 1, "jnp.ceil({0})"),
    _row("round", 1.5, _round),
    _row("nextafter", 4),
    # comparison and choice
    _row("eq", 1, "{0} == {1}"),
    _row("ne", 1, "{0} != {1}"),
    _row("lt", 1, "{0} < {1}"),
    _row("le", 1, "{0} <= {1}"),
    _row("gt", 1, "{0} > {1}"),
    _row("ge", 1, "{0} >= {1}"),
    _row("is_finite", 1),
    _row("select_n", 1, _select, constructor="Select"),
    # bits
    _row("and", 1, "{0} & {1}"),
    _row("or", 1, "{0} | {1}"),
    _row("xor", 1, "{0} ^ {1}"),
    _row("not", 1, "~{0}"),
    _row("shift_left", 1),
    _row("shift_right_logical", 1),
    _row("shift_right_arithmetic", 1),
    _row("population_count", 2, cheap=True),
    _row("clz", 2),
    # types
    _row("convert_element_type", 1, _convert, constructor="Convert", weak_type=False, sharding=None),
    _row("bitcast_convert_type", 1, _bitcast, constructor="Bitcast"),
    _row("reduce_precision", 1, "lax.reduce_precision({0}, {exponent_bits}, {mantissa_bits})"),
    _row("real", 0.5),
    _row("imag", 0.5),
    _row("conj", 0.5, _conj),
    _row("complex", 1),
    # powers, exponentials, logarithms
    _row("pow", 195),
    _row("sqrt", 12, "jnp.sqrt({0})", **_LIBRARY),
    _row("rsqrt", 15, **_LIBRARY),
    _row("cbrt", 525, **_LIBRARY),
    _row("exp", 21, "jnp.exp({0})", **_LIBRARY),
    _row("exp2", 21, **_LIBRARY),
    _row("expm1", 37.5, "jnp.expm1({0})", **_LIBRARY),
    _row("log", 33, "jnp.log({0})", **_LIBRARY),
    _row("log1p", 63, "jnp.log1p({0})", **_LIBRARY),
    _row("logistic", 30, **_LIBRARY),
    # trigonometry
    _row("sin", 600, "jnp.sin({0})", **_LIBRARY),
    _row("cos", 300, "jnp.cos({0})", **_LIBRARY),
    _row("tan", 375, "jnp.tan({0})", **_LIBRARY),
    _row("asin", 450),
    _row("acos", 750),
    _row("atan", 420),
    _row("atan2", 675),
    _row("sinh", 67.5),
    _row("cosh", 30),
    _row("tanh", 24, "jnp.tanh({0})", **_LIBRARY),
    _row("asinh", 90),
    _row("acosh", 90),
    _row("atanh", 90),
    # special functions
    _row("erf", 22.5),
    _row("erfc", 42),
    _row("erf_inv", 120),
    _row("lgamma", 390),
    _row("digamma", 390),
    _row("polygamma", 300, _polygamma),
    _row("zeta", 225),
    _row("igamma", 450),
    _row("igammac", 450),
    _row("igamma_grad_a", 600),
    _row("regularized_incomplete_beta", 450, "lax.betainc({0}, {1}, {2})", constructor="BetaInc"),
    _row("bessel_i0e", 45, None),
    _row("bessel_i1e", 45),
]

MAPS: dict[str, MapOp] = {row.name: row for row in _ROWS}

ALIASES = {"add_any": "add"}
"""Primitives that mean the same as a row of :data:`MAPS`."""

IDENTITIES = frozenset({"copy", "copy_p", "name", "pvary", "stop_gradient"})
"""Primitives whose value is their operand."""
