"""Pictures of the results: time and memory against size and limit, planning time, ranks. Need matplotlib (the extra ``bench``)."""

from __future__ import annotations

import json
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


def _axes(count: int, names: Sequence[tuple[str, str]]) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(4.6 * count, 3.6), squeeze=False)
    for axis, (horizontal, vertical) in zip(axes[0], names, strict=True):
        axis.set_xlabel(horizontal)
        axis.set_ylabel(vertical)
        axis.grid(alpha=0.3)
    return figure, axes[0]


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(rows: Sequence[Row], path: Path) -> None:
    names = [(x, y) for x in ("points on each side", "limit, MiB") for y in ("seconds", "MiB held")]
    figure, axes = _axes(4, names)
    sizes = [row for row in rows if row["varies"] == "size"]
    limits = sorted((row for row in rows if row["n"] == _most_common([row["n"] for row in rows])), key=lambda row: row["limit_bytes"])
    for version in ("plain", "plan"):
        for k, (some, x) in enumerate(((sizes, lambda row: row["n"]), (limits, lambda row: row["limit_bytes"] / 2**20))):
            timed = [row for row in some if version in row["seconds"]]
            held = [row for row in some if version in row["held_bytes"]]
            axes[2 * k].loglog([x(row) for row in timed], [row["seconds"][version] for row in timed], "o-", label=version)
            axes[2 * k + 1].loglog([x(row) for row in held], [row["held_bytes"][version] / 2**20 for row in held], "o-", label=version)
    for axis in axes:
        axis.legend()
    for axis in axes[:2]:
        axis.set_xticks([row["n"] for row in sizes], [f"{row['n']:,}" for row in sizes], rotation=30)
        axis.minorticks_off()
    _save(figure, path)


def _most_common(values: Sequence[int]) -> int:
    return max(set(values), key=values.count)


def _planning(rows: Sequence[Row], path: Path) -> None:
    figure, (axis,) = _axes(1, [("equations", "seconds to plan")])
    for family in dict.fromkeys(row["family"] for row in rows):
        some = [row for row in rows if row["family"] == family]
        axis.loglog([row["equations"] for row in some], [row["seconds"] for row in some], "o-", label=family)
    axis.legend()
    _save(figure, path)


def _ranks(rows: Sequence[Row], path: Path) -> None:
    figure, (axis,) = _axes(1, [("predicted seconds", "measured seconds")])
    for row in rows:
        axis.loglog(row["predicted_s"], row["measured_s"], ".", label=f"{row['case']} ({row['spearman']:.2f})")
    axis.legend(fontsize=6)
    _save(figure, path)
