"""The page of a plan, with everything that it needs inside, so that it opens anywhere and asks no network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.frontend.load import load_with_variables
from eqsat_mem.ir import Program
from eqsat_mem.passes import named
from eqsat_mem.reports.explanation import Explanation, LoopEffect, NeededRule
from eqsat_mem.reports.page.classes import class_data, plan_classes
from eqsat_mem.reports.page.drawing import timeline_svg
from eqsat_mem.reports.page.programs import jaxpr_html, source_html
from eqsat_mem.reports.plan import Plan
from eqsat_mem.reports.plan_text import figures
from eqsat_mem.reports.record import Record
from eqsat_mem.reports.timeline import Point
from eqsat_mem.reports.words import describe
from eqsat_mem.units import format_bytes, time_text

FOLDER = Path(__file__).parent
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The browser's permission to load files for the page: none."""


def page(plan: Plan) -> str:
    """The report of a plan that ``optimize`` made, as HTML. The plan is explained, so this takes as long as :meth:`Plan.explain`.

    Raises:
        ValueError: for a plan that was put together by hand.
    """
    why = plan.explain()
    record: Record = plan.record
    values = _Values(plan, record)
    before, after = record.timelines(plan)
    data = {
        "classes": values.classes,
        "before": _points(record.before.ex.program, before, values.of_before),
        "after": _points(plan.program, after, values.of_plan),
    }
    sections = (
        _section("memory", "Memory over the program", _timelines(plan, before, after)),
        _section("loops", "Loops", _loops(why.loops)),
        _section("rules", "Rules", _rules(why)),
        _section("rivals", "Runners-up", _rivals(why)),
        _section("programs", "Programs", _programs(plan, record, values)),
    )
    return _HTML.format(
        title=escape(f"{plan.name}: plan"),
        policy=escape(POLICY),
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        head=_head(plan),
        sections="\n".join(sections),
        data=json.dumps(data).replace("</", "<\\/"),
        script=(FOLDER / "page.js").read_text(encoding="utf-8"),
    )


_HTML = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="{policy}"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
{head}
{sections}
</main>
<aside id="detail" aria-live="polite"><p class="hint">Click a value, or a point of a timeline.
A jaxpr that is called twice has other values at each call, which are not linked.</p></aside>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


class _Values:
    """The e-classes of the values of three programs: the jaxpr's variables, the plan's terms, and those of the program as written.

    Where the plan is of another form of the program (its scans fold or checkpoint what they stacked), it comes from another e-graph. The
    classes of that one are numbered on.
    """

    def __init__(self, plan: Plan, record: Record) -> None:
        seen, best = record.search()
        view = seen.searched[0].view
        winner = next((found.view for found in seen.searched if found.schedule is best), view)
        shift = 0 if winner is view else len(view.nodes)
        loaded, variables = load_with_variables(record.jaxpr, record.arg_names, record.backend.preferences, named(record.loaded.passes))
        same = dict(zip(loaded.reachable(), view.program.reachable()))  # bodies were planned in between, which keeps the order
        self.of_loaded = {t: view.class_of[u] for t, u in same.items()}
        self.of_variables = {variable: self.of_loaded[t] for variable, t in variables.items() if t in self.of_loaded}
        self.of_before = dict(view.class_of)
        repeated = str(best.ex.program) == str(plan.program)  # not where a limit in seconds had stopped the first search
        of_best, chosen = plan_classes(winner, best.ex) if repeated and not plan.unchanged else ({}, {})
        self.of_plan = self.of_before if plan.unchanged else {t: c + shift for t, c in of_best.items()}
        self.of_names = self._of_names(plan, record)
        called = {c: name for name, c in reversed(self.of_names.items())}
        written = plan_classes(view, Extraction(view.program))[1] if plan.unchanged else {}
        first = [*self.of_variables.values(), *self.of_before.values()]
        self.classes = class_data(view, record.backend, written if shift or plan.unchanged else chosen, first, called)
        self.classes |= class_data(winner, record.backend, chosen, of_best.values(), called, shift)

    def _of_names(self, plan: Plan, record: Record) -> dict[str, int]:
        """The classes of the emitted source's variables."""
        of_source = self.of_loaded if plan.unchanged else self.of_plan
        found = {name: of_source[t] for name, t in record.names.items() if t in of_source}
        arguments = zip(record.arg_names, map(self.of_variables.get, record.jaxpr.jaxpr.invars))
        return found | {name: c for name, c in arguments if c is not None and name in record.names and name not in found}


def _points(program: Program, points: Sequence[Point], classes: Mapping[int, int]) -> list[dict[str, Any]]:
    """Points of a timeline as data: the values that are held, largest first."""
    return [
        {
            "what": point.what,
            "place": point.place,
            "loops": list(point.loops),
            "size": format_bytes(point.nbytes),
            "held": [
                {"what": describe(program, t), "size": format_bytes(nbytes), "share": nbytes / point.nbytes, "class": classes.get(t)}
                for t, nbytes in sorted(point.held, key=lambda pair: -pair[1])
            ],
        }
        for point in points
    ]


# --- sections -----------------------------------------------------------------------------------------


def _section(name: str, title: str, body: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>\n{body}\n</section>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of HTML cells."""
    columns = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>"


def _head(plan: Plan) -> str:
    verdict = "left as written" if plan.unchanged else "rewritten"
    rows = [[escape(cell) for cell in row] for row in figures(plan)]
    return f"<h1>{escape(plan.name)} <small>{verdict}</small></h1>\n{_table(rows[0], rows[1:])}"


def _timelines(plan: Plan, before: Sequence[Point], after: Sequence[Point]) -> str:
    parts = []
    for which, title, points in (("before", "As written", before), ("after", "As planned", after)):
        peak = max(points, key=lambda point: point.nbytes)
        where = escape(", ".join(filter(None, (peak.what, peak.place))))
        parts.append(f"<h3>{title}: {format_bytes(peak.nbytes)} at {where}</h3>")
        parts.append(timeline_svg(points, plan.limit_bytes, f"memory, {title.lower()}", which))
    return "\n".join(parts)


def _loops(effects: Sequence[LoopEffect]) -> str:
    if not effects:
        return "<p>No loops.</p>"
    items = []
    for effect in effects:
        once = f"In one turn: {format_bytes(effect.one_turn_peak_bytes)}, {time_text(effect.one_turn_s)}; {effect.balance()}."
        loop, indent = str(effect.loop).strip(), 2 * effect.loop.depth
        items.append(f'<li style="margin-left: {indent}em">{escape(loop)}<br/><small>{escape(once)}</small></li>')
    return f"<ul>{''.join(items)}</ul>"


def _rules(why: Explanation) -> str:
    if why.unchanged:
        return "<p>None: the function runs as it was written.</p>"
    needed = _table(("step", "rule", "sound", "equation", "without it"), map(_rule, why.rules, [why] * len(why.rules)))
    spare = ", ".join(map(escape, why.spare_rules)) or "none"
    return f"{needed}\n<details><summary>{len(why.spare_rules)} rules matched and are not needed</summary><p>{spare}</p></details>"


def _rule(n: NeededRule, why: Explanation) -> list[str]:
    without = "others can stand in" if n.without.reached else f"{n.without}; {why.shortfall(n.without)}"
    place = f"<small>{escape(n.rule.place)}</small>"
    return [str(n.step), f"<b>{escape(n.rule.name)}</b><br/>{place}", n.rule.sound, escape(n.rule.equation), escape(without)]


def _rivals(why: Explanation) -> str:
    rows = ([format_bytes(r.peak_bytes), time_text(r.seconds), escape(r.loops), escape(r.program), escape(r.why)] for r in why.rivals)
    return _table(("peak", "time", "loops", "program", "why it lost"), rows)


def _programs(plan: Plan, record: Record, values: _Values) -> str:
    original = jaxpr_html(record.jaxpr, record.arg_names, values.of_variables)
    emitted = source_html(plan.source, values.of_names)
    return (
        f'<div class="beside"><div><h3>Original, as traced</h3><pre id="original">{original}</pre></div>\n'
        f'<div><h3>Emitted</h3><pre id="emitted">{emitted}</pre></div></div>'
    )
