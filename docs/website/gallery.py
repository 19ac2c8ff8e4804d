"""Programs in cells become pages and notebooks, with what they print and draw.

A program is a Python script whose docstring is its title and text, with cells that begin with ``# %%`` and text that begins with
``# %% [markdown]``; editors and Jupytext know that form, and Python runs it as it stands.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


@dataclass
class Cell:
    """Text in Markdown, or code with what it printed and drew.

    Attributes:
        source: the text or the code.
        is_text: which of the two.
        line: the line of the file at which the code begins, counted from 1.
        printed: what it wrote to the standard output.
        pictures: what it drew, each the bytes of a PNG.
    """

    source: str
    is_text: bool
    line: int = 1
    printed: str = ""
    pictures: list[bytes] = field(default_factory=list)


def cells(program: str) -> list[Cell]:
    """The cells of a program; its docstring is the first one."""
    found = [Cell(ast.get_docstring(ast.parse(program)) or "", is_text=True)]
    marks = list(MARK.finditer(program))
    for mark, end in zip(marks, [*(mark.start() for mark in marks[1:]), len(program)], strict=True):
        body = program[mark.end() : end]
        if mark[1]:
            found.append(Cell(re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip(), is_text=True))
        else:
            first = len(body) - len(body.lstrip("\n"))
            found.append(Cell(body.strip("\n"), is_text=False, line=program.count("\n", 0, mark.end()) + 1 + first))
    return found


def title(program: Path) -> str:
    """The heading of a program's page."""
    return cells(program.read_text(encoding="utf-8"))[0].source.split("\n")[0].removeprefix("# ")


def run(path: Path) -> list[Cell]:
    """The cells of a program, executed one after the other as Python would execute the file.

    Raises:
        Exception: what the program raises.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown: list[bytes] = []
    made = cells(path.read_text(encoding="utf-8"))
    scope: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    original, pyplot.show = pyplot.show, lambda: shown.extend(_drawn())
    try:
        for cell in made:
            if not cell.is_text:
                code = compile("\n" * (cell.line - 1) + cell.source, str(path), "exec")
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(code, scope)
                cell.printed, cell.pictures = out.getvalue(), [*shown]
                shown.clear()
    finally:
        pyplot.show = original
    return made


def _drawn() -> Iterator[bytes]:
    """The open figures, closed."""
    from matplotlib import pyplot

    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(picture, dpi=110)
        yield picture.getvalue()
    pyplot.close("all")


def write(program: Path, page: Path) -> None:
    """Execute a program, and write its page, its pictures and its notebook beside each other.

    Raises:
        Exception: what the program raises.
    """
    made = run(program)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.with_suffix(".ipynb").write_text(notebook(made), encoding="utf-8")
    lines, count = [], 0
    for cell in made:
        lines += [cell.source if cell.is_text else f"```python\n{cell.source}\n```", ""]
        if cell.printed:
            lines += [f"```text\n{cell.printed.rstrip()}\n```", ""]
        for picture in cell.pictures:
            count += 1
            drawn = page.with_name(f"{page.stem}-{count}.png")
            drawn.write_bytes(picture)
            lines += [f"![What {program.stem} holds over time]({drawn.name})", ""]
    lines += [f"This page was made by running [{program.name}]({program.name}); it is also a [notebook]({page.stem}.ipynb).", ""]
    page.write_text("\n".join(lines), encoding="utf-8")


def notebook(made: list[Cell]) -> str:
    """The cells as a Jupyter notebook with their outputs."""
    listed: list[dict[str, Any]] = []
    for number, cell in enumerate(made):
        common = {"id": f"cell-{number}", "metadata": {}, "source": cell.source}
        if cell.is_text:
            listed.append({"cell_type": "markdown", **common})
            continue
        outputs: list[dict[str, Any]] = []
        if cell.printed:
            outputs.append({"output_type": "stream", "name": "stdout", "text": cell.printed})
        for picture in cell.pictures:
            data = {"image/png": base64.b64encode(picture).decode()}
            outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
        listed.append({"cell_type": "code", "execution_count": None, "outputs": outputs, **common})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps({"cells": listed, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}, indent=1)
