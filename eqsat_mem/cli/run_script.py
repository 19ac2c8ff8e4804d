"""Running a Python script or module in this process as ``python`` would."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

from eqsat_mem.errors import UserFileError


@dataclass(frozen=True)
class Script:
    """A script that has been found.

    Attributes:
        code: its compiled code.
        attributes: the attributes of its module, such as ``__file__``.
        argv0: its ``sys.argv[0]``.
        search_path: its ``sys.path[0]``.
    """

    code: CodeType
    attributes: dict[str, Any]
    argv0: str
    search_path: str


def execute(script: Script, args: Sequence[str]) -> None:
    """Run a script as ``__main__``, for the rest of the process. Its exceptions propagate.

    An uncaught exception is printed as ``python`` would print it: the traceback begins in the script.
    """
    main = ModuleType("__main__")
    main.__dict__.update(script.attributes, __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.argv[:] = [script.argv0, *args]
    set_search_path(script.search_path)
    try:
        exec(script.code, main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        shorten(error)
        raise


def find(script_name: str, is_module: bool) -> Script:
    """Find the script at a path, or a module by its dotted name, whose parent packages are imported.

    Raises:
        UserFileError: if there is no such script or module.
    """
    if is_module:
        set_search_path(os.getcwd())
        return _module(script_name)
    if os.path.isdir(script_name) or script_name.endswith((".zip", ".pyz")):
        return _archive(script_name)
    return _file(script_name)


def set_search_path(path: str) -> None:
    """Set ``sys.path[0]``, unless ``python -P`` has left out the script's folder."""
    if not sys.flags.safe_path:
        sys.path[0] = path


def shorten(error: BaseException) -> None:
    """Print the traceback of ``error``, if it remains uncaught, without the frame in which it was caught here and its callers."""
    inside = error.__traceback__.tb_next if error.__traceback__ else None
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        shown = inside if value is error else trace
        hook(kind, value.with_traceback(shown), shown)

    sys.excepthook = show


def _file(script_name: str) -> Script:
    path = os.path.join(os.getcwd(), script_name)
    try:
        with io.open_code(path) as file:
            text = file.read()
    except OSError as error:
        raise UserFileError(f"cannot open the script {script_name}: {error.strerror}.") from error
    attributes = {
        "__file__": path,
        "__loader__": SourceFileLoader("__main__", path),
        "__spec__": None,
        "__package__": None,
        "__cached__": None,
    }
    try:
        code = compile(text, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        shorten(error.with_traceback(None))
        raise
    return Script(code, attributes, script_name, os.path.dirname(os.path.realpath(path)))


def _module(name: str) -> Script:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ModuleNotFoundError, ValueError) as error:
        raise UserFileError(f"there is no module {name!r} to run: {error}.") from error
    if spec is None:
        raise UserFileError(f"there is no module {name!r} to run, or it is a package without __main__.")
    return _from_spec(spec, spec.origin or name, sys.path[0], name)


def _archive(script_name: str) -> Script:
    """Find the ``__main__.py`` of a directory or zip file."""
    spec = PathFinder.find_spec("__main__", [script_name])
    if spec is None:
        raise UserFileError(f"{script_name} has no __main__.py to run.")
    return _from_spec(spec, script_name, os.path.abspath(script_name), script_name)


def _from_spec(spec: ModuleSpec, argv0: str, search_path: str, name: str) -> Script:
    loader: Any = spec.loader
    code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    if code is None:
        raise UserFileError(f"{name} has no Python code to run.")
    attributes = {
        "__file__": spec.origin,
        "__loader__": loader,
        "__spec__": spec,
        "__package__": spec.parent,
        "__cached__": spec.cached,
    }
    return Script(code, attributes, argv0, search_path)
