"""Programs that compute the same, side by side in one process: the questions of benchmarks, and tables of their answers.

The versions take turns, so that a machine that slows down slows all of them; a ratio is the median of the ratios of each turn. A version
that holds more than half of the device's memory is not run. What every version returns is compared with what the plan returns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measuring import Run, machine, no_plan, prepare, take_turns, turns_within
from eqsat_mem.errors import MemoryLimitError
from eqsat_mem.options import parse_bytes
from eqsat_mem.units import format_bytes

RESULTS = Path(__file__).parent / "results"
ENOUGH_S = 8.0
"""Versions that take long together have fewer turns: no more than take so long, but two."""
SCALES = ("tiny", "small", "full")
Row = dict[str, Any]


@dataclass(frozen=True)
class Contest:
    """One program at one size.

    Attributes:
        case: what is computed, for people.
        parameters: sizes and limits, for plots.
        arguments: arrays, or pytrees of them, that every JAX version takes.
        limit: what the plan may hold.
        function: the program; it runs as written and planned.
        others: further versions of it in JAX, by name.
        peers: versions outside of JAX, by name: functions without arguments, made when their turn to be warmed up comes.
        tolerance: relative error of results between versions, None where they are not comparable as arrays.
    """

    case: str
    parameters: Mapping[str, Any]
    arguments: Sequence[Any]
    limit: int | str
    function: Callable[..., Any]
    others: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    peers: Mapping[str, Callable[[], Run]] = field(default_factory=dict)
    tolerance: float | None = 1e-3


def race(contest: Contest, turns: int) -> Row:
    """Seconds and bytes of each version, and how many times faster than it the plan is (``times_faster_than``)."""
    args = jax.block_until_ready(jax.tree.map(jnp.asarray, tuple(contest.arguments)))
    row: Row = {"case": contest.case, **contest.parameters, "limit": contest.limit, "held_bytes": {}, "skipped": {}, "errors": {}}
    runs: dict[str, Run] = {}
    for name, function in {"plan": contest.function, "plain": contest.function, **contest.others}.items():
        try:
            made = prepare(function, args, contest.limit if name == "plan" else None)
        except MemoryLimitError as error:
            row["skipped"][name] = no_plan(error)
            continue
        if name == "plan":
            row["plan_seconds"], row["compile_seconds"] = made.plan_seconds, made.compile_seconds
        row["held_bytes"][name] = made.held_bytes
        if made.fits_device:
            runs[name] = lambda made=made: jax.block_until_ready(made.compiled(*args))
        else:
            row["skipped"][name] = "does not fit this machine"
    runs |= {name: make() for name, make in contest.peers.items()}
    row["seconds"], row["times_faster_than"] = _race(runs, contest, turns, row["errors"])
    return row


def _race(runs: Mapping[str, Run], contest: Contest, turns: int, errors: Row) -> tuple[dict[str, float], dict[str, float]]:
    for run in runs.values():
        run()
    start = time.perf_counter()
    outputs = {name: jax.tree.leaves(run()) for name, run in runs.items()}
    turns = turns_within(ENOUGH_S, time.perf_counter() - start, 2, turns)
    if contest.tolerance is not None and "plan" in outputs:
        for name, out in outputs.items():
            error = max(_difference(x, y) for x, y in zip(out, outputs["plan"], strict=True))
            if not error <= contest.tolerance:
                errors[name] = error
    del outputs
    times = take_turns(runs, turns)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    if "plan" not in times:
        return medians, {}
    ratios = {n: statistics.median(t / p for t, p in zip(taken, times["plan"], strict=True)) for n, taken in times.items() if n != "plan"}
    return medians, ratios


def _difference(x: Any, y: Any) -> float:
    """The largest difference over the largest magnitude."""
    a, b = np.asarray(x, np.float64).ravel(), np.asarray(y, np.float64).ravel()
    return float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30))


# --- what a script does with it -----------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """The question of one script: ``rows`` answers it at a scale, one row after the other, and ``table`` shows rows."""

    name: str
    title: str
    rows: Callable[[str], Iterable[Row]]
    table: Callable[[Sequence[Row]], str]


def contests(make: Callable[[str], Iterator[Contest]], turns: int = 7) -> Callable[[str], Iterator[Row]]:
    """The races of the contests that ``make`` makes at a scale; twice where it is tiny, since nobody reads those times."""

    def rows(scale: str) -> Iterator[Row]:
        for contest in make(scale):
            yield race(contest, 2 if scale == "tiny" else turns)

    return rows


def main(question: Question, argv: Sequence[str] | None = None) -> None:
    """The command line of a script: measure, print the table, and keep both as JSON."""
    parser = argparse.ArgumentParser(description=question.title)
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(argv)
    print(answer(question, options.scale, options.results))


def answer(question: Question, scale: str, folder: Path) -> str:
    """Measure with progress on standard error; write ``NAME.json`` into the folder; the table."""
    folder.mkdir(parents=True, exist_ok=True)
    report: Row = {"question": question.title, "scale": scale, "machine": machine(), "rows": []}
    for row in question.rows(scale):
        report["rows"].append(row)
        print(f"{question.name}: {row['case']}", file=sys.stderr, flush=True)
        (folder / f"{question.name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return question.table(report["rows"])


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of races: seconds of each version with how many times faster the plan is, and MiB held."""
    names = list(dict.fromkeys(name for row in rows for name in (*row["seconds"], *row["skipped"]) if name != "plan"))
    lines = [["program", "limit", *names, "plan", "MiB held: plain", "plan", "planned in"]]
    lines.append(["---"] + ["---:"] * (len(lines[0]) - 1))
    for row in rows:
        held = [f"{row['held_bytes'][n] / 2**20:,.1f}" if n in row["held_bytes"] else "" for n in ("plain", "plan")]
        cells = [_cell(row, name) for name in (*names, "plan")]
        planned = f"{row['plan_seconds']:.2f} s" if "plan_seconds" in row else ""
        lines.append([row["case"], format_bytes(parse_bytes(row["limit"])), *cells, *held, planned])
    return markdown(lines)


def markdown(lines: Iterable[Iterable[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: Row, name: str) -> str:
    if name in row["skipped"]:
        return str(row["skipped"][name])
    if name not in row["seconds"]:
        return ""
    ratio = f" ({row['times_faster_than'][name]:.2f})" if name in row["times_faster_than"] else ""
    wrong = f" differs by {row['errors'][name]:.1g}" if name in row["errors"] else ""
    return f"{row['seconds'][name] * 1e3:,.1f} ms{ratio}{wrong}"


def described(figures: Row) -> str:
    """A line on :func:`machine`."""
    versions = ", ".join(f"{name} {number}" for name, number in figures["versions"].items())
    gib = figures["memory_bytes"] / 2**30
    return f"{figures['processor']}, {figures['cores']} cores ({figures['device']}), {gib:.0f} GiB; {versions}; commit {figures['commit']}."
