"""A timeline as SVG: one bar per step of the program, the loops below the bars, and the limit as a line."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from eqsat_mem.reports.picture import FAR, loop_spans
from eqsat_mem.reports.timeline import Point
from eqsat_mem.units import format_bytes

WIDTH, HEIGHT, LEFT, TOP, LOOP_HEIGHT = 1000, 200, 84, 14, 18


def timeline_svg(points: Sequence[Point], limit_bytes: int, label: str, which: str) -> str:
    """Return the SVG of a timeline.

    Args:
        points: the points of the timeline.
        limit_bytes: the memory limit, in bytes.
        label: the accessible label of the picture.
        which: the name of the timeline. Bars are buttons, with this name as ``data-points`` and their position as ``data-point``.
    """
    peak = max(point.nbytes for point in points)
    near = limit_bytes < FAR * peak
    top = 1.05 * (max(peak, limit_bytes) if near else peak)
    spans = list(loop_spans(points))
    width = (WIDTH - LEFT) / len(points)
    bottom = TOP + HEIGHT

    def height(nbytes: float) -> float:
        return bottom - HEIGHT * nbytes / top

    parts = []
    for share in (0.25, 0.5, 0.75, 1.0):
        y = height(share * top / 1.05)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{format_bytes(round(share * top / 1.05))}</text>')
    for k, point in enumerate(points):
        y = height(point.nbytes)
        title = escape(f"{format_bytes(point.nbytes)}: {point.what}" + (f", {point.place}" if point.place else ""))
        kind = "bar peak" if point.nbytes == peak else "bar"
        parts.append(
            f'<rect class="{kind}" tabindex="0" role="button" data-points="{which}" data-point="{k}" x="{LEFT + k * width:.2f}" '
            f'y="{y:.1f}" width="{width:.2f}" height="{bottom - y:.1f}"><title>{title}</title></rect>'
        )
    if near:
        y = height(limit_bytes)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
    y = height(limit_bytes) - 4 if near else TOP + 8
    above = "" if near else ", above this picture"
    parts.append(f'<text class="limit" x="{LEFT + 6}" y="{max(y, 10):.1f}">limit {format_bytes(limit_bytes)}{above}</text>')
    for depth, start, end, loop in spans:
        x, y = LEFT + start * width, bottom + 6 + depth * LOOP_HEIGHT
        parts.append(f'<rect class="loop" x="{x:.2f}" y="{y}" width="{(end - start) * width:.2f}" height="{LOOP_HEIGHT - 4}"/>')
        parts.append(f'<text class="loop" x="{x + 4:.2f}" y="{y + 11}">loop over {escape(loop)}</text>')
    depths = 1 + max((depth for depth, *_ in spans), default=-1)
    full = bottom + 8 + depths * LOOP_HEIGHT
    return f'<svg viewBox="0 0 {WIDTH} {full}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
