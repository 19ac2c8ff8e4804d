"""The chart of the page: memory before and after on one scale, stacked by role, with the limit, the peaks and the loops.

Areas are SVG that stretches to the width of the window; all text is HTML at the same places, so that it keeps its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from eqsat_mem.reports.parts import ROLES, HeldPart, by_role
from eqsat_mem.reports.scale import Scale, label_rows, scale_of
from eqsat_mem.reports.timeline import Point
from eqsat_mem.units import count, format_bytes

CLEAR = 0.13
"""The share of the height around the limit in which no tick has a label."""


LETTERS = 22
"""The letters of a loop's label that fit into the width of a timeline on a narrow screen."""


@dataclass(frozen=True)
class Panel:
    """A timeline in the chart: its name in the page's data, its title, its points, and the parts of each."""

    which: str
    title: str
    points: Sequence[Point]
    parts: Sequence[Sequence[HeldPart]]

    @property
    def peak(self) -> int:
        """The position of the highest point."""
        return max(range(len(self.points)), key=lambda k: self.points[k].nbytes)


def chart_html(panels: Sequence[Panel], limit_bytes: int) -> str:
    """Return the chart with a slider that goes through the points of all panels, and a legend."""
    scale = scale_of([panel.points[panel.peak].nbytes for panel in panels], limit_bytes)
    total = sum(len(panel.points) for panel in panels)
    start = total - len(panels[-1].points) + panels[-1].peak
    used = {part.role for panel in panels for parts in panel.parts for part in parts}
    legend = "".join(f'<li><i class="chip {css_class(role)}"></i>{role}</li>' for role in ROLES if role in used)
    return (
        f'<div class="chart"><div class="axis" aria-hidden="true">{"".join(_axis(scale, limit_bytes))}</div>\n'
        f'<div class="panels">{"".join(_panel(panel, scale, limit_bytes) for panel in panels)}</div></div>\n'
        f'<p class="slider"><label for="point">held at step</label> '
        f'<input type="range" id="point" min="0" max="{total - 1}" value="{start}"/></p>\n'
        f'<ul class="legend">{legend}{_limit_note(scale, limit_bytes)}</ul>'
    )


def css_class(role: str) -> str:
    """The class of elements in the colour of a role."""
    return role.replace(" ", "-")


def role_styles() -> str:
    """The colours of roles as CSS, for light and dark."""
    light, dark = ("".join(f"--{css_class(role)}: {pair[k]}; " for role, pair in ROLES.items()) for k in (0, 1))
    uses = "".join(f".{css_class(role)} {{ --role: var(--{css_class(role)}); }}\n" for role in ROLES)
    return f":root {{ {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n{uses}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _axis(scale: Scale, limit_bytes: int) -> Iterator[str]:
    for tick in scale.ticks:
        if not scale.limit_is_near or abs(tick - limit_bytes) > CLEAR * scale.top:
            yield f'<span style="bottom: {_percent(tick / scale.top)}">{format_bytes(tick)}</span>'
    if scale.limit_is_near:
        yield f'<span class="limit" style="bottom: {_percent(limit_bytes / scale.top)}">limit {format_bytes(limit_bytes)}</span>'


def _limit_note(scale: Scale, limit_bytes: int) -> str:
    above = "" if scale.limit_is_near else ", above this picture"
    return f'<li class="limit"><i class="dash"></i>limit {format_bytes(limit_bytes)}{above}</li>'


def _panel(panel: Panel, scale: Scale, limit_bytes: int) -> str:
    peak = panel.points[panel.peak]
    at = (panel.peak + 0.5) / len(panel.points)
    grid = (f'<line class="grid" x1="0" x2="1000" y1="{_y(tick, scale)}" y2="{_y(tick, scale)}"/>' for tick in scale.ticks)
    pictured = [*grid, *_areas(panel, scale)]
    if scale.limit_is_near:
        pictured.append(f'<line class="limit" x1="0" x2="1000" y1="{_y(limit_bytes, scale)}" y2="{_y(limit_bytes, scale)}"/>')
    label = f"Memory {panel.title}: {format_bytes(peak.nbytes)} at the peak, {peak.what}, over {count(len(panel.points), 'step')}"
    side = "start" if at < 0.2 else "end" if at > 0.8 else "middle"
    return (
        f'<div class="panel"><h3>{panel.title}</h3>\n'
        f'<div class="plot" data-panel="{panel.which}">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{''.join(pictured)}</svg>"
        f'<span class="peak {side}" style="left: {_percent(at)}; bottom: {_percent(peak.nbytes / scale.top)}">'
        f"{format_bytes(peak.nbytes)}</span>"
        f'<span class="cursor" style="width: {_percent(1 / len(panel.points))}" hidden=""></span></div>\n'
        f'<div class="loops">{"".join(_loops(panel.points))}</div></div>'
    )


def _y(nbytes: float, scale: Scale) -> str:
    return f"{1000 * (1 - nbytes / scale.top):.1f}"


def _areas(panel: Panel, scale: Scale) -> Iterator[str]:
    """One area per role, stacked on those before it."""
    low = [0] * len(panel.points)
    roles = [by_role(parts) for parts in panel.parts]
    for role in ROLES:
        high = [below + of[role] for below, of in zip(low, roles, strict=True)]
        if high != low:
            outline = [*_steps(high, scale), *reversed(list(_steps(low, scale)))]
            yield f'<path class="area {css_class(role)}" d="M{" ".join(outline)}Z"/>'
        low = high


def _steps(heights: Sequence[int], scale: Scale) -> Iterator[str]:
    """The corners of the line over the points, in which points of one height in a row have two."""
    for k, height in enumerate(heights):
        for x in (k, k + 1):
            beside = heights[k - 1 : k] if x == k else heights[k + 1 : k + 2]
            if list(beside) != [height]:
                yield f"{1000 * x / len(heights):.1f},{_y(height, scale)}"


def _loops(points: Sequence[Point]) -> Iterator[str]:
    rows = 0
    for row, start, end, left, text in label_rows(points, LETTERS):
        rows = max(rows, row + 1)
        top, wide = f"top: {1.7 * row:.1f}em", (end - start) / len(points)
        yield f'<i style="left: {_percent(start / len(points))}; width: {_percent(wide)}; {top}"></i>'
        at = f"right: {_percent(1 - end / len(points))}" if 0 < left < start / len(points) else f"left: {_percent(left)}"
        yield f'<span style="{at}; {top}" title="loop {escape(text)}">{escape(text)}</span>'
    yield f'<b style="height: {1.7 * rows:.1f}em"></b>'
