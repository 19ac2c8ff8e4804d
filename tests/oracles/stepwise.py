"""Jaxprs run equation by equation, mostly in numpy: many small programs of different shapes, and nothing to compile."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from eqsat_mem.ir.jaxprs import consts_and_carries
from tests.oracles import windows

Array = Any
Root = Callable[[Array], Array]


def run(closed: ClosedJaxpr, args: Sequence[Array], norm: Root = np.sqrt) -> list[Array]:
    """The results of a jaxpr; loops are loops of Python, and primitives that numpy has not are bound one by one.

    Args:
        closed: the jaxpr.
        args: its arguments.
        norm: the function that computes the roots of sums of squares in float32 and float64.
    """
    with np.errstate(all="ignore"):
        return _run(closed.jaxpr, closed.consts, [*map(_plain, args)], norm)


def _run(jaxpr: Any, consts: Sequence[Array], args: Sequence[Array], norm: Root) -> list[Array]:
    values: dict[Any, Array] = {}
    norms = () if norm is np.sqrt else [*map(id, _norms(jaxpr))]

    def read(v: Any) -> Array:
        return np.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else values[v]

    values.update(zip(jaxpr.constvars, map(_plain, consts)))
    values.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        results = [norm(*operands)] if id(eqn) in norms else _equation(eqn, operands, norm)
        for v, result in zip(eqn.outvars, results, strict=True):
            assert np.shape(result) == v.aval.shape, f"{eqn.primitive.name} gave {np.shape(result)}, not {v.aval}"
            values[v] = result if _is_key(v.aval.dtype) else np.asarray(result).astype(v.aval.dtype, copy=False)
    return [read(v) for v in jaxpr.outvars]


def _norms(jaxpr: Any) -> Iterator[Any]:
    """The equations that take roots of sums of squares in float32 and float64."""
    producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def made_by(v: Any, name: str) -> Any:
        eqn = None if isinstance(v, Literal) else producer.get(v)
        return eqn if eqn is not None and eqn.primitive.name == name else None

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sqrt" and eqn.outvars[0].aval.dtype in (np.float32, np.float64):
            added = made_by(eqn.invars[0], "reduce_sum")
            if added is not None and any(_is_square(made_by(added.invars[0], name)) for name in ("mul", "square", "integer_pow")):
                yield eqn


def _is_square(eqn: Any) -> bool:
    return eqn is not None and (eqn.invars[0] is eqn.invars[-1] if eqn.primitive.name == "mul" else eqn.params.get("y", 2) == 2)


def _plain(value: Array) -> Array:
    return value if _is_key(getattr(value, "dtype", None)) else np.asarray(value)


def _is_key(dtype: Any) -> bool:
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def _equation(eqn: Any, args: list[Array], norm: Root) -> list[Array]:
    name, params = eqn.primitive.name, eqn.params
    inner = params.get("jaxpr") or params.get("call_jaxpr")
    if name in CONTROL:
        return CONTROL[name](params, args, norm)
    if name in (
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "remat2",
        "checkpoint",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
    ):
        return _run(inner.jaxpr, inner.consts, args, norm) if isinstance(inner, ClosedJaxpr) else _run(inner, (), args, norm)
    floating = all(jnp.issubdtype(a.dtype, jnp.inexact) for a in args if not _is_key(a.dtype))  # bfloat16 is no floating dtype of numpy
    keys = any(_is_key(a.dtype) for a in args)  # which are none of numpy's
    if not keys and (name in EXACT or (name in SIMPLE and floating and all(a.size for a in args))):
        result = SIMPLE[name](params, *args)
        if result is not NotImplemented:
            return result if eqn.primitive.multiple_results else [result]
    results = eqn.primitive.bind(*map(jnp.asarray, args), **eqn.primitive.get_bind_params(params))
    return [_plain(r) for r in (results if eqn.primitive.multiple_results else [results])]


def _scan(params: Any, args: list[Array], norm: Root) -> list[Array]:
    body, (consts, carries) = params["jaxpr"], consts_and_carries(params)
    fixed, carry, xs = args[:consts], args[consts : consts + carries], args[consts + carries :]
    order = range(params["length"])
    stacked: list[list[Array]] = []
    for k in reversed(order) if params["reverse"] else order:
        results = _run(body.jaxpr, body.consts, [*fixed, *carry, *(x[k] for x in xs)], norm)
        carry, rows = results[:carries], results[carries:]
        stacked.append(rows)
    if params["reverse"]:
        stacked.reverse()
    avals = [v.aval for v in body.jaxpr.outvars[carries:]]
    ys = [np.stack([rows[k] for rows in stacked]) if stacked else np.zeros((0, *aval.shape), aval.dtype) for k, aval in enumerate(avals)]
    return [*carry, *ys]


def _while(params: Any, args: list[Array], norm: Root) -> list[Array]:
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond_consts, body_consts, carry = args[: split[0]], args[split[0] : split[1]], args[split[1] :]
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    while np.any(going := _run(cond.jaxpr, cond.consts, [*cond_consts, *carry], norm)[0]):
        new = _run(body.jaxpr, body.consts, [*body_consts, *carry], norm)
        carry = [
            np.where(going.reshape(going.shape + (1,) * (n.ndim - going.ndim)), n, old) for n, old in zip(new, carry)
        ]  # batched: some go on
    return carry


def _cond(params: Any, args: list[Array], norm: Root) -> list[Array]:
    branches = params["branches"]
    branch = branches[min(max(int(args[0]), 0), len(branches) - 1)]
    return _run(branch.jaxpr, branch.consts, args[1:], norm)


CONTROL: dict[str, Callable[..., list[Array]]] = {"scan": _scan, "while": _while, "cond": _cond}


def _broadcast(params: Any, x: Array) -> Array:
    shape = params["shape"]
    here = [1] * len(shape)
    for axis, n in zip(params["broadcast_dimensions"], x.shape):
        here[axis] = n
    return np.broadcast_to(x.reshape(here), shape)


def _reshape(params: Any, x: Array) -> Array:
    order = params["dimensions"]
    return (x if order is None else x.transpose(order)).reshape(params["new_sizes"])


def _dot(params: Any, x: Array, y: Array) -> Array:
    (left, right), (batch_left, batch_right) = params["dimension_numbers"]
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    xs, ys = [next(letters) for _ in x.shape], [next(letters) for _ in y.shape]
    for a, b in [*zip(left, right), *zip(batch_left, batch_right)]:
        ys[b] = xs[a]
    batch = [xs[a] for a in batch_left]
    out = [
        *batch,
        *(c for a, c in enumerate(xs) if a not in {*left, *batch_left}),
        *(c for b, c in enumerate(ys) if b not in {*right, *batch_right}),
    ]
    wide = params["preferred_element_type"] or np.result_type(x, y)
    wide = np.float32 if np.dtype(wide).itemsize == 2 else wide
    return np.einsum(f"{''.join(xs)},{''.join(ys)}->{''.join(out)}", x.astype(wide), y.astype(wide))


def _dynamic_slice(params: Any, x: Array, *starts: Array) -> Array:
    where = _window(x.shape, params["slice_sizes"], starts)
    return x[where]


def _dynamic_update_slice(params: Any, x: Array, update: Array, *starts: Array) -> Array:
    out = np.array(x)
    out[_window(x.shape, update.shape, starts)] = update
    return out


def _window(shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Array]) -> tuple[slice, ...]:
    first = [min(max(int(s), 0), n - size) for s, n, size in zip(starts, shape, sizes)]
    return tuple(slice(s, s + size) for s, size in zip(first, sizes))


def _slice(params: Any, x: Array) -> Array:
    steps = params["strides"] or [1] * x.ndim
    return x[tuple(slice(a, b, s) for a, b, s in zip(params["start_indices"], params["limit_indices"], steps))]


def _iota(params: Any, *_: Array) -> Array:
    shape, axis = params["shape"], params["dimension"]
    return np.broadcast_to(
        np.arange(shape[axis]).astype(params["dtype"]).reshape([-1 if a == axis else 1 for a in range(len(shape))]), shape
    )


def _select(params: Any, which: Array, *cases: Array) -> Array:
    return np.where(which, cases[1], cases[0]) if len(cases) == 2 else cases[0]


def _reduce(function: Any) -> Callable[..., Array]:
    return lambda params, x: function(x, axis=params["axes"])


def _sum(params: Any, x: Array) -> Array:
    wide = np.float32 if x.dtype.itemsize == 2 and x.dtype.kind not in "iub" else x.dtype
    return np.sum(x, axis=params["axes"], dtype=wide)


def _convert(params: Any, x: Array) -> Array:
    new = np.dtype(params["new_dtype"]) if not _is_key(params["new_dtype"]) else None
    if new is None or (jnp.issubdtype(x.dtype, jnp.inexact) and not jnp.issubdtype(new, jnp.floating)) or x.dtype.kind == "c":
        return NotImplemented  # what is out of an integer's range is the device's affair
    return x.astype(new)


def _reduce_precision(params: Any, x: Array) -> Array:
    own, wanted = jnp.finfo(x.dtype), (params["exponent_bits"], params["mantissa_bits"])
    for dtype in (x.dtype, np.float32, np.float16, jnp.bfloat16):
        known = jnp.finfo(dtype)
        if (known.nexp, known.nmant) == wanted and known.nmant <= own.nmant:
            return x.astype(dtype).astype(x.dtype)
    return NotImplemented


def _split(params: Any, x: Array) -> list[Array]:
    return np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"])


def _arg(function: Any) -> Callable[..., Array]:
    def best(params: Any, x: Array) -> Array:
        return NotImplemented if np.isnan(x).any() else function(x, axis=params["axes"][0])

    return best


def _triangular_solve(params: Any, a: Array, b: Array) -> Array:
    if a.dtype.kind != "f" or params["conjugate_a"]:
        return NotImplemented
    a = np.tril(a) if params["lower"] else np.triu(a)
    if params["unit_diagonal"]:
        a = a - a * np.eye(a.shape[-1], dtype=a.dtype) + np.eye(a.shape[-1], dtype=a.dtype)
    left, turned = params["left_side"], params["transpose_a"] == params["left_side"]
    a, b = (np.swapaxes(a, -1, -2) if turned else a), (b if left else np.swapaxes(b, -1, -2))
    lower = params["lower"] != turned
    x = np.zeros_like(b)
    for k in range(a.shape[-1]) if lower else reversed(range(a.shape[-1])):
        rest = b[..., k, :] - np.einsum("...j,...jc->...c", a[..., k, :], x)
        x[..., k, :] = rest / a[..., k, k, None]
    return x if left else np.swapaxes(x, -1, -2)


def _cholesky(params: Any, x: Array) -> Array:
    try:
        return np.linalg.cholesky(x)
    except (np.linalg.LinAlgError, TypeError):  # NaN, and half precision
        return NotImplemented


def _bitcast(params: Any, x: Array) -> Array:
    new = np.dtype(params["new_dtype"])
    return x.view(new) if new.itemsize == x.dtype.itemsize else NotImplemented


def _rem(params: Any, x: Array, y: Array) -> Array:
    return np.fmod(x, y) if x.dtype.kind in "iu" and np.all(y) else NotImplemented


def _accumulate(function: Any) -> Callable[..., Array]:
    def accumulated(params: Any, x: Array) -> Array:
        turned = np.flip(x, params["axis"]) if params["reverse"] else x
        result = function.accumulate(turned, params["axis"])
        return np.flip(result, params["axis"]) if params["reverse"] else result

    return accumulated


def _round(params: Any, x: Array) -> Array:
    return np.rint(x) if params["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN else NotImplemented


def _plainly(function: Any) -> Callable[..., Array]:
    return lambda params, *args: function(*args)


EXACT: dict[str, Callable[..., Array]] = {
    "add": _plainly(np.add), "sub": _plainly(np.subtract), "mul": _plainly(np.multiply), "add_any": _plainly(np.add),
    "max": _plainly(np.maximum),
    "min": _plainly(np.minimum), "lt": _plainly(np.less), "le": _plainly(np.less_equal), "gt": _plainly(np.greater),
    "ge": _plainly(np.greater_equal),
    "eq": _plainly(np.equal), "ne": _plainly(np.not_equal), "broadcast_in_dim": _broadcast, "reshape": _reshape,
    "transpose": lambda params, x: np.transpose(x, params["permutation"]), "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
        "dynamic_slice": _dynamic_slice, "dynamic_update_slice": _dynamic_update_slice, "slice": _slice, "iota": _iota, "select_n": _select,
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]), "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "cumsum": _accumulate(np.add),
    "bitcast_convert_type": _bitcast, "rem": _rem, "cummax": _accumulate(np.maximum), "cummin": _accumulate(np.minimum),
    "pad": lambda params, x, value: windows.padded(x, value, params["padding_config"]), "gather": windows.gather,
    "scatter": windows.scatter(operator.setitem), "scatter-add": windows.scatter(np.add.at), "scatter-mul": windows.scatter(np.multiply.at),
    "scatter-max": windows.scatter(np.maximum.at), "scatter-min": windows.scatter(np.minimum.at),
    "convert_element_type": _convert, "split": _split, "stack": lambda params, *xs: np.stack(xs, params["axis"]),
    "and": _plainly(np.bitwise_and), "or": _plainly(np.bitwise_or), "not": _plainly(np.invert), "xor": _plainly(np.bitwise_xor),
    "reduce_or": _reduce(np.bitwise_or.reduce), "reduce_and": _reduce(np.bitwise_and.reduce),
    "optimization_barrier": lambda params, *xs: list(xs),
    "copy": _plainly(np.array), "stop_gradient": _plainly(np.array),
}  # fmt: skip
"""Primitives that numpy computes as JAX does, for numbers of every kind."""


SIMPLE: dict[str, Callable[..., Array]] = EXACT | {
    "div": _plainly(np.divide), "neg": _plainly(np.negative), "exp": _plainly(np.exp), "log": _plainly(np.log), "tanh": _plainly(np.tanh),
    "sqrt": _plainly(np.sqrt), "sin": _plainly(np.sin), "cos": _plainly(np.cos), "abs": _plainly(np.abs), "square": _plainly(np.square),
    "integer_pow": lambda params, x: x ** params["y"], "dot_general": _dot, "conv_general_dilated": windows.convolution,
    "reduce_sum": _sum, "reduce_prod": _reduce(np.prod),
    "triangular_solve": _triangular_solve, "cholesky": _cholesky, "cumprod": _accumulate(np.multiply),
    "round": _round, "reduce_precision": _reduce_precision, "is_finite": _plainly(np.isfinite), "real": _plainly(np.real),
    "argmax": _arg(np.argmax), "argmin": _arg(np.argmin), "log1p": _plainly(np.log1p), "expm1": _plainly(np.expm1),
    "sign": _plainly(np.sign), "floor": _plainly(np.floor), "ceil": _plainly(np.ceil),
    "logistic": lambda params, x: 1 / (1 + np.exp(-x)), "tan": _plainly(np.tan),
    "reduce_max": _reduce(np.max), "reduce_min": _reduce(np.min),
}  # fmt: skip
"""Primitives that numpy computes as JAX does for floating-point numbers, up to rounding."""
