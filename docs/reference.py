"""Writes docs/api.md from docstrings: ``python docs/reference.py``. A test keeps the page in step."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from eqsat_mem.__main__ import command_line

PAGE = Path(__file__).with_name("api.md")
PARTS = {
    "Optimising": ["api.optimize.optimize", "api.optimize.Optimized", "options.Options", "options.parse_bytes"],
    "Plans": ["reports.plan.Plan", "reports.plan.LoopSummary", "reports.measured.Tuning", "reports.measured.MeasuredPlan"],
    "Explanations": [
        "reports.explanation.Explanation",
        "reports.explanation.NeededRule",
        "reports.explanation.Found",
        "reports.explanation.LoopEffect",
        "reports.explanation.Held",
        "reports.runners_up.Rival",
        "reports.page.page",
        "reports.timeline.timeline",
        "reports.timeline.Point",
    ],
    "Operations of your own": ["ir.ops.Operation", "ir.ops.Monoid"],
    "StableHLO": ["stablehlo.read.from_stablehlo", "stablehlo.read.ModuleFunction"],
    "Errors": [
        f"errors.{name}"
        for name in (
            "EqsatMemError",
            "OptionError",
            "RuleError",
            "UserFileError",
            "StableHLOError",
            "DeviceCompilerError",
            "DeviceError",
            "MemoryLimitError",
            "PlanMismatchError",
            "PlanningError",
        )
    ],
    "Rules": ["egraph.rule_files.load_rules", "egraph.rule_files.Rule", "egraph.rule_files.RuleSet"],
    "Checking": ["testing.same_values", "backends.xla.compiled_peak", "ir.interpreter.evaluate"],
}
"""The contents of the page, by heading. Names that ``eqsat_mem`` exports must all be here."""
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$", re.MULTILINE)


def reference() -> str:
    """The page."""
    lines = ["# API reference", "", "From the docstrings; `python docs/reference.py` writes this page.", ""]
    for part, names in PARTS.items():
        lines += [f"## {part}", ""]
        for name in names:
            lines += entry(name)
    return "\n".join([*lines, "## Commands", "", *commands()]).rstrip() + "\n"


def entry(name: str) -> Iterator[str]:
    """A function, or a class with its public methods."""
    module, _, attribute = name.rpartition(".")
    home = import_module(f"eqsat_mem.{module}")
    item = getattr(home, attribute)
    public = attribute in import_module("eqsat_mem").__all__
    yield from (f"### `{attribute}`", "", f"`{'eqsat_mem' if public else home.__name__}.{attribute}`", "")
    if inspect.isfunction(item):
        yield from ("```text", *signature(attribute, item), "```", "")
    yield from body(item, inspect.get_annotations(item))
    if inspect.isclass(item):
        for key, value in vars(item).items():
            if key.startswith("_"):
                continue
            if isinstance(value, property):
                yield from (f"**`.{key}: {value.fget.__annotations__.get('return', 'Any')}`**", "")
                yield from body(value, {})
            elif inspect.isfunction(value):
                yield from (f"**`.{key}({', '.join(parameters(value)[1:])}){result(value)}`**", "")
                yield from body(value, {})


def signature(name: str, function: Any) -> list[str]:
    """One line, or one per parameter where that would be long."""
    given, gives = parameters(function), result(function)
    line = f"{name}({', '.join(given)}){gives}"
    return [line] if len(line) <= 100 else [f"{name}(", *(f"    {parameter}," for parameter in given), f"){gives}"]


def parameters(function: Any) -> list[str]:
    """Parameters with their types and defaults."""
    found = inspect.signature(function).parameters.values()
    texts = [p.name + _typed(p) for p in found]
    first = next((k for k, p in enumerate(found) if p.kind is p.KEYWORD_ONLY), None)
    starred = [{p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + text for p, text in zip(found, texts, strict=True)]
    if first is not None and not any(p.kind is p.VAR_POSITIONAL for p in found):
        starred.insert(first, "*")
    return starred


def _typed(parameter: inspect.Parameter) -> str:
    """The type and the default of a parameter, as source has them."""
    kind = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
    return kind + ("" if parameter.default is parameter.empty else f"{' = ' if kind else '='}{_default(parameter.default)}")


def result(function: Any) -> str:
    """The type of what a function returns."""
    given = inspect.signature(function).return_annotation
    return "" if given is inspect.Signature.empty else f" -> {given}"


def _default(value: Any) -> str:
    return f"{value:_}" if type(value) is int else repr(value)


def body(item: Any, types: dict[str, Any]) -> Iterator[str]:
    """A docstring as Markdown: its text, its sections as lists, its examples as code; ``types`` are those of a class's attributes."""
    pieces = SECTION.split(plain(inspect.getdoc(item) or ""))
    yield from text(pieces[0])
    for title, content in zip(pieces[1::2], pieces[2::2], strict=True):
        yield from (f"*{title}*", "")
        content, rest = dedented(content)
        if title == "Returns":
            yield from (" ".join(content.split()), "")
        else:
            yield from (*items(content, types if title == "Attributes" else {}), "")
        yield from text(rest)


def dedented(content: str) -> tuple[str, str]:
    """The indented lines of a section, and what follows them."""
    inside, lines = [], content.strip("\n").split("\n")
    while lines and (not lines[0] or lines[0].startswith("    ")):
        inside.append(lines.pop(0)[4:])
    return "\n".join(inside).strip(), "\n".join(lines)


def items(content: str, types: dict[str, Any]) -> Iterator[str]:
    """``name: text`` with continuation lines, as a list, with types where they are known."""
    for one in re.split(r"\n(?! )", content):
        names, _, meaning = " ".join(one.split()).partition(": ")
        typed = [f"`{name}: {types[name]}`" if name in types else f"`{name}`" for name in names.split(", ")]
        yield f"- {', '.join(typed)}: {meaning}"


def text(content: str) -> Iterator[str]:
    for paragraph in filter(None, (part.strip("\n") for part in content.split("\n\n"))):
        if paragraph.lstrip().startswith(">>>"):
            yield from ("```pycon", paragraph, "```", "")
        else:
            yield from (paragraph, "")


def plain(docstring: str) -> str:
    """Roles and double backticks as Markdown has them."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", docstring).replace("``", "`")


def commands() -> Iterator[str]:
    """Each command with its options; taken from the parser, whose own help looks different under each Python."""
    parser = command_line()
    for name, command in next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices.items():
        yield from (f"### `eqsat-mem {name}`", "", command.description or "", "")
        for action in command._actions:
            if action.dest != "help":
                flags = ", ".join(action.option_strings) or str(action.metavar)
                value = f" {action.metavar}" if action.option_strings and action.metavar else ""
                choices = f" {'|'.join(map(str, action.choices))}" if action.choices else ""
                meaning = (action.help or "").replace("%(default)s", str(action.default))
                yield f"- `{flags}{value}{choices}`{' (required)' if action.required and action.option_strings else ''}: {meaning}"
        yield ""


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
