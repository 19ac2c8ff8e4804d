"""Predicted peaks against what XLA:GPU reserves, for a card that is not there, and whether programs fit.

    python -m benchmarks.gpu_peaks [--device h100] [--only NAME ...] [--programs FILE.py ...] [--json OUT] [--write]

Every program of :mod:`benchmarks.gpu_programs` (or the ``CASES`` of other files) as written and as planned under its limit, each
compiled twice, with products by Triton and by cuBLAS; the larger counts. ``--write`` puts the table into ``docs/xla-gpu.md``.
Needs the extra ``gpu``, no GPU; about eight seconds a program.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "xla-gpu.md"
BEGIN, END = "<!-- begin: benchmarks.gpu_peaks -->", "<!-- end: benchmarks.gpu_peaks -->"
NEAR, BELOW, SMALL = 0.15, 0.05, 2**17
"""Shares of what XLA:GPU holds: a prediction so far off counts as close, and none should be lower by more than the second; and bytes
by which none counts as too low: the counters of loops and copies of short vectors are not modelled."""


@dataclass(frozen=True)
class Form:
    """A program as written or as planned: bytes held at its peak, as predicted and as compiled."""

    predicted: int
    triton: int
    cublas: int

    @property
    def held(self) -> int:
        return max(self.triton, self.cublas)

    @property
    def ratio(self) -> float:
        """Predicted over compiled: below one, the model promised too little."""
        return self.predicted / self.held

    @property
    def is_close(self) -> bool:
        return abs(self.ratio - 1) <= NEAR

    @property
    def is_low(self) -> bool:
        return self.held - self.predicted > max(BELOW * self.held, SMALL)


@dataclass(frozen=True)
class Figures:
    """The figures of a program; one that no plan fits has no plan."""

    name: str
    limit: int
    written: Form
    plan: Form | None
    planning_s: float
    """Processor seconds of planning, which other programs on the machine do not change much."""


def measure(name: str, function: Callable[..., Any], avals: Sequence[Any], limit: int, device: str) -> Figures:
    """Plan one program for a device and compile it, as written and as planned. ``avals`` are its arguments, which may be trees."""
    import jax
    from jax.extend.core import jaxpr_as_fun

    import eqsat_mem
    from eqsat_mem.backends.gpu import deviceless
    from eqsat_mem.backends.gpu.targets import named

    def planned(limit: int, verify: bool) -> Any:
        return eqsat_mem.optimize(function, memory_limit=limit, device=device, verify=verify).plan(*avals)

    def held(some: Callable[..., Any]) -> tuple[int, int]:
        triton, cublas = deviceless.compile_for(some, jaxpr.in_avals, named(device)).settings
        return triton.held_bytes, cublas.held_bytes

    jaxpr = jax.make_jaxpr(function)(*avals)
    written = held(jaxpr_as_fun(jaxpr))
    start = time.process_time()
    try:
        plan = planned(limit, True)
    except eqsat_mem.MemoryLimitError:
        seconds = time.process_time() - start
        return Figures(name, limit, Form(planned(named(device).memory_bytes, False).original_peak_bytes, *written), None, seconds)
    seconds = time.process_time() - start
    return Figures(name, limit, Form(plan.original_peak_bytes, *written), Form(plan.peak_bytes, *held(plan.function)), seconds)


def _measured(which: tuple[str, str, str]) -> Figures:
    import jax

    from benchmarks.plan_sources import find

    collection, name, device = which
    program = find(collection, name)
    with jax.enable_x64(program.x64):
        assert program.limit is not None
        return measure(name, program.function, program.arguments, program.limit, device)


def table(rows: Sequence[Figures]) -> str:
    """A Markdown table: MiB held, and processor seconds of planning."""
    head = ["program", "limit", "as written: predicted", "Triton", "cuBLAS", "ratio", "plan: predicted", "Triton", "cuBLAS", "ratio"]
    lines = [[*head, "planned in"], ["---", *["---:"] * len(head)]]
    for row in rows:
        plan = ["no plan fits", "", "", ""] if row.plan is None else _cells(row.plan)
        lines.append([f"`{row.name}`", _mib(row.limit), *_cells(row.written), *plan, f"{row.planning_s:.1f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(rows: Sequence[Figures]) -> str:
    """The number of predictions that are close, and those that are too low."""
    said = []
    for title, forms in (("As written", [row.written for row in rows]), ("as planned", [row.plan for row in rows])):
        low = [f"`{row.name}` {form.ratio:.2f}" for row, form in zip(rows, forms) if form and form.is_low]
        lowest = f"{len(low)} too low by more than {BELOW:.0%} ({', '.join(low)})" if low else f"none too low by more than {BELOW:.0%}"
        said.append(f"{title}, {sum(form is not None and form.is_close for form in forms)} of {len(forms)} are within {NEAR:.0%}, {lowest}")
    return "; ".join(said) + "."


def write(text: str) -> None:
    """Put the table between the markers of the page."""
    page = PAGE.read_text(encoding="utf-8")
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    PAGE.write_text(between.sub(lambda _: f"{BEGIN}\n{text}\n{END}", page), encoding="utf-8")


def _cells(form: Form) -> list[str]:
    return [_mib(form.predicted), _mib(form.triton), _mib(form.cublas), f"{form.ratio:.2f}"]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h100", help="the card (default: %(default)s)")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="programs of these names")
    parser.add_argument("--programs", nargs="*", default=["gpu"], metavar="FILE", help="Python files with programs in a list CASES")
    parser.add_argument("--json", type=Path, metavar="OUT", help="keep the figures")
    parser.add_argument("--write", action="store_true", help=f"write the table into docs/{PAGE.name}")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["EQSAT_MEM_PROFILES"] = "none"
    from benchmarks.plan_sources import names

    every = [(c, name, options.device) for c in options.programs for name in names(c) if not options.only or name in options.only]
    rows: list[Figures] = []
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        for row in pool.imap(_measured, every):
            rows.append(row)
            print(table([row]).splitlines()[-1], flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if options.write:
        write(f"{table(rows)}\n\n{summary(rows)}")
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
