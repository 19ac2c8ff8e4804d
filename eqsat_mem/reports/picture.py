"""Plots of memory over the steps of a program, as written and as planned, drawn by matplotlib, which is an optional extra."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from os import PathLike
from typing import Any

from eqsat_mem.reports.timeline import Point
from eqsat_mem.units import UNITS, format_bytes

FILL, EDGE, LOOP, LIMIT = "#9ecae1", "#3182bd", "#636363", "#de2d26"
FAR = 3.0
"""The largest multiple of the peak at which a limit is drawn: with a larger one, the curve would look flat."""
BINARY = ("GiB", "MiB", "KiB")


def draw(name: str, before: Sequence[Point], after: Sequence[Point], limit_bytes: int, path: str | PathLike[str] | None) -> Any:
    """Draw one panel per timeline, each on its own scale, with loops as bars under the curve and the limit as a line.

    Args:
        name: the name of the function, for the titles.
        before: the timeline of the program as written.
        after: the timeline of the plan.
        limit_bytes: the memory limit, in bytes.
        path: the file in which to save the figure; None shows it in a window.

    Returns:
        The ``matplotlib`` figure.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plan.show() draws with matplotlib: pip install 'eqsat-mem[plots]'.", name=error.name) from error
    figure = (pyplot.figure if path is None else Figure)(figsize=(9, 6), layout="constrained")
    for panel, (title, points) in zip(figure.subplots(2, 1), (("as written", before), ("as planned", after)), strict=True):
        _panel(panel, f"{name} {title}", points, limit_bytes)
    if path is None:
        if pyplot.get_backend().lower() != "agg":  # agg has no windows
            pyplot.show()
    else:
        figure.savefig(path)
    return figure


def _panel(axes: Any, title: str, points: Sequence[Point], limit_bytes: int) -> None:
    unit = next((unit for unit in BINARY if max(point.nbytes for point in points) >= 1.5 * UNITS[unit]), "B")
    heights, limit = [point.nbytes / UNITS[unit] for point in points], limit_bytes / UNITS[unit]
    top = max(heights)
    axes.stairs(heights, range(len(points) + 1), fill=True, color=FILL)
    axes.stairs(heights, range(len(points) + 1), color=EDGE)
    peak = heights.index(top)
    axes.plot([peak + 0.5], [top], "v", color=EDGE)
    axes.set_title(f"{title}: {format_bytes(points[peak].nbytes)} at {_where(points[peak])}", fontsize="medium", loc="left")
    near = limit < FAR * top
    if near:
        axes.axhline(limit, color=LIMIT, linestyle="--")
    place = (0.0, limit) if near else (0.0, 1.12 * top)
    label = f" limit {format_bytes(limit_bytes)}" + ("" if near else ", above this picture")
    axes.text(*place, label, color=LIMIT, fontsize="small", va="bottom" if near else "top")
    _loops(axes, points, max(top, limit if near else top))
    axes.set_xlim(0, len(points))
    axes.set_ylim(top=1.15 * (limit if top < limit and near else top))
    axes.set_xticks([])
    axes.set_xlabel("steps of the program, loop bodies once", fontsize="small")
    axes.set_ylabel(unit)


def _loops(axes: Any, points: Sequence[Point], top: float) -> None:
    for depth, start, end, loop in loop_spans(points):
        height = -0.09 * (depth + 0.5) * top
        axes.plot([start + 0.1, end - 0.1], [height, height], color=LOOP, linewidth=3, solid_capstyle="butt")
        beside = {"xytext": (0, -3), "textcoords": "offset points", "fontsize": "x-small", "color": LOOP}
        axes.annotate(f"loop over {loop}", ((start + end) / 2, height), ha="center", va="top", **beside)


def _where(point: Point) -> str:
    return f"{point.what}, {point.place}" if point.place else point.what


def loop_spans(points: Sequence[Point]) -> Iterator[tuple[int, int, int, str]]:
    """Yield the loops of a timeline: depth, first point, point after the last, and index.

    Adjacent loops over the same indices count as one.
    """
    deepest = max((len(point.loops) for point in points), default=0)
    for depth in range(deepest):
        for loops, group in groupby(enumerate(points), key=lambda pair: pair[1].loops[: depth + 1]):
            if len(loops) == depth + 1:
                at = [k for k, _ in group]
                yield depth, at[0], at[-1] + 1, loops[depth]
