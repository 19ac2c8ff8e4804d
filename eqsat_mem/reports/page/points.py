"""Points of timelines as data for the page: what is held at each, by number of a table in which every tensor stands once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eqsat_mem.reports.page.chart import Panel, css_class
from eqsat_mem.units import count

MOST = 40
"""The number of tensors of a point that are listed, besides scratch; the others are added up."""


def point_data(panels: Sequence[Panel], classes: Mapping[str, Mapping[int, int]]) -> dict[str, Any]:
    """Return the points of each panel and the table of tensors.

    Args:
        panels: the panels of the chart.
        classes: for each panel, the e-classes of its program's terms, as far as they are known.
    """
    numbers = dict[tuple[Any, ...], int]()
    points: dict[str, list[dict[str, Any]]] = {}
    for panel in panels:
        known = classes.get(panel.which, {})
        points[panel.which] = []
        for point, parts in zip(panel.points, panel.parts, strict=True):
            scratch = [part for part in parts if part.role == "scratch"]
            tensors = [part for part in parts if part.role != "scratch"]
            rest, held = tensors[MOST:], []
            for part in sorted((*tensors[:MOST], *scratch), key=lambda part: -part.nbytes):
                place = "" if part.source is None else str(part.source)
                tensor = part.what, place, part.role, css_class(part.role), None if part.term is None else known.get(part.term)
                held.append([numbers.setdefault(tensor, len(numbers)), part.nbytes])
            more = [count(len(rest), "smaller tensor"), sum(part.nbytes for part in rest)] if rest else None
            points[panel.which].append(
                {"what": point.what, "place": point.place, "loops": point.loops, "nbytes": point.nbytes, "held": held, "more": more}
            )
    return {
        "panels": [{"which": panel.which, "title": panel.title, "peak": panel.peak} for panel in panels],
        "points": points,
        "tensors": list(numbers),
    }
