"""The number of plans that a constant decides: each is doubled and halved, and the programs of ``benchmarks.plan_sources`` are planned
again.

    python -m benchmarks.calibration.sensitivity OUT.json [--programs FILE.py ...] [--only NAME ...] [--factors 2 0.5]

A plan has changed if its source has. Plans are made with the built-in profile and nothing is compiled, so the table depends on
the planner alone, and not on how busy the machine is. What is known so far stands in the file after every program.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks import plan_sources
from benchmarks.racing import markdown

DEVICE_WIDE = ("name", "tile_level", "vector_bits", "thin_columns", "deal_s")
"""Fields of a profile that are no figures, or have constants of the same name."""
COMPILED = ("hidden_scratch", "vector_width", "DOUBT")
"""Constants of what compiled programs hold, or are compiled with: no plan depends on them as long as nothing is compiled."""
ENTRIES = ("exp", "div", "sqrt", "log", "pow", "tanh")
"""Operations whose weights are tried one by one besides all together: those that most programs have."""


def paths() -> list[str]:
    """The constants that are tried."""
    from benchmarks.calibration.constants import known
    from eqsat_mem.backends.cpu.profile import CpuDevice

    device = [f"device.{field.name}" for field in fields(CpuDevice) if field.name not in DEVICE_WIDE]
    planned = [path for path in known() if not any(part in path for part in COMPILED)]
    return [*device, *planned, *(f"backends.cpu.weights.MEASURED[{op}]" for op in ENTRIES)]


def changes(job: tuple[tuple[str, str], Sequence[str], Sequence[float]]) -> dict[str, Any]:
    """The number of plans of one program, and of those that each changed constant changes, by path and factor."""
    import jax

    from benchmarks.calibration.constants import changed, scaled, value

    which, constants, factors = job
    jax.config.update("jax_enable_x64", which[0] in ("samples", "random"))
    program = plan_sources.find(*which)
    jax.config.update("jax_enable_x64", program.x64)
    found: dict[str, Any] = {"name": program.name, "plans": 0, "changed": Counter()}
    with _saturated_once():
        try:
            limits = plan_sources.limits(program)
        except (NotImplementedError, TypeError):
            return found
        usual = [_source(program, limit) for limit in limits]
        found["plans"] = len(usual)
        for path in constants:
            for factor in factors:
                with changed({path: _scaled(path, value(path), factor, scaled)}):
                    other = [_source(program, limit) for limit in limits]
                found["changed"][f"{path} {factor:g}"] += sum(a != b for a, b in zip(usual, other, strict=True))
    return found


def _scaled(path: str, usual: Any, factor: float, scaled: Callable[[Any, float], Any]) -> Any:
    """Of the memory's levels the rates are changed, not the capacities."""
    if path == "device.levels":
        return tuple((size, rate * factor) for size, rate in usual)
    return scaled(usual, factor)


def _source(program: plan_sources.Planned, limit: int) -> str:
    from eqsat_mem import MemoryLimitError

    try:
        return plan_sources.without_places(plan_sources.plan(program, limit).source)
    except MemoryLimitError as error:
        return f"nothing fits, smallest {error.smallest_bytes}"


@contextmanager
def _saturated_once() -> Iterator[None]:
    """E-graphs, which do not depend on any constant, are kept for the plans of one program."""
    from eqsat_mem import candidates
    from eqsat_mem.transforms.plan_bodies import has_plans

    saturate, kept = candidates.saturate, dict[Any, Any]()

    def once(program: Any, rules: Any, *more: Any) -> Any:
        if has_plans(program) or program.effects:
            return saturate(program, rules, *more)
        key = str(program), more  # the rules are those of the program's options
        if key not in kept:
            kept[key] = saturate(program, rules, *more)
        return kept[key]

    candidates.saturate = once  # type: ignore[assignment]
    try:
        yield
    finally:
        candidates.saturate = saturate


def table(report: Mapping[str, Any]) -> str:
    """Constants by how many plans they change."""
    factors = report["factors"]
    counts = report["changed"]
    order = sorted(report["constants"], key=lambda path: -max(counts.get(f"{path} {factor:g}", 0) for factor in factors))
    lines = [["constant", *(f"times {factor:g}" for factor in factors)], ["---", *["---:"] * len(factors)]]
    lines += [[f"`{path}`", *(str(counts.get(f"{path} {factor:g}", 0)) for factor in factors)] for path in order]
    return f"Of {report['plans']} plans of {len(report['programs'])} programs change:\n\n{markdown(lines)}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--programs", nargs="*", default=[], help="Python files with more programs in a list CASES")
    parser.add_argument("--only", nargs="*", default=[], help="constants whose path contains one of these")
    parser.add_argument("--factors", nargs="*", type=float, default=[2.0, 0.5])
    parser.add_argument("--every", type=int, default=1, metavar="N", help="plan only every Nth program")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(argv)
    os.environ["EQSAT_MEM_PROFILES"] = "none"
    constants = [path for path in paths() if not options.only or any(part in path for part in options.only)]
    jobs = [(which, constants, options.factors) for which in list(plan_sources.programs(options.programs))[:: options.every]]
    report: dict[str, Any] = {"factors": options.factors, "constants": constants, "plans": 0, "programs": [], "changed": Counter()}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for found in pool.imap_unordered(changes, jobs):
            report["plans"] += found["plans"]
            report["programs"].append(found["name"])
            report["changed"].update(found["changed"])
            options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))


if __name__ == "__main__":
    main()
