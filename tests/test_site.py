"""The site is built of the repository's pages and asks no network; the programs of the gallery are replaced by short ones."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eqsat_mem import error_table

ROOT = Path(__file__).resolve().parent.parent
BUILDER = ("latex2mathml", "material", "mermaidx", "mkdocs")
needs_builder = pytest.mark.skipif(not all(map(importlib.util.find_spec, BUILDER)), reason="the extra site is not installed")
COPIED = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "docs", "examples", "rules", "benchmarks", "paper_repro")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site of a copy of the repository, whose programs draw one line."""
    folder = tmp_path_factory.mktemp("repository")
    for name in COPIED:
        source = ROOT / name
        shutil.copytree(source, folder / name) if source.is_dir() else shutil.copy(source, folder)
    for program in (folder / "examples").glob("*.py"):
        text = program.read_text(encoding="utf-8")
        if "\n# %%" in text:
            first = text.index("# %%\n")
            program.write_text(
                text[:first] + "# %%\nfrom matplotlib import pyplot\n\npyplot.plot([1, 2])\npyplot.show()\n", encoding="utf-8"
            )
    done = subprocess.run([sys.executable, "-m", "docs.website"], cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "build" / "site"


@pytest.mark.slow
@needs_builder
def test_the_site_is_built_without_a_broken_link(site):
    for page in ("index.html", "docs/quickstart.html", "examples/attention.html", "rules/index.html", "search/search_index.js"):
        assert (site / page).exists(), page
    assert (site / "examples" / "attention.ipynb").exists()


@pytest.mark.slow
@needs_builder
def test_pages_ask_no_network(site):
    asked = re.compile(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="(https?:[^"]+)"')
    assert {address for page in site.rglob("*.html") for address in asked.findall(page.read_text(encoding="utf-8"))} == set()


@pytest.mark.slow
@needs_builder
def test_formulas_and_diagrams_are_drawn(site):
    attention = (site / "examples" / "attention.html").read_text(encoding="utf-8")
    assert "<math" in attention
    assert "$$" not in attention
    design = (site / "docs" / "design.html").read_text(encoding="utf-8")
    assert "design-diagram-2.svg" in design
    assert "flowchart TD" not in design


@pytest.mark.slow
@needs_builder
def test_each_error_has_an_anchor(site):
    shown = (site / "docs" / "errors.html").read_text(encoding="utf-8")
    assert [row.name for row in error_table.rows() if f'<a id="{row.name}"></a>' not in shown] == []


@pytest.mark.slow
@needs_builder
def test_a_broken_link_ends_the_build(site):
    folder = site.parent.parent
    page = folder / "docs" / "quickstart.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(f"{text}\n[nothing](plans.md#nothing)\n", encoding="utf-8")
    command = [sys.executable, "-m", "docs.website", "--keep-gallery"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    page.write_text(text, encoding="utf-8")
    assert done.returncode != 0
    assert "plans.md#nothing" in done.stderr
