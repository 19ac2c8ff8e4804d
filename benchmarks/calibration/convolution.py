"""Costs of convolutions by their products and by the patches that a library lays out, for few and many features, and of gradients of
their kernels, whose windows are as large as images and whose features are examples.

python -m benchmarks.calibration.convolution
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from jax import lax

from benchmarks.calibration.sweep import Case, main

MEASURES = (
    "backends.cpu.convolutions.FEW_FEATURES",
    *(f"backends.cpu.weights.{name}" for name in ("MULTIPLIED", "LAID_OUT", "SCATTERED", "TOGETHER", "PLACED", "BEGUN", "IN_SPACE")),
)
WINDOW = 3


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each element of a patch: with one feature out that of laying it out, with many that of the products besides."""
    extent, batch = (4, 1) if tiny else (64, 4)
    for dimensions, layout in ((1, ("NWC", "WIO", "NWC")), (2, ("NHWC", "HWIO", "NHWC")), (3, ("NDHWC", "DHWIO", "NDHWC"))):
        sides = (extent // 2 if dimensions == 3 else extent,) * dimensions
        for features in (1, 2) if tiny else (1, 4, 8, 12, 16, 24, 32, 64):
            for out in (1, 2) if tiny else (1, 16, 256):
                convolve = partial(lax.conv_general_dilated, window_strides=(1,) * dimensions, padding="SAME", dimension_numbers=layout)
                shapes = [(batch, *sides, features), ((WINDOW,) * dimensions + (features, out))]
                work = batch * sides[0] ** dimensions * features * WINDOW**dimensions
                yield Case(f"{dimensions} dimensions, {features} features to {out}", convolve, shapes, float(work))
    layout = ("NHWC", "HWIO", "NHWC")
    convolve = partial(lax.conv_general_dilated, window_strides=(1, 1), padding=((1, 1), (1, 1)), dimension_numbers=layout)
    for features, group in ((2, 1), (2, 2)) if tiny else ((8, 1), (8, 4), (64, 1), (64, 4)):
        for window in (1, 2) if tiny else (3, 5):
            grouped = partial(convolve, feature_group_count=features // group)
            shapes = [(batch, extent, extent, features), (window, window, group, features)]
            work = batch * extent**2 * features * window**2
            yield Case(f"{features} features in groups of {group}, windows of {window}", grouped, shapes, float(work))
    for before, after in ((2, 2),) if tiny else ((3, 32), (32, 32), (64, 3), (64, 64)):
        for examples in (1, 2) if tiny else (1, 2, 4, 8, 16, 32):
            shapes = [(before, extent, extent, examples), (extent, extent, examples, after)]
            work = before * WINDOW**2 * extent**2 * examples
            yield Case(f"gradient of the kernel of {before} to {after}, {examples} examples", convolve, shapes, float(work))


if __name__ == "__main__":
    main("convolution")
