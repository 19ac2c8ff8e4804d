"""A reader of the top-level forms of egglog text: balanced parentheses, strings and comments, with line numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from eqsat_mem.errors import RuleError

_TOKEN = re.compile(
    r'(?P<comment>;[^\n]*)|(?P<string>"(?:\\.|[^"\\])*")|(?P<open>\()|(?P<close>\))|(?P<newline>\n)|(?P<atom>[^\s()";]+)|(?P<bad>")'
)


DEEPEST = 64
"""The most nested lists allowed; egglog's parser would exhaust its stack on very deep ones."""


@dataclass(frozen=True)
class Form:
    """One top-level form.

    Attributes:
        text: the form as written.
        tree: nested lists of atoms; strings keep their quotes.
        comments: the comment lines immediately above it, without semicolons.
        place: ``file:line`` of its first character.
    """

    text: str
    tree: list[Any]
    comments: tuple[str, ...]
    place: str


def read_forms(text: str, name: str) -> list[Form]:
    """Read the top-level forms of a text.

    Args:
        text: the text.
        name: the name of its file, for messages.

    Raises:
        RuleError: if a parenthesis or a quote is unbalanced, lists are nested too deeply, or an atom is outside of parentheses; the
            message gives file and line.
    """
    reader = _Reader(text, name)
    for token in _TOKEN.finditer(text):
        reader.take(token)
    if reader.stack:
        raise RuleError(f"{name}:{reader.first}: the form that begins here lacks {len(reader.stack)} ')'.")
    return reader.forms


class _Reader:
    """The state of the reader: the forms read so far, the open lists, the line, and the comments since the last form."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        self.forms: list[Form] = []
        self.stack: list[list[Any]] = []
        self.comments: list[tuple[int, str]] = []
        self.line = self.first = 1
        self.start = 0

    def take(self, token: re.Match[str]) -> None:
        match token.lastgroup:
            case "newline":
                self.line += 1
            case "comment" if not self.stack:
                self.comments.append((self.line, token.group().lstrip(";").strip()))
            case "open":
                if not self.stack:
                    self.start, self.first = token.start(), self.line
                if len(self.stack) == DEEPEST:
                    raise RuleError(f"{self.name}:{self.line}: more than {DEEPEST} lists inside each other.")
                self.stack.append([])
            case "close":
                self._close(token.end())
            case "bad":
                raise RuleError(f"{self.name}:{self.line}: a quote without its partner.")
            case "string" | "atom":
                if not self.stack:
                    raise RuleError(f"{self.name}:{self.line}: {token.group()!r} stands outside of parentheses.")
                self.stack[-1].append(token.group())
                self.line += token.group().count("\n")

    def _close(self, end: int) -> None:
        if not self.stack:
            raise RuleError(f"{self.name}:{self.line}: a ')' without its '('.")
        done = self.stack.pop()
        if self.stack:
            self.stack[-1].append(done)
        else:
            above = _directly_above(self.comments, self.first)
            self.forms.append(Form(self.text[self.start : end], done, above, f"{self.name}:{self.first}"))
            self.comments = []


def _directly_above(comments: list[tuple[int, str]], first: int) -> tuple[str, ...]:
    """Return the consecutive comment lines that end in the line above ``first``."""
    above: list[str] = []
    for line, text in reversed(comments):
        if line != first - 1 - len(above):
            break
        above.append(text)
    return tuple(reversed(above))
