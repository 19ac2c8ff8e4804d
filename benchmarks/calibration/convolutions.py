"""Growth of resident memory in convolutions, for which XLA:CPU's libraries take memory that XLA does not report.

python -m benchmarks.calibration.convolutions
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax import lax

from benchmarks.calibration.sweep import Case, main

MEASURES = ("backends.cpu.convolutions.COPIED_ONCE",)
NHWC = ("NHWC", "HWIO", "NHWC")


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are multiples of the operand, the result included; the table in the module of these constants has what was seen."""
    n, extent = (2, 8) if tiny else (32, 64)
    padded = [(1, 1)] * 2
    for features in (16, 32, 64, 128):
        yield _case("padded", n, extent, features, (3, 3, features, features), padding=padded)
    for features in (16, 32, 64):
        yield _case("without padding", n, extent, features, (3, 3, features, features))
    yield _case("with a stride of 2", n, extent, 64, (3, 3, 64, 64), padding=[(0, 1)] * 2, window_strides=(2, 2))
    yield _case("with gaps in the window", n, extent, 64, (3, 3, 64, 64), padding=[(2, 2)] * 2, rhs_dilation=(2, 2))
    yield _case("of elements that lie apart", n, extent // 2, 64, (3, 3, 64, 64), padding=[(2, 2)] * 2, lhs_dilation=(2, 2))
    yield _case("in 4 groups", n, extent, 64, (3, 3, 16, 64), padding=padded, feature_group_count=4)
    yield _case("in as many groups as features", n, extent, 64, (3, 3, 1, 64), padding=padded, feature_group_count=64)
    yield _case("of single elements", n, extent, 64, (1, 1, 64, 64))
    yield _case("as the gradient of a kernel", 16, extent, n, (extent, extent, n, 64), padding=padded)
    if not tiny:
        yield _case("padded, of many features", 16, 14, 512, (3, 3, 512, 512), padding=padded)


def _case(label: str, n: int, extent: int, features: int, kernel: Sequence[int], **options: Any) -> Case:
    shape = (n, extent, extent, features)
    text = f"{label}, {' x '.join(map(str, shape))} and {' x '.join(map(str, kernel))}"
    return Case(text, _convolution(options), [shape, tuple(kernel)], 4.0 * n * extent * extent * features, watched=True)


def _convolution(options: Any) -> Callable[..., Any]:
    given = {"window_strides": (1, 1), "padding": [(0, 0)] * 2, "dimension_numbers": NHWC, **options}
    return lambda x, k: lax.conv_general_dilated(x, k, **given)


if __name__ == "__main__":
    main("convolutions")
