"""Pictures of the results: time and memory against size and limit, planning time, ranks. Need matplotlib (the extra ``bench``)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def draw(folder: Path) -> list[Path]:
    """Draw what the folder has results for; the files, none where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    drawn = []
    for name, picture in {"curves": _curves, "planning": _planning, "ranks": _ranks}.items():
        source = folder / f"{name}.json"
        if source.exists():
            drawn.append(source.with_suffix(".png"))
            picture(json.loads(source.read_text(encoding="utf-8"))["rows"], drawn[-1])
    return drawn


OURS, WRITTEN, OTHERS = ("#1f5fbf", "#7db3f5", "#0b2f66"), "#bc2f27", ("#57616c", "#b07800", "#2a7f62", "#8a4fa8", "#0f8ea8")
"""The colours of our lines, of the program as written in plain JAX, and of others."""
MARKERS = "s^Dv<>ph*"
STEPS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9))
"""Where ticks may stand in a decade, the fewest first."""
FEWEST_TICKS, MOST_TICKS = 3, 7
LEVEL_LETTERS = 18
"""More letters than this below a horizontal axis are turned, so that they do not touch."""


def log_ticks(low: float, high: float) -> list[float]:
    """Round values between two positive ones, few enough not to collide on a logarithmic axis.

    >>> log_ticks(0.9, 1200), log_ticks(0.12, 0.31), log_ticks(1e-6, 1e3)
    ([1.0, 10.0, 100.0, 1000.0], [0.15, 0.2, 0.3], [1e-06, 0.0001, 0.01, 1.0, 100.0])
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for step in STEPS:
        found = [round(times * 10.0**k, 12) for k in decades for times in step]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) >= FEWEST_TICKS:
            break
    return thinned(found) if found else [float(f"{math.sqrt(low * high):.3g}")]


def thinned(ticks: list[float]) -> list[float]:
    """Some of the ticks at equal steps, so that there are not too many."""
    return ticks[:: math.ceil(len(ticks) / MOST_TICKS)]


def log_axes(axes: Any, horizontal: Sequence[float] | None = None) -> None:
    """Logarithmic axes with few, plain ticks; ``horizontal`` are values that stand on the horizontal one instead."""
    for axis, values in ((axes.xaxis, horizontal), (axes.yaxis, None)):
        if axis.get_scale() == "log":
            ticks = sorted(set(values)) if values is not None else log_ticks(*axis.get_view_interval())
            axis.set_ticks(thinned(ticks))
            axis.set_ticklabels([f"{tick:,.6g}" for tick in axis.get_ticklocs()])
            axis.minorticks_off()
    if sum(len(label.get_text()) for label in axes.get_xticklabels()) > LEVEL_LETTERS:
        axes.tick_params(axis="x", rotation=30)
    axes.grid(alpha=0.3)


def style(label: str, position: int) -> dict[str, Any]:
    """How a line is drawn: ours, which say ``eqsat_mem``, thick in shades of blue, plain JAX red, others in other colours."""
    if "eqsat_mem" in label:
        return {"color": OURS[position % len(OURS)], "marker": "o", "linewidth": 2.6, "zorder": 3, "label": label}
    color = WRITTEN if "plain JAX" in label else OTHERS[position % len(OTHERS)]
    return {"color": color, "marker": MARKERS[position % len(MARKERS)], "linewidth": 1.4, "label": label}


def legend_below(figure: Any, columns: int = 4) -> None:
    """One legend for all parts of a figure of constrained layout, below them."""
    handles = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=min(columns, len(handles)), frameon=False)


def _axes(count: int, names: Sequence[tuple[str, str]], width: float = 4.2) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(width * count, 3.9), squeeze=False, layout="constrained")
    for axis, (horizontal, vertical) in zip(axes[0], names, strict=True):
        axis.set_xlabel(horizontal)
        axis.set_ylabel(vertical)
    return figure, axes[0]


def _save(figure: Any, path: Path, columns: int = 4) -> None:
    from matplotlib import pyplot

    legend_below(figure, columns)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


VERSIONS = {"plain": "plain JAX, as written", "plan": "eqsat_mem"}


def _curves(rows: Sequence[Row], path: Path) -> None:
    names = [(x, y) for x in ("points on each side", "limit, MiB") for y in ("seconds", "MiB held")]
    figure, axes = _axes(4, names, 3.6)
    sizes = [row for row in rows if row["varies"] == "size"]
    limits = sorted((row for row in rows if row["n"] == _most_common([row["n"] for row in rows])), key=lambda row: row["limit_bytes"])
    for position, (version, label) in enumerate(VERSIONS.items()):
        drawn = style(label, position)
        for k, (some, x) in enumerate(((sizes, lambda row: row["n"]), (limits, lambda row: row["limit_bytes"] / 2**20))):
            timed = [row for row in some if version in row["seconds"]]
            held = [row for row in some if version in row["held_bytes"]]
            axes[2 * k].loglog([x(row) for row in timed], [row["seconds"][version] for row in timed], **drawn)
            axes[2 * k + 1].loglog([x(row) for row in held], [row["held_bytes"][version] / 2**20 for row in held], **drawn)
    for k, axis in enumerate(axes):
        log_axes(axis, [row["n"] for row in sizes] if k < 2 else [row["limit_bytes"] / 2**20 for row in limits])
    _save(figure, path)


def _most_common(values: Sequence[int]) -> int:
    return max(set(values), key=values.count)


def _planning(rows: Sequence[Row], path: Path) -> None:
    figure, (axis,) = _axes(1, [("equations", "seconds to plan")], 6.4)
    for position, family in enumerate(dict.fromkeys(row["family"] for row in rows)):
        some = [row for row in rows if row["family"] == family]
        axis.loglog([row["equations"] for row in some], [row["seconds"] for row in some], **style(family, position))
    log_axes(axis)
    _save(figure, path)


def _ranks(rows: Sequence[Row], path: Path) -> None:
    from matplotlib import pyplot

    figure, (axis,) = _axes(1, [("predicted seconds", "measured seconds")], 7.4)
    colors = pyplot.get_cmap("tab10").colors
    for position, row in enumerate(rows):
        shown = {"color": colors[position % len(colors)], "marker": MARKERS[position % len(MARKERS)], "linestyle": "none", "markersize": 4}
        axis.loglog(row["predicted_s"], row["measured_s"], **shown, label=f"{row['case']} ({row['spearman']:.2f})")
    log_axes(axis)
    _save(figure, path, 3)
