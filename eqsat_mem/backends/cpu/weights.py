"""The cost of operations on XLA:CPU, in units of float32 additions, and the memory that they allocate.

Calibrated on a 2-core x86 server with jaxlib 0.10; scripts under ``benchmarks/calibration`` repeat the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

from eqsat_mem.backends.cpu.convolutions import copied_as_written, is_librarys
from eqsat_mem.backends.cpu.lapack import workspace
from eqsat_mem.backends.cpu.planes import held_elements, is_by_planes, one_plane
from eqsat_mem.backends.cpu.top_k import block_length
from eqsat_mem.ir import Map, Term
from eqsat_mem.ir.ops import BatchGroups, Shapes, feature_groups
from eqsat_mem.schedule.weights import (
    BLOCKS,
    ELEMENTWISE,
    RANDOM_DRAWS,
    SCATTERS,
    SLIDING,
    WORKSPACES,
    BlockWeight,
    Params,
    Weights,
    per_element,
    reduction,
    sorting,
)

# --- elementwise ---------------------------------------------------------------------------------------

MEASURED: Mapping[str, float] = {
    "div": 7.5, "rem": 600, "sign": 1.5, "integer_pow": 2, "clamp": 1.5, "round": 1.5, "nextafter": 4,
    "population_count": 2, "clz": 2, "lt_to": 4, "le_to": 6, "real": 0.5, "imag": 0.5, "conj": 0.5,
    "pow": 195, "sqrt": 12, "rsqrt": 15, "cbrt": 525, "exp": 21, "exp2": 21, "expm1": 37.5, "log": 33, "log1p": 63, "logistic": 30,
    "sin": 600, "cos": 300, "tan": 375, "asin": 450, "acos": 750, "atan": 420, "atan2": 675,
    "sinh": 67.5, "cosh": 30, "tanh": 24, "asinh": 90, "acosh": 90, "atanh": 90,
    "erf": 22.5, "erfc": 42, "erf_inv": 120, "lgamma": 390, "digamma": 390, "polygamma": 300, "zeta": 225,
    "igamma": 450, "igammac": 450, "igamma_grad_a": 600, "regularized_incomplete_beta": 450, "bessel_i0e": 45, "bessel_i1e": 45,
}  # fmt: skip
"""The cost per element in additions; some functions are not vectorised by XLA:CPU. Sweep: benchmarks/calibration/elementwise.py."""

POLYNOMIALS = frozenset({"exp", "exp2", "expm1", "logistic", "tanh", "erf", "erfc", "sinh", "cosh", "rsqrt", "sqrt"})
"""Functions that vectors compute, or instructions: on one core, with vectors of 512 bits and operands in its own cache, they take no longer
than the table says of all cores with those of 256. Others take twice as long. Measured: benchmarks/calibration/dealing.py."""

# --- linear algebra --------------------------------------------------------------------------------------

FACTORISED: Mapping[str, tuple[float, float, float]] = {
    "cholesky": (0.7, 100, 1000), "lu": (0.67, 130, 2000), "qr": (2, 650, 5000), "eigh": (5, 1500, 8000), "svd": (12, 3000, 14000),
}  # fmt: skip
"""The cost of LAPACK's factorisations in additions, per row: of an element of the matrix, of one of its longer side, and of the row. Small
matrices take much longer than their arithmetic. Measured on 3 to 2048 rows: benchmarks/calibration/linear_algebra.py."""
SOLVED, SUBSTITUTED, STARTED = 60.0, 0.65, 50.0
"""The cost of a triangular solve in additions: per element of its matrix, per product, and per element of the right-hand side.
Measured on matrices of 4 to 1000 rows: benchmarks/calibration/linear_algebra.py."""


def _factorisation(name: str) -> BlockWeight:
    """The function that gives the additions of a factorisation, from the coefficients in the table."""

    def weight(ins: Shapes, outs: Shapes, params: Params) -> float:
        (*batch, m, n), (of_element, of_side, of_row) = ins[0], FACTORISED[name]
        return math.prod(batch) * min(m, n) * (of_element * m * n + of_side * max(m, n) + of_row)

    return weight


def _triangular_solve(ins: Shapes, outs: Shapes, params: Params) -> float:
    return (SUBSTITUTED * ins[0][-1] + STARTED) * math.prod(ins[1]) + SOLVED * math.prod(ins[0])


def _lapack(routine: str, *vectors: str) -> BlockWeight:
    """Return the function that gives the elements that a LAPACK routine allocates for a matrix.

    Args:
        routine: the name of the routine without the letter of its dtype.
        vectors: the names of the parameters that say which sets of vectors are requested.
    """

    def scratch(ins: Shapes, outs: Shapes, params: Params) -> float:
        return workspace(routine, min(ins[0][-2:]), sum(params[name] for name in vectors))

    return scratch


MULTIPLIED, LAID_OUT, SCATTERED, TOGETHER = 0.8, 12.0, 50.0, 16
"""A convolution contracts patches that its library first copies next to each other. In additions: the cost of a product, and of
copying an element of a patch with at least as many input features as the last figure, and with fewer. Measured on one and two
dimensions, 1 to 64 features in and 1 to 256 out, windows as large as images included: benchmarks/calibration/convolution.py."""
PLACED, BEGUN = 2500.0, 140.0
"""The cost in additions of a place of the window, and of each of its positions, for Eigen, besides that of elements. The features of the
gradient of a kernel are examples: one at a time, all cost is that of positions. Measured: benchmarks/calibration/convolution.py."""
IN_SPACE, APART_IN_SPACE = 6.0, 500.0
"""The factor by which positions of windows along three axes cost more, and the cost in additions of an element of a patch along three axes
whose elements lie apart: benchmarks/calibration/convolution.py."""
PLANE, SIDE_BY_SIDE = 5e5, 4.0
"""The cost in additions of the convolution of one plane of a result along three axes, besides that of its elements, and of an element that
is copied for it: benchmarks/calibration/convolution.py."""


def _convolution(ins: Shapes, outs: Shapes, params: Params) -> float:
    data, kernel, result = params["dimension_numbers"]
    groups = feature_groups(ins, params)
    features, results, window = ins[0][data[1]] // groups, outs[0][result[1]], [ins[1][a] for a in kernel[2:]]
    in_space, apart = len(window) > 2, math.prod(params["lhs_dilation"])
    met = 1 if in_space else apart
    places, taps = groups * math.prod(outs[0]) / max(results, 1), math.prod(window) / met
    products = math.prod(outs[0]) * math.prod(n for a, n in enumerate(ins[1]) if a != kernel[0]) / met
    if groups == 1 and is_librarys(len(window), features, results):
        return MULTIPLIED * products + places * taps * features * (LAID_OUT if features >= TOGETHER else SCATTERED)
    begun, laid_out = (IN_SPACE * BEGUN, IN_SPACE * LAID_OUT) if in_space and taps > 1 else (BEGUN, LAID_OUT)
    laid_out = APART_IN_SPACE if in_space and apart > 1 else laid_out
    return MULTIPLIED * products + places * (PLACED + taps * (begun + laid_out * features))


IN_GROUPS_OF_BATCH = 40.0
"""The cost in additions of a product in the gradient of a kernel in groups, which XLA computes as groups of the batch, for each group, and
twice that of one where features are groups. Measured within a factor of three: benchmarks/calibration/convolution.py."""


def _written_convolution(ins: Shapes, outs: Shapes, params: Params) -> float:
    """A convolution of a program as written, of whose batch there may be groups."""
    groups, kernel = params["feature_group_count"], params["dimension_numbers"][1]
    if not isinstance(groups, BatchGroups):
        return _convolution(ins, outs, params)
    products = math.prod(outs[0]) * math.prod(n for a, n in enumerate(ins[1]) if a != kernel[0])
    return IN_GROUPS_OF_BATCH * products * (groups if math.prod(outs[0][a] for a in params["dimension_numbers"][2][:2]) > groups else 2)


def _emitted_convolution(ins: Shapes, outs: Shapes, params: Params) -> float:
    """A convolution of emitted source: along three axes plane by plane."""
    if not is_by_planes(ins, params):
        return _convolution(ins, outs, params)
    flat, planes = one_plane(ins, outs, params), outs[0][params["dimension_numbers"][2][2]]
    return planes * (PLANE + SIDE_BY_SIDE * math.prod(flat[0][0]) + _convolution(*flat))


STEP, COMBINED = 20.0, 4.0
"""The cost in additions of combining one more element by a user's function, and of each operation of that function.
Measured: benchmarks/calibration/folds.py."""
CUMULATED, CUMULATED_LOGARITHM = 180.0, 40.0
"""The cost in additions per element of a cumulative sum, product, minimum or maximum, and of a cumulative log-sum-exp.
Measured: benchmarks/calibration/folds.py."""

WINDOW_AT, WINDOW_READ = 80.0, 12.0
"""The cost in additions of a place of a window that slides by more than one, and of each element of a window at any place. Measured on sums
and maxima of 2 to 64 elements along one axis, and of 2 x 2 and 3 x 3: benchmarks/calibration/windows.py."""
RETURNED_AT, RETURNED = 1500.0, 600.0
"""The same of the gradient of maxima, which looks for the place of each: benchmarks/calibration/windows.py."""


def _windows(ins: Shapes, outs: Shapes, params: Params) -> float:
    at = WINDOW_AT if max(params["window_strides"] or (1,)) > 1 else 0.0
    return math.prod(outs[0]) * (at + WINDOW_READ * math.prod(params["window_dimensions"]))


def _gradient_of_maxima(ins: Shapes, outs: Shapes, params: Params) -> float:
    return math.prod(ins[0]) * (RETURNED_AT + RETURNED * math.prod(params["window_dimensions"]))


# --- gathers, searches, sorts ----------------------------------------------------------------------------

READ_AT, READ = 40.0, 8.0
"""The cost in additions of finding the position of a window that is read, and of reading one of its elements. Measured on windows
of 1 to 64 elements: benchmarks/calibration/gathers.py."""
WRITTEN_AT, WRITTEN, COPIED = 100.0, 5.0, 2.0
"""The cost in additions of finding the position of a window that is written, of writing one of its elements, and of copying an
element of the array into which it is written. Measured likewise: benchmarks/calibration/gathers.py."""


def _gather(ins: Shapes, outs: Shapes, params: Params) -> float:
    return READ * math.prod(outs[0]) + READ_AT * math.prod(ins[1][:-1])


def _scatter(ins: Shapes, outs: Shapes, params: Params) -> float:
    return COPIED * math.prod(outs[0]) + WRITTEN * math.prod(ins[2]) + WRITTEN_AT * math.prod(ins[1][:-1])


SHORT_SEARCH = 32
"""The extent of an axis up to which XLA:CPU vectorises a search over positions of the other axes; along a longer axis it compares
one element at a time. Sweep: benchmarks/calibration/searches.py."""
SEARCHED_TOGETHER, SEARCHED_ALONE = 12.0, 400.0
"""The cost in additions per element of a search along a short and along a longer axis: benchmarks/calibration/searches.py."""


def _search(ins: Shapes, outs: Shapes, params: Params) -> float:
    length = math.prod(ins[0][a] for a in params["axes"])
    return math.prod(ins[0]) * (SEARCHED_TOGETHER if length <= SHORT_SEARCH else SEARCHED_ALONE)


SELECTION, REPLACEMENT, GATHERED, BLOCK_MAXIMUM = 107.0, 2500.0, 250.0, 16.0
"""The cost in additions of a selection of the largest elements: per element, per element that replaces one of the largest so far, per
element gathered beforehand, and per element of a block whose maximum is taken. Measured: benchmarks/calibration/searches.py."""


def _top_k(ins: Shapes, outs: Shapes, params: Params) -> float:
    n, k = ins[0][params["axis"]], params["k"]
    rows = math.prod(ins[0]) / max(n, 1)
    last = params["axis"] in (-1, len(ins[0]) - 1)
    block = block_length(ins[0][-1], k) if last else None
    if block is None:
        return rows * _selection(n, k)
    candidates = k * block + n % block
    return rows * (BLOCK_MAXIMUM * n + _selection(n // block, k) + GATHERED * candidates + _selection(candidates, k))


def _selection(n: int, k: int) -> float:
    """Return the additions for one row: in random order, element ``i`` is among the ``k`` largest so far with probability ``k / i``."""
    return SELECTION * n + REPLACEMENT * k * (1 + math.log(max(n / max(k, 1), 1)))


DRAWN = 700.0
"""The cost of a random number in additions: benchmarks/calibration/draws.py."""


def _draws(ins: Shapes, outs: Shapes, params: Params) -> float:
    """Threefry computes two numbers, of which JAX makes one."""
    return DRAWN * math.prod(outs[0])


COMPARED = 1000.0
"""The cost of a sort in additions, per element and binary logarithm of the extent: benchmarks/calibration/searches.py."""


FUNCTION = 16.0
"""The weight from which on an operation is at least a polynomial, whose cost depends on the processor; a square root is one
instruction. Measured: benchmarks/calibration/elementwise.py."""


def is_slow(term: Term) -> bool:
    """Whether an operation is a function that is no polynomial: one core takes as many times as long for it as there are cores."""
    return isinstance(term, Map) and MEASURED.get(term.op, 0.0) >= FUNCTION and term.op not in POLYNOMIALS


@cache
def table(function_factor: float = 1.0, emitted: bool = True) -> Weights:
    """Return the weights of XLA:CPU.

    Args:
        function_factor: a factor on the weights in :data:`MEASURED` that are at least :data:`FUNCTION`.
        emitted: whether convolutions along three axes run as emitted source has them, not as XLA does.
    """
    measured = {op: weight * (function_factor if weight >= FUNCTION else 1.0) for op, weight in MEASURED.items()}
    return Weights(
        {**dict.fromkeys(ELEMENTWISE, 1.0), **measured},
        {
            **BLOCKS,
            **{name: _factorisation(name) for name in FACTORISED},
            "triangular_solve": _triangular_solve,
            "conv_general_dilated": _emitted_convolution if emitted else _written_convolution,
            "reduce": reduction(STEP, COMBINED),
            "gather": _gather,
            **dict.fromkeys(SCATTERS, _scatter),
            **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), per_element(CUMULATED)),
            "cumlogsumexp": per_element(CUMULATED_LOGARITHM),
            **dict.fromkeys(SLIDING, _windows),
            "select_and_scatter_add": _gradient_of_maxima,
            **dict.fromkeys(("argmax", "argmin"), _search),
            "sort": sorting(COMPARED),
            **dict.fromkeys(RANDOM_DRAWS, _draws),
            "top_k": _top_k,
            "approx_top_k": per_element(SELECTION),
        },
        {
            **WORKSPACES,
            "eigh": _lapack("syevd"),
            "eig": _lapack("geev", "compute_left_eigenvectors", "compute_right_eigenvectors"),
            "svd": _lapack("gesdd", "compute_uv"),
            "conv_general_dilated": held_elements if emitted else copied_as_written,
        },
        STEP,
        COMBINED,
    )
