"""The page of a plan, with everything that it needs inside, so that it opens anywhere and asks no network."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path

import jax

from eqsat_mem import __version__
from eqsat_mem.options import check_seconds
from eqsat_mem.reports.explain import loop_effects
from eqsat_mem.reports.explanation import Explanation, LoopEffect, NeededRule
from eqsat_mem.reports.page.chart import Panel, chart_html, role_styles
from eqsat_mem.reports.page.lines import columns_of, lines_html
from eqsat_mem.reports.page.points import point_data
from eqsat_mem.reports.page.programs import jaxpr_html, source_html
from eqsat_mem.reports.page.values import ShownValues
from eqsat_mem.reports.parts import parts_of
from eqsat_mem.reports.plan import LoopSummary, Plan
from eqsat_mem.reports.plan_text import changes_of, figures, headline
from eqsat_mem.reports.record import Record
from eqsat_mem.units import count, format_bytes, time_text

FOLDER = Path(__file__).parent
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The browser's permission to load files for the page: none."""


def page(plan: Plan, why_seconds: float | None = None, command: str = "", now: Callable[[], float] = time.monotonic) -> str:
    """The report of a plan that ``optimize`` made, as HTML, which is written at once unless reasons are asked for.

    Args:
        plan: the plan.
        why_seconds: the seconds for the searches that reasons take: the rules that are needed, the runners-up, and the e-classes of values.
            None asks for no reasons. The page says what the time was too short for.
        command: the command line that the page was asked for with, for its foot.
        now: the clock for ``why_seconds``, in seconds.

    Raises:
        OptionError: if ``why_seconds`` is no number.
        ValueError: for a plan that was put together by hand.
    """
    if why_seconds is not None:
        check_seconds(why_seconds, "why_seconds")
    plan = plan.with_search()
    record: Record = plan.record
    why = None if why_seconds is None else record.explain(plan, why_seconds, now)
    values = ShownValues(plan, record) if why is not None and record.searched else None
    panels = _panels(plan, record)
    known = {} if values is None else {"before": values.of_before, "after": values.of_plan}
    data = {"classes": {} if values is None else values.classes, **point_data(panels, known)}
    sections = (
        _section("memory", "Memory", chart_html(panels, plan.limit_bytes) + _measured(plan)),
        _section("loops", "How", "" if plan.unchanged else _loops(plan)),
        _section("lines", "Your source", _lines(panels)),
        _section("source", "The emitted source", _source(plan, values)),
        _section("why", "Why", _why(plan, record, why, values, why_seconds)),
    )
    return _HTML.format(
        title=escape(f"{plan.name}: plan"),
        policy=escape(POLICY),
        style=(FOLDER / "page.css").read_text(encoding="utf-8") + role_styles(),
        head=_head(plan),
        sections="\n".join(filter(None, sections)),
        foot=_foot(plan, command),
        data=json.dumps(data, separators=(",", ":")).replace("</", "<\\/"),
        script=(FOLDER / "page.js").read_text(encoding="utf-8"),
    )


_HTML = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="{policy}"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
{head}
{sections}
{foot}
</main>
<aside aria-label="Details"><details open=""><summary id="detail-title">Held at the peak</summary>
<div id="detail" aria-live="polite"></div></details></aside>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def _panels(plan: Plan, record: Record) -> list[Panel]:
    """The timelines of the program as written and, where it is another, of the plan."""
    before, after = record.timelines(plan)
    written = Panel("before", "as written", before, parts_of(record.before, before, as_written=True))
    return [written] if plan.unchanged else [written, Panel("after", "as planned", after, parts_of(plan.schedule, after))]


# --- sections -----------------------------------------------------------------------------------------


def _section(name: str, title: str, body: str) -> str:
    """A section with a heading that is a link to itself; nothing if it has no body."""
    return f'<section id="{name}"><h2><a href="#{name}">{title}</a></h2>\n{body}\n</section>' if body else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int]) -> str:
    """A table of HTML cells, in which the columns ``numbers`` stand to the right."""
    kinds = [' class="number"' if k in numbers else "" for k in range(len(head))]
    columns = "".join(f"<th{kind}>{cell}</th>" for kind, cell in zip(kinds, head, strict=True))
    body = "".join(f"<tr>{''.join(f'<td{kind}>{cell}</td>' for kind, cell in zip(kinds, row, strict=True))}</tr>\n" for row in rows)
    return f'<div class="wide"><table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>'


def _head(plan: Plan) -> str:
    rows = [[escape(cell) for cell in row] for row in figures(plan)]
    notes = "".join(f"<p>{escape(doubt)}</p>" for doubt in plan.doubts)
    return (
        f'<header><h1>{escape(plan.name)}</h1>\n<p class="verdict">{escape(headline(plan))}</p>{notes}\n'
        f"<details><summary>figures</summary>{_table(rows[0], rows[1:], (1, 2))}</details></header>"
    )


def _measured(plan: Plan) -> str:
    """A paragraph on where the figures of the chart come from, with the bytes of the compiled plan."""
    held, peak = plan.compiled_peak_bytes, format_bytes(plan.peak_bytes)
    compiled = "" if held is None else f"; XLA reserves {format_bytes(held)} for the compiled plan, which is what the limit bounds"
    return f'<p class="hint">Predicted for each step of the program, loop bodies once: {peak} at most{compiled}.</p>'


def _loops(plan: Plan) -> str:
    """A list of what passes did, of the plan's own loops with their effects, and of those in the bodies of other loops."""
    changes = [f"<li>{escape(change)}</li>" for change in changes_of(plan)]
    if not plan.loops and not changes:
        return "<p>No loops: other operations in another order.</p>"
    own = [_loop(effect.loop, _effect(effect)) for effect in loop_effects(plan.schedule)]
    again = [f"<li>Computed again rather than kept: {escape('; '.join(plan.computed_again))}</li>"] if plan.computed_again else []
    return f"<ul>{''.join([*changes, *own, *(_loop(loop) for loop in plan.loops if loop.inside), *again])}</ul>"


def _loop(loop: LoopSummary, effect: str = "") -> str:
    notes = filter(None, (loop.results() if loop.never_whole else "", effect))
    small = "".join(f"<br/><small>{escape(note)}</small>" for note in notes)
    return f'<li style="margin-left: {2 * loop.depth}em">{escape(str(loop).strip())}{small}</li>'


def _effect(effect: LoopEffect) -> str:
    held, took = format_bytes(effect.one_turn_peak_bytes), time_text(effect.one_turn_s)
    return f"Without this loop, the rest as planned, it would hold {held} and take {took}."


def _lines(panels: Sequence[Panel]) -> str:
    titles = ["makes", *(f"peak {panel.title}" for panel in panels)]
    return (
        "<p>Bytes that each line makes in the program as written, and those of its values that are held at the peak. "
        f"A value that is computed on the way is not held.</p>\n{lines_html(columns_of(panels[0], panels), titles)}"
    )


def _source(plan: Plan, values: ShownValues | None) -> str:
    emitted = source_html(plan.source, {} if values is None else values.of_names)
    buttons = '<button type="button" id="copy">copy</button> <button type="button" id="download">download</button>'
    return (
        "<p>Plain JAX, without eqsat_mem: a function of the arrays of the arguments, in order, that returns those of the results.</p>\n"
        f'<p class="actions">{buttons} <span id="said" role="status"></span></p>\n'
        f'<pre id="emitted" tabindex="0" aria-label="The emitted source" data-file="{escape(plan.name)}.py">{emitted}</pre>'
    )


def _why(plan: Plan, record: Record, why: Explanation | None, values: ShownValues | None, seconds: float | None) -> str:
    if why is None:
        asks = "<code>eqsat_mem.page(plan, why_seconds=60)</code> asks, and <code>--why</code> on the command line"
        return f"<p>Not asked: which rules the plan needs, the runners-up and other ways to compute each value. {asks}.</p>"
    parts = [f'<p class="unasked">{escape(sentence)}</p>' for sentence in _not_reached(why, seconds)]
    if why.unchanged:
        parts.append("<p>The function runs as it was written: it fits, and nothing found is predicted to be much faster.</p>")
    elif why.searches:
        known = "needs" if not why.unasked else "is known to need so far"
        needed = _table(("step", "rule", "sound", "equation", "without it"), (_rule(n, why) for n in why.rules), (0,))
        spare = f"<p>Not needed: {', '.join(map(escape, why.spare_rules))}.</p>" if why.spare_rules else ""
        parts.append(_fold(f"{count(len(why.rules), 'rule')} that the plan {known}, of {_matched(why)} that matched", needed + spare))
    if why.rivals:
        rows = ([format_bytes(r.peak_bytes), time_text(r.seconds), escape(r.why), escape(r.loops), escape(r.program)] for r in why.rivals)
        rivals = _table(("peak", "time", "why it lost", "loops", "program"), rows, (0, 1))
        parts.append(_fold(f"runners-up: {len(why.rivals)}", rivals))
    if values is not None:
        original = jaxpr_html(record.jaxpr, record.arg_names, values.of_variables)
        hint = "<p>A click on a value, here or in the emitted source, shows every way that was found to compute it.</p>"
        parts.append(_fold("the program as traced, with e-classes", f'{hint}<pre id="original" tabindex="0">{original}</pre>'))
    return "\n".join(parts)


def _not_reached(why: Explanation, seconds: float | None) -> Iterable[str]:
    """Sentences on the searches that the time was too short for."""
    if not why.searches:
        yield f"{seconds:g} s were too short for a single search: rules, runners-up and e-classes are not known. --why takes more seconds."
    elif why.unasked:
        found = f"{seconds:g} s were too short to ask of each rule whether the plan needs it; searches made: {why.searches}."
        yield f"{found} Not asked: {', '.join(why.unasked)}."


def _matched(why: Explanation) -> int:
    return len(why.rules) + len(why.spare_rules) + len(why.unasked)


def _fold(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n{body}\n</details>"


def _rule(n: NeededRule, why: Explanation) -> list[str]:
    without = "others can stand in" if n.without.reached else f"{n.without}; {why.shortfall(n.without)}"
    place = f"<small>{escape(n.rule.place)}</small>"
    return [str(n.step), f"<b>{escape(n.rule.name)}</b><br/>{place}", n.rule.sound, escape(n.rule.equation), escape(without)]


def _foot(plan: Plan, command: str) -> str:
    when = datetime.now().astimezone()
    versions = f"eqsat_mem {__version__}, JAX {jax.__version__}, Python {platform.python_version()}"
    asked = f"<p><code>{escape(command)}</code></p>" if command else ""
    date = f'<time datetime="{when.isoformat(timespec="seconds")}">{when:%Y-%m-%d %H:%M %Z}</time>'
    device = f", for {escape(plan.device)}" if plan.device else ""
    return f"<footer><p>{date}, {escape(versions)}{device}</p>{asked}</footer>"
