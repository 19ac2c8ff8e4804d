"""Progress on stderr when planning takes longer than a second.

On a terminal it is one line that is rewritten, and erased at the end. In logs and notebooks it is a line for each doubling of the time,
and one for each half minute later on.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TextIO

from eqsat_mem.events import Began, Ended, Event, Explaining, Kept, StageBegan, Tried, anyone_listens, listening
from eqsat_mem.reports.debug import Debug, debug_level
from eqsat_mem.units import format_bytes, time_text

PATIENCE_S = 1.0
"""The seconds after which the line appears."""
INTERVAL_S = 0.2
"""The seconds between two updates of the line on a terminal."""
LONGEST_S = 30.0
"""The most seconds between two lines in a log."""
WIPE = "\r\x1b[K"
"""The characters that erase the terminal's line."""


class Progress:
    """A listener that follows the progress of planning, which :meth:`line` describes."""

    def __init__(self, name: str) -> None:
        self.name, self.stage = name, "trace"
        self.started = time.perf_counter()
        self.depth = self.trees = self.searches = self.limit = 0
        self.best: Any = None

    def __call__(self, event: Event) -> None:
        match event:
            case Began():
                self.depth += 1
                self.limit = event.limit_bytes if self.depth == 1 else self.limit
            case Ended():
                self.depth -= 1
            case StageBegan() if self.depth == 1 and not self.searches:
                self.stage = event.stage
            case Tried():
                self.trees += 1
                self.found(event.schedule)
            case Kept():
                self.found(event.schedules[0])
            case Explaining():
                self.stage, self.searches = "explaining", event.searches

    def found(self, s: Any) -> None:
        """Keep the best schedule of the program itself: the fastest that fits, else the smallest."""
        if self.depth == 1:
            self.best = min((known for known in (self.best, s) if known is not None), key=self._order)

    def _order(self, s: Any) -> tuple[bool, float]:
        return s.peak_bytes > self.limit, s.seconds if s.peak_bytes <= self.limit else s.peak_bytes

    def _best_text(self) -> str:
        if self.best is None or self.searches:
            return ""
        held, limit = format_bytes(self.best.peak_bytes), format_bytes(self.limit)
        if self.best.peak_bytes > self.limit:
            return f"smallest so far {held} (limit {limit})"
        return f"best so far {held} and {time_text(self.best.seconds)} (limit {limit})"

    def line(self) -> str:
        """Return the progress of planning in one line."""
        done = f"{self.searches} searches" if self.searches else f"{self.trees} loop trees" if self.trees else ""
        words = [self.name, self.stage, done, self._best_text(), f"{time.perf_counter() - self.started:.0f} s"]
        return ", ".join(word for word in words if word)


@contextmanager
def watched(name: str) -> Iterator[None]:
    """Report on planning inside the context: at the level of ``EQSAT_MEM_DEBUG`` if it is set, else as progress.

    Nothing is reported if that level is 0, or if another listener is active.

    Args:
        name: the name of the planned function.

    Raises:
        OptionError: if the value of ``EQSAT_MEM_DEBUG`` is not a level.
    """
    level = debug_level()
    with ExitStack() as stack:
        if not anyone_listens():
            if level:
                stack.enter_context(listening(Debug(level)))
            elif level is None:
                stack.enter_context(on_stderr(name))
        yield


@contextmanager
def on_stderr(name: str) -> Iterator[None]:
    """Show progress inside the context, where there is a stderr."""
    stream = sys.stderr
    if stream is None or getattr(stream, "closed", False):
        yield
        return
    with (shown if _is_terminal(stream) else logged)(Progress(name), stream):
        yield


def _is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; False if a script has closed it or replaced it with an object without ``isatty``."""
    with suppress(AttributeError, ValueError):
        return bool(stream.isatty())
    return False


@contextmanager
def shown(progress: Progress, stream: TextIO, patience_s: float = PATIENCE_S, interval_s: float = INTERVAL_S) -> Iterator[None]:
    """Rewrite the line of ``progress`` periodically inside the context.

    A thread writes it, because some steps of egglog and XLA take long without sending events.

    Args:
        progress: the listener.
        stream: the terminal.
        patience_s: seconds after which the line appears.
        interval_s: seconds between two updates.
    """

    def write(done: threading.Event) -> None:
        if done.wait(patience_s):
            return
        while not done.wait(interval_s):
            stream.write(WIPE + progress.line())
            stream.flush()
        stream.write(WIPE)
        stream.flush()

    with _meanwhile(progress, write):
        yield


@contextmanager
def logged(progress: Progress, stream: TextIO, patience_s: float = PATIENCE_S, longest_s: float = LONGEST_S) -> Iterator[None]:
    """Write the line of ``progress`` more and more rarely inside the context.

    Args:
        progress: the listener.
        stream: the log.
        patience_s: seconds after which the first line is written, and until the second.
        longest_s: the most seconds between two lines.
    """
    with _meanwhile(progress, partial(log, progress, stream, patience_s, longest_s)):
        yield


def log(progress: Progress, stream: TextIO, patience_s: float, longest_s: float, done: threading.Event) -> None:
    """Write lines as :func:`logged` does, until an event."""
    pause = patience_s
    while not done.wait(pause):
        stream.write(f"eqsat_mem: planning {progress.line()}\n")
        stream.flush()
        pause = min(time.perf_counter() - progress.started, longest_s)


@contextmanager
def _meanwhile(progress: Progress, write: Callable[[threading.Event], None]) -> Iterator[None]:
    """Inside the context ``progress`` listens, and a thread writes what it says until the event that it is given."""
    done = threading.Event()

    def run() -> None:
        with suppress(ValueError, OSError):  # the stream is closed meanwhile
            write(done)

    writer = threading.Thread(target=run, name="eqsat_mem progress", daemon=True)
    writer.start()
    try:
        with listening(progress):
            yield
    finally:
        done.set()
        writer.join()
