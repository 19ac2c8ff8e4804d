"""Code that the scripts share: a grid of points, each measured in a process of its own and kept, and the command line around it."""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eqsat_mem.errors import OptionError
from eqsat_mem.options import parse_bytes

Point = dict[str, Any]
"""The identity of a measurement: texts and whole numbers by name."""
Row = dict[str, str]
"""A point and its results, as kept in a CSV file; a result that does not apply is empty."""

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "paper_repro"
PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
"""glibc gives each thread a heap otherwise, and what one thread has freed counts as resident though another needs it."""
PROCESSES = {"tiny": 1, "small": 3, "paper": 3}
SHORT_S, QUICK_S = 0.1, 20
"""Points whose runs take less than the first, and whose processes less than the second, are measured in so many processes by scale."""
TIMEOUTS_S = {"tiny": 120, "small": 300, "paper": 7200}
"""Seconds after which a point is given up, by scale."""


@dataclass(frozen=True)
class Experiment:
    """One script: its measurements, and their tables.

    Attributes:
        module: the script, as ``python -m`` takes it.
        about: its help text.
        keys: the names in a point, which are the first columns of the CSV file.
        results: the names of what is measured, which are the others.
        grid: the points for the options, in the order in which they are measured.
        measure: the results of a point; runs in a process of its own, and may save what it has so far in a folder.
        tables: the rows as Markdown.
        draw: pictures of the rows: a name for each, and a function that draws on a matplotlib figure.
        options: adds options of its own to the parser.
    """

    module: str
    about: str
    keys: tuple[str, ...]
    results: tuple[str, ...]
    grid: Callable[[argparse.Namespace], Iterable[Point]]
    measure: Callable[[Point, Path], dict[str, Any]]
    tables: Callable[[Sequence[Row]], str]
    draw: dict[str, Callable[[Sequence[Row], Any], None]] = field(default_factory=dict)
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None

    @property
    def name(self) -> str:
        """The last part of the module's name, which files are called by."""
        return self.module.rpartition(".")[2]

    def key(self, point: Point) -> tuple[str, ...]:
        """A point, or the point of a row, as one value."""
        return tuple(str(point[name]) for name in self.keys)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The options of the script's command line."""
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.module}", description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        common_options(parser)
        parser.add_argument("--point", metavar="JSON", help="measure one point in this process and print its results as JSON")
        self.options(parser)
        return parser.parse_args(argv)


def main(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
    """The command line of a script."""
    options = experiment.parse(argv)
    if options.point:
        print(json.dumps(experiment.measure(json.loads(options.point), unfinished(experiment, options))))
    else:
        run(experiment, options)
    return 0


def run(experiment: Experiment, options: argparse.Namespace) -> None:
    """Measure the points that are missing, then print and write the table, and draw the pictures."""
    folder = results_folder(options)
    folder.mkdir(parents=True, exist_ok=True)
    points = [point for point in experiment.grid(options) if _is_asked(point, options.where or ())]
    rows = measure_missing(experiment, points, folder / f"{experiment.name}.csv", options)
    text = experiment.tables(rows)
    (folder / f"{experiment.name}.md").write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
    if not _draw(experiment, rows, folder):
        print("no pictures: matplotlib is missing (pip install 'eqsat-mem[repro]')", file=sys.stderr)


def _is_asked(point: Point, where: Iterable[tuple[str, str]]) -> bool:
    """Whether a point has one of the values that are asked for under each name that it knows."""
    return all(any(str(point[name]) == value for key, value in where if key == name) for name in {key for key, _ in where} & point.keys())


def results_folder(options: argparse.Namespace) -> Path:
    """The folder of the results for a scale and a device."""
    return Path(options.results) / f"{options.scale}-{options.device}"


def unfinished(experiment: Experiment, options: argparse.Namespace) -> Path:
    """The file in which a script's long measurements save their results so far."""
    return results_folder(options) / "unfinished" / experiment.name


def common_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all scripts have."""
    parser.add_argument(
        "--scale", choices=TIMEOUTS_S, default="small", help="tiny: a check in seconds; small: minutes on 2 cores; paper: a GPU"
    )
    parser.add_argument("--device", choices=PLATFORMS, default="cpu")
    parser.add_argument(
        "--limit", action="append", type=_size, metavar="SIZE", help="such as 100MB, instead of the scale's; may be repeated"
    )
    parser.add_argument("--results", default=RESULTS, metavar="FOLDER", help="where points are kept (default: build/paper_repro)")
    parser.add_argument(
        "--where", action="append", type=_pair, metavar="NAME=VALUE", help="only points with this value, such as n=1000000; may be repeated"
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give a point up after so long")
    parser.add_argument("--at-most", type=int, metavar="N", help="measure so many points that are missing, and leave the others for later")
    parser.add_argument("--again", action="store_true", help="forget the points that are kept, and measure them again")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as n=1000000.")
    return name, value


def _size(text: str) -> str:
    try:
        parse_bytes(text, "--limit")
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


# --- points that are kept -----------------------------------------------------------------------------


def measure_missing(experiment: Experiment, points: Sequence[Point], path: Path, options: argparse.Namespace) -> list[Row]:
    """The rows of these points: those that ``path`` keeps, and the others, which are measured one by one and appended to it."""
    if options.again:
        path.unlink(missing_ok=True)
        shutil.rmtree(unfinished(experiment, options), ignore_errors=True)
    kept = {experiment.key(row): row for row in kept_rows(experiment, path)}
    missing = [point for point in points if experiment.key(point) not in kept]
    if missing and len(missing) < len(points):
        print(f"{experiment.name}: {len(points) - len(missing)} of {len(points)} points are kept in {path}", file=sys.stderr)
    timeout = options.timeout or TIMEOUTS_S[options.scale]
    for point in _progress(missing[: options.at_most], experiment.name):
        row = {name: str(value) for name, value in {**point, **in_own_processes(experiment, point, options, timeout)}.items()}
        _append(path, [*experiment.keys, *experiment.results], row)
        kept[experiment.key(point)] = row
    return [kept[experiment.key(point)] for point in points if experiment.key(point) in kept]


def kept_rows(experiment: Experiment, path: Path) -> list[Row]:
    """The rows of earlier runs.

    Raises:
        SystemExit: if the file has other columns than the script writes now.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != [*experiment.keys, *experiment.results]:
            raise SystemExit(f"{path} was written by another version of {experiment.module}: pass --again, or another --results folder.")
        return list(reader)


def in_own_processes(experiment: Experiment, point: Point, options: argparse.Namespace, timeout: float) -> dict[str, Any]:
    """The results of a point; where runs are short, those of the middle one of several processes by their seconds.

    What a process happens to be given, such as where its arrays lie, makes short runs differ from process to process.
    """
    start = time.perf_counter()
    found = [in_own_process(experiment, point, options, timeout)]
    is_short = 0 < float(found[0]["seconds"] or 0) < SHORT_S and time.perf_counter() - start < QUICK_S
    found += [in_own_process(experiment, point, options, timeout) for _ in range(PROCESSES[options.scale] - 1 if is_short else 0)]
    return sorted(found, key=lambda results: float(results["seconds"] or "inf"))[len(found) // 2]


def in_own_process(experiment: Experiment, point: Point, options: argparse.Namespace, timeout: float) -> dict[str, Any]:
    """The results of a point in a fresh interpreter, so that one that dies takes nothing with it and memory is its own.

    Results that are missing are empty; ``status`` says why.
    """
    environment = {**os.environ, "JAX_PLATFORMS": PLATFORMS[options.device], "PYTHONPATH": _python_path(), **ONE_HEAP}
    passed = [f"--{name}={getattr(options, name)}" for name in ("scale", "device", "results")]
    command = [sys.executable, "-m", experiment.module, *passed, "--point", json.dumps(point)]
    empty = dict.fromkeys(experiment.results, "")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return empty | {"status": f"over {timeout:g} s"}
    if done.returncode < 0:
        return empty | {"status": f"killed by signal {-done.returncode}"}
    if done.returncode:
        said = [line for line in done.stderr.strip().splitlines() if not line.startswith("more: ")]
        return empty | {"status": (said or ["died"])[-1][:160]}
    return empty | json.loads(done.stdout.splitlines()[-1])


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _append(path: Path, names: Sequence[str], row: Row) -> None:
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def _progress(points: Sequence[Point], name: str) -> Iterator[Point]:
    """The points, with a bar on stderr, or with lines where tqdm is missing."""
    try:
        from tqdm import tqdm
    except ImportError:
        for count, point in enumerate(points, 1):
            print(f"{name} [{count}/{len(points)}] {_described(point)}", file=sys.stderr, flush=True)
            yield point
        return
    with tqdm(points, desc=name, unit="point", disable=not points) as bar:
        for point in bar:
            bar.set_postfix_str(_described(point))
            yield point


def _described(point: Point) -> str:
    return ", ".join(f"{name} {value}" for name, value in point.items() if value != "")


# --- pictures -----------------------------------------------------------------------------------------


def _draw(experiment: Experiment, rows: Sequence[Row], folder: Path) -> bool:
    """Draw what the script draws; False where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return not experiment.draw
    for name, draw in experiment.draw.items():
        figure = pyplot.figure(figsize=(10, 4), layout="constrained")
        draw(rows, figure)
        figure.savefig(folder / f"{name}.png", dpi=110)
        pyplot.close(figure)
    return True
