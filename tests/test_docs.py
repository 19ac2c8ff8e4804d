"""The examples of the documentation run, and what it says of the code's outline is so."""

import re
from pathlib import Path

import pytest

from tests.test_readme import blocks, run_examples

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "eqsat_mem"
DESIGN = ROOT / "docs" / "design.md"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "rules" / "README.md"]


def title(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(page)


def test_the_program_shown_is_the_one_printed(capsys):
    run_examples(DESIGN)
    shown = re.search(r"^```text\n(.*?)^```", DESIGN.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert shown[1] == capsys.readouterr().out


def test_the_design_names_the_modules_that_there_are():
    table = re.findall(r"^\| `(\w+)` \| ", DESIGN.read_text(encoding="utf-8").split("## Modules")[1].split("\n## ")[0], re.MULTILINE)
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert sorted(table) == sorted(files)
    rows = set(re.findall(r"`ops\.(\w+)`", DESIGN.read_text(encoding="utf-8")))
    assert rows == {path.stem for path in (PACKAGE / "ops").glob("*.py")} - {"__init__"}


def test_quoted_lines_stand_in_the_code():
    code = "\n".join(path.read_text(encoding="utf-8") for path in [*PACKAGE.rglob("*.py"), *(ROOT / "rules").glob("*.egg")])
    quoted = [block for _, block in blocks(DESIGN, "quoted")]
    quoted += re.findall(r"^```lisp quoted\n(.*?)^```", DESIGN.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(quoted) >= 4
    for line in "".join(quoted).splitlines():
        assert line.strip() in code, line


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"], ids=title)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", prose):
        assert (page.parent / target).exists(), target
