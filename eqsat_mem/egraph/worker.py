"""An e-graph in a process of its own, for rules that nobody has tried yet: they may ask for more than there is."""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import IO, Any

from eqsat_mem.egraph import engine
from eqsat_mem.egraph.engine import Command, Failure, Overrun, Panic, Table, Text, receive, send
from eqsat_mem.units import format_bytes

SECONDS, BYTES = 10, 1 << 30
"""The limits of a worker for one e-graph: processor time, and memory. Shipped rules take seconds and 100 MiB for the largest programs."""
PATIENCE, LEAST_S = 6, 60
"""A worker may last so many times as long as its processor time, or so many seconds: the machine may be busy with something else."""
TOLD = 400
"""The number of last characters that an error quotes of the output of a process that crashed."""


class Worker:
    """An e-graph as :class:`eqsat_mem.egraph.engine.LocalSession` is one, in a process that ends where it takes more than it may.

    Methods raise what those of ``LocalSession`` do, and Overrun where the process has ended.
    """

    def __init__(self, seconds: int = SECONDS, size: int = BYTES) -> None:
        self._seconds, self._size, self.spent = seconds, size, 0.0
        self._patience, self._is_late = max(PATIENCE * seconds, LEAST_S), False
        self._end = time.monotonic() + self._patience
        self._printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed with the process
        command = [sys.executable, "-I", "-S", engine.__file__, str(engine.compiled()), str(seconds), str(size)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._printed)

    def declare(self, texts: Sequence[Text]) -> None:
        for name, forms in texts:  # one by one, so that it is known which of them takes too much
            try:
                self._ask("declare", [(name, forms)])
            except Overrun as error:
                raise Overrun(f"{name} {error}") from None

    def load(self, commands: Sequence[Command]) -> None:
        self._ask("load", commands)

    def step(self, ruleset: str, times: int) -> tuple[bool, dict[str, int], dict[str, float]]:
        updated, matches, seconds = self._ask("step", ruleset, times)
        return updated, matches, seconds

    def rows(self) -> int:
        return int(self._ask("rows"))

    def tables(self, sort: str, named: Collection[str]) -> dict[str, Table]:
        found: dict[str, Table] = self._ask("tables", sort, named)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._printed):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()

    def _ask(self, method: str, *arguments: Any) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            send(process.stdin, (method, arguments))
            self._wait(process.stdout)
            failed, answer, self.spent = receive(process.stdout, self._size // 4)
        except (EOFError, BrokenPipeError):
            raise Overrun(self._ended()) from None
        except MemoryError:
            raise Overrun(f"makes an e-graph of more than {format_bytes(self._size // 4)}") from None
        if failed:
            raise (Panic if failed == "Panic" else Failure)(answer)
        return answer

    def _wait(self, stream: IO[bytes]) -> None:
        """Wait until there is an answer, or as long as is reasonable."""
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            if not selector.select(max(self._end - time.monotonic(), 0.0)):
                self._is_late = True
                self._process.kill()

    def _ended(self) -> str:
        """The reason for which the process has ended."""
        status = self._process.wait()
        self._printed.seek(0)
        said = self._printed.read().decode(errors="replace").strip()
        if self._is_late:
            return f"has no answer after {self._patience} s, for {self._seconds} s of the processor"
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            return f"takes more than {self._seconds} s"
        if "memory allocation" in said or "MemoryError" in said:
            return f"takes more than {format_bytes(self._size)} of memory"
        return f"crashes egglog (status {status}): {said[-TOLD:]}"
