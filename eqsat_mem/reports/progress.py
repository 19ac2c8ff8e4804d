"""Progress on a terminal when planning takes longer than a second: one line on stderr that is rewritten, and erased at the end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TextIO

from eqsat_mem.events import Began, Ended, Event, Explaining, StageBegan, Tried, anyone_listens, listening
from eqsat_mem.reports.debug import Debug, debug_level

PATIENCE_S = 1.0
"""The seconds after which the line appears."""
INTERVAL_S = 0.2
"""The seconds between two updates of the line."""
WIPE = "\r\x1b[K"
"""The characters that erase the terminal's line."""


class Progress:
    """A listener that follows the progress of planning, which :meth:`line` describes."""

    def __init__(self, name: str) -> None:
        self.name, self.stage = name, "trace"
        self.started = time.perf_counter()
        self.depth = self.trees = self.searches = 0

    def __call__(self, event: Event) -> None:
        match event:
            case Began():
                self.depth += 1
            case Ended():
                self.depth -= 1
            case StageBegan() if self.depth == 1 and not self.searches:
                self.stage = event.stage
            case Tried():
                self.trees += 1
            case Explaining():
                self.stage, self.searches = "explaining", event.searches

    def line(self) -> str:
        """Return the progress of planning in one line."""
        done = f"{self.searches} searches" if self.searches else f"{self.trees} loop trees" if self.trees else ""
        words = [self.name, self.stage, done, f"{time.perf_counter() - self.started:.0f} s"]
        return ", ".join(word for word in words if word)


@contextmanager
def watched(name: str) -> Iterator[None]:
    """Report on planning inside the context: at the level of ``EQSAT_MEM_DEBUG`` if it is set, else as progress on a terminal.

    Nothing is reported if another listener is active.

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
            else:
                stack.enter_context(on_terminal(name))
        yield


@contextmanager
def on_terminal(name: str) -> Iterator[None]:
    """Show progress inside the context if stderr is a terminal."""
    if not _is_terminal(sys.stderr):
        yield
        return
    with shown(Progress(name), sys.stderr):
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
    done = threading.Event()

    def write() -> None:
        if done.wait(patience_s):
            return
        while not done.wait(interval_s):
            stream.write(WIPE + progress.line())
            stream.flush()
        stream.write(WIPE)
        stream.flush()

    writer = threading.Thread(target=write, name="eqsat_mem progress", daemon=True)
    writer.start()
    try:
        with listening(progress):
            yield
    finally:
        done.set()
        writer.join()
