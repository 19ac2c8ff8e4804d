"""The programs of examples/ run as their texts say, check their own values, and keep to their limits."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.website import gallery
from eqsat_mem.options import parse_bytes

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
IN_CELLS = [path for path in EXAMPLES if gallery.MARK.search(path.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_its_plans_fit(path):
    command = f"python examples/{path.name}"
    assert command in path.read_text().split('"""')[1]
    environment = os.environ | {"MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, *command.split()[1:]], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    plans = re.findall(r"^\w+ (fits|fits as written): ([\d.]+ \w+) of ([\d.]+ \w+)", done.stdout, re.MULTILINE)
    assert plans, done.stdout
    for verdict, peak, limit in plans:
        assert verdict == "fits", "the limit asks nothing of the program"
        assert parse_bytes(peak) <= parse_bytes(limit)


def test_the_gallery_lists_its_programs_and_the_site_has_them():
    assert len(IN_CELLS) == 11
    listed = (ROOT / "examples" / "README.md").read_text()
    site = (ROOT / "docs" / "website" / "mkdocs.yml").read_text()
    for path in IN_CELLS:
        assert f"({path.name})" in listed
        assert f"examples/{path.stem}.md" in site
    assert "(examples/README.md)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", IN_CELLS, ids=lambda path: path.stem)
def test_a_program_in_cells_has_the_parts_of_the_gallery(path):
    text = path.read_text()
    made = gallery.cells(text)
    assert made[0].source.startswith("# ")
    assert made[0].source.count("$$") == 2
    titles = [cell.source.split("\n")[0] for cell in made[1:] if cell.is_text]
    assert titles == ["## The plan", "## The same numbers", "## Seconds", "## Memory over time"]
    assert made[-1].source == "plan.show()"
    for cell in made:
        if not cell.is_text:
            assert text.splitlines()[cell.line - 1] == cell.source.split("\n")[0]


@pytest.mark.slow
def test_a_program_becomes_a_page_and_a_notebook(tmp_path):
    program = tmp_path / "small.py"
    program.write_text(
        '"""# Small\n\nText."""\n\n# %%\nfrom matplotlib import pyplot\n\nx = 6\n\n# %% [markdown]\n# ## More\n\n# %%\nprint(7 * x)\n'
        "\n# %%\npyplot.plot([1, 2])\npyplot.show()\n"
    )
    page = tmp_path / "made" / "small.md"
    gallery.write(program, page)
    text = page.read_text()
    assert text.startswith("# Small\n\nText.\n")
    assert "## More" in text
    assert "```text\n42\n```" in text
    assert "](small-1.png)" in text
    assert (page.parent / "small-1.png").read_bytes().startswith(b"\x89PNG")
    notebook = page.with_suffix(".ipynb").read_text()
    assert '"nbformat": 4' in notebook
    assert "image/png" in notebook


def test_a_program_that_fails_makes_no_page(tmp_path):
    program = tmp_path / "wrong.py"
    program.write_text('"""# Wrong"""\n\n# %%\nassert 1 + 1 == 3\n')
    with pytest.raises(AssertionError):
        gallery.write(program, tmp_path / "wrong.md")
    assert not (tmp_path / "wrong.md").exists()
