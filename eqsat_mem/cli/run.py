"""``eqsat-mem run``: run a script in which every function compiled by ``jax.jit`` is planned under a memory limit."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from eqsat_mem.api.run_report import Ledger, say
from eqsat_mem.cli import run_script as scripts
from eqsat_mem.errors import OptionError
from eqsat_mem.options import DEVICE_VARIABLE, LIMIT_VARIABLE, parse_bytes


def prepare(
    script_name: str, *, is_module: bool, limit: str | None, report: str | None, strict: bool, device: str | None = None
) -> Callable[[Sequence[str]], None]:
    """Prepare to run a script or module as ``__main__`` with a ``jax.jit`` that plans; the report is written when the process exits.

    JAX is not imported here, because scripts may set environment variables before they import it.

    Args:
        script_name: the path of a script, directory or zip file, or the dotted name of a module.
        is_module: whether ``script_name`` is the name of a module.
        limit: the memory limit as text, such as ``"64MiB"``; None leaves it to the environment.
        report: the path of the JSON report; None for no such file.
        strict: whether a function that cannot be planned raises an error instead of running as written.
        device: the device for which plans are made; None leaves it to the environment.

    Returns:
        A function that runs the script with its command-line arguments.

    Raises:
        OptionError: if the limit is not a size, or the report cannot be written.
        UserFileError: if there is no such script or module.
    """
    if limit is not None:
        parse_bytes(limit, "--memory-limit")
        os.environ[LIMIT_VARIABLE] = limit
    elif os.environ.get(LIMIT_VARIABLE, "").strip():
        parse_bytes(os.environ[LIMIT_VARIABLE], LIMIT_VARIABLE)
    if device is not None:
        os.environ[DEVICE_VARIABLE] = device
    file = None if report is None else _writable(report)
    ledger = Ledger()
    after_import("jax", lambda module: _install(ledger, strict))  # before a module's parent packages are imported, which may need JAX
    found = scripts.find(script_name, is_module)
    atexit.register(_report, ledger, script_name, file, os.getpid())
    return partial(scripts.execute, found)


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with a module when it has been imported, before the import statement returns; immediately if it already was."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


class _AfterImport(MetaPathFinder):
    """A finder of one module, which asks the other finders for it and adds a step to its import."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_then(module: ModuleType) -> None:
                execute(module)
                self.then(module)

            vars(spec.loader)["exec_module"] = execute_and_then
        return spec


def _install(ledger: Ledger, strict: bool) -> None:
    try:
        from eqsat_mem.api.planning_jit import install
    except Exception as error:
        if strict:
            raise
        say(f"warning: nothing is planned, for {type(error).__name__}: {error}")
    else:
        install(ledger, strict)


def _report(ledger: Ledger, script_name: str, file: Path | None, process: int) -> None:
    if os.getpid() != process:  # a forked process exits; only the script's own process reports
        return
    say(ledger.table(script_name))
    if file is not None:
        file.write_text(ledger.to_json(script_name) + "\n", encoding="utf-8")


def _writable(report: str) -> Path:
    """Return the absolute path of the report, which stays valid when the script changes its working directory."""
    try:
        with open(report, "a", encoding="utf-8"):
            return Path(report).absolute()
    except OSError as error:
        raise OptionError(f"--report {report}: {error.strerror}.") from error
