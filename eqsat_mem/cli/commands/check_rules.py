"""``eqsat-mem check-rules``: each rule of some files on random left sides, both sides evaluated and compared."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eqsat_mem.egraph.rule_files import Rule, RuleSet
    from eqsat_mem.ir.ops import Monoid

FEW = 20
"""So many rules are checked in this process: another one takes seconds to begin."""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "check-rules",
        help="check rule files: both sides of each rule on random values",
        description="Check each rule on random left sides: indices, extents (none and one among them), every dtype, and values with the "
        "corners of their dtypes. What the card claims is what both sides are held to; facts are tested for what they claim. Rules that "
        "state one equation must claim the same of it. The exit status is 1 if a rule is wrong, contradicts another, or is unchecked "
        "without a reason in its file.",
    )
    parser.add_argument("files", nargs="*", metavar="FILE.egg", help="rule files (default: the shipped ones)")
    add_operations(parser)
    parser.add_argument("--rule", action="append", metavar="NAME", help="check this rule only; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="another number draws other left sides (default: %(default)s)")
    parser.set_defaults(command=run)


def add_operations(parser: argparse.ArgumentParser) -> None:
    """The argument that names files with the user's operations."""
    parser.add_argument(
        "--operations", action="append", default=[], metavar="FILE.py", help="a file that defines operations which the rule files name"
    )


def _tell(monoid: Monoid, width: int) -> bool:
    """Whether a monoid is one, printed."""
    problem = monoid.problem()
    print(
        f"{'wrong' if problem else 'right':<9} {monoid.name:<{width}}  {'monoid':<11}  {monoid.operation.place}  {problem}".rstrip(),
        flush=True,
    )
    return not problem


@dataclass(frozen=True)
class Judged:
    """The verdict on a rule, as it is printed."""

    status: str
    accepted: bool
    summary: str
    counterexample: str


def _checked(rule: Rule, rules: RuleSet, seed: int) -> Judged:
    from eqsat_mem.cli.counterexample import counterexample
    from eqsat_mem.egraph.soundness.judge import judge

    verdict = judge(rule, rules, seed)
    return Judged(verdict.status, verdict.accepted, verdict.summary(), "" if verdict.wrong is None else counterexample(verdict.wrong))


_KNOWN: dict[tuple[Any, ...], dict[str, tuple[Rule, RuleSet]]] = {}


def _checked_elsewhere(files: Sequence[str], operations: Sequence[str], seed: int, name: str) -> Judged:
    """The verdict on a rule in a process that loads the rules once."""
    from eqsat_mem.cli.user_files import load_operations
    from eqsat_mem.egraph.rule_files import load_rules

    key = tuple(files), tuple(operations)
    if key not in _KNOWN:
        rules = load_rules(files, "any", operations=load_operations(operations))
        _KNOWN[key] = {rule.name: (rule, rules) for rule in rules.rules}
    return _checked(*_KNOWN[key][name], seed)


def _each(chosen: Sequence[Rule], rules: RuleSet, options: argparse.Namespace) -> Iterator[Judged]:
    """The verdicts on rules in their order, made by as many processes as there are processors."""
    processes = os.cpu_count() or 1
    if processes == 1 or len(chosen) <= FEW:
        yield from (_checked(rule, rules, options.seed) for rule in chosen)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        waiting = [pool.submit(_checked_elsewhere, options.files, options.operations, options.seed, rule.name) for rule in chosen]
        try:
            yield from (future.result() for future in waiting)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def run(options: argparse.Namespace) -> int:
    from eqsat_mem.cli.user_files import load_operations
    from eqsat_mem.egraph.rule_files import default_files, load_rules, select
    from eqsat_mem.egraph.soundness.claims import contradictions
    from eqsat_mem.egraph.soundness.sample_programs import fired
    from eqsat_mem.ir.ops import Monoid

    own = load_operations(options.operations)
    rules = load_rules(options.files, "any", operations=own)
    files = {Path(f).name for f in options.files or default_files()}
    chosen = [r for r in rules.rules if r.place.rpartition(":")[0] in files]
    if options.rule:
        chosen = select(chosen, options.rule)
    width = max((len(r.name) for r in [*own, *chosen]), default=0)
    no_monoids = sum(not _tell(monoid, width) for monoid in own if isinstance(monoid, Monoid))
    bad = excused = 0
    for rule, verdict in zip(chosen, _each(chosen, rules, options), strict=True):
        bad += not verdict.accepted
        excused += verdict.accepted and verdict.status == "unchecked"
        print(f"{verdict.status:<9} {rule.name:<{width}}  {rule.sound:<11}  {rule.place}  {verdict.summary}", flush=True)
        if verdict.counterexample:
            print("\n".join(f"    {line}".rstrip() for line in verdict.counterexample.splitlines()), flush=True)
    names = {rule.name for rule in chosen}
    contradicted = [pair for pair in contradictions(rules.rules, rules.own) if names & {rule.name for rule in pair}]
    for one, other in contradicted:
        print(f"{one.name} ({one.place}) and {other.name} ({other.place}) state one equation: {one.sound} and {other.sound}")
    idle = sorted(names - fired(rules))
    if idle:
        print(f"never fire on the sample programs: {', '.join(idle)}")
    reasons = f"{excused} unchecked for the reason given, " if excused else ""
    print(f"{len(chosen)} rules: {len(chosen) - bad - excused} right, {reasons}{bad} not")
    return 1 if bad or no_monoids or contradicted else 0
