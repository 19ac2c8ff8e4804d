"""The picture of a plan: memory over the steps of the program, as written and as planned, on one scale.

Matplotlib, which is an optional extra, draws it.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from eqsat_mem.reports.parts import ROLES, HeldPart, by_role
from eqsat_mem.reports.scale import Scale, label_rows, scale_of
from eqsat_mem.reports.timeline import Point
from eqsat_mem.units import format_bytes

EDGE, LOOP, LIMIT, GRID = "#39424e", "#57616c", "#bc2f27", "#d5dae0"
LETTERS = 62
"""The letters of a loop's label that fit into the width of a timeline."""

STEPS = "steps of the program from left to right, loop bodies once"
BELOW: dict[str, Any] = {
    "loc": "outside lower center",
    "fontsize": "small",
    "title_fontsize": "small",
    "frameon": False,
    "columnspacing": 1.2,
}

Timeline = tuple[str, Sequence[Point], Sequence[Sequence[HeldPart]]]
"""The title of a timeline, its points, and the parts of each."""


def draw(title: str, timelines: Sequence[Timeline], limit_bytes: int, path: str | PathLike[str] | None) -> Any:
    """Draw timelines side by side on one scale, stacked by role, with their peaks, the limit as a line, and loops below.

    Args:
        title: the title of the picture.
        timelines: the timelines.
        limit_bytes: the memory limit, in bytes.
        path: the file in which to save the figure; None shows it in a window or a notebook.

    Returns:
        The ``matplotlib`` figure where it was saved, else None: a notebook would draw it once more.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plan.show() draws with matplotlib: pip install 'eqsat-mem[plots]'.", name=error.name) from error
    figure = (pyplot.figure if path is None else Figure)(figsize=(5 * len(timelines), 4.4), layout="constrained")
    scale = scale_of([max(point.nbytes for point in points) for _, points, _ in timelines], limit_bytes)
    panels = figure.subplots(1, len(timelines), sharey=True, squeeze=False)[0]
    for panel, timeline in zip(panels, timelines, strict=True):
        _panel(panel, timeline, scale, limit_bytes)
    panels[0].set_yticks(scale.ticks, [format_bytes(tick) for tick in scale.ticks])
    above = "" if scale.limit_is_near else ", above this picture"
    handles = {label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    handles[f"limit {format_bytes(limit_bytes)}{above}"] = panels[0].plot([], [], color=LIMIT, linestyle="--")[0]
    figure.legend(list(handles.values()), list(handles), ncols=len(handles), title=STEPS, **BELOW)
    figure.suptitle(title, fontsize="medium", wrap=True)
    if path is None:
        pyplot.show()
        return None
    figure.savefig(path)
    return figure


def _panel(axes: Any, timeline: Timeline, scale: Scale, limit_bytes: int) -> None:
    title, points, parts = timeline
    many = len(points)
    low, roles = [0] * many, [by_role(of) for of in parts]
    for role, (color, _) in ROLES.items():
        high = [below + of[role] for below, of in zip(low, roles, strict=True)]
        if high != low:
            axes.stairs(high, range(many + 1), baseline=low, fill=True, color=color, label=role)
        low = high
    axes.stairs(low, range(many + 1), color=EDGE, linewidth=0.8)
    if scale.limit_is_near:
        axes.axhline(limit_bytes, color=LIMIT, linestyle="--")
    at = max(range(many), key=low.__getitem__)
    side = "left" if at < 0.2 * many else "right" if at > 0.8 * many else "center"
    ground = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    beside = {"xytext": (0, 5), "textcoords": "offset points", "ha": side, "va": "bottom", "fontweight": "bold", "bbox": ground}
    axes.plot([at + 0.5], [low[at]], "v", color=EDGE)
    axes.annotate(format_bytes(low[at]), (at + 0.5, low[at]), **beside)
    axes.set_title(title, fontsize="medium", loc="left")
    axes.set_xlim(0, many)
    axes.set_ylim(0, scale.top)
    axes.set_xticks([])
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    for row, start, end, left, text in label_rows(points, LETTERS):
        height, across = -0.065 * (row + 1), axes.get_xaxis_transform()
        axes.plot([start, end], [height + 0.03] * 2, color=LOOP, linewidth=2.5, transform=across, clip_on=False, solid_capstyle="butt")
        axes.text(left * many, height, text, fontsize="x-small", color=LOOP, va="center", transform=across)
