"""The top-level forms of egglog text: balanced parentheses, strings and comments, with line numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from eqsat_mem.errors import RuleError

_TOKEN = re.compile(r'(?P<comment>;[^\n]*)|(?P<string>"(?:\\.|[^"\\])*")|(?P<open>\()|(?P<close>\))|(?P<newline>\n)|(?P<atom>[^\s()";]+)|(?P<bad>")')


@dataclass(frozen=True)
class Form:
    """One top-level form.

    Attributes:
        text: the form as written.
        tree: nested lists of atoms; strings keep their quotes.
        comments: the comment lines directly above it, without semicolons.
        place: ``file:line`` of its first character.
    """

    text: str
    tree: list[Any]
    comments: tuple[str, ...]
    place: str


def read_forms(text: str, name: str) -> list[Form]:
    """The forms of a text.

    Raises:
        RuleError: for a parenthesis or a quote without its partner, and for anything outside of parentheses, with file and line.
    """
    forms: list[Form] = []
    stack: list[list[Any]] = []
    comments: list[tuple[int, str]] = []
    start, line, first = 0, 1, 1
    for token in _TOKEN.finditer(text):
        match token.lastgroup:
            case "newline":
                line += 1
            case "comment" if not stack:
                comments.append((line, token.group().lstrip(";").strip()))
            case "open":
                if not stack:
                    start, first = token.start(), line
                stack.append([])
            case "close":
                if not stack:
                    raise RuleError(f"{name}:{line}: a ')' without its '('.")
                done = stack.pop()
                if stack:
                    stack[-1].append(done)
                else:
                    forms.append(Form(text[start : token.end()], done, _directly_above(comments, first), f"{name}:{first}"))
                    comments = []
            case "bad":
                raise RuleError(f"{name}:{line}: a quote without its partner.")
            case "string" | "atom":
                if not stack:
                    raise RuleError(f"{name}:{line}: {token.group()!r} stands outside of parentheses.")
                stack[-1].append(token.group())
                line += token.group().count("\n")
    if stack:
        raise RuleError(f"{name}:{first}: the form that begins here lacks {len(stack)} ')'.")
    return forms


def _directly_above(comments: list[tuple[int, str]], first: int) -> tuple[str, ...]:
    """The comment lines that end in the line above ``first``, without a gap."""
    above: list[str] = []
    for line, text in reversed(comments):
        if line != first - 1 - len(above):
            break
        above.append(text)
    return tuple(reversed(above))
