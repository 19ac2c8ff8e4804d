"""The original jaxpr and the emitted source as HTML, in which every value is a button that shows its e-class."""

from __future__ import annotations

import io
import token
import tokenize
from collections.abc import Iterator, Mapping
from html import escape
from itertools import count
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from eqsat_mem.ir.jaxprs import inner_jaxprs

LONGEST_PARAMETER = 48
"""Parameters of an equation with more characters than this are omitted."""


def button(text: str, home: int | None) -> str:
    """Return the name of a value, as a button if its e-class ``home`` is known."""
    return (
        escape(text) if home is None else f'<button type="button" class="value" tabindex="-1" data-class="{home}">{escape(text)}</button>'
    )


def jaxpr_html(closed: ClosedJaxpr, arg_names: tuple[str, ...], classes: Mapping[Any, int]) -> str:
    """Return a jaxpr as HTML, one equation per line, with inner jaxprs indented below their equation.

    Args:
        closed: the jaxpr.
        arg_names: the names of its arguments.
        classes: the e-class of each variable for which it is known.
    """
    writer = _Jaxpr(classes)
    writer.names.update(zip(closed.jaxpr.invars, arg_names))
    return "\n".join(writer.lines(closed.jaxpr, ""))


class _Jaxpr:
    """A writer of jaxprs, which names variables in the order in which it writes them."""

    def __init__(self, classes: Mapping[Any, int]) -> None:
        self.classes = classes
        self.names: dict[Any, str] = {}
        self.fresh = (name for name in map(_letters, count()))

    def lines(self, jaxpr: Jaxpr, indent: str) -> Iterator[str]:
        yield f"{indent}lambda {', '.join(map(self.typed, [*jaxpr.constvars, *jaxpr.invars]))}:"
        for eqn in jaxpr.eqns:
            operands = " ".join(map(self.read, eqn.invars))
            outs = ", ".join(map(self.typed, eqn.outvars))
            yield f"{indent}  {outs} = <b>{escape(eqn.primitive.name)}</b>{escape(_parameters(eqn))} {operands}"
            for body in inner_jaxprs(eqn.params):
                yield from self.lines(body, indent + "    ")
        yield f"{indent}  return {', '.join(map(self.read, jaxpr.outvars))}"

    def name(self, variable: Any) -> str:
        if variable not in self.names:
            taken = set(self.names.values())
            self.names[variable] = next(name for name in self.fresh if name not in taken)
        return self.names[variable]

    def read(self, atom: Any) -> str:
        if isinstance(atom, Literal):
            return escape(str(atom.val))
        return button(self.name(atom), self.classes.get(atom))

    def typed(self, variable: Any) -> str:
        if type(variable).__name__ == "DropVar":
            return "_"
        return f"{self.read(variable)}:<i>{escape(variable.aval.str_short(short_dtypes=True))}</i>"


def _parameters(eqn: Any) -> str:
    shown = []
    for key, value in eqn.params.items():
        text = str(value)
        plain = value is not None and not any(inner_jaxprs({key: value}))
        if plain and len(text) <= LONGEST_PARAMETER:
            shown.append(f"{key}={text}")
    return f"[{' '.join(shown)}]" if shown else ""


def _letters(number: int) -> str:
    """Return the name with a number: a, b, ..., z, ba, bb, ..."""
    text = ""
    while True:
        number, letter = divmod(number, 26)
        text = chr(ord("a") + letter) + text
        if number == 0:
            return text


def source_html(source: str, classes: Mapping[str, int]) -> str:
    """Return Python source as HTML, with names of values as buttons and comments in italics.

    Args:
        source: the source.
        classes: the e-class of each name for which it is known.
    """
    out: list[str] = []
    line, column, before = 1, 0, ""
    lines = source.splitlines(keepends=True)

    def copy(row: int, col: int) -> None:
        """Copy the source up to a position."""
        nonlocal line, column
        while line < row:
            out.append(escape(lines[line - 1][column:]))
            line, column = line + 1, 0
        out.append(escape(lines[line - 1][column:col] if line <= len(lines) else ""))
        column = col

    for item in tokenize.generate_tokens(io.StringIO(source).readline):
        if item.type == token.NAME and before != "." and item.string in classes:
            copy(*item.start)
            out.append(button(item.string, classes[item.string]))
            column = item.end[1]
        elif item.type == tokenize.COMMENT:
            copy(*item.start)
            out.append(f"<i>{escape(item.string)}</i>")
            column = item.end[1]
        if item.type not in (tokenize.NL, token.NEWLINE, token.INDENT, token.DEDENT):
            before = item.string
    copy(len(lines) + 1, 0)
    return "".join(out)
