"""The report page without a browser: well-formed, nothing from outside, and every value and e-class that it names is in it."""

from __future__ import annotations

import json
import re
from functools import cache
from html import unescape
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest

import eqsat_mem
from eqsat_mem.__main__ import main
from eqsat_mem.reports.page import page
from eqsat_mem.reports.page.classes import plan_classes
from eqsat_mem.reports.page.programs import button, jaxpr_html, source_html
from tests.cli.test_cli import KERNEL, error_of
from tests.reports import test_explain
from tests.tiers import tiered

VOID = {"meta", "br"}
NAMES = ["bound", "longer", "scan"]
RULES = ("associativity", "distance", "simplify", "splitting")
"""A page explains its plan, which takes a search for each rule that matched."""


def planned(name):
    return test_explain.planned(name, RULES)


@cache
def written(name):
    return page(planned(name))


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


@pytest.mark.parametrize("name", tiered(NAMES, ["longer"]))
def test_it_is_well_formed_and_asks_for_nothing(name):
    reader = Reader(written(name))
    assert {"html", "head", "body", "main", "aside", "svg", "table", "pre", "script"} <= {tag for tag, _ in reader.tags}
    references = {"src", "href", "srcset", "action", "data", "poster", "xlink:href", "background"}
    assert not [(tag, attrs) for tag, attrs in reader.tags if references & attrs.keys()]
    (policy,) = (attrs["content"] for _, attrs in reader.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ")
    for way in ("http://", "https://", "@import", "url(", "fetch(", "XMLHttpRequest", "import("):
        assert way not in written(name)


@pytest.mark.parametrize("name", tiered(NAMES, ["longer"]))
def test_every_class_that_is_named_is_there(name):
    data, reader = data_of(name), Reader(written(name))
    buttons = {attrs["data-class"] for _, attrs in reader.tags if "data-class" in attrs}
    held = {str(t["class"]) for which in ("before", "after") for point in data[which] for t in point["held"] if t["class"] is not None}
    inside = {c for found in data["classes"].values() for node in found["nodes"] for c in re.findall(r"\{(\d+)\}", node["text"])}
    assert buttons
    assert buttons | held | inside <= data["classes"].keys()
    assert all(found["nodes"] for found in data["classes"].values())


def extracted(plan):
    """The terms of a plan's program that were extracted; what joins sums to contractions is in no class."""
    origin, reachable = plan.schedule.ex.origin, plan.program.reachable()
    return {t for t in reachable if origin is None or t in origin[1]}


@pytest.mark.parametrize("name", tiered(["bound", "longer"], ["longer"]))
def test_every_value_of_the_programs_has_a_class(name):
    plan = planned(name)
    original = jaxpr_html(plan.record.jaxpr, plan.record.arg_names, dict.fromkeys(variables(plan.record.jaxpr.jaxpr), 0))
    shown = Reader(written(name))
    assert shown.texts["original"] == Reader(original and f'<pre id="a">{original}</pre>').texts["a"]
    values = {var for eqn in plan.record.jaxpr.jaxpr.eqns for var in eqn.outvars} | set(plan.record.jaxpr.jaxpr.invars)
    in_original = written(name).split('<pre id="original">')[1].split("</pre>")[0]
    assert len({*re.findall(r'data-class="\d+">(\w+)<', in_original)}) >= len(values)
    in_source = written(name).split('<pre id="emitted">')[1].split("</pre>")[0]
    assert {*re.findall(r'data-class="\d+">(\w+)<', in_source)} == {name for name, t in plan.record.names.items() if t in extracted(plan)}
    assigned = {*re.findall(r"^ +(\w+) = ", plan.source, re.MULTILINE)} - {"state"}
    views = {found for found in assigned if re.search(rf"^ +{found} = \w+(\.reshape\(.*\)|\[.*\])$", plan.source, re.MULTILINE)}
    assert assigned - views <= {*plan.record.names}


def variables(jaxpr):
    return [*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]


@pytest.mark.parametrize("name", tiered(NAMES, ["longer"]))
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


@pytest.mark.parametrize("name", tiered(NAMES, ["longer"]))
def test_a_bar_for_each_point(name):
    data, plan = data_of(name), planned(name)
    bars = [(attrs["data-points"], int(attrs["data-point"])) for _, attrs in Reader(written(name)).tags if "data-point" in attrs]
    before, after = plan.record.timelines(plan)
    assert bars == [("before", k) for k in range(len(before))] + [("after", k) for k in range(len(after))]
    assert [len(data["before"]), len(data["after"])] == [len(before), len(after)]
    assert max((t["share"] for point in data["after"] for t in point["held"]), default=0) <= 1


@pytest.mark.parametrize("name", tiered(NAMES, ["longer"]))
def test_the_reasons_are_there(name):
    text, why = written(name), planned(name).explain()
    for part in ("Memory over the program", "Runners-up", "Original, as traced", "Emitted"):
        assert part in text
    for n in why.rules:
        assert f"<b>{n.rule.name}</b>" in text
    for rule in why.spare_rules:
        assert rule in text
    assert len(why.loops) == Reader(text).texts["loops"].count("In one turn: ")


def test_a_program_left_as_it_was():
    plan = eqsat_mem.optimize(lambda x: jnp.sin(x) + 1, memory_limit="1GiB", verify=False).plan(jax.ShapeDtypeStruct((8,), jnp.float32))
    text = page(plan)
    Reader(text)
    assert "None: the function runs as it was written." in text
    assert re.findall(r'data-class="\d+">(\w+)<', text.split('<pre id="emitted">')[1]) != []


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
    assert "kernel.py:8 (matvec)" in output.read_text(encoding="utf-8")
    Reader(output.read_text(encoding="utf-8"))
    missing = tmp_path / "nowhere" / "report.html"
    assert error_of(capsys, *command, str(missing)) == f"there is no folder {missing.parent} to write report.html to."
    assert error_of(capsys, *command, str(tmp_path)) == f"{tmp_path} cannot be written: Is a directory."
