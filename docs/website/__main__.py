"""Makes the site: ``python -m docs.website`` writes ``build/site`` from the pages of the repository and the programs of ``examples``.

The pages lie on the site as they lie in the repository, so that one relative link leads to the same page in both. Formulas become MathML
and diagrams SVG here; the site asks no network, and opens from a folder as well as from a server.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from docs.website import gallery
from eqsat_mem import error_table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PAGES_MADE, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
"""Where pages are gathered, and the site is made of them; ``mkdocs.yml`` says the same."""
PAGES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "examples/README.md", "rules/README.md"),
    *("benchmarks/RESULTS.md", "paper_repro/README.md"),
)
"""The pages of the site, as patterns below the root."""
QUIET = {"NO_MKDOCS_2_WARNING": "1"}
"""The theme else tells each build of its successor."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def main(argv: Sequence[str] | None = None) -> None:
    """Gather the pages, run the gallery, build."""
    parser = argparse.ArgumentParser(prog="python -m docs.website", description=__doc__.splitlines()[0])
    parser.add_argument("--keep-gallery", action="store_true", help="leave pages of the gallery as an earlier build made them")
    options = parser.parse_args(argv)
    gather(PAGES_MADE)
    os.environ["EQSAT_MEM_CACHE_DIR"] = "none"  # pages say how long planning takes
    for program in programs():
        page = PAGES_MADE / "examples" / f"{program.stem}.md"
        if not (options.keep_gallery and page.exists()):
            print(f"running {program.relative_to(ROOT)}", file=sys.stderr, flush=True)
            gallery.write(program, page)
    add_thumbnails(PAGES_MADE / "examples")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--config-file", HERE / "mkdocs.yml"], env=os.environ | QUIET, check=False
    )
    if done.returncode:
        sys.exit(done.returncode)
    print(SITE / "index.html")


def programs() -> list[Path]:
    """The programs of the gallery: those of ``examples`` that have cells."""
    return [path for path in sorted((ROOT / "examples").glob("*.py")) if gallery.MARK.search(path.read_text(encoding="utf-8"))]


def gather(pages: Path) -> None:
    """Copy all pages, and the files that they link to, to where they lie in the repository."""
    files = {*programs()}
    for source in [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]:
        page = pages / source.relative_to(ROOT)
        page.parent.mkdir(parents=True, exist_ok=True)
        text, linked = with_links(source)
        if source == ROOT / "docs" / "errors.md":
            text = with_anchors(text)
        page.write_text(with_diagrams(text, page), encoding="utf-8")
        files |= linked
    for file in files:
        copied = pages / file.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copied)
    for name in ("site.css", "iframe-worker.js"):
        shutil.copy(HERE / name, pages)


def with_links(source: Path) -> tuple[str, set[Path]]:
    """A page whose links lead to pages of the site, and the files besides that they lead to; a folder without a page is no link.

    Fences keep the name of their language only.
    """
    files = set()

    def led(link: re.Match[str]) -> str:
        picture, words, target, anchor = link[1], link[2], link[3], link[4] or ""
        there = (source.parent / target).resolve()
        if there.is_dir():
            return f"[{words}]({target}/README.md)" if (there / "README.md").exists() else words
        if there in programs():
            return f"[{words}]({target.removesuffix('.py')}.md{anchor})"
        if there.is_file() and there.suffix != ".md":
            files.add(there)
        return f"{picture}[{words}]({target}{anchor})"

    text = source.read_text(encoding="utf-8")
    parts, last = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(led, text[last : fence.start()]), f"{fence[1]}```{fence[2]}\n{fence[3]}{fence[1]}```"]
        last = fence.end()
    return "".join([*parts, LINK.sub(led, text[last:])]), files


def with_anchors(text: str) -> str:
    """The page of errors with an anchor for the name of each row."""
    for row in error_table.read(text):
        text = text.replace(f"\n| {row.message} |", f'\n| <a id="{row.name}"></a>{row.message} |', 1)
    return text


def with_diagrams(text: str, page: Path) -> str:
    """A page whose Mermaid diagrams are pictures."""
    import mermaidx

    count = 0

    def drawn(fence: re.Match[str]) -> str:
        nonlocal count
        if fence[2] != "mermaid":
            return fence[0]
        count += 1
        picture = page.with_name(f"{page.stem}-diagram-{count}.svg")
        mermaidx.render(fence[3]).save(str(picture))
        return f"![Diagram {count}]({picture.name}){{ .diagram }}"

    return FENCE.sub(drawn, text)


def add_thumbnails(folder: Path) -> None:
    """Put the first picture of each program onto the gallery's own page."""
    page = folder / "README.md"
    shown = [f"[![]({program.stem}-1.png)<br>{gallery.title(program)}]({program.stem}.md)" for program in programs()]
    page.write_text("\n\n".join([page.read_text(encoding="utf-8"), '<div class="gallery" markdown>', *shown, "</div>\n"]), encoding="utf-8")


if __name__ == "__main__":
    main()
