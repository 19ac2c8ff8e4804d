"""All experiments, one after the other: ``python -m paper_repro``, with the options that the scripts share, and ``--publish``.

``--publish`` is for those who keep this repository: it copies the results of the small scale to ``paper_repro/results`` and puts the tables
into ``paper_repro/README.md``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from paper_repro import experiment, kernel_mvm, knn, matmul_chains, sgpr, sgpr_reach, transformer

EXPERIMENTS = [script.EXPERIMENT for script in (kernel_mvm, knn, sgpr, sgpr_reach, transformer, matmul_chains)]
HERE = Path(__file__).resolve().parent
PAGE, PUBLISHED = HERE / "README.md", HERE / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Run them all; then, if asked to, publish."""
    parser = argparse.ArgumentParser(
        prog="python -m paper_repro", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    experiment.common_options(parser)
    parser.add_argument("--only", action="append", choices=[e.name for e in EXPERIMENTS], help="this experiment; may be repeated")
    parser.add_argument("--publish", action="store_true", help="put the results into the repository")
    options = parser.parse_args(argv)
    chosen = [e for e in EXPERIMENTS if not options.only or e.name in options.only]
    for each in chosen:
        print(f"\n## {each.name}\n")
        experiment.run(each, each.parse(shared_arguments(options)))
    if options.publish:
        publish(experiment.results_folder(options), [each.name for each in chosen])
    return 0


def shared_arguments(options: argparse.Namespace) -> list[str]:
    """The options that the scripts share, as they were given."""
    given = [f"--scale={options.scale}", f"--device={options.device}", f"--results={options.results}"]
    given += [f"--limit={limit}" for limit in options.limit or ()]
    given += [f"--where={name}={value}" for name, value in options.where or ()]
    given += [f"--timeout={options.timeout}"] if options.timeout else []
    given += [f"--at-most={options.at_most}"] if options.at_most is not None else []
    return given + (["--again"] if options.again else [])


def publish(results: Path, names: Sequence[str]) -> None:
    """Copy tables and pictures of these experiments next to the page, and the tables into it."""
    PUBLISHED.mkdir(exist_ok=True)
    text = PAGE.read_text(encoding="utf-8")
    for name in names:
        for path in (results / f"{name}{ending}" for ending in (".csv", ".png")):
            if path.exists():
                shutil.copy(path, PUBLISHED)
        text = with_table(text, name, (results / f"{name}.md").read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")


def with_table(text: str, name: str, table: str) -> str:
    """A page with what stands between the marks of an experiment replaced."""
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    return re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{table}{end}", text, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(main())
