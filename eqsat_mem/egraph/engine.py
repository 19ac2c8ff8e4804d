"""egglog itself, and the only module that knows it: an e-graph in this process, or in another that has limits.

Run as a script, this file is that other process. It imports nothing of the package, so that it starts at once.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Any, Protocol

Expression = Any
"""A number, a string, or a pair of a function's name and its arguments."""
Command = tuple[Any, ...]
"""``("set", function, arguments, value)`` or ``("union", one, other)``."""
Row = tuple[int | str, ...]
"""A row of a table."""
Text = tuple[str, tuple[str, ...]]
"""Declarations, rules and facts, form by form, and what messages call them."""
Table = tuple[tuple[str, ...], str, list[tuple[tuple[Any, ...], Any]]]
"""The sorts of a function's arguments, the sort of its value, and its rows. Classes are numbers, equal where classes are."""

MILLI = 1000
"""egglog 13 reports milliseconds as microseconds."""
KEPT = 2
"""How many e-graphs with rules and nothing else a thread keeps, at about 7 MiB each: one serves every program under the same rules."""
IDLE_S = 10.0
"""The seconds after which a process that serves nobody ends."""
DESCRIPTORS = "/proc/self/fd"
"""Where files that are open in this process have paths."""
HEADER = 8
"""Bytes before each message between processes, which tell its length."""


class Failure(Exception):
    """egglog refuses what it is given."""


class Panic(Failure):
    """egglog met an error of its own; the e-graph is of no more use."""


class Overrun(Failure):
    """A worker took more than it may, or crashed; the e-graph is gone."""


class Session(Protocol):
    """One e-graph. Methods raise a :class:`Failure`. ``spent`` is the processor time in seconds, where that is limited."""

    spent: float

    def declare(self, texts: Sequence[Text]) -> None:
        """Declarations, rules and facts as text."""

    def load(self, tables: Mapping[str, Sequence[Row]], commands: Sequence[Command]) -> None:
        """Rows of tables, by their names, and what the ruleset ``loading`` makes of these and of commands."""

    def step(self, ruleset: str, times: int) -> tuple[bool, dict[str, int], dict[str, float]]:
        """Iterations of a ruleset until nothing changes: whether anything did, and the matches and seconds of each rule."""

    def rows(self) -> int:
        """Rows of all tables, without those that were loaded."""

    def tables(self, sort: str, named: Collection[str]) -> dict[str, Table]:
        """The functions with values of a sort, and those of some names, by name."""

    def close(self) -> None:
        """The e-graph is needed no longer."""


class LocalSession:
    """An e-graph in this process. Nothing interrupts it, so it is for rules that are trusted."""

    _parsed: dict[Text, list[Any]] = {}  # noqa: RUF012 -- any e-graph can run what was parsed once

    spent = 0.0

    def __init__(self) -> None:
        self._egg = bindings()
        self._span = self._egg.PanicSpan()
        self._given: set[str] = set()

    @cached_property
    def _graph(self) -> Any:
        return self._egg.EGraph()

    @cached_property
    def _parser(self) -> Any:
        return self._egg.EGraph()

    def declare(self, texts: Sequence[Text]) -> None:
        for name, forms in texts:
            self._run(name, forms)

    def load(self, tables: Mapping[str, Sequence[Row]], commands: Sequence[Command]) -> None:
        """Commands take 20 us each, as syntax trees, and several times as long as text; rows in files take one."""
        self._do("loading", map(self._action, commands))
        for name, rows in tables.items():
            with _file("".join("\t".join(map(str, row)) + "\n" for row in rows)) as path:
                self._do("loading", [self._egg.Input(self._span, name, path)])
        self._given |= tables.keys()
        self._run("loading", ("(run loading 1)",))

    def step(self, ruleset: str, times: int) -> tuple[bool, dict[str, int], dict[str, float]]:
        report = self._run("step", (f"(run {ruleset} {times})",))[0].report
        seconds = {name: MILLI * spent.total_seconds() for name, spent in report.search_and_apply_time_per_rule.items()}
        return report.updated, dict(report.num_matches_per_rule), seconds

    def rows(self) -> int:
        return sum(count for name, count in self._run("size", ("(print-size)",))[0].sizes if name not in self._given)

    def tables(self, sort: str, named: Collection[str]) -> dict[str, Table]:
        graph = self._graph
        numbers: dict[Any, int] = {}

        def number(value: Any) -> int:
            return numbers.setdefault(value, len(numbers))

        read = {
            sort: number,
            "i64": graph.value_to_i64,
            "f64": graph.value_to_f64,
            "String": graph.value_to_string,
            "bool": graph.value_to_bool,
        }
        found: dict[str, Table] = {}
        for name, table in graph.freeze().functions.items():
            sorts, output = tuple(table.input_sorts), table.output_sort
            if output == sort or name in named:
                readers = [read.get(kind, lambda value: tuple(map(number, graph.value_to_vec(value)))) for kind in sorts]
                result = read.get(output, lambda value: None)  # relations have no value
                rows = [(tuple(f(v) for f, v in zip(readers, row.inputs)), result(row.output)) for row in table.rows]
                found[name] = sorts, output, rows
        return found

    def mark(self) -> None:
        """Note what there is, to come back to it."""
        self._run("copy", ("(push)",))

    def rewind(self) -> None:
        """Forget what came after the mark."""
        self._run("copied", ("(pop)",))

    def close(self) -> None:
        pass

    def _run(self, name: str, forms: tuple[str, ...]) -> list[Any]:
        known = self._parsed.get((name, forms))
        if known is None:  # egglog parses long texts in quadratic time, so each form apart
            with _failures(name):
                known = [command for form in forms for command in self._parser.parse_program(form, name)]
            self._parsed[name, forms] = known
        return self._do(name, known)

    def _do(self, name: str, commands: Iterable[Any]) -> list[Any]:
        with _failures(name):
            return list(self._graph.run_program(*commands))

    def _action(self, command: Command) -> Any:
        kind, *rest = command
        if kind == "set":
            name, arguments, value = rest
            return self._egg.ActionCommand(self._egg.Set(self._span, name, list(map(self._tree, arguments)), self._tree(value)))
        return self._egg.ActionCommand(self._egg.Union(self._span, *map(self._tree, rest)))

    def _tree(self, expression: Expression) -> Any:
        if isinstance(expression, tuple):
            name, arguments = expression
            return self._egg.Call(self._span, name, list(map(self._tree, arguments)))
        kinds = {int: self._egg.Int, float: self._egg.Float, str: self._egg.String}
        return self._egg.Lit(self._span, kinds[type(expression)](expression))


class CopiedSession(LocalSession):
    """An e-graph in this process that begins as an earlier one of this thread began, where that had the same declared first.

    egglog takes several times as long to make queries of all rules as to copy an e-graph that has them.
    """

    _kept = threading.local()  # egglog's e-graphs stay in their threads

    def __init__(self) -> None:
        super().__init__()
        self._begun: tuple[Text, ...] | None = None

    def declare(self, texts: Sequence[Text]) -> None:
        if self._begun is not None:
            super().declare(texts)
            return
        known = self._ready().pop(tuple(texts), None)
        if known is None:
            super().declare(texts)
        else:
            self._graph = known
        self.mark()
        self._begun = tuple(texts)

    def close(self) -> None:
        if self._begun is not None:
            self.rewind()
            ready = self._ready()
            ready[self._begun] = self._graph
            while len(ready) > KEPT:
                del ready[next(iter(ready))]
            self._begun = None

    def _ready(self) -> dict[tuple[Text, ...], Any]:
        """The e-graphs that nobody uses, by what they begin with; the last used is the last."""
        ready: dict[tuple[Text, ...], Any] = self._kept.__dict__.setdefault("ready", {})
        return ready

    def _do(self, name: str, commands: Iterable[Any]) -> list[Any]:
        try:
            return super()._do(name, commands)
        except Failure:
            self._begun = None  # whatever it is now, nobody else begins with it
            raise


@contextmanager
def _file(text: str) -> Iterator[str]:
    """The path of a file with a text, for as long as it is needed: in memory where the system has such files."""
    if (made := _in_memory()) is not None:
        with open(made, "w") as file:
            file.write(text)
            file.flush()
            yield f"{DESCRIPTORS}/{file.fileno()}"
    else:
        import tempfile  # which a worker would import at its start

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows"
            path.write_text(text)
            yield str(path)


def _in_memory() -> int | None:
    """The descriptor of a new file in memory that has a path; None where there are no such files."""
    if not hasattr(os, "memfd_create") or not os.path.isdir(DESCRIPTORS):
        return None
    with suppress(OSError):
        return os.memfd_create("rows")
    return None


@contextmanager
def _failures(name: str) -> Iterator[None]:
    """Errors and panics of egglog as failures."""
    try:
        yield
    except bindings().EggSmolError as error:
        raise Failure(str(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what a panic of egglog is in Python; it is no Exception
            raise
        raise Panic(f"{name}: {error}") from error


@cache
def bindings() -> Any:
    """egglog's compiled bindings without the rest of its package, whose import takes several times as long."""
    known = sys.modules.get("egglog.bindings")
    return _loaded(compiled()) if known is None else known


def compiled() -> Path:
    """The file of egglog's compiled bindings."""
    package = importlib.util.find_spec("egglog")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("eqsat_mem needs the package egglog (>=13.2,<14)", name="egglog")
    folder = Path(package.submodule_search_locations[0])
    return next(p for suffix in importlib.machinery.EXTENSION_SUFFIXES if (p := folder / f"bindings{suffix}").exists())


def _loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("egglog.bindings", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- in another process -------------------------------------------------------------------------------


def send(to: IO[bytes], message: Any) -> None:
    """Write a message for the process at the other end."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    to.write(len(data).to_bytes(HEADER) + data)
    to.flush()


def receive(given: IO[bytes], most: int = sys.maxsize) -> Any:
    """Read a message.

    Raises:
        EOFError: if the process at the other end has ended.
        MemoryError: if the message has more bytes than ``most``.
    """
    size = int.from_bytes(_exactly(given, HEADER))
    if size > most:
        raise MemoryError
    return pickle.loads(_exactly(given, size))


def _exactly(given: IO[bytes], size: int) -> bytes:
    data = given.read(size)
    if len(data) < size:
        raise EOFError
    return data


class ServedSession(LocalSession):
    """An e-graph in a process of its own, which may serve several e-graphs that begin alike, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._idle: threading.Timer | None = None

    def rewind(self) -> None:
        """Forget what came after the mark, and end this process unless there is soon something to do."""
        super().rewind()
        self.mark()
        self._idle = threading.Timer(IDLE_S, os._exit, (0,))
        self._idle.start()

    def begin(self, seconds: int) -> float:
        """Allow so much processor time from now on; return what there was before."""
        if self._idle is not None:
            self._idle.cancel()
        _allow(seconds)
        return time.process_time()


def serve(path: str, size: int) -> None:
    """Serve the process that started this one, within limits of processor time and memory, until it asks no more."""
    given, to = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what egglog prints is no message
    sys.modules["egglog.bindings"] = _loaded(Path(path))
    _limit(size)
    session = ServedSession()
    with suppress(EOFError):
        while True:
            method, arguments = receive(given)
            failed, answer = "", None
            try:
                answer = getattr(session, method)(*arguments)
            except Failure as error:
                failed, answer = type(error).__name__, str(error)
            send(to, (failed, answer, time.process_time()))


def _limit(size: int) -> None:
    """End this process where it takes more memory; not every system can."""
    try:
        import resource
    except ImportError:
        return
    for kind, most in (("RLIMIT_AS", size), ("RLIMIT_DATA", size), ("RLIMIT_CORE", 0)):
        with suppress(ValueError, OSError, AttributeError):
            resource.setrlimit(getattr(resource, kind), (most, most))


def _allow(seconds: int) -> None:
    """End this process where it takes more processor time from now on; not every system can."""
    with suppress(ImportError, ValueError, OSError, AttributeError):
        import resource

        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, most))


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
