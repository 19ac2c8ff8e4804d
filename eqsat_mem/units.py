"""Text of messages: sizes in bytes with their units, times, numbers of things, and tables."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
}
"""The bytes in one of each unit; decimal prefixes are powers of ten, binary ones powers of two."""


def format_bytes(size: int, round_up: bool = False) -> str:
    """Return a size as text with a binary unit and at most two decimals.

    Args:
        size: the size in bytes.
        round_up: round up, so that the text never says less than the size.

    >>> format_bytes(900), format_bytes(64 * 2**20), format_bytes(60_397_977_600)
    ('900 B', '64 MiB', '56.25 GiB')
    """
    unit = "B"
    for name in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(size) >= UNITS[name]:
            unit = name
    hundredths = -(-100 * size // UNITS[unit]) if round_up else round(100 * size / UNITS[unit])
    return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".") + f" {unit}"


def time_text(seconds: float | None) -> str:
    """Return seconds as text with a unit and three digits; empty for None.

    >>> time_text(4.2e-3), time_text(0.9999), time_text(33.0), time_text(2e-9)
    ('4.2 ms', '1 s', '33 s', '2 ns')
    """
    if seconds is None:
        return ""
    rounded = float(f"{seconds:.3g}")
    if rounded >= 1:
        return f"{seconds:.3g} s" if rounded < 1000 else f"{seconds:,.0f} s"
    for unit, size in (("ms", 1e-3), ("us", 1e-6)):
        if rounded >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def times_as_long(ratio: float) -> str:
    """Return a ratio of times above one in words.

    >>> times_as_long(1.0004), times_as_long(2.5), times_as_long(1234.5)
    ('takes 0.04 % longer', 'takes 2.5 times as long', 'takes 1,234 times as long')
    """
    if ratio < 1.1:
        return f"takes {100 * (ratio - 1):.2g} % longer"
    return f"takes {ratio:,.0f} times as long" if ratio >= 100 else f"takes {ratio:.3g} times as long"


def count(number: int, noun: str) -> str:
    """Return a number of things in words.

    >>> count(1, "chunk"), count(2_000, "chunk")
    ('1 chunk', '2,000 chunks')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def aligned(rows: Sequence[Sequence[str]], left: int | None = None, gap: str = "  ") -> list[str]:
    """Return rows of cells as lines with columns.

    Args:
        rows: the cells of each row, equally many in all of them.
        left: the number of leading columns whose cells stand to the left; those of further columns stand to the right. None is all.
        gap: the text between columns.

    >>> aligned([("peak", "1 GiB"), ("a", "64 MiB")], left=1)
    ['peak   1 GiB', 'a     64 MiB']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lefts = len(widths) if left is None else left
    return [
        gap.join(cell.ljust(width) if k < lefts else cell.rjust(width) for k, (cell, width) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]


def wrapped(line: str, width: int, hang: int = 4) -> list[str]:
    """Return a line as lines of at most ``width`` characters, if words are no longer; those after the first are indented by ``hang`` more.

    >>> wrapped("  over rows of x: 8 in 8 chunks of 1; stacks y", 30)
    ['  over rows of x: 8 in 8', '      chunks of 1; stacks y']
    """
    if len(line) <= width:
        return [line]
    after = " " * (len(line) - len(line.lstrip()) + hang)
    return textwrap.wrap(line, width, subsequent_indent=after, break_long_words=False, break_on_hyphens=False)


def for_terminal(text: str) -> str:
    """Return a text with its lines wrapped to the terminal that it is printed to; unchanged for a pipe or a file."""
    if not sys.stdout.isatty():
        return text
    return "\n".join(part for line in text.split("\n") for part in wrapped(line, shutil.get_terminal_size().columns))
