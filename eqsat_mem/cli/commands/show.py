"""``eqsat-mem show``: the terms of a program, and the same in the rule language."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from eqsat_mem.passes import EVERY, Pass

if TYPE_CHECKING:
    from eqsat_mem.ir import Program


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "show",
        help="print a program's terms, also in the language of rule files",
        description="Trace a function and print its terms over named indices, then as the nodes that rules match.",
    )
    add_function(parser)
    parser.set_defaults(command=run)


def add_function(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """The arguments that name a function and what it is called with."""
    parser.add_argument(
        "function",
        metavar="PLACE:FUNCTION",
        nargs=None if required else "?",
        help="the function: FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION; or the file of a module of StableHLO, which needs no --args",
    )
    parser.add_argument("--args", metavar="PLACE:MAKE_ARGS", help="a function that returns its arguments, as for eqsat-mem plan")


def traced(options: argparse.Namespace, passes: Collection[Pass] = EVERY) -> Program:
    """The program of the function that the command line names, which ``passes`` may change."""
    import jax

    from eqsat_mem.api.arguments import argument_names
    from eqsat_mem.cli.user_files import plain, subject
    from eqsat_mem.frontend.load import load

    function, args, kwargs = subject(options.function, options.args)
    traced, leaves = plain(function), jax.tree.leaves((args, kwargs))
    return load(jax.make_jaxpr(traced)(*args, **kwargs), argument_names(traced, args, kwargs, leaves), passes=passes)


def run(options: argparse.Namespace) -> int:
    from eqsat_mem.egraph.printer import in_rule_language

    program = traced(options)
    print(f"{program}\n\nas rules see it ({{}} are sets of indices):\n{in_rule_language(program)}")
    return 0
