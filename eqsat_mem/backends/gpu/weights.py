"""Machine instructions of elementwise operations on a GPU, and their cost in additions.

``python -m benchmarks.calibration.instructions`` makes the table from machine code compiled by XLA:GPU of JAX 0.10.2 for h100
(compute capability 9.0), counting the longest straight-line path through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from eqsat_mem.backends.gpu.targets import Target

SPECIAL_LANES = 16
"""The elements of a special function (a hardware root, exponential or reciprocal) that a multiprocessor begins in a clock cycle:
CUDA C++ Programming Guide 13.0, throughput of native instructions."""

COUNTS: Mapping[str, tuple[tuple[float, float, float] | None, ...]] = MappingProxyType(
    {
        # for float32, float64 and bfloat16: all instructions, those on the float64 lanes, those on the special-function unit
        "add": ((1, 0, 0), (1, 1, 0), (1, 0, 0)),
        "sub": ((1, 0, 0), (1, 1, 0), (1, 0, 0)),
        "mul": ((1, 0, 0), (1, 1, 0), (1, 0, 0)),
        "div": ((8, 0, 1), (16.5, 8, 1), (12, 0, 1)),
        "rem": ((40.25, 0, 1), (89.25, 5, 0), (44.25, 0, 1)),
        "neg": ((1, 0, 0), (1, 1, 0), (1, 0, 0)),
        "abs": ((1, 0, 0), (1, 1, 0), (2.5, 0, 0)),
        "sign": ((4, 0, 0), (7.25, 2, 0), (11.75, 0, 0)),
        "square": ((1, 0, 0), (1, 1, 0), (1, 0, 0)),
        "integer_pow": ((1, 0, 0), (1, 1, 0), (1, 0, 0)),
        "max": ((1, 0, 0), (22.25, 3, 0), (1, 0, 0)),
        "min": ((1, 0, 0), (22.25, 3, 0), (1, 0, 0)),
        "clamp": ((2, 0, 0), (46.75, 6, 0), (2, 0, 0)),
        "floor": ((1, 0, 0), (1, 0, 0), (2, 0, 0)),
        "ceil": ((1, 0, 0), (1, 0, 0), (2, 0, 0)),
        "round": ((1, 0, 0), (1, 0, 0), (3.5, 0, 0)),
        "nextafter": ((17.25, 0, 0), (25.25, 2, 0), (18.25, 0, 0)),
        "eq": ((1, 0, 0), (2, 1, 0), (2, 0, 0)),
        "ne": ((1, 0, 0), (2, 1, 0), (2, 0, 0)),
        "lt": ((1, 0, 0), (2, 1, 0), (2, 0, 0)),
        "le": ((1, 0, 0), (2, 1, 0), (2, 0, 0)),
        "gt": ((1, 0, 0), (2, 1, 0), (2, 0, 0)),
        "ge": ((1, 0, 0), (2, 1, 0), (2, 0, 0)),
        "lt_to": ((6, 0, 0), (13.25, 0, 0), (9, 0, 0)),
        "le_to": ((6, 0, 0), (13.25, 0, 0), (9, 0, 0)),
        "is_finite": ((1, 0, 0), (3, 1, 0), (3.5, 0, 0)),
        "select_n": ((1, 0, 0), (2, 0, 0), (2, 0, 0)),
        "and": ((1, 0, 0), None, None),
        "or": ((1, 0, 0), None, None),
        "xor": ((1, 0, 0), None, None),
        "not": ((1, 0, 0), None, None),
        "shift_left": ((1, 0, 0), None, None),
        "shift_right_logical": ((1, 0, 0), None, None),
        "shift_right_arithmetic": ((2, 0, 0), None, None),
        "population_count": ((1, 0, 0), None, None),
        "clz": ((2, 0, 0), None, None),
        "convert_element_type": ((0.5, 0, 0), (0.75, 0, 0), (2, 0, 0)),
        "reduce_precision": ((6, 0, 0), (17.75, 0, 0), None),
        "real": ((0.75, 0, 0), (0.5, 0, 0), None),
        "imag": ((0.75, 0, 0), (0.5, 0, 0), None),
        "conj": ((1.5, 0, 0), (2, 1, 0), None),
        "complex": ((2, 0, 0), (3.5, 0, 0), None),
        "pow": ((91.25, 0, 1), (47.25, 10, 0), (97.5, 0, 1)),
        "sqrt": ((4, 0, 1), (18, 8, 1), (6.5, 0, 1)),
        "rsqrt": ((4, 0, 1), (14, 5, 1), (6.5, 0, 1)),
        "cbrt": ((16, 0, 2), (42, 11, 3), (18, 0, 2)),
        "exp": ((8.5, 0, 1), (41.25, 18.25, 0), (7.5, 0, 1)),
        "exp2": ((9.5, 0, 1), (42, 19, 0), (8.25, 0, 1)),
        "expm1": ((28.25, 0, 1), (65.25, 19, 0), (30.25, 0, 1)),
        "log": ((24.5, 0, 0), (78.25, 29, 1), (7.5, 0, 1)),
        "log1p": ((26.75, 0, 0), (83.25, 30, 1), (28.75, 0, 0)),
        "logistic": ((16.75, 0, 2), (53.75, 25.25, 1), (19.25, 0, 2)),
        "sin": ((27, 0, 0), (49.25, 17, 0), (29.5, 0, 0)),
        "cos": ((29, 0, 0), (52.25, 17, 0), (31.5, 0, 0)),
        "tan": ((26.5, 0, 1), (86.5, 32, 1), (28.5, 0, 1)),
        "asin": ((22.75, 0, 1), (54.75, 27, 1), (27.75, 0, 1)),
        "acos": ((23.75, 0, 1), None, (29.5, 0, 1)),
        "atan": ((34, 0, 1), (100, 36, 1), (38.75, 0, 1)),
        "atan2": ((44.25, 0, 1), (112.75, 39, 1), (49.25, 0, 1)),
        "sinh": ((23.5, 0, 2), (92.75, 30, 1), (29.25, 0, 2)),
        "cosh": ((15.25, 0, 2), (57.25, 20, 1), (17.75, 0, 2)),
        "tanh": ((22.5, 0, 1), (62.75, 21, 2), (25, 0, 1)),
        "asinh": ((39.75, 0, 2), None, (44.5, 0, 2)),
        "acosh": ((39.75, 0, 1), None, (42.25, 0, 1)),
        "atanh": ((35, 0, 1), None, (40.5, 0, 1)),
        "erf": ((24.75, 0, 1), (70, 42, 1), (30.25, 0, 1)),
        "erfc": ((75.75, 0, 3), (254.25, 122.25, 3), (77.75, 0, 3)),
        "erf_inv": ((66, 0, 1), (290.25, 90, 2), (68.5, 0, 1)),
        "lgamma": ((221, 0, 9), (498.75, 213, 12), (222.75, 0, 9)),
        "digamma": ((290.75, 0, 19), (567, 262.25, 20), (294.5, 0, 19)),
        "polygamma": ((1681.75, 0, 43), (1998.75, 743, 35), (1690.5, 0, 43)),
        "zeta": ((1118.5, 0, 14), (720.5, 225, 3), (1144.75, 0, 14)),
        "bessel_i0e": ((93.25, 0, 2), (314, 185, 2), (95.75, 0, 2)),
        "bessel_i1e": ((96.25, 0, 2), (316.5, 186, 2), (103.25, 0, 2)),
    }
)
"""Instructions per element, by operation; None if XLA has no kernel for it, or one with a loop. Operations on integers are counted
as float32."""


ESTIMATED: Mapping[str, float] = MappingProxyType(
    {"div": 3, "exp": 17, "exp2": 17, "sqrt": 17, "rsqrt": 17, "logistic": 22, "erf": 1, "rem": 1, "integer_pow": 1,
     "log": 42, "log1p": 50, "atan2": 60, "tanh": 63, "pow": 79, "sin": 198, "cos": 198, "tan": 198}
)  # fmt: skip
"""Operations in XLA's own estimate of time, by which it decides what is computed again. Sweep: benchmarks/gpu_model.py --thresholds;
those of more than 40 as they stand to ``exp`` in ``habits.SPREAD_COST``."""
SHORT, LONG = 10.0, 40.0
"""Others of up to so many instructions are estimated as one addition, longer ones as so many or more (log, sin, tanh, pow and the like more
than 32). Sweep: benchmarks/gpu_model.py --thresholds."""


def estimate(op: str) -> float:
    """The cost of one element in additions as XLA estimates it.

    >>> estimate("mul"), estimate("exp"), estimate("tanh")
    (1.0, 17.0, 63.0)
    """
    counts = COUNTS.get(op, ((1.0, 0.0, 0.0),))[0]
    return float(ESTIMATED.get(op, 1.0 if counts is None or counts[0] <= SHORT else LONG))


def weight(op: str, itemsize: int, target: Target) -> float | None:
    """Return the cost of one element in float32 additions of a card, or None if the table lacks it.

    Args:
        op: the name of the operation in the table of elementwise operations.
        itemsize: bytes of an element: 4, 8 or 2 (others count as 4).
        target: the card.
    """
    counts = COUNTS.get(op, (None, None, None))[{8: 1, 2: 2}.get(itemsize, 0)]
    if counts is None:
        return None
    issued, double, special = counts
    own = target.architecture
    return max(issued, double * own.lanes / own.double_lanes, special * own.lanes / SPECIAL_LANES)
