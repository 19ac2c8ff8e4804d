"""``eqsat-mem errors``: what an error means, from the page of errors."""

from __future__ import annotations

import argparse
from itertools import groupby
from typing import Any

from eqsat_mem import error_table
from eqsat_mem.errors import UserFileError
from eqsat_mem.units import for_terminal

MOST = 8
"""Rows that are shown whole; of more, the names."""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "errors",
        help="say what an error means, why it comes, and what to do",
        description="Print the causes and cures of errors: of the one with this name or message, or of all that have these words. "
        "Without words, list all names.",
    )
    parser.add_argument("words", metavar="NAME|WORDS", nargs="*", help="the name that an error tells, its message, or some of its words")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    asked = " ".join(options.words)
    rows = error_table.found(asked)
    if not rows:
        raise UserFileError(f"no error has the words {asked!r}: eqsat-mem errors lists all.")
    if len(rows) <= MOST:
        print(for_terminal("\n\n".join(map(str, rows))))
        return 0
    for section, listed in groupby(rows, key=lambda row: row.section):
        print(section)
        for row in listed:
            print(f"  {row.name}")
    return 0
