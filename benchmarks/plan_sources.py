"""Writes the source, predicted peak and predicted seconds of many plans to one file, so that two versions of the planner can be compared.

    python -m benchmarks.plan_sources before.txt [--programs FILE.py ...] [--processes 2]

The programs are the benchmarks', the small programs of the rule checker, random programs of the tests, and the
``CASES`` of other files: objects with ``name``, ``fun``, ``args``, ``limit``, ``x64`` and ``options``. Plans are made with
the built-in profile and without asking XLA, so the file depends on the planner alone: a refactoring leaves it as it is,
byte for byte.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANDOM = 150
"""The number of random programs that are planned."""
SHARES = (0.5, 0.1)
"""The limits of small programs: arguments and outputs, with these shares of the temporaries of the original."""
_PLACE = re.compile(r"^\s*# \S+:\d+ \(.*\)\n", re.MULTILINE)


@dataclass(frozen=True)
class Planned:
    """A function to be planned, and its limit in bytes; None: shares of what it holds as written."""

    name: str
    function: Callable[..., Any]
    arguments: Sequence[Any]
    limit: int | None
    x64: bool
    options: dict[str, Any]


def programs(files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The collection and the name of every program."""
    for collection in ("benchmarks", *files, "samples", "random"):
        yield from ((collection, name) for name in names(collection))


def names(collection: str) -> list[str]:
    """The programs of a collection: ``benchmarks``, ``gpu``, ``samples``, ``random``, or a file."""
    if collection in ("benchmarks", "gpu"):
        return [program.name for program in _listed(collection)]
    if collection == "samples":
        return list(_samples())
    if collection == "random":
        return [str(seed) for seed in range(RANDOM)]
    return [case.name for case in _cases(collection)]


def _listed(collection: str) -> list[Any]:
    if collection == "gpu":
        from benchmarks.gpu_programs import PROGRAMS

        return PROGRAMS
    from benchmarks.programs import BENCHMARKS

    return BENCHMARKS


def find(collection: str, name: str) -> Planned:
    """One program."""
    if collection in ("benchmarks", "gpu"):
        program = next(program for program in _listed(collection) if program.name == name)
        return Planned(name, program.function, program.specs(), program.limit_bytes, program.x64, {})
    if collection == "samples":
        function, arguments = _samples()[name]
        return Planned(name, function, arguments, None, True, {})
    if collection == "random":
        from tests.oracles.programs import sample

        drawn = sample(int(name))
        return Planned(f"random {name}", drawn.function(), drawn.values(), None, True, {})
    case = next(case for case in _cases(collection) if case.name == name)
    return Planned(name, case.fun, case.args(), case.limit, case.x64, case.options)


def _samples() -> dict[str, Any]:
    from eqsat_mem.egraph.soundness.sample_programs import PROGRAMS

    return PROGRAMS


def _cases(file: str) -> list[Any]:
    path = Path(file).resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.CASES)


def record(which: tuple[str, str]) -> str:
    """The plans of one program as text."""
    import jax

    # 64-bit types are on before the program is found: random programs are drawn by their abstract values
    jax.config.update("jax_enable_x64", which[0] in ("samples", "random"))
    program = find(*which)
    jax.config.update("jax_enable_x64", program.x64)
    try:
        within = limits(program)
    except (NotImplementedError, TypeError) as error:
        return f"=== {program.name}: {type(error).__name__}\n"
    return "".join(_planned(program, limit) for limit in within)


def limits(program: Planned) -> list[int]:
    """The limits that a program is planned under, in bytes."""
    if program.limit is not None:
        return [program.limit]
    whole = plan(program, 2**40)
    fixed = whole.argument_bytes + whole.output_bytes
    return [fixed + int(share * (whole.original_peak_bytes - fixed)) for share in SHARES]


def plan(program: Planned, limit: int) -> Any:
    """The plan of a program under a limit, as predicted.

    Raises:
        MemoryLimitError: if nothing fits.
    """
    import eqsat_mem

    return eqsat_mem.optimize(program.function, memory_limit=max(limit, 1), verify=False, **program.options).plan(*program.arguments)


def _planned(program: Planned, limit: int) -> str:
    import eqsat_mem

    head = f"=== {program.name} under {limit}: "
    try:
        made = plan(program, limit)
    except eqsat_mem.MemoryLimitError as error:
        return f"{head}nothing fits, smallest {error.smallest_bytes}\n"
    figures = f"{made.peak_bytes} bytes, {made.predicted_s:.6g} s, rules {', '.join(made.rules_fired)}"
    return f"{head}{figures}\n{without_places(made.source)}\n"


def without_places(source: str) -> str:
    """Emitted source without the comments that name the user's lines."""
    return _PLACE.sub("", source)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--programs", nargs="*", default=[], help="Python files with more programs in a list CASES")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", help="plan only programs whose name contains this")
    options = parser.parse_args(argv)
    os.environ["EQSAT_MEM_PROFILES"] = "none"
    every = [which for which in programs(options.programs) if options.only is None or options.only in which[1]]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool, options.output.open("w") as file:
        for text in pool.imap(record, every):
            file.write(text)
    print(f"{len(every)} programs in {options.output}")


if __name__ == "__main__":
    main()
