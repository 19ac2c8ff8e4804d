"""``eqsat-mem cache``: show and remove the plans that are kept between processes."""

from __future__ import annotations

import argparse
import json
from typing import Any

from eqsat_mem.units import aligned, count, format_bytes, time_text


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "cache",
        help="show or remove the plans kept between processes",
        description="Show the folder and the plans kept in it, newest first, or remove them. EQSAT_MEM_CACHE_DIR names another folder; "
        "EQSAT_MEM_CACHE_DIR=none keeps no plans.",
    )
    parser.add_argument("--clear", action="store_true", help="remove all kept plans")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from eqsat_mem.api import kept_plans

    home = kept_plans.folder()
    if home is None:
        print(f"no plans are kept: {kept_plans.VARIABLE}=none")
        return 0
    if options.clear:
        print(f"removed {count(kept_plans.clear(), 'plan')} from {home}")
        return 0
    found = kept_plans.listed()
    if options.json:
        print(json.dumps({"folder": str(home), "plans": [{"file": path.name, **header} for path, header in found]}, indent=1))
        return 0
    print(f"{count(len(found), 'plan')} in {home}, {format_bytes(sum(path.stat().st_size for path, _ in found))}")
    for line in aligned([_row(header) for _, header in found]) if found else ():
        print(line)
    return 0


def _row(header: dict[str, Any]) -> list[str]:
    if not header:
        return ["(cannot be read)", "", "", ""]
    held, limit = format_bytes(header["peak_bytes"]), format_bytes(header["limit_bytes"])
    return [f"  {header['name']}", held, f"of {limit}", f"planned in {time_text(header['planned_s'])}"]
