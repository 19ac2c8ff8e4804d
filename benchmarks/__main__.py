"""All benchmarks, and ``RESULTS.md`` with their tables and pictures: ``python -m benchmarks [--only NAME] [--scale small]``.

Answers are kept one by one in ``benchmarks/results``; with ``--only``, the page keeps the others as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import applications, attention, chains, curves, kernels, neighbours, planning, ranks, speed
from benchmarks.plots import draw
from benchmarks.racing import RESULTS, SCALES, Question, answer, described

QUESTIONS = {q.QUESTION.name: q.QUESTION for q in (kernels, neighbours, attention, chains, speed, applications, curves, planning, ranks)}
PAGE = "RESULTS.md"
PREFACE = """# Results

Made by `make bench` (`python -m benchmarks`). Each table is one run in one process, in which the versions take turns; times are medians,
and the number behind a time says how many times as long as the plan that version takes (the median of the ratios of each turn). "by hand"
is what a person writes who knows the trick and cuts the program into chunks. "plain" and "plan" are one function, as written and planned.
Plans are compiled as a call of the optimised function compiles them, on some processors for wider vectors than `jax.jit` does by itself;
"plain" and "by hand" are `jax.jit`.
What runs outside of JAX holds memory that nobody tells, so only the compiled programs' bytes are shown.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, question after question, then write the page and draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--only", action="append", choices=QUESTIONS)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where the answers are kept")
    options = parser.parse_args(argv)
    for name in options.only or QUESTIONS:
        print(f"{name} ({options.scale}) ...", file=sys.stderr, flush=True)
        print(answer(QUESTIONS[name], options.scale, options.results), flush=True)
    print(f"written: {write(options.results)}", file=sys.stderr)


def write(folder: Path) -> Path:
    """The page from all answers in the folder, beside the folder."""
    pictures = {path.stem: path for path in draw(folder)}
    parts = [PREFACE]
    for name, question in QUESTIONS.items():
        if (folder / f"{name}.json").exists():
            parts += _section(question, folder, pictures.get(name))
    missing = [f"`{name}`" for name in QUESTIONS if not (folder / f"{name}.json").exists()]
    if missing:
        parts.append(f"No answers are kept here yet for {', '.join(missing)}.\n")
    page = folder.parent / PAGE
    page.write_text("\n".join(parts), encoding="utf-8")
    return page


def _section(question: Question, folder: Path, picture: Path | None) -> list[str]:
    kept = json.loads((folder / f"{question.name}.json").read_text(encoding="utf-8"))
    shown = [f"![{question.title}]({folder.name}/{picture.name})\n"] if picture else []
    return [f"## {kept['question']}\n", f"{described(kept['machine'])}\n", question.table(kept["rows"]) + "\n", *shown]


if __name__ == "__main__":
    main()
