"""Costs of folds of windows that slide over an array, and of their gradients.

python -m benchmarks.calibration.windows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax

from benchmarks.calibration.sweep import Case, main, steps

MEASURES = tuple(f"backends.cpu.weights.{name}" for name in ("RETURNED", "RETURNED_AT", "WINDOW_AT", "WINDOW_READ"))


def sliding(fold: str, window: tuple[int, ...], strides: tuple[int, ...], gradient: bool = False) -> Callable[[Any], Any]:
    """Sums or maxima of windows, or the gradient of their sum."""
    combine, start = (lax.add, 0.0) if fold == "sums" else (lax.max, -np.inf)

    def folded(x: Any) -> Any:
        return lax.reduce_window(x, np.float32(start), combine, window, strides, "SAME")

    return jax.grad(lambda x: (folded(x) * 1.5).sum()) if gradient else folded


def cases(tiny: bool) -> Iterator[Case]:
    """Costs are for each element of a window at each of its places."""
    side = 8 if tiny else 512
    for fold in ("sums", "maxima"):
        for width in steps(tiny, 2, 3, 5, 8, 16, 64):
            for window in ((1, width), (width, 1)):
                for stride in {1, width}:
                    strides = tuple(stride if w > 1 else 1 for w in window)
                    work = float(side * side * width / stride)
                    yield Case(f"{fold} of {window} by {stride}", sliding(fold, window, strides), [(side, side)], work)
        for width in (2, 3):
            for stride in (1, width):
                for gradient in (False, True):
                    shape = (4, side // 2, side // 2, 8)
                    work = 4.0 * (side // 2) ** 2 * 8 * width**2 / stride**2
                    label = f"{'gradient of ' if gradient else ''}{fold} of {width} x {width} of images, by {stride}"
                    window, strides = (1, width, width, 1), (1, stride, stride, 1)
                    yield Case(label, sliding(fold, window, strides, gradient), [shape], work)


if __name__ == "__main__":
    main("windows")
