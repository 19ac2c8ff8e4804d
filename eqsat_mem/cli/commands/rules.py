"""``eqsat-mem rules``: all rules with their soundness and origin, and what they do in a program."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from eqsat_mem.cli.commands.check_rules import add_operations
from eqsat_mem.cli.commands.show import add_function, traced
from eqsat_mem.options import Accuracy, Options
from eqsat_mem.passes import FILE
from eqsat_mem.units import aligned, for_terminal

if TYPE_CHECKING:
    from eqsat_mem.egraph.rule_files import Rule
    from eqsat_mem.passes import Pass


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "rules",
        help="list the rules that apply; for a function, with matches and time",
        description="List the rules that apply, with soundness, ruleset, origin and equation. For a function, also how often each matches "
        "in it and the seconds that it takes, to a millisecond; the costliest come first.",
    )
    add_function(parser, required=False)
    add_choice(parser)
    parser.set_defaults(command=run)


def add_choice(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which rules apply."""
    parser.add_argument("--rules", action="append", default=[], metavar="FILE.egg", help="a rule file besides the shipped ones")
    add_operations(parser)
    parser.add_argument("--accuracy", choices=get_args(Accuracy), help="as for optimize (default: all)")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this rule, or the rules of this file")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="all but this rule, or the rules of this file")


def chosen(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``optimize`` about rules; empty where the command line says nothing of them."""
    from eqsat_mem.cli.user_files import load_operations

    said = {
        "rules": options.rules,
        "operations": load_operations(options.operations),
        "accuracy": options.accuracy,
        "only_rules": options.only,
        "without_rules": options.without,
    }
    return {name: value for name, value in said.items() if value}


def run(options: argparse.Namespace) -> int:
    from eqsat_mem.egraph.rule_files import load_rules
    from eqsat_mem.egraph.saturate import saturate

    given = Options(**chosen(options))
    rules = load_rules(given.rules, given.accuracy, given.only_rules, given.without_rules, given.operations)
    if options.function is None:
        print(for_terminal(table(rules.cards)))
        return 0
    program = traced(options, rules.passes)
    view = saturate(program, rules)
    matches = {**view.matches, **dict.fromkeys(program.passes, 1)}
    print(for_terminal(table(rules.cards, matches, view.seconds)))
    print(f"{view.rows} rows in {view.iterations} iterations; stopped: {view.stopped}")
    return 0


def _shipped_first(rules: Sequence[Rule | Pass]) -> list[Rule | Pass]:
    """The rules and passes in their order, the user's last, where a terminal shows them."""
    from eqsat_mem.egraph.rule_files import default_files

    shipped = {FILE, *(Path(f).stem for f in default_files())}
    return sorted(rules, key=lambda r: r.file not in shipped)


def table(rules: Sequence[Rule | Pass], matches: Mapping[str, int] | None = None, seconds: Mapping[str, float] | None = None) -> str:
    """One line per rule or pass; those that match in a program first, the costliest on top."""
    matches, seconds = matches or {}, seconds or {}
    ordered = sorted(rules, key=lambda r: (-seconds.get(r.name, 0.0), -matches.get(r.name, 0))) if matches else _shipped_first(rules)
    rows = [[r.name, r.sound, r.ruleset, r.place, r.equation] for r in ordered]
    if matches:
        rows = [[str(matches.get(r.name, 0)), f"{seconds.get(r.name, 0.0):.3f} s", *row] for r, row in zip(ordered, rows)]
    return "\n".join(aligned(rows))
