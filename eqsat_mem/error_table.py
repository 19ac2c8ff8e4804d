"""The table of all errors with their causes and cures, ``docs/errors.md``, found by a name or by a message."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

WORDS = 5
"""Words of a message in the name of its row, if no other row has the same ones."""
LEAST = 12
"""Letters that a message must share with a row at least to be the row's."""
KINDS = re.compile(r"((`\w+`( or |, )?)+( of Python's| of JAX's|):? ?)?")
"""The types of errors with which a row begins."""
SHORT = 4
"""Words of a cure that says no more than the message itself does, such as "as it says"."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: words of the message, joined by hyphens; unique.
        message: what the error says, in Markdown; words in italics stand for what differs.
        cause, cure: the rest of the row.
        section: the heading above it.
        kinds: the names of the types that it says the error is of, if it says so.
    """

    name: str
    message: str
    cause: str
    cure: str
    section: str
    kinds: frozenset[str]

    def __str__(self) -> str:
        return f"{self.name}\n  message  {_plain(self.message)}\n  cause    {_plain(self.cause)}\n  cure     {_plain(self.cure)}"

    @property
    def says_more(self) -> bool:
        """Whether the row tells a cure that the message does not."""
        return len(self.cure.split()) > SHORT

    def likeness(self, message: str) -> int:
        """The letters of the fixed part of the row if a message has them all in this order, else 0."""
        fixed = _fixed(self.message)
        found = re.search(".*?".join(map(re.escape, fixed)), message, re.DOTALL)
        return sum(map(len, fixed)) if found else 0


def table() -> Path | None:
    """The file: in the package where it is installed, in ``docs`` in a checkout; None if it is in neither."""
    package = Path(__file__).parent
    return next((path for path in (package / "errors.md", package.parent / "docs" / "errors.md") if path.is_file()), None)


@functools.cache
def rows() -> tuple[Row, ...]:
    """The rows in the order of the page; none where the file is missing."""
    path = table()
    return () if path is None else tuple(read(path.read_text(encoding="utf-8")))


def read(page: str) -> Iterator[Row]:
    """The rows of the page's text."""
    section, names = "", set[str]()
    for line in page.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] not in ("message", "warning"):
            message, cause, cure = cells
            name, found = _name(message, names), KINDS.match(message)
            names.add(name)
            yield Row(name, message, cause, cure, section, frozenset(re.findall(r"`(\w+)`", found[0] if found else "")))


def found(asked: str) -> list[Row]:
    """The row of this name or message, else those that have all its words."""
    named = [row for row in rows() if row.name == asked]
    of_message = row_of(asked)
    if named or of_message:
        return named or [row for row in (of_message,) if row]
    return [row for row in rows() if all(word.lower() in f"{row} {row.section}".lower() for word in asked.split())]


def row_of(message: str) -> Row | None:
    """The row of an error's message: of those that fit, the one that shares the most letters with it."""
    best = max(rows(), key=lambda row: row.likeness(message), default=None)
    return best if best is not None and best.likeness(message) >= LEAST else None


def pointer(error: Exception) -> str:
    """The command that prints more about an error than it says itself; empty where there is no more."""
    row = row_of(str(error))
    kinds = {kind.__name__ for kind in type(error).__mro__}
    ours = row is not None and kinds & (row.kinds or {"EqsatMemError"})
    return f"more: eqsat-mem errors {row.name}" if row is not None and ours and row.says_more else ""


def pointing(fun: Callable[P, R]) -> Callable[P, R]:
    """The same function, whose errors of the table tell in a note where to read more."""

    @functools.wraps(fun)
    def pointed(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            note = pointer(error)
            if note and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise

    return pointed


def _name(message: str, taken: set[str]) -> str:
    """A name of the first words of a message's fixed part that no other row has, the fewest above ``WORDS``."""
    words = re.findall(r"[a-z][a-z0-9]*", " ".join(_fixed(message)).lower().replace("_", " "))
    names = ("-".join(words[:n]) for n in range(min(WORDS, len(words)), len(words) + 1))
    return next((name for name in names if name not in taken), f"{'-'.join(words)}-{len(taken)}")


def _fixed(message: str) -> list[str]:
    """The parts of a message that are the same in each error, in order."""
    return [part for part in re.split(r"(?<!\w)\*[^*]+\*(?!\w)", KINDS.sub("", message, count=1)) if part.strip(" .,:;'")]


def _plain(markdown: str) -> str:
    """A cell without links and emphasis; code keeps its quotes."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    return re.sub(r"(?<!\w)\*([^*]+)\*(?!\w)", r"\1", text).replace("`", "")
