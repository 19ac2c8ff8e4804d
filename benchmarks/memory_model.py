"""Predicted peaks against what XLA reserves: ``python -m benchmarks.memory_model [--only NAME] [--resident] [--write]``.

Plans and compiles every program of :mod:`benchmarks.programs`; runs none of them unless ``--resident`` asks for the growth of resident
memory. ``--write`` puts the table into ``docs/memory.md``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
from dataclasses import dataclass
from pathlib import Path

import jax

import eqsat_mem
from benchmarks.measuring import grown, prepare, warm_up
from benchmarks.programs import BENCHMARKS, Benchmark
from eqsat_mem.backends.xla import compiled_peak

PAGE = Path(__file__).resolve().parent.parent / "docs" / "memory.md"
BEGIN, END = "<!-- begin: benchmarks.memory_model -->", "<!-- end: benchmarks.memory_model -->"


@dataclass(frozen=True)
class Figures:
    """Peaks in bytes and planning seconds by stage; a program that no plan fits has only ``failure``."""

    name: str
    limit: int = 0
    written_predicted: int = 0
    written_compiled: int = 0
    plan_predicted: int = 0
    plan_compiled: int = 0
    seconds: dict[str, float] | None = None
    resident: int | None = None
    failure: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over compiled: below one, the model promised too little."""
        return self.plan_predicted / self.plan_compiled


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=[b.name for b in BENCHMARKS])
    parser.add_argument("--resident", action="store_true", help="run each plan in a process of its own as well")
    parser.add_argument("--write", action="store_true", help=f"write the table into docs/{PAGE.name}")
    options = parser.parse_args()
    rows = []
    for b in BENCHMARKS:
        if not options.only or b.name in options.only:
            rows.append(measure(b, options.resident))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    text = table(rows)
    if options.write:
        write(text)
    else:
        print(text)


def measure(b: Benchmark, resident: bool) -> Figures:
    """The figures of one program."""
    with jax.enable_x64(b.x64):
        specs = b.specs()
        try:
            plan = eqsat_mem.optimize(b.function, memory_limit=b.limit_bytes).plan(*specs)
        except eqsat_mem.MemoryLimitError as error:
            return Figures(b.name, b.limit_bytes, failure=str(error).splitlines()[0])
        written = compiled_peak(b.function, specs)[0]
        compiled = plan.compiled_peak_bytes or 0
        grown = _in_a_process(b.name) if resident else None
        return Figures(b.name, b.limit_bytes, plan.original_peak_bytes, written, plan.peak_bytes, compiled, dict(plan.seconds), grown)


def table(rows: list[Figures]) -> str:
    """A Markdown table: MiB and seconds."""
    stages = ("trace", "bodies", "saturate", "extract", "schedule", "emit and verify")
    resident = any(r.resident is not None for r in rows)
    head = [
        "program",
        "limit",
        "as written: predicted",
        "compiled",
        "plan: predicted",
        "compiled",
        "ratio",
        *(["resident"] if resident else []),
    ]
    head += ["planned in", *stages]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for r in rows:
        if r.failure:
            lines.append([r.name, _mib(r.limit), r.failure, *[""] * (len(head) - 3)])
            continue
        seconds = r.seconds or {}
        peaks = [_mib(n) for n in (r.limit, r.written_predicted, r.written_compiled, r.plan_predicted, r.plan_compiled)]
        grown = [_mib(r.resident) if r.resident is not None else ""] if resident else []
        times = [f"{sum(seconds.values()):.2f}", *(f"{seconds.get(stage, 0.0):.2f}" for stage in stages)]
        lines.append([f"`{r.name}`", *peaks, f"{r.ratio:.2f}", *grown, *times])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(text: str) -> None:
    """Put the table between the markers of the page."""
    page = PAGE.read_text(encoding="utf-8")
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    PAGE.write_text(between.sub(lambda _: f"{BEGIN}\n{text}\n{END}", page), encoding="utf-8")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"


# --- resident memory ----------------------------------------------------------------------------------


def _in_a_process(name: str) -> int | None:
    """The growth of resident memory while a plan runs, in a process that has run nothing else, with one heap for all threads."""
    os.environ["MALLOC_ARENA_MAX"] = "1"  # glibc reads it when the process starts
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(resident_growth, (name,))


def resident_growth(name: str) -> int | None:
    """Bytes by which this process grew at most while the plan ran, arguments included; None where the system does not tell."""
    b = next(b for b in BENCHMARKS if b.name == name)
    with jax.enable_x64(b.x64):
        args = b.arguments()
        run = prepare(b.function, args, b.limit_bytes).compiled
        warm_up(args[0].dtype)
        growth = grown(lambda: run(*args))[1]
        return None if growth is None else growth + sum(a.nbytes for a in args)


if __name__ == "__main__":
    main()
