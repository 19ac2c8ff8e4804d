"""Blocks of linear algebra, convolutions, windows and transforms."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

from jax import lax

from eqsat_mem.ir.ops.blocks import BlockOp, Group, Params, Pointwise, Selection, Shape, Shapes, Text, Weight, unchanged
from eqsat_mem.ir.ops.control import body_weight
from eqsat_mem.ir.ops.lapack import workspace
from eqsat_mem.ir.ops.source_text import params_text


def _leading(bound: int) -> Pointwise:
    """Pointwise in every axis of operand 0 before the last ``bound``, which stands in the same place everywhere."""

    def pointwise(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
        batch = len(ins[0]) - bound
        return [tuple([("in", k, a) for k in range(len(ins))] + [("out", k, a) for k in range(len(outs))]) for a in range(batch)]

    return pointwise


def _cubic(factor: float) -> Weight:
    """``factor`` m n min(m, n) operations per matrix."""

    def weight(ins: Shapes, outs: Shapes, params: Params) -> float:
        *batch, m, n = ins[0]
        return factor * math.prod(batch) * m * n * min(m, n)

    return weight


def _workspace(routine: str, *vectors: str) -> Weight:
    """What LAPACK's routine allocates for a matrix; the parameters named tell which sets of vectors are wanted."""

    def scratch(ins: Shapes, outs: Shapes, params: Params) -> float:
        return workspace(routine, min(ins[0][-2:]), sum(params[name] for name in vectors))

    return scratch


SQUARED, LINEAR = 100.0, 1000.0
"""What LAPACK adds to the cubic cost of a factorisation: small matrices take much longer than their operations."""
SOLVED, SUBSTITUTED, STARTED = 60.0, 0.65, 50.0
"""A triangular solve costs so many additions for each element of its matrix, for each of its products, and for each element of the right
side. Calibrated on matrices of 4 to 1000 rows."""


def _cholesky_weight(ins: Shapes, outs: Shapes, params: Params) -> float:
    """Calibrated on matrices of 4 to 2048 rows."""
    *batch, n, _ = ins[0]
    return math.prod(batch) * n * (0.7 * n * n + SQUARED * n + LINEAR)


def _linalg(name: str) -> Text:
    """The function of ``lax.linalg`` that passes its arguments on, less what are its defaults."""
    defaults = {k: p.default for k, p in inspect.signature(getattr(lax.linalg, name)).parameters.items()}

    def text(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
        keywords = params_text({k: v for k, v in params.items() if k not in defaults or v != defaults[k]})
        return None if keywords is None or not set(params) <= set(defaults) else f"lax.linalg.{name}({', '.join(args)}{keywords})"

    return text


def _cholesky_text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    """Zeros above the diagonal, where the primitive may leave what it found there; JAX itself binds it so only."""
    return f"lax.linalg.cholesky({args[0]}, symmetrize_input=False)"


def _eigh_text(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    renamed = {"implementation" if k == "algorithm" else k: v for k, v in params.items()}
    keywords = params_text({k: v for k, v in renamed.items() if v is not None})
    return None if keywords is None else f"lax.linalg.eigh({args[0]}{keywords}, symmetrize_input=False)"


def _triangular_solve(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Right-hand sides are independent: columns of ``b`` if the matrix stands on the left, else rows."""
    rank = len(ins[1])
    column = rank - 1 if params["left_side"] else rank - 2
    groups: list[Group] = [(("in", 0, a), ("in", 1, a), ("out", 0, a)) for a in range(rank - 2)]
    return [*groups, (("in", 1, column), ("out", 0, column))]


def _solve_in_order(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    """``A^-1 B`` as the transpose of ``B^T A^-T``, and ``B A^-1`` as that of ``A^-T B^T``.

    LAPACK stores columns, so it takes an array of the rows of ``B`` for ``B^T``. Asked for ``B``, XLA:CPU writes it with a stride, element
    by element. It would read the result so too, were that not a matrix of rows behind a barrier: transposes move through elementwise
    operations to contractions, which take them in, and then want columns in rows.
    """
    text = _linalg("triangular_solve")
    flipped = {**params, "left_side": not params["left_side"], "transpose_a": not params["transpose_a"]}
    solved = text(flipped, [args[0], f"jnp.swapaxes({args[1]}, -1, -2)"], ins)
    return f"lax.optimization_barrier(jnp.swapaxes({solved}, -1, -2))"


def _triangular_solve_weight(ins: Shapes, outs: Shapes, params: Params) -> float:
    return (SUBSTITUTED * ins[0][-1] + STARTED) * math.prod(ins[1]) + SOLVED * math.prod(ins[0])


def _tridiagonal_solve(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    rank = len(ins[3])
    batch: list[Group] = [tuple([("in", k, a) for k in range(4)] + [("out", 0, a)]) for a in range(rank - 2)]
    return [*batch, (("in", 3, rank - 1), ("out", 0, rank - 1))]


def _conv(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    lhs, rhs, out = params["dimension_numbers"]
    groups: list[Group] = []
    if params["batch_group_count"] == 1:
        groups.append((("in", 0, lhs[0]), ("out", 0, out[0])))
        if params["feature_group_count"] == 1:
            groups.append((("in", 1, rhs[0]), ("out", 0, out[1])))
    return groups


MULTIPLIED, LAID_OUT, SCATTERED, TOGETHER = 0.8, 12.0, 50.0, 16
"""A convolution contracts patches that its library lays out side by side first, for however few features: the costs of a product, and of
an element of a patch, which is dearer where fewer features than the last figure stand together."""


def _conv_weight(ins: Shapes, outs: Shapes, params: Params) -> float:
    """Calibrated on one and two dimensions, 1 to 64 features in and 1 to 256 out."""
    data, kernel, result = params["dimension_numbers"]
    places = math.prod(outs[0]) / max(outs[0][result[1]], 1)
    patch = ins[0][data[1]] * math.prod(ins[1][a] for a in kernel[2:])
    products = math.prod(outs[0]) * math.prod(n for a, n in enumerate(ins[1]) if a != kernel[0])
    return MULTIPLIED * products + places * patch * (LAID_OUT if ins[0][data[1]] >= TOGETHER else SCATTERED)


def _conv_text(params: Params, args: Sequence[str], ins: Shapes) -> str | None:
    """Dimension numbers as words: ``N`` batch, ``C`` features, ``I`` and ``O`` those of the kernel, one sign for each spatial axis."""
    spatial = len(ins[0]) - 2
    signs = "DHW"[3 - spatial :] if spatial <= 3 else "0123456789"[:spatial]
    heads = ("NC", "OI", "NC")
    layouts = []
    for spec, head in zip(params["dimension_numbers"], heads):
        place = dict(zip(spec, head + signs))
        layouts.append("".join(place[a] for a in range(spatial + 2)))
    rest = {k: v for k, v in params.items() if k not in ("window_strides", "padding", "dimension_numbers", "out_sharding")}
    given = {k: v for k, v in rest.items() if v not in (None, 1, (1,) * spatial)}
    keywords = params_text(given)
    if spatial > 10 or params.get("out_sharding") is not None or keywords is None:
        return None
    padding = tuple((int(low), int(high)) for low, high in params["padding"])
    return (f"lax.conv_general_dilated({args[0]}, {args[1]}, {tuple(map(int, params['window_strides']))}, {padding}, "
            f"dimension_numbers={tuple(layouts)}{keywords})")  # fmt: skip


def _fft(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    return [(("in", 0, a), ("out", 0, a)) for a in range(len(ins[0]) - len(params["fft_lengths"]))]


def _fft_weight(ins: Shapes, outs: Shapes, params: Params) -> float:
    size = max(math.prod(ins[0]), math.prod(outs[0]))
    return 5.0 * size * math.log2(max(2, math.prod(params["fft_lengths"])))


def _fft_text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    kind = getattr(params["fft_type"], "name", params["fft_type"])
    return f"lax.fft({args[0]}, {str(kind)!r}, {tuple(map(int, params['fft_lengths']))})"


def _untouched(window: Shape, params: Params) -> list[int]:
    """The axes along which a window is a single element."""
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


def _window_weight(ins: Shapes, outs: Shapes, params: Params) -> float:
    return float(math.prod(params["window_dimensions"]) * max(math.prod(outs[0]), math.prod(ins[0])))


def _reduce(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """The first half of the operands are reduced, the second half are initial values."""
    operands = len(ins) // 2
    stay = [a for a in range(len(ins[0])) if a not in params["dimensions"]]
    return [
        tuple([("in", k, a) for k in range(operands)] + [("out", k, b) for k in range(len(outs))])
        for b, a in enumerate(stay)
    ]  # fmt: skip


STEP, COMBINED = 20.0, 4.0
"""What XLA:CPU takes to combine one more element, in additions (measured), and how much longer than an elementwise operation."""


def _reduce_weight(ins: Shapes, outs: Shapes, params: Params) -> float:
    """One element at a time."""
    return math.prod(ins[0]) * (STEP + COMBINED * body_weight(params["jaxpr"]))


_COMBINATION = Selection(lambda params, rank: params["dimensions"][0], lambda params: 1, None)


ALGEBRA = [
    BlockOp("cholesky", _leading(2), unchanged, _cholesky_weight, _cholesky_text),
    BlockOp(
        "triangular_solve",
        _triangular_solve,
        unchanged,
        _triangular_solve_weight,
        _linalg("triangular_solve"),
        _solve_in_order,
        columns=True,
    ),
    BlockOp("lu", _leading(2), unchanged, _cubic(0.67), _linalg("lu")),
    BlockOp("qr", _leading(2), unchanged, _cubic(2), _linalg("qr")),
    BlockOp("householder_product", _leading(2), unchanged, _cubic(2), _linalg("householder_product")),
    BlockOp("eigh", _leading(2), unchanged, _cubic(10), _eigh_text, scratch=_workspace("syevd")),
    BlockOp("eig", _leading(2), unchanged, _cubic(25), _linalg("eig"),
            scratch=_workspace("geev", "compute_left_eigenvectors", "compute_right_eigenvectors")),
    BlockOp("svd", _leading(2), unchanged, _cubic(20), scratch=_workspace("gesdd", "compute_uv")),
    BlockOp("schur", _leading(2), unchanged, _cubic(25), _linalg("schur")),
    BlockOp("hessenberg", _leading(2), unchanged, _cubic(4), _linalg("hessenberg")),
    BlockOp("tridiagonal", _leading(2), unchanged, _cubic(2), _linalg("tridiagonal")),
    BlockOp("tridiagonal_solve", _tridiagonal_solve, unchanged, lambda i, o, p: 10.0 * math.prod(o[0]),
            _linalg("tridiagonal_solve")),
    BlockOp("conv_general_dilated", _conv, unchanged, _conv_weight, _conv_text),
    BlockOp("fft", _fft, unchanged, _fft_weight, _fft_text),
    *(
        BlockOp(name, _window, unchanged, _window_weight)
        for name in ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add",
                     "select_and_scatter_add")
    ),
    BlockOp("reduce", _reduce, unchanged, _reduce_weight, fuses=True, selection=_COMBINATION),
]  # fmt: skip
