"""Blocks of linear algebra, convolutions, windowed reductions and Fourier transforms."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from jax import lax

from eqsat_mem.ir.ops.blocks import BlockOp, Group, Params, Pointwise, Selection, Shape, Shapes, Text, Window, Windowed
from eqsat_mem.ir.ops.source_text import params_text


def _leading(bound: int) -> Pointwise:
    """Return the groups of a block that is pointwise in all leading axes, which all operands and results share.

    ``bound`` is the number of trailing axes of operand 0 that are not pointwise.
    """

    def pointwise(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
        batch = len(ins[0]) - bound
        return [tuple([("in", k, a) for k in range(len(ins))] + [("out", k, a) for k in range(len(outs))]) for a in range(batch)]

    return pointwise


def _linalg(name: str) -> Text:
    """Return the text of a primitive as a call of the ``lax.linalg`` function of its name, without arguments equal to their defaults."""
    defaults = {k: p.default for k, p in inspect.signature(getattr(lax.linalg, name)).parameters.items()}

    def text(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
        keywords = params_text({k: v for k, v in params.items() if k not in defaults or v != defaults[k]})
        return None if keywords is None or not set(params) <= set(defaults) else f"lax.linalg.{name}({', '.join(args)}{keywords})"

    return text


def _cholesky_text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    """Return source with zeros above the diagonal, where the primitive may leave its operand's elements; JAX always adds the zeros."""
    return f"lax.linalg.cholesky({args[0]}, symmetrize_input=False)"


def _eigh_text(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    renamed = {"implementation" if k == "algorithm" else k: v for k, v in params.items()}
    keywords = params_text({k: v for k, v in renamed.items() if v is not None})
    return None if keywords is None else f"lax.linalg.eigh({args[0]}{keywords}, symmetrize_input=False)"


def _triangular_solve(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return the groups: batch axes, and the independent right-hand sides, columns of ``b`` if the matrix is on the left, else rows."""
    rank = len(ins[1])
    column = rank - 1 if params["left_side"] else rank - 2
    groups: list[Group] = [(("in", 0, a), ("in", 1, a), ("out", 0, a)) for a in range(rank - 2)]
    return [*groups, (("in", 1, column), ("out", 0, column))]


def _tridiagonal_solve(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    rank = len(ins[3])
    batch: list[Group] = [tuple([("in", k, a) for k in range(4)] + [("out", 0, a)]) for a in range(rank - 2)]
    return [*batch, (("in", 3, rank - 1), ("out", 0, rank - 1))]


def _conv(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    lhs, rhs, out = params["dimension_numbers"]
    return [(("in", 0, lhs[0]), ("out", 0, out[0])), (("in", 1, rhs[0]), ("out", 0, out[1]))]


def _conv_features(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return the group of the features that every element of the result sums; in the gradient of a kernel they are those of the batch."""
    lhs, rhs, _ = params["dimension_numbers"]
    return [(("in", 0, lhs[1]), ("in", 1, rhs[1]))]


def _conv_parts(ins: Shapes, outs: Shapes, params: Params) -> list[tuple[int, Group]]:
    """Return the groups of features: those in, those of the kernel, and those out."""
    lhs, rhs, out = params["dimension_numbers"]
    count = params["feature_group_count"]
    return [(count, (("in", 0, lhs[1]), ("in", 1, rhs[0]), ("out", 0, out[1])))] if count > 1 else []


def feature_groups(ins: Shapes, params: Params) -> int:
    """Return the groups of the features of a convolution whose operands have these shapes, of which a chunk has fewer."""
    lhs, rhs, _ = params["dimension_numbers"]
    return ins[0][lhs[1]] // max(ins[1][rhs[1]], 1) if params["feature_group_count"] > 1 else 1


class BatchGroups(int):
    """Groups of features that are groups of the batch in the function that was traced, which XLA computes in another way."""


class _FeatureGroups(int):
    """Groups of features in a chunk: source names their number even where it is one, as it may be in some chunks only."""


def _conv_resize(params: Params, ins: Shapes, groups: Sequence[Group]) -> dict[str, Any]:
    in_groups = params["feature_group_count"] > 1
    return {**params, "feature_group_count": _FeatureGroups(feature_groups(ins, params))} if in_groups else dict(params)


def _conv_windows(ins: Shapes, outs: Shapes, params: Params) -> list[Window]:
    """Return the windows of each spatial axis, whose other axis is the longer one of the result's and the kernel's."""
    lhs, rhs, out = params["dimension_numbers"]
    found = []
    for n, (low, _) in enumerate(params["padding"]):
        axis, kernel, result = lhs[2 + n], rhs[2 + n], out[2 + n]
        stride, dilation, gap = params["window_strides"][n], params["rhs_dilation"][n], params["lhs_dilation"][n]
        if ins[1][kernel] <= outs[0][result]:
            span = (ins[1][kernel] - 1) * dilation + 1
            found.append(Window(n, axis, ("out", 0, result), stride, gap, low, span))
        else:
            span = (outs[0][result] - 1) * stride + 1
            found.append(Window(n, axis, ("in", 1, kernel), dilation, gap, low, span))
    return found


def _padded(params: Params, number: int, low: int, high: int, extent: int) -> dict[str, Any]:
    """Return the parameters with other padding of one spatial axis."""
    padding = tuple((low, high) if n == number else pair for n, pair in enumerate(params["padding"]))
    return {**params, "padding": padding}


def _reduction_windows(ins: Shapes, outs: Shapes, params: Params) -> list[Window]:
    """Return the windows of each axis along which they are no single elements."""
    names = ("window_dimensions", "window_strides", "window_dilation", "base_dilation", "padding")
    axes = enumerate(zip(*(params[name] for name in names)))
    alone = _untouched(params["window_dimensions"], params)
    return [
        Window(a, a, ("out", 0, a), stride, gap, low, (size - 1) * dilation + 1)
        for a, (size, stride, dilation, gap, (low, _)) in axes
        if a not in alone
    ]


def _selection_windows(ins: Shapes, outs: Shapes, params: Params) -> list[Window]:
    """Return the windows of one source each, of the axes along which windows lie side by side: those of its elements are a group."""
    rows = zip(params["window_dimensions"], params["window_strides"], params["padding"])
    apart = [(a, size) for a, (size, stride, padding) in enumerate(rows) if size == stride > 1 and tuple(padding) == (0, 0)]
    return [Window(a, a, ("out", 0, a), 1, size, size - 1, size) for a, size in apart]


def _conv_text(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    """Return source with dimension numbers as words.

    ``N`` is the batch axis, ``C`` features, ``I`` and ``O`` those of the kernel; each spatial axis has a character of its own.
    """
    spatial = len(ins[0]) - 2
    signs = "DHW"[3 - spatial :] if spatial <= 3 else "0123456789"[:spatial]
    heads = ("NC", "OI", "NC")
    layouts = []
    for spec, head in zip(params["dimension_numbers"], heads):
        place = dict(zip(spec, head + signs))
        layouts.append("".join(place[a] for a in range(spatial + 2)))
    rest = {k: v for k, v in params.items() if k not in ("window_strides", "padding", "dimension_numbers", "out_sharding")}
    given = {k: v for k, v in rest.items() if isinstance(v, _FeatureGroups) or v not in (None, 1, (1,) * spatial)}
    keywords = params_text(given)
    if spatial > 10 or params.get("out_sharding") is not None or keywords is None:
        return None
    padding = tuple((int(low), int(high)) for low, high in params["padding"])
    return (f"lax.conv_general_dilated({args[0]}, {args[1]}, {tuple(map(int, params['window_strides']))}, {padding}, "
            f"dimension_numbers={tuple(layouts)}{keywords})")  # fmt: skip


def _fft(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    return [(("in", 0, a), ("out", 0, a)) for a in range(len(ins[0]) - len(params["fft_lengths"]))]


def _fft_text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    kind = getattr(params["fft_type"], "name", params["fft_type"])
    return f"lax.fft({args[0]}, {str(kind)!r}, {tuple(map(int, params['fft_lengths']))})"


def _untouched(window: Shape, params: Params) -> list[int]:
    """Return the axes along which the window is a single element and nothing is strided, padded or dilated."""
    ones = (1,) * len(window)
    strides = params.get("window_strides") or ones
    padding = params.get("padding") or ((0, 0),) * len(window)
    base, dilation = params.get("base_dilation") or ones, params.get("window_dilation") or ones
    return [
        a
        for a, n in enumerate(window)
        if (n, strides[a], tuple(padding[a]), base[a], dilation[a]) == (1, 1, (0, 0), 1, 1)
    ]  # fmt: skip


def _window(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    rank = len(params["window_dimensions"])
    operands = [k for k, shape in enumerate(ins) if len(shape) == rank]
    return [
        tuple([("in", k, a) for k in operands] + [("out", k, a) for k in range(len(outs))])
        for a in _untouched(params["window_dimensions"], params)
    ]


def _reduce(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return a group for each axis that is not reduced; the second half of the operands are initial values."""
    operands = len(ins) // 2
    stay = [a for a in range(len(ins[0])) if a not in params["dimensions"]]
    return [
        tuple([("in", k, a) for k in range(operands)] + [("out", k, b) for k in range(len(outs))])
        for b, a in enumerate(stay)
    ]  # fmt: skip


def _reduced(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return a group for each axis that is reduced: all operands have it."""
    return [tuple(("in", k, int(a)) for k in range(len(ins) // 2)) for a in params["dimensions"]]


_CONVOLVED = Windowed(_conv_windows, _padded, "add")
_COMBINATION = Selection(lambda params, rank: params["dimensions"][0], lambda params: 1, None)


ALGEBRA = [
    BlockOp("cholesky", _leading(2), text=_cholesky_text),
    BlockOp("triangular_solve", _triangular_solve, text=_linalg("triangular_solve")),
    BlockOp("eigh", _leading(2), text=_eigh_text),
    BlockOp("svd", _leading(2)),
    *(
        BlockOp(name, _leading(2), text=_linalg(name))
        for name in ("lu", "qr", "householder_product", "ormqr", "eig", "schur", "hessenberg", "tridiagonal", "symmetric_product")
    ),
    BlockOp("lu_pivots_to_permutation", _leading(1), text=_linalg("lu_pivots_to_permutation")),
    BlockOp("tridiagonal_solve", _tridiagonal_solve, text=_linalg("tridiagonal_solve")),
    BlockOp(
        "conv_general_dilated",
        _conv,
        parts=_conv_parts,
        resize=_conv_resize,
        text=_conv_text,
        shared=_conv_features,
        monoid="add",
        windows=_CONVOLVED,
    ),
    BlockOp("fft", _fft, text=_fft_text),
    *(
        BlockOp(f"reduce_window_{name}", _window, windows=Windowed(_reduction_windows, _padded, monoid))
        for name, monoid in (("sum", "add"), ("max", "max"), ("min", "min"))
    ),
    *(BlockOp(name, _window) for name in ("reduce_window", "select_and_gather_add")),
    BlockOp(
        "select_and_scatter_add",
        _window,
        windows=Windowed(_selection_windows, lambda params, *padding: dict(params), "add", aligned=True, cuts=True),
    ),
    BlockOp("reduce", _reduce, selection=_COMBINATION, shared=_reduced),
]  # fmt: skip
