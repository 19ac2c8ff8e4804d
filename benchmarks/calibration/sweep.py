"""Code that the sweeps of this folder share: programs that each show a constant at one size, timed or watched, as a table.

A sweep is a module with ``MEASURES``, the paths of the constants whose docstrings name it, and ``cases(tiny)``, its programs. Its table has
the cost of each program for each unit of its work: in float32 additions, which is the unit of most constants, or in bytes by which
resident memory grew. It changes nothing: the constants are compared with it by whoever runs it, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import numpy as np

from benchmarks.calibration.constants import value
from benchmarks.measuring import grown, warm_up
from benchmarks.racing import markdown
from eqsat_mem.backends.calibrate import REPEATS, SHORTEST_S, elementwise_rate, timed

FEWEST_RUNS = 3


@dataclass(frozen=True)
class Case:
    """A program at one size.

    Attributes:
        label: what it computes, and at which size.
        function: of arrays.
        shapes: of its arguments, which are random float32 numbers between 0 and 1; an array stands for itself.
        work: the units by which its cost is divided: elements, products or turns of a loop if it is timed, bytes if it is watched.
        watched: whether the growth of resident memory is asked for, and not seconds.
        options: those of its compilation.
    """

    label: str
    function: Callable[..., Any]
    shapes: Sequence[Any]
    work: float
    watched: bool = False
    options: Mapping[str, str] | None = None

    def arguments(self) -> list[Any]:
        random = np.random.default_rng(0)
        made = (random.random(given, np.float32) if isinstance(given, tuple) else given for given in self.shapes)
        return [jax.device_put(array) for array in made]

    def compiled(self) -> tuple[Any, list[Any]]:
        arguments = self.arguments()
        return jax.jit(self.function).lower(*arguments).compile(self.options), arguments


@dataclass(frozen=True)
class Row:
    """The figures of a case: seconds or bytes, and its cost for each unit of work."""

    label: str
    measured: float
    cost: float


def seconds(case: Case, shortest_s: float = SHORTEST_S) -> float:
    """The median of runs of one program that take ``shortest_s`` together, and of :data:`REPEATS` at most."""
    compiled, arguments = case.compiled()
    jax.block_until_ready(compiled(*arguments))
    runs: list[float] = []
    while len(runs) < FEWEST_RUNS or (sum(runs) < shortest_s * REPEATS and len(runs) < REPEATS**3):
        runs.append(timed(compiled, arguments))
    return statistics.median(runs)


def growth(case: Case) -> float:
    """Bytes by which the process grows in a second run, its result included; those that the first run allocates once are not counted."""
    compiled, arguments = case.compiled()
    warm_up(np.float32)
    jax.block_until_ready(compiled(*arguments))
    return float(grown(lambda: compiled(*arguments))[1] or 0)


def rows(cases: Iterable[Case], shortest_s: float = SHORTEST_S, elements: float | None = None) -> Iterator[Row]:
    """Each case as measured; ``elements`` are additions per second, which are measured first if they are not given."""
    rate = elements or elementwise_rate(2**16, shortest_s)
    for case in cases:
        measured = growth(case) if case.watched else seconds(case, shortest_s)
        yield Row(case.label, measured, measured * (1.0 if case.watched else rate) / case.work)


def table(module: ModuleType, found: Iterable[Row]) -> str:
    """The constants that a sweep measures as they are now, and its figures."""
    constants = [f"{path.rpartition('.')[2]} = {value(path)}" for path in module.MEASURES if not isinstance(value(path), dict)]
    lines = [["case", "seconds or bytes", "cost per unit"], ["---", "---:", "---:"]]
    lines += [[row.label, f"{row.measured:.4g}", f"{row.cost:.3g}"] for row in found]
    return "\n".join([*constants, "", markdown(lines)])


def main(name: str, argv: Sequence[str] | None = None) -> None:
    """The command line of the sweep in a module: ``python -m benchmarks.calibration.NAME [--tiny]``."""
    module = importlib.import_module(f"benchmarks.calibration.{name}")
    parser = argparse.ArgumentParser(prog=f"python -m {module.__name__}", description=module.__doc__)
    parser.add_argument("--tiny", action="store_true", help="at sizes that say nothing, to see that it runs")
    tiny = parser.parse_args(argv).tiny
    cases = list(module.cases(tiny))
    if not any(case.watched for case in cases):
        print(table(module, rows(cases)))
        return
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # memory that one case leaves, the next would use
        print(table(module, pool.imap(_alone, [(name, tiny, n) for n in range(len(cases))], chunksize=1)))


def _alone(which: tuple[str, bool, int]) -> Row:
    name, tiny, n = which
    module = importlib.import_module(f"benchmarks.calibration.{name}")
    return next(rows(list(module.cases(tiny))[n : n + 1]))


def steps(tiny: bool, *sizes: int) -> Sequence[int]:
    """The sizes of a sweep; of a tiny one two that differ, however small."""
    return (4, 8) if tiny else sizes
