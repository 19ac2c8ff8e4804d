"""The examples of the documentation run, and what it says of the code's outline, its names and its errors is so."""

import ast
import doctest
import importlib.util
import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.test_layers import ALLOWED as ROOMS
from tests.test_readme import blocks, run_examples

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "eqsat_mem"
DESIGN = ROOT / "docs" / "design.md"
EXTENDING = ROOT / "docs" / "extending.md"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "rules" / "README.md"]

ELSEWHERE = {"several-devices.md", "pytorch.md"}
"""Pages that need processes of their own: tests/mesh and tests/cli/test_pages.py run them."""


def title(path):
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ELSEWHERE], ids=title)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(page)


def test_the_program_shown_is_the_one_printed(capsys):
    run_examples(DESIGN)
    shown = re.search(r"^```text\n(.*?)^```", DESIGN.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert shown[1] == capsys.readouterr().out


def test_the_design_names_the_rooms_and_shared_modules_that_there_are():
    section = DESIGN.read_text(encoding="utf-8").split("## Rooms")[1].split("\n## ")[0]
    rooms = re.findall(r"^\| `(\w+)` \| ", section, re.MULTILINE)
    assert rooms == [room for room in ROOMS if room in rooms], "not in the order of tests/test_layers.py"
    assert set(rooms) == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    shared = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert shared <= set(re.findall(r"`(\w+)`", section))


def test_quoted_lines_stand_in_the_code():
    code = "\n".join(path.read_text(encoding="utf-8") for path in [*PACKAGE.rglob("*.py"), *(ROOT / "rules").glob("*.egg")])
    quoted = [block for _, block in blocks(EXTENDING, "quoted")]
    quoted += re.findall(r"^```lisp quoted\n(.*?)^```", EXTENDING.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(quoted) >= 4
    for line in "".join(quoted).splitlines():
        assert line.strip() in code, line


LINKED = [
    *PAGES,
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *(ROOT / name for name in ("examples/README.md", "paper_repro/README.md", "benchmarks/RESULTS.md")),
]
"""The pages of the repository, all of which the site has."""


def prose(page):
    """A page without its code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", lambda code: code[0].replace("](", "] ("), text)


def anchors(page):
    """The anchors of a page's headings, as they are made on the site and where repositories are shown."""
    titles = re.findall(r"^#{1,6} (.*)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return [re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain]


@pytest.mark.parametrize("page", LINKED, ids=title)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", prose(page)):
        there = page.parent / target if target else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), f"{target}#{anchor}"


def test_the_site_has_every_page():
    listed = (ROOT / "docs" / "website" / "mkdocs.yml").read_text(encoding="utf-8")
    assert [title(page) for page in LINKED if f"{title(page)}\n" not in listed] == []


def test_pages_of_the_site_keep_code_and_lead_to_pages():
    website = import_module("docs.website.__main__")
    text, files = website.with_links(ROOT / "docs" / "from-keops.md")
    assert "](../examples/sinkhorn.md)" in text
    assert not files
    text, files = website.with_links(ROOT / "README.md")
    assert ROOT / "docs" / "pictures" / "training_step.svg" in files
    design, _ = website.with_links(DESIGN)
    assert [block for _, block in blocks(DESIGN)] == re.findall(r"^```python\n(.*?)^```", design, re.MULTILINE | re.DOTALL)


def reference():
    """The script that writes the reference."""
    path = ROOT / "docs" / "reference.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_in_step():
    shown = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert shown == reference().reference(), "docstrings have changed: run `python docs/reference.py`"


def test_the_reference_has_every_public_name():
    import eqsat_mem

    listed = {name.rpartition(".")[2] for names in reference().PARTS.values() for name in names}
    assert set(eqsat_mem.__all__) - {"__version__"} <= listed


@pytest.mark.parametrize("path", [path for path in sorted(PACKAGE.rglob("*.py")) if ">>> " in path.read_text()], ids=title)
def test_examples_of_docstrings_run(path):
    module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert doctest.testmod(module).failed == 0


def test_debugging_levels_are_those_of_the_code():
    table = (ROOT / "docs" / "plans.md").read_text(encoding="utf-8").split("## What planning does")[1]
    shown = dict(re.findall(r"^\| (\d) \| (\w+):", table, re.MULTILINE))
    written = dict(re.findall(r"^(\d)\. (\w+):", import_module("eqsat_mem.reports.debug").__doc__, re.MULTILINE))
    assert shown == written


INTERNAL = {"program", "expressions", "interpreter", "calls", "hlo", "__init__"}
"""Modules whose errors a user does not meet: they say that this package contradicts itself, or are Python's own."""


def messages():
    """The longest fixed part of each error message in the code, with its place."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.stem in INTERNAL:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and re.search("Error$|Panic$", node.func.id) and node.args:
                text = node.args[0]
                parts = [part.value for part in getattr(text, "values", [text]) if isinstance(part, ast.Constant)]
                words = [part for part in parts if isinstance(part, str) and part.strip(" :;.,")]
                if words:
                    yield f"{path.name}:{node.lineno}", " ".join(max(words, key=len).split()).strip(" :;.,*")


def test_every_error_is_listed_with_its_cure():
    shown = " ".join((ROOT / "docs" / "errors.md").read_text(encoding="utf-8").replace("*", "").split())
    told = list(messages())
    assert [(place, text) for place, text in told if text.replace("*", "") not in shown] == []
    assert len(told) > 30
