"""An e-graph in a process of its own, for rules that nobody has tried yet: they may ask for more than there is."""

from __future__ import annotations

import atexit
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from eqsat_mem.egraph import engine
from eqsat_mem.egraph.engine import Command, Failure, Overrun, Panic, Row, Table, Text, receive, send
from eqsat_mem.units import format_bytes

SECONDS, BYTES = 10, 1 << 30
"""The limits of a worker for one e-graph: processor time, and memory. Shipped rules take seconds and 100 MiB for the largest programs."""
PATIENCE, LEAST_S = 6, 60
"""A worker may last so many times as long as its processor time, or so many seconds: the machine may be busy with something else."""
TOLD = 400
"""The number of last characters that an error quotes of the output of a process that crashed."""


class _Process:
    """A process of egglog."""

    def __init__(self, size: int) -> None:
        self.size, self.owner = size, os.getpid()
        self.begun: tuple[Text, ...] | None = None
        """What it can go back to."""
        self._printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed with the process
        command = [sys.executable, "-I", "-S", engine.__file__, str(engine.compiled()), str(size)]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._printed)
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._to, self._from = self._popen.stdin, self._popen.stdout

    def ask(self, method: str, arguments: tuple[Any, ...], seconds: float) -> tuple[str, Any, float]:
        """The name of an error or none, the answer, and the processor time so far.

        Raises:
            TimeoutError: if there is no answer after so many seconds; the process is killed.
            EOFError, BrokenPipeError: if the process ends, or has ended.
            MemoryError: if the answer is larger than a quarter of the memory that the process may take.
        """
        send(self._to, (method, arguments))
        with selectors.DefaultSelector() as selector:
            selector.register(self._from, selectors.EVENT_READ)
            if not selector.select(max(seconds, 0.0)):
                self._popen.kill()
                raise TimeoutError
        answer: tuple[str, Any, float] = receive(self._from, self.size // 4)
        return answer

    def last_words(self) -> tuple[int, str]:
        """The status with which the process ended, and what it printed."""
        status = self._popen.wait()
        self._printed.seek(0)
        return status, self._printed.read().decode(errors="replace").strip()

    def close(self) -> None:
        if self.owner == os.getpid():  # else it is that of a process that this one was forked from
            self._popen.kill()
            self._popen.wait()
        for stream in (self._to, self._from, self._printed):
            with suppress(BrokenPipeError):
                stream.close()


class Worker:
    """An e-graph as :class:`eqsat_mem.egraph.engine.LocalSession` is one, in a process that ends where it takes more than it may.

    Methods raise what those of ``LocalSession`` do, and Overrun where the process has ended. A process that came to no harm serves the
    next worker that begins with the same texts: to read all rules takes as long as to apply them to a small program.
    """

    _idle: list[_Process] = []  # noqa: RUF012 -- one at most, of all workers

    def __init__(self, seconds: int = SECONDS, size: int = BYTES) -> None:
        self._seconds, self._size, self.spent, self._before = seconds, size, 0.0, 0.0
        self._patience = max(PATIENCE * seconds, LEAST_S)
        self._end = time.monotonic() + self._patience
        self._process: _Process | None = None

    def declare(self, texts: Sequence[Text]) -> None:
        begins = self._process is None
        if begins and self._take_over(tuple(texts)):
            return
        for name, forms in texts:  # one by one, so that it is known which of them takes too much
            try:
                self._ask("declare", [(name, forms)])
            except Overrun as error:
                raise Overrun(f"{name} {error}") from None
        if begins and self._process is not None:
            self._ask("mark")
            self._process.begun = tuple(texts)

    def load(self, tables: Mapping[str, Sequence[Row]], commands: Sequence[Command]) -> None:
        self._ask("load", tables, commands)

    def step(self, ruleset: str, times: int) -> tuple[bool, dict[str, int], dict[str, float]]:
        updated, matches, seconds = self._ask("step", ruleset, times)
        return updated, matches, seconds

    def rows(self) -> int:
        return int(self._ask("rows"))

    def tables(self, sort: str, named: Collection[str]) -> dict[str, Table]:
        found: dict[str, Table] = self._ask("tables", sort, named)
        return found

    def close(self) -> None:
        process = self._process
        if process is None:
            return
        if process.begun is not None:
            with suppress(Failure):
                self._ask("rewind")
        self._process = None
        if process.begun is not None and not self._idle:
            self._idle.append(process)
        else:
            process.close()

    def _take_over(self, texts: tuple[Text, ...]) -> bool:
        """Whether there was an idle process that begins with these texts; it is this worker's now. One that begins otherwise ends."""
        with suppress(IndexError):
            process = self._idle.pop()
            if (process.size, process.begun, process.owner) == (self._size, texts, os.getpid()):
                self._process = process
                with suppress(Overrun):  # it has ended meanwhile
                    self._begin()
                    return True
                self._process = None
            process.close()
        return False

    def _begin(self) -> None:
        self._before, self.spent = self._ask("begin", self._seconds), 0.0

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self._process is None:
            self._process = _Process(self._size)
            self._begin()
        process = self._process
        begun, process.begun = process.begun, None  # unless there is an answer
        try:
            failed, answer, spent = process.ask(method, arguments, self._end - time.monotonic())
        except TimeoutError:
            raise Overrun(f"has no answer after {self._patience} s, for {self._seconds} s of the processor") from None
        except (EOFError, BrokenPipeError):
            raise Overrun(self._ended(*process.last_words())) from None
        except MemoryError:
            raise Overrun(f"makes an e-graph of more than {format_bytes(self._size // 4)}") from None
        self.spent = spent - self._before
        if failed:
            raise (Panic if failed == "Panic" else Failure)(answer)
        process.begun = begun
        return answer

    def _ended(self, status: int, said: str) -> str:
        """The reason for which the process has ended."""
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            return f"takes more than {self._seconds} s"
        if "memory allocation" in said or "MemoryError" in said:
            return f"takes more than {format_bytes(self._size)} of memory"
        return f"crashes egglog (status {status}): {said[-TOLD:]}"


@atexit.register
def _close_idle() -> None:
    while Worker._idle:
        Worker._idle.pop().close()
