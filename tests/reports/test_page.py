"""The report page without a browser: well-formed, nothing from outside, and every value and e-class that it names is in it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from datetime import datetime
from functools import cache
from html import escape, unescape
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest

import eqsat_mem
from eqsat_mem.__main__ import main
from eqsat_mem.ir.program import Source
from eqsat_mem.reports.page import page
from eqsat_mem.reports.page.chart import Panel
from eqsat_mem.reports.page.classes import plan_classes
from eqsat_mem.reports.page.document import FOLDER
from eqsat_mem.reports.page.lines import columns_of, lines_html
from eqsat_mem.reports.page.programs import button, jaxpr_html, source_html
from eqsat_mem.reports.parts import HeldPart
from eqsat_mem.reports.plan_text import headline
from eqsat_mem.reports.timeline import Point
from tests.cli.test_cli import KERNEL, error_of
from tests.reports import test_explain
from tests.tiers import tiered

VOID = {"meta", "br", "input"}
NAMES = ["bound", "longer", "scan"]
RULES = ("associativity", "distance", "simplify", "splitting")
"""Reasons take a search for each rule that matched."""


def planned(name):
    return test_explain.planned(name, RULES)


@cache
def written(name):
    return page(planned(name), why_seconds=1e6)


@cache
def at_once(name):
    return page(planned(name), command="eqsat-mem report <here> & there")


class Reader(HTMLParser):
    """Reads a page, and minds that every tag is closed by its own."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("id")))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, name in self.open:
            if name:
                self.texts[name] = self.texts.get(name, "") + data


def data_of(name):
    return json.loads(Reader(written(name)).texts["data"])


@pytest.mark.parametrize("name", tiered(NAMES, ["longer"], ["scan"]))
def test_it_is_well_formed_and_asks_for_nothing(name):
    reader = Reader(written(name))
    assert {"html", "head", "body", "main", "aside", "svg", "table", "pre", "script"} <= {tag for tag, _ in reader.tags}
    references = {"src", "href", "srcset", "action", "data", "poster", "xlink:href", "background"}
    ids = {attrs["id"] for _, attrs in reader.tags if "id" in attrs}
    used = [attrs[name] for _, attrs in reader.tags for name in references & attrs.keys()]
    assert used
    assert {f"#{name}" for name in ids} >= set(used)
    (policy,) = (attrs["content"] for _, attrs in reader.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ")
    for way in ("http://", "https://", "@import", "url(", "fetch(", "XMLHttpRequest", "import("):
        assert way not in written(name)


@pytest.mark.parametrize("name", tiered(NAMES, ["longer"], ["scan"]))
def test_every_class_that_is_named_is_there(name):
    data, reader = data_of(name), Reader(written(name))
    buttons = {attrs["data-class"] for _, attrs in reader.tags if "data-class" in attrs}
    held = {str(home) for *_, home in data["tensors"] if home is not None}
    inside = {c for found in data["classes"].values() for node in found["nodes"] for c in re.findall(r"\{(\d+)\}", node["text"])}
    assert buttons
    assert buttons | held | inside <= data["classes"].keys()
    assert all(found["nodes"] for found in data["classes"].values())


def extracted(plan):
    """The terms of a plan's program that were extracted; what joins sums to contractions is in no class."""
    origin, reachable = plan.schedule.ex.origin, plan.program.reachable()
    return {t for t in reachable if origin is None or t in origin[1]}


@pytest.mark.parametrize("name", tiered(["bound", "longer"], ["longer"], []))
def test_every_value_of_the_programs_has_a_class(name):
    plan = planned(name)
    original = jaxpr_html(plan.record.jaxpr, plan.record.arg_names, dict.fromkeys(variables(plan.record.jaxpr.jaxpr), 0))
    shown = Reader(written(name))
    assert shown.texts["original"] == Reader(original and f'<pre id="a">{original}</pre>').texts["a"]
    values = {var for eqn in plan.record.jaxpr.jaxpr.eqns for var in eqn.outvars} | set(plan.record.jaxpr.jaxpr.invars)
    in_original = re.split('<pre id="original"[^>]*>', written(name))[1].split("</pre>")[0]
    assert len({*re.findall(r'data-class="\d+">(\w+)<', in_original)}) >= len(values)
    in_source = re.split('<pre id="emitted"[^>]*>', written(name))[1].split("</pre>")[0]
    assert {*re.findall(r'data-class="\d+">(\w+)<', in_source)} == {name for name, t in plan.record.names.items() if t in extracted(plan)}
    assigned = {*re.findall(r"^ +(\w+) = ", plan.source, re.MULTILINE)} - {"state"}
    views = {found for found in assigned if re.search(rf"^ +{found} = \w+(\.reshape\(.*\)|\[.*\])$", plan.source, re.MULTILINE)}
    assert assigned - views <= {*plan.record.names}


def variables(jaxpr):
    return [*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]


@pytest.mark.parametrize("name", tiered(NAMES, ["longer"], ["scan"]))
def test_the_plan_chooses_one_way_for_each_of_its_values(name):
    data, plan = data_of(name), planned(name)
    chosen = [sum(node["chosen"] for node in found["nodes"]) for found in data["classes"].values()]
    assert set(chosen) <= {0, 1}
    seen, best = plan.record.search()
    classes, _ = plan_classes(next(found.view for found in seen.searched if found.schedule is best), best.ex)
    assert {t for t in classes if t in plan.program.reachable()} == extracted(plan)
    assert sum(chosen) == len(set(classes.values()))
    written_nodes = sum(node["written"] for found in data["classes"].values() for node in found["nodes"])
    assert written_nodes == len(plan.record.before.ex.program.reachable())


def test_other_ways_are_there():
    data = data_of("longer")
    most = max(data["classes"].values(), key=lambda found: len(found["nodes"]))
    assert len(most["nodes"]) > 2
    assert {"splits-dot"} <= most["facts"].keys()
    nodes = [node for found in data["classes"].values() for node in found["nodes"]]
    assert any(node["chosen"] and not node["written"] for node in nodes)
    assert any(node["written"] and not node["chosen"] for node in nodes)


@pytest.mark.parametrize("name", tiered(NAMES, ["longer"], ["scan"]))
def test_every_point_is_there_and_adds_up(name):
    data, plan = data_of(name), planned(name)
    before, after = plan.record.timelines(plan)
    assert [attrs["data-panel"] for _, attrs in Reader(written(name)).tags if "data-panel" in attrs] == ["before", "after"]
    (slider,) = (attrs for tag, attrs in Reader(written(name)).tags if tag == "input")
    peaks = [max(range(len(points)), key=lambda k: points[k].nbytes) for points in (before, after)]
    assert (slider["min"], slider["max"], slider["value"]) == ("0", str(len(before) + len(after) - 1), str(len(before) + peaks[1]))
    assert [panel["peak"] for panel in data["panels"]] == peaks
    for which, points in (("before", before), ("after", after)):
        assert [point["nbytes"] for point in data["points"][which]] == [point.nbytes for point in points]
        for point in data["points"][which]:
            more = point["more"][1] if point["more"] else 0
            assert sum(nbytes for _, nbytes in point["held"]) + more == point["nbytes"]
            assert all(0 <= number < len(data["tensors"]) for number, _ in point["held"])


@pytest.mark.parametrize("name", tiered(NAMES, ["longer"], ["scan"]))
def test_the_reasons_are_there(name):
    text, why = written(name), planned(name).explain()
    for part in ("Memory", "the program as traced", "The emitted source"):
        assert part in text
    assert (f"runners-up: {len(why.rivals)}" in text) == bool(why.rivals)
    for n in why.rules:
        assert f"<b>{n.rule.name}</b>" in text
    for rule in why.spare_rules:
        assert rule in text
    assert len(why.loops) == Reader(text).texts["loops"].count("Without this loop")


def test_a_program_left_as_it_was():
    plan = eqsat_mem.optimize(lambda x: jnp.sin(x) + 1, memory_limit="1GiB", verify=False).plan(jax.ShapeDtypeStruct((8,), jnp.float32))
    text = page(plan, why_seconds=1e6)
    assert Reader(text).texts["why"].count("The function runs as it was written: it fits") == 1
    assert [attrs["data-panel"] for _, attrs in Reader(text).tags if "data-panel" in attrs] == ["before"]
    assert re.findall(r'data-class="\d+">(\w+)<', re.split('<pre id="emitted"[^>]*>', text)[1]) != []


def counting(plan):
    """Counts the searches of a record that is asked for the first time."""
    counted = []
    again = plan.record.again
    record = dataclasses.replace(plan.record, again=lambda **how: counted.append(how) or again(**how), _searches=[], _explained=[])
    return dataclasses.replace(plan, record=record), counted


def test_loops_in_bodies_of_the_users_loops_are_listed():
    def spread(points, steps):
        def body(at, step):
            pull = jnp.exp(-jnp.sum((at[:, None] - points[None]) ** 2, -1))
            return at + step * (pull @ points), pull.max()

        return jax.lax.scan(body, points, steps)

    shapes = jax.ShapeDtypeStruct((400, 3), jnp.float32), jax.ShapeDtypeStruct((5,), jnp.float32)
    plan = eqsat_mem.optimize(spread, memory_limit="200kB", verify=False).plan(*shapes)
    listed = re.search(r'<section id="loops">(.*?)</section>', page(plan), re.DOTALL)[1]
    inner = [loop for loop in plan.loops if loop.inside]
    assert inner
    assert listed.count("<li") == len(plan.loops)
    assert all(escape(str(loop).strip()) in listed for loop in inner)


def test_a_page_without_reasons_searches_for_nothing():
    plan, counted = counting(planned("bound"))
    text = page(plan)
    assert counted == []
    reader = Reader(text)
    assert "Not asked: which rules the plan needs" in reader.texts["why"]
    assert not [attrs for _, attrs in reader.tags if "data-class" in attrs]
    assert json.loads(reader.texts["data"])["classes"] == {}


class Clock:
    """A clock that goes on by a second whenever it is read."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        self.seconds += 1
        return self.seconds


def test_reasons_stop_when_their_time_is_over_and_go_on_when_asked_again():
    plan, counted = counting(planned("chain"))
    nothing = page(plan, 0, now=Clock())
    assert counted == []
    assert "0 s were too short for a single search" in Reader(nothing).texts["why"]
    first = Clock()
    complete = dataclasses.replace(plan, record=dataclasses.replace(plan.record, _searches=[], _explained=[])).record
    whole = complete.explain(plan, 1e9, first)
    assert whole.unasked == []
    counted.clear()
    clock = Clock()
    part = plan.record.explain(plan, first.seconds // 2, clock)  # whole seconds, as the clock's
    assert clock.seconds <= first.seconds // 2 + 2
    assert part.unasked
    assert part.spare_rules == []
    assert {n.rule.name for n in part.rules} <= {n.rule.name for n in whole.rules}
    assert {n.rule.name for n in part.rules} | set(part.unasked) == {n.rule.name for n in whole.rules} | set(whole.spare_rules)
    assert f"not asked, as the time was too short: {', '.join(part.unasked)}" in str(part)
    shown = page(plan, 0, now=Clock())
    assert "0 s were too short to ask of each rule" in Reader(shown).texts["why"]
    again = plan.record.explain(plan)
    assert ([n.rule.name for n in again.rules], again.spare_rules) == ([n.rule.name for n in whole.rules], whole.spare_rules)
    assert plan.explain() is again


@pytest.mark.parametrize("name", tiered(NAMES, ["bound", "scan"]))
def test_bytes_per_line_add_up(name):
    plan = planned(name)
    text = at_once(name).split('<section id="lines">')[1].split("</section>")[0]
    rows = [re.findall(r'<td class="number bytes"[^>]*>(.*?)</td>', row) for row in text.split("<tr>")]
    numbers = [[int((re.findall(r'value="(\d+)"', cell) or ["0"])[0]) for cell in row] for row in rows if row]
    *lines, total = numbers
    assert [sum(column) for column in zip(*lines, strict=True)] == total
    assert total[1:] == [plan.original_peak_bytes, plan.peak_bytes]
    before, _ = plan.record.timelines(plan)
    made = [live.nbytes for point in before for live in point.held if live.term in point.terms]
    assert 0 < total[0] <= sum(made)
    function = test_explain.CASES[name][0]
    assert escape(inspect.getsource(function).splitlines()[-1]) in text


def test_a_file_that_cannot_be_read_has_its_lines_by_number():
    source = Source("/nowhere/model.py", 7, "LM.<call>")
    part = HeldPart("f32[8] exp", 32, "temporaries", source, 3)
    panel = Panel("before", "as written", [Point("f32[8] exp", "", 32, terms=(3,))], [[part]])
    text = lines_html(columns_of(panel, [panel]), ["makes", "peak"])
    Reader(text)
    assert "/nowhere/model.py" in text
    assert '<td class="number">7</td><td><code>(LM.&lt;call&gt;)</code></td>' in text
    assert columns_of(panel, [panel]).total == (32, 32)


@pytest.mark.slow
def test_pictures_have_no_buttons_inside_and_stops_are_few():
    reader = Reader(written("bound"))
    inside = written("bound").split("<svg ")[1].split("</svg>")[0]
    assert 'role="img"' in inside
    assert "button" not in inside
    assert "tabindex" not in inside
    stops = [(tag, attrs) for tag, attrs in reader.tags if tag in ("a", "input", "button", "summary") or "tabindex" in attrs]
    reached = [attrs for _, attrs in stops if attrs.get("tabindex", "0") == "0"]
    assert sum(attrs.get("class") == "value" for _, attrs in stops) > 20
    assert len(reached) < 20
    labelled = {attrs["for"] for tag, attrs in reader.tags if tag == "label"}
    assert {attrs["id"] for tag, attrs in reader.tags if tag == "input"} == labelled


def test_the_verdict_comes_first_and_the_foot_says_how_it_was_made():
    plan, text = planned("bound"), at_once("bound")
    assert f'<p class="verdict">{escape(headline(plan))}</p>' in text
    assert text.index("verdict") < text.index('<section id="memory">')
    foot = text.split("<footer>")[1].split("</footer>")[0]
    assert "eqsat-mem report &lt;here&gt; &amp; there" in foot
    assert f"eqsat_mem {eqsat_mem.__version__}, JAX {jax.__version__}" in foot
    assert datetime.fromisoformat(re.findall('datetime="([^"]+)"', foot)[0]).tzinfo is not None


def luminance(colour):
    parts = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_text_can_be_read_in_light_and_in_dark(scheme):
    style = (FOLDER / "page.css").read_text()
    assert "color-scheme: light dark" in style
    colours = dict(re.findall(r"--(\w+): (#\w{6})", style.split("@media (prefers-color-scheme: dark)")[scheme]))
    for ground in ("ground", "raised"):
        for ink in ("ink", "soft", "link", "hot"):
            assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    assert contrast(colours["ink"], colours["mark"]) >= 4.5
    assert contrast(colours["ink"], colours["bar"]) >= 4.5


def test_text_of_the_users_is_text():
    source = 'def f(a):\n    # <b> & "quotes"\n    a_2 = a.a < 3\n    return "</script>" + a_2\n'
    shown = source_html(source, {"a": 1, "a_2": 2})
    assert "</script>" not in shown
    assert unescape(re.sub("<[^>]*>", "", shown)) == source
    assert re.findall(r'data-class="(\d)"', shown) == ["1", "2", "1", "2"]
    assert button("<x>", None) == "&lt;x&gt;"
    assert "<\\/" not in source_html("x = 1\n", {})


def test_a_program_in_several_lines():
    source = "def f(x):\n    y = (x +\n         x)\n\n    return y"
    assert unescape(re.sub("<[^>]*>", "", source_html(source, {"x": 1, "y": 2}))) == source


def test_the_command_writes_it(tmp_path, capsys):
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    output = tmp_path / "report.html"
    rules = ["--only", "distance", "--only", "splitting"]
    command = ["report", f"{path}:matvec", "--args", f"{path}:make_args", "--limit", "2MiB", *rules, "-o"]
    assert main([*command, str(output)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {output} (")
    text = output.read_text(encoding="utf-8")
    assert "kernel.py:8 (matvec)" in text
    assert unescape(text).count(f"eqsat-mem report {path}:matvec --args {path}:make_args --limit 2MiB") == 1
    assert "Not asked: " in Reader(text).texts["why"]
    assert main([*command, str(output), "--why", "0"]) == 0
    assert "0 s were too short for a single search" in Reader(output.read_text(encoding="utf-8")).texts["why"]
    with pytest.raises(SystemExit):
        main([*command, str(output), "--why", "long"])
    assert "a number of seconds is needed, not 'long'." in capsys.readouterr().err
    missing = tmp_path / "nowhere" / "report.html"
    assert error_of(capsys, *command, str(missing)) == f"there is no folder {missing.parent} to write report.html to."
    assert error_of(capsys, *command, str(tmp_path)) == f"{tmp_path} cannot be written: Is a directory."
