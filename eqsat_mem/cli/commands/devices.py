"""``eqsat-mem devices``: list the cards for which plans can be made, and the source of each of their figures."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from eqsat_mem.units import aligned, format_bytes

if TYPE_CHECKING:
    from eqsat_mem.backends.gpu.targets import Target

RATES = {"flops": "float32", "tf32_flops": "rounded", "narrow_flops": "bfloat16", "double_flops": "float64"}
"""The rates of products that the table shows, in 1e12 operations per second, and the headings of their columns."""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "devices",
        help="list the GPUs that plans can be made for",
        description="List GPUs by name, with memory, bandwidth and rates as their data sheets have them. "
        "Name one to see where its figures come from.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="show one device, with the source of each figure")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from eqsat_mem.backends.gpu.targets import TARGETS, named

    shown = [named(options.name)] if options.name else [*TARGETS.values()]
    if options.json:
        print(json.dumps([described(target) for target in shown], indent=1))
    elif options.name:
        print(detail(shown[0]))
    else:
        print(table(shown))
    return 0


def described(target: Target) -> dict[str, Any]:
    """Return a device as a JSON object: sizes in bytes, rates per second, and the source of each figure."""
    return {
        "name": target.name,
        "label": target.label,
        "compute_capability": ".".join(map(str, target.capability)),
        "usable_bytes": target.usable_bytes,
        **{field: {"value": getattr(target, field), "source": source} for field, source in target.sources.items()},
    }


def table(targets: list[Target]) -> str:
    """Return a table with a line per device."""
    head = ["device", "memory", "a plan's", "TB/s", *RATES.values()]
    rows = [
        [t.name, format_bytes(t.memory_bytes), format_bytes(t.usable_bytes), f"{t.memory_rate / 1e12:.2f}", *_rates(t)] for t in targets
    ]
    note = "Products in 1e12 operations per second. A plan's: what a program may hold if no limit is given, 75 % of the memory."
    return "\n".join([*aligned([head, *rows], left=1), "", note])


def detail(target: Target) -> str:
    """Return the description of a device, with a line for each figure and its source."""
    lines = [f"{target.name}: {target.label}, compute capability {target.capability[0]}.{target.capability[1]}"]
    width = max(map(len, target.sources))
    lines += [f"  {field:<{width}}  {_figure(field, getattr(target, field)):>12}  {source}" for field, source in target.sources.items()]
    return "\n".join(lines)


def _rates(target: Target) -> list[str]:
    return [f"{rate / 1e12:.1f}" if (rate := getattr(target, field)) else "-" for field in RATES]


def _figure(field: str, value: float) -> str:
    return format_bytes(int(value)) if field.endswith("_bytes") else f"{value:.4g}"
