"""The names and places by which a report tells the functions of a script apart."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from jax.extend.core import Jaxpr

from eqsat_mem.ir.jaxprs import nested_jaxprs


def identity(fun: Any) -> dict[str, Any]:
    """The name of a function, and its file and line."""
    fun = _innermost(fun)
    name = getattr(fun, "__qualname__", type(fun).__qualname__)
    code = _code(fun)
    if code is None:
        return {"function": name, "place": getattr(fun, "__module__", None) or ""}
    return {"function": _readable(name), "place": _place(code)}


def subject(fun: Any, jaxpr: Jaxpr) -> dict[str, Any]:
    """The same, of the user's function that one of an installed library calls, if that is what was traced.

    Libraries compile the functions of their users within one of their own, always the same.
    """
    code = _code(_innermost(fun))
    if code is not None and _is_installed(code.co_filename):
        found = next(_of_users(jaxpr), None)
        if found is not None:
            return {"function": _readable(found.co_qualname), "place": _place(found)}
    return identity(fun)


def _innermost(fun: Any) -> Any:
    while isinstance(fun, functools.partial) or hasattr(fun, "__wrapped__"):
        fun = fun.func if isinstance(fun, functools.partial) else fun.__wrapped__
    return fun


def _code(fun: Any) -> CodeType | None:
    found = getattr(fun, "__code__", None) or getattr(type(fun).__call__, "__code__", None)
    return found if isinstance(found, CodeType) else None


def _of_users(jaxpr: Jaxpr) -> Iterator[CodeType]:
    """The outermost code of users in which each equation was made, of those that were made in any."""
    for inner in nested_jaxprs(jaxpr):
        for eqn in inner.eqns:
            trace = eqn.source_info.traceback
            codes = [] if trace is None else trace.raw_frames()[0]  # innermost first
            mine = [code for code in codes if not _is_installed(code.co_filename)]
            if mine:
                yield mine[-1]


def _is_installed(file: str) -> bool:
    """Whether a file belongs to Python, to a library, or to this one."""
    return file.startswith(INSTALLED) or not Path(file).is_absolute()


INSTALLED = (*(f"{path}/" for path in sysconfig.get_paths().values()), f"{Path(__file__).parent.parent}/", "<")


def _readable(name: str) -> str:
    return name.replace("<locals>.", "")


def _place(code: CodeType) -> str:
    return f"{_short(Path(code.co_filename))}:{code.co_firstlineno}"


def _short(file: Path) -> Path:
    """The path from the current directory, or from where its module was found."""
    above = [Path.cwd(), *map(Path, sys.path)]
    return min((file.relative_to(path) for path in above if file.is_relative_to(path)), key=lambda p: len(p.parts), default=file)
