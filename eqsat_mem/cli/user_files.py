"""Loading of functions in files and modules named on the command line, with errors that describe the mistake in the file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from eqsat_mem.errors import OptionError, UserFileError
from eqsat_mem.ir.ops import Monoid, Operation
from eqsat_mem.stablehlo.endings import ENDINGS


def load_function(place: str) -> Callable[..., Any]:
    """Return the function named by ``FILE.py:FUNCTION`` or, as ``python -m`` finds modules, ``PACKAGE.MODULE:FUNCTION``.

    The file is imported as a module, once; a file of a package as the package's module.

    Raises:
        UserFileError: if the text does not have this form, the file or module is missing or raises, or it lacks the function.
    """
    where, name = _split(place)
    module = _load(where)
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if function is None:
        raise UserFileError(f"{where} has no function {name!r}{_suggestion(module)}.")
    if not callable(function):
        raise UserFileError(f"{name!r} in {where} is of type {type(function).__name__}, not a function.")
    return function


def subject(place: str, arguments: str | None) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the function that a command is about, and the arguments that it is called with.

    Args:
        place: a function, as for :func:`load_function`, or the file of a module of StableHLO.
        arguments: a function likewise, which returns the arguments; None for a module, which says itself what it takes.

    Raises:
        OptionError: if there are arguments for a module, or none for a function.
        UserFileError: as :func:`load_function` and :func:`call_arguments`, or if the function raises while it is traced.
        StableHLOError: if the module cannot be read.
    """
    if is_module(place):
        if arguments is not None:
            raise OptionError(f"{place} says itself what it is called with: leave out --args.")
        return load_module(Path(place))
    function = load_function(place)
    if arguments is None:
        raise OptionError("--args is missing: what is the function called with?")
    args, kwargs = call_arguments(arguments)
    check_call(place, plain(function), args, kwargs)
    return function, args, kwargs


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that ``optimize`` was given, for one that it has made; else the function itself."""
    from eqsat_mem.api.optimize import Optimized

    return function.__wrapped__ if isinstance(function, Optimized) else function  # type: ignore[attr-defined]


def is_module(place: str) -> bool:
    """Whether a place is a file with a module of StableHLO, and no function."""
    path = Path(place)
    return path.suffix in ENDINGS or (path.is_file() and path.suffix != ".py")


def load_module(path: Path) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a module of StableHLO as a function with its arguments. Operations that are kept as they stand are told on standard error.

    Raises:
        StableHLOError: if it cannot be read.
    """
    import jax

    from eqsat_mem.stablehlo.read import from_stablehlo

    function = from_stablehlo(path)
    if function.is_wide:
        jax.config.update("jax_enable_x64", True)
    for kept in function.kept:
        sys.stderr.write(f"kept as it is: {kept}\n")
    return function, function.args, function.kwargs


def load_operations(files: Sequence[str]) -> list[Operation | Monoid]:
    """Return the operations and monoids that Python files define or import, for each file in the order of their names.

    Raises:
        UserFileError: if a file is missing or raises, or has no operations.
    """
    found: dict[Operation | Monoid, None] = {}
    for file in files:
        values = [value for _, value in sorted(vars(_load(file)).items()) if isinstance(value, Operation | Monoid)]
        if not values:
            raise UserFileError(f"{file} has no operations: it assigns eqsat_mem.Operation(...) or eqsat_mem.Monoid(...) to names.")
        found |= dict.fromkeys(values)
    return list(found)


def call_arguments(place: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the function named by ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION`` for the arguments that it returns.

    Returns:
        Positional and keyword arguments: a returned tuple is the former, a dictionary the latter, any other value the only argument.

    Raises:
        UserFileError: as :func:`load_function`, or if the function itself raises.
    """
    make = load_function(place)
    with _user_errors(_file_of(make), f"{place} raised"):
        made = make()
    if isinstance(made, dict):
        return (), made
    return (made if isinstance(made, tuple) else (made,)), {}


def check_call(place: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Trace a user's function once as JAX would, to tell its own errors from those of planning.

    Args:
        place: the function as it was named, for the message.
        function: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        UserFileError: if the function raises.
    """
    import jax

    only = args[0] if len(args) == 1 else None
    hint = f" (of one argument, a list of {len(only)}: return a tuple for several)" if isinstance(only, list) else ""
    with _user_errors(_file_of(function), f"{place} raised while JAX traced it{hint}"):
        jax.eval_shape(function, *args, **kwargs)


def _split(place: str) -> tuple[str, str]:
    """Return the file or module, and the name of the function in it."""
    where, colon, name = place.rpartition(":")
    if not (where and colon and _is_dotted(name) and (_is_dotted(where) or where.endswith(".py"))):
        raise UserFileError(f"{place!r} names no function: write FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION.")
    return where, name


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _file_of(function: Any) -> Path:
    """The file in which a function is written, or else one that does not exist."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return Path(getattr(code, "co_filename", "unknown"))


def _load(where: str) -> ModuleType:
    """Return a file or module, imported once: a function and its arguments may come from the same one."""
    if where.endswith(".py"):
        file = Path(where)
        if not file.is_file():
            raise UserFileError(f"there is no file {where}.")
        package = _package(file.resolve())
        return _load_file(file, where) if package is None else _load_module(*package, where)
    return _load_module(where, Path.cwd(), where)


def _package(path: Path) -> tuple[str, Path] | None:
    """The dotted name of a file that belongs to a package, and the folder that the package is in."""
    names, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        names.append(folder.name)
        folder = folder.parent
    return (".".join(reversed(names)), folder) if len(names) > 1 else None


def _load_module(name: str, folder: Path, where: str) -> ModuleType:
    """Import a module as ``python -m`` does in this folder."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    file = Path(where)
    try:
        with _user_errors(file, f"{where} raised while it loaded"):
            spec = importlib.util.find_spec(name)
            file = Path(getattr(spec, "origin", None) or where)
            if spec is not None:
                with _user_errors(file, f"{where} raised while it loaded"):
                    return importlib.import_module(name)
    except UserFileError as error:
        cause = error.__cause__
        if not (isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}.")):
            raise
    raise UserFileError(f"there is no module {name} here or among installed packages.")


def _load_file(file: Path, where: str) -> ModuleType:
    path = file.resolve()
    name = f"eqsat_mem_user_{path.stem}_{abs(hash(path)):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserFileError(f"{where} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))  # it may import modules in its own folder, as when Python runs it
    try:
        with _user_errors(file, f"{where} raised while it loaded"):
            spec.loader.exec_module(module)
    except UserFileError:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _user_errors(file: Path, what: str) -> Iterator[None]:
    """Turn an exception of a user's code into one message with the line of their file."""
    try:
        yield
    except UserFileError:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file.resolve()]
        if isinstance(error, SyntaxError):
            lines = [error.lineno]
        where = f", line {lines[-1]}" if lines else ""
        raise UserFileError(f"{what}{where}: {type(error).__name__}: {error}") from error


def _suggestion(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if callable(value) and getattr(value, "__module__", None) == module.__name__]
    return f"; it has {', '.join(sorted(names))}" if names else ""
