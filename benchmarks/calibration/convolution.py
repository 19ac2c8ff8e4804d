"""Costs of convolutions by their products and by the patches that a library lays out, for few and many features, of those of elements that
lie apart, and of gradients of their kernels, whose windows are as large as images and whose features are examples; along three axes as
XLA:CPU runs them, and plane by plane.

python -m benchmarks.calibration.convolution
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from jax import lax

from benchmarks.calibration.sweep import Case, main
from eqsat_mem.backends.cpu.planes import convolved_by_planes

MEASURES = (
    "backends.cpu.convolutions.FEW_FEATURES",
    *(f"backends.cpu.weights.{name}" for name in ("MULTIPLIED", "LAID_OUT", "SCATTERED", "TOGETHER", "PLACED", "BEGUN")),
    "backends.cpu.weights.IN_GROUPS_OF_BATCH",
    *(f"backends.cpu.weights.{name}" for name in ("IN_SPACE", "APART_IN_SPACE", "PLANE", "SIDE_BY_SIDE")),
)
WINDOW = 3
IN_SPACE = ("NDHWC", "DHWIO", "NDHWC")


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each element of a patch: with one feature out that of laying it out, with many that of the products besides."""
    extent, batch = (4, 1) if tiny else (64, 4)
    for dimensions, layout in ((1, ("NWC", "WIO", "NWC")), (2, ("NHWC", "HWIO", "NHWC")), (3, IN_SPACE)):
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
    for features, groups in ((4, 2), (4, 4)) if tiny else ((64, 4), (64, 16), (64, 64)):
        gradient = partial(convolve, batch_group_count=groups, padding=((1, 1),) * 2)
        numbers = lax.ConvDimensionNumbers((3, 0, 1, 2), (3, 0, 1, 2), (2, 3, 0, 1))
        shapes = [(batch, extent // 2, extent // 2, features)] * 2
        work = float(batch * (extent // 2) ** 2 * WINDOW**2 * features**2)  # products of all groups with all
        yield Case(f"gradient of a kernel in {groups} groups", partial(gradient, dimension_numbers=numbers), shapes, work)
    for before, after in ((2, 2),) if tiny else ((4, 32), (8, 8), (32, 4), (64, 64)):
        apart = partial(
            lax.conv_general_dilated, window_strides=(1, 1), padding=((2, 1),) * 2, lhs_dilation=(2, 2), dimension_numbers=layout
        )
        shapes = [(batch, extent // 2, extent // 2, before), (WINDOW, WINDOW, before, after)]
        work = float(batch * extent**2 * before * WINDOW**2)
        yield Case(f"{before} features that lie apart to {after}", apart, shapes, work)
    yield from _in_space(tiny)


def _in_space(tiny: bool) -> Iterator[Case]:
    """Costs along three axes, of whole convolutions and of the same plane by plane, for each element of a patch."""
    side, ones = 4 if tiny else 24, (1, 1, 1)
    ways = (("at once", lax.conv_general_dilated), ("plane by plane", convolved_by_planes))
    for batch, before, after in ((1, 1, 2),) if tiny else ((2, 1, 16), (1, 8, 8), (1, 4, 32), (1, 32, 4), (2, 32, 32)):
        image, half, window = (batch, *(side,) * 3), (batch, *(side // 2,) * 3), (WINDOW,) * 3
        work = float(batch * side**3 * before * WINDOW**3)
        for way, convolve in ways:
            shown = f"{batch} x {before} features to {after} in space, {way}"
            padded = partial(convolve, window_strides=ones, padding=((1, 1),) * 3, dimension_numbers=IN_SPACE)
            gaps = partial(convolve, window_strides=ones, padding=((2, 1),) * 3, dimension_numbers=IN_SPACE, lhs_dilation=(2, 2, 2))
            yield Case(shown, padded, [(*image, before), (*window, before, after)], work)
            yield Case(f"{shown}, apart", gaps, [(*half, before), (*window, before, after)], work)
            shapes = [(before, *image[1:], batch), (*image[1:], batch, after)]
            yield Case(f"{shown}, gradient of the kernel", padded, shapes, work)


if __name__ == "__main__":
    main("convolution")
