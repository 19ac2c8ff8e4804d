"""``eqsat-mem rules``: all rules with their soundness and origin, and what they do in a program."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from eqsat_mem.commands.check_rules import add_operations
from eqsat_mem.commands.show import add_function, traced
from eqsat_mem.config import Accuracy

if TYPE_CHECKING:
    from eqsat_mem.rules import Rule


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "rules",
        help="list the rules that apply; for a function, with matches and time",
        description="List the rules that apply, with soundness, ruleset, origin and equation. For a function, also how often each matches "
        "in it and the seconds that it takes, to a millisecond; the costliest come first.",
    )
    add_function(parser, required=False)
    parser.add_argument("--rules", action="append", default=[], metavar="FILE.egg", help="a rule file besides the shipped ones")
    add_operations(parser)
    parser.add_argument("--accuracy", choices=get_args(Accuracy), default="all", help="as for optimize (default: %(default)s)")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this rule, or the rules of this file")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="all but this rule, or the rules of this file")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    from eqsat_mem.errors import OptionError
    from eqsat_mem.rules import load_rules
    from eqsat_mem.saturate import saturate
    from eqsat_mem.userfile import load_operations

    rules = load_rules(options.rules, options.accuracy, options.only, options.without, load_operations(options.operations))
    if options.function is None:
        print(table(rules.rules))
        return 0
    if options.args is None:
        raise OptionError("--args is missing: what is the function called with?")
    view = saturate(traced(options), rules)
    print(table(rules.rules, view.matches, view.seconds))
    print(f"{view.rows} rows in {view.iterations} iterations; stopped: {view.stopped}")
    return 0


def table(rules: Sequence[Rule], matches: Mapping[str, int] | None = None, seconds: Mapping[str, float] | None = None) -> str:
    """One line per rule; those that match in a program first, the costliest on top."""
    matches, seconds = matches or {}, seconds or {}
    ordered = sorted(rules, key=lambda r: (-seconds.get(r.name, 0.0), -matches.get(r.name, 0))) if matches else list(rules)
    rows = [[r.name, r.sound, r.ruleset, r.place, r.equation] for r in ordered]
    if matches:
        rows = [[str(matches.get(r.name, 0)), f"{seconds.get(r.name, 0.0):.3f} s", *row] for r, row in zip(ordered, rows)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))] if rows else []
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows)
